"""What `gpurun check` shows: everything that a run will do, before it does any of it."""

import shlex
import sys

from gpurun.launcher.compare.label import split_label, value_text, varied_texts
from gpurun.launcher.jobfile.model import JobSpec
from gpurun.launcher.plan.estimate import estimate_s
from gpurun.launcher.plan.model import Plan, Variant
from gpurun.launcher.report.terminal.grid import GAP, cut, grid, wrap
from gpurun.launcher.stats.schedule import first_traced_step, warmup_minimum
from gpurun.launcher.units import format_count, format_duration, plural


def render_plan(plan: Plan, spec: JobSpec, width: int, plain: bool = False) -> str:
    """Text at most `width` wide: tables are cut there, all else is wrapped.

    Args:
        plain: for a file or a pipe: every line in full, whatever its length.
    """
    if plain:
        width = sys.maxsize
    head = [*headlines(plan, spec), *_limits(plan, spec)]
    lines = [line for text in head for line in wrap(text, width)]
    lines += ["", *_variant_lines(plan, width)]
    if plan.left_out:
        lines += ["", "Left out:", *_left_out_lines(plan, width)]
    if plan.notes:
        lines += ["", *(line for note in plan.notes for line in wrap(f"Note: {note}", width))]
    lines += ["", *_launch_lines(plan, width)]
    return "\n".join(lines)


def headlines(plan: Plan, spec: JobSpec) -> tuple[str, str]:
    """What is run, on what, and how long that takes: the first lines of a plan and of a run."""
    return _header(plan, spec), _size(plan, spec)


def _header(plan: Plan, spec: JobSpec) -> str:
    """`gpt-splits: gpt (layers=4 width=256), global batch 64, bf16, on cpu:0 and cpu:1`."""
    if spec.kind.runs_program:
        words = ("-m", spec.module) if spec.module else (str(spec.script),)
        return f"{plan.name}: {shlex.join((*words, *spec.args))}, on {_all_devices(plan)}"
    workload = ", ".join(dict.fromkeys(variant.workload or plan.workload for variant in plan.variants))
    workload += f" ({value_text(spec.params)})" if spec.params else ""
    batches = dict.fromkeys(format_count(variant.global_batch or 0) for variant in plan.variants)
    batch = f"global batch {', '.join(batches)}, " if spec.kind.has_batch else ""
    precisions = dict.fromkeys(str(variant.precision) for variant in plan.variants)
    return f"{plan.name}: {workload}, {batch}{', '.join(precisions)}, on {_all_devices(plan)}"


def _all_devices(plan: Plan) -> str:
    return " ".join(dict.fromkeys(device for variant in plan.variants for device in variant.devices))


def _size(plan: Plan, spec: JobSpec) -> str:
    variants = "1 variant" if len(plan.variants) == 1 else f"{len(plan.variants)} variants"
    launches = "1 launch" if len(plan.launches) == 1 else f"{len(plan.launches)} launches"
    if not spec.kind.has_rounds:
        return f"{variants} in {launches}"
    return f"{variants} in {launches}, about {format_duration(estimate_s(plan, spec))} if steps are short"


def _limits(plan: Plan, spec: JobSpec) -> list[str]:
    """What ends a run, a line each. Several launches never end early: their verdicts need all of them."""
    if spec.kind.runs_program:
        return _program_limits(spec)
    ends_early = spec.steps.early_stop and len(plan.launches) == 1 and spec.kind.is_ranked
    lines = ["Rounds end early once every comparison is decided." if ends_early else "All rounds are run."]
    if spec.profile.steps and spec.kind.trains:
        steps = plural(spec.profile.steps, "step")
        lines.append(f"Then {steps} of each variant {'is' if spec.profile.steps == 1 else 'are'} traced.")
    return [*lines, f"Each variant may take at most {format_duration(spec.timeout_s)}."]


def _program_limits(spec: JobSpec) -> list[str]:
    """How the program's steps are used."""
    first = warmup_minimum(spec.steps.warmup)
    lines = [f"Steps count once they are steady, after at least {first}."]
    if spec.profile.steps:
        traced = first_traced_step(spec.steps.warmup) + 1
        lines.append(f"Steps {traced} to {traced + spec.profile.steps - 1} are traced instead.")
    if spec.limit_s < float("inf"):
        lines.append(f"Each launch may take at most {format_duration(spec.limit_s)}.")
    return lines


def _left_out_lines(plan: Plan, width: int) -> list[str]:
    """Skipped combinations, each with its reason next to it, or below it where the line would be too long."""
    names = [" ".join(varied_texts(left.combination)) for left in plan.left_out]
    column = max(map(len, names)) + len(GAP)
    if len(GAP) + column + max(len(left.reason) for left in plan.left_out) <= width:
        rows = zip(names, (left.reason for left in plan.left_out), strict=True)
        return [f"  {line}" for line in grid(("", ""), list(rows))[1:]]
    return [
        line
        for name, left in zip(names, plan.left_out, strict=True)
        for line in (*wrap(f"  {name}", width, 6), *wrap(f"      {left.reason}", width, 6))
    ]


def _variant_lines(plan: Plan, width: int) -> list[str]:
    rows = [_variant_row(plan, variant) for variant in plan.variants]
    header = ("variant", "split", "devices", "rounds", "")
    return [cut(line, width) for line in grid(header, rows, right=(3,))]


def _variant_row(plan: Plan, variant: Variant) -> tuple[str, ...]:
    launches = [launch for launch in plan.launches if variant.id in launch.variants]
    rounds = sum(launch.rounds for launch in launches)
    times = (
        f"{len(launches)} × {launches[0].rounds}" if len({x.rounds for x in launches}) == 1 else str(rounds)
    )
    return (
        variant.id,
        split_label(variant) or str(variant.global_batch or "-"),
        devices_text(variant.devices),
        times,
        "baseline" if variant.id == plan.baseline else "",
    )


def devices_text(devices: tuple[str, ...]) -> str:
    """`cuda:0 cuda:1`; many are counted, as `cuda:0 to cuda:7`."""
    return " ".join(devices) if len(devices) <= 3 else f"{devices[0]} to {devices[-1]} ({len(devices)})"


def _launch_lines(plan: Plan, width: int) -> list[str]:
    """Every launch in the order of the run."""
    rows = [
        (launch.id, str(len(launch.processes)), str(launch.rounds), " ".join(launch.variants))
        for launch in plan.launches
    ]
    return [
        cut(line, width) for line in grid(("launch", "processes", "rounds", "variants"), rows, right=(1, 2))
    ]
