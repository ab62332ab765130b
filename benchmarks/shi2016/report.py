"""Our seconds per mini-batch next to the published ones of Shi et al. 2016."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.shi2016.published import (
    CPUS,
    FRAMEWORKS,
    GPUS,
    NETWORKS,
    OTHER_WORK,
    Cell,
    Scaling,
    fastest,
    scaling,
    table7,
)
from gpurun.launcher.compare.build import compare_run
from gpurun.launcher.compare.load_findings import interference_in
from gpurun.launcher.errors import SpecError
from gpurun.launcher.findings.finding import reason
from gpurun.launcher.machine.accelerators import accelerator_of, recorded_names
from gpurun.launcher.report.terminal.grid import grid
from gpurun.launcher.run.find import find_run
from gpurun.launcher.units import Interval, plural

RESTORED, OTHER, UNREADABLE = "~", "*", "?"
LEGEND = (
    "Seconds per mini-batch. CPU columns: one thread, and the fastest number of threads (in brackets).",
    f"{RESTORED} a digit or the decimal point was restored   {UNREADABLE} can't be read   "
    f"{OTHER} did not run the network that it names; never counts as fastest",
    "Source: Shi et al. 2016, https://arxiv.org/abs/1608.07249, table 7.",
)


@dataclass(frozen=True)
class Ours:
    """One of our measurements of a classic."""

    workload: str
    label: str
    """`1 thread`, `NVIDIA H200`, `ddp 512/512`."""
    global_batch: int
    num_devices: int
    seconds: float
    version: float | None = None
    """Of a network that has several; the paper's is the first."""
    threads: int | None = None
    """Of all its processes; `None` for a GPU, and where it isn't known."""
    seconds_ci: Interval | None = None
    """95 % interval of `seconds`."""
    caveats: tuple[str, ...] = ()
    """What else the time may show: other programs, throttled clocks, no steady step."""


def ours_of_runs(runs: Iterable[Path]) -> list[Ours]:
    """What all the runs have measured of the classics.

    Raises:
        SpecError: one of them has measured none, or is no run.
    """
    return [measured for run in runs for measured in _some_of(compare_run(find_run(run)))]


def _some_of(comparison: Any) -> list[Ours]:
    ours = ours_of(comparison)
    if not ours:
        listed = ", ".join(NETWORKS)
        raise SpecError(f"{comparison.name} has measured none of {listed}; see examples/shi2016.yaml")
    return ours


def ours_of(comparison: Any) -> list[Ours]:
    """What a run has measured of the classics; all other variants are left out."""
    found = []
    for variant in comparison.variants:
        if variant.workload not in NETWORKS or variant.step_ms is None:
            continue
        params = {**comparison.job.get("params", {}), **variant.varied.get("params", {})}
        found.append(
            Ours(
                workload=variant.workload,
                label=_label(variant, comparison.host),
                global_batch=variant.global_batch,
                num_devices=len(variant.devices),
                seconds=variant.step_ms.estimate / 1e3,
                version=params.get("version"),
                threads=None if _on_gpu(variant) else variant.threads * len(variant.devices) or None,
                seconds_ci=_in_seconds(variant.step_ms.ci),
                caveats=tuple(_caveats(variant)),
            )
        )
    return found


def _in_seconds(ci_ms: Interval | None) -> Interval | None:
    return None if ci_ms is None else (ci_ms[0] / 1e3, ci_ms[1] / 1e3)


def _caveats(variant: Any) -> Iterator[str]:
    yield from (reason(**load.figures) for load in interference_in([variant]))
    if variant.status == "unsteady":
        yield f"unsteady: {variant.reason}"


def render_published(ours: Sequence[Ours] = ()) -> str:
    """A table per network: of those in `ours`, or of all if it is empty."""
    cells = table7()
    chosen = [name for name in NETWORKS if not ours or any(measured.workload == name for measured in ours)]
    lines: list[str] = []
    for name in chosen:
        mine = [measured for measured in ours if measured.workload == name]
        lines += [*_network_lines(NETWORKS[name], cells, mine), *_scaling_lines(name, mine), ""]
    return "\n".join([*lines, *LEGEND])


def _network_lines(network: str, cells: Iterable[Cell], ours: Sequence[Ours]) -> list[str]:
    own = [cell for cell in cells if cell.network == network]
    batch = own[0].batch
    header = ("", *(f"{device} {word}" for device in CPUS for word in ("1", "best")), *GPUS)
    rows = [_row(framework, own) for framework in FRAMEWORKS]
    lines = [f"{network}, batch {batch}", *grid(header, rows, right=range(1, len(header)))]
    lines += [f"{OTHER} {why}" for (_, name), why in OTHER_WORK.items() if name == network]
    return [*lines, *_our_lines(own, ours)]


def _row(framework: str, cells: Sequence[Cell]) -> tuple[str, ...]:
    own = [cell for cell in cells if cell.framework == framework]
    columns: list[str] = []
    for device in CPUS:
        there = [cell for cell in own if cell.device == device]
        best = min((cell for cell in there if cell.is_readable), key=_seconds, default=None)
        columns += [_text([c for c in there if c.threads == 1]), _text([best], with_threads=True)]
    return (framework, *columns, *(_text([c for c in own if c.device == device]) for device in GPUS))


def _seconds(cell: Cell) -> float:
    return cell.seconds or 0.0


def _text(cells: Sequence[Cell | None], with_threads: bool = False) -> str:
    """The first cell with its marks; empty where the paper has none."""
    cell = cells[0] if cells else None
    if cell is None:
        return ""
    if cell.seconds is None:
        return UNREADABLE
    marks = ("" if cell.is_exact else RESTORED) + (OTHER if cell.other_work else "")
    threads = f" ({cell.threads})" if with_threads else ""
    return f"{cell.seconds:.3f}{marks}{threads}"


def _our_lines(cells: Sequence[Cell], ours: Sequence[Ours]) -> list[str]:
    """Each of ours with the fastest published time of the same kind of device; one thread with one thread."""
    lines = []
    for measured in ours:
        line = f"gpurun  {measured.label}: {_time(measured)}"
        if measured.version not in (None, 1, 1.0):
            line += f" (version {measured.version:g}, which does more than the paper's)"
        lines.append(line + _comparison(cells, measured))
        lines += [f"        ! {caveat}" for caveat in measured.caveats]
    return lines


def _time(ours: Ours) -> str:
    """`0.948 s (0.818 to 1.393)`."""
    if ours.seconds_ci is None:
        return f"{_format(ours.seconds)} s"
    low, high = map(_format, ours.seconds_ci)
    return f"{_format(ours.seconds)} s ({low} to {high})"


def _comparison(cells: Sequence[Cell], ours: Ours) -> str:
    """What follows our time: how it compares, or why it doesn't."""
    batch = cells[0].batch
    if ours.global_batch != batch:
        return f" for a batch of {ours.global_batch}; published are times for {batch}"
    best = fastest(cell for cell in cells if _is_alike(cell, ours))
    if best is None or best.seconds is None:
        return ""
    where = f"{best.framework} on {best.device}" + (", 1 thread" if ours.threads == 1 else "")
    return f"; {_ratio(best.seconds / ours.seconds)} the fastest published, {where}"


def _is_alike(cell: Cell, ours: Ours) -> bool:
    if _is_gpu(ours) or cell.threads is None:
        return _is_gpu(ours) and cell.threads is None
    return ours.threads != 1 or cell.threads == 1


def _ratio(speed: float) -> str:
    """`1.8× the speed of`, or `takes 24.3× as long as`: never a share that rounds to nothing."""
    return f"{speed:.1f}× the speed of" if speed >= 1 else f"takes {1 / speed:.1f}× as long as"


def _scaling_lines(workload: str, ours: Sequence[Ours]) -> list[str]:
    """A constant batch over several devices: the paper's words, and ours where the run has it."""
    stated = [line for line in scaling() if line.network == NETWORKS[workload]]
    if not stated or not any(measured.num_devices > 1 for measured in ours):
        return []
    lines = []
    for batch in dict.fromkeys(line.global_batch for line in stated):
        same = [measured for measured in ours if measured.global_batch == batch]
        alone = min(
            (each for each in same if each.num_devices == 1), key=lambda each: each.seconds, default=None
        )
        for each in same:
            if each.num_devices > 1:
                said = _stated(stated, each.num_devices)
                lines.append(f"  {each.num_devices} devices, batch {batch}: {_speedup(alone, each)}{said}")
    return lines


def _speedup(alone: Ours | None, together: Ours) -> str:
    """How much faster several devices are than one."""
    if alone is None:
        return f"{_format(together.seconds)} s, but one device was not measured"
    doubt = ", a figure to doubt: see the ! above" if alone.caveats or together.caveats else ""
    return f"{alone.seconds / together.seconds:.2f}× one device{doubt}"


def _stated(lines: Sequence[Scaling], gpus: int) -> str:
    said = [f"{line.framework} {line.speedup}" for line in lines if line.gpus == gpus and line.speedup]
    return f" (paper, {gpus} K80s: {'; '.join(said)})" if said else ""


def _is_gpu(ours: Ours) -> bool:
    return ours.label.startswith("GPU ")


def _label(variant: Any, host: Any) -> str:
    """What ran it: `4 threads of AMD EPYC …`, `GPU NVIDIA H200`, with the split where there are several."""
    split = f", {variant.strategy} {'/'.join(map(str, variant.split))}" if len(variant.devices) > 1 else ""
    if _on_gpu(variant):
        names = recorded_names(host)
        return f"GPU {names.get(variant.devices[0], variant.devices[0])}, {variant.precision}{split}"
    threads = plural(variant.threads, "thread") if variant.threads else "all threads"
    each = f"{len(variant.devices)} x {threads}" if split else threads
    return f"{each} of {host.get('cpu_model', 'the CPU')}{split}"


def _on_gpu(variant: Any) -> bool:
    return not accelerator_of(variant.devices[0]).is_host


def _format(seconds: float) -> str:
    return f"{seconds:.3f}" if seconds >= 0.1 else f"{seconds:.3g}"
