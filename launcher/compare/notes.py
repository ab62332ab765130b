"""Findings for readers of the figures: on the run, and on single variants."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from gpurun.launcher.compare.figures.ranks import RankFigures, Traced, disagreement, slowest_rank
from gpurun.launcher.compare.figures.recorded import (
    LEAST_AROUND,
    LEAST_OTHER_WORK,
    MeasuredVariant,
    gpu_names,
    median_attempt,
    planned_launch,
    steps_of_launches,
)
from gpurun.launcher.compare.figures.variant import ablation_interval_ms, within_launch
from gpurun.launcher.compare.headline import replicas_on_host, short_reason
from gpurun.launcher.compare.label import left_out_texts, variant_label
from gpurun.launcher.compare.model import Comparison, OpenPair, VariantResult
from gpurun.launcher.compare.ranking import Differences, is_ranked, pareto_front
from gpurun.launcher.compare.variant_causes import is_far_from_timed
from gpurun.launcher.findings.finding import Finding, finding, noticed
from gpurun.launcher.findings.run_cases import ENDED, STOPPED
from gpurun.launcher.grouping import grouped
from gpurun.launcher.machine.accelerators import peak_tflop_per_s
from gpurun.launcher.plan.estimate import more_launches
from gpurun.launcher.plan.model import Plan
from gpurun.launcher.rundir.files import RunDir
from gpurun.launcher.rundir.records import (
    NO_GROUP,
    Command,
    Event,
    Killed,
    Look,
    QuietWait,
    Stage,
    before_s,
    between_s,
    stages_s,
)
from gpurun.launcher.stats.core_waiting import QUEUE_PERCENT
from gpurun.launcher.stats.estimates import MIN_LAUNCHES, next_look
from gpurun.launcher.stats.schedule import MOST_BUDGET_S, MOST_REPETITIONS, too_long
from gpurun.launcher.trace.causes import to_do
from gpurun.launcher.units import (
    first_of,
    format_gib,
    format_ms,
    listed,
    plural,
    ranks_text,
    whole_parts,
)

MOST_OPEN = 3
"""Variants that are named."""


def notes(
    plan: Plan,
    measured: Mapping[str, MeasuredVariant],
    within: int = 0,
    once: Finding | None = None,
    has_remedy: bool = False,
) -> tuple[Finding, ...]:
    """The plan's notes that apply, and what the measurement adds.

    Args:
        plan: of the run.
        measured: its variants.
        within: launches that verdicts are limited to.
        once: in place of the findings on few launches, that of `once_note`.
        has_remedy: whether `open_notes` says how long deciding takes, or that no budget decides.
    """
    if plan.gate is not None:
        return (*map(_of_plan, plan.all_notes), *_left_out(plan))
    baseline = measured[plan.baseline]
    has_rank = baseline.variant.kind.is_ranked
    all_others = [record for record in measured.values() if record is not baseline and has_rank]
    others = [record for record in all_others if record.variant.same_task(baseline.variant)]
    has_failed = all(variant.finished and not variant.counts for variant in measured.values())
    found = [*map(_of_plan, plan.notes if has_failed else plan.all_notes), *_left_out(plan)]
    more = None if has_remedy else more_launches(plan.budget_s is not None)
    counted = [record for record in others if record.counts]
    if counted and baseline.finished and not baseline.counts:
        lost, status = baseline.variant, baseline.status.status
        found.append(finding("baseline-lost", lost.id, weight=1, where=variant_label(lost), status=status))
        baseline, *others = counted
    few = _few_launches(baseline, others, more)
    found += [once] if once else [*few, *_within(within, baseline, others, None if few else more)]
    if any(record.variant.global_batch != baseline.variant.global_batch for record in others):
        found.append(finding("plan-note", case="other-batches"))
    found += _within_launch(measured.values())
    return tuple(found)


def _of_plan(note: str) -> Finding:
    return finding("plan-note", case="planned", note=note.removesuffix("."))


def once_note(
    plan: Plan, measured: Mapping[str, MeasuredVariant], looks: Sequence[Look], spent_s: float
) -> Finding | None:
    """The scope and the remedy, where the budget of a run that is over had room for one launch of each."""
    nums = [
        len(record.logs) for record in measured.values() if record.counts and record.variant.kind.is_ranked
    ]
    if plan.budget_s is None or len(nums) < 2 or max(nums) > 1 or not looks or looks[-1].launches > 1:
        return None
    minutes = math.ceil(max(plan.budget_s, spent_s * MIN_LAUNCHES) / 60)
    return finding("more-launches", weight=0.9, num_needed=MIN_LAUNCHES, num_minutes=minutes)


def open_notes(
    plan: Plan, leader: str, undecided: Sequence[OpenPair], looks: Sequence[Look], spent_s: float
) -> tuple[Finding, ...]:
    """The differences that a spent budget has left open, and how long it would take to decide them.

    Args:
        plan: of the run.
        leader: the variant that they are from.
        undecided: the differences.
        looks: all that the run has taken.
        spent_s: the time of all launches: more than the budget, where launching each variant once took more.
    """
    if plan.budget_s is None or not looks or looks[-1].launches < 2:
        return ()  # of one launch there is `once_note`
    launch_s = max(plan.budget_s, spent_s) / looks[-1].launches
    return (_time_to_decide(plan, leader, undecided, launch_s, looks[-1].launches),) if undecided else ()


def _time_to_decide(
    plan: Plan, leader: str, undecided: Sequence[OpenPair], launch_s: float, so_far: int
) -> Finding:
    """The minutes that deciding all of them takes; or, if some would take too long, which these are."""
    most = min(MOST_BUDGET_S / launch_s, MOST_REPETITIONS)
    # The launches so far have not decided it.
    needed = {pair.variant: max(next_look(so_far), pair.launches or math.inf) for pair in undecided}
    endless = [variant for variant, launches in needed.items() if launches > most]
    labels = [variant_label(plan.variant(variant)) for variant in endless or needed]
    what, first = first_of(labels, MOST_OPEN), variant_label(plan.variant(leader))
    if endless:
        return finding("cannot-be-decided", what=what, leader=first, long=too_long(launch_s), weight=1)
    minutes = math.ceil(launch_s * max(needed.values()) / 60)
    return finding("measure-longer", what=what, leader=first, num_minutes=minutes, weight=1)


UNDECIDED_CODES = ("not-distinguished", "fastest-on-average")


def more_launches_note(findings: Sequence[Finding], plan: Plan, differences: Differences) -> list[Finding]:
    """The next step where the answer isn't sure and no finding says how long deciding takes."""
    by_code = {each.code: each for each in findings}
    answer = next((by_code[code] for code in UNDECIDED_CODES if code in by_code), None)
    if answer is None or by_code.keys() & {"more-launches", "measure-longer", "cannot-be-decided"}:
        return []
    few = by_code.get("too-few")
    units, setting = "launches", more_launches(plan.budget_s is not None)
    if few and plan.budget_s is None and differences.is_over_rounds(few.about[0], answer.about[0]):
        units, setting = "rounds", "`steps: {rounds: 28}`"
    num_failed = sum(each.code == "variant-failed" for each in findings) or None
    return [finding("more-launches", weight=0.99, units=units, setting=setting, num_failed=num_failed)]


MUCH_LONGER = 1.1
"""Multiple of the budget from which on the report says why it took longer."""


SPENT_ON: dict[str, tuple[Stage, ...]] = {
    "rounds": ("round",),
    "the program": ("run",),
    "warm-up": ("warmup",),
    "start-up": ("start", "build"),
    "gradient checks": ("check",),
    "balanced splits": ("balance",),
    "traces": ("profile",),
    "memory": ("memory",),
}


def launches_s(events: Mapping[str, Sequence[Event]], commands: Sequence[Command]) -> dict[str, float]:
    """Seconds that the launches of a run took, by what for, and those before and between them."""
    logs = events.values()
    stages = [(event.stage, seconds) for events in logs for event, seconds in stages_s(events)]
    return {
        **{name: sum(s for stage, s in stages if stage in names) for name, names in SPENT_ON.items()},
        "before launches": before_s(logs, commands),
        "between launches": sum(between_s(logs, commands)),
    }


def budget_notes(
    run: RunDir, plan: Plan, events: Mapping[str, Sequence[Event]], took_s: Mapping[str, float]
) -> tuple[Finding, ...]:
    """The part of the budget that launches took, and for what.

    Args:
        run: of a search, too.
        plan: of the run.
        events: of every attempt.
        took_s: by what for.
    """
    launches = {planned_launch(name) for name, log in events.items() if log}
    if plan.budget_s is None or not launches:
        return ()
    search, trials = run.read_search(), run.read_trials()
    budget_s = search.budget_s if search else plan.budget_s  # a search's plan has what trials leave
    spent_s = {"trials": sum(trial.seconds for trial in trials), **took_s}
    percents = whole_parts([100 * seconds / budget_s for seconds in spent_s.values()])
    parts = {name: percent for name, percent in zip(spent_s, percents, strict=True) if percent}
    once = {launch.id for launch in plan.launches if launch.repetition == 0}
    is_over = launches <= once and sum(spent_s.values()) > MUCH_LONGER * budget_s
    found = finding(
        "time-spent",
        case="budget",
        num_trials=len(trials) if search else None,
        num_launches=len(launches),
        spent_percent=sum(percents),
        parts_percent=parts if len(parts) > 1 else None,
        budget_s=budget_s if is_over else None,
    )
    return (found,)


def memory_notes(results: Sequence[VariantResult]) -> tuple[Finding, ...]:
    """Which variants take less memory than all that are faster, where there is a choice."""
    front = pareto_front(results)
    if len(front) < 2:
        return ()
    choices = tuple(
        f"{variant_label(result)} ({format_ms(result.step_ms.estimate)} ms, {format_gib(result.peak_gib, 2)})"
        for result in front
        if result.step_ms and result.peak_gib is not None
    )
    return (finding("memory-trade-off", choices=choices, replicas=replicas_on_host(results)),)


def few_rounds_notes(comparison: Comparison, measured: Mapping[str, MeasuredVariant]) -> tuple[Finding, ...]:
    """Why rows of the table are inconclusive, unless the answer has that cause; of launches others speak."""
    said = {each.figures["why"] for each in comparison.findings if each.code == "too-few"}
    group = measured[comparison.baseline].group
    rows = [
        (variant, variant.vs_baseline)
        for variant in comparison.variants
        if measured[variant.id].group == group
    ]
    named: dict[str, list[str]] = {}
    for variant, row in rows:
        if row is not None and row.why and row.why not in said:
            named.setdefault(row.why, []).append(variant_label(variant))
    return tuple(
        finding("no-verdict", who=first_of(names, MOST_OPEN), why=why) for why, names in named.items()
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


def restart_notes(what: str, reasons: Sequence[str]) -> tuple[Finding, ...]:
    """The note that launches were started again, or made no step for a while, and why."""
    text = "; ".join(dict.fromkeys(reasons))
    return (finding("restarted", what=what, reasons=text),) if reasons else ()


def quiet_notes(run: RunDir) -> tuple[Finding, ...]:
    """The note on how long launches waited for other programs to leave the cores, and how many in vain."""
    waits = list(run.read_lines(run.waits, QuietWait))
    if not waits:
        return ()
    waited_s, in_vain = sum(wait.waited_s for wait in waits), sum(not wait.is_quiet for wait in waits)
    return (finding("waited-for-quiet", waited_s=waited_s, in_vain=in_vain, num_launches=len(waits)),)


def killed_note(killed: Killed) -> Finding:
    """The note on a program that was stopped, or on its ranks that did not end in time."""
    if not killed.ranks:
        return noticed(STOPPED, cause=killed.cause, launch=killed.launch, ended=killed.ended or None)
    were = "was" if len(killed.ranks) == 1 else "were"
    who = ranks_text(killed.ranks)
    if killed.hurried:
        return noticed("killed-early", killed=who, launch=killed.launch, were=were)
    return noticed("killed", killed=who, launch=killed.launch, were=were, grace_s=killed.grace_s)


def software_notes(run: RunDir, plan: Plan, measured: Iterable[MeasuredVariant]) -> tuple[Finding, ...]:
    """The note that launches ran other software or code, where a run was resumed after a change of it."""
    counting = {step.launch for variant in measured for steps in variant.steps.values() for step in steps}
    launches = [path.parent.name for path in sorted(run.path.glob("launches/*/launch.json"))]
    found: dict[frozenset[tuple[str, str]], int] = {}
    for launch in (name for name in launches if name in counting):
        code = {} if plan.gate else run.read_imported(launch)  # a gate compares versions of it
        if software := {**run.read_software(launch), **code}:
            version = frozenset(software.items())
            found[version] = found.get(version, 0) + 1
    by_version: dict[str, int] = {}
    for version, num in found.items():  # of some launches, not all modules are known
        others = [dict(other) for other in found]
        differing = sorted(
            (name, its)
            for name, its in version
            if all(name in other for other in others) and any(other[name] != its for other in others)
        )
        text = " and ".join(" ".join(item) for item in differing)
        by_version[text] = by_version.get(text, 0) + num
    if len(by_version) < 2:
        return ()
    parts = [f"{plural(num, 'launch')} with {text}" for text, num in by_version.items()]
    return (noticed("software", parts=parts),)


def _left_out(plan: Plan) -> list[Finding]:
    return [
        finding("plan-note", case="left-out", what=text, reason=reason)
        for text, reason in left_out_texts(plan.left_out)
    ]


def _few_launches(
    baseline: MeasuredVariant, others: list[MeasuredVariant], more: str | None
) -> list[Finding]:
    """Variants that run in other processes than the baseline need pairs of launches."""
    repetitions = set(baseline.logs)
    apart = [variant for variant in others if variant.group != baseline.group and variant.counts]
    pairs = [len(repetitions & set(variant.logs)) for variant in apart]
    if more is None or not apart or min(pairs) >= MIN_LAUNCHES:
        return []
    return [finding("more-launches", num_pairs=MIN_LAUNCHES, setting=more, weight=1)]


def _within(
    within: int, baseline: MeasuredVariant, others: list[MeasuredVariant], more: str | None
) -> list[Finding]:
    """The scope of verdicts between variants of the same launches, where these are few, and the remedy."""
    if not within or not any(variant.group == baseline.group and variant.counts for variant in others):
        return []
    return [finding("within-launches", case="verdicts", num_launches=within, setting=more)]


def _within_launch(measured: Iterable[MeasuredVariant]) -> list[Finding]:
    """The parts that the intervals of programs that ran once are made of."""
    once = [
        record
        for record in measured
        if record.variant.kind.runs_program and record.counts and len(record.logs) == 1
    ]
    nums: dict[str, list[int]] = {}
    for name, parts_ms in map(within_launch, once):
        if len(parts_ms) > 1:
            nums.setdefault(name, []).append(len(parts_ms))
    parts = [
        plural(found[0], name) if len(set(found)) == 1 else f"{min(found)} to {plural(max(found), name)}"
        for name, found in nums.items()
    ]
    return [finding("within-launches", case="intervals", parts=parts)] if parts else []


def dangers(results: Sequence[VariantResult]) -> list[Finding]:
    """Variants that train another model, or have no figures, and what to do about those that failed."""
    wrong = [result for result in results if result.gradient_warning]
    by_status = sorted(results, key=lambda result: result.status == "oom")  # that is a result
    ended = [(result, ENDED[result.status]) for result in by_status if result.status in ENDED]
    failed = [
        finding(
            "variant-failed", result.id, where=variant_label(result), ended=how, reason=short_reason(result)
        )
        for result, how in ended
        if any(is_ranked(each) for each in results)  # else the answer says it
    ]
    is_to_mend = failed and any(result.status in ("failed", "hung") for result in results)
    mend = [to_do("variant-failed", "ended", 1.5)] if is_to_mend else []
    return [*_wrong_gradients(wrong, len(results)), *failed, *mend]


def _wrong_gradients(wrong: Sequence[VariantResult], num_variants: int) -> list[Finding]:
    """The finding that variants train another model, once for all; the error of each; and a remedy."""
    if not wrong:
        return []
    errors = [result.gradient_error for result in wrong if result.gradient_error is not None]
    worst = f"{max(errors):.2g}" if errors else None
    danger = _of_variants(wrong, finding("gradient-differs", of="", error=worst), num_variants)
    each = ((result, finding("gradient-not-exact", of="", found=result.gradient_warning)) for result in wrong)
    is_model = any(len(set(result.split)) == 1 for result in wrong)  # weighing changes nothing there
    advice = to_do("gradient-differs", "gradient-even" if is_model else "gradient", weight=2.0)
    return [danger, *named_once(each, num_variants), advice]


def named_once(said: Iterable[tuple[VariantResult, Finding]], num_variants: int) -> list[Finding]:
    """Every finding once, with the variants that it concerns unless it concerns all."""
    concerned = grouped(said, lambda pair: (pair[1].code, pair[1].text))
    return [
        _of_variants([variant for variant, _ in found], found[0][1], num_variants)
        for found in concerned.values()
    ]


def _of_variants(variants: Sequence[VariantResult], each: Finding, num_variants: int) -> Finding:
    names = "" if len(variants) == num_variants else f"{', '.join(map(variant_label, variants))}: "
    figures = {**each.figures, "of": names, "variants": tuple(variant.id for variant in variants)}
    return finding(each.code, variants[0].id if len(variants) == 1 else None, **figures)


LONGER = 1.1
FAR_FROM_MEDIAN = 1.5
"""Multiples of the slowest rank's median from which on the report says why the mean is longer: of a program's
steps, and of rounds."""


def findings(
    measured: MeasuredVariant, result: VariantResult, traced: Traced | None, host: Mapping[str, Any]
) -> tuple[Finding, ...]:
    """All that was noticed about a variant: by ranks, in traces, and in the figures."""
    status, facts = measured.status, measured.facts
    unsteady = [finding("unsteady", of="", reason=status.reason)] if status.status == "unsteady" else []
    is_affected = any((rank.queue_percent or 0.0) > QUEUE_PERCENT for rank in result.ranks)
    trends = () if is_affected else measured.trends  # else load explains it
    inexact = [finding("gradient-not-exact", of="", found=facts.inexact)] if facts.inexact else []
    by_ranks = [noticed("recorded", found=each) for each in facts.warnings]
    in_traces = traced.notes if traced else ()
    in_figures = _in_figures(measured, result)
    return (*unsteady, *by_ranks, *inexact, *trends, *in_traces, *in_figures, *_without_peak(result, host))


def _without_peak(result: VariantResult, host: Mapping[str, Any]) -> list[Finding]:
    """A note that MFU is missing, for GPUs whose peak isn't known."""
    names = {name for name in gpu_names(result.devices, host) if name}
    if result.flop_per_s is None or result.mfu is not None or not names:
        return []
    unknown = sorted(name for name in names if not peak_tflop_per_s(name, result.precision or ""))
    return [noticed("no-peak", gpus=listed(unknown), precision=result.precision)]


def _in_figures(measured: MeasuredVariant, result: VariantResult) -> tuple[Finding, ...]:
    """Findings from the figures of a variant."""
    ranks, step_ms = result.ranks, result.step_ms.estimate if result.step_ms else None
    slowest, memory = slowest_rank(ranks), full_memory(ranks)
    if measured.finished and not measured.counts and measured.status.status != "ok":
        return memory  # the rest says nothing of why it failed
    launches = [*fewer_steps(measured)]
    if slowest is None or step_ms is None:
        return tuple(launches)
    case, times = ("longest-steps", LONGER) if measured.means else ("far-from-median", FAR_FROM_MEDIAN)
    if slowest.step_ms and step_ms >= times * slowest.step_ms:
        launches.append(noticed(case, step_ms=step_ms, median_ms=slowest.step_ms))
    if slowest.span_ms and is_far_from_timed(slowest.span_ms, step_ms):
        launches.append(noticed("traced-far"))
    interval = ablation_interval_ms(measured.steps.get(slowest.rank, ()))
    found = disagreement(slowest.exposed_comm_ms, interval, step_ms)
    has_group = NO_GROUP not in measured.facts.warnings
    alone = has_group and never_communicate(measured, ranks)
    return (
        *launches,
        *memory,
        *found,
        *([finding("never-communicates", of="")] if alone else []),
    )


def never_communicate(measured: MeasuredVariant, ranks: Sequence[RankFigures]) -> bool:
    """Whether a program has several ranks, and the traces of all of them show no collective."""
    shown = [(rank.wait_ms, rank.transfer_ms, rank.exposed_comm_ms.trace) for rank in ranks]
    return measured.variant.kind.runs_program and len(ranks) > 1 and all(each == (0, 0, 0) for each in shown)


def fewer_steps(measured: MeasuredVariant) -> tuple[Finding, ...]:
    """A finding where some launches of a program made less than half of the steps that others made."""
    made = steps_of_launches(measured.steps)
    attempts = Counter(map(planned_launch, made.keys() | measured.ended_s.keys()))
    # The last of several attempts is a restart, which goes on from what was saved.
    nums = [made.get(name, 0) for name in measured.ended_s if attempts[planned_launch(name)] == 1]
    if not measured.variant.kind.runs_program or 2 * min(nums, default=0) >= max(nums, default=0):
        return ()
    return (noticed("fewer-steps", least=min(nums), most=max(nums), placeholder="{launch_dir}"),)


def full_memory(ranks: Sequence[RankFigures]) -> tuple[Finding, ...]:
    """GPUs on which timed steps waited for memory."""
    return tuple(
        finding("memory-nearly-full", of="", device=rank.device, num_retries=rank.alloc_retries)
        for rank in ranks
        if rank.alloc_retries
    )
