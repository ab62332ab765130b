"""Run directory in, `Comparison` out. Works at any time, also on a run that is not finished."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gpurun.launcher.compare.figures.ranks import (
    TracedSteps,
    of_devices,
    of_timed,
    rank_figures,
    read_traced,
)
from gpurun.launcher.compare.figures.recorded import (
    MeasuredVariant,
    has_cold_peak,
    planned_launch,
    read_measured,
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
from gpurun.launcher.compare.model import (
    CONCLUSIONS,
    Comparison,
    Gate,
    OpenPair,
    VariantResult,
)
from gpurun.launcher.compare.notes import (
    around_notes,
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
    work_notes,
)
from gpurun.launcher.compare.ranking import (
    Differences,
    Standings,
    differences_of,
    open_pairs,
    standings,
    with_lead,
)
from gpurun.launcher.findings.finding import Finding, finding, noticed, ranked, with_figures
from gpurun.launcher.jobfile.values import MAX_TFLOPS
from gpurun.launcher.plan.model import Node, Plan, refuse_unknown_names_in_job
from gpurun.launcher.rundir.files import RunDir, not_as_written, too_large
from gpurun.launcher.rundir.paths import num_bytes
from gpurun.launcher.rundir.records import (
    CodeVersion,
    Command,
    Event,
    LeftProcess,
    Look,
    Restart,
    Stall,
    TimeChange,
)
from gpurun.launcher.stats.estimates import ALPHA, is_spent
from gpurun.launcher.units import plural

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

    @property
    def cores(self) -> int | None:
        """Cores of the machine, as far as the run may use them; `None`: it isn't known."""
        return self.host.get("cpu_cores")


def compare_run(run: RunDir) -> Comparison:
    """Everything that the run has found out so far.

    Raises:
        MachineError: the plan can't be read: this is no run directory, or one that was never started.
    """
    recorded = _read(run)
    plan, differences = recorded.plan, _differences(recorded)
    results, said = variant_results(run, differences, recorded.host, _stated_peaks(recorded.job), plan.nodes)
    gated = gate_of_run(plan, differences, results, recorded.looks, recorded.cores)
    if gated is not None:
        rows = rows_of_gate(gated[0], results)
        results = tuple(replace(result, vs_baseline=rows[result.id]) for result in results)
    ranking = standings(results, differences) if is_one_task(plan) and gated is None else None
    if ranking is None:
        said = [(result, each) for result, each in said if each.figures.get("case") != "traced-far"]
    found = _concluded(run, recorded, differences, with_lead(results, ranking), ranking, gated)
    took_s = launches_s(recorded.events, recorded.commands)
    findings = (*found.findings, *_notes(found, run, recorded, differences.within, took_s))
    findings = (*findings, *more_launches_note(findings, plan, differences), *named_once(said, len(results)))
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


def _concluded(
    run: RunDir,
    recorded: _Recorded,
    differences: Differences,
    results: tuple[VariantResult, ...],
    ranking: Standings | None,
    gated: tuple[Gate, tuple[Finding, ...]] | None,
) -> Comparison:
    """The comparison without its notes.

    Args:
        ranking: of the results; `None` where nothing is ranked.
        gated: the result of a gate, and what it says; `None` of another run.
    """
    plan, (gate, of_gate) = recorded.plan, gated or (None, ())
    undecided = open_pairs(ranking, differences) if ranking else ()
    is_measured = _is_measured(recorded, gate, undecided)
    answer = of_gate or conclude(plan, results, ranking, is_measured, differences.within, recorded.cores)
    if not (recorded.job.get("profile") or {"steps": 1}).get("steps"):
        answer = tuple(
            with_figures(each, case="untraced") if each.figures.get("case") == "why-untraced" else each
            for each in answer
        )
    if not is_measured:  # what is missing comes first, and details would point to themselves
        answer = tuple(each for each in answer if each.figures.get("case") != "why-untraced")
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
    return Comparison(
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
) -> tuple[tuple[VariantResult, ...], list[tuple[VariantResult, Finding]]]:
    """One entry per variant, in the order of the plan; and all that was noticed about each."""
    times, rows = step_times(differences), differences.vs_baseline()
    results, said = [], []
    for measured in differences.measured.values():
        variant = measured.variant
        traced = of_timed(of_devices(read_traced(run, variant.id), variant.devices), typical_ms(measured))
        ranks = rank_figures(run, measured, traced, nodes)
        steps = TracedSteps(len(traced.steps), traced.num_steps) if traced and traced.steps else None
        result = variant_result(measured, differences, times, rows[variant.id], host, peaks, ranks, steps)
        results.append(result)
        said += [(result, each) for each in findings(measured, result, traced, host)]
    return tuple(results), said


def _stated_peaks(job: Mapping[str, Any]) -> dict[str, float]:
    """The job's `peak_tflops`, as far as the file of a stranger has some."""
    stated = job.get("peak_tflops")
    rates = stated.items() if isinstance(stated, Mapping) else ()
    return {name: rate for name, rate in rates if isinstance(rate, int | float) and 0 < rate <= MAX_TFLOPS}


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
