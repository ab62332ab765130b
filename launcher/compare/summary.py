"""One plain sentence: which split is fastest, by how much, and whether that is sure.

A second one where even the fastest loses much of its step to something that can be mended.
"""

from collections.abc import Sequence

from gpurun.launcher.compare.explain import remaining_loss, why_slower
from gpurun.launcher.compare.label import variant_label
from gpurun.launcher.compare.model import Difference, VariantResult
from gpurun.launcher.compare.ranking import Rival, Standings, time_per_sample
from gpurun.launcher.plan.model import PROGRAM
from gpurun.launcher.units import format_ms, format_percent, format_percent_interval

MORE_LAUNCHES = "steps: {launches: 6}"
"""What a person adds to the job file to have launches compared."""


def summary(standings: Standings | None, baseline: str) -> str:
    """The text under the table.

    Args:
        standings: leader and rivals; `None` if nothing was measured.
        baseline: id of the variant that the others were compared with.
    """
    if standings is None:
        return "No variant has been measured, so none is fastest."
    remaining = remaining_loss(standings.leader, alone=not standings.rivals)
    return f"{_lead(standings, baseline)}{_told(' ', remaining)}"


def summary_without_steps(ran: Sequence[VariantResult]) -> str:
    """The text under programs that ran to their end, and of which nothing else is known."""
    if len(ran) > 1:
        return f"{len(ran)} variants ran to their end; no steps were seen, so none is fastest."
    return f"{variant_label(ran[0])} ran for {ran[0].wall_s:.1f} s; no steps were seen."


def _lead(standings: Standings, baseline: str) -> str:
    """Who leads, and whether that is sure."""
    if not standings.rivals:
        return _alone(standings.leader)
    undecided = [rival for rival in standings.rivals if not rival.is_slower]
    if not undecided:
        return f"Fastest: {_clear_lead(standings, baseline)}."
    if all(rival.behind.ci is None for rival in undecided):
        return f"Fastest by median: {_unproven_lead(standings, undecided)}."
    what = "variant" if standings.leader.strategy == PROGRAM else "split"
    return f"No {what} is clearly fastest: {_close_race(standings.leader, undecided)}."


def _alone(leader: VariantResult) -> str:
    step = leader.step_ms
    if leader.strategy == PROGRAM and step is not None:
        return f"{variant_label(leader)}: {format_ms(step.median)} ms per step."
    time = f", {format_ms(step.median)} ms per step" if step else ""
    return f"Fastest: {variant_label(leader)}{time}; no other variant was measured."


def _clear_lead(standings: Standings, baseline: str) -> str:
    """`ddp 32/32; ddp 40/24 is 13.8 % slower (12.9 to 14.6)`, with the baseline where it is another one.

    Why a variant is slower follows where its trace shows it.
    """
    leader, runner_up = standings.leader, standings.rivals[0]
    difference = leader.vs_baseline
    if leader.id == baseline or difference is None or difference.percent is None:
        return f"{variant_label(leader)}; {_slower(runner_up, leader)}"
    reference = next((r.result for r in standings.rivals if r.result.id == baseline), None)
    if reference is None:
        return f"{variant_label(leader)}; {_slower(runner_up, leader)}"
    lead = f"{variant_label(leader)}, {_faster(difference)} than the baseline {variant_label(reference)}"
    lead += _faster_interval(difference) + _told(", where ", why_slower(reference, leader))
    return lead if runner_up.result.id == baseline else f"{lead}; {_slower(runner_up, leader)}"


def _unproven_lead(standings: Standings, undecided: Sequence[Rival]) -> str:
    """What is established, and then which rival can't be ranked for want of rounds or launches."""
    established = next((rival for rival in standings.rivals if rival.is_slower), None)
    closest = undecided[0]
    parts = [variant_label(standings.leader)]
    if established:
        parts.append(_slower(established, standings.leader))
    others = f" and {_count(len(undecided) - 1, 'other')}" if len(undecided) > 1 else ""
    gap = format_percent(_median_gap_percent(standings.leader, closest.result), signed=True)
    parts.append(
        f"{variant_label(closest.result)}{others} can't be ranked ({gap} by median, but {_too_few(closest)})"
    )
    return "; ".join(parts)


def _too_few(rival: Rival) -> str:
    """Why there is no interval, and how to get one."""
    if rival.shares_launches:
        return f"{_count(rival.result.rounds, 'round')} can't tell that from chance"
    launches = _count(rival.result.launches, "launch", "launches")
    return f"{launches} can't tell that from chance: set {MORE_LAUNCHES}"


def _close_race(leader: VariantResult, undecided: Sequence[Rival]) -> str:
    """The best of them and the closest rival that an interval can't tell from it."""
    closest = next(rival for rival in undecided if rival.behind.ci is not None)
    name, difference = variant_label(closest.result), closest.behind
    text = f"{variant_label(leader)} and {name} can't be told apart ({_signed(difference)})"
    others = len(undecided) - 1
    return f"{text}, nor can {_count(others, 'other')} from {variant_label(leader)}" if others else text


def _slower(rival: Rival, leader: VariantResult) -> str:
    """`ddp 48/16 is 18 % slower (17 to 19): rank 1 waits 11.2 of 60.1 ms for rank 0's larger batch`."""
    percent, ci = rival.behind.percent, rival.behind.ci
    told = _told(": ", why_slower(rival.result, leader))
    if percent is None or ci is None:
        return f"{variant_label(rival.result)} is slower{told}"
    return (
        f"{variant_label(rival.result)} is {format_percent(percent, ci)} slower"
        f" ({format_percent_interval(percent, ci)}){told}"
    )


def _told(joint: str, reason: str | None) -> str:
    return f"{joint}{reason}" if reason else ""


def _faster(difference: Difference) -> str:
    percent, ci = _mirrored(difference)
    return f"{format_percent(percent, ci)} faster"


def _faster_interval(difference: Difference) -> str:
    percent, ci = _mirrored(difference)
    return f" ({format_percent_interval(percent, ci)})" if ci else ""


def _mirrored(difference: Difference) -> tuple[float, tuple[float, float] | None]:
    """Percent of time saved instead of added: `12 % faster` is −12 % of the baseline's step time."""
    ci = difference.ci
    return -(difference.percent or 0.0), None if ci is None else (-ci[1], -ci[0])


def _signed(difference: Difference) -> str:
    percent, ci = difference.percent or 0.0, difference.ci
    interval = f", {format_percent_interval(percent, ci)}" if ci else ""
    return f"{format_percent(percent, ci, signed=True)}{interval}"


def _median_gap_percent(leader: VariantResult, other: VariantResult) -> float:
    """How much longer the other takes per sample, by the medians in the table."""
    return 100 * (time_per_sample(other) / time_per_sample(leader) - 1)


def _count(number: int, one: str, many: str | None = None) -> str:
    return f"{number} {one if number == 1 else many or one + 's'}"
