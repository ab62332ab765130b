"""Micro-benchmarks and other job keys end to end: real processes, real gloo."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from gpurun.launcher.compare.model import Comparison
from gpurun.launcher.report.markdown import summary_markdown
from gpurun.launcher.rundir.files import RunDir, read_json
from tests.integration.command import ending, gpurun, write

ROOT = Path(__file__).resolve().parents[3]


def test_an_allreduce_becomes_a_curve(tmp_path: Path) -> None:
    job = "workload: allreduce\nparams: {max_mib: 1}\ndevices: cpu:2\nsteps: {rounds: 2}\n"
    write(tmp_path, "job.yaml", job)
    result = gpurun(tmp_path, "job.yaml", "--out", "run").ended()
    assert "global batch" not in result.err
    assert "bus GB/s" in result.out
    assert "all-reduce: " in result.out
    (variant,) = result.comparison["variants"]
    assert (ending(variant), variant["step_ms"], variant["samples_per_s"]) == ("ok", None, None)
    (curve,) = variant["probe"]["curves"]
    assert [point["size"] for point in curve["points"]] == [
        1 << 10,
        1 << 12,
        1 << 14,
        1 << 16,
        1 << 18,
        1 << 20,
    ]
    assert all(point["time_us"] > 0 for point in curve["points"])
    assert all(point["bus_gb_per_s"] == point["gb_per_s"] for point in curve["points"])  # 2·(2−1)/2 = 1
    again = gpurun(tmp_path, "report", "run", "--format", "table,tensorboard").ended()
    assert "bus GB/s" in again.out
    assert "bus GB/s" in summary_markdown(read_json(RunDir(tmp_path / "run").comparison, Comparison))


@pytest.mark.slow
def test_classics_run_on_their_own_batches_and_are_shown_next_to_the_published(tmp_path: Path) -> None:
    write(
        tmp_path,
        "job.yaml",
        """
        workload: alexnet_r
        devices: cpu:1
        threads: 1
        strategy: single
        global_batch: 2
        compare: {workload: [alexnet_r, lstm]}
        steps: {rounds: 1, launches: 1}
        profile: {steps: 0}
        gradient_check: false
        """,
    )
    result = gpurun(tmp_path, "job.yaml", "--out", "run").ended()
    assert "2 workloads, each" in result.out
    for variant in result.comparison["variants"]:
        assert variant["flop_per_s"] > 0
        assert variant["input_bytes_per_s"] > 0
        assert (variant["mfu"], variant["joules_per_sample"]) == (None, None)
    shown = [sys.executable, "-m", "benchmarks.shi2016", str(tmp_path / "run")]
    ours = json.loads(subprocess.check_output([*shown, "--json"], cwd=ROOT))["ours"]
    assert [(run["workload"], run["global_batch"]) for run in ours] == [("alexnet_r", 2), ("lstm", 2)]
    assert "AlexNet-R, batch 1024" in subprocess.check_output(shown, cwd=ROOT, text=True)


@pytest.mark.slow
def test_skipped_text_is_said_next_to_the_figures(tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("some text that is long enough")
    (tmp_path / "text" / "b.bin").write_bytes(b"\0")
    write(
        tmp_path,
        "job.yaml",
        """
        workload: gpt
        params: {layers: 1, width: 8, heads: 1, context: 4, text: text}
        devices: cpu:1
        threads: 1
        strategy: single
        global_batch: 2
        steps: {rounds: 1}
        profile: {steps: 0}
        """,
    )
    gpurun(tmp_path, "job.yaml", "--out", "run").ended()
    assert "b.bin (binary)" in gpurun(tmp_path, "report", "run", "--details").out
