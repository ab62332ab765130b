"""The answer of a run, and the findings that go with it."""

import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from gpurun.launcher.compare.figures.size_curves import probe_summary
from gpurun.launcher.compare.label import variant_label, varied_texts
from gpurun.launcher.compare.load_findings import (
    cool_down,
    load_percent,
    throttled_in,
    waiting_findings,
)
from gpurun.launcher.compare.model import Difference, Fitting, VariantResult
from gpurun.launcher.compare.ranking import (
    Pairwise,
    Rival,
    Standings,
    fastest_first,
    is_baseline,
    opposite,
    standings,
    time_per_sample,
)
from gpurun.launcher.compare.variant_causes import cause, loss_of, remaining, why_slower
from gpurun.launcher.findings.finding import AFTER_ALL, Finding, finding, reason, with_figures, worded
from gpurun.launcher.findings.finding_kinds import KINDS
from gpurun.launcher.findings.run_cases import AS_FAST, ENDED, FASTER, OWN_PROCESSES, SLOWER, TIMES
from gpurun.launcher.machine.accelerators import CPU
from gpurun.launcher.plan.model import Identity, Plan
from gpurun.launcher.strategies import STRATEGIES
from gpurun.launcher.trace.causes import to_do
from gpurun.launcher.units import (
    GIB,
    HALF,
    TWICE,
    Interval,
    format_factor,
    format_ms,
    format_percent,
    half_width,
    interval_figures,
    is_lopsided,
    more_speed,
    plural,
)


def conclude(
    plan: Plan,
    results: Sequence[VariantResult],
    standings: Standings | None,
    complete: bool = True,
    within: int = 0,
    cores: int | None = None,
) -> tuple[Finding, ...]:
    """Which variant is fastest, by how much and how surely; or why none is.

    The answer comes first; then further differences, their causes, and what to do next.

    Args:
        plan: of the run.
        results: of all variants.
        standings: leader and rivals; `None` if nothing was measured, or variants do different work.
        complete: whether nothing is left to measure.
        within: the launches that verdicts are limited to; 0: they cover what other launches would show.
        cores: of the machine, as far as the run may use them; `None`: it isn't known.
    """
    if not is_one_task(plan):
        return (_separate_work(plan, results), *waiting_findings(results, cores))
    ran = [result for result in results if result.wall_s is not None]
    rival = _named_rival(standings, plan.baseline) if standings else None
    if standings is None and ran:
        reasons = {result.reason for result in ran}
        case = "few-steps" if reasons - {None} else "unmarked"
        case = OWN_PROCESSES if reason(OWN_PROCESSES) in reasons else case
        return (_without_steps(plan, ran), to_do("without-steps", case))
    if standings is None:
        found: tuple[Finding, ...] = (nothing_measured(plan, complete, results),)
        if complete and results:
            is_short = all(result.status == "oom" for result in results)
            short = "oom-program" if results[0].kind.runs_program else "oom"
            found = (*found, to_do("not-measured", short if is_short else "ended"))
    elif (throttled := throttled_in(results)) and standings.rivals:
        first, *others = throttled
        return (finding("not-ranked", num_more=len(others) or None, **first.figures), cool_down())
    else:
        named = [standings.leader, *([rival.result] if rival else [])]
        found = ranking_findings(standings, plan.baseline, within, load_percent(named))
    return (*found, *waiting_findings(results, cores, rival))


def fitting_in(
    memory_bytes: int, results: Sequence[VariantResult], pairwise: Pairwise
) -> tuple[Fitting, Finding] | None:
    """Which variants fit in so much memory; `None` where no peak is known.

    Args:
        memory_bytes: of a device.
        results: of all variants.
        pairwise: says whether the lead of the fastest is sure.
    """
    memory_gib = memory_bytes / GIB
    ranked = fastest_first(results)
    known = [(result, result.peak_gib) for result in ranked if result.peak_gib is not None]
    if not known:
        return None
    fit = [result for result, peak_gib in known if peak_gib <= memory_gib]
    found = standings(fit, pairwise)
    named = found.leader if found else min(known, key=lambda pair: pair[1])[0]
    order = (found.leader, *(rival.result for rival in found.rivals)) if found else ()
    what = finding(
        "fits-in-memory",
        weight=0.95,
        case="fastest" if found else "none",
        on_average=None if found and found.is_settled else "on average",
        memory_gib=memory_gib,
        leader=named_with_error(named),
        step_ms=named.step_ms.estimate if named.step_ms else None,
        peak_gib=named.peak_gib,
        num_unknown=len(ranked) - len(known) or None,
        replicas=replicas_on_host([result for result, _ in known]),
    )
    return Fitting(memory_gib, order[0].id if order else None, tuple(result.id for result in order)), what


def replicas_on_host(results: Sequence[VariantResult]) -> tuple[str, ...] | None:
    """Strategies whose one process has several CPU devices, and so one peak; `None` without any."""
    strategies = {result.strategy for result in results if result.devices[0].startswith(CPU.name)}
    return tuple(sorted(name for name in strategies if STRATEGIES[name].has_replicas)) or None


def is_one_task(plan: Plan) -> bool:
    """Whether all variants do the same work, so that one of them can be the fastest."""
    first = plan.variants[0]
    return all(variant.kind.is_ranked and variant.same_task(first) for variant in plan.variants)


def nothing_measured(plan: Plan, complete: bool, results: Sequence[VariantResult] = ()) -> Finding:
    """The answer over variants without any figures, while some are still to come or at the end."""
    if len(plan.variants) > 1:
        return finding("not-measured", case="none" if complete else "none-yet")
    ended = next((ENDED.get(result.status) for result in results if complete), None)
    case = "ended" if ended else "one" if complete else "one-yet"
    stopped = results[0].reason if results and not complete else None
    why = short_reason(results[0]) if ended else stopped if stopped != reason("not-yet") else None
    name = _name(plan, plan.variants[0])
    return finding("not-measured", case=case, leader=name, ended=ended, reason=why)


MOST_OF_REASON = 100
"""Characters; the table and the log have it all."""


def short_reason(result: VariantResult) -> str | None:
    """Why a rank failed; an allocator's message says no more than that memory ran out."""
    if result.status != "failed" or not result.reason:
        return None
    first = result.reason.splitlines()[0]
    return textwrap.shorten(first, MOST_OF_REASON, placeholder=" …")


def _named_rival(standings: Standings, baseline: str) -> Rival | None:
    """The variant with which the headline compares the leader: the baseline, or else the closest."""
    compared = (rival for rival in standings.rivals if rival.result.id == baseline)
    return next(compared, None) or next(iter(standings.rivals), None)


def ranking_findings(
    standings: Standings, baseline: str, within: int = 0, queue_percent: float | None = None
) -> tuple[Finding, ...]:
    """The answer about variants that do the same work, and the largest loss of the fastest.

    Args:
        standings: leader and rivals.
        baseline: id of the variant that the others were compared with.
        within: launches that verdicts are limited to; 0: none.
        queue_percent: of a step that its worst rank waited for cores under other load.
    """
    scope = "this launch" if within == 1 else f"these {within} launches"
    limits = {
        "within": scope if within else None,
        "queue_percent": queue_percent,
        "num_shared": _num_shared(standings),
    }
    lead = _lead(standings, baseline, limits)
    is_explained = KINDS[lead[0].code].title == "Fastest" and any(each.level == "cause" for each in lead)
    found = (*lead, *remaining(standings.leader, is_explained))
    named = {each.variant for each in found if each.level == "cause"}
    others = [rival.result for rival in standings.rivals[:MOST_EXPLAINED] if rival.result.id not in named]
    losses = ((result, loss_of(result, standings.leader)) for result in others)
    return (*found, *(cause(loss, result, AFTER_ALL) for result, loss in losses if loss))


def _num_shared(standings: Standings) -> int | None:
    """The most ranks that the leader or a rival has on one GPU; `None` where each has its own."""
    results = [standings.leader, *(rival.result for rival in standings.rivals)]
    most = max(max(Counter(result.devices).values(), default=0) for result in results)
    return most if most > 1 else None


MOST_EXPLAINED = 8
"""Variants whose causes are looked for, those closest to the fastest."""


def _separate_work(plan: Plan, results: Sequence[VariantResult]) -> Finding:
    """The answer over variants that are not compared with each other."""
    if not plan.variants[0].kind.is_ranked:
        probes = {variant_label(result): result.probe for result in results}
        return finding("probe", found=probe_summary(plan.workload, probes))
    workloads = dict.fromkeys(variant.workload for variant in plan.variants)
    return finding("other-work", num_workloads=len(workloads))


def _without_steps(plan: Plan, ran: Sequence[VariantResult]) -> Finding:
    """The answer over programs that ran to their end, and of which nothing else is known."""
    if len(ran) > 1:
        return finding("without-steps", leader=plural(len(ran), "variant"))
    result, name = ran[0], _name(plan, ran[0])
    run_s = None if result.reason else result.wall_s
    return finding("without-steps", leader=name, run_s=run_s, reason=result.reason or None)


def _name(plan: Plan, variant: Identity) -> str:
    """The varied values, or else what ran: `train.py on 2 devices`."""
    return (
        " ".join(varied_texts(variant.varied))
        or f"{plan.workload} on {plural(len(variant.devices), 'device')}"
    )


def _lead(standings: Standings, baseline: str, limits: Mapping[str, Any]) -> tuple[Finding, ...]:
    """Which variant leads, and whether that is sure."""
    if not standings.rivals:
        return (_alone(standings.leader),)
    undecided = [rival for rival in standings.rivals if not rival.is_slower]
    if not undecided:
        return _clear_lead(standings, baseline, limits)
    open_ = [rival for rival in undecided if rival.behind.verdict != "same"] or undecided
    if all(rival.behind.ci is None for rival in open_):
        return _unproven_lead(standings, open_, limits)
    return _close_race(standings.leader, undecided, limits)


def _alone(leader: VariantResult) -> Finding:
    step_ms = leader.step_ms
    estimate, ci = (step_ms.estimate, step_ms.ci) if step_ms else (None, None)
    figures: dict[str, Any] = {}
    if estimate is not None and ci is not None and format_ms(ci[0]) != format_ms(ci[1]):
        figures = {"range_ms": ci} if is_lopsided(estimate, ci) else {"half_ms": half_width(estimate, ci)}
    return finding("only-variant", leader.id, leader=named_with_error(leader), step_ms=estimate, **figures)


def _clear_lead(standings: Standings, baseline: str, limits: Mapping[str, Any]) -> tuple[Finding, ...]:
    """The leader against the baseline; against the runner-up where it is the baseline itself."""
    leader, runner_up = standings.leader, standings.rivals[0]
    names = {"leader": named_with_error(leader), **limits}
    compared = next((rival for rival in standings.rivals if rival.result.id == baseline), None)
    if compared is None:
        behind = _behind(runner_up, leader)
        answer = finding("baseline-fastest", leader.id, weight=1, **names, **behind)
        return (answer, *_why(runner_up.result, leader, 1.0))
    reference, difference = compared.result, opposite(compared.behind)
    percent, ci = _saved(difference)
    by: dict[str, Any] = {"how": FASTER[_measure(leader, reference)], "by": format_percent(percent, ci)}
    figures = _shown(percent, ci, difference)
    if percent >= HALF and ci is not None:
        (faster, _), interval = more_speed((percent, percent)), more_speed(ci)
        by = {"how": AS_FAST[_measure(leader, reference)], "by": format_factor(faster, interval)}
        figures |= {"ci": None, "ratio_ci": tuple(1 + end / 100 for end in interval)}
    answer = finding(
        "fastest", leader.id, weight=1, **by, **names, other=named_with_error(reference), **figures
    )
    why = _why(reference, leader, 1.0)
    if len(variant_label(reference)) > LONG_NAME:
        why = tuple(with_figures(each, where="the baseline") for each in why)
    found = (answer, *why)
    if runner_up.result.id != baseline:
        found = (*found, slower(runner_up, leader), *_why(runner_up.result, leader, AFTER_ALL))
    return found


LONG_NAME = 40
"""Characters of a baseline's name from which on it stands only in the answer."""


def _measure(leader: VariantResult, other: VariantResult) -> str:
    """The quantity that two variants are compared by: a step of the same samples, a sample, or any step."""
    if leader.kind.runs_program and leader.global_batch is None:
        return "program"  # which decides by itself how many samples a step has
    return "step" if leader.global_batch == other.global_batch else "sample"


def _behind(rival: Rival, leader: VariantResult) -> dict[str, Any]:
    """How far a rival is behind, by its interval."""
    behind = rival.behind
    percent = behind.percent if behind.ci else None
    measure, name = _measure(leader, rival.result), named_with_error(rival.result)
    if percent is not None and behind.ci and percent >= TWICE:
        how = TIMES[measure].format(by=format_factor(percent, behind.ci))
        figures = interval_figures(percent, behind.ci)
        return {"other": name, "how": how, **figures, **_shown(percent, None, behind)}
    how = worded(SLOWER[measure], {} if percent is None else {"by": format_percent(percent, behind.ci)})
    return {"other": name, "how": how, **_shown(percent, behind.ci, behind)}


def _shown(percent: float | None, ci: Interval | None, difference: Difference) -> dict[str, Any]:
    return {"percent": percent, "ci": ci, "wins": difference.wins, "of": difference.of}


def slower(rival: Rival, leader: VariantResult) -> Finding:
    """`ddp 48/16 is 18 % slower (17 to 19)`; of other batches by the time per sample."""
    return finding("slower", rival.result.id, **_behind(rival, leader))


def _unproven_lead(
    standings: Standings, undecided: Sequence[Rival], limits: Mapping[str, Any]
) -> tuple[Finding, ...]:
    """Which rival can't be ranked for want of rounds or launches; then what is established."""
    leader, closest = standings.leader, undecided[0]
    percent = 100 * (time_per_sample(closest.result) / time_per_sample(leader) - 1)
    answer = finding(
        "fastest-on-average",
        leader.id,
        weight=1,
        leader=named_with_error(leader),
        other=named_with_error(closest.result),
        num_more=len(undecided) - 1 or None,
        percent=percent if percent > 0 else None,
        per="sample" if any(_measure(leader, each.result) == "sample" for each in undecided) else None,
        queue_percent=limits["queue_percent"],
        num_shared=limits["num_shared"],
    )
    found = [answer]
    if closest.behind.why:
        found.append(finding("too-few", closest.result.id, why=closest.behind.why, weight=1))
    established = next((rival for rival in standings.rivals if rival.is_slower), None)
    if established is not None:
        found += [slower(established, leader), *_why(established.result, leader)]
    return tuple(found)


def _close_race(
    leader: VariantResult, undecided: Sequence[Rival], limits: Mapping[str, Any]
) -> tuple[Finding, ...]:
    """The best of them and the closest rival that no interval separates from it."""
    open_ = [rival for rival in undecided if rival.behind.verdict != "same"]
    closest = next(rival for rival in open_ or undecided if rival.behind.ci is not None)
    ci, code = closest.behind.ci, "not-distinguished" if open_ else "equally-fast"
    if open_ and ci is not None and not ci[0] <= 0 <= ci[1]:  # by less than counts as slower
        code = "differ-too-little"
    in_table = leader.vs_baseline if is_baseline(closest.result) else None
    shown = closest.behind if in_table is None else in_table
    is_alike = (closest.result.strategy, closest.result.varied) == (leader.strategy, leader.varied)
    answer = finding(
        code,
        leader.id,
        weight=1,
        choice="split" if leader.kind.trains and is_alike else "variant",
        leader=named_with_error(leader),
        other=named_with_error(closest.result),
        which="latter" if in_table is None else "former",
        change_percent=shown.percent or 0.0,
        ci=shown.ci,
        num_more=len(open_ or undecided) - 1 or None,
        **limits,
    )
    if closest.behind.why:
        return (answer, finding("too-few", closest.result.id, why=closest.behind.why, weight=1))
    if code == "not-distinguished":
        case = "rounds" if limits["within"] else "launches"
        return (
            answer,
            finding("scatter-hides-it", closest.result.id, case=case, num_launches=leader.launches, weight=1),
        )
    return (answer, to_do(code, "other-figure", 0.5))


def _why(slower: VariantResult, leader: VariantResult, weight: float | None = None) -> tuple[Finding, ...]:
    """The cause that traces show in a slower variant."""
    loss = why_slower(slower, leader)
    return (cause(loss, slower, weight),) if loss else ()


def _saved(difference: Difference) -> tuple[float, Interval | None]:
    """Percent of time saved instead of added: `12 % faster` is −12 % of the baseline's step time."""
    ci = difference.ci
    return -(difference.percent or 0.0), None if ci is None else (-ci[1], -ci[0])


def named_with_error(result: VariantResult) -> str:
    """The label of a variant; with the error of gradients that are compressed or wrong."""
    if not (result.compression or result.gradient_warning):
        return variant_label(result)
    error = result.gradient_error
    unknown = "not finite" if result.gradient_warning else "of unknown error"
    what = unknown if error is None else f"off by {error:.2g}"
    return f"{variant_label(result)} (gradients {what})"
