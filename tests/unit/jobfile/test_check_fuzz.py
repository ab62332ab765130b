"""Damaged job files: each is planned, or refused with a message, never a traceback."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpurun.launcher.jobfile.load import load_job
from gpurun.launcher.plan.build import build_plan
from tests.damage.jobs import JOBS, MACHINES, check, damaged_job
from tests.known import known
from tests.unit.plan.machines import FakeMachine


@pytest.fixture(scope="module")
def job_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz") / "job.yaml"


@pytest.mark.parametrize("seed", range(0, 300, 100))
def test_no_damage_brings_a_traceback(job_file: Path, seed: int) -> None:
    """A sample of what `python -m benchmarks fuzz job` tries."""
    for number in range(seed, seed + 100):
        chance = random.Random(number)
        job_file.write_bytes(damaged_job(chance))
        check(job_file, (), chance.choice(MACHINES))


@given(st.binary(max_size=300), st.text(max_size=100), st.sampled_from(MACHINES))
def test_noise_as_a_file_and_as_an_override(
    job_file: Path, content: bytes, override: str, machine: FakeMachine
) -> None:
    for text, overrides in ((content, ()), (JOBS[0], (override,)), (JOBS[0], (f"compare={override}",))):
        job_file.write_bytes(text)
        check(job_file, overrides, machine)


def test_the_undamaged_jobs_are_right(job_file: Path) -> None:
    """Otherwise the damaged ones would never get far."""
    for job in JOBS:
        job_file.write_bytes(job)
        assert build_plan(load_job(job_file), MACHINES[1]).variants


SPLITS = st.one_of(
    st.just("even"),
    st.lists(st.integers(0, 5), min_size=1, max_size=3).map(lambda parts: ":".join(map(str, parts))),
    st.lists(st.integers(0, 12), min_size=1, max_size=3),
)
CHOICES: dict[str, st.SearchStrategy[Any]] = {
    "strategy": st.sampled_from(["single", "dp", "ddp"]),
    "device_count": st.integers(1, 5),
    "split": SPLITS,
    "global_batch": st.integers(1, 12),
    "precision": st.sampled_from(["fp32", "tf32", "bf16"]),
    "accumulate": st.integers(1, 4),
    "params": st.dictionaries(st.sampled_from(["width", "layers"]), st.integers(0, 2), max_size=2),
    "seed": st.integers(0, 3),
}
DEVICES = st.sampled_from(
    ["auto", "cuda", "cpu:1", "cpu:4", ["cuda:0", "cuda:0"], ["cuda:1", "cuda:0"], ["cpu"]]
)
SEVERAL = {key: st.lists(choice, min_size=1, max_size=3) for key, choice in CHOICES.items()}
SHAPED_JOBS = st.fixed_dictionaries(
    {"workload": st.just("mlp"), "global_batch": CHOICES["global_batch"], "devices": DEVICES},
    optional={
        **{key: choice for key, choice in CHOICES.items() if key != "global_batch"},
        "compare": st.fixed_dictionaries({}, optional=SEVERAL),
        "baseline": st.fixed_dictionaries({}, optional=CHOICES),
    },
)


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(SHAPED_JOBS, st.sampled_from(MACHINES))
def test_jobs_of_the_right_shape_are_planned_soundly_or_refused(
    job_file: Path, job: dict[str, Any], machine: FakeMachine
) -> None:
    job_file.write_text(json.dumps(job))
    plan = check(job_file, (), machine)
    if plan is None:
        return
    ids = [variant.id for variant in plan.variants]
    assert len(set(ids)) == len(ids)
    assert plan.baseline in ids
    assert {variant_id for launch in plan.launches for variant_id in launch.variants} == set(ids)
    assert len({launch.id for launch in plan.launches}) == len(plan.launches)
    for variant in plan.variants:
        assert sum(variant.split) == variant.global_batch
        assert len(variant.split) == len(variant.devices)
        assert min(variant.split) >= known(variant.accumulate)
