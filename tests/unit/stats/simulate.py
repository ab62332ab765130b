"""Simulated runs: how often the verdicts would be wrong, and how often they find what is there.

Steps behave like measured ones: each depends on the one before, all drift, some are far too slow. The
statistics are those of the launcher, not copies. `benchmarks/` prints the same figures.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import log
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np
import scipy.signal
from numpy.typing import NDArray

from gpurun.launcher.compare.figures.variant import scatter, step_times
from gpurun.launcher.compare.model import Difference, OpenPair, StepTime
from gpurun.launcher.compare.ranking import Differences, Standings, open_pairs, standings, with_lead
from gpurun.launcher.jobfile.kinds import TRAINING
from gpurun.launcher.run.budget import Costs, Outlook
from gpurun.launcher.rundir.records import Look
from gpurun.launcher.stats.estimates import (
    ALPHA,
    Family,
    Verdict,
    bounded,
    hodges_lehmann,
    holm,
    launch_values,
    paired,
    percent_from_log,
    percent_interval,
    planned_looks,
    t_quantile,
    unpaired,
    verdict_of,
    wilcoxon_interval,
)
from gpurun.launcher.stats.schedule import ROUNDS
from gpurun.launcher.units import Interval

FALSE_ALARMS = ("faster", "slower")
FULL_ROUNDS = 5
"""Of the launches whose length a model states."""


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
        wander = scipy.signal.lfilter([scale], [1, -noise.autocorrelation], innovations)
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
    return sum(verdicts_in_a_launch(each[None]) == ["slower"] for each in differences) / num_comparisons


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
    apart: bool = False
    """Whether every variant has launches of its own, which then scatter by `scatter` / √2 each."""
    launch_s: float = 6.5
    """A launch with all variants and 5 rounds; so much for each variant, where they are apart."""
    shared: float = 0.2
    """Of a launch, what doesn't depend on its rounds."""

    @property
    def names(self) -> tuple[str, ...]:
        """Of the variants; the first is the baseline."""
        return tuple(map(str, range(len(self.effects_percent))))

    @property
    def groups(self) -> tuple[tuple[str, ...], ...]:
        """Variants that share their launches."""
        return tuple((name,) for name in self.names) if self.apart else (self.names,)

    def logs(self, rng: np.random.Generator, rounds: Mapping[str, int]) -> dict[str, NDArray[np.float64]]:
        """ln(step) of each variant in the next launches, by round."""
        deviation = self.scatter / np.sqrt(2)
        # The d of two such variants has the variance scatter²; the last one's has times² as much.
        last = {self.names[-1]: np.sqrt(2 * self.times**2 - 1)}
        found = {}
        for name, num in rounds.items():
            launch, *each = rng.normal(size=1 + num)
            noise = np.sqrt(self.icc) * launch + np.sqrt(1 - self.icc) * np.array(each)
            found[name] = np.log1p(self.effects_percent[int(name)] / 100) + noise * deviation * last.get(
                name, 1
            )
        return found

    def costs(self, variants: Collection[str]) -> Costs:
        """Of launches of these variants; the baseline runs twice in a round."""
        whole_s = self.launch_s * len(self.groups)
        block_s = (1 - self.shared) * whole_s / FULL_ROUNDS / (len(self.names) + 1)
        num_launches = sum(not {*group}.isdisjoint(variants) for group in self.groups)
        return Costs(self.shared * self.launch_s * num_launches, block_s, self.names[0])


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
    """A run with a budget, which decides by the functions of the launcher what to measure and when to end."""
    run, spent_s, repetitions = SimulatedRun(model), 0.0, 0
    rounds: Mapping[str, int] = dict.fromkeys(model.names, ROUNDS)
    while rounds:
        run.add(model.logs(rng, rounds), repetitions)
        repetitions += 1
        spent_s += model.costs(rounds).expected_s(rounds)
        left_s = budget_s - spent_s
        outlook = Outlook(repetitions, left_s, budget_s, model.costs, rounds, model.names[0], model.groups)
        if look := outlook.due_look(run.looks):
            # Shares in steps of 5 %, so that simulated runs have levels in common.
            run.judge(replace(look, fraction=np.floor(20 * look.fraction) / 20))
        rounds = outlook.next_rounds(run.comparison())
    fastest, verdicts = run.conclusion()
    wrong = is_false(model.effects_percent, fastest, verdicts)
    return Ended(fastest, verdicts, spent_s, repetitions, wrong)


@dataclass
class SimulatedRun:
    """What has been measured, and the comparison of it: by the launcher's functions, of values not files."""

    model: Model
    looks: tuple[Look, ...] = ()
    results: tuple[Any, ...] = ()
    """Rows and standings as of the last look; before it, what shows who is behind."""
    found: Standings | None = None
    open: tuple[OpenPair, ...] = ()

    def __post_init__(self) -> None:
        groups = {name: group for group in self.model.groups for name in group}
        self.values: dict[str, dict[int, float]] = {name: {} for name in self.model.names}
        self.measured: Any = {name: measured(name, groups[name]) for name in self.model.names}

    def add(self, logs: Mapping[str, NDArray[np.float64]], repetition: int) -> None:
        """What the launches of a repetition have measured."""
        for group in self.model.groups:
            rounds = {
                name: {("", number): log for number, log in enumerate(logs[name].tolist())}
                for name in group
                if name in logs
            }
            for name, value in launch_values(rounds).items():
                self.values[name][repetition] = value
                self.measured[name].logs[repetition] = rounds[name]

    @property
    def differences(self) -> Differences:
        return Differences(self.measured, "0", Remembering(self.values, self.looks), {}, "launch")

    def judge(self, look: Look) -> None:
        """A look at the evidence."""
        self.looks = (*self.looks, look)
        differences = self.differences
        self.results, self.found = judge(differences)
        self.open = open_pairs(self.found, differences)

    def comparison(self) -> Any:
        """What decides how a run goes on: verdicts of the last look, the scatter of all launches."""
        differences = self.differences
        results = self.results if self.looks else rows_of(differences)
        leader = self.found.leader.id if self.found else None
        return SimpleNamespace(
            gate=None,
            baseline="0",
            variants=results,
            leader=leader,
            open=self.open,
            scatter=scatter(differences),
        )

    def conclusion(self) -> tuple[int | None, tuple[str, ...]]:
        """The variant that is named the fastest, and the verdicts on all but the baseline."""
        if self.found is None:
            raise ValueError("the budget is too small for a look")
        fastest = int(self.found.leader.id) if self.found.is_settled else None
        return fastest, tuple(result.vs_baseline.verdict for result in self.results[1:])


def measured(name: str, group: Sequence[str]) -> Any:
    """What differences read of a measured variant."""
    variant = SimpleNamespace(id=name, global_batch=1, kind=TRAINING)
    return SimpleNamespace(variant=variant, group=group, counts=True, logs={}, aa_logs={}, means={}, timed=())


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
    vs_baseline: Difference | None
    step_ms: StepTime | None
    status: str = "ok"
    global_batch: int = 1
    balanced: None = None


def rows_of(differences: Differences, rows: Mapping[str, Difference] = MappingProxyType({})) -> Any:
    """The results of all variants, with these differences from the baseline."""
    times = step_times(differences)
    return tuple(Row(name, rows.get(name), times[name]) for name in differences.measured)


def judge(differences: Differences) -> tuple[tuple[Any, ...], Standings]:
    """Rows and standings as the comparison makes them."""
    rows = differences.all_against("0", [name for name in differences.measured if name != "0"])
    results = rows_of(differences, {"0": Difference(None, None, "baseline"), **rows})
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


def diff_outcomes(
    num_diffs: int, effect_percent: float, seed: int, scatter: float = 0.01, launches: int = 12
) -> dict[str, float]:
    """Shares of the outcomes of `diff --fail-slower 5%` on one variant of two runs.

    The machine is the same in both: what differs between sessions, no such comparison can see.
    """
    rng = np.random.default_rng(seed)
    runs = rng.normal(0, scatter, (num_diffs, 2, launches))
    shift = log(1 + effect_percent / 100)
    found = [bounded(unpaired((after + shift).tolist(), before.tolist()), 5.0) for before, after in runs]
    outcomes: list[str] = [difference.outcome for difference in found]
    return {name: outcomes.count(name) / num_diffs for name in OUTCOMES}


def pooled_false_alarms(num_families: int, seed: int, launches: int = 27) -> float:
    """If all variants were taken to scatter alike: seven rivals, one of which scatters three times."""
    rng = np.random.default_rng(seed)
    deviations = np.array([1.0] * 7 + [np.sqrt(2 * 3**2 - 1)])
    rows = rng.normal(size=(num_families, launches, 8)) * deviations
    differences = rows[:, :, 1:] - rows[:, :, :1]
    deviation = np.sqrt(differences.var(axis=1, ddof=1).mean(axis=1))
    t = abs(differences.mean(axis=1)).max(axis=1) / deviation * np.sqrt(launches)
    return float((t > t_quantile(1 - 0.05 / 7 / 2, 7 * (launches - 1))).mean())
