"""`split: balanced` as a user runs it: measured, solved, verified, kept and reported."""

import json
from pathlib import Path

import pytest

from tests.integration.command import Result, ending, gpurun, misbehaving, write

JOB = """
    name: balance
    workload: sleep
    params: {alpha_ms: [1, 9], beta_ms: [1, 2.5]}
    devices: cpu:2
    global_batch: 32
    compare: {split: [even, balanced]}
    steps: {rounds: 4}
    profile: {steps: 0}
"""
"""By hand (25, 7): 26 and 26.5 ms; even takes 49. The bounds leave room for one sample."""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Result:
    directory = tmp_path_factory.mktemp("balance")
    write(directory, "job.yaml", JOB)
    return gpurun(directory, "job.yaml", "--out", "run").ended()


@pytest.mark.alone
def test_the_slow_device_gets_few_samples_and_the_step_is_as_predicted(run: Result) -> None:
    found = run.variant("ddp-2-balanced")
    assert ending(found) == "ok"
    assert sum(found["split"]) == 32
    assert 6 <= found["split"][1] <= 8
    assert [rank["local_batch"] for rank in found["ranks"]] == found["split"]
    balanced = found["balanced"]
    assert balanced["optimum_ms"] >= 22
    assert balanced["even"]["step_ms"] >= 45
    assert [device["device"] for device in balanced["devices"]] == ["cpu:0", "cpu:1"]
    assert all(len(device["points"]) >= 4 for device in balanced["devices"])
    assert all(device["alpha_ci"] and device["beta_ci"] for device in balanced["devices"])
    assert found["step_ms"]["estimate"] < run.variant("ddp-2-even")["step_ms"]["estimate"]
    assert run.variant("ddp-2-even")["balanced"] is None


@pytest.mark.slow
@pytest.mark.alone
def test_strategies_that_share_out_the_optimizer_or_the_weights_are_balanced_alike(tmp_path: Path) -> None:
    write(
        tmp_path,
        "job.yaml",
        JOB.replace("split: [even, balanced]", "strategy: [zero1, fsdp], split: [balanced]"),
    )
    found = gpurun(tmp_path, "job.yaml", "--json", "--set", "steps={rounds: 1, launches: 1}").json["variants"]
    assert [(variant["strategy"], ending(variant)) for variant in found] == [("zero1", "ok"), ("fsdp", "ok")]
    assert all(6 <= variant["split"][1] <= 8 and variant["gradient_error"] < 1e-5 for variant in found)


@pytest.mark.alone
def test_the_report_shows_how_it_was_found_and_how_to_train_with_it(run: Result) -> None:
    said = gpurun(run.directory, "report", "run", "--details").out
    first, second = run.variant("ddp-2-balanced")["split"]
    assert f"ddp balanced {first}/{second}: " in said
    assert "T*/T = " in said
    assert "same costs, even (" in said
    assert f"split=({first}, {second}), rank=torch.distributed.get_rank()" in said
    assert "gpurun: " not in said


@pytest.mark.slow
@pytest.mark.alone
def test_a_resumed_run_keeps_the_split_that_was_found(run: Result) -> None:
    before = (run.directory / "run/variants/ddp-2-balanced/balance.json").read_bytes()
    status = run.directory / "run/variants/ddp-2-balanced/status.json"
    status.write_text(json.dumps({"status": "failed", "reason": "as if"}))
    (run.directory / "run/launches/01-ddp-2/events.jsonl").write_text("")
    again = gpurun(run.directory, "job.yaml", "--resume", "run").ended()
    assert (run.directory / "run/variants/ddp-2-balanced/balance.json").read_bytes() == before
    config = json.loads((run.directory / "run/launches/01-ddp-2~2/launch.json").read_text())
    assert config["variants"][-1]["split"] == json.loads(before)["best"]["split"]
    assert "measuring the devices" not in again.err


def test_the_plan_holds_it_unresolved_and_leaves_out_a_batch_that_is_too_small(tmp_path: Path) -> None:
    write(tmp_path, "job.yaml", JOB)
    plan = gpurun(tmp_path, "check", "job.yaml", "--json").json
    assert [variant["split"] for variant in plan["variants"]] == [[16, 16], []]
    three = ("--set", "devices=cpu:3", "--set", "params.alpha_ms=1", "--set", "params.beta_ms=1")
    shown = gpurun(tmp_path, "check", "job.yaml", *three, "--set", "global_batch=2").ended()
    assert "2 samples can't give" in shown.out


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.parametrize(
    ("options", "variant", "splits"),
    [
        (("strategy=dp",), "dp-2-balanced", ([26, 6], [25, 7], [24, 8])),
        (("params.alpha_ms=[1, 60]", "min_local_batch=0"), "ddp-2-balanced", ([32, 0],)),
        (
            ("global_batch=1", "min_local_batch=0", "compare.split=[balanced]"),
            "ddp-2-balanced",
            ([1, 0],),
        ),
    ],
    ids=["replicas of dp", "a device without samples", "fewer samples than devices"],
)
def test_every_kind_of_job_may_be_balanced(
    tmp_path: Path, options: tuple[str, ...], variant: str, splits: tuple[list[int], ...]
) -> None:
    write(tmp_path, "job.yaml", JOB)
    words = (word for option in (*options, "steps.rounds=2") for word in ("--set", option))
    found = gpurun(tmp_path, "job.yaml", "--out", "run", *words).ended().variant(variant)
    assert found["split"] in splits
    assert found["gradient_error"] < 1e-4


FAILING = """
    workload: model.py:build
    devices: cpu:2
    global_batch: 8
    compare: {split: [even, balanced]}
    steps: {rounds: 2}
    profile: {steps: 0}
"""


def test_memory_that_runs_out_bounds_the_split(tmp_path: Path) -> None:
    body = """
        from gpurun import device_index
        if device_index() == 1 and x.shape[0] > 2: torch.empty(1 << 50)
        time.sleep(0.005 * x.shape[0])  # more than what else a busy machine does
    """
    misbehaving(tmp_path, body, FAILING)
    result = gpurun(tmp_path, "job.yaml", "--out", "run")
    found = result.variant("ddp-2-balanced")
    assert (ending(found), found["split"]) == ("ok", [6, 2]), result.err
    assert found["balanced"]["devices"][1]["max_samples"] == 2
    assert result.variant("ddp-2-even")["status"] == "oom"
