"""What a report says of uneven splits in a training loop of one's own; the integration tests run it."""

from dataclasses import replace
from typing import Any

import pytest

from gpurun.launcher.compare.build import compare_run
from gpurun.launcher.report.snippet import lines_to_paste
from gpurun.launcher.run.outcomes import merged_facts
from gpurun.launcher.rundir.files import write_json
from gpurun.launcher.rundir.records import VariantFacts
from tests.unit.compare import test_compare as hand_made

files = hand_made.files


def pasted(files: Any, **fields: Any) -> str:
    """Of a run whose uneven variant has the fields."""
    hand_made.write_splits(files, ratio=0.7)
    comparison = compare_run(files.run)
    variants = tuple(replace(v, **fields) if len(set(v.split)) > 1 else v for v in comparison.variants)
    return lines_to_paste(replace(comparison, variants=variants)) or ""


@pytest.mark.parametrize(
    ("loss", "line"),
    [
        ("mean", "loss = weight * loss_function(model(inputs), targets)  # a mean over samples"),
        (None, "loss = weight * loss_function(model(inputs), targets)  # must be a mean over samples"),
        ("sum", 'rank=torch.distributed.get_rank(), reduction="sum")'),
        ("counted", "weight = loss_weight(int(count), int(total), torch.distributed.get_world_size())"),
    ],
)
def test_the_loss_is_weighted_as_the_workloads_is(files: Any, loss: str | None, line: str) -> None:
    said = pasted(files, loss=loss)
    assert said.startswith("To train with ddp 48/16, in a DistributedDataParallel loop of your own:\n")
    assert line in said
    assert ("a mean over samples" in said) == (loss in ("mean", None))


def test_what_the_workers_found_of_the_loss_reaches_the_report(files: Any) -> None:
    hand_made.write_splits(files)
    write_json(files.run.launch_facts("01-ddp-2"), {hand_made.UNEVEN.id: VariantFacts(loss="sum")})
    write_json(files.run.launch_config("01-ddp-2"), {"variants": [{"id": hand_made.UNEVEN.id}]})
    facts = merged_facts(files.run, hand_made.splits_plan(), hand_made.UNEVEN.id)
    assert facts.loss == "sum"
    write_json(files.run.facts(hand_made.UNEVEN.id), facts)
    assert 'reduction="sum"' in (lines_to_paste(compare_run(files.run)) or "")


def test_gpus_are_given_their_batches(files: Any) -> None:
    assert "cuda" not in pasted(files)
    assert 'inputs, targets = inputs.to("cuda"), targets.to("cuda")\n' in pasted(
        files, devices=("cuda:0", "cuda:1")
    )


def test_devices_without_samples_have_no_rank(files: Any) -> None:
    said = pasted(files, devices=("cpu:0", "cpu:1", "cpu:2"), split=(48, 0, 16))
    assert "loop of your own with 2 ranks, on cpu:0 cpu:2 (the others get no samples):\n" in said
    assert said.count("split=(48, 16), ") == 2
    alone = pasted(files, split=(0, 64))
    assert alone == "To train with ddp 0/64, use cpu:1 alone: the others get no samples."


def test_dp_has_no_lines_and_the_report_says_so(files: Any) -> None:
    said = pasted(files, strategy="dp")
    assert said.startswith(
        "There are no lines to train with dp 48/16: torch's DataParallel splits evenly only."
    )
    assert "With `strategy: ddp`, gpurun finds" in said
