"""Combinations that no job can run: each refusal names the key to change and the reason."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from gpurun.launcher.errors import MachineError, Problem, SpecError
from gpurun.launcher.jobfile.device_values import AUTO, GPU_KINDS
from gpurun.launcher.jobfile.kinds import builtin_named
from gpurun.launcher.jobfile.model import JobSpec
from gpurun.launcher.jobfile.read import Draft
from gpurun.launcher.jobfile.settings import Settings
from gpurun.launcher.machine.accelerators import CPU, Accelerator, accelerator_of, precision_problem
from gpurun.launcher.plan.combination import Combination
from gpurun.launcher.plan.devices import MachineLike, all_devices, backend_for, gpu_of, is_part
from gpurun.launcher.plan.nodes import Node, node_of_device
from gpurun.launcher.splits import BALANCED, Split, resolve_split
from gpurun.launcher.strategies import NCCL_ALGORITHMS, NCCL_ANY_PROTOCOL, Reach, Strategy
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


def wished_devices(draft: Draft, machine: MachineLike, nodes: Sequence[Node] = ()) -> WishedDevices:
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
        return spec.problem(place_of(spec, "device_count"), message), max(counts)
    builtin = builtin_named(spec.workload)
    if builtin and num_devices < builtin.min_devices:
        message = f"{builtin.why_devices}, but `devices: {spec.devices}` finds only one here"
        return spec.problem(("devices",), message), builtin.min_devices
    return None, 0


def _counts(spec: JobSpec) -> tuple[int, ...]:
    """The numbers of devices that a job states; one that can't be relied on is `None`."""
    stated = spec.compare.device_count or (spec.device_count,)
    return tuple(count for count in stated if count is not None)


def place_of(spec: JobSpec, key: str) -> tuple[str, ...]:
    """The place at which the job states a key."""
    return ("compare", key) if getattr(spec.compare, key, None) else (key,)


@dataclass(frozen=True)
class JudgedCombination:
    """A combination with the devices that it may use, for rules to judge."""

    wanted: Combination
    allowed: tuple[str, ...]
    machines: Sequence[MachineLike]
    least: int
    """The fewest samples that `balanced` may give a device."""

    @property
    def strategy(self) -> Strategy:
        return self.wanted.runs_as

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


class Refusal(NamedTuple):
    """Why a combination can't be."""

    key: str
    """The one of the job that asks for it."""
    reason: str


def refusals(case: JudgedCombination) -> Iterator[Refusal]:
    """Everything that can't be; what depends on a value that is refused or not known isn't judged."""
    unknown = set(case.wanted.unknown)
    for keys, reason_of in _RULES:
        if unknown.isdisjoint(keys) and (reason := reason_of(case)):
            unknown.add(keys[0])
            yield Refusal(keys[0], reason)


def _one_device(case: JudgedCombination) -> str | None:
    count = case.wanted.device_count
    is_wrong = case.strategy.reach is Reach.DEVICE and count != 1
    return f"{case.strategy.name} uses one device, not {count}" if is_wrong else None


def _too_few_devices(case: JudgedCombination) -> str | None:
    count, num_devices = case.wanted.device_count, len(case.allowed)
    return f"the job has {plural(num_devices, 'device')}, not {count}" if count > num_devices else None


def _no_groups(case: JudgedCombination) -> str | None:
    wanted, count = case.wanted, case.wanted.device_count
    if not wanted.has("shard_size") or (count % wanted.shard_size == 0 and count != wanted.shard_size):
        return None
    there = f"there {'is' if count == 1 else 'are'} {plural(count, 'device')}"
    needs = f"{case.strategy.name} needs two or more groups of {wanted.shard_size} devices, but {there}"
    return f"{needs}; use fsdp for one group of all"


def _alone_on_machine(case: JudgedCombination) -> str | None:
    return _why_not_alone(case.wanted.workload, len(case.allowed))


def _alone(case: JudgedCombination) -> str | None:
    return _why_not_alone(case.wanted.workload, case.wanted.device_count)


def _why_not_alone(workload: str, num_devices: int) -> str | None:
    builtin = builtin_named(workload)
    is_alone = builtin is not None and num_devices < builtin.min_devices
    return f"{builtin.why_devices}, but there is only one" if builtin and is_alone else None


def _no_such_split(case: JudgedCombination) -> str | None:
    return case.split if isinstance(case.split, str) else None


def _can_leave_none_out(case: JudgedCombination) -> str | None:
    if not (case.is_balanced and case.least == 0 and case.strategy.shards_parameters):
        return None
    reason = f"{case.strategy.name} needs every device in every step, so `balanced` can't leave one out"
    return f"{reason}; remove `min_local_batch: 0`"


def _graph_changes(case: JudgedCombination) -> str | None:
    if not (case.is_balanced and case.least == 0 and case.wanted.static_graph):
        return None
    return "`balanced` may give a device no samples, which changes its graph; remove `min_local_batch: 0`"


def _no_room(case: JudgedCombination) -> str | None:
    wanted = case.wanted
    if not case.is_balanced or wanted.samples >= case.least * wanted.device_count:
        return None
    reason = f"{plural(wanted.samples, 'sample')} can't give {wanted.device_count} devices at least"
    return f"{reason} {case.least} each; `min_local_batch: 0` lets `balanced` leave devices out"


def _spans_nodes(case: JudgedCombination) -> str | None:
    if case.strategy.reach is not Reach.NODE or node_of_device(case.devices[-1]) == 0:
        return None
    return f"{case.strategy.name} is one process, which can't use the devices of several nodes"


def _kind_lacks_precision(case: JudgedCombination) -> str | None:
    wanted = case.wanted
    return precision_problem(wanted.precision, case.kind) if wanted.has("precision") else None


def _strategy_lacks_precision(case: JudgedCombination) -> str | None:
    precision = case.wanted.precision
    refusal = case.strategy.precision_refusals.get(precision)
    return f"{case.strategy.name} has no {precision}: {refusal}" if refusal else None


def _gpus_lack_precision(case: JudgedCombination) -> str | None:
    if case.kind.is_host or not case.wanted.precision:
        return None
    capabilities = [gpu_of(name, owner).capability for name, owner in _owners(case)]
    return precision_problem(case.wanted.precision, case.kind, capabilities)


def _threads_of_gpus(case: JudgedCombination) -> str | None:
    wanted = case.wanted
    is_wrong = wanted.has("threads") and wanted.threads != "auto" and not case.kind.is_host
    return "`threads` applies to CPU devices only" if is_wrong else None


def _not_compiled(case: JudgedCombination) -> str | None:
    return case.strategy.compile_refusal if case.wanted.compile else None


def _not_computed_again(case: JudgedCombination) -> str | None:
    is_wanted = case.wanted.checkpointing != Settings.checkpointing
    return case.strategy.checkpointing_refusal if is_wanted else None


def _first_is_larger(case: JudgedCombination) -> str | None:
    first, others = case.wanted.first_bucket_mb, case.wanted.bucket_mb
    if not first or first <= others:
        return None
    return f"the first bucket of {first} MiB is larger than {others} MiB, the size of the others"


def _too_few_samples(case: JudgedCombination) -> str | None:
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


def _too_few_batches(case: JudgedCombination) -> str | None:
    wanted = case.wanted
    if not wanted.has("accumulate") or not wanted.sync_every or wanted.sync_every <= wanted.accumulate:
        return None
    return f"a step has {plural(wanted.accumulate, 'micro-batch')}, fewer than {wanted.sync_every}"


def _several_parts(case: JudgedCombination) -> str | None:
    if case.kind.is_host or not case.strategy.has_replicas or len(case.devices) == 1:
        return None
    reason = f"{case.strategy.name} is one process, and a process sees only one MIG instance"
    return reason if any(is_part(*owner) for owner in _owners(case)) else None


def _not_by_nccl(case: JudgedCombination) -> str | None:
    is_wrong = case.wanted.nccl and case.backend == CPU.backend
    return f"these processes communicate by {case.backend}, not by NCCL" if is_wrong else None


def _nccl_cannot(case: JudgedCombination) -> str | None:
    """Why NCCL would fail with this choice, or it would change nothing."""
    chosen = case.wanted.nccl
    algorithm = chosen.get("algorithm", "ring")
    if algorithm not in NCCL_ANY_PROTOCOL and chosen.get("protocol", "simple") != "simple":
        return f"NCCL's {algorithm} has no protocol but `simple`"
    if chosen and set(case.strategy.collectives).isdisjoint(NCCL_ALGORITHMS[algorithm]):
        used = " and ".join(case.strategy.collectives)
        return f"{case.strategy.name} communicates by {used}, which NCCL's {algorithm} can't do"
    return None


def _hook_deadlocks(case: JudgedCombination) -> str | None:
    if case.wanted.comm_hook != "powersgd" or case.backend != CPU.backend:
        return None
    reason = f"torch's PowerSGD hook deadlocks with {CPU.backend}"
    return f"{reason}: it waits for a collective in the thread that would run it"


def _owners(case: JudgedCombination) -> list[tuple[str, MachineLike]]:
    return [(name, case.machines[node_of_device(name)]) for name in case.devices]


_COUNTED = ("device_count", "strategy")
_CUT = ("split", "global_batch", *_COUNTED)
_ON_MACHINE = (*_COUNTED, "devices", MACHINE)
_RULES: tuple[tuple[tuple[str, ...], Callable[[JudgedCombination], str | None]], ...] = (
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
    (("nccl", *_ON_MACHINE), _not_by_nccl),
    (("nccl", "strategy"), _nccl_cannot),
    (("comm_hook", *_ON_MACHINE), _hook_deadlocks),
)
"""Every rule with what it depends on: first the key that asks for what can't be."""
JUDGED_KEYS = frozenset(key for keys, _ in _RULES for key in keys)
