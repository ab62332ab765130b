"""What of a log directory the tab opens: nothing that lies outside it, whatever names and links are in it."""

import gzip
import json
import os
import shutil
import sys
import tomllib
import warnings
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest
from werkzeug.datastructures import MultiDict
from werkzeug.test import Client

from gpurun.launcher.compare.model import Comparison
from gpurun.launcher.rundir.claim import Running
from gpurun.launcher.tensorboard_plugin.answers.runs import run_answer, steps_answer, variant_ids
from gpurun.launcher.tensorboard_plugin.logdir import (
    TRACES,
    Listed,
    Listing,
    inside,
    read_end,
    read_inside,
    status,
)
from gpurun.launcher.tensorboard_plugin.plugin import GpurunPlugin
from gpurun.launcher.tensorboard_plugin.routes import ROUTES, Query, RequestRefused, TabServer, table_of
from gpurun.launcher.tensorboard_plugin.timeline import index_store
from gpurun.launcher.tensorboard_plugin.timeline.index_store import Traces, find, home_of, making
from gpurun.launcher.tensorboard_plugin.view import is_empty
from tests.sample import COMPARISON, SAMPLE

PYPROJECT = Path(__file__).resolve().parents[3] / "pyproject.toml"
SECRET = "a secret of the machine"


class Arguments(dict[str, str]):
    """Parameters of a request."""

    def getlist(self, key: str) -> list[str]:
        return [self[key]] if key in self else []


@pytest.fixture
def logdir(tmp_path: Path) -> Path:
    """A log directory with one run, next to a directory that may not be read."""
    run = tmp_path / "log" / "job" / "2026-11-21_14-02-11"
    (run / "variants" / "ddp-2-even").mkdir(parents=True)
    shutil.copy(SAMPLE, run / "comparison.json")
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "host.json").write_text(json.dumps({"hostname": SECRET}))
    (tmp_path / "outside" / "plan.json").write_text("{}")
    return tmp_path / "log"


def only(logdir: Path) -> Listed:
    (found,) = Listing(str(logdir)).all().values()
    return found


def test_a_merged_trace_next_to_the_ranks_is_no_rank(logdir: Path) -> None:
    theirs, ours = logdir / "theirs", logdir / "job" / "2026-11-21_14-02-11" / "variants" / "ddp-2-even"
    theirs.mkdir()
    merged = b'{"gpurun":{"merged":true},"traceEvents":[]}'
    for directory in (theirs, ours):
        for name in ("rank0.pt.trace.json.gz", "rank1.pt.trace.json.gz"):
            (directory / name).write_bytes(gzip.compress(b'{"traceEvents":[]}'))
        (directory / "rank-all.pt.trace.json.gz").write_bytes(gzip.compress(merged))
    for listed in Listing(str(logdir)).all().values():
        assert list(listed.traces_of("ddp-2-even").values()) == [0, 1]


def test_runs_and_directories_of_traces_are_found(logdir: Path) -> None:
    (logdir / "theirs").mkdir()
    (logdir / "theirs" / "worker0.pt.trace.json.gz").write_bytes(gzip.compress(b"{}"))
    (logdir / ".hidden").mkdir()
    (logdir / ".hidden" / "plan.json").write_text("{}")
    found = Listing(str(logdir)).all()
    assert {name: each.kind for name, each in found.items()} == {
        "job/2026-11-21_14-02-11": "gpurun",
        "theirs": "traces",
    }
    assert found["job/2026-11-21_14-02-11"].title("gpt") == "gpt · 2026-11-21 14:02"
    assert variant_ids(found["theirs"]) == [TRACES]


def test_the_runs_of_a_search_are_told_from_each_other(tmp_path: Path) -> None:
    search = tmp_path / "train-improve/2026-11-21_14-02-11"
    for stage in ("1-original", "2-alone"):
        (search / stage).mkdir(parents=True)
        (search / stage / "plan.json").write_text("{}")
    (search / "improve.json").write_text("{}")
    titles = [each.title("train") for each in Listing(str(tmp_path)).all().values()]
    assert sorted(titles) == ["train · 1-original · 2026-11-21 14:02", "train · 2-alone · 2026-11-21 14:02"]


@pytest.mark.parametrize("place", [None, "", "gs://bucket/runs", "/nowhere/at/all"])
def test_a_log_directory_that_is_none_has_no_runs(place: str | None) -> None:
    listing = Listing(place)
    assert listing.all() == {}
    assert not listing.any()


@pytest.mark.parametrize(
    "name",
    [
        "..",
        "../outside",
        "job/../../outside",
        "/etc",
        "//etc",
        "%2e%2e/outside",
        "..%2foutside",
        "job/2026-11-21_14-02-11/",
        "job\\..\\..\\outside",
        "job/2026-11-21_14-02-11\0",
        "\0",
        "",
        "~",
        ".",
        "a" * 100_000,
    ],
)
def test_only_names_out_of_the_listing_lead_anywhere(logdir: Path, name: str) -> None:
    server = TabServer(Listing(str(logdir)))
    common = {"variant": "ddp-2-even", "from_ns": "0", "to_ns": "1", "width_px": "16", "lanes": "0", "q": "x"}
    for route in ROUTES.keys() - {"/runs"}:
        with pytest.raises(RequestRefused) as caught:
            ROUTES[route](server, Query(Arguments(common | {"run": name, "id": "0"})))
        assert caught.value.code in (400, 404)


@pytest.mark.parametrize("variant", ["..", "../../..", "/etc", "ddp-2-even/", "\0", "%2e%2e"])
def test_only_variants_of_the_run_lead_anywhere(logdir: Path, variant: str) -> None:
    server = TabServer(Listing(str(logdir)))
    run = only(logdir).name
    with pytest.raises(RequestRefused):
        ROUTES["/steps"](server, Query(Arguments(run=run, variant=variant)))


def test_a_run_that_names_directories_elsewhere_has_no_such_variants(logdir: Path) -> None:
    comparison: Any = json.loads(SAMPLE.read_text())
    for number, name in enumerate(("../../../../outside", "..", "/etc", "ddp-2-even")):
        comparison["variants"][number]["id"] = name
    del comparison["variants"][4:]
    (only(logdir).path / "comparison.json").write_text(json.dumps(comparison))
    assert variant_ids(only(logdir)) == ["ddp-2-even"]


def test_links_that_lead_out_are_not_followed(logdir: Path) -> None:
    run = only(logdir).path
    (run / "host.json").symlink_to(logdir.parent / "outside" / "host.json")
    (run / "variants" / "ddp-2-even" / "rank0.pt.trace.json.gz").symlink_to("/etc/hostname")
    (run / "variants" / "ddp-2-even" / "rank0.jsonl").symlink_to("/etc/passwd")
    (logdir / "link").symlink_to(logdir.parent / "outside")
    (logdir / "loop").symlink_to(logdir)
    listed = only(logdir)
    answer = msgspec.json.encode(run_answer(listed)).decode()
    assert SECRET not in answer
    assert listed.traces_of("ddp-2-even") == {}
    assert steps_answer(listed, ["ddp-2-even"])["variants"]["ddp-2-even"]["total"] == 0


def test_names_that_are_no_text_and_links_to_themselves_keep_nothing_else_from_being_shown(
    logdir: Path,
) -> None:
    """A page asks by name, and gets JSON: both are text."""
    names = set(Listing(str(logdir)).all())
    shutil.copytree(min(path for path in logdir.iterdir() if path.is_dir()), logdir / "d\udcff")
    for directory in [path for path in logdir.rglob("*") if path.is_dir()]:
        (directory / "rank1\udcff.pt.trace.json.gz").write_bytes(b"{}")
        (directory / "itself").symlink_to("itself")
    server = TabServer(Listing(str(logdir)))
    answer = ROUTES["/runs"](server, Query(MultiDict()))
    assert msgspec.json.encode(answer)
    assert set(server.listing.all()) >= names
    assert all(name.isprintable() for name in server.listing.all())


def test_links_that_stay_inside_are(logdir: Path) -> None:
    run = only(logdir).path
    (run / "real.json").write_text(json.dumps({"hostname": "here"}))
    (run / "host.json").symlink_to("real.json")
    assert run_answer(only(logdir))["host"] == {"hostname": "here"}


def test_traces_that_links_lead_out_to_are_named_not_opened(logdir: Path) -> None:
    shutil.rmtree(logdir / "job")
    (logdir.parent / "outside" / "real.json").write_text('{"traceEvents": []}')
    (logdir / "rank0.pt.trace.json").symlink_to("../outside/real.json")
    (variant,) = run_answer(only(logdir))["variants"]
    assert variant["traces"] == []
    assert [each.file for each in variant["problems"]] == ["rank0.pt.trace.json"]
    (logdir / "real.json").write_text("{}")
    (logdir / "rank1.pt.trace.json").symlink_to("real.json")
    (variant,) = run_answer(only(logdir))["variants"]
    assert [each["rank"] for each in variant["traces"]] == [1]
    assert [each.file for each in variant["problems"]] == ["rank0.pt.trace.json"]


def test_traces_of_any_name_are_found_by_what_they_hold(tmp_path: Path) -> None:
    """As `export_chrome_trace` writes them; other JSON makes no directory one of traces."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "config.json").write_text("{}")
    assert is_empty(tmp_path)
    (tmp_path / "data" / "trace.json").write_text('{"schemaVersion": 1, "traceEvents": []}')
    (tmp_path / "data" / "rank3.json.gz").write_bytes(gzip.compress(b'{"traceEvents": []}'))
    assert not is_empty(tmp_path)
    (listed,) = Listing(str(tmp_path)).all().values()
    assert [(path.name, rank) for path, rank in listed.traces_of(TRACES).items()] == [
        ("rank3.json.gz", 3),
        ("trace.json", None),
    ]


def test_a_trace_that_is_written_again_is_another_version(tmp_path: Path) -> None:
    trace = tmp_path / "a.pt.trace.json"
    versions = set()
    for content in ("{}", "{ }"):
        trace.write_text(content)
        versions.add(run_answer(only(tmp_path))["version"])
    assert len(versions) == 2


def test_what_is_no_regular_file_is_not_opened(tmp_path: Path) -> None:
    root = tmp_path.resolve()
    os.mkfifo(root / "pipe")
    (root / "directory").mkdir()
    for name in ("pipe", "directory", "missing", "a\0b", "x" * 5000):
        assert inside(root, root / name) is None
        assert read_inside(root, root / name, 100) is None
        assert read_end(root, root / name, 100) == b""


def test_what_is_too_large_is_not_read_whole(tmp_path: Path) -> None:
    root = tmp_path.resolve()
    (root / "lines").write_bytes(b"one\ntwo\nthree\nfo")
    assert read_inside(root, root / "lines", 5) is None
    assert read_end(root, root / "lines", 10) == b"three\n"
    assert read_end(root, root / "lines", 100) == b"one\ntwo\nthree\n"


@pytest.mark.parametrize("content", [b"", b"{", b'{"name": 7}', b"\xff\xfe", b"[" * 100_000])
def test_a_damaged_comparison_counts_as_none(logdir: Path, content: bytes) -> None:
    run = only(logdir).path
    (run / "comparison.json").write_bytes(content)
    (run / "plan.json").write_bytes(content)
    answer = run_answer(only(logdir))
    assert answer["comparison"] is None
    assert answer["variants"] == []


def test_the_answer_about_a_run_is_its_comparison_and_more(logdir: Path) -> None:
    answer = msgspec.json.decode(msgspec.json.encode(run_answer(only(logdir))))
    assert msgspec.convert(answer["comparison"], Comparison) == COMPARISON
    assert [each["id"] for each in answer["variants"]] == [each.id for each in COMPARISON.variants]
    assert {each["status"] for each in answer["variants"]} == {each.status for each in COMPARISON.variants}


def test_a_run_without_a_writer_has_stopped(logdir: Path) -> None:
    run = only(logdir).path
    comparison: Any = json.loads((run / "comparison.json").read_text())
    (run / "comparison.json").write_text(json.dumps(comparison | {"complete": False}))
    assert status(only(logdir)) == "stopped"
    elsewhere = Running("another-host", "", 1, 1)
    (run / "running.json").write_bytes(msgspec.json.encode(elsewhere))
    assert status(only(logdir)) == "running"
    os.utime(run / "comparison.json", (0, 0))
    assert status(only(logdir)) == "stopped"


def traces_in(directory: Path) -> Traces:
    file = directory / "rank0.pt.trace.json"
    file.write_text("{}")
    return Traces(directory, (file,), directory)


def make(traces: Traces, key: str) -> None:
    with making(traces, key) as directory:
        (directory / "index.json").write_text(key)


def test_an_index_goes_when_its_traces_change(tmp_path: Path) -> None:
    traces = traces_in(tmp_path)
    first = traces.key()
    make(traces, first)
    assert find(traces, first) == home_of(traces) / first
    traces.files[0].write_text("{ }")
    second = traces.key()
    assert second != first
    assert find(traces, second) is None
    make(traces, second)
    assert [each.name for each in home_of(traces).iterdir()] == [second]


def test_a_build_that_fails_leaves_nothing(tmp_path: Path) -> None:
    traces = traces_in(tmp_path)
    with pytest.raises(ZeroDivisionError), making(traces, traces.key()) as directory:
        assert (directory / "start").write_text("half") / 0
    assert list(home_of(traces).iterdir()) == []


def test_the_cache_keeps_the_indexes_used_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_store, "MAX_CACHE_BYTES", 60)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    found = []
    for number in range(3):
        (tmp_path / str(number)).mkdir()
        found.append(traces_in(tmp_path / str(number)))
    for used_s, traces in zip((2, 1), found, strict=False):
        make(traces, traces.key())
        os.utime(home_of(traces) / traces.key() / "index.json", (used_s, used_s))
    make(found[2], found[2].key())
    assert [find(traces, traces.key()) is not None for traces in found] == [True, False, True]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("width_px", "0"),
        ("width_px", "99999"),
        ("width_px", "1e3"),
        ("width_px", "١٢٣"),
        ("from_ns", "9" * 40),
        ("from_ns", "nan"),
        ("to_ns", "0"),
        ("lanes", ""),
        ("lanes", "0,,1"),
        ("lanes", "-1"),
        ("lanes", "7"),
        ("lanes", ",".join(map(str, range(200)))),
    ],
)
def test_what_a_window_may_not_ask_is_refused(key: str, value: str) -> None:
    query = Query(Arguments({"from_ns": "0", "to_ns": "10", "width_px": "100", "lanes": "0"} | {key: value}))
    with pytest.raises(RequestRefused):  # noqa: PT012
        query.stretch()
        query.whole("width_px", 16, 8192)
        query.lanes(5)


def test_a_rank_without_a_step_has_no_table_of_it() -> None:
    ranks = [Mock(rank=rank, steps=[Mock(step=step)]) for rank, step in ((0, 4), (1, 5))]
    index = Mock(header=Mock(ranks=ranks))
    for rank in (0, 1):
        with pytest.raises(RequestRefused, match=f"there is no step {5 - rank}"):
            table_of(Mock(), Query(Arguments(rank=str(rank), step=str(5 - rank))), index, "kernels")
    assert table_of(Mock(), Query(Arguments(rank="1", step="5")), index, "kernels")


def damage(logdir: Path) -> None:
    """A run of which nothing can be read, and a link that leads to itself."""
    for name in (
        "comparison.json",
        "plan.json",
        "running.json",
        "variants/a/rank0.jsonl",
        "rank0.pt.trace.json.gz",
    ):
        path = logdir / "run" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"\x1f\x8b{[\0\xff")
    (logdir / "loop").symlink_to(logdir / "loop")


@pytest.mark.parametrize("fails", ["nothing", "import", "exit", "start"])
def test_tensorboard_starts_whatever_fails_in_the_plugin(
    fails: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TensorBoard's own application, with what its entry point names."""
    (entry,) = (each for each in tomllib.loads(PYPROJECT.read_text())["project"]["entry-points"].values())
    loader = EntryPoint("gpurun", entry["gpurun"], "tensorboard_plugins").load()
    damage(tmp_path)
    if fails == "import":
        monkeypatch.setitem(sys.modules, GpurunPlugin.__module__, None)
    elif fails != "nothing":
        error = SystemExit("no") if fails == "exit" else RuntimeError("no")
        monkeypatch.setattr(GpurunPlugin, "__init__", Mock(side_effect=error))
    with warnings.catch_warnings(action="ignore"):
        from tensorboard.backend.application import TensorBoardWSGIApp
    flags = SimpleNamespace(logdir=str(tmp_path), samples_per_plugin={}, window_title="", path_prefix="")
    app = TensorBoardWSGIApp(
        flags, [loader], data_provider=Mock(**{"list_plugins.return_value": ()}), deprecated_multiplexer=None
    )
    answer = Client(app).get("/data/plugins_listing")
    assert answer.status_code == 200
    assert ("gpurun" in json.loads(answer.text)) == (fails == "nothing")


def test_an_empty_directory_has_our_tab_and_one_with_other_things_to_show_has_not(tmp_path: Path) -> None:
    plugin = GpurunPlugin(SimpleNamespace(logdir=str(tmp_path)))
    assert plugin.is_active()
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "events.out.tfevents.1.host").touch()
    assert not plugin.is_active()
    (tmp_path / "rank0.pt.trace.json").touch()
    assert plugin.is_active()
    assert not GpurunPlugin(SimpleNamespace(logdir="s3://bucket/logs")).is_active()
