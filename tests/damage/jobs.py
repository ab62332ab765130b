"""Damaged job files: what YAML, Python or a plan might trip over."""

import random
from collections.abc import Callable
from pathlib import Path

from gpurun.launcher.errors import GpurunError
from gpurun.launcher.jobfile.load import load_job
from gpurun.launcher.plan.build import build_plan
from gpurun.launcher.plan.model import Plan
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
    a, b = lines[first].partition(b":"), lines[second].partition(b":")
    lines[first], lines[second] = b[0] + a[1] + a[2], a[0] + b[1] + b[2]
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


def damaged_job(chance: random.Random) -> bytes:
    """One of `JOBS`, damaged in up to four ways."""
    job = chance.choice(JOBS)
    for _ in range(chance.randint(1, 4)):
        job = chance.choice(MUTATIONS)(job, chance) or b"\n"
    return job


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
