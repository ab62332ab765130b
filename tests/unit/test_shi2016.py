"""Our figures next to those of Shi et al. 2016, and the command that shows them."""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from benchmarks.shi2016.__main__ import main, show
from benchmarks.shi2016.published import NETWORKS, fastest, scaling, table7
from benchmarks.shi2016.report import Ours, ours_of, render_published
from gpurun.launcher.jobfile.kinds import default_batch
from tests.wording import Wording


def test_the_table_is_complete_and_as_sure_as_its_source() -> None:
    cells = table7()
    assert len(cells) == 392
    assert sum(cell.is_exact for cell in cells) == 178
    assert sum(cell.seconds is None for cell in cells) == 13
    assert Counter(cell.network for cell in cells).keys() == set(NETWORKS.values())
    for workload, network in NETWORKS.items():
        assert {cell.batch for cell in cells if cell.network == network} == {default_batch(workload)}


def test_rows_that_ran_something_else_are_never_fastest() -> None:
    gpus = [cell for cell in table7() if cell.threads is None]
    alexnet = [cell for cell in gpus if cell.network == "AlexNet-S"]
    assert min(alexnet, key=lambda cell: cell.seconds or 9).framework == "MXNet"
    best = fastest(alexnet)
    assert best is not None
    assert (best.framework, best.device, best.seconds) == ("Caffe", "GTX 1080", 0.021)
    assert not any(cell.is_usable for cell in gpus if (cell.framework, cell.network) == ("CNTK", "LSTM"))
    outlier = next(cell for cell in table7() if cell.seconds == 15.444)
    assert not outlier.is_usable


CASES = {
    "nothing of ours": [],
    "faster and slower devices": [
        Ours("fcn_s", "2 threads of a CPU", 64, 1, 0.211),
        Ours("fcn_s", "GPU NVIDIA H200, fp32", 64, 1, 0.002),
    ],
    "a slow run on one thread": [Ours("fcn_s", "1 thread of a CPU", 64, 1, 32.1, threads=1)],
    "splits of a constant batch": [
        Ours("fcn_r", f"{n}", 4096, n, seconds) for n, seconds in {1: 1.0, 2: 0.625, 4: 0.5}.items()
    ],
    "a time to doubt": [
        Ours("fcn_r", "1 thread of a CPU", 4096, 1, 4.0),
        Ours("fcn_r", "4 x 1 thread of a CPU", 4096, 4, 2.0, 1.0, 4, (1.9, 2.2), ("rank 2 waited",)),
    ],
    "another batch": [Ours("fcn_r", "1 thread of a CPU", 64, 1, 0.05)],
    "no time of one device": [
        Ours("fcn_r", "2 x 1 thread of a CPU, ddp 2048/2048", 4096, 2, 0.625, threads=2)
    ],
}


def test_ours_next_to_the_published(snapshot: Callable[[str, str], None]) -> None:
    shown = (f"== {name}\n\n{render_published(ours)}\n" for name, ours in CASES.items())
    snapshot("shi2016.txt", "\n".join(shown))
    assert {(line.network, line.global_batch) for line in scaling()} == {
        ("FCN-R", 4096), ("AlexNet-R", 1024), ("ResNet-56", 128)
    }  # fmt: skip


def variant(**changes: Any) -> SimpleNamespace:
    usual = {
        "workload": "resnet50", "step_ms": SimpleNamespace(estimate=500.0, ci=(400.0, 700.0)), "varied": {},
        "global_batch": 16, "status": "ok", "reason": None, "ranks": (),
        "devices": ("cpu:0",), "threads": 1, "strategy": "single", "split": (16,), "precision": "fp32",
        "kind": SimpleNamespace(is_ranked=True, runs_program=False), "split_name": "16",
    }  # fmt: skip
    return SimpleNamespace(**{**usual, **changes})


def test_a_run_gives_its_classics_and_names_another_version(wording: Wording) -> None:
    comparison = SimpleNamespace(
        variants=[
            variant(),
            variant(devices=("cuda:0",), varied={"params": {"version": 1.5}}),
            variant(workload="gpt"),
            variant(devices=("cpu:0", "cpu:1"), strategy="ddp", split=(8, 8)),
            variant(step_ms=None),
        ],
        job={"params": {}},
        host={"cpu_model": "a CPU", "gpus": [{"index": 0, "name": "H200"}]},
    )
    ours = ours_of(comparison)
    wording([measured.label for measured in ours])
    assert [measured.threads for measured in ours] == [1, None, 2]
    assert ours[0].seconds_ci == (0.4, 0.7)
    wording(render_published(ours))


def test_a_run_gives_its_doubts_with_its_times(wording: Wording) -> None:
    queued = SimpleNamespace(rank=1, device="cpu:1", queue_percent=49.75, throttled=None)
    affected = variant(ranks=(queued,), status="unsteady", reason="no steady step")
    comparison = SimpleNamespace(variants=[affected], job={}, host={})
    (ours,) = ours_of(comparison)
    wording(ours.caveats)


def test_the_command_shows_published_times() -> None:
    assert "ResNet-56, batch 128" in CliRunner().invoke(show).output
    data = json.loads(CliRunner().invoke(show, ["--json"]).output)
    assert (len(data["cells"]), len(data["scaling"]), data["ours"]) == (392, 18, [])


def test_what_is_no_run_is_a_mistake(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["shi2016", str(tmp_path)])
    monkeypatch.setattr("benchmarks.shi2016.__main__.prepare_streams", lambda: None)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert f"shi2016: {tmp_path}" in capsys.readouterr().err


def test_only_runs_are_recorded(wording: Wording) -> None:
    refused = CliRunner().invoke(show, ["--record"])
    assert refused.exit_code == 2
    wording(refused.output)


def test_a_run_that_is_there_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = [Ours("lstm", "1 thread of a CPU", 128, 1, 0.9, threads=1)]
    monkeypatch.setattr("benchmarks.shi2016.ours_of_runs", lambda runs: found)
    monkeypatch.setattr("benchmarks.timing.RESULTS", tmp_path / "RESULTS.md")
    assert CliRunner().invoke(show, ["--record", "run"]).exit_code == 0
    written = (tmp_path / "RESULTS.md").read_text()
    assert "## Shi et al." in written
    assert "CPU: 0.900 s" in written
