"""Simulated runs: how often the verdicts would be wrong, and how often they find what is there.

Steps behave like measured ones: each depends on the one before, all drift, some are far too slow. The
statistics are those of the launcher, not copies. `benchmarks/` prints the same figures.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from math import log
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.signal import lfilter

from gpurun.launcher.compare.model import Difference
from gpurun.launcher.compare.ranking import Standings, has_open_row, standings, with_lead
from gpurun.launcher.compare.variant_difference import Differences
from gpurun.launcher.rundir.records import Look
from gpurun.launcher.stats.family import Family, bounded, holm, paired
from gpurun.launcher.stats.launches import t_quantile
from gpurun.launcher.stats.paired import hodges_lehmann, wilcoxon_interval
from gpurun.launcher.stats.schedule import ROUNDS
from gpurun.launcher.stats.sequential import ALPHA, detectable_percent, next_look, planned_looks
from gpurun.launcher.stats.verdict import Verdict, percent_from_log, percent_interval, verdict_of
from gpurun.launcher.units import Interval

FALSE_ALARMS = ("faster", "slower")


@dataclass(frozen=True)
class StepNoise:
    """How the steps of one launch scatter, relative to the step."""

    sigma: float = 0.03
    """Standard deviation of a single step."""
    autocorrelation: float = 0.7
    """Of a step with the one before it."""
    drift: float = 0.10
    """From the first step of a run to the last."""
    spike_share: float = 0.02
    """Of all steps."""
    spike: float = 1.0
    """How much longer a spike lasts, on average."""


def false_alarms_in_a_launch(
    num_families: int, comparisons: int, seed: int, noise: StepNoise | None = None
) -> float:
    """Share of simulated launches of 28 rounds with a verdict on one of their identical variants."""
    rng = np.random.default_rng(seed)
    alarms = 0
    for times in round_times(rng, num_families, comparisons + 1, noise or StepNoise()):
        verdicts = verdicts_in_a_launch(np.log(times[1:] / times[0]))
        alarms += any(verdict in FALSE_ALARMS for verdict in verdicts)
    return alarms / num_families


def verdicts_in_a_launch(differences: NDArray[np.float64]) -> list[Verdict]:
    """The verdicts on variants, by rows of their differences from the baseline, one per round."""
    rows = {str(number): row.tolist() for number, row in enumerate(differences)}
    found = holm({name: partial(wilcoxon_interval, row) for name, row in rows.items()})
    return [
        verdict_of(percent_from_log(hodges_lehmann(row) or 0.0), percent_interval(found[name]))
        for name, row in rows.items()
    ]


def round_times(
    rng: np.random.Generator, num_launches: int, num_variants: int, noise: StepNoise, steps: int = 8
) -> Iterator[NDArray[np.float64]]:
    """Round times of identical variants, shape (variants, rounds), one array per simulated launch.

    Every round runs a block of `steps` steps of each variant in a fresh order, along one series of noise.
    """
    rounds = 28
    series = (rounds, num_variants, steps)
    for _ in range(num_launches):
        innovations = rng.normal(size=rounds * num_variants * steps)
        scale = noise.sigma * np.sqrt(1 - noise.autocorrelation**2)
        wander = lfilter([scale], [1, -noise.autocorrelation], innovations)
        drift = np.linspace(0, noise.drift, innovations.size)
        spikes = (rng.random(innovations.size) < noise.spike_share) * rng.exponential(
            noise.spike, innovations.size
        )
        blocks = (np.exp(wander + drift) + spikes).reshape(series).mean(axis=2)
        orders = rng.permuted(np.tile(np.arange(num_variants), (rounds, 1)), axis=1)
        yield np.take_along_axis(blocks, orders, axis=1).T


def power_in_a_launch(
    num_comparisons: int, seed: int, effect_percent: float = 2.0, scatter: float = 0.02
) -> float:
    """Share of comparisons that find a slower variant; `scatter` is the deviation of d."""
    rng = np.random.default_rng(seed)
    differences = rng.normal(log(1 + effect_percent / 100), scatter, (num_comparisons, 28))
    return sum(verdicts_in_a_launch(one[None]) == ["slower"] for one in differences) / num_comparisons


@dataclass(frozen=True)
class Model:
    """d(variant, launch, round) = δ + u(launch) + e(round): what a run with several launches sees.

    All variants scatter alike and independently, so that d, the difference of two, has these deviations; but
    for one that may scatter more.
    """

    effects_percent: tuple[float, ...]
    """Step time of each variant over the first one's, less 1."""
    scatter: float
    """Standard deviation of d per round, launches and rounds together."""
    icc: float
    """Share of launches in the variance of d."""
    times: float = 1.0
    """The last variant's d scatters by so much more."""
    rounds: int = 5
    apart: bool = False
    """Whether every variant has launches of its own, which then scatter by `scatter` / √2 each."""
    launch_s: float = 6.5
    """A launch with all variants; of each variant, where they are apart."""
    shared: float = 0.2
    """Of a launch, what doesn't depend on how many variants are in it."""

    def values(self, rng: np.random.Generator, num_launches: int) -> NDArray[np.float64]:
        """Launch values of ln(step) after 1, 2, … rounds, shape (launches, variants, rounds)."""
        shape = (num_launches, len(self.effects_percent), self.rounds)
        of_one = np.full(shape[1], self.scatter / np.sqrt(2))
        # The d of two such variants has the variance scatter²; the last one's has times² as much.
        of_one[-1] *= np.sqrt(2 * self.times**2 - 1)
        launches = rng.normal(size=(*shape[:2], 1)) * np.sqrt(self.icc)
        rounds = rng.normal(size=shape) * np.sqrt(1 - self.icc)
        logs = np.log1p(np.array(self.effects_percent) / 100)
        means = rounds.cumsum(axis=2) / np.arange(1, self.rounds + 1)
        values: NDArray[np.float64] = logs[:, None] + of_one[:, None] * (launches + means)
        return values

    def seconds(self, num_rounds: int, num_active: int) -> float:
        """What the next launches take, of so many variants with so many rounds in all."""
        if self.apart:
            return self.launch_s * num_active
        share = num_rounds / (len(self.effects_percent) * self.rounds)
        return self.launch_s * (self.shared + (1 - self.shared) * share)

    def fewest_rounds(self, behind_percent: float, look: int) -> int:
        """A variant far behind gets as many as show it to be slower at the next look."""
        launch, of_rounds = 100 * self.scatter * self.icc**0.5, 100 * self.scatter * (1 - self.icc) ** 0.5
        for rounds in range(1, self.rounds):
            detected = detectable_percent((launch**2 + of_rounds**2 / rounds) ** 0.5, look)
            if detected is not None and detected <= behind_percent:
                return rounds
        return self.rounds


@dataclass(frozen=True)
class Ended:
    """What a simulated run concludes."""

    fastest: int | None
    verdicts: tuple[str, ...]
    """Of all variants but the baseline, which is the first."""
    seconds: float
    launches: int
    is_false: bool
    """Whether a variant is named that isn't the fastest, or a verdict has the wrong direction."""


def is_false(effects_percent: tuple[float, ...], fastest: int | None, verdicts: tuple[str, ...]) -> bool:
    """Whether a conclusion is wrong, where these are the true differences from the first variant."""
    best = min(effects_percent)
    is_tied = effects_percent.count(best) > 1
    if fastest is not None and (is_tied or effects_percent[fastest] > best):
        return True
    sides = {"slower": 1, "faster": -1}
    return any(
        verdict in sides and sides[verdict] != np.sign(effect - effects_percent[0])
        for verdict, effect in zip(verdicts, effects_percent[1:], strict=True)
    )


def runs_until_decided(
    model: Model, budget_s: float, num_runs: int, seed: tuple[int, ...] | int
) -> Iterator[Ended]:
    """Simulated runs with a budget."""
    rng = np.random.default_rng(seed)
    for _ in range(num_runs):
        yield run_until_decided(model, rng, budget_s)


def run_until_decided(model: Model, rng: np.random.Generator, budget_s: float) -> Ended:
    """A run with a budget, ended by the launcher's own decisions; launch by launch as `run/` makes them."""
    names = [str(number) for number in range(len(model.effects_percent))]
    values = model.values(rng, int(budget_s / model.seconds(2, 2)) + 2)
    family: dict[str, dict[int, float]] = {name: {} for name in names}
    looks: list[Look] = []
    rounds, spent_s, launches = dict.fromkeys(names, min(ROUNDS, model.rounds)), 0.0, 0
    while True:
        for name, number in rounds.items():
            family[name][launches] = float(values[launches, int(name), number - 1])
        launches += 1
        spent_s += model.seconds(sum(rounds.values()), len(rounds))
        rounds = next_rounds(model, family, list(rounds), next_look(launches))
        is_over = spent_s + model.seconds(sum(rounds.values()), len(rounds)) > budget_s
        if launches != next_look(launches - 1) and not is_over:
            continue
        # Shares in steps of 5 %, so that simulated runs have levels in common.
        looks.append(Look(launches, 1.0 if is_over else np.floor(20 * spent_s / budget_s) / 20))
        results, found = judge(family, tuple(looks))
        left = [rival.result.id for rival in found.rivals if rival.behind.verdict not in ("slower", "same")]
        if is_over or not left:
            fastest = int(found.leader.id) if found.is_settled else None
            verdicts = tuple(one.vs_baseline.verdict for one in results[1:])
            wrong = is_false(model.effects_percent, fastest, verdicts)
            return Ended(fastest, verdicts, spent_s, launches, wrong)
        kept = {*left, "0", found.leader.id, *(one.id for one in results if has_open_row(one))}
        active = [name for name in rounds if name in kept]
        rounds = next_rounds(model, family, active, next_look(launches))


def next_rounds(
    model: Model, family: dict[str, dict[int, float]], active: list[str], look: int
) -> dict[str, int]:
    """Rounds of the next launch: fewer of those that are far behind by what is known so far."""
    logs = {name: sum(family[name].values()) / len(family[name]) for name in active}
    best = min(logs.values())
    return {name: model.fewest_rounds(100 * (log_ - best), look) for name, log_ in logs.items()}


@dataclass(frozen=True)
class Remembering(Family):
    """Makes simulations faster: every interval and every list of differences is computed once."""

    seen: dict[Any, Any] = field(default_factory=dict)

    def differences(self, variant: str, other: str) -> list[float]:
        if (variant, other) not in self.seen:
            self.seen[variant, other] = super().differences(variant, other)
        found: list[float] = self.seen[variant, other]
        return found

    def interval(self, variant: str, other: str, alpha: float = ALPHA) -> Interval | None:
        key = variant, other, alpha
        if key not in self.seen:
            self.seen[key] = super().interval(variant, other, alpha)
        found: Interval | None = self.seen[key]
        return found


@dataclass(frozen=True)
class Row:
    """What the ranking reads of a variant's result."""

    id: str
    vs_baseline: Difference
    status: str = "ok"
    step_ms: bool = True


def judge(family: dict[str, dict[int, float]], looks: tuple[Look, ...]) -> tuple[tuple[Any, ...], Standings]:
    """Rows and standings as the comparison makes them, of launch values instead of files."""
    measured: Any = {name: SimpleNamespace(group="") for name in family}
    differences = Differences(measured, "0", Remembering(family, looks), {}, "launch")
    rows = differences.all_against("0", [name for name in family if name != "0"])
    baseline = Difference(None, None, "baseline")
    results: Any = [Row(name, rows.get(name, baseline)) for name in family]
    found = standings(results, differences)
    assert found is not None
    return with_lead(results, found), found


OUTCOMES = ("slower", "not slower", "undecided")


def gate_outcomes(
    num_gates: int, effect_percent: float, seed: int, scatter: float = 0.05
) -> dict[str, float]:
    """Shares of the outcomes of a gate at 3 % on one variant: pairs of launches of 5 s, for 10 minutes.

    Both versions run in one session, so what differs between sessions (10 %) is in both of them.
    """
    rng = np.random.default_rng(seed)
    looks = planned_looks(60)
    outcomes = []
    for _ in range(num_gates):
        session = rng.normal(0, 0.10)
        before, after = rng.normal(session, scatter, (2, looks[-1].launches))
        differences = (log(1 + effect_percent / 100) + after - before).tolist()
        found = (
            bounded(paired(differences[: look.launches]), 3.0, looks[:number]).outcome
            for number, look in enumerate(looks, start=1)
        )
        outcomes.append(next((outcome for outcome in found if outcome != "undecided"), "undecided"))
    return {name: outcomes.count(name) / num_gates for name in OUTCOMES}


def pooled_false_alarms(num_families: int, seed: int, launches: int = 27) -> float:
    """If all variants were taken to scatter alike: seven rivals, one of which scatters three times."""
    rng = np.random.default_rng(seed)
    model = Model((0.0,) * 8, 0.10, 0.25, times=3)
    rows = np.stack([model.values(rng, launches) for _ in range(num_families)])
    differences = rows[:, :, 1:, -1] - rows[:, :, :1, -1]
    deviation = np.sqrt(differences.var(axis=1, ddof=1).mean(axis=1))
    t = abs(differences.mean(axis=1)).max(axis=1) / deviation * np.sqrt(launches)
    return float((t > t_quantile(1 - 0.05 / 7 / 2, 7 * (launches - 1))).mean())
