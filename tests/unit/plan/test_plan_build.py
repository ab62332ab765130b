"""The plan: groups, launches in random order, processes, and what workers get."""

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from statistics import mean
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpurun.launcher.errors import SpecError
from gpurun.launcher.jobfile.model import JobSpec
from gpurun.launcher.plan.build import build_plan
from gpurun.launcher.plan.estimate import estimate_s
from gpurun.launcher.plan.launch_config import fit_at_once, turns_of
from gpurun.launcher.plan.model import Plan
from gpurun.launcher.plan.rank_config import LaunchConfig
from gpurun.launcher.report.terminal.plan import headlines
from gpurun.launcher.rundir.records import (
    MemoryPeak,
    ProfileConfig,
    VariantConfig,
)
from tests.unit.plan import machines
from tests.unit.plan.machines import FakeGpu, FakeMachine, planned
from tests.wording import Wording

CPU = FakeMachine(8)
GPUS = FakeMachine(16, (FakeGpu("GPU-a"), FakeGpu("GPU-b")))


def spec_of(**job: Any) -> JobSpec:
    return machines.unchecked(json.dumps({"name": "t", "workload": "gpt", "global_batch": 64, **job}))


def configs(spec: JobSpec, machine: FakeMachine) -> Sequence[LaunchConfig]:
    return planned(spec, machine)[1]


def test_splits_share_one_launch() -> None:
    plan = build_plan(spec_of(compare={"split": ["even", [48, 16], "7:1"]}, until="fixed"), CPU)
    (launch,) = plan.launches
    assert (launch.id, launch.group, launch.repetition, launch.rounds) == ("01-ddp-2", "ddp-2", 0, 28)
    assert launch.variants == ("ddp-2-even", "ddp-2-48-16", "ddp-2-7-1")


def test_sets_of_settings_are_the_variants_in_place_of_what_is_compared() -> None:
    """However many keys they change, there are no more variants than sets."""
    keys = {"workers": 2, "compile": True, "bucket_mb": 100, "static_graph": True, "optimizer": "fused"}
    sets = [{}, *({key: value} for key, value in keys.items()), keys]
    plan = build_plan(spec_of(compare={"strategy": ["ddp", "dp"]}, until="fixed"), CPU, sets=sets)
    assert len(plan.variants) == len(sets)
    assert [variant.varied for variant in plan.variants] == sets
    assert plan.variant(plan.baseline).varied == {}
    assert (plan.variants[-1].workers, plan.variants[-1].bucket_mb) == (2, 100)


def test_batches_and_micro_batches_share_one_launch() -> None:
    plan = build_plan(spec_of(compare={"global_batch": [64, 32], "accumulate": [1, 2]}), CPU)
    assert len({launch.group for launch in plan.launches}) == 1


def test_the_order_of_a_repetition_is_a_fair_coin() -> None:
    """After the first: a burst of other load that lasts longer than a launch meets both alike on average."""
    apart = {"compare": {"strategy": ["ddp", "dp"]}, "steps": {"together": "never"}, "budget": "1h"}
    jobs = [spec_of(**apart, name=f"job-{number}") for number in range(20)]
    firsts, changes = [], []
    for job in jobs:
        groups = [launch.group for launch in build_plan(job, CPU).launches]
        assert groups[:2] == ["ddp-2", "dp-2"]
        coins = [first == "ddp-2" for first in groups[2::2]]
        assert coins == [second == "dp-2" for second in groups[3::2]]
        firsts += coins
        changes += [coin != other for coin, other in pairwise(coins)]
    assert build_plan(jobs[0], CPU) == build_plan(jobs[0], CPU)  # so that a run can be resumed
    assert mean(firsts) == pytest.approx(0.5, abs=0.06)  # four deviations
    assert mean(changes) == pytest.approx(0.5, abs=0.06)


TURNS = {"single": "single-1", "dp": "dp-2", "ddp": "ddp-2", "zero1": "zero1-2"}


@pytest.mark.parametrize(
    ("job", "groups"),
    [
        ({}, ["together"]),
        ({"steps": {"launches": 3, "together": "never"}}, list(TURNS.values())),
        ({"bind": "cores"}, ["together", "dp-2"]),
        ({"compare": {"strategy": ["ddp", "single"], "device_count": [1, 2]}}, ["ddp-1", "together"]),
        ({"compare": {"strategy": ["ddp", "dp"], "bucket_mb": [1, 25]}}, ["together"]),
        ({"compare": {"strategy": ["ddp", "dp"], "threads": [1, 2]}}, ["together"]),
        ({"compare": {"strategy": ["ddp", "dp"], "precision": ["fp32", "bf16"]}}, ["together"]),
        ({"compare": {"strategy": ["dp", "single"]}}, ["together"]),
    ],
)
def test_strategies_share_their_processes_after_their_first_launches(
    job: dict[str, Any], groups: list[str]
) -> None:
    """A `ddp` of one device has a process group of its own; bound ranks have too few cores for `dp`."""
    fixed = {"compare": {"strategy": list(TURNS)}, "until": "fixed", "steps": {"launches": 3}}
    plan = build_plan(spec_of(**fixed | job), CPU)
    by_repetition = [[x for x in plan.launches if x.repetition == number] for number in range(4)]
    _, second, third, fourth = ([launch.group for launch in launches] for launches in by_repetition)
    assert sorted(second) == sorted(third) == sorted(groups)
    assert fourth == (second if "together" in groups else [])
    for launches in by_repetition:
        measured = [variant for launch in launches for variant in launch.variants]
        assert sorted(measured) in (sorted(variant.id for variant in plan.variants), [])
    for launch in plan.launches:
        sizes = [plan.variant(variant).world_size for variant in launch.variants]
        assert len(launch.processes) == max(sizes)


@pytest.mark.parametrize("together", ["auto", "always"])
def test_on_gpus_the_first_process_sees_what_its_strategies_need(together: str) -> None:
    """By default strategies don't share GPUs' memory."""
    job = {"devices": "cuda", "compare": {"strategy": ["ddp", "dp"]}, "until": "fixed"}
    plan = build_plan(spec_of(**job, steps={"launches": 2, "together": together}), GPUS)
    shared = [launch for launch in plan.launches if launch.group == "together"]
    assert len(shared) == (2 if together == "always" else 0)
    for first, second in (launch.processes for launch in shared):
        assert first.devices == ("cuda:0", "cuda:1")
        assert second.devices == ("cuda:1",)
        assert first.env["CUDA_VISIBLE_DEVICES"].split(",")[1:] == [second.env["CUDA_VISIBLE_DEVICES"]]


def test_with_a_budget_there_are_as_many_short_launches_as_may_fit() -> None:
    compare = {"strategy": ["ddp", "dp"], "split": ["even", [48, 16]]}
    job: dict[str, Any] = {"compare": compare, "steps": {"together": "never"}}
    plan = build_plan(spec_of(**job), CPU)
    assert plan.budget_s == 180.0
    assert [launch.id for launch in plan.launches[:4]] == ["01-ddp-2", "02-dp-2", "03-dp-2", "04-ddp-2"]
    assert {launch.rounds for launch in plan.launches} == {3}
    assert len(plan.launches) == 2 * 64
    assert len(build_plan(spec_of(**job, budget="20s"), CPU).launches) == 2 * 10
    assert len(build_plan(spec_of(**job, budget="3s"), CPU).launches) == 2 * 6


def test_a_budget_that_one_variant_does_not_use_is_noted(wording: Wording) -> None:
    (note,) = build_plan(spec_of(budget="3s"), CPU).all_notes
    (of_program,) = build_plan(spec_of(budget="3s", workload=None, script="train.py"), CPU).all_notes
    wording(note, of_program)
    assert build_plan(spec_of(), CPU).all_notes == ()
    assert build_plan(spec_of(budget="3s", compare={"split": ["even", "3:1"]}), CPU).all_notes == ()


@pytest.mark.parametrize("job", [{}, {"compare": {"workload": ["gpt", "mlp"]}, "workload": None}])
def test_what_compares_nothing_has_a_fixed_size(job: dict[str, Any]) -> None:
    plan = build_plan(spec_of(**job), CPU)
    assert plan.budget_s is None
    assert {launch.rounds for launch in plan.launches if launch.repetition == 0} <= {28, 5}


@pytest.mark.parametrize(("launches", "rounds", "each"), [(1, 28, 28), (4, 28, 7), (5, 28, 6), (28, 1, 1)])
def test_rounds_are_spread_over_launches(launches: int, rounds: int, each: int) -> None:
    plan = build_plan(spec_of(steps={"launches": launches, "rounds": rounds}), CPU)
    assert [launch.rounds for launch in plan.launches] == [each] * launches


def test_what_needs_processes_of_its_own_is_a_group() -> None:
    compare = {
        "precision": ["fp32", "bf16"],
        "params": [{"a": 1}, {"a": 2}],
        "seed": [1, 2],
        "device_count": [1, 2],
    }
    plan = build_plan(spec_of(compare=compare, steps={"launches": 1}), CPU)
    groups = [launch.group for launch in plan.launches]
    assert len(set(groups)) == len(groups) == 16
    assert "ddp-2-precision-bf16-a-1-seed-2" in groups


def test_a_process_per_ddp_rank() -> None:
    (launch,) = build_plan(spec_of(), CPU).launches
    first, second = launch.processes
    assert second.env == {
        "RANK": "1",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "0",
        "GLOO_SOCKET_IFNAME": "lo",
        "CUDA_VISIBLE_DEVICES": "",
    }
    assert (first.devices, second.devices) == (("cpu:0",), ("cpu:1",))


def test_one_process_for_dp_and_single() -> None:
    plan = build_plan(spec_of(compare={"strategy": ["dp", "single"]}, steps={"launches": 1}), GPUS)
    dp, single = (launch.processes for launch in plan.launches)
    assert [process.devices for process in (*dp, *single)] == [("cuda:0", "cuda:1"), ("cuda:0",)]
    assert dp[0].env["CUDA_VISIBLE_DEVICES"] == "GPU-a,GPU-b"
    assert single[0].env["CUDA_VISIBLE_DEVICES"] == "GPU-a"
    assert dp[0].env["WORLD_SIZE"] == "1"
    assert "GLOO_SOCKET_IFNAME" not in dp[0].env


def test_ddp_ranks_see_their_own_gpu_only() -> None:
    (launch,) = build_plan(spec_of(devices=["cuda:1", "cuda:0"]), GPUS).launches
    assert [process.env["CUDA_VISIBLE_DEVICES"] for process in launch.processes] == ["GPU-b", "GPU-a"]


def test_a_config_holds_all_that_workers_need() -> None:
    splits = {"split": ["even", [48, 16]]}
    spec = spec_of(compare=splits, accumulate=2, params={"width": 8}, seed=3, until="fixed")
    (config,) = configs(spec, CPU)
    assert config == LaunchConfig(
        launch="01-ddp-2",
        run_dir="/run",
        workload="gpt",
        job_dir="/job",
        params={"width": 8},
        strategy="ddp",
        devices=("cpu", "cpu"),
        backend="gloo",
        precision="fp32",
        seed=3,
        threads=4,
        variants=(
            VariantConfig("ddp-2-even", (32, 32), 2, sync_every=2),
            VariantConfig("ddp-2-48-16", (48, 16), 2, sync_every=2),
        ),
        baseline="ddp-2-even",
        warmup=0,
        rounds=28,
        gradient_check=True,
        profile=ProfileConfig(3),
        memory=True,
        ablation_rounds=6,
        draw="/run",
        device_count=2,
        bucket_mb=25,
        first_bucket_mb=1,
        reshard=False,
        shard_size=0,
        device_names=("cpu:0", "cpu:1"),
    )
    assert msgspec.json.decode(msgspec.json.encode(config), type=LaunchConfig) == config


def test_checks_and_traces_belong_to_a_groups_first_launch() -> None:
    job = {"compare": {"strategy": ["ddp", "dp"]}, "steps": {"together": "never"}}
    found = configs(spec_of(**job, until="fixed"), CPU)
    assert [config.gradient_check for config in found] == [True, True] + [False] * 10
    assert [config.profile is not None for config in found] == [True, True] + [False] * 10
    assert [config.memory for config in found] == [True, True] + [False] * 10
    assert [each.ablation_rounds for each in found] == [5, 0, 0, 1] + [0] * 8  # six rounds, of `ddp` alone


def test_the_baseline_is_named_only_where_it_runs() -> None:
    found = configs(spec_of(compare={"strategy": ["ddp", "dp"]}, steps={"launches": 1}), CPU)
    assert [config.baseline for config in found] == ["ddp-2-even", None]


def test_what_a_trace_holds_and_of_which_ranks(wording: Wording) -> None:
    profile = {"steps": 2, "modules": True, "ranks": [1]}
    (config,) = configs(spec_of(profile=profile), CPU)
    assert config.profile == ProfileConfig(2, modules=True, ranks=(1,))
    with wording.raises(SpecError):
        build_plan(spec_of(profile={"ranks": [0, 2]}), CPU)


def test_what_is_turned_off_is_not_asked_of_workers() -> None:
    (config,) = configs(spec_of(profile={"steps": 0}, gradient_check=False), CPU)
    assert (config.profile, config.gradient_check, config.ablation_rounds) == (None, False, 0)


@pytest.mark.parametrize(
    ("devices", "strategy", "seen", "backend"),
    [
        (["cuda:0", "cuda:1"], "ddp", ("cuda:0", "cuda:0"), "nccl"),
        (["cuda:0", "cuda:0"], "ddp", ("cuda:0", "cuda:0"), "gloo"),
        (["cuda:1", "cuda:0"], "dp", ("cuda:0", "cuda:1"), None),
        (["cuda:1", "cuda:1"], "dp", ("cuda:0", "cuda:0"), None),
        (["cuda:1"], "single", ("cuda:0",), None),
        ("cpu:2", "dp", ("cpu", "cpu"), None),
        ("cpu:2", "ddp", ("cpu", "cpu"), "gloo"),
    ],
)
def test_devices_as_the_worker_sees_them(
    devices: Any, strategy: str, seen: tuple[str, ...], backend: str | None
) -> None:
    (config,) = configs(spec_of(devices=devices, strategy=strategy), GPUS)
    assert (config.devices, config.backend) == (seen, backend)


@pytest.mark.parametrize(("cores", "threads"), [(1, 1), (2, 1), (8, 4), (9, 4)])
def test_a_cpu_device_is_a_share_of_the_cores_also_alone(cores: int, threads: int) -> None:
    found = configs(spec_of(devices="cpu:2", compare={"strategy": ["single", "ddp"]}), FakeMachine(cores))
    assert {config.threads for config in found} == {threads}


def test_a_plan_that_is_far_too_large() -> None:
    job = spec_of(
        global_batch=10_000, devices="cpu:256", compare={"seed": list(range(50))}, steps={"launches": 100}
    )
    with pytest.raises(SpecError, match="1,262,500 processes"):
        build_plan(job, CPU)


def test_a_plan_survives_its_file() -> None:
    plan = build_plan(spec_of(compare={"strategy": ["single", "ddp"], "split": ["even", [48, 16]]}), CPU)
    again = msgspec.json.decode(msgspec.json.encode(plan), type=Plan)
    assert again == plan


@given(
    st.lists(st.sampled_from(["single", "dp", "ddp"]), min_size=1, max_size=3, unique=True),
    st.integers(1, 9),
    st.integers(1, 40),
)
def test_every_variant_gets_its_rounds_and_neighbours_pair(
    strategies: list[str], launches: int, rounds: int
) -> None:
    plan = build_plan(
        spec_of(
            compare={"strategy": strategies},
            steps={"launches": launches, "rounds": rounds, "together": "never"},
        ),
        CPU,
    )
    for variant in plan.variants:
        mine = [launch for launch in plan.launches if variant.id in launch.variants]
        assert rounds <= sum(launch.rounds for launch in mine) < rounds + launches
        assert [launch.repetition for launch in mine] == list(range(launches))
    assert [launch.repetition for launch in plan.launches] == sorted(x.repetition for x in plan.launches)


def test_longer_runs_are_estimated_longer() -> None:
    spec = spec_of(compare={"split": ["even", [48, 16]]}, until="fixed")
    plan = build_plan(spec, CPU)
    assert 10 < estimate_s(plan, spec) < 120
    longer = replace(plan, launches=plan.launches * 2)
    assert estimate_s(longer, spec) == 2 * estimate_s(plan, spec)


def test_devices_that_share_a_core_take_longer_and_are_named_as_a_range() -> None:
    spec = spec_of(devices="cpu:16", until="fixed")
    fitting, crowded = build_plan(spec, FakeMachine(16)), build_plan(spec, FakeMachine(2))
    assert estimate_s(crowded, spec) == 8 * estimate_s(fitting, spec)
    assert headlines(crowded, spec)[0].endswith(", on cpu:0 to cpu:15 (16)")


def test_a_step_that_is_known_to_be_long_is_in_the_estimate(wording: Wording) -> None:
    """The search for the largest batch has made such steps."""
    spec = spec_of(compare={"split": ["even", [48, 16]]}, until="fixed")
    plan = replace(build_plan(spec, CPU), step_s=10.0)
    assert estimate_s(plan, spec) > 10.0 * sum(launch.rounds for launch in plan.launches)
    wording(headlines(plan, spec)[1])
    assert headlines(replace(plan, step_s=0.002), spec)[1].endswith(" if steps are short")


@pytest.mark.parametrize(
    ("free_gib", "peaks", "fits"),
    [
        (10, {"ddp-2-even": (2, 2), "dp-2-even": (3,)}, True),
        (8, {"ddp-2-even": (2, 2), "dp-2-even": (3,)}, False),
        (10, {"ddp-2-even": (2, 2)}, False),
    ],
)
def test_strategies_are_held_at_once_only_where_the_memory_is_known_to_suffice(
    free_gib: float, peaks: dict[str, tuple[int, ...]], fits: bool
) -> None:
    """The peaks of a strategy's ranks add up on a host; a fifth of the memory stays free."""
    plan = build_plan(spec_of(compare={"strategy": ["ddp", "dp"]}, until="fixed"), CPU)
    turns = turns_of(plan, plan.launches[-1], plan.launches[-1].variants)
    assert [(turn.variants, len(turn.processes)) for turn in turns] == [
        (("ddp-2-even",), 2),
        (("dp-2-even",), 1),
    ]
    found = {
        variant: {rank: MemoryPeak(parameters=gib << 30) for rank, gib in enumerate(of_ranks)}
        for variant, of_ranks in peaks.items()
    }
    assert fit_at_once(turns, found, {"memory_available_gib": free_gib, "gpus": []}) == fits


def test_on_gpus_what_their_allocators_held_decides() -> None:
    job = {"devices": "cuda", "compare": {"strategy": ["ddp", "dp"]}, "until": "fixed"}
    plan = build_plan(spec_of(**job, steps={"together": "always"}), GPUS)
    turns = turns_of(plan, plan.launches[-1], plan.launches[-1].variants)
    of_gpu = MemoryPeak(parameters=1 << 30, reserved=30 << 30)
    peaks = {"ddp-2-even": {0: of_gpu, 1: of_gpu}, "dp-2-even": {0: of_gpu}}
    for gib, used_gib, fits in (
        (80.0, None, True),
        (80.0, 10.0, False),
        (70.0, 0.0, False),
        (None, 0.0, False),
    ):
        busy = {"memory_gib": 80.0, "used_gib": 80.0}  # none of the job's
        gpus = [{"memory_gib": 80.0}, {"memory_gib": gib, "used_gib": used_gib}, busy]
        assert fit_at_once(turns, peaks, {"memory_available_gib": 1.0, "gpus": gpus}) == fits


def test_ranks_on_one_gpu_share_its_memory() -> None:
    job = {"devices": ["cuda:0", "cuda:0"], "compare": {"strategy": ["ddp", "zero1"]}, "until": "fixed"}
    plan = build_plan(spec_of(**job, steps={"together": "always"}), GPUS)
    turns = turns_of(plan, plan.launches[-1], plan.launches[-1].variants)
    of_rank = MemoryPeak(parameters=1 << 30, reserved=9 << 30)
    peaks = {variant.id: {0: of_rank, 1: of_rank} for variant in plan.variants}
    for gib, fits in ((48.0, True), (40.0, False)):
        host = {"memory_available_gib": 1.0, "gpus": [{"memory_gib": gib}, {"memory_gib": 80.0}]}
        assert fit_at_once(turns, peaks, host) == fits
