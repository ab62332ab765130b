"""The output of `gpurun check`: everything that a run will do, before it does any of it."""

import math
import shlex
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

from gpurun.launcher.compare.label import left_out_texts, split_label, value_text
from gpurun.launcher.findings.finding import finding
from gpurun.launcher.jobfile.model import JobSpec
from gpurun.launcher.machine.accelerators import accelerator_of
from gpurun.launcher.plan.estimate import (
    LAUNCHES_TO_COMPARE,
    Detectable,
    Earlier,
    detectable,
    estimate_s,
    more_launches,
)
from gpurun.launcher.plan.model import GatePlan, Plan, Variant
from gpurun.launcher.report.terminal.grid import GAP, cut, grid, wrap
from gpurun.launcher.stats.schedule import first_traced_step, warmup_minimum
from gpurun.launcher.units import (
    GIB,
    LEAST_OF_UNIT,
    format_count,
    format_duration,
    format_number,
    plural,
    readable_unit,
)

if TYPE_CHECKING:
    from gpurun.launcher.rundir.records import MemoryEstimate

LONG_STEP_S = 0.1
"""Shorter ones don't make the blocks of a launch longer."""


def render_plan(
    plan: Plan, spec: JobSpec, width: int, plain: bool = False, earlier: Earlier | None = None
) -> str:
    """Text at most `width` wide: tables are cut there, all else is wrapped.

    Args:
        plain: for a file or a pipe: every line in full, whatever its length.
        earlier: a run that shows how much launches scatter.
    """
    if plain:
        width = sys.maxsize
    first, size, *power = headlines(plan, spec, earlier)
    head = [first, size, *_limits(plan, spec), *power]
    lines = [line for text in head for line in wrap(text, width)]
    lines += ["", *_variant_lines(plan, width)]
    if plan.left_out:
        lines += ["", "Left out:", *_left_out_lines(plan, width)]
    if plan.all_notes:
        lines += ["", *(line for note in plan.all_notes for line in wrap(f"Note: {note}", width))]
    lines += ["", *_launch_lines(plan, width)]
    return "\n".join(lines)


def render_memory(memory: "Mapping[str, MemoryEstimate]", width: int, plain: bool = False) -> str:
    """The estimated peak of each variant's fullest rank and its parts, or why there is none."""
    from gpurun.launcher.rundir.records import MEMORY_PARTS  # which a plan alone needn't wait for

    header = ("memory, not measured", "peak", *MEMORY_PARTS, "")
    found = {
        each: (peak.total, *peak.parts.values())
        for each, estimate in memory.items()
        if (peak := estimate.peak)
    }
    most_gib = max((size for sizes in found.values() for size in sizes), default=0) / GIB
    # Of at least 1: parts of a peak of 0.2 GiB would all be 0.0-something.
    unit, factor = readable_unit(most_gib * LEAST_OF_UNIT, "GiB")
    cells = {
        each: [f"{format_number(factor * size / GIB, 2)} {unit}" for size in sizes]
        for each, sizes in found.items()
    }
    empty = [""] * (1 + len(MEMORY_PARTS))
    rows = [
        (each, *cells[each], "") if each in cells else (each, *empty, f"not estimated: {estimate.reason}")
        for each, estimate in memory.items()
    ]
    lines = grid(header, rows, right=range(1, len(header) - 1))
    return "\n".join(lines if plain else [cut(line, width) for line in lines])


def headlines(plan: Plan, spec: JobSpec, earlier: Earlier | None = None) -> tuple[str, ...]:
    """The first lines of a plan and a run: what is run, on what, how long that takes and what it can show."""
    if plan.gate is not None:
        return (_header(plan, spec), *_gate_lines(plan, plan.gate))
    found = detectable(plan, spec, earlier)
    power = (_power(plan, found) or "").splitlines() if found else ()
    return (_header(plan, spec), _size(plan, spec), *power)


def _gate_lines(plan: Plan, gate: GatePlan) -> tuple[str, str]:
    """Which versions are compared, and until when."""
    variants = plural(len(gate.pairs), "variant")
    return (
        versions_text(gate),
        f"{variants} of each, launched in turns until it is known whether B is slower by more than "
        f"{gate.threshold_percent:g} %, for at most {budget_text(plan.budget_s or 0.0)}",
    )


def versions_text(gate: GatePlan) -> str:
    """`A: main (1a2b3c4d5e)   B: working copy (5d6e7f8a9b with uncommitted changes)`."""
    a, b = (f"{side.name} ({side.commit})" if side.commit else side.name for side in (gate.a, gate.b))
    return f"A: {a}   B: {b}"


def budget_text(s: float) -> str:
    """`90 s`, `150 s`, `10 min`."""
    is_short = s <= 120 or (s < 600 and s % 60)  # 2 min would be less than 150 s
    return f"{round(s, 0 if s >= 10 else 1):g} s" if is_short else format_duration(s)


def _power(plan: Plan, found: Detectable) -> str | None:
    """The differences that the run can show, where that is known; and what it can't in any case."""
    launches, more = plural(found.launches, "launch"), more_launches(has_budget=False)
    if found.is_too_little and plan.budget_s is not None:
        once_s, enough = (
            (found.enough_s or 0.0) / LAUNCHES_TO_COMPARE,
            math.ceil((found.enough_s or 0.0) / 10) * 10,
        )
        fit = f"{launches} of each fit{'s' * (found.launches == 1)} into {budget_text(plan.budget_s)}"
        if once_s > plan.budget_s:
            fit = f"1 launch of each takes {budget_text(once_s)}"
        return f"No verdict is likely: {fit}, {LAUNCHES_TO_COMPARE} take {budget_text(enough)} or more."
    if found.is_too_little and not found.is_shared:
        return f"No verdict is possible with {launches}: it takes {LAUNCHES_TO_COMPARE} ({more})."
    if found.is_too_little:
        scope = finding("within-launches", case="verdicts", num_launches=found.launches, setting=more)
        return "\n".join(wrap(scope.sentence, 80))
    if found.percent is None or found.scatter_percent is None:
        return None
    difference, scatter = _two_digits(found.percent), _two_digits(found.scatter_percent)
    return f"Differences of {difference} or more can be detected: {launches} that scatter by {scatter}."


def _two_digits(percent: float) -> str:
    """`0.35 %`, `28 %`, `130 %`."""
    return f"{float(f'{percent:.2g}'):g} %"


def _header(plan: Plan, spec: JobSpec) -> str:
    """`gpt-splits: gpt (layers=4 width=256), global batch 64, bf16, on cpu:0 and cpu:1`."""
    if spec.kind.runs_program:
        return f"{plan.name}: {shlex.join(spec.command_line)}, on {_all_devices(plan)}"
    workload = ", ".join(dict.fromkeys(variant.workload or plan.workload for variant in plan.variants))
    workload += f" ({value_text(spec.params)})" if spec.params else ""
    batches = dict.fromkeys(format_count(variant.global_batch or 0) for variant in plan.variants)
    batch = f"global batch {', '.join(batches)}, " if spec.kind.trains else ""
    precisions = dict.fromkeys(str(variant.precision) for variant in plan.variants)
    return f"{plan.name}: {workload}, {batch}{', '.join(precisions)}, on {_all_devices(plan)}"


def _all_devices(plan: Plan) -> str:
    named = dict.fromkeys(device for variant in plan.variants for device in variant.devices)
    return devices_text(tuple(named), most=8)


def _size(plan: Plan, spec: JobSpec) -> str:
    variants = plural(len(plan.variants), "variant")
    if plan.budget_s is not None:
        most = budget_text(plan.budget_s)
        return f"{variants}; launches repeat until every comparison is decided, for at most {most}"
    launches = plural(len(plan.launches), "launch")
    if spec.kind.runs_program:
        return f"{variants} in {launches}"
    is_long = plan.step_s >= LONG_STEP_S
    steps = f"with steps of {format_duration(plan.step_s)}" if is_long else "if steps are short"
    return f"{variants} in {launches}, about {format_duration(estimate_s(plan, spec))} {steps}"


def _limits(plan: Plan, spec: JobSpec) -> list[str]:
    """How much is measured besides the number of launches, and what ends a run; a line each."""
    if spec.kind.runs_program:
        return _program_limits(plan, spec)
    has_budget, rounds = plan.budget_s is not None, plural(plan.launches[0].rounds, "round")
    adapts = f"The first launches have {rounds} each, later ones as many as are worth it."
    lines = [adapts if has_budget else "All rounds are run."]
    if spec.profile.steps and spec.kind.trains:
        steps = plural(spec.profile.steps, "step")
        are = "is" if spec.profile.steps == 1 else "are"
        when = "In the first launch" if has_budget else "Then"
        lines.append(f"{when}, {steps} of each variant {are} traced.")
    return [*lines, f"Each variant may take at most {format_duration(spec.timeout_s)}."]


def _program_limits(plan: Plan, spec: JobSpec) -> list[str]:
    """How the program's steps are used."""
    first = warmup_minimum(spec.steps.warmup)
    lines = [f"Steps count once they are steady, after at least {first}."]
    if spec.profile.steps:
        kind = accelerator_of(plan.variants[0].devices[0])
        traced = first_traced_step(spec.steps.warmup, kind.timed_before_trace) + 1
        which = "they and later steps of that launch" if kind.is_slow_after_trace else "they"
        lines.append(f"Steps {traced} to {traced + spec.profile.steps - 1} are traced; {which} don't count.")
    if spec.limit_s < float("inf"):
        lines.append(f"Each launch may take at most {format_duration(spec.limit_s)}.")
    return lines


def _left_out_lines(plan: Plan, width: int) -> list[str]:
    """Skipped combinations, each with its reason next to it, or below it where the line would be too long."""
    rows = left_out_texts(plan.left_out)
    column = max(len(name) for name, _ in rows) + len(GAP)
    if len(GAP) + column + max(len(reason) for _, reason in rows) <= width:
        return [f"  {line}" for line in grid(("", ""), rows)[1:]]
    return [
        line
        for name, reason in rows
        for line in (*wrap(f"  {name}", width, 6), *wrap(f"      {reason}", width, 6))
    ]


def _variant_lines(plan: Plan, width: int) -> list[str]:
    rows = [_variant_row(plan, variant) for variant in plan.variants]
    header = ("variant", "split", "devices", "rounds", "")
    return [cut(line, width) for line in grid(header, rows, right=(3,))]


def _variant_row(plan: Plan, variant: Variant) -> tuple[str, ...]:
    return (
        variant.id,
        split_label(variant) or (str(variant.global_batch or "-") if variant.kind.trains else "-"),
        devices_text(variant.devices),
        _rounds_text(plan, variant),
        "baseline" if variant.id == plan.baseline else "",
    )


def _rounds_text(plan: Plan, variant: Variant) -> str:
    """`6 × 5`; `5 each` with a budget, where the number of launches isn't known."""
    rounds = [launch.rounds for launch in plan.launches if variant.id in launch.variants]
    if len(set(rounds)) > 1:
        return str(sum(rounds))
    return f"{rounds[0]} each" if plan.budget_s is not None else f"{len(rounds)} × {rounds[0]}"


def devices_text(devices: tuple[str, ...], most: int = 3) -> str:
    """`cuda:0 cuda:1`; more than `most` are counted, as `cuda:0 to cuda:7 (8)`."""
    return " ".join(devices) if len(devices) <= most else f"{devices[0]} to {devices[-1]} ({len(devices)})"


def _launch_lines(plan: Plan, width: int) -> list[str]:
    """Every launch in the order of the run; with a budget the first of each group."""
    rows = [
        (launch.id, str(len(launch.processes)), str(launch.rounds), " ".join(launch.variants))
        for launch in plan.launches
        if plan.budget_s is None or launch.repetition == 0
    ]
    return [
        cut(line, width) for line in grid(("launch", "processes", "rounds", "variants"), rows, right=(1, 2))
    ]
