"""What makes a variant is said once: whatever derives from `Settings` forgets none of its fields."""

import inspect
import json
from dataclasses import fields, replace
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import msgspec
import pytest

from gpurun.launcher.compare.diff import diff_runs
from gpurun.launcher.compare.label import variant_label
from gpurun.launcher.compare.model import Comparison, Noise, VariantResult
from gpurun.launcher.errors import SpecError
from gpurun.launcher.jobfile.kinds import KIND_KEYS, PROGRAM, TRAINING, JobKind
from gpurun.launcher.jobfile.load import load_job
from gpurun.launcher.jobfile.model import JobSpec
from gpurun.launcher.jobfile.schema import job_reference, job_schema
from gpurun.launcher.jobfile.settings import SETTINGS, Settings, settings_for
from gpurun.launcher.plan.build import build_plan
from gpurun.launcher.plan.expand import processes_in_turns
from gpurun.launcher.plan.launch_config import launch_config_for, program_config
from gpurun.launcher.plan.model import Plan, Variant
from gpurun.launcher.plan.rank_config import LaunchConfig
from gpurun.launcher.report.tensorboard import hyperparameters
from gpurun.launcher.run.attempts import model_of
from gpurun.launcher.rundir.records import ProgramConfig, VariantConfig
from gpurun.launcher.search.space import keys_of, processes_for
from gpurun.launcher.strategies import IN_JOBS, STRATEGIES
from tests.measured import measured
from tests.unit.house.source import identifiers, modules
from tests.unit.plan.machines import FakeGpu, FakeMachine
from tests.wording import Wording

JOBS: dict[JobKind, dict[str, Any]] = {
    TRAINING: {"workload": "gpt", "global_batch": 8, "devices": "cpu:2"},
    PROGRAM: {"script": "one.py", "devices": "cpu:2"},
}
VALUES: dict[str, tuple[Any, Any]] = {
    "workload": ("gpt", "mlp"),
    "script": ("one.py", "two.py"),
    "module": ("one", "two"),
    "strategy": ("ddp", "dp"),
    "device_count": (1, 2),
    "split": ("even", [6, 2]),
    "global_batch": (8, 4),
    "precision": ("fp32", "bf16"),
    "compile": (False, True),
    "checkpointing": ("full", 2),
    "optimizer": ("foreach", "fused"),
    "workers": (0, 1),
    "prefetch": (1, 2),
    "channels_last": (False, True),
    "threads": (1, 2),
    "accumulate": (1, 2),
    "sync_every": (1, 2),
    "bucket_mb": (10, 50),
    "first_bucket_mb": (2, 3),
    "static_graph": (False, True),
    "comm_hook": ("fp16", "bf16"),
    "cudnn_benchmark": (False, True),
    "gradient_as_bucket_view": (False, True),
    "nccl": ({"algorithm": "ring"}, {"algorithm": "tree", "channels": 4}),
    "reshard": (False, True),
    "shard_size": (2, 3),
    "params": ({"layers": 1}, {"layers": 2}),
    "args": (["--one"], ["--two"]),
    "options": ({"level": "1"}, {"level": "2"}),
    "calls": ({"DataLoader": {"num_workers": 1}}, {"DataLoader": {"num_workers": 2}}),
    "env": ({"LEVEL": "1"}, {"LEVEL": "2"}),
    "seed": (1, 2),
}
"""Two values of every setting; a new field needs a line here."""
NEEDED: dict[str, dict[str, Any]] = {
    "nccl": {"devices": ["cuda:0", "cuda:1"]},
    "reshard": {"strategy": "fsdp"},
    "shard_size": {"strategy": "hsdp", "devices": "cpu:6"},
    "sync_every": {"accumulate": 2},
}
"""Of settings that mean nothing to the default strategy, or next to the defaults of others."""

OTHER_WORK = (
    "script",
    "args",
    "options",
    "compile",
    "channels_last",
    "cudnn_benchmark",
    "seed",
    "threads",
    "precision",
)
VARYING = [name for name, setting in SETTINGS.items() if setting.compare]
MACHINE = FakeMachine(gpus=(FakeGpu("GPU-0"), FakeGpu("GPU-1")))


def job_of(tmp_path: Path, name: str, changes: dict[str, Any]) -> JobSpec:
    """A job of the kind that has the setting, with these keys besides or instead."""
    for program in ("one.py", "two.py"):
        (tmp_path / program).touch()
    kind = TRAINING if TRAINING in SETTINGS[name].kinds else PROGRAM
    job = {**JOBS[kind], **NEEDED.get(name, {}), **changes}
    if "module" in changes:
        del job["script"]
    path = tmp_path / "job.yaml"
    path.write_text(json.dumps(job))
    return load_job(path)


def varying(tmp_path: Path, name: str, **changes: Any) -> JobSpec:
    return job_of(tmp_path, name, {"compare": {name: list(VALUES[name])}, **changes})


def two_variants(tmp_path: Path, name: str) -> list[Variant]:
    """The variants of two jobs that differ in one setting."""
    jobs = (job_of(tmp_path, name, {name: value}) for value in VALUES[name])
    return [variant for job in jobs for variant in build_plan(job, MACHINE).variants]


def result_of(variant: Variant) -> VariantResult:
    names = [
        *("strategy", "devices", "split_name", "global_batch", "precision", "accumulate", "varied"),
        *("workload", "threads"),
    ]
    settings = {name: getattr(variant, name) for name in names}
    return measured(variant.id, variant.split, launch_ms=(1.0, 1.0), **settings)


def comparison_of(spec: JobSpec) -> Comparison:
    """A run's comparison, as it is after it was written and read back; its variant is called `v`."""
    (variant,) = build_plan(spec, MACHINE).variants
    results = (replace(result_of(variant), id="v"),)
    found = Comparison(1, "job", spec.resolved(), {}, "v", None, Noise(None, None, None), results, None, True)
    read: Comparison = msgspec.json.decode(msgspec.json.encode(found), type=Comparison)
    return read


def test_every_setting_has_values_to_test_it_with() -> None:
    assert VALUES.keys() == SETTINGS.keys() == {field.name for field in fields(Settings)}


@pytest.mark.parametrize("name", VARYING)
def test_what_varies_makes_variants_of_names_of_their_own(tmp_path: Path, name: str) -> None:
    plan = build_plan(varying(tmp_path, name), MACHINE)
    first, second = plan.variants
    assert first.id != second.id
    assert variant_label(first) != variant_label(second)
    values = {json.dumps(getattr(variant, name)) for variant in plan.variants}
    assert len(values) == 2
    read = msgspec.json.decode(msgspec.json.encode(plan), type=Plan)
    assert msgspec.json.encode(read) == msgspec.json.encode(plan)


@pytest.mark.parametrize("name", VARYING)
def test_what_varies_reaches_the_ranks(tmp_path: Path, name: str) -> None:
    """Else two variants of the same work would be compared."""
    spec = varying(tmp_path, name)
    plan = build_plan(spec, MACHINE)
    first, second = (given_to_ranks(spec, plan, variant) for variant in plan.variants)
    assert first != second, f"the configuration of a launch has no {name}: the worker can't obey it"


def given_to_ranks(spec: JobSpec, plan: Plan, variant: Variant) -> tuple[Any, ...]:
    """What the processes of a variant read and inherit, without the names of launch and variant."""
    launch = next(launch for launch in plan.launches if variant.id in launch.variants)
    inherited = [(process.devices, process.env) for process in launch.processes]
    here = Path("/r")
    if variant.kind is PROGRAM:
        program = program_config(spec, variant, "", run_dir=here, job_dir=here, is_first=True)
        return replace(program, variants=()), inherited
    config = launch_config_for(plan, spec, launch, run_dir=here, job_dir=here, machine=MACHINE)
    (own,) = (replace(each, id="") for each in config.variants if each.id == variant.id)
    return replace(config, launch="", variants=(own,), baseline=None), inherited


@pytest.mark.parametrize("kind", [LaunchConfig, VariantConfig, ProgramConfig])
def test_the_worker_reads_all_that_it_is_given(kind: type) -> None:
    read = {
        name for module in modules().values() if module.package == "worker" for _, name in identifiers(module)
    }
    others = {name for name, row in SETTINGS.items() if TRAINING not in row.kinds} | {"device_count"}
    assert {field.name for field in fields(kind)} - others <= read
    assert others - {"device_count"} >= {"script", "module", "args", "options", "calls", "env"}


@pytest.mark.parametrize("name", VARYING)
def test_what_varies_is_in_hyperparameters_and_json(tmp_path: Path, name: str) -> None:
    results = [result_of(variant) for variant in build_plan(varying(tmp_path, name), MACHINE).variants]
    columns = [hyperparameters(result) for result in results]
    shown = [{key: row[key] for key in row if key.partition(".")[0] == name} for row in columns]
    assert shown[0]
    assert shown[0] != shown[1]
    first, second = (msgspec.to_builtins(result) for result in results)
    kept = [(each["varied"].get(name), each.get(name), len(each["devices"])) for each in (first, second)]
    assert kept[0] != kept[1]


@pytest.mark.parametrize("name", VARYING)
def test_the_schema_and_the_reference_say_what_varies(name: str) -> None:
    schema = job_schema()
    assert len(schema["$defs"]["Compare"]["properties"][name]["description"]) > 10
    assert f"| {SETTINGS[name].compare} |" in job_reference()
    if SETTINGS[name].baseline:
        assert len(schema["$defs"]["Baseline"]["properties"][name]["description"]) > 10
        assert f"| {SETTINGS[name].baseline} |" in job_reference()


@pytest.mark.parametrize("name", [name for name in VARYING if SETTINGS[name].baseline])
def test_a_baseline_is_found_by_every_setting(tmp_path: Path, name: str) -> None:
    plan = build_plan(varying(tmp_path, name, baseline={name: VALUES[name][1]}), MACHINE)
    assert plan.baseline == plan.variants[1].id


@pytest.mark.parametrize("name", VARYING)
def test_variants_share_what_the_row_of_the_setting_says(tmp_path: Path, name: str) -> None:
    """Processes, which only batches do; a failure while the model is built; the task, to be compared."""
    plan, setting = build_plan(varying(tmp_path, name), MACHINE), SETTINGS[name]
    first, second = plan.variants
    assert (len({launch.group for launch in plan.launches}) == 1) is setting.shares_processes
    assert (model_of(first) != model_of(second)) is setting.builds_model
    assert first.same_task(second) is not setting.is_task


@pytest.mark.parametrize("name", SETTINGS)
def test_jobs_share_what_the_row_of_the_setting_says(tmp_path: Path, name: str) -> None:
    """Turns of strategies, and ranks from their start; a search knows every setting that differs."""
    setting, variants = SETTINGS[name], two_variants(tmp_path, name)
    first, second = variants
    may_differ = setting.shares_processes or setting.option or setting.takes_turns
    assert (processes_in_turns(first) == processes_in_turns(second)) is may_differ
    if name in VARYING and TRAINING in setting.kinds:
        needs_others = setting.needs_processes or name == "strategy"
        assert (processes_for(first) != processes_for(second)) is needs_others
    assert first.same_but_devices(second) is setting.names_variant
    assert name in {key.setting for key in keys_of(variants)}


@pytest.mark.parametrize("name", [name for name in VARYING if SETTINGS[name].for_training])
def test_a_micro_benchmark_refuses_what_training_steps_have(tmp_path: Path, name: str) -> None:
    own = next(value for value in VALUES[name] if value != getattr(Settings(), name))
    for given in ({name: own}, {"compare": {name: list(VALUES[name])}}):
        with pytest.raises(SpecError, match=f"it has no `{name}`"):
            job_of(tmp_path, name, {"workload": "allreduce", **given})


@pytest.mark.parametrize("strategy", IN_JOBS)
def test_a_strategy_takes_the_options_that_it_has(strategy: str) -> None:
    """By the signature of its class and of those that it passes keyword arguments on to."""
    found = resolve_name(STRATEGIES[strategy].worker)
    taken = {
        parameter.name
        for each in found.__mro__
        for parameter in inspect.signature(each.__init__).parameters.values()
        if parameter.kind is parameter.KEYWORD_ONLY
    }
    has = {
        name for name, each in SETTINGS.items() if each.option and name in settings_for(TRAINING, strategy)
    }
    assert taken & SETTINGS.keys() == has


def test_every_option_is_of_a_strategy() -> None:
    options = {name for name, setting in SETTINGS.items() if setting.option}
    of = {name for name in options for strategy in IN_JOBS if name in settings_for(TRAINING, strategy)}
    assert of == options


@pytest.mark.parametrize("name", SETTINGS)
def test_diff_compares_the_same_work_only(tmp_path: Path, name: str) -> None:
    a, b = (comparison_of(job_of(tmp_path, name, {name: value})) for value in VALUES[name])
    diff = diff_runs(a, b)
    if SETTINGS[name].same_work:
        assert not any(f"{name}: " in pair.reason for pair in diff.not_comparable)
    else:
        (found,) = diff.not_comparable
        assert f"{name}: " in found.reason
    assert not diff_runs(a, a).not_comparable


@pytest.mark.parametrize("name", OTHER_WORK)
def test_these_are_other_work(name: str) -> None:
    assert not SETTINGS[name].same_work


def test_diff_ignores_what_a_strategy_does_not_have(tmp_path: Path) -> None:
    jobs = (job_of(tmp_path, "bucket_mb", {"strategy": "dp", "bucket_mb": mib}) for mib in (10, 25))
    a, b = map(comparison_of, jobs)
    assert not diff_runs(a, b).not_comparable


FOREIGN = [
    (name, kind)
    for name, setting in SETTINGS.items()
    for kind in (TRAINING, PROGRAM)
    if kind not in setting.kinds and name not in KIND_KEYS
]


@pytest.mark.parametrize(("name", "kind"), FOREIGN)
def test_a_setting_of_another_kind_of_job_is_refused(tmp_path: Path, name: str, kind: JobKind) -> None:
    (tmp_path / "one.py").touch()
    path = tmp_path / "job.yaml"
    cases: tuple[tuple[str, dict[str, Any]], ...] = (
        (name, {name: VALUES[name][0]}),
        (f"compare.{name}", {"compare": {name: list(VALUES[name])}}),
        (f"baseline.{name}", {"baseline": {name: VALUES[name][0]}}),
    )
    for place, changes in cases:
        path.write_text(json.dumps(JOBS[kind] | changes))
        with pytest.raises(SpecError, match=f"`{place}` applies to"):
            load_job(path)


def test_a_program_and_its_module_do_not_vary(tmp_path: Path) -> None:
    for name in ("script", "module"):
        with pytest.raises(SpecError, match=f"unknown key `{name}` under `compare`"):
            varying(tmp_path, name)


def test_a_strategy_without_buckets_is_measured_once_and_named_without_them(tmp_path: Path) -> None:
    spec = job_of(tmp_path, "bucket_mb", {"compare": {"strategy": ["dp", "ddp"], "bucket_mb": [10, 50]}})
    plan = build_plan(spec, MACHINE)
    assert [variant.id for variant in plan.variants] == [
        "dp-2-even",
        "ddp-2-even-bucket_mb-10",
        "ddp-2-even-bucket_mb-50",
    ]
    assert [variant.bucket_mb for variant in plan.variants] == [0, 10, 50]


def test_a_bucket_size_that_no_strategy_has_is_noted(tmp_path: Path, wording: Wording) -> None:
    spec = job_of(tmp_path, "bucket_mb", {"strategy": "dp", "bucket_mb": 10})
    wording(build_plan(spec, MACHINE).notes)


def test_a_plan_of_an_older_run_still_loads() -> None:
    old = {
        "id": "ddp-2-even",
        "strategy": "ddp",
        "devices": ["cpu:0", "cpu:1"],
        "split": [4, 4],
        "split_name": "even",
        "global_batch": 8,
        "precision": "fp32",
        "accumulate": 1,
        "params": {},
        "seed": 0,
        "varied": {},
    }
    variant = msgspec.json.decode(json.dumps(old), type=Variant)
    assert (variant.workload, variant.threads, variant.kind, variant.world_size) == ("", 0, TRAINING, 2)
    program = {**old, "strategy": "script", "split": [], "split_name": "-"}
    program |= {"global_batch": None, "precision": None, "accumulate": None, "seed": None}
    assert msgspec.json.decode(json.dumps(program), type=Variant).kind is PROGRAM
