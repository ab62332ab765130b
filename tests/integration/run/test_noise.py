"""A program that competes for the cores is reported; threads of one rank that wait for each other are not."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gpurun.launcher.stats.core_waiting import QUEUE_PERCENT
from gpurun.launcher.worker.meters.cpu_time import waited_ns
from tests.integration.command import gpurun, write

pytestmark = pytest.mark.alone

needs_counts = pytest.mark.skipif(waited_ns() is None, reason="this kernel does not count it")
CORE = min(os.sched_getaffinity(0))

TWO_THREADS = f"""
import hashlib, json, os, threading, time
os.sched_setaffinity(0, {{{CORE}}})
from gpurun.launcher.worker.meters.cpu_time import others_ns
from gpurun.launcher.worker.meters.cpu_time import note_end, waited_ns

def work():
    hashlib.pbkdf2_hmac("sha256", b"", b"", 800_000)  # without the GIL
    note_end()

threads = [threading.Thread(target=work, name=f"replica{{i}}") for i in range(2)]
span, own, others = -time.monotonic_ns(), -time.process_time_ns(), -others_ns()
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
span += time.monotonic_ns()
print(json.dumps([(own + time.process_time_ns()) / span, (others + others_ns()) / span]))
print(json.dumps(max(waited_ns().values()) / span))
"""
"""Two threads on one core: prints, in shares of the time, what they and what others ran, and one's wait."""


@contextmanager
def hog() -> Iterator[None]:
    """A program that computes on `CORE` and nothing else."""
    code = f"import os; os.sched_setaffinity(0, {{{CORE}}})\nwhile 1: pass"
    process = subprocess.Popen([sys.executable, "-c", code])
    try:
        yield
    finally:
        process.kill()
        process.wait()


@needs_counts
def test_threads_that_wait_for_each_other_differ_from_a_program_that_takes_the_core() -> None:
    with hog():
        done = subprocess.run([sys.executable, "-c", TWO_THREADS], capture_output=True, text=True, check=True)
    (own, others), waited = (json.loads(line) for line in done.stdout.splitlines())
    # Whatever else runs here: the core is never idle, so what isn't theirs is the others', the hog's too.
    assert own + others == pytest.approx(1, abs=0.15)
    assert others > 0.1
    assert waited > own / 3  # one of the two waits while the other runs


JOB = """
    workload: mlp
    devices: cpu:2
    global_batch: 64
    compare: {strategy: [ddp, dp]}
    steps: {rounds: 2, launches: 1}
    profile: {steps: 0}
    gradient_check: false
"""


@pytest.mark.slow  # other load changes how much of the waiting is owed to this one
@needs_counts
def test_a_program_on_one_core_affects_both_strategies_and_the_report_says_so(tmp_path: Path) -> None:
    write(tmp_path, "job.yaml", JOB)
    with hog():
        result = gpurun(tmp_path, "job.yaml", "--out", "run")
    assert result.code == 0, result.err
    for variant in result.comparison["variants"]:
        assert any((rank["queue_percent"] or 0.0) > QUEUE_PERCENT for rank in variant["ranks"])
    assert result.comparison["fastest"] is None
    assert "of a step waits for cores" in " ".join(result.out.split())
