"""The findings of a run in words: one headline, then the sentences that go with it.

Every report shows the same: the terminal, Markdown, HParams, the tab, the HTML file and JSON.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from gpurun.launcher.compare.causes import remaining_loss, why_slower
from gpurun.launcher.compare.figures.probes import probe_summary
from gpurun.launcher.compare.interference import (
    COOL_DOWN,
    LESS_AT_ONCE,
    is_hot,
    load_clause,
    named,
    waiting_sentences,
)
from gpurun.launcher.compare.label import variant_label, varied_texts
from gpurun.launcher.compare.model import Difference, Fitting, Gate, VariantResult
from gpurun.launcher.compare.ranking import (
    Pairwise,
    Rival,
    Standings,
    fastest_first,
    standings,
    time_per_sample,
)
from gpurun.launcher.compare.variant_difference import opposite
from gpurun.launcher.machine.accelerators import CPU
from gpurun.launcher.plan.model import Plan, Variant
from gpurun.launcher.strategies import STRATEGIES
from gpurun.launcher.units import (
    GIB,
    Interval,
    format_gib,
    format_ms,
    format_percent,
    format_percent_interval,
    plural,
)


@dataclass(frozen=True)
class Conclusion:
    """The answer to the question of the run."""

    headline: str
    """One sentence, with its number."""
    details: tuple[str, ...] = ()
    """Sentences: further differences, their causes, what even the fastest loses, what to do next."""

    @property
    def summary(self) -> str:
        """A line for each of them, in every report."""
        return "\n".join((self.headline, *self.details))


def conclude(
    plan: Plan,
    results: Sequence[VariantResult],
    standings: Standings | None,
    interference: Sequence[str] = (),
    complete: bool = True,
    within: int = 0,
    gate: Gate | None = None,
    less_load: str = LESS_AT_ONCE,
) -> Conclusion:
    """Which variant is fastest, by how much and how surely; or why none is. Of a gate, what it found.

    Args:
        plan: of the run.
        results: of all variants.
        standings: leader and rivals; `None` if nothing was measured, or variants do different work.
        interference: what else was in the times of the variants.
        complete: whether nothing is left to measure.
        within: the launches that verdicts are limited to; 0: they cover what other launches would show.
        gate: of a run that compares two versions of the code.
        less_load: what to do about other load.
    """
    if gate is not None:
        return Conclusion(gate.headline, gate.details)
    if not is_one_task(plan):
        return Conclusion(_separate_work(plan, results), waiting_sentences(results, interference, less_load))
    ran = [result for result in results if result.wall_s is not None]
    if standings is None and ran:
        return Conclusion(_without_steps(plan, ran))
    if standings is None:
        found = Conclusion(nothing_measured(plan, complete, results))
    elif is_hot(results) and standings.rivals:
        return _not_ranked(interference)
    else:
        found = ranking_conclusion(standings, plan.baseline, _scope(within), load_clause(results))
    rival = _named_rival(standings, plan.baseline) if standings else None
    waiting = waiting_sentences(results, interference, less_load, rival)
    return replace(found, details=(*found.details, *waiting))


def fitting_in(
    memory_bytes: int, results: Sequence[VariantResult], pairwise: Pairwise, is_on_host: bool
) -> Fitting | None:
    """Which variants fit in so much memory; `None` where no peak is known.

    Args:
        memory_bytes: of a device.
        results: of all variants.
        pairwise: says whether the lead of the fastest is sure.
        is_on_host: whether the devices are CPUs.
    """
    memory_gib = memory_bytes / GIB
    ranked = fastest_first(results)
    known = [(result, result.peak_gib) for result in ranked if result.peak_gib is not None]
    if not known:
        return None
    fit = [result for result, peak_gib in known if peak_gib <= memory_gib]
    found = standings(fit, pairwise)
    smallest = min(known, key=lambda one: one[1])[0]
    parts = [_fastest_that_fits(found, memory_gib) if found else _none_fits(smallest, memory_gib)]
    if len(known) < len(ranked):
        parts.append(f"The peak of {plural(len(ranked) - len(known), 'other')} isn't known.")
    if is_on_host and not smallest.kind.runs_program:
        parts.append("On CPU devices that is the peak of live tensors.")
    parts += peak_of_replicas([one for one, _ in known])
    order = (found.leader, *(rival.result for rival in found.rivals)) if found else ()
    return Fitting(
        memory_gib, found.leader.id if found else None, tuple(x.id for x in order), " ".join(parts)
    )


def peak_of_replicas(results: Sequence[VariantResult]) -> list[str]:
    """That a process with several CPU devices has one peak; none where no variant is such a process."""
    strategies = {one.strategy for one in results if one.devices[0].startswith(CPU.name)}
    alike = sorted(name for name in strategies if STRATEGIES[name].has_replicas)
    return [f"On CPU devices the peak of {name} is that of all devices together." for name in alike]


def _fastest_that_fits(found: Standings, memory_gib: float) -> str:
    how = "Fastest" if found.is_settled else "Fastest on average"
    named = f"{named_with_error(found.leader)} ({time_and_memory(found.leader)})"
    return f"{how} that fits in {format_gib(memory_gib, 2)}: {named}."


def _none_fits(smallest: VariantResult, memory_gib: float) -> str:
    name, peak = variant_label(smallest), format_gib(smallest.peak_gib or 0.0, 2)
    return f"No variant fits in {format_gib(memory_gib, 2)}: even {name} takes {peak}."


def time_and_memory(result: VariantResult) -> str:
    """`12.1 ms, 3.45 GiB`."""
    step_ms = result.step_ms.estimate if result.step_ms else 0.0
    return f"{format_ms(step_ms)} ms, {format_gib(result.peak_gib or 0.0, 2)}"


def is_one_task(plan: Plan) -> bool:
    """Whether all variants do the same work, so that one of them can be the fastest."""
    first = plan.variants[0]
    return all(one.kind.is_ranked and one.same_task(first) for one in plan.variants)


HOW_IT_ENDED = {
    "failed": "failed",
    "oom": "didn't fit in memory",
    "timeout": "took too long",
    "hung": "hung",
}


def nothing_measured(plan: Plan, complete: bool, results: Sequence[VariantResult] = ()) -> str:
    """The headline over variants without any figures, while some are still to come or at the end."""
    if len(plan.variants) > 1:
        when = "could be measured" if complete else "has been measured yet"
        return f"No variant {when}, so none is fastest."
    when = "couldn't be measured" if complete else "hasn't been measured yet"
    ended = next((HOW_IT_ENDED.get(result.status) for result in results if complete), None)
    return f"{_name(plan, plan.variants[0])} {ended or when}."


def _named_rival(standings: Standings, baseline: str) -> Rival | None:
    """The variant with which the headline compares the leader: the baseline, or else the closest."""
    compared = (rival for rival in standings.rivals if rival.result.id == baseline)
    return next(compared, None) or next(iter(standings.rivals), None)


def ranking_conclusion(standings: Standings, baseline: str, scope: str = "", load: str = "") -> Conclusion:
    """The conclusion about variants that do the same work.

    Args:
        standings: leader and rivals.
        baseline: id of the variant that the others were compared with.
        scope: a clause that says what verdicts are limited to: ` within this launch`.
        load: a clause about other load.
    """
    found = _lead(standings, baseline, scope, load)
    remaining = remaining_loss(standings.leader, alone=not standings.rivals)
    return Conclusion(found.headline, (*found.details, *([remaining] if remaining else [])))


def _separate_work(plan: Plan, results: Sequence[VariantResult]) -> str:
    """The headline over variants that are not compared with each other."""
    if not plan.variants[0].kind.is_ranked:
        return probe_summary(plan.workload, {variant_label(result): result.probe for result in results})
    workloads = dict.fromkeys(variant.workload for variant in plan.variants)
    return f"{len(workloads)} workloads, each measured by itself: they do different work, so none is fastest."


def _without_steps(plan: Plan, ran: Sequence[VariantResult]) -> str:
    """The headline over programs that ran to their end, and of which nothing else is known."""
    if len(ran) > 1:
        return f"{len(ran)} variants ran to their end; no steps were timed, so none is fastest."
    one, name = ran[0], _name(plan, ran[0])
    return (
        f"{name}: {one.reason}"
        if one.reason
        else f"{name} ran for {one.wall_s:.1f} s; no steps were recorded."
    )


def _name(plan: Plan, one: Variant | VariantResult) -> str:
    """The varied values, or else what ran: `train.py on 2 devices`."""
    return " ".join(varied_texts(one.varied)) or f"{plan.workload} on {plural(len(one.devices), 'device')}"


def _not_ranked(reasons: Sequence[str]) -> Conclusion:
    """Why there is no ranking, and what to do about it."""
    return Conclusion(f"These splits can't be ranked: {named(reasons)}.", (COOL_DOWN,))


def _scope(within: int) -> str:
    """` within this launch`, ` within these 3 launches`; empty where other launches are covered."""
    if not within:
        return ""
    return " within this launch" if within == 1 else f" within these {within} launches"


def _lead(standings: Standings, baseline: str, scope: str, load: str) -> Conclusion:
    """Which variant leads, and whether that is sure."""
    if not standings.rivals:
        return Conclusion(_alone(standings.leader))
    undecided = [rival for rival in standings.rivals if not rival.is_slower]
    if not undecided:
        return _clear_lead(standings, baseline, f"{scope}{load}")
    open_ = [rival for rival in undecided if rival.behind.verdict != "same"] or undecided
    if all(rival.behind.ci is None for rival in open_):
        return _unproven_lead(standings, open_, load)
    return Conclusion(_close_race(standings.leader, undecided, f"{scope}{load}"))


def _alone(leader: VariantResult) -> str:
    step = leader.step_ms
    if leader.kind.runs_program and step is not None and not leader.varied:  # there is no other
        return f"{named_with_error(leader)}: {format_ms(step.estimate)} ms per step."
    time = f": {format_ms(step.estimate)} ms per step" if step else ""
    return f"{named_with_error(leader)}{time}; no other variant was measured."


def _clear_lead(standings: Standings, baseline: str, scope: str) -> Conclusion:
    """The leader against the baseline; against the runner-up where it is the baseline itself."""
    leader, runner_up = standings.leader, standings.rivals[0]
    name = named_with_error(leader)
    compared = next((rival for rival in standings.rivals if rival.result.id == baseline), None)
    best = _best(leader)
    if compared is None:
        return Conclusion(
            f"{best}{scope}: {name}; {_slower(runner_up, leader)}.", _why(runner_up.result, leader)
        )
    reference, difference = compared.result, opposite(compared.behind)
    headline = f"{best}{scope}: {name}, {_faster(leader, reference, difference)}."
    details = _why(reference, leader)
    if runner_up.result.id != baseline:
        details += (f"{_slower(runner_up, leader)}.", *_why(runner_up.result, leader))
    return Conclusion(headline, details)


def _unproven_lead(standings: Standings, undecided: Sequence[Rival], load: str) -> Conclusion:
    """Which rival can't be ranked for want of rounds or launches; then what is established."""
    leader, closest = standings.leader, undecided[0]
    others = f" and {plural(len(undecided) - 1, 'other')}" if len(undecided) > 1 else ""
    gap = _gap(leader, closest.result)
    which = "the closest is " if others else ""
    headline = (
        f"{_best(leader)} on average{load}: {named_with_error(leader)}; "
        f"{named_with_error(closest.result)}{others} "
        f"can't be ranked ({which}{gap} on average, but {closest.behind.why})."
    )
    established = next((rival for rival in standings.rivals if rival.is_slower), None)
    if established is None:
        return Conclusion(headline)
    return Conclusion(headline, (f"{_slower(established, leader)}.", *_why(established.result, leader)))


def _close_race(leader: VariantResult, undecided: Sequence[Rival], scope: str) -> str:
    """The best of them and the closest rival that no interval separates from it."""
    open_ = [rival for rival in undecided if rival.behind.verdict != "same"]
    closest = next(rival for rival in open_ or undecided if rival.behind.ci is not None)
    name, others = named_with_error(leader), len(open_ or undecided) - 1
    found, more = (
        "can't be distinguished",
        f", and {plural(others, 'more variant')} can't be distinguished from {name} either",
    )
    ci = closest.behind.ci
    if open_ and ci is not None and not ci[0] <= 0 <= ci[1]:  # by less than counts as slower
        found = "differ by too little to be ranked"
        more = f", and {plural(others, 'other')} can't be ranked either"
    if not open_:
        found, more = (
            "have equally long steps" if _may_differ_in_work(leader) else "are equally fast",
            f", and so {'is' if others == 1 else 'are'} {plural(others, 'other')}",
        )
    why = f"; {closest.behind.why}" if closest.behind.why else ""
    is_same_batch = leader.global_batch == closest.result.global_batch
    of = "the latter's step time" if is_same_batch else "the latter's time per sample"
    race = f"{name} and {named_with_error(closest.result)} {found} ({of}: {_signed(closest.behind)}{why})"
    what = _what_differs(leader, closest.result)
    best = "has clearly the shortest step" if _may_differ_in_work(leader) else "is clearly fastest"
    return f"No {what} {best}{scope}: {race}{more if others else ''}."


def _may_differ_in_work(result: VariantResult) -> bool:
    """Whether steps of two variants may have other numbers of samples: a program decides that itself."""
    return result.kind.runs_program and result.global_batch is None


def _best(leader: VariantResult) -> str:
    return "Shortest step" if _may_differ_in_work(leader) else "Fastest"


def _what_differs(leader: VariantResult, other: VariantResult) -> str:
    """The kind of choice between the two: a split, where they differ in nothing else."""
    is_same_strategy = other.strategy == leader.strategy
    return leader.kind.choice if is_same_strategy and other.varied == leader.varied else "variant"


def _faster(leader: VariantResult, reference: VariantResult, difference: Difference) -> str:
    """`12 % faster than the baseline ddp 32/32 (11 to 13)`; of other batches by the time per sample."""
    percent, ci = _mirrored(difference)
    interval = f" ({format_percent_interval(percent, ci)}{_pairs(difference)})" if ci else ""
    by = format_percent(percent, ci)
    how = "faster than" if leader.global_batch == reference.global_batch else "less time per sample than"
    if _may_differ_in_work(leader):
        how = "shorter than that of"
    return f"{by} {how} the baseline {named_with_error(reference)}{interval}"


def _slower(rival: Rival, leader: VariantResult) -> str:
    """`ddp 48/16 is 18 % slower (17 to 19)`; of other batches by the time per sample."""
    name, percent, ci = named_with_error(rival.result), rival.behind.percent, rival.behind.ci
    if percent is None or ci is None:
        return f"{name} takes longer per step" if _may_differ_in_work(leader) else f"{name} is slower"
    by, interval = format_percent(percent, ci), format_percent_interval(percent, ci) + _pairs(rival.behind)
    if _may_differ_in_work(leader):
        return f"{name} takes {by} longer per step ({interval})"
    if rival.result.global_batch == leader.global_batch:
        return f"{name} is {by} slower ({interval})"
    return f"{name} takes {by} more time per sample ({interval})"


def _pairs(difference: Difference) -> str:
    """`; 6 of 6 pairs`: how many pairs of launches, or of rounds, say the same; empty in older files."""
    return "" if difference.wins is None else f"; {difference.wins} of {difference.of} pairs"


def _why(slower: VariantResult, leader: VariantResult) -> tuple[str, ...]:
    """`In ddp 48/16 rank 1 waits 11.2 of 60.1 ms for rank 0's larger batch.`, where traces show it."""
    reason = why_slower(slower, leader)
    return (f"In {variant_label(slower)} {reason}.",) if reason else ()


def _mirrored(difference: Difference) -> tuple[float, Interval | None]:
    """Percent of time saved instead of added: `12 % faster` is −12 % of the baseline's step time."""
    ci = difference.ci
    return -(difference.percent or 0.0), None if ci is None else (-ci[1], -ci[0])


def _signed(difference: Difference) -> str:
    percent, ci = difference.percent or 0.0, difference.ci
    interval = f", {format_percent_interval(percent, ci)}" if ci else ""
    return f"{format_percent(percent, ci, signed=True)}{interval}"


def _gap(leader: VariantResult, other: VariantResult) -> str:
    """`7 % slower`, by the times of the table; of other batches by the time per sample."""
    percent = 100 * (time_per_sample(other) / time_per_sample(leader) - 1)
    if _may_differ_in_work(leader):
        more, less = "longer", "shorter"
    elif leader.global_batch == other.global_batch:
        more, less = "slower", "faster"
    else:
        more, less = "slower per sample", "faster per sample"
    return f"{format_percent(abs(percent))} {more if percent >= 0 else less}"


def named_with_error(result: VariantResult) -> str:
    """Its label; of gradients that are compressed or wrong their error too: it isn't the same step then."""
    if not (result.compression or result.gradient_warning):
        return variant_label(result)
    error = result.gradient_error
    unknown = "not finite" if result.gradient_warning else "of unknown error"
    what = unknown if error is None else f"off by {error:.2g}"
    return f"{variant_label(result)} (gradients {what})"
