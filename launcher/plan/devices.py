"""Which devices a job means: of this machine, or of all its nodes."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, replace

from gpurun.launcher.errors import GpurunError, MachineError, Problem, SpecError
from gpurun.launcher.grouping import grouped
from gpurun.launcher.jobfile.model import JobSpec
from gpurun.launcher.jobfile.values import AUTO, ONE_KIND, devices_on, mixed_kinds
from gpurun.launcher.machine.accelerators import ACCELERATORS, CPU, Accelerator, accelerator_of, gpu_kinds
from gpurun.launcher.machine.gpus.gpu import GpuProperties
from gpurun.launcher.machine.host import Machine
from gpurun.launcher.machine.process_tree import free_cores
from gpurun.launcher.plan.model import Node, NodeGpu, Variant, devices_of_node, node_of_device
from gpurun.launcher.strategies import STRATEGIES
from gpurun.launcher.units import plural

Devices = str | tuple[str, ...]

_AUTO_CPU_DEVICES = 2


MachineLike = Machine | Node
"""Either has what planning needs. `cuda:i` is the i-th of its GPUs of that kind."""


def resolve_devices(devices: Devices, machine: MachineLike) -> tuple[str, ...]:
    """Names of the devices, `cpu:0`, `cpu:1`, … or `cuda:0`, …, in the order in which a split counts them.

    A CPU device is a share of the cores, so CPU devices are numbered by their position.

    Raises:
        SpecError: CPU and CUDA devices are mixed.
        MachineError: a GPU is asked for that is not there, or that torch can't use.
    """
    found = named_devices(devices, machine)
    for name in found:
        if not accelerator_of(name).is_host and (problem := gpu_of(name, machine).unusable):
            raise MachineError(f"{name} ({gpu_of(name, machine).name}) can't be used: {problem}")
    return found


def named_devices(devices: Devices, machine: MachineLike) -> tuple[str, ...]:
    """As `resolve_devices`, but also GPUs that torch can't use.

    Raises:
        SpecError: as `resolve_devices`.
        MachineError: a GPU is asked for that is not there.
    """
    if devices == AUTO:
        return _free_gpus(machine) or _any_gpus(machine) or _cpus(min(_AUTO_CPU_DEVICES, machine.cpu_cores))
    kind = accelerator_of(devices if isinstance(devices, str) else devices[0])
    if isinstance(devices, str):
        if kind.is_host:
            return _cpus(int(devices.partition(":")[2]))
        return _gpus(kind, machine) or _refuse(f"`devices: {devices}`", kind, machine)
    devices = tuple(_by_position(name, machine) for name in devices)
    titles = {accelerator_of(name).title for name in devices}
    if len(titles) > 1:
        raise SpecError(f"{mixed_kinds(titles)}: {ONE_KIND}")
    if kind.is_host:
        return _shares(devices)
    num_gpus = len(gpus_of(kind, machine))
    missing = [name for name in devices if gpu_index(name) >= num_gpus]
    return devices if not missing else _refuse(f"the job asks for {', '.join(missing)}", kind, machine)


def _shares(names: tuple[str, ...]) -> tuple[str, ...]:
    """CPU devices that are named one by one.

    Raises:
        SpecError: they aren't numbered from 0: no core belongs to a number.
    """
    shares = _cpus(len(names))
    if any(":" in name and name != share for name, share in zip(names, shares, strict=True)):
        shared = "CPU devices are equal shares of the cores, numbered from 0"
        count = int(names[0].partition(":")[2]) if len(names) == 1 else len(names)
        hint = f"write {CPU.device(count)} alone"
        raise SpecError(Problem(f"{shared}, got {', '.join(names)}", hint))
    return shares


def job_devices(spec: JobSpec, machine: MachineLike, node: int = 0) -> tuple[str, ...]:
    """The devices that a job asks for on this machine, which has that node rank.

    Raises:
        SpecError: as `resolve_devices`.
        MachineError: as `resolve_devices`, with the place in the job file.
    """
    try:
        return resolve_devices(devices_on(spec.devices, node), machine)
    except (MachineError, SpecError) as error:
        found = [spec.problem(("devices",), each.message, each.hint) for each in error.problems]
        raise type(error)(*found) from error


def busy_notes(wish: Devices, devices: tuple[str, ...], machine: MachineLike) -> tuple[str, ...]:
    """Notes on GPUs that `auto` has left out, and on used ones that other processes use, too."""
    notes = []
    for name, gpu in _named_gpus(machine):
        if gpu.busy_with and name in devices:
            notes.append(f"{name} is also used by other processes, which affects the times: {gpu.busy_with}")
        elif gpu.busy_with and wish == AUTO:
            notes.append(f"{name} is left out, because other processes use it: {gpu.busy_with}")
        elif gpu.unusable and wish == AUTO:
            notes.append(f"{name} is left out, because torch can't use it: {gpu.unusable}")
    return tuple(notes)


def device_notes(wish: Devices, devices: tuple[str, ...], machine: MachineLike) -> tuple[str, ...]:
    """Notes about these devices to read before they are measured."""
    kind = accelerator_of(devices[0])
    notes = [*machine.notes] if wish == AUTO or not kind.is_host else []
    if shared := shared_gpus(devices, machine):
        why = f"{kind.backend.upper()} doesn't support that"
        turns = "" if machine.has_mps or len(shared) > 1 else "; without MPS they take turns on it"
        notes.append(f"{', '.join(shared)} {_share_text(shared)}: {why}, so DDP uses gloo{turns}")
    if kind.is_host and len(devices) > machine.cpu_cores:
        cores = plural(machine.cpu_cores, "core")
        notes.append(f"{len(devices)} CPU devices share {cores}: they slow each other down")
    free = machine.free_cores
    if kind.is_host and free is not None and free < machine.cpu_cores:
        used = f"{machine.cpu_cores - free} of {plural(machine.cpu_cores, 'core')}"
        notes.append(f"other processes use {used}: the devices share {plural(free, 'core')}")
    return tuple(notes)


def _share_text(shared: Sequence[str]) -> str:
    return "is shared by several ranks" if len(shared) == 1 else "are parts of one GPU"


def shared_gpus(devices: Sequence[str], machine: MachineLike) -> list[str]:
    """The devices that are on one GPU with another of them: by the bus, as NCCL judges it.

    Source: nccl/src/init.cc, `initTransportsRank`: "Duplicate GPU detected".
    """
    if accelerator_of(devices[0]).is_host:
        return []
    places = {name: gpu_of(name, machine).bus or name for name in devices}
    counts = Counter(places[name] for name in devices)
    return [name for name, place in places.items() if counts[place] > 1]


def is_part(device: str, machine: MachineLike) -> bool:
    """Whether the device is a part of a GPU."""
    prefix = accelerator_of(device).part_prefix
    return prefix is not None and gpu_of(device, machine).uuid.startswith(prefix)


def gpu_index(name: str) -> int:
    """Position of `cuda:i` (`cuda:i@node`) among its machine's GPUs of that kind."""
    return int(name.partition("@")[0].partition(":")[2])


def gpus_of(kind: Accelerator, machine: MachineLike) -> list[GpuProperties]:
    """The machine's GPUs of one kind, in the order in which a job file counts them."""
    return [gpu for gpu in machine.gpus if gpu.kind == kind.name]


def gpu_of(device: str, machine: MachineLike) -> GpuProperties:
    """The GPU that `cuda:i` (`cuda:i@node`) names."""
    return gpus_of(accelerator_of(device), machine)[gpu_index(device)]


def _named_gpus(machine: MachineLike) -> list[tuple[str, GpuProperties]]:
    """All GPUs, each with its name in a job file."""
    return [
        (kind.device(index), gpu) for kind in gpu_kinds() for index, gpu in enumerate(gpus_of(kind, machine))
    ]


def _by_position(name: str, machine: MachineLike) -> str:
    """`cuda:i` for the UUID of a GPU or MIG instance, which may be cut short; other names as they are."""
    if not name.startswith(accelerator_of(name).uuid_prefixes):
        return name
    found = [device for device, gpu in _named_gpus(machine) if gpu.uuid.startswith(name)]
    if len(found) == 1:
        return found[0]
    uuids = "".join(f"\n    {device} is {gpu.uuid}" for device, gpu in _named_gpus(machine))
    what = "several GPUs have a UUID that begins with" if found else "no available GPU has the UUID"
    raise MachineError(f"`devices`: {what} {name}{uuids}")


def _free_gpus(machine: MachineLike) -> tuple[str, ...]:
    """The GPUs that torch can use and nothing else uses, of the first kind that has some."""
    free = [name for name, gpu in _named_gpus(machine) if not (gpu.busy_with or gpu.unusable)]
    return tuple(name for name in free if accelerator_of(name) is accelerator_of(free[0]))


def _any_gpus(machine: MachineLike) -> tuple[str, ...]:
    """All GPUs of the first kind that has some; those that torch can use, if it can use any."""
    found = next((found for kind in gpu_kinds() if (found := _gpus(kind, machine))), ())
    return tuple(name for name in found if not gpu_of(name, machine).unusable) or found


def visible_gpus(
    devices: tuple[str, ...], machine: MachineLike, only_present: bool = False
) -> Mapping[str, str]:
    """The UUIDs of the GPUs that a process may see, by environment variable; it sees none of other kinds.

    UUIDs mean the same GPUs whatever order CUDA or an outer CUDA_VISIBLE_DEVICES counts in.

    Args:
        only_present: of kinds of which the machine has a GPU.
    """
    return {
        kind.visible_variable: ",".join(
            gpu_of(name, machine).uuid for name in dict.fromkeys(devices) if accelerator_of(name) is kind
        )
        or kind.sees_none
        for kind in gpu_kinds()
        if kind.visible_variable is not None and (gpus_of(kind, machine) or not only_present)
    }


def _gpus(kind: Accelerator, machine: MachineLike) -> tuple[str, ...]:
    return tuple(kind.device(index) for index in range(len(gpus_of(kind, machine))))


def _cpus(count: int) -> tuple[str, ...]:
    return tuple(CPU.device(index) for index in range(max(1, count)))


def _refuse(wish: str, kind: Accelerator, machine: MachineLike) -> tuple[str, ...]:
    raise MachineError(f"{wish}, but {_inventory(kind, machine)}\n    `gpurun devices` shows what is here")


def _inventory(kind: Accelerator, machine: MachineLike) -> str:
    found = gpus_of(kind, machine)
    if not found:
        return f"this machine has no {kind.noun} that can be used; `devices: cpu:2` uses its CPU cores"
    names = [f"{kind.device(index)} ({gpu.name})" for index, gpu in enumerate(found)]
    return f"this machine has {', '.join(names)}"


def node_of(machine: MachineLike, host: str = "localhost") -> Node:
    """The machine as a node."""
    known = [field.name for field in fields(NodeGpu)]
    gpus = tuple(NodeGpu(*(getattr(gpu, name) for name in known)) for gpu in machine.gpus)
    return Node(host, "", "", machine.cpu_cores, gpus, machine.topology, tuple(machine.notes))


def assumed_nodes(machine: MachineLike, num_nodes: int) -> tuple[Node, ...]:
    """Nodes of which nothing is known yet: taken to be like this machine. None, if it is the only one."""
    return (node_of(machine),) * num_nodes if num_nodes > 1 else ()


def all_devices(spec: JobSpec, machine: MachineLike, nodes: Sequence[Node]) -> tuple[str, ...]:
    """The devices of all nodes, node by node: `cuda:0@0`, `cuda:1@0`, `cuda:0@1`, …; without nodes, `cuda:0`.

    Raises:
        SpecError: CPU and CUDA devices are mixed.
        MachineError: a node lacks a GPU that is asked for, or the nodes have devices of different kinds.
    """
    if not nodes:
        return job_devices(spec, machine)
    found = [_devices_of(spec, node, rank) for rank, node in enumerate(nodes)]
    kinds = {accelerator_of(names[0]).name for names in found}
    if len(kinds) > 1:
        listed = ", ".join(f"{names[0]} ({node.host})" for names, node in zip(found, nodes, strict=True))
        message = f"`devices: {spec.devices}` means GPUs on some nodes and CPUs on others: {listed}"
        hint = f"`devices: {gpu_kinds()[0].name}` or `devices: cpu:2` means the same everywhere"
        raise MachineError(spec.problem(("devices",), message, hint))
    return tuple(f"{name}@{rank}" for rank, names in enumerate(found) for name in names)


def _devices_of(spec: JobSpec, node: Node, rank: int) -> tuple[str, ...]:
    try:
        return resolve_devices(devices_on(spec.devices, rank), node)
    except MachineError as error:
        message = f"node {rank} ({node.host}): {error}"
        raise MachineError(spec.problem(("devices",), message)) from error


def crowding(devices: Iterable[str], machine: MachineLike, nodes: Sequence[Node]) -> float:
    """CPU devices per core of the node that has the fewest cores for them; at least 1."""
    on_host = [name for name in devices if accelerator_of(name).is_host]
    shares = (
        len(devices_of_node(rank, on_host)) / each.cpu_cores for rank, each in enumerate(nodes or (machine,))
    )
    return max(1.0, *shares)


def cores_per_device(devices: tuple[str, ...], machine: MachineLike, nodes: Sequence[Node]) -> int:
    """A CPU device's share of its node's cores; where the nodes differ, the smallest, for all of them."""
    return min(
        share_of_cores(len(devices_of_node(rank, devices)), each)
        for rank, each in enumerate(nodes or (machine,))
    )


def share_of_cores(num_devices: int, machine: MachineLike) -> int:
    """The threads of each of so many devices: its share of the cores that others leave, at least 1."""
    return max(1, (machine.free_cores or machine.cpu_cores) // max(1, num_devices))


def with_free_cores(spec: JobSpec, machine: Machine, look: Callable[[int], int] = free_cores) -> Machine:
    """The machine with the cores that other processes leave, where the threads of the job depend on that.

    Args:
        spec: the job. With GPUs, on several nodes, or with a core for each device at the most, none do.
        machine: as it was inspected.
        look: finds the free cores, given the usable ones.
    """
    try:
        devices = job_devices(spec, machine)
    except GpurunError:
        return machine  # planning refuses such a job
    num_devices = 1 if spec.kind.runs_program else len(devices)  # of a program, one may have all cores
    is_open = spec.kind.runs_program or "auto" in (spec.compare.threads or (spec.threads,))
    is_on_host = accelerator_of(devices[0]).is_host and not spec.is_on_nodes
    if not (is_open and is_on_host and machine.cpu_cores // num_devices > 1):
        return machine
    return replace(machine, free_cores=look(machine.cpu_cores))


def core_notes(variants: Iterable[Variant], machine: MachineLike) -> tuple[str, ...]:
    """The note that CPU devices with their threads leave no core for anything else, or lack some."""
    on_host = [variant for variant in variants if accelerator_of(variant.devices[0]).is_host]
    worst = max(
        on_host, key=lambda variant: len(variant.devices) * _threads_of(variant, machine), default=None
    )
    if worst is None:
        return ()
    cores, num_devices, threads = machine.cpu_cores, len(worst.devices), _threads_of(worst, machine)
    if num_devices * threads < cores or num_devices > cores:
        return ()  # `device_notes` has the latter
    all_of_them = "all there are, so that anything else slows them down"
    is_all = num_devices * threads == cores
    why = all_of_them if is_all else f"but there are {cores}, so that threads wait for each other"
    fewer = max(1, (cores - 1) // num_devices)
    way = f"env: {{OMP_NUM_THREADS: {fewer}}}" if worst.kind.runs_program else f"threads: {fewer}"
    hint = f": set `{way}`" if fewer < threads else ""
    return (f"{cores_text(num_devices, threads)}, {why}{hint}",)


def cores_text(num_devices: int, threads: int) -> str:
    """`2 devices with 1 thread each take 2 cores`."""
    devices, each = plural(num_devices, "device"), plural(threads, "thread")
    take = f"{each} takes" if num_devices == 1 else f"{each} each take"
    return f"{devices} with {take} {plural(num_devices * threads, 'core')}"


def _threads_of(variant: Variant, machine: MachineLike) -> int:
    """The threads of each of its devices, as far as the plan decides them."""
    stated = variant.env.get("OMP_NUM_THREADS", "")
    return variant.threads or int(
        stated if stated.isdecimal() else share_of_cores(len(variant.devices), machine)
    )


def notes_on(
    wish: Devices, devices: tuple[str, ...], machine: MachineLike, nodes: Sequence[Node]
) -> tuple[str, ...]:
    """Notes about these devices; what is true of several nodes is said once."""
    if not nodes:
        return (*device_notes(wish, devices, machine), *busy_notes(wish, devices, machine))
    notes: list[str] = []
    for rank, node in enumerate(nodes):
        own = devices_of_node(rank, devices)
        notes += device_notes(wish, own, node)
        notes += (f"{node.host}: {note}" for note in busy_notes(wish, own, node))
    return tuple(dict.fromkeys(notes))


def interface_env(machine: MachineLike) -> Mapping[str, str]:
    """The interfaces for gloo and NCCL: else the first one that the host's name resolves to."""
    if not isinstance(machine, Node):
        return {CPU.interface_variable: "lo"}
    return {kind.interface_variable: machine.interface for kind in ACCELERATORS.values()}


def backend_for(strategy: str, devices: tuple[str, ...], machines: Sequence[MachineLike]) -> str | None:
    """The devices' own backend, or the CPU's where ranks share a GPU; `None` for one process.

    Args:
        strategy: whose ranks communicate.
        devices: of the ranks.
        machines: by node rank.
    """
    if not STRATEGIES[strategy].has_backend:
        return None
    by_node = grouped(devices, node_of_device)
    is_shared = any(shared_gpus(names, machines[node]) for node, names in by_node.items())
    return CPU.backend if is_shared else accelerator_of(devices[0]).backend


def part_notes(devices: Sequence[str], machines: Sequence[MachineLike]) -> tuple[str, ...]:
    """The note that ranks which get parts of GPUs see one GPU each, whatever their LOCAL_RANK."""
    kind, has_several = accelerator_of(devices[0]), False
    for node, machine in enumerate(machines if not kind.is_host else ()):
        own = devices_of_node(node, devices)
        has_several |= len(own) > 1 and any(is_part(name, machine) for name in own)
    if not has_several:
        return ()
    own_rank, first = f"{kind.name}:LOCAL_RANK", kind.device(0)
    return (f"each rank sees its own MIG instance alone, as {first}: a program that takes {own_rank} fails",)
