"""torch's own tests of its launcher, with `gpurun torchrun` in its place: `launcher_tests FILE [FILE …]`.

The files lie outside of the repository: test/distributed/launcher/test_run.py and api_test.py of PyTorch, of
the installed version, with the files next to them. Each test passes, or `EXPLAINED` has the reason why not.
"""

import os
import subprocess
import sys
import unittest
from collections.abc import Sequence
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import torch.distributed.run
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from benchmarks.timing import BIN, machine_facts, record, table

TIMEOUT_S = 120
INSIDE = "looks into torch's agent, or replaces a part of it"
ELASTIC = "refused: `--nnodes A:B` with other numbers; gpurun has `nodes: A..B`, which takes what has joined"
EXPLAINED: dict[str, str] = {}
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
    text = f"{passed} of {len(rows)} pass, {failed} fail; the others have a reason.\n\n"
    record("torch's launcher tests", text + table(["file", "test", "outcome"], rows), machine_facts())


def launched(args: Sequence[str] | None = None) -> None:
    """`torch.distributed.run.main`, by the command."""
    words = sys.argv[1:] if args is None else list(args)
    argv = [BIN / "gpurun", "torchrun", *words]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=TIMEOUT_S)
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
    return errors[0][1].strip().splitlines()[-1] if errors else "passed"
