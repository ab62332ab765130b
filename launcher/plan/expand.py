"""Combinations as variants: what cannot be is left out with its reason, what is the same work is merged.

Each refusal names the key to change and the reason.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

from gpurun.launcher.errors import MachineError, Problem, SpecError
from gpurun.launcher.jobfile.checks.rules import find_misfits
from gpurun.launcher.jobfile.kinds import builtin_named
from gpurun.launcher.jobfile.load import in_order
from gpurun.launcher.jobfile.model import JobSpec
from gpurun.launcher.jobfile.read import Draft
from gpurun.launcher.jobfile.settings import ADDED_TO_THE_TOP, SETTINGS, Settings, settings_for, settings_of
from gpurun.launcher.jobfile.values import AUTO, GPU_KINDS
from gpurun.launcher.jobfile.yaml.describe import flow_text
from gpurun.launcher.jobfile.yaml.tree import Path
from gpurun.launcher.machine.accelerators import CPU, Accelerator, accelerator_of, precision_problem
from gpurun.launcher.machine.gpus.nvml import NO_LIBRARY
from gpurun.launcher.plan.combination import (
    Combination,
    VariantOrigins,
    choose_baseline,
    combinations,
    make_unique,
    variant_id,
)
from gpurun.launcher.plan.devices import (
    MachineLike,
    all_devices,
    backend_for,
    cores_per_device,
    gpu_of,
    is_part,
    notes_on,
    part_notes,
)
from gpurun.launcher.plan.model import Node, SkippedCombination, Variant, node_of_device
from gpurun.launcher.splits import BALANCED, Split, resolve_split
from gpurun.launcher.strategies import NCCL_ALGORITHMS, NCCL_ANY_PROTOCOL, STRATEGIES, Reach, Strategy
from gpurun.launcher.units import plural

NUMBER, MACHINE = "number of devices", "machine"
"""The names of what rules depend on besides keys of the job."""


@dataclass(frozen=True)
class WishedDevices:
    """The devices that a job would have."""

    names: tuple[str, ...]
    lacking: tuple[Problem, ...] = ()
    """Problems of the machine, which lacks some of them."""
    unknown: frozenset[str] = frozenset()
    """The unknown that they depend on: keys of the job, `NUMBER` or `MACHINE`."""


def _wished_devices(draft: Draft, machine: MachineLike, nodes: Sequence[Node] = ()) -> WishedDevices:
    """The devices of all nodes, also where the machine lacks some of them.

    Raises:
        SpecError: CPU and CUDA devices are mixed.
    """
    spec = draft.spec
    if not (draft.knows(("devices",)) and draft.knows(("nodes",))):
        return WishedDevices(_without_machine(spec)[0], (), frozenset({"devices", "nodes", NUMBER, MACHINE}))
    try:
        found = all_devices(spec, machine, nodes)
    except MachineError as error:
        names, is_number_known = _without_machine(spec)
        unknown = {MACHINE} if is_number_known else {MACHINE, NUMBER}
        return WishedDevices(names, error.problems, frozenset(unknown))
    problem, least = _too_few_here(spec, len(found))
    if problem is None:
        return WishedDevices(found)
    kind = accelerator_of(found[0])
    if nodes or not kind.is_host:
        names = (*found, *found[-1:] * (least - len(found)))
        return WishedDevices(names, (problem,), frozenset({MACHINE}))
    return WishedDevices(tuple(map(kind.device, range(least))), (problem,))


def _without_machine(spec: JobSpec) -> tuple[tuple[str, ...], bool]:
    """Devices of the kind that a job asks for, and whether there would be so many."""
    if isinstance(spec.devices, tuple):
        return spec.devices, True
    counts = _counts(spec)
    kind = accelerator_of(spec.devices) if spec.devices != AUTO else CPU
    return tuple(kind.device(index) for index in range(max((2, *counts)))), False


def _too_few_here(spec: JobSpec, num_devices: int) -> tuple[Problem | None, int]:
    """The problem where the machine decides which devices there are, and the number that is needed."""
    if spec.devices != AUTO and spec.devices not in GPU_KINDS:
        return None, 0
    counts = _counts(spec)
    if counts and min(counts) > num_devices:
        have = plural(num_devices, "device")
        message = f"the job needs {min(counts)} devices, but `devices: {spec.devices}` finds {have} here"
        return spec.problem(spec.place_of("device_count"), message), max(counts)
    builtin = builtin_named(spec.workload)
    if builtin and num_devices < builtin.min_devices:
        message = f"{builtin.why_devices}, but `devices: {spec.devices}` finds only one here"
        return spec.problem(("devices",), message), builtin.min_devices
    return None, 0


def _counts(spec: JobSpec) -> tuple[int, ...]:
    """The numbers of devices that a job states; one that can't be relied on is `None`."""
    stated = spec.compare.device_count or (spec.device_count,)
    return tuple(count for count in stated if count is not None)


@dataclass(frozen=True)
class _JudgedCombination:
    """A combination with the devices that it may use, for rules to judge."""

    wanted: Combination
    allowed: tuple[str, ...]
    machines: Sequence[MachineLike]
    least: int
    """The fewest samples that `balanced` may give a device."""

    @property
    def strategy(self) -> Strategy:
        return STRATEGIES[self.wanted.strategy]

    @cached_property
    def split(self) -> Split | str:
        """Samples of each device; none for a program, which splits its batch itself, and for `balanced`.

        A text says why the split doesn't fit the batch.
        """
        wanted = self.wanted
        if wanted.kind.runs_program:
            return Split("-", ())
        if not wanted.kind.trains:
            return Split("-", (1,) * wanted.device_count)
        if not wanted.has("split"):
            return Split("-", (wanted.samples,))
        try:
            return resolve_split(wanted.split, wanted.samples, wanted.device_count)
        except SpecError as error:
            return str(error)

    @property
    def samples(self) -> tuple[int, ...]:
        """The samples of each device, as far as they are known."""
        return () if isinstance(self.split, str) else self.split.samples

    @property
    def devices(self) -> tuple[str, ...]:
        """The devices that the combination uses."""
        return self.allowed[: len(self.samples) or self.wanted.device_count]

    @property
    def split_name(self) -> str:
        assert isinstance(self.split, Split), "it can't be"
        return self.split.name

    @property
    def kind(self) -> Accelerator:
        return accelerator_of(self.allowed[0])

    @property
    def is_balanced(self) -> bool:
        """Whether devices are measured to find its split."""
        wanted = self.wanted
        return wanted.has("split") and wanted.split == BALANCED and wanted.device_count > 1

    @cached_property
    def backend(self) -> str | None:
        return backend_for(self.wanted.strategy, self.devices, self.machines)


class _Refusal(NamedTuple):
    """Why a combination can't be."""

    key: str
    """The one of the job that asks for it."""
    reason: str


def refusals(case: _JudgedCombination) -> Iterator[_Refusal]:
    """Everything that can't be; what depends on a value that is refused or not known isn't judged."""
    unknown = set(case.wanted.unknown)
    for keys, reason_of in _RULES:
        if unknown.isdisjoint(keys) and (reason := reason_of(case)):
            unknown.add(keys[0])
            yield _Refusal(keys[0], reason)


def _one_device(case: _JudgedCombination) -> str | None:
    count = case.wanted.device_count
    is_wrong = case.strategy.reach is Reach.DEVICE and count != 1
    return f"{case.strategy.name} uses one device, not {count}" if is_wrong else None


def _too_few_devices(case: _JudgedCombination) -> str | None:
    count, num_devices = case.wanted.device_count, len(case.allowed)
    return f"the job has {plural(num_devices, 'device')}, not {count}" if count > num_devices else None


def _no_groups(case: _JudgedCombination) -> str | None:
    wanted, count = case.wanted, case.wanted.device_count
    if not wanted.has("shard_size") or (count % wanted.shard_size == 0 and count != wanted.shard_size):
        return None
    there = f"there {'is' if count == 1 else 'are'} {plural(count, 'device')}"
    needs = f"{case.strategy.name} needs two or more groups of {wanted.shard_size} devices, but {there}"
    return f"{needs}; use fsdp for one group of all"


def _alone_on_machine(case: _JudgedCombination) -> str | None:
    return _why_not_alone(case.wanted.workload, len(case.allowed))


def _alone(case: _JudgedCombination) -> str | None:
    return _why_not_alone(case.wanted.workload, case.wanted.device_count)


def _why_not_alone(workload: str, num_devices: int) -> str | None:
    builtin = builtin_named(workload)
    is_alone = builtin is not None and num_devices < builtin.min_devices
    return f"{builtin.why_devices}, but there is only one" if builtin and is_alone else None


def _no_such_split(case: _JudgedCombination) -> str | None:
    return case.split if isinstance(case.split, str) else None


def _can_leave_none_out(case: _JudgedCombination) -> str | None:
    if not (case.is_balanced and case.least == 0 and case.strategy.shards_parameters):
        return None
    reason = f"{case.strategy.name} needs every device in every step, so `balanced` can't leave one out"
    return f"{reason}; remove `min_local_batch: 0`"


def _graph_changes(case: _JudgedCombination) -> str | None:
    if not (case.is_balanced and case.least == 0 and case.wanted.static_graph):
        return None
    return "`balanced` may give a device no samples, which changes its graph; remove `min_local_batch: 0`"


def _no_room(case: _JudgedCombination) -> str | None:
    wanted = case.wanted
    if not case.is_balanced or wanted.samples >= case.least * wanted.device_count:
        return None
    reason = f"{plural(wanted.samples, 'sample')} can't give {wanted.device_count} devices at least"
    return f"{reason} {case.least} each; `min_local_batch: 0` lets `balanced` leave devices out"


def _spans_nodes(case: _JudgedCombination) -> str | None:
    if case.strategy.reach is not Reach.NODE or node_of_device(case.devices[-1]) == 0:
        return None
    return f"{case.strategy.name} is one process, which can't use the devices of several nodes"


def _kind_lacks_precision(case: _JudgedCombination) -> str | None:
    wanted = case.wanted
    return precision_problem(wanted.precision, case.kind) if wanted.has("precision") else None


def _strategy_lacks_precision(case: _JudgedCombination) -> str | None:
    precision = case.wanted.precision
    refusal = case.strategy.precision_refusals.get(precision)
    return f"{case.strategy.name} has no {precision}: {refusal}" if refusal else None


def _gpus_lack_precision(case: _JudgedCombination) -> str | None:
    if case.kind.is_host or not case.wanted.precision:
        return None
    capabilities = [gpu_of(name, owner).capability for name, owner in _owners(case)]
    return precision_problem(case.wanted.precision, case.kind, capabilities)


def _threads_of_gpus(case: _JudgedCombination) -> str | None:
    wanted = case.wanted
    is_wrong = wanted.has("threads") and wanted.threads != "auto" and not case.kind.is_host
    return "`threads` applies to CPU devices only" if is_wrong else None


def _not_compiled(case: _JudgedCombination) -> str | None:
    return case.strategy.compile_refusal if case.wanted.compile else None


def _not_computed_again(case: _JudgedCombination) -> str | None:
    is_wanted = case.wanted.checkpointing != Settings.checkpointing
    return case.strategy.checkpointing_refusal if is_wanted else None


def _first_is_larger(case: _JudgedCombination) -> str | None:
    first, others = case.wanted.first_bucket_mb, case.wanted.bucket_mb
    if not first or first <= others:
        return None
    return f"the first bucket of {first} MiB is larger than {others} MiB, the size of the others"


def _too_few_samples(case: _JudgedCombination) -> str | None:
    wanted = case.wanted
    if not wanted.has("accumulate"):
        return None
    # `balanced` may leave a device out, unless there are several micro-batches to be made of its samples.
    fewest_balanced = wanted.samples // wanted.device_count if wanted.accumulate > 1 else 1
    fewest = min(case.samples, default=fewest_balanced)
    if fewest >= wanted.accumulate:
        return None
    batches = plural(wanted.accumulate, "micro-batch")
    return f"{plural(fewest, 'sample')} on a device can't be divided into {batches}"


def _too_few_batches(case: _JudgedCombination) -> str | None:
    wanted = case.wanted
    if not wanted.has("accumulate") or not wanted.sync_every or wanted.sync_every <= wanted.accumulate:
        return None
    return f"a step has {plural(wanted.accumulate, 'micro-batch')}, fewer than {wanted.sync_every}"


def _several_parts(case: _JudgedCombination) -> str | None:
    if case.kind.is_host or not case.strategy.has_replicas or len(case.devices) == 1:
        return None
    reason = f"{case.strategy.name} is one process, and a process sees only one MIG instance"
    return reason if any(is_part(*owner) for owner in _owners(case)) else None


def _nccl_cannot_start(case: _JudgedCombination) -> str | None:
    """NCCL opens NVML's library, and DataParallel copies by NCCL.

    Source: nccl/src/misc/nvmlwrap.cc, `ncclNvmlEnsureInitialized`; torch/csrc/cuda/comm.cpp,
    `_broadcast_out_impl`.
    """
    has_several = case.strategy.has_replicas and case.wanted.kind.trains and len(case.devices) > 1
    if case.kind.is_host or not (has_several or case.backend == case.kind.backend):
        return None
    lacks = any(note.startswith(NO_LIBRARY) for _, owner in _owners(case) for note in owner.notes)
    return f"{case.strategy.name} needs NCCL, which doesn't start: {NO_LIBRARY}" if lacks else None


def _not_by_nccl(case: _JudgedCombination) -> str | None:
    is_wrong = case.wanted.nccl and case.backend == CPU.backend
    return f"these processes communicate by {case.backend}, not by NCCL" if is_wrong else None


def _nccl_cannot(case: _JudgedCombination) -> str | None:
    """Why NCCL would fail with this choice, or it would change nothing."""
    chosen = case.wanted.nccl
    algorithm = chosen.get("algorithm", "ring")
    if algorithm not in NCCL_ANY_PROTOCOL and chosen.get("protocol", "simple") != "simple":
        return f"NCCL's {algorithm} has no protocol but `simple`"
    if chosen and set(case.strategy.collectives).isdisjoint(NCCL_ALGORITHMS[algorithm]):
        used = " and ".join(case.strategy.collectives)
        return f"{case.strategy.name} communicates by {used}, which NCCL's {algorithm} can't do"
    return None


def _hook_deadlocks(case: _JudgedCombination) -> str | None:
    if case.wanted.comm_hook != "powersgd" or case.backend != CPU.backend:
        return None
    reason = f"torch's PowerSGD hook deadlocks with {CPU.backend}"
    return f"{reason}: it waits for a collective in the thread that would run it"


def _owners(case: _JudgedCombination) -> list[tuple[str, MachineLike]]:
    return [(name, case.machines[node_of_device(name)]) for name in case.devices]


_COUNTED = ("device_count", "strategy")
_CUT = ("split", "global_batch", *_COUNTED)
_ON_MACHINE = (*_COUNTED, "devices", MACHINE)
_RULES: tuple[tuple[tuple[str, ...], Callable[[_JudgedCombination], str | None]], ...] = (
    (_COUNTED, _one_device),
    (("device_count", NUMBER), _too_few_devices),
    (("shard_size", *_COUNTED), _no_groups),
    (("devices", "workload", NUMBER), _alone_on_machine),
    (("device_count", "devices", "workload"), _alone),
    (_CUT, _no_such_split),
    (("split", "min_local_batch", *_COUNTED), _can_leave_none_out),
    (("static_graph", "split", "min_local_batch", *_COUNTED), _graph_changes),
    ((*_CUT, "min_local_batch"), _no_room),
    (("strategy", "device_count", "devices", "nodes", NUMBER), _spans_nodes),
    (("precision", "strategy", "devices"), _kind_lacks_precision),
    (("precision", "strategy"), _strategy_lacks_precision),
    (("precision", *_ON_MACHINE), _gpus_lack_precision),
    (("threads", "strategy", "devices"), _threads_of_gpus),
    (("compile", "strategy"), _not_compiled),
    (("checkpointing", "strategy"), _not_computed_again),
    (("first_bucket_mb", "bucket_mb", "strategy"), _first_is_larger),
    (("accumulate", *_CUT), _too_few_samples),
    (("sync_every", "accumulate", "strategy"), _too_few_batches),
    (("strategy", *_ON_MACHINE), _several_parts),
    (("strategy", *_ON_MACHINE), _nccl_cannot_start),
    (("nccl", *_ON_MACHINE), _not_by_nccl),
    (("nccl", "strategy"), _nccl_cannot),
    (("comm_hook", *_ON_MACHINE), _hook_deadlocks),
)
"""Every rule with what it depends on: first the key that asks for what can't be."""
JUDGED_KEYS = frozenset(key for keys, _ in _RULES for key in keys)


ASSUMED_SAMPLES = 64
"""Samples on each device, in a plan that is made before the largest batch is known."""
MOST_REASONS = 8
"""Shown of why no combination can run."""


@dataclass(frozen=True)
class Expansion:
    """The variants of `compare` on a machine."""

    variants: tuple[Variant, ...]
    left_out: tuple[SkippedCombination, ...]
    baseline: str
    notes: tuple[str, ...]


def expand(
    spec: JobSpec,
    machine: MachineLike,
    nodes: Sequence[Node] = (),
    with_own: bool = False,
    sets: Sequence[Mapping[str, Any]] = (),
) -> Expansion:
    """The variants of a job on this machine, which of them is the baseline, and what a person should know.

    With `with_own` the job's own setting is one of them, and the baseline unless the job names another one.
    With `sets` of settings, these are the combinations.

    Raises:
        SpecError: no combination can be, there are too many, or the baseline is not one variant.
        MachineError: the machine has fewer devices than the job asks for.
    """
    judged = judge(Draft(spec), machine, nodes, with_own, sets)
    if judged.problems:
        raise SpecError(*in_order([*judged.lacking, *judged.problems], file_of(spec)))
    if judged.lacking:
        raise MachineError(*judged.lacking)
    built, devices = judged.built, judged.devices
    candidates = _named(_merge(built))
    return Expansion(
        variants=tuple(candidate.variant for candidate in candidates),
        left_out=_left_out(judged.refused),
        baseline=choose_baseline(spec, candidates, with_own),
        notes=(
            *notes_on(spec.devices, devices, machine, nodes),
            *(part_notes(devices, nodes or (machine,)) if spec.program else ()),
            *_unused(spec, built),
            *(() if with_own else _overridden(spec)),
            *_chunk_notes(candidates),
            *_repeat_notes(spec),
            *_merge_notes(built, candidates),
        ),
    )


Built = list[tuple[Combination, Variant]]
Refused = list[tuple[Combination, tuple[_Refusal, ...]]]


@dataclass
class Judged:
    """The variants of a job on the devices of this machine, and the problems that exclude others."""

    devices: tuple[str, ...]
    lacking: list[Problem]
    """Problems of what the machine lacks; what is judged is then judged as if it had that."""
    problems: list[Problem]
    """Problems of the job."""
    built: Built = field(default_factory=list)
    is_open: bool = False
    """Whether others may be possible, for all that is known of them."""
    refused: Refused = field(default_factory=list)


def judge(
    draft: Draft,
    machine: MachineLike,
    nodes: Sequence[Node] = (),
    with_own: bool = False,
    sets: Sequence[Mapping[str, Any]] = (),
) -> Judged:
    """Everything that is wrong with a job on this machine, as far as its values are known.

    Raises:
        SpecError: there are too many combinations, or no such devices together.
    """
    wished = _wished_devices(draft, machine, nodes)
    judged = Judged(wished.names, list(wished.lacking), [])
    if NUMBER not in wished.unknown:
        judged.problems += find_misfits(draft, judged.devices)
    unknown = draft.without(judged.problems).unknown.union((name,) for name in wished.unknown)
    unknown |= _following(draft.spec, unknown)
    share = cores_per_device(judged.devices, machine, nodes)
    num_local = sum(node_of_device(device) == 0 for device in judged.devices)
    for wanted in combinations(draft.spec, len(judged.devices), num_local, with_own, unknown, sets):
        case = _JudgedCombination(wanted, judged.devices, nodes or (machine,), draft.spec.min_local_batch)
        if refused := tuple(refusals(case)):
            judged.refused.append((wanted, refused))
        elif wanted.unknown & JUDGED_KEYS:
            judged.is_open = True
        else:
            judged.built.append((wanted, _variant(case, share)))
    if not (judged.built or judged.is_open):
        judged.problems += _nothing_left(draft.spec, judged.refused)
    return judged


def assume_batch(
    spec: JobSpec, machine: MachineLike, nodes: Sequence[Node] = ()
) -> tuple[JobSpec, tuple[str, ...]]:
    """The job with a batch to plan with where the largest one isn't found yet, and a note of it."""
    if spec.global_batch != "max" or spec.compare.global_batch:
        return spec, ()
    batch = ASSUMED_SAMPLES * len(_wished_devices(Draft(spec), machine, nodes).names)
    figures = f"all figures here, such as how long it takes, assume {batch} samples"
    note = f"`global_batch: max` is found when the run begins; {figures}"
    return replace(spec, global_batch=batch), (note,)


def _following(spec: JobSpec, unknown: frozenset[Path]) -> set[Path]:
    """Keys that the job leaves open, and whose values follow from what isn't known."""
    sources = {"device_count": NUMBER, "global_batch": "workload"}
    return {
        (key,)
        for key, source in sources.items()
        if (source,) in unknown and key not in spec.stated | spec.compare.stated
    }


def file_of(spec: JobSpec) -> str:
    return spec.source.file if spec.source else ""


def _left_out(refused: Refused) -> tuple[SkippedCombination, ...]:
    """The combinations that can't be, each once: without params and seeds, which decide nothing."""
    left_out = [
        SkippedCombination(
            {key: value for key, value in wanted.stated.items() if SETTINGS[key].decides and wanted.has(key)},
            "; ".join(reason for _, reason in reasons),
        )
        for wanted, reasons in refused
    ]
    return tuple(item for position, item in enumerate(left_out) if item not in left_out[:position])


def _variant(case: _JudgedCombination, share: int) -> Variant:
    """The variant of a combination that can be, still without an id.

    Args:
        case: the combination on its devices.
        share: of the cores, a device's own.
    """
    wanted, samples = case.wanted, case.samples
    values = settings_of(wanted) | {
        "device_count": len(case.devices),
        "split": samples,
        "global_batch": sum(samples) or wanted.global_batch,
        "threads": share if wanted.threads == "auto" else wanted.threads,
        "first_bucket_mb": _first_bucket_mb(wanted),
        "sync_every": wanted.sync_every or (wanted.accumulate if wanted.has("sync_every") else None),
    }
    return Variant(id="", devices=case.devices, split_name=case.split_name, varied=_varied(wanted), **values)


def _first_bucket_mb(wanted: Combination) -> int | None:
    """torch's value where the job says nothing."""
    if not wanted.has("first_bucket_mb"):
        return None
    by_default = 1 if wanted.bucket_mb == Settings.bucket_mb else wanted.bucket_mb
    return wanted.first_bucket_mb or by_default


def _varied(wanted: Combination) -> dict[str, Any]:
    """The words about `compare` that the variant's name needs, besides what each begins with."""
    is_named = STRATEGIES[wanted.strategy].in_jobs
    return {
        key: value
        for key, value in wanted.stated.items()
        if wanted.has(key) and not (is_named and SETTINGS[key].names_variant)
    }


def _merge(built: Built) -> list[VariantOrigins]:
    """Combinations that come to the same work make one candidate, in the order of the first ones."""
    merged: dict[str, VariantOrigins] = {}
    for wanted, variant in built:
        known = merged.setdefault(work_of(variant), VariantOrigins(variant, ()))
        merged[work_of(variant)] = replace(known, origins=(*known.origins, wanted))
    return list(merged.values())


def processes_of(variant: Variant) -> str:
    """A key that is equal for variants that share processes: equal texts for equal settings and devices."""
    common = {
        name: getattr(variant, name) for name, setting in SETTINGS.items() if not setting.shares_processes
    }
    return json.dumps((common, variant.devices), sort_keys=True)


def processes_in_turns(variant: Variant) -> str:
    """A key that is equal for variants that take turns in the same processes, each with its own model.

    Their strategies and what these take may differ, and other settings of a model.
    """
    common = {
        name: getattr(variant, name)
        for name, setting in SETTINGS.items()
        if not (setting.shares_processes or setting.option or setting.takes_turns)
    }
    return json.dumps(common, sort_keys=True)


def work_of(variant: Variant) -> str:
    """The work of a variant, whatever it is called."""
    split = variant.split or variant.split_name
    return json.dumps((settings_of(variant), variant.devices, split), sort_keys=True)


def _named(candidates: list[VariantOrigins]) -> list[VariantOrigins]:
    variants = [candidate.variant for candidate in candidates]
    names = make_unique([variant_id(variant) for variant in variants])
    return [
        replace(candidate, variant=replace(candidate.variant, id=name))
        for candidate, name in zip(candidates, names, strict=True)
    ]


def _chunk_notes(candidates: list[VariantOrigins]) -> list[str]:
    """Batches that run out before every device has a chunk."""
    notes: dict[str, None] = {}  # each once, in order
    for candidate in candidates:
        chunks = len(candidate.variant.devices)
        for wanted in candidate.origins:
            if chunks < wanted.device_count:
                cut = f"{wanted.global_batch} over {wanted.device_count} devices"
                notes[f"{cut} gives {plural(chunks, 'chunk')}: runs on {chunks}"] = None
    return list(notes)


def _repeat_notes(spec: JobSpec) -> list[str]:
    """Values that are listed more than once."""
    notes: dict[str, None] = {}  # each once, in order
    for key, values in spec.compare.lists().items():
        for at, value in enumerate(values):
            if value in values[:at]:
                notes[f"`compare: {key}` lists {flow_text(value)} more than once: measured once"] = None
    return list(notes)


def _merge_notes(built: Built, candidates: list[VariantOrigins]) -> list[str]:
    """Splits that are called differently and come to the same samples."""
    kept = {work_of(candidate.variant): candidate.variant for candidate in candidates}
    notes: dict[str, None] = {}
    for _, variant in built:
        first = kept[work_of(variant)]
        if variant.split_name != first.split_name:
            samples = "/".join(map(str, first.split))
            notes[f"{first.split_name} and {variant.split_name} are both {samples}: measured once"] = None
    return list(notes)


def _unused(spec: JobSpec, built: Built) -> list[str]:
    """Values that the job gives a setting that none of its strategies has, or that need another one."""
    names, defaults = " and ".join(dict.fromkeys(variant.strategy for _, variant in built)), Settings()
    notes = (
        f"{_why_unused(key, names, built)}: {_shown(value)} is not used"
        for key, setting in SETTINGS.items()
        if spec.kind in setting.kinds and not any(wanted.has(key) for wanted, _ in built)
        for value in spec.compare.lists().get(key, (getattr(spec, key),))
        if value != getattr(defaults, key)
    )
    return list(dict.fromkeys(notes))


def _overridden(spec: JobSpec) -> list[str]:
    """Values at the top of the job that `compare` doesn't list, though it varies their keys.

    `gpurun tune` compares with them.
    """
    defaults = Settings()
    return [
        f"`{key}: {_shown(value)}` is not used: `compare.{key}` overrides it"
        for key, values in spec.compare.lists().items()
        if key in SETTINGS.keys() - ADDED_TO_THE_TOP
        and (value := getattr(spec, key)) not in values
        and value != getattr(defaults, key)
    ]


def _why_unused(key: str, names: str, built: Built) -> str:
    setting = SETTINGS[key]
    is_held = any(key in settings_for(wanted.kind, wanted.strategy) for wanted, _ in built)
    return f"`{key}` needs {setting.needs}" if is_held else f"{names} has no `{key}`"


def _shown(value: Any) -> str:
    return "/".join(map(str, value)) if isinstance(value, tuple) else flow_text(value)


def _nothing_left(spec: JobSpec, refused: Refused) -> list[Problem]:
    """Why no combination can run: what none of them can do, each at its key; else what rules out each."""
    reasons = [set(found) for _, found in refused]
    everywhere = set.intersection(*reasons)
    listed = dict.fromkeys(refusal for _, found in refused for refusal in found)
    problems = [_no_combination(spec, [refusal]) for refusal in listed if refusal in everywhere]
    if all(found > everywhere for found in reasons):
        problems.append(_no_combination(spec, [refusal for refusal in listed if refusal not in everywhere]))
    return problems


def _no_combination(spec: JobSpec, refused: Sequence[_Refusal]) -> Problem:
    """The problem, at the key that all refusals share; a key not in the job comes from its strategy."""
    shown = [refusal.reason for refusal in refused[:MOST_REASONS]]
    if more := len(refused) - len(shown):
        shown.append(f"and {plural(more, 'more reason')}")
    keys = {refusal.key for refusal in refused}
    place = ("compare",) if len(keys) > 1 else spec.place_of(*keys)
    if spec.problem(place, "") == spec.problem((), ""):
        place = spec.place_of("strategy")
    text = f" {shown[0]}" if len(shown) == 1 else "".join(f"\n    {reason}" for reason in shown)
    key = next(iter(keys)) if len(keys) == 1 else ""
    hint = f"use ddp, or remove `{key}`" if key in ("compile", "checkpointing") else None
    return spec.problem(place, f"no combination can run:{text}", hint)
