"""Mistakes in job files and their messages, file by file in `tests/snapshots/mistakes`.

Those in `plans.txt` depend on the machine: two CPU cores.

A case is a few lines of a job, then its messages after `> `; a blank line ends it. `pytest --update` writes
the messages again and keeps the jobs."""

import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpurun.launcher.errors import MachineError, SpecError
from gpurun.launcher.jobfile.load import load_job
from gpurun.launcher.plan.build import build_plan, with_mistakes_of_plan
from gpurun.launcher.plan.expand import expand
from tests.conftest import SNAPSHOTS
from tests.damage.jobs import JOBS, MACHINES, check, damaged_job
from tests.known import known
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
        line for line in BASES[name] if not any(each.startswith(line.partition(":")[0] + ":") for each in own)
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


# Damaged job files: each is planned, or refused with a message, never a traceback


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
