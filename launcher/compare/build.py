"""Run directory in, `Comparison` out. Works at any time, also on a run that is not finished."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gpurun.launcher.compare.figures.ranks import (
    RankFigures,
    Traced,
    TracedSteps,
    of_devices,
    of_timed,
    rank_figures,
    read_traced,
)
from gpurun.launcher.compare.figures.recorded import (
    LEAST_AROUND,
    LEAST_OTHER_WORK,
    MeasuredVariant,
    gpu_names,
    has_cold_peak,
    median_attempt,
    planned_launch,
    read_measured,
    steps_of_launches,
    typical_ms,
)
from gpurun.launcher.compare.figures.searched import (
    SearchResult,
    effects_note,
    search_result,
    untried,
    winner_findings,
)
from gpurun.launcher.compare.figures.variant import (
    batch_curves,
    noise,
    scatter,
    step_times,
    variant_result,
)
from gpurun.launcher.compare.gate import UNDECIDED, gate_of_run, rows_of_gate, still_open
from gpurun.launcher.compare.headline import conclude, fitting_in, is_one_task
from gpurun.launcher.compare.label import variant_label
from gpurun.launcher.compare.model import (
    CONCLUSIONS,
    Comparison,
    Gate,
    OpenPair,
    VariantResult,
)
from gpurun.launcher.compare.notes import (
    budget_notes,
    dangers,
    few_rounds_notes,
    findings,
    killed_note,
    launches_s,
    memory_notes,
    more_launches_note,
    named_once,
    notes,
    once_note,
    open_notes,
    quiet_notes,
    restart_notes,
    software_notes,
)
from gpurun.launcher.compare.ranking import (
    Differences,
    Standings,
    differences_of,
    is_ranked,
    open_pairs,
    standings,
    with_lead,
)
from gpurun.launcher.findings.finding import Finding, finding, noticed, ranked, with_figures
from gpurun.launcher.jobfile.values import MAX_TFLOPS
from gpurun.launcher.machine.accelerators import peak_tflop_per_s
from gpurun.launcher.plan.model import Node, Plan, refuse_unknown_names_in_job
from gpurun.launcher.rundir.files import RunDir, not_as_written, too_large
from gpurun.launcher.rundir.paths import num_bytes
from gpurun.launcher.rundir.records import (
    GRADIENT_DIFFERS,
    CodeVersion,
    Command,
    Event,
    LeftProcess,
    Look,
    Restart,
    Stall,
    TimeChange,
)
from gpurun.launcher.stats.core_waiting import QUEUE_PERCENT
from gpurun.launcher.stats.estimates import ALPHA, is_spent
from gpurun.launcher.units import listed, plural

SCHEMA = 3
MAX_MAPPING_BYTES = 1 << 22
"""The limit of a record of which any JSON is kept: in memory it may take 20 times as much."""


@dataclass(frozen=True)
class _Recorded:
    """The content of a run's files, before anything is compared."""

    plan: Plan
    job: Mapping[str, Any]
    host: Mapping[str, Any]
    measured: Mapping[str, MeasuredVariant]
    looks: Sequence[Look]
    events: Mapping[str, Sequence[Event]]
    """The events of every attempt."""
    commands: Sequence[Command]
    restarts: Sequence[Restart]


def compare_run(run: RunDir) -> Comparison:
    """Everything that the run has found out so far.

    Raises:
        MachineError: the plan can't be read: this is no run directory, or one that was never started.
    """
    recorded = _read(run)
    differences = _differences(recorded)
    results, of_variants = variant_results(
        run, differences, recorded.host, _stated_peaks(recorded.job), recorded.plan.nodes
    )
    found, ranking = _compared(run, recorded, differences, results)
    took_s = launches_s(recorded.events, recorded.commands)
    findings = (*found.findings, *_notes(found, run, recorded, differences.within, took_s))
    said = [
        (variant, each)
        for variant, its in zip(found.variants, of_variants, strict=True)
        for each in its
        if ranking is not None or each.figures.get("case") != "traced-far"
    ]
    findings = (*findings, *more_launches_note(findings, recorded.plan), *named_once(said, len(results)))
    return replace(found, findings=ranked(findings), measured_s=round(sum(took_s.values()), 3))


def read_differences(run: RunDir) -> Differences:
    """How any two variants of a run differ."""
    return _differences(_read(run))


def named_by_what_differs(plan: Plan) -> Plan:
    """A search's plan, in which variants aren't named by values that all of them have."""
    if len(plan.variants) == 1:
        return plan
    values = [{key: str(value) for key, value in variant.varied.items()} for variant in plan.variants]
    common = set.intersection(*(set(each.items()) for each in values))
    variants = (
        replace(variant, varied={key: v for key, v in variant.varied.items() if (key, str(v)) not in common})
        for variant in plan.variants
    )
    return replace(plan, variants=tuple(variants))


def _read(run: RunDir) -> _Recorded:
    plan = run.read(run.plan, Plan)
    plan = named_by_what_differs(plan) if run.read_search() else plan
    steps = run.read_all_steps(variant.id for variant in plan.variants)
    events, commands = run.read_all_events(), run.read_commands()
    measured = {
        variant.id: read_measured(run, plan, variant, steps[variant.id], events) for variant in plan.variants
    }
    return _Recorded(
        plan,
        read_job(run),
        read_mapping(run, run.host),
        measured,
        run.read_looks(),
        events,
        commands,
        run.read_restarts(),
    )


def _compared(
    run: RunDir, recorded: _Recorded, differences: Differences, results: tuple[VariantResult, ...]
) -> tuple[Comparison, Standings | None]:
    """The comparison without its notes, and the ranking; `None` where nothing is ranked."""
    plan, cores = recorded.plan, recorded.host.get("cpu_cores")
    gate, of_gate = gate_of_run(plan, differences, results, recorded.looks, cores) or (None, ())
    if gate is not None:
        rows = rows_of_gate(gate, results)
        results = tuple(replace(result, vs_baseline=rows[result.id]) for result in results)
    ranking = standings(results, differences) if is_one_task(plan) and gate is None else None
    results = with_lead(results, ranking)
    undecided = open_pairs(ranking, differences) if ranking else ()
    is_measured = _is_measured(recorded, gate, undecided)
    answer = of_gate or conclude(plan, results, ranking, is_measured, differences.within, cores)
    if not (recorded.job.get("profile") or {"steps": 1}).get("steps"):
        answer = tuple(
            with_figures(each, case="untraced") if each.figures.get("case") == "why-untraced" else each
            for each in answer
        )
    named = ranking.leader.id if ranking and not differences.is_throttled else None
    limit = recorded.job.get("memory") if named else None
    fits = fitting_in(limit, results, differences) if limit else None
    search, is_settled = _searched(run, ranking), ranking is not None and ranking.is_settled
    found = [fits[1]] if fits else []
    if search:
        found += [
            finding("plan-note", case="planned", note=search.summary.removesuffix(".")),
            *winner_findings(search, is_settled),
        ]
    comparison = Comparison(
        schema=SCHEMA,
        name=plan.name,
        job=recorded.job,
        host=recorded.host,
        baseline=plan.baseline,
        ci_level=1 - ALPHA if len(plan.variants) > 1 and gate is None else None,
        noise=noise(differences),
        variants=results,
        fastest=named if is_settled else None,
        findings=(*untried(answer, search), *dangers(results), *found),
        restarts=len(recorded.restarts),
        resumed=next((command.resumed for command in reversed(recorded.commands)), None),
        complete=is_measured and (search is None or search.is_over),
        batch_curves=batch_curves(results),
        unit=differences.unit,
        leader=named,
        open=undecided,
        scatter=scatter(differences),
        code=run.read_any(run.code, CodeVersion),
        fitting=fits[0] if fits else None,
        search=search,
        gate=gate,
        conclusions=CONCLUSIONS,
    )
    return comparison, ranking


def _is_measured(recorded: _Recorded, gate: Gate | None, undecided: Sequence[OpenPair]) -> bool:
    """Whether no other launch follows, and every variant has all of its launches."""
    plan, left = recorded.plan, still_open(gate) if gate else undecided
    is_void = gate is not None and gate.outcome == UNDECIDED and not left  # no launch decides it
    has_nothing = not any(variant.counts for variant in recorded.measured.values())
    ended = has_ended(plan, recorded.looks, left) or is_void or has_nothing
    return ended and all(is_complete(variant, plan) for variant in recorded.measured.values())


def _searched(run: RunDir, ranking: Standings | None) -> SearchResult | None:
    """The result of `gpurun tune`, with the differences of its fastest combination from those compared."""
    if ranking is None:
        return search_result(run, None, None, {})
    against = ranking.leader.vs_baseline
    changes = {
        rival.result.id: TimeChange(rival.behind.percent, rival.behind.ci, rival.result.id)
        for rival in ranking.rivals
        if rival.behind.percent is not None
    }
    return search_result(run, ranking.leader.id, against.percent if against else None, changes)


def _notes(
    found: Comparison, run: RunDir, recorded: _Recorded, within: int, took_s: Mapping[str, float]
) -> tuple[Finding, ...]:
    """Notes on a comparison and on the run itself."""
    plan, measured = recorded.plan, recorded.measured
    is_open = found.complete and not found.is_unranked
    has_any = any(variant.counts for variant in measured.values())
    spent_s = sum(took_s.values())
    restarts = [each.reason for each in recorded.restarts]
    stalls = [each.reason for each in run.read_lines(run.stalls, Stall)]
    once = once_note(plan, measured, recorded.looks, spent_s) if is_open else None
    still_open = (
        open_notes(plan, found.leader, found.open, recorded.looks, spent_s)
        if is_open and found.leader
        else ()
    )
    return (
        *notes(plan, measured, within, once, has_remedy=bool(still_open)),
        *(few_rounds_notes(found, measured) if found.gate is None and once is None else ()),
        *(effects_note(found.search) if found.search else ()),
        *(budget_notes(run, plan, recorded.events, took_s) if found.complete and has_any else ()),
        *still_open,
        *around_notes(measured.values()),
        *work_notes(found.variants, measured),
        *(memory_notes(found.variants) if found.gate is None and not has_cold_peak(measured) else ()),
        *restart_notes(f"{plural(len(restarts), 'restart')} after a failure", restarts),
        *restart_notes(plural(len(stalls), "stall"), stalls),
        *map(killed_note, run.read_killed()),
        *(noticed("recorded", found=each.what) for each in run.read_lines(run.left, LeftProcess)),
        *quiet_notes(run),
        *software_notes(run, plan, measured.values()),
    )


def work_notes(
    results: Sequence[VariantResult], measured: Mapping[str, MeasuredVariant]
) -> tuple[Finding, ...]:
    """The note that steps of programs may do different work: no samples are known, and numbers differ."""
    made = {
        result.id: most_steps(measured[result.id])
        for result in results
        if is_ranked(result) and result.kind.runs_program and result.global_batch is None
    }
    known = [result for result in results if made.get(result.id)]
    most, fewest = (pick(known, key=lambda each: made[each.id], default=None) for pick in (max, min))
    if most is None or fewest is None or made[most.id] < (1 + LEAST_OTHER_WORK) * made[fewest.id]:
        return ()
    run_s, other_s = (None if measured[each.id].has_only_first else each.wall_s for each in (most, fewest))
    found = noticed(
        "other-work",
        one=variant_label(most),
        num_steps=made[most.id],
        other=variant_label(fewest),
        other_steps=made[fewest.id],
        run_s=run_s,
        other_s=other_s,
    )
    return (found,)


def most_steps(measured: MeasuredVariant) -> int:
    """The steps of a program's longest attempt that has ended; 0 if none has."""
    nums = steps_of_launches(measured.steps)
    return max((nums.get(name, 0) for name in measured.ended_s), default=0)


def around_notes(measured: Iterable[MeasuredVariant]) -> list[Finding]:
    """Where a program's time went, of the one longest outside of steps; nothing if that is little."""
    medians = [(record, found) for record in measured if (found := median_attempt(record.around_s))]
    record, found = max(medians, key=lambda each: each[1].outside, default=(None, None))
    if record is None or found is None or found.outside < LEAST_AROUND * found.total:
        return []
    note = finding(
        "time-spent",
        case="program",
        where=variant_label(record.variant),
        num_programs=len(medians) if len(medians) > 1 else None,
        num_attempts=len(record.around_s) if len(record.around_s) > 1 else None,
        run_s=found.total,
        before_s=found.before,
        steps_s=found.steps,
        num_steps=found.num_steps,
        after_s=found.after,
    )
    return [note]


def _differences(recorded: _Recorded) -> Differences:
    """How variants differ; in a gate from their own version before, not from one baseline."""
    plan, steps = recorded.plan, recorded.job.get("steps")
    stopped_early = isinstance(steps, Mapping) and bool(steps.get("early_stop"))  # in runs older than `until`
    early_rounds = len(plan.launches) == 1 and stopped_early
    found = differences_of(recorded.measured, plan.baseline, recorded.looks, early_rounds)
    if plan.gate is None:
        return found
    return replace(found, references={variant: a for a, b in plan.gate.pairs for variant in (a, b)})


def variant_results(
    run: RunDir,
    differences: Differences,
    host: Mapping[str, Any],
    peaks: Mapping[str, float],
    nodes: Sequence[Node] = (),
) -> tuple[tuple[VariantResult, ...], tuple[tuple[Finding, ...], ...]]:
    """One entry per variant, in the order of the plan; and what was noticed about each."""
    times, rows = step_times(differences), differences.vs_baseline()
    results, of_variants = [], []
    for measured in differences.measured.values():
        variant = measured.variant
        traced = of_timed(of_devices(read_traced(run, variant.id), variant.devices), typical_ms(measured))
        ranks = rank_figures(run, measured, traced, nodes)
        steps = TracedSteps(len(traced.steps), traced.num_steps) if traced and traced.steps else None
        result = variant_result(measured, differences, times, rows[variant.id], host, peaks, ranks, steps)
        step_ms = result.step_ms.estimate if result.step_ms else None
        results.append(result)
        found = (*findings(measured, ranks, step_ms), *_without_peak(result, host))
        of_variants.append(_noticed(measured, ranks, traced, found))
    return tuple(results), tuple(of_variants)


def _stated_peaks(job: Mapping[str, Any]) -> dict[str, float]:
    """The job's `peak_tflops`, as far as the file of a stranger has some."""
    stated = job.get("peak_tflops")
    rates = stated.items() if isinstance(stated, Mapping) else ()
    return {name: rate for name, rate in rates if isinstance(rate, int | float) and 0 < rate <= MAX_TFLOPS}


def _without_peak(result: VariantResult, host: Mapping[str, Any]) -> list[Finding]:
    """A note that MFU is missing, for GPUs whose peak isn't known."""
    names = {name for name in gpu_names(result.devices, host) if name}
    if result.flop_per_s is None or result.mfu is not None or not names:
        return []
    unknown = sorted(name for name in names if not peak_tflop_per_s(name, result.precision or ""))
    return [noticed("no-peak", gpus=listed(unknown), precision=result.precision)]


def _noticed(
    measured: MeasuredVariant, ranks: Sequence[RankFigures], traced: Traced | None, found: tuple[Finding, ...]
) -> tuple[Finding, ...]:
    """All that was noticed: by ranks, in traces, and in the figures."""
    status = measured.status
    unsteady = [finding("unsteady", of="", reason=status.reason)] if status.status == "unsteady" else []
    is_affected = any((rank.queue_percent or 0.0) > QUEUE_PERCENT for rank in ranks)
    trends = () if is_affected else measured.trends  # else load explains it
    in_traces = traced.notes if traced else ()
    warnings = measured.facts.warnings
    is_normal = any("BatchNorm" in each for each in warnings)  # explains that the gradient isn't exact
    by_ranks = [_of_rank(each) for each in warnings if not (is_normal and each.startswith(GRADIENT_DIFFERS))]
    return (*unsteady, *by_ranks, *trends, *in_traces, *found)


def _of_rank(warning: str) -> Finding:
    """A warning that ranks have recorded."""
    code = "gradient-not-exact" if warning.startswith(GRADIENT_DIFFERS) else "noticed"
    return finding(code, of="", case="recorded" if code == "noticed" else None, found=warning)


def is_complete(measured: MeasuredVariant, plan: Plan) -> bool:
    """Whether nothing is left to measure: the variant is closed and, unless it failed, in every launch.

    With a budget see `has_ended`.
    """
    if plan.budget_s is not None:
        return measured.finished
    ended = set(map(planned_launch, measured.ended_s))  # of a program, also those without timed steps
    num = max(len(measured.logs), len(ended))
    return measured.finished and (not measured.counts or num == measured.num_planned)


def has_ended(plan: Plan, looks: Sequence[Look], undecided: Sequence[object]) -> bool:
    """Whether no other launch follows: all were planned, all is decided, or the budget is spent."""
    return plan.budget_s is None or bool(looks and (is_spent(looks) or not undecided))


def read_job(run: RunDir) -> dict[str, Any]:
    """The job as resolved.

    Raises:
        MachineError: the file can't be read, or has a name that no table has.
    """
    job = read_mapping(run, run.spec)
    try:
        refuse_unknown_names_in_job(job)
    except ValueError as error:
        raise not_as_written(run.spec, error) from error
    return job


def read_mapping(run: RunDir, path: Path) -> dict[str, Any]:
    """A file's JSON object; empty where there is no file."""
    if num_bytes(path) > MAX_MAPPING_BYTES:
        raise too_large(path)
    return run.read(path, dict[str, Any]) if path.exists() else {}
