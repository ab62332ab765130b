"""Mistakes that show once the devices are known: from the job itself, or from the machine."""

from collections.abc import Iterable, Iterator, Sequence

from gpurun.launcher.errors import Problem
from gpurun.launcher.jobfile.checks.workload import given_params
from gpurun.launcher.jobfile.device_values import Devices, Nodes, node_bounds, nodes_named
from gpurun.launcher.jobfile.kinds import builtin_workloads
from gpurun.launcher.jobfile.params import signature_of_builtin
from gpurun.launcher.jobfile.read import Draft
from gpurun.launcher.jobfile.yaml.tree import Path
from gpurun.launcher.machine.accelerators import Accelerator, accelerator_of, precision_problem
from gpurun.launcher.splits import parts_of
from gpurun.launcher.strategies import strategy_named
from gpurun.launcher.units import plural


def named_devices(devices: Devices, nodes: Nodes) -> tuple[str, ...] | None:
    """The devices of all nodes where the job names them; `None` if the machines decide."""
    num_nodes, most = node_bounds(nodes)
    if num_nodes < most:
        return None
    if isinstance(devices, tuple):
        return devices if nodes_named(devices) else devices * num_nodes
    kind, _, count = devices.partition(":")
    return (kind,) * int(count) * num_nodes if count else None


def find_misplaced(draft: Draft) -> Iterator[Problem]:
    """Devices that name their node: all of them do, and every node has one."""
    devices, (num_nodes, most) = draft.spec.devices, node_bounds(draft.spec.nodes)
    if not (named := nodes_named(devices)):
        return
    if len(named) < len(devices):
        message = "some of `devices` name their node, as `cuda:1@0` does, and some do not"
    elif num_nodes < most:
        message = f"`devices` names its nodes, but the job has {draft.spec.nodes} of them"
    elif set(named) != set(range(num_nodes)):
        message = (
            f"`devices` has devices of node {_listed(named)}, but the job has {plural(num_nodes, 'node')}"
        )
    else:
        return
    hint = "one GPU of node 0 and two of node 1 are [cuda:0@0, cuda:0@1, cuda:1@1]"
    yield draft.spec.problem(("devices",), message, hint)


def _listed(numbers: Iterable[int]) -> str:
    found = sorted(set(numbers))
    return ", ".join(map(str, found[:8])) + (", …" if len(found) > 8 else "")


def find_misfits(draft: Draft, devices: Sequence[str]) -> list[Problem]:
    """The problems of settings that can't run on these devices, whatever they are combined with."""
    return [
        *_too_many(draft, len(devices)),
        *_foreign_precision(draft, accelerator_of(devices[0])),
        *_foreign_splits(draft, len(devices)),
        *_foreign_lists(draft, len(devices)),
    ]


def _too_many(draft: Draft, num_devices: int) -> Iterator[Problem]:
    counts = draft.values("device_count")
    if counts is None or None in counts or min(counts) <= num_devices:
        return
    message = f"the job needs {min(counts)} devices, but `devices` has only {num_devices}"
    yield draft.spec.problem(_place(draft, "device_count"), message, "add devices, or lower `device_count`")


def _foreign_precision(draft: Draft, kind: Accelerator) -> Iterator[Problem]:
    """A precision that this kind of device lacks, if the job varies no other."""
    precisions = set(draft.values("precision") or ())
    message = precision_problem(precisions.pop(), kind) if len(precisions) == 1 else None
    if message is not None:
        hint = f"use fp32 on {kind.title} devices"
        yield draft.spec.problem(_place(draft, "precision"), message, hint)


def _foreign_splits(draft: Draft, num_devices: int) -> Iterator[Problem]:
    """Splits for a number of devices that no variant has. Strategies without a split use none of them."""
    strategies, stated = draft.values("strategy"), draft.values("device_count")
    if strategies is None or stated is None or not any(strategy_named(name).has_split for name in strategies):
        return
    counts = [num_devices if count is None else count for count in stated]
    for path, split in draft.placed("split"):
        parts = parts_of(split)
        if parts is not None and parts not in counts:
            text = split if isinstance(split, str) else str(list(split))[:80]
            used = " or ".join(str(count) for count in dict.fromkeys(counts))
            message = f"the split {text} is for {plural(parts, 'device')}, but the job uses {used}"
            yield draft.spec.problem(path, message, "a split needs one number per device")


def _foreign_lists(draft: Draft, num_devices: int) -> Iterator[Problem]:
    """Parameters of built-in workloads with a value for each device, but for another number of devices."""
    counts = draft.values("device_count")
    if counts is None:
        return
    used = max(num_devices if count is None else count for count in counts)
    strategies = [strategy_named(name) for name in draft.values("strategy") or ()]
    used = max((strategy.most_devices(used, used) for strategy in strategies), default=used)
    per_device = {name for _, workload in draft.placed("workload") for name in _per_device_params(workload)}
    for place, given in given_params(draft):
        for name in sorted(per_device & given.keys()):
            values = given[name]
            if isinstance(values, list | tuple) and not used <= len(values) <= num_devices:
                message = (
                    f"`{name}` has {plural(len(values), 'value')}, but the job uses {plural(used, 'device')}"
                )
                hint = "give one value per device, in the job's order, or a single number for all"
                yield draft.spec.problem((*place, name), message, hint)


def _per_device_params(workload: str | None) -> Iterator[str]:
    if workload is None or workload not in builtin_workloads():
        return
    signature = signature_of_builtin(workload)
    yield from (param.name for param in signature.params if param.is_per_device) if signature else ()


def _place(draft: Draft, key: str) -> Path:
    return ("compare", key) if getattr(draft.spec.compare, key) else (key,)
