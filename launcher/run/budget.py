"""What a run with a budget measures next: which variants, in how many rounds, and whether there is time.

Close rivals get the rounds; a variant that is far behind needs few to be shown to be slower.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median

from gpurun.launcher.compare.gate import still_open
from gpurun.launcher.compare.model import Comparison, Gate, Scatter
from gpurun.launcher.compare.ranking import following, is_ranked
from gpurun.launcher.plan.model import Plan
from gpurun.launcher.run.attempts import attempts, spent_s
from gpurun.launcher.rundir.files import RunDir, append_lines
from gpurun.launcher.rundir.records import Event, Look
from gpurun.launcher.stats.sequential import best_rounds, detectable_percent, next_look

ASSUMED_PERCENT = 10.0
"""What launches, and rounds, scatter by until it is known."""
AROUND_S = 1.0
"""What a launch takes before its ranks' first event, after the last one, and to be compared."""
ONCE = frozenset({"balance", "check", "profile"})
"""Stages that only the first launches have."""


@dataclass
class Budget:
    """The time of a run that ends when all is decided, and what is done with it."""

    plan: Plan
    run: RunDir
    now_s: Callable[[], float]
    """By a monotonic clock."""
    rounds: Mapping[str, int] = field(default_factory=dict)
    """Of each variant in the launches since the last review."""

    def __post_init__(self) -> None:
        self.started_s = self.now_s() - spent_s(self.run)

    @property
    def total_s(self) -> float:
        return self.plan.budget_s or 0.0

    def review(self, repetitions: int, compare: Callable[[], Comparison]) -> Mapping[str, int]:
        """Compares what there is, as a look where one is due; the rounds of each variant from now on.

        None if all is decided, or no other repetition fits.
        """
        costs = costs_of(self.events(repetitions - 1), is_first=repetitions == 1)
        elapsed_s = self.now_s() - self.started_s
        twice = "" if self.plan.gate else self.plan.baseline
        shortest_s = costs.expected_s(dict.fromkeys(self.planned(), 1), twice)
        is_planned = any(launch.repetition >= repetitions for launch in self.plan.launches)
        has_time = is_planned and elapsed_s + shortest_s <= self.total_s
        look = due_look(self.run.read_looks(), repetitions, elapsed_s / self.total_s, has_time)
        if look is not None:
            append_lines(self.run.looks, [look])
        comparison = compare()
        left_s = self.total_s - elapsed_s
        rounds = next_rounds(comparison, repetitions, costs, left_s) if has_time else {}
        self.rounds = self.without_lone_baseline(rounds, comparison)
        return self.rounds

    def without_lone_baseline(self, rounds: Mapping[str, int], comparison: Comparison) -> Mapping[str, int]:
        """The baseline needs no launches of its own once it is shown to be slower than the leader."""
        baseline = self.plan.baseline
        rivals = {comparison.leader, *(one.variant for one in comparison.open)}
        groups = (launch.variants for launch in self.plan.launches if baseline in launch.variants)
        is_alone = not any(variant in rounds for variant in next(groups, ()) if variant != baseline)
        if is_alone and baseline not in rivals and comparison.leader is not None:
            return {variant: num for variant, num in rounds.items() if variant != baseline}
        return rounds

    def events(self, repetition: int) -> list[list[Event]]:
        """Of a repetition's launches, by their last attempts."""
        names = [attempts(self.run, x) for x in self.plan.launches if x.repetition == repetition]
        return [self.run.read_events(tries[-1]) for tries in names if tries]

    def planned(self) -> Mapping[str, int]:
        """Rounds of the last repetition."""
        return self.rounds or {v.id: self.plan.launches[0].rounds for v in self.plan.variants}


@dataclass(frozen=True)
class Costs:
    """What one repetition, a launch of each group, took."""

    start_s: float
    """Without rounds, and without what only the first launches do."""
    block_s: float
    """A variant's block in a round."""

    def expected_s(self, rounds: Mapping[str, int], twice: str) -> float:
        """The time for a repetition of so many rounds; in each one variant, the baseline, runs twice."""
        return self.start_s + self.block_s * (sum(rounds.values()) + rounds.get(twice, 0))


def costs_of(launches: Sequence[Sequence[Event]], is_first: bool = False) -> Costs:
    """From the events of a repetition's launches; in the first one ranks wait for their server's imports."""
    stages = [
        (event.stage, (after.monotonic_ns - event.monotonic_ns) / 1e9)
        for events in launches
        for event, after in pairwise(events)
    ]
    blocks_s = [seconds for stage, seconds in stages if stage == "round"]
    once = ONCE | {"start"} if is_first else ONCE
    start_s = sum(seconds for stage, seconds in stages if stage not in once | {"round"})
    return Costs(start_s + AROUND_S * len(launches), median(blocks_s) if blocks_s else 0.0)


def due_look(looks: Sequence[Look], repetitions: int, elapsed: float, has_time: bool) -> Look | None:
    """The look to take after so many repetitions; `None`: none is due, or it has been taken.

    Args:
        looks: taken so far.
        elapsed: share of the budget.
        has_time: whether another repetition fits; after the last one all of the allowed error is spent.
    """
    before = looks[-1].launches if looks else 0
    if repetitions <= before or (has_time and repetitions < next_look(before)):
        return None
    return Look(repetitions, min(elapsed, 1.0) if has_time else 1.0)


def next_rounds(comparison: Comparison, repetitions: int, costs: Costs, left_s: float) -> dict[str, int]:
    """Rounds of each variant in the next launches; empty if all is decided.

    Args:
        comparison: of what has been measured.
        repetitions: so far.
        costs: of the last one.
        left_s: of the budget.
    """
    if comparison.gate is not None:
        return _rounds_of_gate(comparison, comparison.gate, repetitions, costs, left_s)
    behind, look, chosen = _behind_percent(comparison), next_look(repetitions), following(comparison)
    # Few launches say nothing of others. Other load may hide the leader, but not what was fastest so far.
    is_early = repetitions < next_look(0)
    variants = [one for one, by in behind.items() if is_early or by == 0 or one in chosen.variants]
    if chosen.is_decided and not is_early:
        return {}
    most = _most_rounds(comparison.scatter, len(variants), look - repetitions, costs, left_s)
    return {variant: _fewest_rounds(comparison, behind.get(variant, 0.0), look, most) for variant in variants}


def _rounds_of_gate(
    comparison: Comparison, gate: Gate, repetitions: int, costs: Costs, left_s: float
) -> dict[str, int]:
    """As many for both versions of what is undecided."""
    variants, noise = still_open(gate), comparison.noise
    scatter = Scatter(noise.launch_scatter_percent, noise.round_scatter_percent)
    launches = next_look(repetitions) - repetitions
    return dict.fromkeys(variants, _most_rounds(scatter, len(variants), launches, costs, left_s))


def _most_rounds(found: Scatter, num: int, launches: int, costs: Costs, left_s: float) -> int:
    """Rounds of close rivals: what makes the most of the time, if the launches until the next look fit."""
    round_s = costs.block_s * (num + 1)
    if round_s == 0:
        return 1
    best = best_rounds(costs.start_s, round_s, found.launch_percent, found.round_percent)
    fits = [int((left_s / num_launches - costs.start_s) / round_s) for num_launches in (launches, 1)]
    return min(best, next((fit for fit in fits if fit > 0), 1))


def _fewest_rounds(comparison: Comparison, behind_percent: float, look: int, most: int) -> int:
    """The fewest with which a variant so far behind the leader is shown to be slower at the next look."""
    found = comparison.scatter
    known = [percent for percent in (found.launch_percent, found.apart_percent) if percent is not None]
    launch = max(known, default=ASSUMED_PERCENT)
    round_ = ASSUMED_PERCENT if found.round_percent is None else found.round_percent
    for rounds in range(1, most):
        detected = detectable_percent((launch**2 + round_**2 / rounds) ** 0.5, look)
        if detected is not None and detected <= behind_percent:
            return rounds
    return most


def _behind_percent(comparison: Comparison) -> dict[str, float]:
    """How much slower each variant is than the fastest on average, per sample."""
    times = {
        one.id: one.step_ms.estimate / (one.global_batch or 1)
        for one in comparison.variants
        if one.step_ms and is_ranked(one)
    }
    return {variant: 100 * (time / min(times.values()) - 1) for variant, time in times.items()}
