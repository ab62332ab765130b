"""The next measurements of a run with a budget: which variants, how many rounds, and whether there is time.

Close rivals get the rounds; a variant that is far behind needs few to be shown to be slower.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

from gpurun.launcher.compare.gate import still_open
from gpurun.launcher.compare.model import Comparison, Gate, Scatter
from gpurun.launcher.compare.ranking import following, is_ranked, time_per_sample
from gpurun.launcher.plan.model import Launch, Plan
from gpurun.launcher.run.attempts import attempts, spent_s
from gpurun.launcher.rundir.files import RunDir, append_lines
from gpurun.launcher.rundir.records import Event, Look, elapsed_s, stages_s
from gpurun.launcher.stats.estimates import (
    ROUNDS_WITHIN,
    best_rounds,
    detectable_percent,
    is_spent,
    next_look,
)

ASSUMED_PERCENT = 10.0
"""The assumed scatter of launches, and rounds, until it is known."""
AROUND_S = 1.0
"""The time of a launch before its ranks' first event, after the last one, and of comparing it, until it is
known."""
ONCE = frozenset({"balance", "check", "profile", "memory"})
"""Stages that only the first launches have."""
RECENT = 3
"""Launches of a group by which the next one is judged: it is taken to last as long as the longest of them."""


@dataclass(frozen=True)
class Costs:
    """The times that launches take."""

    start_s: float
    """Seconds of a launch without rounds, and without what only the first launches do."""
    block_s: float
    """A variant's block in a round."""
    twice: str = ""
    """The variant that runs twice in a round."""

    def expected_s(self, rounds: Mapping[str, int]) -> float:
        """The time for so many rounds."""
        return self.start_s + self.block_s * (sum(rounds.values()) + rounds.get(self.twice, 0))


@dataclass(frozen=True)
class LaunchTime:
    """The time of a launch."""

    start_s: float
    """Seconds without rounds and warm-up, and without what only the first launches do."""
    warmup_s: Mapping[str, float]
    """The warm-up of each variant."""
    block_s: float


@dataclass
class Budget:
    """The time of a run that ends when all is decided, and what is done with it."""

    plan: Plan
    run: RunDir
    now_s: Callable[[], float]
    """The time by a monotonic clock."""
    rounds: Mapping[str, int] = field(default_factory=dict)
    """The rounds of each variant in the launches since the last review."""
    times: dict[str, list[LaunchTime]] = field(default_factory=dict)
    """The times of each group's launches so far, in order."""
    around_s: float = AROUND_S
    """The time of a launch in addition to that between its ranks' first and last event."""

    def __post_init__(self) -> None:
        self.reviewed_s = self.now_s()
        self.started_s = self.reviewed_s - spent_s(self.run)

    @property
    def total_s(self) -> float:
        return self.plan.budget_s or 0.0

    def review(self, repetitions: int, compare: Callable[[], Comparison]) -> Mapping[str, int]:
        """Compares what there is, as a look where one is due; the rounds of each variant from now on.

        Empty if all is decided, or no other repetition fits.
        """
        looks = self.run.read_looks()
        if is_spent(looks):
            return {}
        self.learn(repetitions - 1)
        outlook = Outlook(
            repetitions,
            left_s=self.total_s - (self.reviewed_s - self.started_s),
            total_s=self.total_s,
            costs=self.costs,
            planned=self.rounds or {v.id: self.plan.launches[0].rounds for v in self.plan.variants},
            baseline=self.plan.baseline,
            groups=tuple(launch.variants for launch in self.later),
            is_planned=any(launch.repetition >= repetitions for launch in self.plan.launches),
        )
        look = outlook.due_look(looks)
        if look is not None:
            append_lines(self.run.looks, [look])
        self.rounds = outlook.next_rounds(compare())
        return self.rounds

    def learn(self, repetition: int) -> None:
        """Keeps what the launches of a repetition took, the last comparison included."""
        now_s, lasted_s, launches = self.now_s(), 0.0, 0
        for launch in self.plan.launches:
            if launch.repetition == repetition and (names := attempts(self.run, launch)):
                events = [self.run.read_events(name) for name in names]
                lasted_s, launches = lasted_s + sum(map(elapsed_s, events)), launches + 1
                self.times.setdefault(launch.group, []).append(launch_time(events[-1], repetition == 0))
        # The first launches wait for imports; those before a `--resume` took their time earlier.
        if repetition and launches and now_s - self.reviewed_s > lasted_s:
            self.around_s = (now_s - self.reviewed_s - lasted_s) / launches
        self.reviewed_s = now_s

    def costs(self, variants: Collection[str]) -> Costs:
        """The cost of a later repetition of these variants: a launch of each of their groups."""
        found = [
            self.launch_costs(launch, variants) for launch in self.later if {*launch.variants} & {*variants}
        ]
        start_s = sum(each.start_s + self.around_s for each in found)
        return Costs(start_s, max((each.block_s for each in found), default=0.0), self.twice)

    def launch_costs(self, launch: Launch, variants: Collection[str]) -> Costs:
        """The cost of the variants that a launch has, from its ranks' first event to the last."""
        times = self.times.get(launch.group, [])
        first = [
            other.group
            for other in self.plan.launches
            if other.repetition == 0 and {*other.variants} & {*launch.variants}
        ]
        if launch.repetition and launch.group not in first:  # at first each of its strategies had its own
            recent = times[-RECENT:] or [time for group in first for time in self.times.get(group, [])]
        else:
            recent = times[1:][-RECENT:] or times  # the first launch imports and builds what later ones find
        warmup_s = (
            max((each.warmup_s.get(variant, 0.0) for each in recent), default=0.0)
            for variant in launch.variants
            if variant in variants
        )
        start_s = max((each.start_s for each in recent), default=0.0)
        block_s = max((each.block_s for each in recent), default=0.0)
        return Costs(start_s + sum(warmup_s), block_s, self.twice)

    @property
    def later(self) -> tuple[Launch, ...]:
        """The launches of a repetition after the first one."""
        last = min(1, self.plan.launches[-1].repetition)
        return tuple(launch for launch in self.plan.launches if launch.repetition == last)

    def fits(self, launch: Launch, rounds: Mapping[str, int] | None) -> bool:
        """Whether there is time left for a launch with these rounds.

        Only asked of one whose repetition has begun, since the review has decided that it begins. Every
        variant is launched once, however small the budget is.
        """
        others = [x for x in self.plan.launches if x.repetition == launch.repetition and x != launch]
        has_begun = any(attempts(self.run, other) for other in others)
        if rounds is None or launch.repetition == 0 or not has_begun or attempts(self.run, launch):
            return True
        own = {variant: rounds[variant] for variant in launch.variants if variant in rounds}
        expected_s = self.launch_costs(launch, own).expected_s(own)
        return self.now_s() - self.started_s + expected_s <= self.total_s

    @property
    def twice(self) -> str:
        """The variant that runs twice in a round."""
        return "" if self.plan.gate else self.plan.baseline


@dataclass(frozen=True)
class Outlook:
    """The rest of a run after some repetitions, and what is done with it: all that a review decides."""

    repetitions: int
    """So far."""
    left_s: float
    total_s: float
    """The length of the budget."""
    costs: Callable[[Collection[str]], Costs]
    """The costs of a repetition of some variants."""
    planned: Mapping[str, int]
    """Rounds of the last repetition."""
    baseline: str
    groups: Sequence[Sequence[str]]
    """Variants that share their launches."""
    is_planned: bool = True
    """Whether there are launches left, however long they take."""

    @property
    def has_time(self) -> bool:
        """Whether another repetition fits."""
        shortest = dict.fromkeys(self.planned, 1)
        return self.is_planned and self.costs(shortest).expected_s(shortest) <= self.left_s

    def due_look(self, looks: Sequence[Look]) -> Look | None:
        """The look to take now; `None`: none is due, or it is among those taken so far.

        After the last repetition that fits, all of the allowed error is spent.
        """
        before, has_time = looks[-1].launches if looks else 0, self.has_time
        if self.repetitions <= before or (has_time and self.repetitions < next_look(before)):
            return None
        return Look(self.repetitions, min(1 - self.left_s / self.total_s, 1.0) if has_time else 1.0)

    def next_rounds(self, comparison: Comparison) -> Mapping[str, int]:
        """The rounds of each variant from now on; empty if all is decided, or no other repetition fits."""
        if not self.has_time:
            return {}
        rounds = next_rounds(comparison, self.repetitions, self.costs, self.left_s)
        return self.without_lone_baseline(rounds, comparison)

    def without_lone_baseline(self, rounds: Mapping[str, int], comparison: Comparison) -> Mapping[str, int]:
        """The baseline needs no launches of its own once it is shown to be slower than the leader."""
        baseline = self.baseline
        rivals = {comparison.leader, *(pair.variant for pair in comparison.open)}
        own = next(group for group in self.groups if baseline in group)
        is_alone = not any(variant in rounds for variant in own if variant != baseline)
        if is_alone and baseline not in rivals and comparison.leader is not None:
            return {variant: num for variant, num in rounds.items() if variant != baseline}
        return rounds


def launch_time(events: Sequence[Event], is_first: bool = False) -> LaunchTime:
    """The time of a launch by its events; in the first ones ranks wait for their server's imports."""
    once = ONCE | {"start"} if is_first else ONCE
    start_s, warmup_s, blocks_s = 0.0, dict[str, float](), []
    for event, seconds in stages_s(events):
        if event.stage == "round":
            blocks_s.append(seconds)
        elif event.stage == "warmup" and event.variant:
            warmup_s[event.variant] = warmup_s.get(event.variant, 0.0) + seconds
        elif event.stage not in once:
            start_s += seconds
    return LaunchTime(start_s, warmup_s, median(blocks_s) if blocks_s else 0.0)


def next_rounds(
    comparison: Comparison, repetitions: int, costs: Callable[[Collection[str]], Costs], left_s: float
) -> dict[str, int]:
    """Rounds of each variant in the next launches; empty if all is decided.

    Args:
        comparison: of what has been measured.
        repetitions: so far.
        costs: of a repetition of some variants.
        left_s: of the budget.
    """
    if comparison.gate is not None:
        return _rounds_of_gate(comparison, comparison.gate, repetitions, costs, left_s)
    behind, look, chosen = _behind_percent(comparison), next_look(repetitions), following(comparison)
    # Few launches say nothing of others. Other load may hide the leader, but not what was fastest so far.
    is_early = repetitions < next_look(0)
    variants = [variant for variant, by in behind.items() if is_early or by == 0 or variant in chosen]
    if comparison.leader is not None and not comparison.open and not is_early:
        return {}
    scatter = comparison.scatter
    if is_early and scatter.launch_percent is not None:  # that of a few launches may be small by chance
        scatter = replace(scatter, launch_percent=max(scatter.launch_percent, ASSUMED_PERCENT))

    def rounds_if(most: int) -> dict[str, int]:
        return {
            variant: _fewest_rounds(comparison, behind.get(variant, 0.0), look, most) for variant in variants
        }

    return _affordable(rounds_if, scatter, look - repetitions, costs(variants), left_s)


def _rounds_of_gate(
    comparison: Comparison,
    gate: Gate,
    repetitions: int,
    costs: Callable[[Collection[str]], Costs],
    left_s: float,
) -> dict[str, int]:
    """Rounds of both versions, equally many, of what is undecided."""
    variants, noise = still_open(gate), comparison.noise
    scatter = Scatter(noise.launch_scatter_percent, noise.round_scatter_percent)
    launches = next_look(repetitions) - repetitions
    return _affordable(lambda most: dict.fromkeys(variants, most), scatter, launches, costs(variants), left_s)


def _affordable(
    rounds_if: Callable[[int], dict[str, int]], scatter: Scatter, launches: int, costs: Costs, left_s: float
) -> dict[str, int]:
    """The rounds that make the most of the time, if the launches until the next look fit; else the next one.

    Args:
        rounds_if: rounds of each variant where close rivals have so many.
        scatter: of differences.
        launches: until the next look.
        costs: of a repetition.
        left_s: of the budget.
    """
    _, most = ROUNDS_WITHIN
    longest_s = costs.expected_s(rounds_if(most))
    round_s = longest_s - costs.expected_s(rounds_if(most - 1))
    best = best_rounds(longest_s - most * round_s, round_s, scatter.launch_percent, scatter.round_percent)
    choices = ((num, rounds_if(most)) for num in (launches, 1) for most in range(best, 0, -1))
    fits = (rounds for num, rounds in choices if num * costs.expected_s(rounds) <= left_s)
    return next(fits, None) or rounds_if(1)


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
    times = {variant.id: time_per_sample(variant) for variant in comparison.variants if is_ranked(variant)}
    return {variant: 100 * (time / min(times.values()) - 1) for variant, time in times.items()}
