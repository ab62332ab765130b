"""A real TensorBoard on real event files: what its tabs get, and that nothing is left of it."""

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest
from click.testing import CliRunner

from gpurun.launcher.cli.main import cli
from gpurun.launcher.errors import MachineError, SpecError
from gpurun.launcher.report.tensorboard import write_tensorboard
from gpurun.launcher.rundir.files import RunDir, append_lines
from gpurun.launcher.rundir.records import StepRecord
from gpurun.launcher.tensorboard_plugin.view import TensorBoardServer, open_view
from tests.known import known
from tests.sample import COMPARISON
from tests.whole import IS_WHOLE

RUNS = {f"variants/{variant.id}" for variant in COMPARISON.variants if variant.step_ms}
HPARAMS = "experiment/defaultExperimentId/data/plugin/hparams"
VIEW = """\
import sys
from pathlib import Path
from gpurun.launcher.tensorboard_plugin.view import TensorBoardServer, open_view
with open_view(Path(sys.argv[1])) as server:
    print(server.url, server.process.pid, flush=True)
    server.wait()
print("closed", flush=True)
"""


@pytest.fixture(scope="module")
def logdir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose variants have two ranks with 3 rounds each."""
    run = RunDir(tmp_path_factory.mktemp("run"))
    for variant in COMPARISON.variants:
        for rank in variant.ranks:
            phases = {name: int(ms * 1e6) for name, ms in rank.phases_ms.items()}
            steps = [StepRecord("01", n, 0, n, "timed", 10**7, phases, None) for n in (1, 2, 3)]
            append_lines(run.steps(variant.id, rank.rank), steps)
    write_tensorboard(COMPARISON, run)
    return run.path


@pytest.fixture(scope="module")
def url(logdir: Path) -> Iterator[str]:
    """The address of a TensorBoard that has read `logdir`."""
    with open_view(logdir) as server:
        while not (
            set(get(f"{server.url}data/plugin/scalars/tags")) >= RUNS
            and get(f"{server.url}data/plugin/text/tags")
        ):
            pass  # every answer takes TensorBoard some milliseconds
        yield server.url


def get(url: str, body: Any = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.load(answer)


def test_it_listens_on_a_loopback_port(url: str) -> None:
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+/[\w-]{22}/", url)


def test_an_address_in_its_log_is_not_taken_for_its_own(
    logdir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as the name of a stranger's directory in a warning."""
    body = "import sys; print('http://evil.example/', file=sys.stderr, flush=True); print('http://own/')"
    monkeypatch.setattr(
        "gpurun.launcher.tensorboard_plugin.view.helper_argv", lambda *_: [sys.executable, "-c", body]
    )
    with open_view(logdir) as server:
        assert server.url == "http://own/"


def test_scalars_tab_has_a_run_per_variant(url: str) -> None:
    found = get(f"{url}data/plugin/scalars/tags")
    assert set(found) == RUNS
    assert {"step_ms/rank0", "step_ms/rank1", "step_ms/round", "phases_ms/rank0/forward"} <= set(
        found["variants/ddp-2-even"]
    )
    points = get(f"{url}data/plugin/scalars/scalars?run=variants%2Fddp-2-even&tag=step_ms%2Frank0")
    assert [(step, value) for _, step, value in points] == [(0, 10.0), (1, 10.0), (2, 10.0)]


def test_hparams_tab_has_the_split_next_to_the_metrics(url: str) -> None:
    statuses = ["STATUS_SUCCESS", "STATUS_FAILURE"]
    body = {
        "experimentName": "",
        "allowedStatuses": statuses,
        "colParams": [],
        "startIndex": 0,
        "sliceSize": 99,
    }
    groups = {
        group["name"].rpartition("/")[2]: group
        for group in get(f"{url}{HPARAMS}/session_groups", body)["sessionGroups"]
    }
    assert set(groups) == {variant.id for variant in COMPARISON.variants}
    row = groups["ddp-2-40-24"]
    metrics = {metric["name"]["tag"]: metric["value"] for metric in row["metricValues"]}
    assert row["hparams"]["split"] == "40/24"
    assert metrics["step_ms"] == pytest.approx(47.9)
    assert metrics["samples_per_s"] == pytest.approx(1336.1)
    assert groups["dp-2-48-16"]["sessions"][0]["status"] == "STATUS_FAILURE"
    columns = get(f"{url}{HPARAMS}/experiment", {"experimentName": ""})["hparamInfos"]
    assert {column["name"] for column in columns if column["differs"]} == {
        "split",
        "strategy",
        "device_count",
    }


def test_custom_scalars_tab_has_a_chart_per_question(url: str) -> None:
    (category,) = get(f"{url}data/plugin/custom_scalars/layout")["category"]
    titles = [chart["title"] for chart in category["chart"]]
    assert [title.split("?")[0] for title in titles] == [
        "Which variant is fastest",
        "Where does a step's time go",
        "Do ranks wait",
    ]


def test_text_tab_has_the_summary_as_a_table(url: str) -> None:
    assert get(f"{url}data/plugin/text/tags") == {".": ["summary"]}
    (page,) = get(f"{url}data/plugin/text/text?run=.&tag=summary")
    assert "<table>" in page["text"]
    assert "ddp 48/16" in page["text"]


def test_nothing_is_left_of_it(logdir: Path) -> None:
    """Whatever signal ends it. All start at the same time, since that takes seconds."""
    command = [sys.executable, "-c", VIEW, str(logdir)]
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)[0 if IS_WHOLE else -1 :]
    views = [
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) for _ in numbers
    ]
    for number, view in zip(numbers, views, strict=True):
        _, pid = known(view.stdout).readline().split()
        server = psutil.Process(int(pid))
        family = [server, *server.children(recursive=True)]
        os.kill(view.pid, number)
        assert view.communicate()[0] == ("closed\n" if number == signal.SIGINT else "")
        _, alive = psutil.wait_procs(family, timeout=10)
        assert alive == []


def test_the_printed_address_opens_our_tab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with subprocess.Popen(["true"]) as ended:
        server = TensorBoardServer("http://127.0.0.1:6006/", ended)
        monkeypatch.setattr(
            "gpurun.launcher.tensorboard_plugin.view.open_view", lambda *_, **__: nullcontext(server)
        )
        empty = CliRunner().invoke(cli, ["view", str(tmp_path)])
        (tmp_path / "events.out.tfevents.1").touch()
        shown = CliRunner().invoke(cli, ["view", str(tmp_path)])
    assert "http://127.0.0.1:6006/#gpurun " in shown.output
    assert f"{tmp_path} has no run" in " ".join(empty.output.split())
    assert "event file" not in shown.output


def test_a_run_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="nothing-here"), open_view(tmp_path / "nothing-here"):
        pass


@pytest.mark.slow
def test_a_port_in_use_is_named(url: str, logdir: Path) -> None:
    port = known(urlsplit(url).port)
    with pytest.raises(MachineError, match=str(port)), open_view(logdir, port=port):
        pass


def test_without_tensorboard_it_says_how_to_get_it(logdir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MachineError, match="pip install tensorboard"), open_view(logdir):
        pass
