"""The output of `gpurun devices`: the machine in a line, its GPUs, who uses them, and how they are linked."""

from dataclasses import replace

from gpurun.launcher.grouping import grouped
from gpurun.launcher.machine.accelerators import ACCELERATORS, gpu_device
from gpurun.launcher.machine.gpus.gpu import Gpu
from gpurun.launcher.machine.host import Machine
from gpurun.launcher.report.terminal.grid import grid
from gpurun.launcher.units import format_gib, format_number


def render_devices(machine: Machine, width: int) -> str:
    """Plain text, at most `width` wide where the names allow it."""
    lines = [_machine_line(machine)]
    if machine.gpus:
        lines += [*_driver_lines(machine), "", *_gpu_lines(machine, width)]
        lines += _processes_lines(machine) + _links_lines(machine)
    elif machine.nvml_error:
        lines.append(f"No GPUs: the NVIDIA driver doesn't answer ({machine.nvml_error}).")
    else:
        nouns = " or ".join(row.noun for row in ACCELERATORS.values() if not row.is_host)
        lines.append(f"No {nouns} is available to this process.")
    notes = [*_unusable_notes(machine), *machine.notes]
    return "\n".join([*lines, *[""] * bool(notes), *notes])


def _unusable_notes(machine: Machine) -> list[str]:
    """Why GPUs can't be used; by name where that isn't so for all."""
    unusable = grouped((gpu for gpu in machine.gpus if gpu.unusable), lambda gpu: gpu.unusable)
    everything = len(machine.gpus)
    return [
        f"{'They' if len(gpus) == everything else ', '.join(map(gpu_device, gpus))} can't be used: {why}"
        for why, gpus in unusable.items()
    ]


def _machine_line(machine: Machine) -> str:
    cores = "1 core" if machine.cpu_cores == 1 else f"{machine.cpu_cores} cores"
    memory = f"{format_gib(machine.memory_available_gib)} of {format_gib(machine.memory_gib)} available"
    return f"{machine.hostname}: {machine.cpu_model}, {cores}, {memory}"


def _driver_lines(machine: Machine) -> list[str]:
    """One line per kind of GPU that has a driver of its own."""
    kinds = dict.fromkeys(gpu.kind for gpu in machine.gpus)
    texts = (ACCELERATORS[kind].driver_text(machine.driver, machine.cuda_driver_version) for kind in kinds)
    return [text for text in texts if text]


def _gpu_lines(machine: Machine, width: int) -> list[str]:
    header = ("device", "name", "memory", "used", "busy", "SM clock", "power", "temp.")
    rows = [_gpu_row(gpu) for gpu in machine.gpus]
    lines = grid(header, rows, right=range(2, 8))
    for dropped in range(len(header) - 1, 3, -1):  # from the right: what matters least for a run
        if max(map(len, lines)) <= width:
            break
        lines = grid(header[:dropped], [row[:dropped] for row in rows], right=range(2, 8))
    return lines


def _gpu_row(gpu: Gpu) -> tuple[str, ...]:
    return (
        gpu_device(gpu),
        gpu.name,
        "" if gpu.memory_gib is None else format_gib(gpu.memory_gib),
        "" if gpu.used_gib is None else format_gib(gpu.used_gib),
        "" if gpu.utilisation_percent is None else f"{gpu.utilisation_percent} %",
        _of(gpu.sm_clock_mhz, gpu.max_sm_clock_mhz, "MHz"),
        _of(gpu.power_w, gpu.power_limit_w, "W"),
        "" if gpu.temperature_c is None else f"{gpu.temperature_c} °C",
    )


def _of(value: float | None, limit: float | None, unit: str) -> str:
    """`1 980 of 1 980 MHz`."""
    if value is None:
        return ""
    of = "" if limit is None else f" of {format_number(limit, 0)}"
    return f"{format_number(value, 0)}{of} {unit}"


def _processes_lines(machine: Machine) -> list[str]:
    rows = [
        (
            gpu_device(gpu),
            str(process.pid),
            process.name or "(not visible from here)",
            "" if process.used_gib is None else format_gib(process.used_gib),
        )
        for gpu in machine.gpus
        for process in gpu.processes or ()
    ]
    return ["", *grid(("in use on", "pid", "process", "memory"), rows, right=(1, 3))] if rows else []


def _links_lines(machine: Machine) -> list[str]:
    """One line if all pairs have the same link, else one per pair."""
    pairs = {
        (gpu_device(gpu), gpu_device(replace(gpu, index=other))): link
        for gpu in machine.gpus
        for other, link in gpu.peer_links.items()
        if other > gpu.index
    }
    if not pairs:
        return []
    kinds = set(pairs.values())
    if len(kinds) == 1:
        return ["", f"Between {'all pairs' if len(pairs) > 1 else 'the two'}: {kinds.pop()}"]
    return ["", *grid(("between", "link"), [(f"{a} {b}", link) for (a, b), link in pairs.items()])]
