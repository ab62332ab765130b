"""`compare` as variants: merging, leaving out, names, baseline."""

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpurun.launcher.errors import SpecError
from gpurun.launcher.jobfile.load import check_source
from gpurun.launcher.jobfile.model import Compare, JobSpec
from gpurun.launcher.jobfile.yaml.tree import parse_source
from gpurun.launcher.plan.combination import make_unique
from gpurun.launcher.plan.expand import Expansion, expand
from tests.unit.plan.machines import FakeGpu, FakeMachine
from tests.wording import Wording

README = Path(__file__).resolve().parents[3] / "README.md"


def spec_of(text: str) -> JobSpec:
    return check_source(parse_source(f"workload: gpt\n{text}".encode(), "job.yaml"), Path())


TWO_CORES = FakeMachine()


def expanded(text: str, machine: FakeMachine = TWO_CORES) -> Expansion:
    return expand(spec_of(text), machine)


def ids(expansion: Expansion) -> list[str]:
    return [variant.id for variant in expansion.variants]


def test_a_job_without_compare_is_one_variant() -> None:
    found = expanded("global_batch: 64\n")
    (variant,) = found.variants
    assert (variant.id, variant.split, variant.devices) == ("ddp-2-even", (32, 32), ("cpu:0", "cpu:1"))
    assert (found.baseline, found.left_out, found.notes) == ("ddp-2-even", (), ())


def test_the_product_is_named_by_what_varies() -> None:
    found = expanded(
        "global_batch: 64\n"
        'compare: {strategy: [ddp, dp], split: [even, [48, 16], "15:1"], precision: [fp32, bf16]}\n'
    )
    assert ids(found)[:4] == [
        "ddp-2-even-precision-fp32",
        "ddp-2-even-precision-bf16",
        "ddp-2-48-16-precision-fp32",
        "ddp-2-48-16-precision-bf16",
    ]
    assert ids(found)[-1] == "dp-2-15-1-precision-bf16"
    assert found.variants[-1].split == (60, 4)
    assert found.variants[-1].split_name == "15:1"
    assert found.variants[-1].varied == {"precision": "bf16"}


def test_every_combination_of_the_job_in_the_readme_is_a_variant() -> None:
    """48/16 and 3:1 are the same samples."""
    (job,) = re.findall(r"^```yaml\n(.*?)^```$", README.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    spec = check_source(parse_source(job.encode(), "job.yaml"), Path())
    assert spec.workload == "gpt"
    found = expand(spec, FakeMachine(16, (FakeGpu("GPU-a"), FakeGpu("GPU-b"))))
    splits = ("even", "48-16", "balanced")
    assert ids(found) == [f"{strategy}-2-{split}" for strategy in ("ddp", "dp") for split in splits]
    assert {variant.devices for variant in found.variants} == {("cuda:0", "cuda:1")}
    assert {sum(variant.split) for variant in found.variants if variant.split} == {64}
    assert found.left_out == ()


@pytest.mark.parametrize(
    ("compare", "found"),
    [
        ('split: [[48, 16], "3:1", even, [32, 32]]', ["ddp-2-48-16", "ddp-2-even"]),
        ("strategy: [ddp, dp, ddp], split: [[48, 16], [48, 16]]", ["ddp-2-48-16", "dp-2-48-16"]),
        ("device_count: [2, 3], split: [even, [10, 20, 34]]", ["ddp-2-even"]),
        (
            "global_batch: [64, 32], split: [[48, 16], [24, 8]]",
            ["ddp-2-48-16-global_batch-64", "ddp-2-24-8-global_batch-32"],
        ),
        ("precision: [tf32, fp32]", ["ddp-2-even-precision-fp32"]),
    ],
    ids=["the same samples", "twice", "more devices than are here", "batches", "tf32 on a CPU"],
)
def test_what_comes_to_the_same_merges_and_what_cannot_be_is_left_out(
    compare: str, found: list[str], wording: Wording
) -> None:
    expansion = expanded(f"global_batch: 64\ncompare: {{{compare}}}\n")
    assert ids(expansion) == found
    wording(expansion.notes, [item.reason for item in expansion.left_out])


def test_a_merged_split_can_be_the_baseline_by_either_name() -> None:
    text = 'global_batch: 64\ncompare: {split: [even, [48, 16], "3:1"]}\nbaseline: {split: "3:1"}\n'
    assert expanded(text).baseline == "ddp-2-48-16"


@pytest.mark.parametrize(
    ("split", "baseline", "chosen"),
    [
        ("even", "[32, 32]", "ddp-2-even"),
        ("even", '"5:5"', "ddp-2-even"),
        ("[32, 32]", "even", "ddp-2-32-32"),
        ('"3:1"', "[48, 16]", "ddp-2-3-1"),
        ("[48, 16]", '"6:2"', "ddp-2-48-16"),
    ],
)
def test_the_baseline_is_found_by_its_samples(split: str, baseline: str, chosen: str) -> None:
    text = f'global_batch: 64\ncompare: {{split: ["1:7", {split}]}}\nbaseline: {{split: {baseline}}}\n'
    assert expanded(text).baseline == chosen


def test_chunks_on_fewer_devices_are_found_by_their_samples() -> None:
    text = 'global_batch: 9\ndevices: cpu:4\ncompare: {split: ["4:3:1:1", even]}\n'
    found = expanded(text + "baseline: {split: [3, 3, 3]}\n", FakeMachine(4))
    assert found.baseline == "ddp-3-even"


def test_a_split_that_single_has_no_use_for_is_noted() -> None:
    assert expanded("global_batch: 64\nstrategy: single\nsplit: [32, 32]\n").notes == (
        "single has no `split`: 32/32 is not used",
    )
    both = expanded("global_batch: 64\ncompare: {strategy: [single, dp], split: [[32, 32]]}\n")
    assert both.notes == expanded("global_batch: 64\nstrategy: single\n").notes == ()


@pytest.mark.parametrize(
    ("split", "notes"),
    [
        ('"3:1"', ('`split: "3:1"` is not used: `compare.split` overrides it',)),
        ("[48, 16]", ("`split: 48/16` is not used: `compare.split` overrides it",)),
        ('"1:3"', ()),
        ("even", ()),
    ],
)
def test_a_value_that_compare_overrides_is_noted(split: str, notes: tuple[str, ...]) -> None:
    text = f'global_batch: 64\nsplit: {split}\ncompare: {{split: [even, "1:3"]}}\n'
    assert expanded(text).notes == notes
    assert expand(spec_of(text), TWO_CORES, with_own=True).notes == ()  # `gpurun tune` measures it


def test_arguments_at_the_top_are_in_use_where_compare_appends_others() -> None:
    text = "module: json.tool\nargs: [--steps, 9]\nenv: {A: b}\n"
    text += "compare: {args: [[--batch, 1], [--batch, 2]], env: [{C: d}]}\n"
    spec = check_source(parse_source(text.encode(), "job.yaml"), Path())
    assert expand(spec, TWO_CORES).notes == ()


def test_a_setting_that_a_strategy_lacks_is_noted_with_its_value_as_in_the_job() -> None:
    found = expanded("global_batch: 64\nstrategy: ddp\nreshard: false\n")
    assert found.notes == ("ddp has no `reshard`: false is not used",)


def test_fewer_chunks_than_devices_run_on_fewer(wording: Wording) -> None:
    found = expanded("global_batch: 9\ndevices: cpu:4\n", FakeMachine(4))
    (variant,) = found.variants
    assert (variant.id, variant.devices) == ("ddp-3-even", ("cpu:0", "cpu:1", "cpu:2"))
    wording(found.notes)


def test_single_has_one_device_and_no_split() -> None:
    found = expanded("global_batch: 64\ncompare: {strategy: [single, ddp], split: [even, [48, 16]]}\n")
    assert ids(found) == ["single-1", "ddp-2-even", "ddp-2-48-16"]
    single = found.variants[0]
    assert (single.devices, single.split, single.split_name) == (("cpu:0",), (64,), "-")
    assert found.notes == ()


def test_what_cannot_be_is_left_out_with_its_reason() -> None:
    found = expanded(
        "global_batch: 64\n"
        "compare: {strategy: [single, ddp], device_count: [1, 2, 4], split: [even, [48, 16]], seed: [1, 2]}\n"
    )
    assert ids(found) == [
        f"{name}-seed-{seed}"
        for name in ("single-1", "ddp-1-even", "ddp-2-even", "ddp-2-48-16")
        for seed in (1, 2)
    ]
    reasons = {(*item.combination.values(), item.reason) for item in found.left_out}
    assert reasons == {
        ("single", 2, "single uses one device, not 2"),
        ("single", 4, "single uses one device, not 4"),
        ("ddp", 1, (48, 16), "the split [48, 16] is for 2 devices, not for 1"),
        ("ddp", 4, "even", "the job has 2 devices, not 4"),
        ("ddp", 4, (48, 16), "the job has 2 devices, not 4"),
    }
    assert len(found.left_out) == 5  # not once more for every seed


def test_the_first_bucket_may_be_as_large_as_the_others() -> None:
    found = expanded("global_batch: 8\nbucket_mb: 8\ncompare: {first_bucket_mb: [4, 8, 9]}\n")
    assert [item.combination["first_bucket_mb"] for item in found.left_out] == [9]


def test_balanced_may_leave_a_device_out_if_the_job_says_so(wording: Wording) -> None:
    few = "global_batch: 1\nsplit: balanced\n"
    assert ids(expanded(f"{few}min_local_batch: 0\n")) == ["ddp-2-balanced"]
    with wording.raises(SpecError):
        expanded(f"{few}min_local_batch: 0\naccumulate: 2\n")


def test_settings_that_mean_nothing_next_to_others_are_measured_once_without_them(wording: Wording) -> None:
    product = "compare: {strategy: [dp, ddp], accumulate: [1, 2, 4], sync_every: [1, 2, 4]}\n"
    found = expanded(f"global_batch: 64\n{product}")
    by_id = {variant.id: variant.sync_every for variant in found.variants}
    assert by_id == {
        **{f"dp-2-even-accumulate-{n}": None for n in (1, 2, 4)},
        "ddp-2-even-accumulate-1": None,
        **{f"ddp-2-even-accumulate-2-sync_every-{n}": n for n in (1, 2)},
        **{f"ddp-2-even-accumulate-4-sync_every-{n}": n for n in (1, 2, 4)},
    }
    wording([item.reason for item in found.left_out])
    by_default = expanded("global_batch: 64\naccumulate: 4\n").variants[0]
    assert by_default.sync_every == 4
    wording(expanded("global_batch: 64\nsync_every: 4\n").notes)


def test_params_are_laid_over_those_at_the_top() -> None:
    found = expanded(
        "global_batch: 4\nparams: {width: 8, layers: 2}\ncompare: {params: [{}, {width: 16}, {width: 8}]}\n"
    )
    assert [variant.params for variant in found.variants] == [
        {"width": 8, "layers": 2},
        {"width": 16, "layers": 2},
    ]
    assert ids(found) == ["ddp-2-even", "ddp-2-even-width-16"]


@pytest.mark.parametrize(
    ("baseline", "chosen"),
    [
        ("{}", None),
        ("{strategy: ddp}", None),
        ("{split: even}", None),
        ("{strategy: ddp, split: even}", "ddp-2-even"),
        ("{strategy: ddp, device_count: 1}", "ddp-1-even"),
        ("{strategy: single}", "single-1"),
        ("{split: [48, 16], strategy: dp}", "dp-2-48-16"),
    ],
)
def test_the_baseline_is_the_one_with_most_devices(baseline: str, chosen: str | None) -> None:
    text = (
        "global_batch: 64\n"
        "compare: {strategy: [single, ddp, dp], device_count: [1, 2], split: [even, [48, 16]]}\n"
        f"baseline: {baseline}\n"
    )
    if chosen is None:
        with pytest.raises(SpecError, match="matches several variants: "):
            expanded(text)
    else:
        assert expanded(text).baseline == chosen


def test_gpus_are_counted_from_the_first() -> None:
    machine = FakeMachine(16, (FakeGpu("GPU-a"), FakeGpu("GPU-b"), FakeGpu("GPU-c")))
    found = expanded(
        "global_batch: 64\ndevices: [cuda:2, cuda:0]\ncompare: {device_count: [1, 2]}\n", machine
    )
    assert [variant.devices for variant in found.variants] == [("cuda:2",), ("cuda:2", "cuda:0")]


words = st.text("aZ9 _./:\\\0\nπ-", max_size=150)
values: st.SearchStrategy[Any] = st.one_of(st.integers(), words, st.booleans(), st.lists(words, max_size=3))


@given(st.lists(st.dictionaries(st.sampled_from(["a", "b", "π", "x y"]), values), min_size=1, max_size=6))
def test_ids_are_unique_file_names_whatever_the_params(params: list[dict[str, Any]]) -> None:
    spec = JobSpec(workload="gpt", global_batch=4, compare=Compare(params=tuple(params)))
    names = ids(expand(spec, FakeMachine()))
    assert len(set(names)) == len(names)
    assert all(re.fullmatch(r"ddp-2-even[A-Za-z0-9._+-]*", name) and len(name) < 120 for name in names)


@given(st.lists(st.sampled_from(["a", "a-2", "a-3", "b"]), max_size=12))
def test_make_unique_keeps_what_is_unique_already(names: list[str]) -> None:
    unique = make_unique(names)
    assert len(set(unique)) == len(names)
    assert all(new.startswith(old) for new, old in zip(unique, names, strict=True))
