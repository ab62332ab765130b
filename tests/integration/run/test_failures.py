"""Whatever a rank does, the run ends, names the cause, keeps what was measured, and measures the rest."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from gpurun.launcher.stats.schedule import shuffled
from tests.canonical import ALL_LEAVE, FAULTS
from tests.integration.command import MODEL_JOB, Result, ending, gpurun, misbehaving, write
from tests.whole import first

Made = Callable[[str], Result]


def test_a_failing_rank_costs_its_variant_alone_and_shows_the_users_line(canonical_run: Made) -> None:
    """Whatever the failure is; of an exception, the traceback too, and only the user's part of it."""
    result = canonical_run("failed")
    directory = result.directory
    assert result.code == 4, result.err
    for split, (body, named) in FAULTS.items():
        cause = named.format(directory=directory, line=line_of(directory, body))
        failed = result.variant(f"ddp-2-{split.replace('/', '-')}")
        assert failed["status"] == "failed"
        assert failed["reason"].startswith("rank 1")
        assert cause in failed["reason"]
        assert cause in result.err
        assert (directory / "run" / failed["log"]).is_file()
    left = result.variant(f"ddp-2-{ALL_LEAVE.replace('/', '-')}")
    assert left["status"] == "failed"
    assert "exit code 0" in left["reason"]
    for other in ("ddp-2-even", "ddp-2-6-4"):
        assert ending(result.variant(other)) == "ok"
        assert result.variant(other)["rounds"] == 3
    assert result.variant("ddp-2-6-4")["vs_baseline"]["verdict"] != "baseline"
    assert "Fatal Python error: Segmentation fault" in result.err
    raising = line_of(directory, "ValueError")
    assert f'{directory}/model.py", line {raising}, in misbehave' in result.err
    assert result.err.count("ValueError: no such thing\n") == 2  # the headline, and the end of the traceback
    for noise in ("zygote", "runpy", "Extension modules", "worker/training/trainer.py", "torch/nn"):
        assert noise not in result.err


@pytest.mark.parametrize("is_cold", first(1, [False, True]))
def test_rounds_from_before_a_failure_are_kept_and_not_run_again(is_cold: bool, tmp_path: Path) -> None:
    misbehaving(
        tmp_path,
        """
        if x.shape[0] == 2 and calls > 20 and os.path.exists(EVENTS):
            lines = open(EVENTS).read().splitlines()
            if json.loads(lines[-1])["round"] >= 3: raise ValueError("late")
        """,
    )
    with (tmp_path / "model.py").open("a") as file:
        file.write("\nimport json\nEVENTS = 'run/launches/01-ddp-2/events.jsonl'\n")
        file.write("print('has torch._dynamo:', 'torch._dynamo' in sys.modules)\n")
    result = gpurun(tmp_path, "job.yaml", "--out", "run", "--set", "steps.rounds=4", is_cold=is_cold).ended(4)
    assert result.variant("ddp-2-6-2")["status"] == "failed"
    assert result.variant("ddp-2-6-2")["rounds"] == 2
    before_failure = timed_before(tmp_path / "run", "01-ddp-2", 3, "ddp-2-6-2")
    others = ("ddp-2-even", "ddp-2-5-3")
    had_turn = {other: other in before_failure for other in others}
    for other in others:  # round 3 is run again, unless both had had their turn
        assert result.variant(other)["rounds"] == 4 + (had_turn[other] and not all(had_turn.values()))
    launches = sorted((tmp_path / "run" / "launches").iterdir())
    assert [path.name for path in launches] == ["01-ddp-2", "01-ddp-2~2"]
    # Further attempts are quicker to start; a fork of the tests' server always is.
    for path, imported in zip(launches, (not is_cold, True), strict=True):
        assert f"has torch._dynamo: {imported}\n" in (path / "log" / "rank1.log").read_text()


def timed_before(run: Path, launch: str, round_: int, variant: str) -> set[str]:
    """Variants whose turn in this round came before that of `variant`: it is kept where the round failed."""
    config = json.loads((run / "launches" / launch / "launch.json").read_text())
    variants = [variant["id"] for variant in config["variants"]]
    blocks = shuffled([*variants, "control"], f"{config['run_dir']}/{launch}/{round_}")
    return set(blocks[: blocks.index(variant)])


def test_a_hang_is_stopped_and_blamed_on_the_rank_that_the_others_wait_for(canonical_run: Made) -> None:
    result = canonical_run("hang").ended(4)
    late = result.variant("ddp-2-6-2")
    assert late["status"] == "timeout"
    place = f"model.py:{line_of(result.directory, 'time.sleep(1000)')}"
    assert f"in `misbehave` ({place}); rank 0 waits" in late["reason"]
    assert late["log"].endswith("rank1.log")
    assert "waits in all_reduce #" in result.err
    assert ending(result.variant("ddp-2-even")) == "ok"


def line_of(directory: Path, words: str) -> int:
    """The line of the model's file with these words."""
    lines = (directory / "model.py").read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if words in line)


def test_a_mistake_before_any_variant_began_costs_one_attempt(tmp_path: Path) -> None:
    """On either rank: also where rank 0 is further already."""
    misbehaving(
        tmp_path, "pass", MODEL_JOB.replace("compare: {", "compare: {params: [{rank: 0}, {rank: 1}], ")
    )
    with (tmp_path / "model.py").open("a") as file:
        file.write("""
def with_optimizer(rank):
    def optimizer(parameters):
        return 3 if os.environ["RANK"] == str(rank) else torch.optim.SGD(parameters, lr=0.1)

    return Workload(Model(), batch, torch.nn.functional.cross_entropy, optimizer)
""")
    result = gpurun(tmp_path, "job.yaml", "--out", "run", "--set", "workload=model.py:with_optimizer").ended(
        4
    )
    assert len(result.comparison["variants"]) == 6
    for variant in result.comparison["variants"]:
        assert variant["status"] == "failed"
        assert variant["reason"].startswith(f"rank {variant['varied']['params']['rank']} ")
        assert "model.py" in variant["reason"]
        assert "torch.optim.Optimizer, got int" in variant["reason"]
    assert "Traceback" not in result.err
    launches = sorted(path.name for path in (tmp_path / "run" / "launches").iterdir())
    assert [name.partition("-")[0] for name in launches] == ["01", "02"]
    assert "~" not in "".join(launches)


def test_resume_runs_what_failed_and_out_of_memory_is_a_result(canonical_run: Made) -> None:
    result = canonical_run("out_of_memory").ended()
    assert "measures ddp-2-6-2 again, next to the baseline ddp-2-even: it failed (rank 0" in result.err
    assert "leaves ddp-2-7-1 out" in result.err
    assert ending(result.variant("ddp-2-6-2")) == "ok"
    assert result.variant("ddp-2-6-2")["vs_baseline"]["percent"] is not None
    kept = result.directory / "run" / "variants" / "ddp-2-5-3" / "rank0.jsonl"
    assert kept.read_bytes() == (result.directory / "before").read_bytes()
    assert result.variant("ddp-2-7-1")["status"] == "oom"
    assert result.variant("ddp-2-7-1")["vs_baseline"] is None
    assert "oom" in result.out
    assert {ending(result.variant(f"ddp-2-{other}")) for other in ("even", "5-3")} == {"ok"}


@pytest.mark.slow
def test_a_device_that_fails_while_it_is_measured_costs_that_variant_alone(tmp_path: Path) -> None:
    job = MODEL_JOB.replace("[6, 2], [5, 3]", "balanced")
    misbehaving(tmp_path, "if x.shape[0] == 1: raise ValueError('not one')", job)
    result = gpurun(tmp_path, "job.yaml", "--out", "run").ended(4)
    lost = result.variant("ddp-2-balanced")
    assert lost["status"] == "failed"
    assert "ValueError: not one" in lost["reason"]
    assert "during balance of ddp-2-balanced" in result.err
    assert ending(result.variant("ddp-2-even")) == "ok"


def test_a_mistake_in_build_is_reported_with_its_line_and_costs_no_traceback_of_ours(tmp_path: Path) -> None:
    write(
        tmp_path,
        "broken.py",
        """
        def build(width=4):
            if width > 4: return undefined_name
            from model import build as good
            return good()
        """,
    )
    misbehaving(tmp_path, "pass", BROKEN_JOB)
    result = gpurun(tmp_path, "job.yaml", "--out", "run", env={"PYTHONPATH": python_path(tmp_path)}).ended(4)
    assert "broken.py:2" in result.err
    assert result.err.count("NameError: name 'undefined_name'") == 1
    assert "same way: not started" in result.err
    assert "launcher/worker" not in result.err
    statuses = {variant["id"]: ending(variant) for variant in result.comparison["variants"]}
    assert sorted(statuses.values()) == ["failed", "failed", "ok", "ok"]
    assert {variant_id for variant_id, status in statuses.items() if status == "ok"} == {
        each["id"] for each in result.comparison["variants"] if each["varied"]["params"]["width"] == 4
    }
    assert len(list((tmp_path / "run" / "launches").iterdir())) == 3  # of four: one failure was enough


BROKEN_JOB = """
    workload: broken.py:build
    devices: cpu:2
    global_batch: 4
    compare: {strategy: [ddp, dp], params: [{width: 4}, {width: 8}]}
    steps: {rounds: 1, launches: 1}
    profile: {steps: 0}
    gradient_check: false
"""


def python_path(directory: Path) -> str:
    """`directory`'s modules can be imported too."""
    return f"{directory}:{os.environ.get('PYTHONPATH', '')}"
