"""Whatever a rank does, the run ends, names the cause, keeps what was measured, and measures the rest."""

import json
import os
from pathlib import Path

import pytest

from launcher.stats.schedule import round_blocks
from tests.integration.command import MODEL_JOB, gpurun, misbehaving, write

ON_6_2 = "x.shape[0] == 2 and calls > 20"
"""True on rank 1 alone, in variant 6/2, once the gradients have been checked and the warm-up has begun."""


FAULTS = {
    "6/2": ("raise ValueError('no such thing')", "ValueError: no such thing"),
    "7/1": ("sys.exit(3)", "exit code 3"),
    "1/7": ("os._exit(4)", "exit code 4"),
    "2/6": ("os.kill(os.getpid(), signal.SIGKILL)", "SIGKILL"),
}
"""By split: what rank 1 does once the gradients have been checked and the warm-up has begun, and its name."""


def test_a_failing_rank_costs_its_variant_alone(tmp_path: Path) -> None:
    faults = "".join(
        f"\n    if x.shape[0] == {split.rpartition('/')[2]}: {body}" for split, (body, _) in FAULTS.items()
    )
    splits = ", ".join(f"[{split.replace('/', ', ')}]" for split in (*FAULTS, "5/3"))
    job = MODEL_JOB.replace("[6, 2], [5, 3]", splits)
    misbehaving(tmp_path, f"if os.environ['RANK'] == '1' and calls > 20:{faults}", job)
    result = gpurun(tmp_path, "job.yaml", "--out", "run")
    assert result.code == 4, result.err
    for split, (_, cause) in FAULTS.items():
        failed = result.variant(f"ddp-2-{split.replace('/', '-')}")
        assert failed["status"] == "failed"
        assert failed["reason"].startswith("rank 1")
        assert cause in failed["reason"]
        assert cause in result.err
        assert (tmp_path / "run" / failed["log"]).is_file()
    for other in ("ddp-2-even", "ddp-2-5-3"):
        assert result.variant(other)["status"] == "ok"
        assert result.variant(other)["rounds"] == 3
    assert result.variant("ddp-2-5-3")["vs_baseline"]["verdict"] != "baseline"


def test_rounds_from_before_a_failure_are_kept_and_not_run_again(tmp_path: Path) -> None:
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
    result = gpurun(tmp_path, "job.yaml", "--out", "run", "--set", "steps.rounds=4")
    assert result.code == 4, result.err
    assert result.variant("ddp-2-6-2")["status"] == "failed"
    assert result.variant("ddp-2-6-2")["rounds"] == 2
    before_failure = timed_before(tmp_path / "run", "01-ddp-2", 3, "ddp-2-6-2")
    others = ("ddp-2-even", "ddp-2-5-3")
    had_turn = {other: other in before_failure for other in others}
    for other in others:  # round 3 is run again, unless both had had their turn
        assert result.variant(other)["rounds"] == 4 + (had_turn[other] and not all(had_turn.values()))
    assert sorted(path.name for path in (tmp_path / "run" / "launches").iterdir()) == [
        "01-ddp-2",
        "01-ddp-2~2",
    ]


def timed_before(run: Path, launch: str, round_: int, variant: str) -> set[str]:
    """Variants whose turn in this round came before that of `variant`: it is kept where the round failed."""
    order = json.loads((run / "launches" / launch / "launch.json").read_text())
    variants = [one["id"] for one in order["variants"]]
    blocks = round_blocks(variants, order["baseline"], f"{order['run_dir']}/{launch}/{round_}")
    timed = [block.variant for block in blocks if block.kind == "timed"]
    return set(timed[: timed.index(variant)])


def test_out_of_memory_is_a_result_not_a_failure(tmp_path: Path) -> None:
    misbehaving(tmp_path, "if x.shape[0] == 6: torch.empty(1 << 50)")
    result = gpurun(tmp_path, "job.yaml", "--out", "run")
    assert result.code == 0, result.err
    assert result.variant("ddp-2-6-2")["status"] == "oom"
    assert result.variant("ddp-2-6-2")["vs_baseline"] is None
    assert result.variant("ddp-2-even")["status"] == "ok"
    assert result.variant("ddp-2-5-3")["status"] == "ok"
    assert "oom" in result.out


def test_a_hang_is_stopped_and_blamed_on_the_rank_that_the_others_wait_for(tmp_path: Path) -> None:
    misbehaving(tmp_path, f"if {ON_6_2}: time.sleep(1000)")
    result = gpurun(tmp_path, "job.yaml", "--out", "run", "--set", "timeout=5s")
    assert result.code == 4, result.err
    late = result.variant("ddp-2-6-2")
    assert late["status"] == "timeout"
    place = f"model.py:{line_of(tmp_path, 'time.sleep(1000)')}"
    assert f"rank 1 is in `misbehave` ({place}); rank 0 waits in all_reduce #" in late["reason"]
    assert late["log"].endswith("rank1.log")
    assert "rank 0 waits in all_reduce #" in result.err
    assert result.variant("ddp-2-even")["status"] == "ok"


def line_of(folder: Path, words: str) -> int:
    """Where in the model's file that stands."""
    lines = (folder / "model.py").read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if words in line)


def test_a_crash_shows_the_users_line_and_a_traceback_only_theirs(tmp_path: Path) -> None:
    misbehaving(
        tmp_path,
        """
        if calls > 20 and x.shape[0] == 2: __import__("ctypes").string_at(0)
        if calls > 20 and x.shape[0] == 3: raise ValueError("here")
        """,
    )
    result = gpurun(tmp_path, "job.yaml", "--out", "run")
    crash = f"{tmp_path}/model.py:{line_of(tmp_path, 'string_at')} in misbehave"
    assert f"SIGSEGV: Segmentation fault at {crash}" in result.variant("ddp-2-6-2")["reason"]
    assert "Fatal Python error: Segmentation fault" in result.err
    assert f'{tmp_path}/model.py", line {line_of(tmp_path, "ValueError")}, in misbehave' in result.err
    assert result.err.count("ValueError: here\n") == 2  # the headline, and the end of the traceback
    for noise in ("zygote", "runpy", "Extension modules", "worker/trainer.py", "torch/nn"):
        assert noise not in result.err


@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_mistake_before_any_variant_began_costs_one_attempt(tmp_path: Path, rank: str) -> None:
    """Also where rank 0 is further already."""
    misbehaving(tmp_path, "pass")
    with (tmp_path / "model.py").open("a") as file:
        file.write(f"""
def optimizer(parameters):
    return 3 if os.environ["RANK"] == "{rank}" else torch.optim.SGD(parameters, lr=0.1)

def with_optimizer():
    return Workload(Model(), batch, torch.nn.functional.cross_entropy, optimizer)
""")
    result = gpurun(tmp_path, "job.yaml", "--out", "run", "--set", "workload=model.py:with_optimizer")
    assert result.code == 4, result.err
    for variant in result.comparison["variants"]:
        assert variant["status"] == "failed"
        assert "model.py" in variant["reason"]
        assert "expected a torch.optim.Optimizer, got int" in variant["reason"]
    assert "Traceback" not in result.err
    assert [path.name for path in (tmp_path / "run" / "launches").iterdir()] == ["01-ddp-2"]


def test_all_ranks_leaving_with_0_is_a_failure_too(tmp_path: Path) -> None:
    misbehaving(tmp_path, "if calls > 20: os._exit(0)")
    result = gpurun(tmp_path, "job.yaml", "--out", "run")
    assert result.code == 4, result.err
    assert {variant["status"] for variant in result.comparison["variants"]} == {"failed"}


def test_resume_runs_what_failed_and_nothing_else(tmp_path: Path) -> None:
    misbehaving(tmp_path, "if x.shape[0] == 6 and not os.path.exists('fixed'): raise ValueError('broken')")
    assert gpurun(tmp_path, "job.yaml", "--out", "run").code == 4
    kept = (tmp_path / "run" / "variants" / "ddp-2-5-3" / "rank0.jsonl").read_bytes()
    (tmp_path / "fixed").touch()
    result = gpurun(tmp_path, "--resume", "run")
    assert result.code == 0, result.err
    assert result.variant("ddp-2-6-2")["status"] == "ok"
    assert result.variant("ddp-2-6-2")["vs_baseline"]["percent"] is not None
    assert (tmp_path / "run" / "variants" / "ddp-2-5-3" / "rank0.jsonl").read_bytes() == kept


def test_a_mistake_in_build_is_told_with_its_line_and_costs_no_traceback_of_ours(tmp_path: Path) -> None:
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
    result = gpurun(tmp_path, "job.yaml", "--out", "run", env={"PYTHONPATH": python_path(tmp_path)})
    assert result.code == 4, result.err
    assert "broken.py:2" in result.err
    assert result.err.count("NameError: name 'undefined_name' is not defined") == 1
    assert "1 other variant would build the same model and fail likewise: not started" in result.err
    assert "launcher/worker" not in result.err
    statuses = {one["id"]: one["status"] for one in result.comparison["variants"]}
    assert sorted(statuses.values()) == ["failed", "failed", "ok", "ok"]
    assert {variant_id for variant_id, status in statuses.items() if status == "ok"} == {
        one["id"] for one in result.comparison["variants"] if one["varied"]["params"]["width"] == 4
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


def python_path(folder: Path) -> str:
    """`folder`'s modules can be imported too."""
    return f"{folder}:{os.environ.get('PYTHONPATH', '')}"
