"""What a report says of uneven splits in your own training loop; the integration tests run it."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from gpurun.launcher.compare.build import compare_run
from gpurun.launcher.compare.model import VariantResult
from gpurun.launcher.jobfile.settings import SETTINGS, Settings
from gpurun.launcher.report.snippet import NOT_OF_LOOP, in_lines, lines_to_paste, map_style, settings_of_loop
from gpurun.launcher.run.attempts import merged_facts
from gpurun.launcher.run.find import find_run
from gpurun.launcher.rundir.files import write_json
from gpurun.launcher.rundir.records import NO_STEPS, VariantFacts
from tests.unit.compare import hand_made
from tests.unit.house.source import ROOT

files = hand_made.files
SEARCHED = ROOT / "docs/runs/tune"


def compared(files: Any) -> VariantResult:
    """The uneven variant of a run."""
    hand_made.write_splits(files, ratio=0.7)
    return next(variant for variant in compare_run(files.run).variants if len(set(variant.split)) > 1)


def pasted(files: Any, **fields: Any) -> str:
    """Of a run whose uneven variant has the fields."""
    hand_made.write_splits(files, ratio=0.7)
    comparison = compare_run(files.run)
    variants = tuple(replace(v, **fields) if len(set(v.split)) > 1 else v for v in comparison.variants)
    return lines_to_paste(replace(comparison, variants=variants)) or ""


PROGRAMS = {"script", "module", "args", "options", "calls", "env"}
"""Settings of programs, which have their own loop."""
CASES: dict[str, dict[str, Any]] = {
    "a mean": {"loss": "mean"},
    "an unknown loss": {"loss": None},
    "a sum": {"loss": "sum"},
    "a mean over valid targets": {"loss": "counted"},
    "GPUs": {"devices": ("cuda:0", "cuda:1")},
    "a device without samples": {"devices": ("cpu:0", "cpu:1", "cpu:2"), "split": (48, 0, 16)},
    "one device with all samples": {"split": (0, 64)},
    "dp": {"strategy": "dp"},
    "micro-batches": {"loss": "mean", "accumulate": 4},
    "micro-batches of a static graph": {"accumulate": 4, "varied": {"static_graph": True}},
    "micro-batches of counted targets": {"loss": "counted", "accumulate": 4},
    "other buckets": {"loss": "mean", "varied": {"bucket_mb": 5, "gradient_as_bucket_view": True}},
    "a divided optimizer": {"strategy": "zero1", "loss": "mean", "varied": {"bucket_mb": 5}},
    "what no lines have": {"precision": "bf16", "varied": {"compile": True, "comm_hook": "fp16"}},
    "fsdp": {"strategy": "fsdp", "accumulate": 2, "varied": {"reshard": False}},
}


def test_the_lines_to_paste(files: Any, snapshot: Callable[[str, str], None]) -> None:
    shown = (f"== {name}\n{pasted(files, **fields)}\n" for name, fields in CASES.items())
    snapshot("paste.txt", "\n".join(shown))


@pytest.mark.parametrize("name", sorted(SETTINGS.keys() - {*NOT_OF_LOOP, *PROGRAMS}))
def test_every_setting_is_in_the_lines_or_named(files: Any, name: str) -> None:
    """Whether it varies or is in the job; else they would train another variant."""
    default = getattr(Settings(), name)
    named: dict[str, Any] = {"precision": "bf16", "nccl": {"protocol": "ll"}}
    value: Any = named.get(name, not default if isinstance(default, bool) else 7)
    variant = replace(compared(files), strategy="hsdp" if name in ("reshard", "shard_size") else "ddp")
    if SETTINGS[name].is_resolved:
        changed: dict[str, Any] = {name: value}
        variant = replace(variant, **changed)
    jobs: list[tuple[dict[str, Any], dict[str, Any]]] = [({name: value}, {}), ({}, {name: value})]
    for job, varied in jobs:
        own = settings_of_loop(replace(variant, varied=varied), job)
        assert own == {name: value}
        lines = map_style(variant, own)
        assert (name in in_lines(variant, own)) == (lines != map_style(variant, {}))


def test_what_the_workers_found_of_the_loss_reaches_the_report(files: Any) -> None:
    hand_made.write_splits(files, ratio=0.7)
    write_json(files.run.launch_facts("01-ddp-2"), {hand_made.UNEVEN.id: VariantFacts(loss="sum")})
    write_json(files.run.launch_config("01-ddp-2"), {"variants": [{"id": hand_made.UNEVEN.id}]})
    facts = merged_facts(files.run, hand_made.splits_plan(), hand_made.UNEVEN.id)
    assert facts.loss == "sum"
    write_json(files.run.facts(hand_made.UNEVEN.id), facts)
    assert 'reduction="sum"' in (lines_to_paste(compare_run(files.run)) or "")


def test_an_attempt_without_steps_is_no_warning_once_another_has_recorded_some(files: Any) -> None:
    """As where a node was lost, and the program went on."""
    facts = {hand_made.UNEVEN.id: VariantFacts(warnings=(NO_STEPS,))}
    write_json(files.run.launch_facts("01-ddp-2"), facts)
    write_json(files.run.launch_config("01-ddp-2"), {"variants": [{"id": hand_made.UNEVEN.id}]})
    merged = merged_facts(files.run, hand_made.splits_plan(), hand_made.UNEVEN.id)
    assert merged.warnings == (NO_STEPS,)
    hand_made.write_splits(files, ratio=0.7)
    assert merged_facts(files.run, hand_made.splits_plan(), hand_made.UNEVEN.id).warnings == ()


BY_CHANCE = "No split was shown to be the fastest. To train with "


@pytest.mark.parametrize(
    ("rounds", "ratio", "fastest", "leader", "begin"),
    [
        (2, 1.01, None, hand_made.EVEN.id, None),
        (2, 0.99, None, hand_made.UNEVEN.id, BY_CHANCE),
        (28, 1.2, hand_made.EVEN.id, hand_made.EVEN.id, None),
    ],
)
def test_lines_are_for_a_split_that_leads(
    files: Any, rounds: int, ratio: float, fastest: str | None, leader: str, begin: str | None
) -> None:
    """Whether or not that is sure, which they say."""
    hand_made.write_splits(files, rounds, ratio)
    comparison = compare_run(files.run)
    assert (comparison.fastest, comparison.leader) == (fastest, leader)
    lines = lines_to_paste(comparison)
    assert (lines and lines[: len(BY_CHANCE)]) == begin


def test_no_lines_for_a_split_that_is_slower_than_the_jobs_own_setting(files: Any) -> None:
    """Which has another strategy, and needn't be the fastest."""
    hand_made.write_splits(files, ratio=1.2)
    found = compare_run(files.run)
    variants = tuple(replace(v, strategy="zero1") if v.id == hand_made.EVEN.id else v for v in found.variants)
    assert lines_to_paste(replace(found, variants=variants, fastest=None, leader=None)) is None


def test_no_lines_for_a_split_that_is_behind_and_not_yet_ranked() -> None:
    """The slowest of five, by 42 %."""
    comparison = replace(compare_run(find_run(SEARCHED)), fastest=None)
    (behind,) = (variant for variant in comparison.variants if len(set(variant.split)) > 1)
    assert behind.vs_baseline is not None
    unsure = replace(behind.vs_baseline, verdict="inconclusive")
    variants = (replace(each, vs_baseline=unsure) if each is behind else each for each in comparison.variants)
    assert lines_to_paste(replace(comparison, variants=tuple(variants))) is None


def test_a_choice_between_variants_of_one_split_is_no_choice_of_a_split() -> None:
    comparison = compare_run(find_run(SEARCHED))
    assert comparison.fastest is not None
    assert lines_to_paste(comparison) is None
