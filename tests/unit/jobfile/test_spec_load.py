"""Job files: what a right one becomes, and what is said of a wrong one."""

import json
from pathlib import Path
from typing import Any

import pytest

from gpurun.launcher.errors import SpecError
from gpurun.launcher.jobfile import values
from gpurun.launcher.jobfile.load import load_job
from gpurun.launcher.jobfile.model import JobSpec
from tests.wording import Wording

SMALL = "workload: gpt\nglobal_batch: 64\n"


def job(directory: Path, text: str, *overrides: str) -> JobSpec:
    path = directory / "job.yaml"
    path.write_text(text)
    return load_job(path, overrides)


def mistakes(directory: Path, text: str, *overrides: str) -> str:
    """All that is said of the file, without the directory's name."""
    with pytest.raises(SpecError) as caught:
        job(directory, text, *overrides)
    return str(caught.value).replace(f"{directory}/", "")


def test_defaults(tmp_path: Path) -> None:
    spec = job(tmp_path, SMALL)
    assert (spec.name, spec.devices, spec.strategy, spec.split) == ("job", "auto", "ddp", "even")
    assert (spec.precision, spec.accumulate, spec.seed, spec.device_count) == ("fp32", 1, 0, None)
    assert (spec.steps.warmup, spec.steps.rounds, spec.steps.launches) == (0, 28, None)
    assert (spec.until, spec.budget_s, spec.has_fixed_size) == ("decided", 180.0, False)
    assert (spec.profile.steps, spec.profile.stacks, spec.timeout_s, spec.gradient_check) == (
        3,
        False,
        600.0,
        True,
    )


FULL = """\
name: gpt-splits
workload: gpt
params: {layers: 4, width: 256}
devices: [cuda:0, cuda:01]
global_batch: 64
precision: bf16
compare:
  strategy: [ddp, dp]
  device_count: [1, 2]
  split: [even, [48, 16], "3:1", 1:1]
  params: [{}, {layers: 2}]
baseline: {strategy: ddp, split: even, params: {layers: 2}}
steps: {warmup: 5, rounds: 14, launches: 8}
profile: {steps: 0}
timeout: 1.5h
gradient_check: false
"""


def test_every_key_arrives(tmp_path: Path) -> None:
    spec = job(tmp_path, FULL)
    assert spec.devices == ("cuda:0", "cuda:1")
    assert spec.compare.split == ("even", (48, 16), "3:1", "1:1")
    assert spec.compare.params == ({}, {"layers": 2})
    assert spec.baseline is not None
    assert spec.baseline.params == {"layers": 2}
    assert spec.timeout_s == 5400.0
    assert spec.steps.launches == 8


@pytest.mark.parametrize(
    ("more", "is_fixed", "resolved"),
    [
        ("", False, {"until": "decided", "budget": 180.0}),
        ("budget: 100s", False, {"until": "decided", "budget": 100.0}),
        ("until: fixed", True, {"until": "fixed"}),
        ("steps: {rounds: 3}", True, {"until": "fixed"}),
        ("steps: {launches: 3}", True, {"until": "fixed"}),
        ("steps: {warmup: 3}", False, {"until": "decided", "budget": 180.0}),
    ],
)
def test_a_size_takes_the_place_of_the_budget(
    tmp_path: Path, more: str, is_fixed: bool, resolved: dict[str, Any]
) -> None:
    spec = job(tmp_path, f"{SMALL}{more}\n")
    assert spec.has_fixed_size is is_fixed
    plain = spec.resolved()
    assert {key: plain[key] for key in ("until", "budget") if key in plain} == resolved
    assert ("rounds" in plain["steps"]) is is_fixed
    again = job(tmp_path, json.dumps(plain))
    assert (again.has_fixed_size, again.resolved()) == (is_fixed, plain)


@pytest.mark.parametrize(
    "more",
    ["budget: 1m\nsteps: {rounds: 3}", "budget: 1m\nuntil: fixed", "until: decided\nsteps: {launches: 3}"],
)
def test_a_budget_for_a_fixed_size_is_a_mistake(tmp_path: Path, more: str, wording: Wording) -> None:
    wording(mistakes(tmp_path, f"{SMALL}{more}\n"))


def test_the_resolved_job_is_plain_data_and_loads_again(tmp_path: Path) -> None:
    first = job(tmp_path, FULL).resolved()
    again = job(tmp_path, json.dumps(first)).resolved()
    assert again == first
    assert first["timeout"] == 5400.0
    assert set(first["compare"]) == {"strategy", "device_count", "split", "params"}


@pytest.mark.parametrize(
    ("file", "name"),
    [("my job (1).yaml", "my-job-1"), ("...yaml", "job"), ("a.b.yaml", "a.b"), ("größe.yml", "größe")],
)
def test_the_name_comes_from_the_file(tmp_path: Path, file: str, name: str) -> None:
    path = tmp_path / file
    path.write_text(SMALL)
    assert load_job(path).name == name


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90s", 90.0), ("10m", 600.0), ("1h", 3600.0), ("45", 45.0), ("0.5", 0.5), ("1 m", 60.0)],
)
def test_durations(tmp_path: Path, text: str, seconds: float) -> None:
    assert job(tmp_path, f"{SMALL}timeout: {text}\n").timeout_s == seconds


def test_missing_keys_are_reported_at_the_top(tmp_path: Path, wording: Wording) -> None:
    found = mistakes(tmp_path, "\n\nname: x\n")
    wording(found)
    assert "job.yaml:3:1: missing key `global_batch`" in found


@pytest.mark.parametrize("text", ["[1, 2]", "hello", "- workload: gpt\n- global_batch: 64", "7"])
def test_a_file_that_is_no_mapping(tmp_path: Path, text: str, wording: Wording) -> None:
    wording(mistakes(tmp_path, text))


def test_a_flood_of_mistakes_is_cut(tmp_path: Path, wording: Wording) -> None:
    found = mistakes(tmp_path, SMALL + "".join(f"key{n}: 1\n" for n in range(1000)))
    assert found.count("unknown key") == 30
    assert found.endswith("and 970 more mistakes")
    found = mistakes(tmp_path, f"{SMALL}compare: {{seed: {['x'] * 101}}}\n")
    wording(found)


def test_overrides_follow_the_same_rules(tmp_path: Path) -> None:
    spec = job(
        tmp_path, SMALL, "global_batch=9", "compare.split=[even, 3:1]", "steps.rounds=7", "params.width=8"
    )
    assert (spec.global_batch, spec.compare.split, spec.steps.rounds) == (9, ("even", "3:1"), 7)
    assert spec.params == {"width": 8}


def test_an_override_of_another_key_leaves_the_rest(tmp_path: Path) -> None:
    text = SMALL + "compare: {split: [even, '3:1']}\n"
    assert job(tmp_path, text, "compare.split=[[10, 54]]", "seed=3").compare.split == ((10, 54),)


def test_an_override_with_null_removes_the_key(tmp_path: Path) -> None:
    text = SMALL + "seed: 3\nparams: {width: 8}\ncompare: {split: [even, '3:1'], precision: [fp32, bf16]}\n"
    spec = job(tmp_path, text, "seed=null", "compare.split=null", "params=null")
    assert (spec.seed, spec.params, spec.compare.split, len(spec.compare.precision)) == (0, {}, (), 2)
    for key in ("sed", "compare.splt", "compare.split.0", "steps.rounds"):
        assert f"--set {key}: " in mistakes(tmp_path, text, f"{key}=null")


@pytest.mark.parametrize(
    ("size", "override", "is_fixed"),
    [
        ("until: decided\nbudget: 3m\n", "steps.rounds=12", True),
        ("budget: 3m\nsteps: {warmup: 20}\n", "steps.launches=6", True),
        ("steps: {rounds: 28, launches: 6}\n", "budget=20s", False),
        ("steps: {rounds: 28, warmup: 20}\n", "until=decided", False),
    ],
)
def test_an_override_that_says_how_much_is_measured_replaces_what_the_file_says(
    tmp_path: Path, size: str, override: str, is_fixed: bool
) -> None:
    text = SMALL + "compare: {split: [even, '3:1']}\n" + size
    spec = job(tmp_path, text, override)
    assert spec.has_fixed_size == is_fixed
    assert spec.steps.warmup == (20 if "warmup" in size else 0)
    assert "has no effect with" in mistakes(tmp_path, text, "steps.rounds=12", "budget=20s")


def test_a_split_may_fit_one_of_several_batches(tmp_path: Path) -> None:
    spec = job(tmp_path, f"{SMALL}compare: {{global_batch: [64, 32], split: [even, [24, 8]]}}\n")
    assert spec.compare.split == ("even", (24, 8))


def test_a_file_next_to_the_job_is_found(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("def build(): ...\n")
    assert job(tmp_path, "workload: train.py:build\nglobal_batch: 4\n").workload == "train.py:build"


def test_the_baseline_may_be_called_by_another_name(tmp_path: Path) -> None:
    spec = job(tmp_path, f"{SMALL}split: [32, 32]\nbaseline: {{split: even}}\n")
    assert spec.baseline is not None
    assert spec.baseline.split == "even"


def test_gpus_are_sold_in_gigabytes_and_sizes_are_as_written() -> None:
    assert values.parse_memory("H100 80GB") == 80 * 10**9
    assert values.parse_memory("80 GiB") == 80 * 2**30
