"""torch's own tests of its launcher, with `gpurun torchrun` in its place: `launcher_tests FILE [FILE …]`.

The file lies outside of the repository: test/distributed/launcher/test_run.py of PyTorch, with the files next
to it (api_test.py starts functions, which no command line does). Each passes, or `EXPLAINED` says why not.
"""

import os
import re
import subprocess
import sys
import unittest
from collections.abc import Sequence
from hashlib import sha256
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import torch.distributed.run
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from benchmarks.timing import BIN, machine_facts, record, table

TIMEOUT_S = 120
INSIDE = "replaces a part of torch's agent, or pretends in its process that there are GPUs"
ELASTIC = "refused: `--nnodes 1:2`; a number of nodes that may change is `nodes: 1..2` in `gpurun run`"
EXPLAINED = {
    "test_launch_elastic": ELASTIC,
    "test_launch_elastic_agent_raise_exception": ELASTIC,
    "test_launch_elastic_multiple_agents": ELASTIC,
    "test_launch_elastic_worker_raise_exception": ELASTIC,
    "test_launch_shutdown": INSIDE,
    "test_nproc_gpu_launch_configurations": INSIDE,
    "test_nproc_xpu_launch_configurations": INSIDE,
}
"""Why a test does not pass, by its name."""


def main(files: Sequence[str]) -> None:
    """Runs the files, and writes the section "torch's launcher tests"."""
    torch.distributed.run.main = launched
    rows, failed = [], 0
    for file in files:
        for name, outcome in outcomes(Path(file)):
            said = EXPLAINED.get(name, outcome) if outcome != "passed" else outcome
            failed += outcome != "passed" and name not in EXPLAINED
            rows.append([Path(file).name, name, said])
    passed = sum(row[2] == "passed" for row in rows)
    sums = ", ".join(
        f"{Path(file).name} {sha256(Path(file).read_bytes()).hexdigest()[:12]}" for file in files
    )
    text = (
        f"Tests of PyTorch's launcher (SHA-256: {sums}), with `gpurun torchrun` in place of torchrun: "
        f"{passed} of {len(rows)} pass, {failed} fail; the others have a reason.\n\n"
    )
    record("torch's launcher tests", text + table(["file", "test", "outcome"], rows), machine_facts())


def launched(args: Sequence[str] | None = None) -> None:
    """`torch.distributed.run.main`, by the command."""
    words = sys.argv[1:] if args is None else list(args)
    argv = [str(BIN / "gpurun"), "torchrun", *map(str, words)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=TIMEOUT_S)
    sys.stdout.write(done.stdout)
    if done.returncode == 2:
        raise ValueError(done.stderr)
    if done.returncode:
        raise ChildFailedError("gpurun torchrun", {0: ProcessFailure(0, 0, done.returncode, "")})


def outcomes(file: Path) -> list[tuple[str, str]]:
    """Every test of a file, and `passed`, `skipped: why` or its error's last line."""
    spec = spec_from_file_location(file.stem, file)
    if spec is None or spec.loader is None:
        raise SystemExit(f"{file} is no Python file")
    module = module_from_spec(spec)
    sys.modules[file.stem] = module
    spec.loader.exec_module(module)
    found: list[tuple[str, str]] = []
    for suite in unittest.defaultTestLoader.loadTestsFromModule(module):
        for test in suite if isinstance(suite, unittest.TestSuite) else ():
            found.append((str(test).partition(" ")[0], outcome_of(test)))
            print(*found[-1], flush=True)
    return found


def outcome_of(test: Any) -> str:
    """What becomes of one test."""
    before, result = dict(os.environ), unittest.TestResult()
    test(result)
    os.environ.clear()
    os.environ.update(before)
    if result.skipped:
        return f"skipped: {result.skipped[0][1]}"
    errors = [*result.errors, *result.failures]
    if not errors:
        return "passed"
    said = re.findall(r"^[\w.]*(?:Error|Exception|Expired)\b.*", errors[0][1], re.MULTILINE)
    return str(said[-1]) if said else "failed"
