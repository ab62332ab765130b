"""Which remedies fit a program, and how they are applied."""

from dataclasses import replace

import pytest

from gpurun.launcher.improve.remedies import (
    OF_LIBRARIES,
    REMEDIES,
    TRAINER_OPTIONS,
    Part,
    Surroundings,
    candidates,
    merged,
)
from gpurun.launcher.jobfile.settings import SETTINGS
from gpurun.launcher.rundir.improvement import CHANGES_NUMERICS
from gpurun.launcher.rundir.records import WORKLOAD, CallSite

AROUND = Surroundings(device_type="cpu", spare_cores=1, threads=None, share=1)
WIDE = replace(AROUND, spare_cores=6, threads=1, share=7)
SHARES: dict[Part, float] = {"input": 40.0, "transfer": 10.0, "work": 50.0}


def site(name: str, **given: str) -> CallSite:
    return CallSite(name, "/home/me/train.py", 41, is_users=True, given=given)


LOADER, DDP, ADAM = site("DataLoader"), site("DistributedDataParallel"), site("AdamW")


@pytest.mark.parametrize(
    ("called", "around", "codes"),
    [
        (LOADER, AROUND, ["DataLoader(num_workers=2, persistent_workers=True)"]),
        (
            LOADER,
            WIDE,
            [
                "DataLoader(num_workers=2, persistent_workers=True)",
                "DataLoader(num_workers=6, persistent_workers=True)",
                "OMP_NUM_THREADS=7",
            ],
        ),
        (
            site("DataLoader", num_workers="4"),
            AROUND,
            ["DataLoader(persistent_workers=True)", "DataLoader(prefetch_factor=8)"],
        ),
        (
            site("DataLoader", num_workers="4", persistent_workers="True"),
            AROUND,
            ["DataLoader(prefetch_factor=8)"],
        ),
        (
            site("DataLoader", num_workers="4", persistent_workers="True", prefetch_factor="8"),
            AROUND,
            [],
        ),
        (
            DDP,
            AROUND,
            [
                "DistributedDataParallel(bucket_cap_mb=100)",
                "DistributedDataParallel(static_graph=True)",
                "DistributedDataParallel(gradient_as_bucket_view=True)",
                "model.compile()",
            ],
        ),
        (
            site("DistributedDataParallel", find_unused_parameters="True", bucket_cap_mb="1"),
            AROUND,
            [
                "DistributedDataParallel(bucket_cap_mb=100)",
                "DistributedDataParallel(bucket_cap_mb=25)",
                "DistributedDataParallel(find_unused_parameters=False)",
                "DistributedDataParallel(static_graph=True)",
                "DistributedDataParallel(gradient_as_bucket_view=True)",
                "model.compile()",
            ],
        ),
        (ADAM, AROUND, ["AdamW(fused=True)", "AdamW(foreach=True)"]),
        (site("SGD", foreach="False"), AROUND, ["SGD(fused=True, foreach=False)", "SGD(foreach=True)"]),
        (site("SGD", fused="True"), AROUND, ["SGD(foreach=True, fused=False)"]),
    ],
)
def test_remedies_that_would_change_something_are_tried(
    called: CallSite, around: Surroundings, codes: list[str]
) -> None:
    found = [each for each in candidates([called], around, SHARES) if not each.refusal]
    assert [each.code for each in found] == codes


@pytest.mark.parametrize(
    ("stated", "refusal"),
    [("0", ""), ("2", ""), ("8", "it would replace num_workers=8 at train.py:20, too")],
)
def test_a_value_that_another_call_states_is_respected(stated: str, refusal: str) -> None:
    sites = [LOADER, replace(site("DataLoader", num_workers=stated), line=20)]
    found = {each.code: each.refusal for each in candidates(sites, AROUND, SHARES)}
    assert found["DataLoader(num_workers=2, persistent_workers=True)"] == refusal


@pytest.mark.parametrize(
    ("stated", "refusal"),
    [("0", ""), ("2", ""), ("8", "it would replace num_workers=8 at train.py:41, too")],
)
@pytest.mark.parametrize("is_first", [True, False])
def test_a_value_that_another_call_at_the_same_line_states_is_respected(
    stated: str, refusal: str, is_first: bool
) -> None:
    given = [{}, {"num_workers": stated}]
    first, other = given[:: -1 if is_first else 1]
    (row,) = [
        each
        for each in candidates([replace(LOADER, given=first, others=(other,))], AROUND, SHARES)
        if each.remedy.name == "workers"
    ]
    assert row.refusal == refusal
    (applied,) = row.sites
    assert row.change_at(replace(applied, applied={"num_workers": 2}))


def job(**given: object) -> CallSite:
    """A workload on which these keys have an effect."""
    return replace(site(WORKLOAD), given={key: repr(value) for key, value in given.items()})


@pytest.mark.parametrize(
    ("workload", "around", "codes"),
    [
        (job(compile=True), AROUND, []),
        (job(compile=False, threads=1), WIDE, ["compile: true", "threads: auto"]),
        (job(workers=0), WIDE, ["workers: 2", "workers: 6"]),
        (job(workers=4, prefetch=2), WIDE, ["prefetch: 8"]),
        (
            job(bucket_mb=1, gradient_as_bucket_view=False, static_graph=True),
            AROUND,
            ["bucket_mb: 100", "bucket_mb: 25", "gradient_as_bucket_view: true"],
        ),
        (job(bucket_mb=200), AROUND, ["bucket_mb: 25"]),
        (
            job(optimizer="default", foreach=None, fused=None),
            AROUND,
            ["optimizer: fused", "optimizer: foreach"],
        ),
        (job(optimizer="default", foreach=None), AROUND, ["optimizer: foreach"]),
        (job(optimizer="default", foreach=None, fused=True), AROUND, ["optimizer: foreach"]),
        (
            job(checkpointing="full", channels_last=False),
            AROUND,
            ["channels_last: true", "checkpointing: none"],
        ),
        (job(checkpointing="none", split="stated"), AROUND, ["split: balanced"]),
        (job(split="balanced"), AROUND, []),
        (job(accumulate=4, sync_every=1), AROUND, ["no sync_every"]),
        (job(accumulate=4, sync_every=4), AROUND, []),
    ],
)
def test_keys_that_would_change_something_are_tried(
    workload: CallSite, around: Surroundings, codes: list[str]
) -> None:
    found = [each for each in candidates([workload], around, SHARES) if not each.refusal]
    assert [each.code for each in found] == codes


def test_remedies_of_what_the_program_writes_are_told_from_those_of_defaults() -> None:
    called = site("DistributedDataParallel", find_unused_parameters="True")
    found = {each.code: each.replaces for each in candidates([called], WIDE, SHARES)}
    assert [code for code, replaces in found.items() if replaces] == [
        "DistributedDataParallel(find_unused_parameters=False)",
        "OMP_NUM_THREADS=7",
    ]


def test_the_keys_of_several_remedies_are_set_at_once() -> None:
    rows = candidates([job(workers=0, bucket_mb=1, accumulate=4, sync_every=1)], AROUND, SHARES)
    chosen = ("workers", "default buckets", "one average of the gradients")
    found = merged(row for row in rows if row.remedy.name in chosen)
    assert found == {"workers": 2, "bucket_mb": 25, "sync_every": None}


def test_the_search_for_convolutions_is_not_tried_on_cpus() -> None:
    (found,) = candidates([job(cudnn_benchmark=False)], AROUND, SHARES)
    assert (found.code, found.refusal) == ("cudnn_benchmark: true", "for GPUs only")


def test_every_hook_that_halves_gradients_is_tried_where_less_precision_is_asked_for() -> None:
    found = candidates([job(comm_hook="none")], replace(AROUND, numerics=True), SHARES)
    assert [(each.code, each.refusal) for each in found] == [("comm_hook: bf16", ""), ("comm_hook: fp16", "")]


def test_the_keys_are_those_of_jobs() -> None:
    for row in REMEDIES:
        assert {*(row.keys(WIDE) if callable(row.keys) else row.keys)} <= SETTINGS.keys()


def test_without_a_call_nothing_is_tried() -> None:
    assert [each for each in candidates([], AROUND, SHARES) if not each.refusal] == []


def test_what_can_gain_little_by_its_ceiling_is_not_tried() -> None:
    (found,) = candidates([LOADER], AROUND, {"input": 1.5}, REMEDIES[:1])
    assert found.refusal == "waiting for data takes 1.5 % of a step"
    (found,) = candidates([LOADER], AROUND, {}, REMEDIES[:1])
    assert not found.refusal  # nothing was traced


def test_a_call_of_a_library_has_its_own_option() -> None:
    theirs = replace(LOADER, is_users=False, library="transformers")
    (found,) = candidates([theirs], AROUND, SHARES, REMEDIES[:1])
    assert found.refusal.startswith("transformers makes the call; TrainingArguments(")
    (own,) = candidates([theirs, LOADER], AROUND, SHARES, REMEDIES[:1])
    assert own.site == LOADER


def test_lightnings_two_libraries_have_options_of_their_own() -> None:
    for library, made in (("lightning.pytorch", "Trainer"), ("lightning.fabric", "Fabric")):
        theirs = replace(DDP, is_users=False, library=library)
        found = {each.remedy.name: each.refusal for each in candidates([theirs], AROUND, SHARES)}
        assert found["static graph"] == f"{library} makes the call; {made}(strategy=DDPStrategy(…))"


@pytest.mark.parametrize(
    ("library", "option"),
    [
        ("transformers", "TrainingArguments(ddp_bucket_cap_mb="),
        ("accelerate", "Accelerator(kwargs_handlers="),
    ],
)
def test_a_model_that_a_trainer_has_accelerate_make_is_the_trainers(library: str, option: str) -> None:
    loader = replace(LOADER, is_users=False, library=library)
    model = replace(DDP, is_users=False, library="accelerate")
    found = {each.remedy.name: each.refusal for each in candidates([loader, model], AROUND, SHARES)}
    assert found["large buckets"].startswith(f"{library} makes the call; {option}")


def test_options_of_a_trainer_on_the_command_line_have_the_library_make_the_change() -> None:
    """Also where accelerate makes the call; the user's own calls, and other programs', are as they were."""
    calls = (LOADER, site("DistributedDataParallel", find_unused_parameters="True"), ADAM)
    theirs = [
        replace(each, is_users=False, library=library)
        for each, library in zip(calls, ("transformers", "accelerate", "transformers"), strict=True)
    ]
    options = frozenset({*TRAINER_OPTIONS.values()} - {"ddp_static_graph"})
    takes = replace(AROUND, trainer_options=options, numerics=True)
    found = {each.code: each for each in candidates(theirs, takes, SHARES) if each.options}
    assert list(found) == [
        "--dataloader_num_workers 2 --dataloader_persistent_workers True",
        "--dataloader_pin_memory True",
        "--ddp_bucket_cap_mb 100",
        "--ddp_find_unused_parameters False",
        "--torch_compile True",
        "--bf16 True",
        "--tf32 True",
    ]
    assert [code for code, each in found.items() if each.refusal == "for GPUs only"] == [
        "--dataloader_pin_memory True",
        "--tf32 True",
    ]
    together = merged([found["--ddp_bucket_cap_mb 100"], found["--bf16 True"]])
    assert together == {"options": {"ddp_bucket_cap_mb": "100", "bf16": "True"}}
    of_5 = replace(takes, trainer_options=options | {"ddp_static_graph"})
    assert {"ddp_static_graph": "True"} in [each.options for each in candidates(theirs, of_5, SHARES)]
    assert not any(each.options for each in candidates(theirs, AROUND, SHARES))
    assert not any(each.options for each in candidates(theirs[1:2], takes, SHARES))
    (own, *_) = candidates([LOADER, *theirs[1:]], takes, SHARES)
    assert (own.site, own.options) == (LOADER, {})


def test_a_remedy_changes_all_calls_of_its_kind_in_the_users_files() -> None:
    """It is tried if it would change any of them."""
    known = replace(site("DataLoader", num_workers="2"), line=7)
    theirs = replace(LOADER, line=9, is_users=False)
    calls = [known, LOADER, theirs, ADAM, site("SGD", foreach="True")]
    found = {each.remedy.name: each for each in candidates(calls, AROUND, SHARES)}
    assert found["workers"].sites == found["persistent workers"].sites == (known, LOADER)
    assert found["fused optimizer"].code == "AdamW(fused=True, foreach=False), SGD(fused=True, foreach=False)"
    applied = replace(ADAM, applied={"fused": True, "foreach": False})
    assert found["fused optimizer"].change_at(applied) == {"fused": True}
    assert found["workers"].change_at(applied) == {}


def test_what_needs_a_gpu_is_not_tried_on_cpus() -> None:
    found = [each for each in candidates([LOADER], AROUND, SHARES) if each.refusal == "for GPUs only"]
    assert [each.code for each in found] == [
        "DataLoader(pin_memory=True)",
        "torch.backends.cudnn.benchmark = True",
        'torch.set_float32_matmul_precision("high")',
    ]


def test_what_changes_numerics_is_tried_where_that_is_asked_for() -> None:
    found = [each for each in candidates([DDP], AROUND, SHARES) if each.remedy.changes_numerics]
    assert [(each.code, each.refusal) for each in found if "GPUs" not in each.refusal] == [
        ('torch.autocast("cpu", dtype=torch.bfloat16)', CHANGES_NUMERICS),
        ("model.register_comm_hook(None, default_hooks.fp16_compress_hook)", CHANGES_NUMERICS),
    ]
    asked = replace(AROUND, numerics=True)
    tried = [each for each in candidates([DDP], asked, SHARES) if each.remedy.changes_numerics]
    assert [each.settings for each in tried if not each.refusal] == [
        {"calls": {"autocast": {"dtype": "bfloat16"}}},
        {"calls": {"comm_hook": {"compress": "fp16"}}},
    ]


def test_remedies_of_one_call_are_applied_together() -> None:
    calls = [site("DistributedDataParallel", find_unused_parameters="True"), LOADER]
    rows = {each.remedy.name: each for each in candidates(calls, WIDE, SHARES)}
    chosen = ("workers", "gradients in buckets", "no search for unused parameters", "compile", "threads")
    assert merged(rows[name] for name in chosen) == {
        "calls": {
            "DataLoader": {"num_workers": 2, "persistent_workers": True},
            "DistributedDataParallel": {"gradient_as_bucket_view": True, "find_unused_parameters": False},
            "compile": {},
        },
        "env": {"OMP_NUM_THREADS": "7"},
    }


def test_what_only_moves_data_does_not_round() -> None:
    assert {row.name for row in REMEDIES if not row.rounds} == {
        *("workers", "more workers", "persistent workers", "prefetch", "pinned memory"),
        "gradients in buckets",
    }


def test_every_row_has_a_source_and_a_name_of_its_own() -> None:
    assert len({each.name for each in REMEDIES}) == len(REMEDIES)
    assert all(each.source.startswith("https://") for each in REMEDIES)
    assert {call for _, call in OF_LIBRARIES} <= {each.call for each in REMEDIES}
