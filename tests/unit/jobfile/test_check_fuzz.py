"""Thousands of damaged job files: each is planned, or refused with a message, never a traceback."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpurun.launcher.errors import GpurunError
from gpurun.launcher.jobfile.load import load_job
from gpurun.launcher.plan.build import build_plan
from gpurun.launcher.plan.model import Plan
from tests.known import known
from tests.unit.plan.machines import FakeGpu, FakeMachine

JOBS = (
    b"""\
name: gpt-splits
workload: gpt
params: {layers: 4, width: 256}
devices: cpu:2
global_batch: 64
precision: fp32
compare:
  strategy: [ddp, dp, single]
  device_count: [1, 2]
  split: [even, [48, 16], "3:1"]
baseline: {strategy: ddp, split: even}
steps: {warmup: 10, rounds: 28, launches: 6}
profile: {steps: 3, shapes: false, memory: false, stacks: false}
timeout: 10m
gradient_check: true
""",
    b"""\
workload: sleep
devices: [cuda:0, cuda:1]
global_batch: 9
accumulate: 2
seed: 7
compare:
  params: [{alpha_ms: 1.5}, {beta_ms: [2, 0.5]}]
  precision: [tf32, bf16]
  global_batch: [9, 18]
  seed: [1, 2]
timeout: 90
""",
    b"workload: mlp\nglobal_batch: 1\n",
)

LONG_NUMBER = b"9" * 5000

ODDITIES = (
    b"&a ", b"*a", b"!!python/object:os.system ", b"!!binary ", b"!x ", b"---\n", b"...\n",
    b"%YAML 1.1\n", b"<<: *a\n", b"? ", b": ", b"- ", b"[", b"]", b"{", b"}", b"|\n", b">-\n", b"'",
    b'"', b"\\", b"#", b"@", b"`", b"\t", b"\0", b"\xff", b"\xed\xa0\x80", b"\xef\xbb\xbf",
    b"\xe2\x80\xa8", b"\x85", b"\r", b".nan", b"-.inf", b"1e999", b"-1", b"0", b"0x", b"9" * 50,
    LONG_NUMBER, b"true", b"null", b"~", b"balanced", b"max", b"cpu:0", b"cuda:99", b"cpu:99999999999",
    b"3:1", b"0:0", b"1:" * 300 + b"1", b"even", b"[[[[[[", b"[" * 3000, b"{a: " * 2000, b"script: x\n",
    b"nodes: 2\n", b"\nname: ../..\n", b"\nname: \"\\0\"\n", b"\nworkload: \"\\0.py:b\"\n",
    b"\nworkload: " + b"x" * 5000 + b".py:b\n", b"\ntimeout: 1e-400\n", b"\nsplit: [[1]]\n",
    b"\nparams: {? [1, 2] : 3}\n", b"\nsteps: {rounds: 1e3}\n",
)  # fmt: skip
"""What YAML, Python or a plan might trip over."""

Mutation = Callable[[bytes, random.Random], bytes]


def flip_byte(job: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(job))
    return job[:at] + bytes([rng.randrange(256)]) + job[at + 1 :]


def cut(job: bytes, rng: random.Random) -> bytes:
    start = rng.randrange(len(job))
    return job[:start] + job[start + rng.randrange(1, 40) :]


def truncate(job: bytes, rng: random.Random) -> bytes:
    return job[: rng.randrange(len(job))]


def insert_oddity(job: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(job) + 1)
    return job[:at] + rng.choice(ODDITIES) + job[at:]


def replace_value(job: bytes, rng: random.Random) -> bytes:
    """An oddity in place of a whole value, where it gets past the parser more often."""
    lines = job.splitlines(keepends=True)
    at = rng.randrange(len(lines))
    key, colon, _ = lines[at].partition(b":")
    lines[at] = key + colon + b" " + rng.choice(ODDITIES) + b"\n"
    return b"".join(lines)


def swap_keys(job: bytes, rng: random.Random) -> bytes:
    lines = job.splitlines(keepends=True)
    first, second = rng.randrange(len(lines)), rng.randrange(len(lines))
    one, two = lines[first].partition(b":"), lines[second].partition(b":")
    lines[first], lines[second] = two[0] + one[1] + one[2], one[0] + two[1] + two[2]
    return b"".join(lines)


def repeat_line(job: bytes, rng: random.Random) -> bytes:
    lines = job.splitlines(keepends=True)
    lines.insert(rng.randrange(len(lines) + 1), rng.choice(lines))
    return b"".join(lines)


def change_number(job: bytes, rng: random.Random) -> bytes:
    digits = [at for at in range(len(job)) if job[at : at + 1].isdigit()]
    at = rng.choice(digits or [0])
    number = rng.choice(
        [b"0", b"-1", b"1.5", b"1e3", b"2147483647", b"4294967296", b'"7"', b"yes", b"[]", b"{}"]
    )
    return job[:at] + number + job[at + 1 :]


MUTATIONS: tuple[Mutation, ...] = (
    flip_byte, cut, truncate, insert_oddity, replace_value, swap_keys, repeat_line, change_number,
)  # fmt: skip


MACHINES = (FakeMachine(2, ()), FakeMachine(16, (FakeGpu("GPU-a"), FakeGpu("GPU-b"))))


@pytest.fixture(scope="module")
def job_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz") / "job.yaml"


def check(path: Path, overrides: tuple[str, ...], machine: FakeMachine) -> Plan | None:
    """What `gpurun check` does, `None` if it refuses; any other error gets through and fails the test."""
    plan: Plan | None = None
    refusal: GpurunError | None = None
    try:
        plan = build_plan(load_job(path, overrides), machine)
    except GpurunError as error:
        refusal = error
    if refusal is not None:
        assert refusal.exit_code in (2, 3)
        assert str(refusal).strip()
    return plan


@settings(max_examples=2500, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.sampled_from(JOBS),
    st.lists(st.sampled_from(MUTATIONS), min_size=1, max_size=4),
    st.integers(0, 2**32),
    st.sampled_from(MACHINES),
)
def test_no_damage_brings_a_traceback(
    job_file: Path, job: bytes, mutations: list[Mutation], seed: int, machine: FakeMachine
) -> None:
    rng = random.Random(seed)
    for mutate in mutations:
        job = mutate(job, rng) or b"\n"
    job_file.write_bytes(job)
    check(job_file, (), machine)


@settings(max_examples=300, deadline=None)
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


@settings(max_examples=500, deadline=None, suppress_health_check=[HealthCheck.too_slow])
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
