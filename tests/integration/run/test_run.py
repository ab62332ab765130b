"""`gpurun job.yaml` end to end: real processes, real gloo, known answers."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpurun.launcher.compare.figures.ranks import read_traced
from gpurun.launcher.rundir.files import RunDir
from tests.integration.command import Result, ending, gpurun

Made = Callable[[str], Result]


@pytest.fixture
def naps(canonical_run: Made) -> Path:
    """A finished run of the sleep job; its directory holds `job.yaml` and `run`."""
    return canonical_run("splits").ended().directory


@pytest.fixture
def comparison(canonical_run: Made) -> Any:
    """What that run has recorded."""
    return canonical_run("splits").ended().comparison


FORMULA_MS = {"ddp-2-even": 25.0, "ddp-2-6-2": 35.0}


@pytest.fixture
def by_formula(naps: Path, tmp_path: Path) -> Result:
    """What `gpurun report` makes of that run as if its steps had taken what the formula says, within 1 %."""
    shutil.copytree(naps / "run", tmp_path / "run")
    for steps in tmp_path.glob("run/variants/*/rank?.jsonl"):
        lines = [json.loads(line) for line in steps.read_text().splitlines()]
        for step in (line for line in lines if line["kind"] in ("timed", "aa")):
            jitter = (step["round"] * 7 % 5 - 2 + step["order"] % 2) / 400
            step |= {
                "step_ns": round(FORMULA_MS[steps.parent.name] * (1 + jitter) * 1e6),
                "queue_ns": 0,
                "others_ns": 0,
            }
        steps.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return gpurun(tmp_path, "report", "run").ended()


def test_the_run_itself_ends_with_the_table_its_sentence_and_how_to_look_further(
    comparison: Any, canonical_run: Made
) -> None:
    said = canonical_run("splits").out
    assert "\nBars: " in said
    assert comparison["findings"][0]["text"] in said
    assert "gpurun view run" in said


def test_the_table_and_the_sentence_name_the_fastest_split(by_formula: Result) -> None:
    assert by_formula.out.startswith("Fastest  the baseline ddp 4/4; ")
    assert "slower" in by_formula.out


def test_the_figures_are_those_of_the_formula(by_formula: Result) -> None:
    comparison = json.loads(gpurun(by_formula.directory, "report", "run", "--format", "json").out)
    even, uneven = comparison["variants"]
    assert comparison["complete"]
    assert even["id"] == "ddp-2-even"
    assert "affected-by-load" not in [each["code"] for each in comparison["findings"]]
    assert comparison["fastest"] == "ddp-2-even"
    assert [rank["local_batch"] for rank in uneven["ranks"]] == [6, 2]
    assert even["step_ms"]["estimate"] == pytest.approx(25, rel=0.01)
    assert uneven["step_ms"]["estimate"] == pytest.approx(35, rel=0.01)
    assert uneven["vs_baseline"]["verdict"] == "slower"
    low, high = uneven["vs_baseline"]["ci"]
    assert 38 < low <= uneven["vs_baseline"]["percent"] <= high < 42
    assert even["samples_per_s"] == pytest.approx(8e3 / even["step_ms"]["estimate"])
    low, high = comparison["noise"]["ci"]
    assert low <= comparison["noise"]["aa_percent"] <= high


def test_a_sleep_never_undershoots(comparison: Any) -> None:
    """How far it overshoots is the machine's affair, and a benchmark's."""
    even, uneven = comparison["variants"]
    assert even["step_ms"]["estimate"] >= 25
    assert uneven["step_ms"]["estimate"] >= 35


def test_rank_1_sleeps_less_and_waits_in_the_backward_pass(comparison: Any) -> None:
    busy, waiting = comparison["variants"][1]["ranks"]
    slept_longer_ms = busy["phases_ms"]["forward"] - waiting["phases_ms"]["forward"]
    waited_ms = waiting["phases_ms"]["backward"] - busy["phases_ms"]["backward"]
    assert busy["phases_ms"]["forward"] >= 35
    assert 15 <= waiting["phases_ms"]["forward"] < busy["phases_ms"]["forward"]
    # Both begin and end a step together; how exact times are is shown on simulated devices, to a nanosecond.
    assert waited_ms == pytest.approx(slept_longer_ms, rel=0.5)
    assert waiting["step_ms"] == pytest.approx(busy["step_ms"], rel=0.2)
    assert busy["peak_gib"] == pytest.approx(sum(busy["memory_gib"].values()))
    assert busy["memory_gib"]["parameters"] > 0


def test_every_gradient_was_checked_before_the_timing(comparison: Any) -> None:
    for variant in comparison["variants"]:
        assert variant["gradient_error"] < 1e-5
        assert variant["gradient_reference"] == "one device"


def test_every_rank_has_a_trace_that_was_taken_apart_from_the_timing(naps: Path) -> None:
    import gzip

    for variant in ("ddp-2-even", "ddp-2-6-2"):
        for rank in (0, 1):
            path = naps / "run" / "variants" / variant / f"rank{rank}.pt.trace.json.gz"
            names = {
                event.get("name", "")
                for event in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
            }
            assert any(name.startswith("ProfilerStep") for name in names)


def test_the_trace_shows_what_each_rank_does_and_that_rank_1_waits(naps: Path, comparison: Any) -> None:
    parts = ("compute_ms", "exposed_transfer_ms", "exposed_wait_ms", "exposed_memcpy_ms", "idle_ms")
    for variant in comparison["variants"]:
        # How traced steps compare with timed ones is the machine's affair; that traces could be read isn't.
        traced = read_traced(RunDir(naps / "run"), variant["id"])
        assert traced is not None
        assert not traced.notes
        for rank in variant["ranks"]:
            assert sum(rank[part] for part in parts) == pytest.approx(rank["span_ms"], rel=1e-12)
            assert rank["input_ms"] <= rank["idle_ms"]
    busy, waiting = comparison["variants"][1]["ranks"]
    assert busy["idle_ms"] >= 35  # a sleep is no operator
    assert waiting["exposed_wait_ms"] >= 10
    assert busy["exposed_wait_ms"] < waiting["exposed_wait_ms"] / 2
    assert comparison["variants"][1]["exposed_comm_ms"]["trace"] == busy["exposed_comm_ms"]["trace"]


def test_leaving_communication_out_saves_what_rank_1_waits(naps: Path, comparison: Any) -> None:
    uneven = comparison["variants"][1]
    busy, waiting = (rank["exposed_comm_ms"]["ablation"] for rank in uneven["ranks"])
    assert waiting >= 10
    assert busy < waiting / 2
    assert uneven["exposed_comm_ms"]["ablation"] == busy
    for rank in (0, 1):
        lines = (naps / "run" / "variants" / "ddp-2-6-2" / f"rank{rank}.jsonl").read_text().splitlines()
        steps = [json.loads(line) for line in lines]
        assert {step["round"] for step in steps if step["kind"] == "ablation"} == set(range(1, 7))


def test_reports_come_from_the_run_directory_alone_and_without_torch(
    naps: Path, comparison: Any, tmp_path: Path
) -> None:
    code = (
        "import sys; sys.modules['torch'] = None; sys.argv = ['gpurun', *sys.argv[1:]];"
        "from gpurun.launcher.cli.main import main; main()"
    )
    moved = shutil.copytree(naps / "run", tmp_path / "elsewhere")
    args = ["report", str(moved), "--format", "table,json"]
    done = subprocess.run(
        [sys.executable, "-c", code, *args], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert comparison["findings"][0]["text"] in done.stdout


def test_json_is_the_comparison_with_its_figures(naps: Path, comparison: Any) -> None:
    result = gpurun(naps, "report", "run", "--format", "json")
    assert result.measured == comparison


def test_a_gate_over_single_launches_is_undecided_and_says_so(naps: Path) -> None:
    same = gpurun(naps, "diff", "run", "run")
    assert (same.code, same.err) == (0, "A and B are the same run: run\n")
    assert "A: run   B: run" in same.out.splitlines()
    assert not [line for line in same.out.splitlines() if line.endswith("…") or line.startswith("    ")]
    result = gpurun(naps, "diff", "run", "run", "--fail-slower", "1%", "--json").ended(6)
    assert "undecided at 1 %" in result.err
    found = result.json["gate"]
    assert found["outcome"] == "undecided"
    assert {row["why"] for row in found["rows"]} == {
        "run A has 1 launch and run B has 1 launch, and a verdict takes 6 of each run: "
        "set `steps: {launches: 6}`"
    }


def test_resuming_a_finished_run_measures_nothing(naps: Path, comparison: Any, tmp_path: Path) -> None:
    naps = shutil.copytree(naps, tmp_path / "naps")
    steps = (naps / "run" / "variants" / "ddp-2-even" / "rank0.jsonl").read_bytes()
    result = gpurun(naps, "--resume", "run").ended()
    assert (naps / "run" / "variants" / "ddp-2-even" / "rank0.jsonl").read_bytes() == steps
    assert comparison["findings"][0]["text"] in result.out


def test_another_job_is_not_resumed(naps: Path) -> None:
    result = gpurun(
        naps, "job.yaml", "--resume", "run", "--set", "global_batch=16", "--set", "compare.split=[even]"
    ).ended(2)
    assert "another job" in result.err


def test_a_new_run_never_overwrites_one(naps: Path) -> None:
    result = gpurun(naps, "job.yaml", "--out", "run").ended(2)
    assert "--resume run" in result.err


@pytest.fixture
def strategies(canonical_run: Made) -> Result:
    return canonical_run("strategies").ended()


def test_strategies_share_processes_after_their_first_launches(strategies: Result) -> None:
    """Launches in which all are measured are what counts."""
    assert strategies.measured == strategies.comparison
    run = strategies.directory / "run"
    groups = [path.name.split("-", 1)[1] for path in sorted((run / "launches").iterdir())]
    assert groups == ["single-1", "ddp-2", "dp-2", "zero1-2", *["together"] * 2]
    for variant in strategies.comparison["variants"]:
        assert ending(variant) == "ok"
        assert (variant["launches"], variant["rounds"]) == (2, 4)
        assert variant["gradient_error"] < 1e-6
        assert variant["step_ms"]["estimate"] >= 10
    # One device sleeps as long for the whole batch as two for half of it each: half the efficiency.
    single, ddp = (strategies.variant(name) for name in ("single-1", "ddp-2-even"))
    expected = single["step_ms"]["estimate"] / (2 * ddp["step_ms"]["estimate"])
    assert ddp["scaling_efficiency"] == pytest.approx(expected, rel=0.05)
    assert ddp["scaling_efficiency"] < 0.7


def test_strategies_that_share_processes_never_work_at_the_same_time(strategies: Result) -> None:
    """A rank that one of them doesn't need has no steps of it."""
    run = RunDir(strategies.directory / "run")
    ranks = {variant: set(run.read_steps(variant)) for variant in ("single-1", "dp-2-even", "ddp-2-even")}
    assert ranks == {"single-1": {0}, "dp-2-even": {0}, "ddp-2-even": {0, 1}}
    blocks = [event for event in run.read_events("05-together") if event.stage == "round"]
    assert {event.variant for event in blocks} == {each["id"] for each in strategies.comparison["variants"]}
    waiting = [event for event in run.read_events("05-together", 1) if event.stage == "round"]
    assert [event.variant for event in waiting] == [
        event.variant for event in blocks if event.variant in ("ddp-2-even", "zero1-2-even")
    ]
