"""Mistakes in job files and their messages, file by file in `tests/snapshots/mistakes`.

Those in `plans.txt` depend on the machine: two CPU cores.

A case is a few lines of a job, then its messages after `> `; a blank line ends it. `pytest --update` writes
the messages again and keeps the jobs.
"""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from gpurun.launcher.errors import MachineError, SpecError
from gpurun.launcher.jobfile.load import load_job
from gpurun.launcher.plan.build import with_mistakes_of_plan
from gpurun.launcher.plan.expand import expand
from tests.conftest import SNAPSHOTS
from tests.unit.plan.machines import FakeMachine

DIRECTORY = SNAPSHOTS / "mistakes"
BASES = {
    "keys": ("workload: gpt", "global_batch: 64"),
    "params": ("workload: train.py:build", "global_batch: 64"),
    "builtins": ("global_batch: 8",),
    "own-batch": ("workload: lstm",),
    "programs": (),
    "plans": ("workload: gpt", "global_batch: 64"),
}
"""By file: the lines with which every job begins, less those whose key the case has itself."""

SOURCES = {
    "train.py": """\
def build(width: int, depth=2, *, rate: float = 1e-3, name: str | None = None, fast: bool = False): ...
async def waits(): ...
def yields():
    yield build(1)
""",
    "broken.py": "import os\ndef f(:\n",
    "outside.py": "return 3\n",
    "binary.py": "\0\1\n",
    "notes.ipynb": "{}\n",
}
"""The files next to the job; none of them is run."""


@pytest.mark.parametrize("name", BASES)
def test_messages(
    name: str, tmp_path: Path, snapshot: Callable[[str, str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/home/ada")
    for file, source in SOURCES.items():
        (tmp_path / file).write_text(source)
    text = (DIRECTORY / f"{name}.txt").read_text()
    cases = ["\n".join(job_lines(case)) for case in text.strip().split("\n\n")]
    shown = (f"{case}\n{messages(tmp_path, name, case)}" for case in cases)
    snapshot(f"mistakes/{name}.txt", with_keys_once("\n\n".join(shown)) + "\n")


KEYS = re.compile(r"valid keys:.*(?:\n>     .*)*")
"""All keys of a section, which every new key changes."""


def with_keys_once(text: str) -> str:
    """The same list of keys is shown the first time only."""
    seen = set[str]()

    def shown(found: re.Match[str]) -> str:
        is_new = found[0] not in seen
        seen.add(found[0])
        return found[0] if is_new else "valid keys: as above"

    return KEYS.sub(shown, text)


def job_lines(case: str) -> list[str]:
    return [line for line in case.splitlines() if not line.startswith("> ")]


def messages(directory: Path, name: str, case: str) -> str:
    """What is printed for a job; every mistake has its line and column, or its option."""
    lines = case.splitlines()
    overrides = [line.removeprefix("--set ") for line in lines if line.startswith("--set ")]
    own = [line for line in lines if not line.startswith("--set ")]
    base = [
        line for line in BASES[name] if not any(one.startswith(line.partition(":")[0] + ":") for one in own)
    ]
    path = directory / "job.yaml"
    path.write_text("\n".join([*base, *own]) + "\n")
    try:
        with with_mistakes_of_plan(FakeMachine):
            spec = load_job(path, overrides)
        if name == "plans":
            expand(spec, FakeMachine())
    except (SpecError, MachineError) as error:
        found = str(error).replace(f"{directory}/", "").replace(str(directory), ".").splitlines()
        assert all(re.match(r"job\.yaml:\d+:\d+: |--set |    ", line) for line in found), found
        return "\n".join(f"> {line}" for line in found)
    return "> no mistake"
