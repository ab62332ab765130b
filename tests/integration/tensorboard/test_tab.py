"""The GPURUN tab's server in a real TensorBoard: its routes, its files, and what it refuses."""

import gzip
import http.client
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tomllib
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from email.message import Message
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
from click.testing import CliRunner
from tensorboard.plugins.base_plugin import TBContext

from gpurun.launcher.cli.main import cli
from gpurun.launcher.report.tables_on_request import shown_table
from gpurun.launcher.rundir.files import RunDir, append_lines
from gpurun.launcher.rundir.records import StepRecord
from gpurun.launcher.tensorboard_plugin.plugin import MIME_TYPES, STATIC, static_files
from gpurun.launcher.tensorboard_plugin.timeline.indexing import ENTRY
from gpurun.launcher.tensorboard_plugin.view import open_view
from gpurun.launcher.trace.model import TABLES, TraceReport
from tests.unit.trace.trace_files import kernel, launch, rank_info, span, step, write
from tests.whole import first

ROOT = Path(__file__).resolve().parents[3]
RUN = "job/2026-11-21_14-02-11"
VARIANT = "ddp-2-even"
BROKEN = "ddp-2-40-24"
ALL_REDUCE = "ncclDevKernel_AllReduce_Sum_f32_RING_LL"
VIEW = """\
import sys
from pathlib import Path
from gpurun.launcher.tensorboard_plugin.view import open_view
with open_view(Path(sys.argv[1])) as server:
    print(server.url, server.process.pid, flush=True)
    server.wait()
"""


def trace(directory: Path, rank: int, delay_us: int, repeats: int = 1) -> Path:
    """One rank's trace: a kernel, and a collective for which rank 0 is late."""
    events = [step(1, 0, 200)]
    for n in range(repeats):
        at, number = 300 * n, 10 * n
        events += [launch(at + 10, 2, number + 1), launch(at + 40, 2, number + 2)]
        events += [
            kernel("gemm", at + 20, 30 + delay_us, number + 1),
            kernel(ALL_REDUCE, at + 50 + delay_us, 50 - delay_us, number + 2, stream=20),
        ]
    return write(directory / f"rank{rank}.pt.trace.json.gz", events, **rank_info(rank, 2))


@pytest.fixture(scope="module")
def logdir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with two variants, the traces of one of which are damaged, and a directory of other traces."""
    root = tmp_path_factory.mktemp("log")
    run = RunDir(root / RUN)
    run.path.mkdir(parents=True)
    shutil.copy(ROOT / "tests" / "data" / "comparison.json", run.comparison)
    for rank in (0, 1):
        steps = [StepRecord("01", n, 0, 0, "timed", 10**7 + rank, {"forward": 5}, 1 << 30) for n in (1, 2)]
        append_lines(run.steps(VARIANT, rank), steps)
        trace(run.variant(VARIANT), rank, 30 * (rank == 0))
    run.variant(BROKEN).mkdir()
    whole = run.trace(VARIANT, 0).read_bytes()
    run.trace(BROKEN, 0).write_bytes(gzip.compress(gzip.decompress(whole).replace(b'"ts":', b'"ts"', 1)))
    (root / "theirs").mkdir()
    shutil.copy(run.trace(VARIANT, 0), root / "theirs" / "worker0.123.pt.trace.json.gz")
    shutil.copytree(ROOT / "docs" / "runs" / "gpt-splits" / "variants" / "ddp-2-28-4", root / "recorded")
    return root


@pytest.fixture(scope="module")
def url(logdir: Path) -> Iterator[str]:
    with open_view(logdir) as server:
        yield server.url


def fetch(url: str, route: str, **parameters: Any) -> tuple[int, bytes, Message]:
    query = urllib.parse.urlencode(parameters, doseq=True)
    try:
        with urllib.request.urlopen(f"{url}data/plugin/gpurun/{route}?{query}", timeout=60) as answer:
            return answer.status, answer.read(), answer.headers
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read(), error.headers


def get(url: str, route: str, **parameters: Any) -> Any:
    """The answer as it is when it is there; TensorBoard itself slows the asking down."""
    while True:
        code, body, _ = fetch(url, route, **parameters)
        assert code == 200, body
        answer = json.loads(body)
        if answer.get("state") not in ("indexing", "building"):
            return answer


def of(variant: str = VARIANT, run: str = RUN) -> dict[str, str]:
    return {"run": run, "variant": variant}


def test_the_tab_is_there_without_any_setting(url: str) -> None:
    with urllib.request.urlopen(f"{url}data/plugins_listing", timeout=30) as answer:
        listed = json.load(answer)["gpurun"]
    assert listed["enabled"]
    assert listed["tab_name"] == "GPURUN"
    path = urllib.parse.urlsplit(url).path
    assert listed["loading_mechanism"]["module_path"] == f"{path}data/plugin/gpurun/static/index.js"


def test_the_entry_point_names_the_plugin(tmp_path: Path) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    module, _, name = project["entry-points"]["tensorboard_plugins"]["gpurun"].partition(":")
    loader = getattr(importlib.import_module(module), name)()
    assert loader.load(TBContext(logdir=str(tmp_path))).plugin_name == "gpurun"


def test_runs_are_listed_with_what_they_are(url: str) -> None:
    answer = get(url, "runs")
    kinds = {RUN: "gpurun", "theirs": "traces", "recorded": "traces"}
    assert {each["name"]: each["kind"] for each in answer["runs"]} == kinds
    run = get(url, "run", run=RUN)
    assert run["comparison"]["name"] == "gpt-splits"
    assert {each["id"] for each in run["variants"] if each["traces"]} == {VARIANT, BROKEN}
    assert [each["id"] for each in get(url, "run", run="theirs")["variants"]] == ["traces"]


def test_what_has_not_changed_is_not_sent_again(url: str) -> None:
    _, _, headers = fetch(url, "run", run=RUN)
    query = urllib.parse.urlencode({"run": RUN})
    request = urllib.request.Request(
        f"{url}data/plugin/gpurun/run?{query}", headers={"If-None-Match": headers["ETag"]}
    )
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(request, timeout=30)
    with caught.value as answer:
        assert answer.code == 304
        assert answer.read() == b""


def test_steps_and_progress_come_from_the_workers_files(url: str) -> None:
    steps = get(url, "steps", **of())["variants"][VARIANT]
    assert steps["ranks"] == [0, 1]
    assert steps["step_ms"] == pytest.approx([10.000001] * 2)
    assert steps["by_rank_ms"][0] == [10.0, 10.0]
    assert get(url, "progress", run=RUN)["status"] in ("done", "running")


def test_the_timeline_is_indexed_and_answered(url: str, logdir: Path) -> None:
    meta = get(url, "timeline/meta", **of())
    lanes = [lane["lane"] for rank in meta["ranks"] for lane in rank["lanes"]]
    window = get(
        url,
        "timeline/window",
        **of(),
        from_ns=0,
        to_ns=meta["end_ns"],
        width_px=1000,
        lanes=",".join(map(str, lanes)),
    )
    assert window["version"] == meta["version"]
    assert {ALL_REDUCE, "gemm", "cudaLaunchKernel"} == set(window["names"])
    (link,) = window["links"]
    event = get(url, "timeline/event", **of(), id=link["parts"][1][3])
    assert [each["wait_ns"] for each in event["collective"]["ranks"]] == [0, 30_000]
    assert get(url, "timeline/search", **of(), q="gemm")["total"] == 2
    assert get(url, "timeline/selection", **of(), from_ns=0, to_ns=10)["span_ns"] == 10
    assert get(url, "breakdown", **of())["ranks"][1]["typical"]["exposed_wait_ms"] == pytest.approx(0.03)
    assert get(url, "operators", **of(), against=VARIANT, kind="kernels")["rows"][0]["difference_ms"] == 0
    assert not list(logdir.rglob(".*"))


def test_anybodys_traces_have_a_timeline(url: str) -> None:
    assert get(url, "timeline/meta", **of("traces", "theirs"))["state"] == "ready"


def test_a_damaged_trace_disables_only_itself(url: str) -> None:
    answer = get(url, "timeline/meta", **of(BROKEN))
    assert answer["state"] == "broken"
    (problem,) = answer["problems"]
    assert problem["file"] == "rank0.pt.trace.json.gz"
    assert problem["byte"] is not None
    assert get(url, "operators", **of(), against=BROKEN)["state"] == "broken"
    assert get(url, "timeline/meta", **of())["state"] == "ready"
    assert get(url, "timeline/meta", **of("ddp-2-3-1"))["state"] == "none"


@pytest.mark.slow
def test_a_trace_that_changes_is_indexed_again(url: str, logdir: Path) -> None:
    run = RunDir(logdir / RUN)
    before = get(url, "timeline/meta", **of(BROKEN))
    assert before["state"] == "broken"
    shutil.copy(run.trace(VARIANT, 0), run.trace(BROKEN, 0))
    after = get(url, "timeline/meta", **of(BROKEN))
    assert after["num_events"] == 4
    run.trace(BROKEN, 0).write_bytes(gzip.compress(b'{"traceEvents": [{"ph": "X", '))
    assert get(url, "timeline/meta", **of(BROKEN))["state"] == "broken"


@pytest.mark.parametrize("choice", first(2, ["", "rank", "step"]))
def test_tables_have_the_figures_of_the_command(url: str, logdir: Path, choice: str) -> None:
    """A rank's own work is what the command says of its file alone; waiting needs the others' files too."""
    run = of("traces", "recorded")
    known = get(url, "tables", **run)
    assert known["table"] == "operators", "there are no kernels on a CPU"
    chosen = {choice: known[f"{choice}s"][-1]} if choice else {}
    path = logdir / "recorded" / ("rank1.pt.trace.json.gz" if choice == "rank" else "")
    steps = ["--steps", str(chosen["step"])] if choice == "step" else []
    done = CliRunner().invoke(cli, ["trace", str(path), *steps, "--json", "--show", "all"])
    report = msgspec.json.decode(done.stdout, type=TraceReport)
    for table in [
        each for each in TABLES if choice != "rank" or each not in ("collectives", "critical-path")
    ]:
        answer = get(url, "tables", table=table, **run, **chosen)
        expected = json.loads(msgspec.json.encode(shown_table(report, table)))
        assert {key: answer[key] for key in expected} == expected
        assert len(answer["tables"]) > 0 or table in ("kernels", "shapes", "copies", "launches")  # of GPUs


def test_of_several_captures_tables_have_the_figures_of_the_one_that_is_shown(tmp_path: Path) -> None:
    """Though an older one has the step on all ranks."""
    for capture, first_steps in enumerate(((4, 4), (4, 5))):
        for rank, first_step in enumerate(first_steps):
            begin = 1_700_000_000_000_000 + 1_000 * capture
            events = [step(first_step, begin, 100), step(first_step + 1, begin + 100, 100)]
            events += [span("cpu_op", f"aten::mm{capture}", begin + at, 50) for at in (0, 100)]
            path = tmp_path / f"{capture}_rank{rank}.pt.trace.json.gz"
            write(path, events, **rank_info(rank, 2), gpurunClock="same")
    with open_view(tmp_path) as server:
        answer = get(server.url, "tables", table="operators", step=4, **of("traces", "."))
    assert [row["name"] for row in answer["tables"][0]["rows"] if row["name"]] == ["aten::mm1"]
    assert any("0_rank0.pt.trace.json.gz" in text for text in answer["warnings"])


@pytest.mark.slow
def test_a_ranks_collectives_have_its_own_waiting(url: str) -> None:
    waits = [
        get(url, "tables", table="collectives", **of(), **rank)["tables"][0]["rows"][0]["cells"][-1]["value"]
        for rank in ({}, {"rank": 0}, {"rank": 1})
    ]
    assert waits == [30.0, 0.0, 30.0]


def test_two_variants_trees_are_compared(url: str, logdir: Path) -> None:
    answer = get(url, "tables", table="operators", against=VARIANT, **of())
    assert (answer["tables"], answer["notes"]) == ([], ["No module or operator takes another time."])
    assert get(url, "tables", table="operators", against=BROKEN, **of())["state"] == "broken"


def test_the_ranks_come_as_one_trace(url: str) -> None:
    ready = get(url, "trace/merged", **of(), prepare=1)
    code, body, headers = fetch(url, "trace/merged", **of())
    assert (code, len(body)) == (200, ready["bytes"])
    assert headers["Content-Type"] == "application/gzip"
    assert headers["Content-Disposition"] == f'attachment; filename="{VARIANT}.pt.trace.json.gz"'
    events = json.loads(gzip.decompress(body))["traceEvents"]
    assert sum(event["name"] == "gemm" for event in events) == 2


def test_the_pages_files_have_their_types(url: str) -> None:
    assert "/static/index.js" in static_files()
    for route, path in static_files().items():
        code, body, headers = fetch(url, route.removeprefix("/"))
        assert (code, body) == (200, path.read_bytes())
        assert headers.get_content_type() == MIME_TYPES[path.suffix]
        assert headers["X-Content-Type-Options"] == "nosniff"


def test_the_content_security_policy_is_tensorboards(url: str) -> None:
    with urllib.request.urlopen(f"{url}data/plugin_entry.html?name=gpurun", timeout=30) as answer:
        policy = answer.headers["Content-Security-Policy"]
    assert "default-src 'self'" in policy
    assert "object-src 'none'" in policy
    assert "connect-src 'self';" in policy


@pytest.mark.parametrize(
    "path",
    [
        "static/../plugin.py",
        "static/%2e%2e/plugin.py",
        "static/..%2fplugin.py",
        "static/%2e%2e%2f%2e%2e%2f%2e%2e%2fetc/passwd",
        "static//etc/passwd",
        "static/index.js%00.css",
        "static/",
        "static",
        "plugin.py",
        "README.md",
        "../../../etc/passwd",
    ],
)
def test_no_other_file_can_be_had(url: str, path: str) -> None:
    server = urllib.parse.urlsplit(url).netloc
    connection = http.client.HTTPConnection(server, timeout=30)
    try:
        connection.putrequest("GET", f"/data/plugin/gpurun/{path}", skip_host=False)
        connection.endheaders()
        answer = connection.getresponse()
        body = answer.read()
    finally:
        connection.close()
    assert answer.status == 404, body
    assert b"root:" not in body
    assert b"class GpurunPlugin" not in body


@pytest.mark.parametrize(
    ("route", "parameters", "code"),
    [
        ("run", {}, 400),
        ("run", {"run": "../.."}, 404),
        ("run", {"run": "/etc"}, 404),
        ("run", {"run": "a\0b"}, 400),
        ("timeline/window", {"run": RUN, "variant": VARIANT}, 400),
        ("timeline/event", {"run": RUN, "variant": VARIANT, "id": 10**9}, 404),
        ("timeline/meta", {"run": RUN, "variant": "../ddp-2-even"}, 404),
        ("operators", {"run": RUN, "variant": VARIANT, "kind": "secrets"}, 400),
        ("steps", {"run": RUN, "variant": ["x"] * 60}, 413),
        ("tables", {"run": RUN, "variant": VARIANT, "table": "secrets"}, 400),
        ("tables", {"run": RUN, "variant": VARIANT, "rank": 9}, 404),
        ("tables", {"run": RUN, "variant": VARIANT, "step": "../1"}, 400),
    ],
)
def test_what_can_not_be_answered_is_said_in_a_sentence(
    url: str, route: str, parameters: dict[str, Any], code: int
) -> None:
    get(url, "timeline/meta", **of())
    got, body, headers = fetch(url, route, **parameters)
    assert got == code
    assert headers.get_content_type() == "application/json"
    assert set(json.loads(body)) == {"error"}


def test_only_reading_is_possible(url: str) -> None:
    request = urllib.request.Request(f"{url}data/plugin/gpurun/runs", data=b"x", method="POST")
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(request, timeout=30)
    with caught.value as answer:
        assert answer.code == 405


@pytest.mark.slow
def test_an_index_that_is_being_made_ends_with_its_server(tmp_path: Path) -> None:
    trace(tmp_path, 0, 0, repeats=20_000)
    command = [sys.executable, "-c", VIEW, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as view:
        assert view.stdout is not None
        url, pid = view.stdout.readline().split()
        _, body, _ = fetch(url, "timeline/meta", run=".", variant="traces")
        assert json.loads(body)["state"] == "indexing"
        server = psutil.Process(int(pid))
        while not any(ENTRY in each.cmdline() for each in server.children()):
            assert server.is_running()
        family = [server, *server.children(recursive=True)]
        os.kill(server.pid, signal.SIGKILL)
        view.kill()
    _, alive = psutil.wait_procs(family, timeout=10)
    assert alive == []


def test_static_files_are_a_fixed_list() -> None:
    names = {path.relative_to(STATIC).as_posix() for path in static_files().values()}
    assert all(not name.startswith("..") for name in names)
    assert {path.suffix for path in static_files().values()} <= set(MIME_TYPES)
