"""How one variant's time differs from another's: over launches, or within the few that there are."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any

from gpurun.launcher.compare.figures.recorded import MeasuredVariant, is_throttled, timed_steps
from gpurun.launcher.compare.figures.waiting import BOUNDS, Bound, cpu_ns_of_rounds, shares_of_rounds
from gpurun.launcher.compare.label import variant_label
from gpurun.launcher.compare.model import Difference, Holds, Unit, Verdict, WithoutLoad
from gpurun.launcher.findings.finding import reason
from gpurun.launcher.machine.accelerators import CPU
from gpurun.launcher.plan.nodes import node_of_device
from gpurun.launcher.rundir.records import Look, RoundTime
from gpurun.launcher.stats.estimates import (
    RELEVANT_PERCENT,
    fewest_values,
    launch_values,
    percent_from_log,
    percent_interval,
    round_differences,
    squares,
    verdict_of,
    wilcoxon_interval,
)
from gpurun.launcher.stats.family import Family, IntervalAt, holm
from gpurun.launcher.stats.sequential import ALPHA, MIN_LAUNCHES
from gpurun.launcher.units import Interval, format_ms, plural

OPPOSITE: dict[Verdict, Verdict] = {"faster": "slower", "slower": "faster"}
CONTROL = "\0control"
"""The name of the baseline's second blocks among the variants of a launch."""

EARLY_ROUNDS_SHARE = 0.32
"""Share of a comparison's level, where rounds ended as soon as it was decided, as in older runs: each of five
looks had 1.6 %."""


@dataclass(frozen=True)
class Differences:
    """How any two variants of a run differ, all by the same rules."""

    measured: Mapping[str, MeasuredVariant]
    baseline: str
    family: Family
    """ln(time per sample) of every launch."""
    control: Mapping[int, float]
    """ln(time per sample) of the baseline's second blocks, by repetition."""
    unit: Unit
    share_of_level: float = 1.0
    """The share of a comparison's level, at each look within a launch."""
    references: Mapping[str, str] = field(default_factory=dict)
    """The version before, in a gate: the step of a variant follows from its, not from the baseline's."""
    quiet: Sequence["Differences"] = ()
    """The differences less the least and the most waiting for other load that there may be; without variants
    of which that isn't known."""
    is_throttled: bool = False
    """Whether clocks were low: then times of this run are not those of its splits, and decide nothing."""

    @property
    def within(self) -> int:
        """The launches that verdicts are limited to; 0 where they cover what others would show."""
        most = max((len(variant.logs) for variant in self.measured.values()), default=0)
        return 0 if self.unit == "launch" else most

    def vs_baseline(self) -> dict[str, Difference | None]:
        """The differences in the table, by variant; `None` where one of the two has no times that count."""
        baseline = self.measured[self.baseline]
        compared = [
            record.variant.id
            for record in self.measured.values()
            if record is not baseline
            and record.counts
            and baseline.counts
            and record.variant.same_task(baseline.variant)
        ]
        found: dict[str, Difference | None] = {
            **dict.fromkeys(self.measured),
            **self.all_against(self.baseline, compared),
        }
        if baseline.counts:
            found[self.baseline] = Difference(None, None, "baseline")
        return found

    def all_against(self, other: str, variants: Iterable[str]) -> dict[str, Difference]:
        """How each of `variants` differs from `other`; together the verdicts err with at most 5 % (Holm)."""
        intervals = holm({variant: self.interval_at(variant, other) for variant in variants})
        return {
            variant: self._explained(self.difference(variant, other, ci), ci, variant, other, len(intervals))
            for variant, ci in intervals.items()
        }

    def _explained(
        self, found: Difference, ci: Interval | None, variant: str, other: str, num: int
    ) -> Difference:
        """The difference with the reason why it is inconclusive, if that is known.

        Args:
            found: one of `num` that are tested together.
            ci: its interval of logarithms.
        """
        if found.verdict != "inconclusive":
            return found
        if self.unit == "launch" or not self.share_launches(variant, other):
            seen = plural(len(self.family.differences(variant, other)), "launch")
            return found if ci else replace(found, why=_too_few(seen, MIN_LAUNCHES))
        if ci is not None:
            is_open = ci[0] <= 0 <= ci[1] and not self.is_throttled
            return replace(found, why=self._outlying(variant, other) if is_open else None)
        rounds, alpha = self.paired_rounds(variant, other), ALPHA * self.share_of_level
        outlying = self._outlying(variant, other) if wilcoxon_interval(rounds, alpha) else None
        few = _too_few(plural(len(rounds), "round"), fewest_values(alpha / num), num)
        return replace(found, why=outlying or few)

    def _outlying(self, variant: str, other: str) -> str | None:
        """The round without which the two differ in one direction; `None` if there isn't just one."""
        centre = self.estimate(variant, other) or 0.0
        pairs = {(round_.launch, round_.round) for round_ in self.measured[other].timed}
        common = [round_ for round_ in self.measured[variant].timed if (round_.launch, round_.round) in pairs]
        differences = self.paired_rounds(variant, other)
        opposed = [round_ for round_, d in zip(common, differences, strict=True) if d * centre <= 0]
        if len(opposed) != 1:
            return None
        found = [_outlying_round(self.measured[name], opposed[0]) for name in (variant, other)]
        return max((outlier for outlier in found if outlier), default=(0.0, None))[1]

    def between(self, variant: str, other: str) -> Difference:
        """`variant` against `other`, by itself at 5 %."""
        return self.difference(variant, other, self.interval_at(variant, other)(ALPHA))

    def difference(self, variant: str, other: str, ci: Interval | None) -> Difference:
        """The estimate with this interval (both of logarithms), and what they say."""
        centre = self.estimate(variant, other)
        if centre is None:
            return Difference(None, None, "inconclusive")
        if ci is not None and self.unit == "round":
            ci = min(ci[0], centre), max(ci[1], centre)
        percent, interval = percent_from_log(centre), percent_interval(ci)
        verdict = "inconclusive" if self.is_throttled else verdict_of(percent, interval)
        pairs = self.pairs(variant, other)
        wins = sum(value * centre > 0 for value in pairs)
        quiet = self.without_load(variant, other, centre)
        return Difference(percent, interval, verdict, None, wins, len(pairs), quiet)

    def pairs(self, variant: str, other: str) -> Sequence[float]:
        """ln(t / t of the other) of every pair that an interval is made of."""
        return (
            self.family.differences(variant, other)
            if self.unit == "launch"
            else self.paired_rounds(variant, other)
        )

    def without_load(self, variant: str, other: str, centre: float) -> WithoutLoad:
        """The difference less what ranks waited for other load, if that is known.

        Args:
            centre: the estimate with it.
        """
        found = [
            (quiet.estimate(variant, other), quiet.interval_at(variant, other)(ALPHA))
            for quiet in self.quiet
            if {variant, other} <= quiet.measured.keys()
        ]
        known = [(middle, ci) for middle, ci in found if middle is not None and ci is not None]
        if not known or len(known) < len(self.quiet):
            return WithoutLoad()
        low, high = min(ci[0] for _, ci in known), max(ci[1] for _, ci in known)
        ci = percent_interval((low, high))
        return WithoutLoad(percent_from_log(fmean(middle for middle, _ in known)), ci, _holds(centre, ci))

    def estimate(self, variant: str, other: str) -> float | None:
        """Mean of ln(t / t of the other) over the launches of both; estimates of a run add up."""
        found = self.family.differences(variant, other)
        return fmean(found) if found else None

    def scatter(self, variant: str, other: str) -> float | None:
        """Standard deviation of ln(t / t of the other) over launches."""
        found = self.family.differences(variant, other)
        return math.sqrt(squares(found, fmean(found)) / (len(found) - 1)) if len(found) > 1 else None

    def values(self, variant: str) -> list[float]:
        """ln(time per sample in ns) of each launch of the variant."""
        return list(self.family.values[variant].values())

    def control_differences(self) -> list[float]:
        """ln(second block / first block) of the baseline, by launch."""
        pooled = self.family.values[self.baseline]
        return [2 * (value - pooled[launch]) for launch, value in self.control.items() if launch in pooled]

    def interval_at(self, variant: str, other: str) -> IntervalAt:
        """The interval over launches; over rounds if launches are too few and both ran in the same ones."""
        if self.unit == "launch":
            return self.family.at(variant, other)
        rounds = self.paired_rounds(variant, other) if self.share_launches(variant, other) else ()
        return lambda alpha: wilcoxon_interval(rounds, alpha * self.share_of_level)

    def paired_rounds(self, variant: str, other: str) -> tuple[float, ...]:
        """ln(t / t of the other) of every round that both have."""
        a, b = self.measured[variant], self.measured[other]
        return round_differences(a.timed, b.timed, samples_ratio(a, b))

    def share_launches(self, variant: str, other: str) -> bool:
        """Whether they run in the same processes, so that their rounds are pairs."""
        return self.measured[variant].group == self.measured[other].group


def differences_of(
    measured: Mapping[str, MeasuredVariant],
    baseline: str,
    taken: Sequence[Look] = (),
    early_rounds: bool = False,
) -> Differences:
    """All differences of a run: launches are the evidence from six on, else the rounds of those there are.

    Args:
        measured: all variants.
        baseline: the one that was measured twice in each round.
        taken: looks at launches so far, where the run has a budget.
        early_rounds: whether variants of a single launch ended as soon as they were decided.
    """
    most = max((len(variant.logs) for variant in measured.values() if variant.counts), default=0)
    unit: Unit = "launch" if most >= MIN_LAUNCHES else "round"
    values, control = _launch_values(measured, baseline)
    if unit == "launch":  # the control ran the same split: both are the baseline
        values[baseline] = {
            repetition: (value + control.get(repetition, value)) / 2
            for repetition, value in values[baseline].items()
        }
    share = EARLY_ROUNDS_SHARE if early_rounds else 1.0
    counted = [variant for variant in measured.values() if variant.counts]
    found = Differences(measured, baseline, Family(values, tuple(taken)), control, unit, share)
    return replace(
        found,
        quiet=tuple(_quiet(found, bound) for bound in BOUNDS),
        is_throttled=len(counted) > 1 and any(is_throttled(variant) for variant in counted),
    )


def _quiet(differences: Differences, bound: Bound) -> Differences:
    """The differences less the waiting for other load, where that is known of variants; looked at once."""
    known = {name: found for name, x in differences.measured.items() if (found := _without_load(x, bound))}
    values, _ = _launch_values(known, "")
    return replace(differences, measured=known, family=Family(values), quiet=())


def _without_load(measured: MeasuredVariant, bound: Bound) -> MeasuredVariant | None:
    """The variant's rounds less the waiting; `None` where it isn't known, on GPUs and on other nodes."""
    shares = shares_of_rounds(
        measured.waiting, [(round_.launch, round_.round) for round_ in measured.timed], bound
    )
    devices = measured.variant.devices
    if shares is None or not all(
        device.startswith(CPU.name) and node_of_device(device) == 0 for device in devices
    ):
        return None
    quiet = {key: math.log1p(-share) for key, share in shares.items()}
    timed = (replace(x, step_ns=x.step_ns * (1 - shares[x.launch, x.round])) for x in measured.timed)
    return replace(
        measured,
        timed=tuple(timed),
        logs={
            repetition: {k: log + quiet[k] for k, log in its.items()}
            for repetition, its in measured.logs.items()
        },
        means={
            repetition: log + fmean(quiet[k] for k in measured.logs[repetition])
            for repetition, log in measured.means.items()
        },
        aa_logs={},
    )


def in_cpu_time(measured: MeasuredVariant) -> MeasuredVariant:
    """The variant's rounds, with the CPU time of a step in place of its length."""
    timed = {rank: timed_steps(measured, rank) for rank in measured.steps}
    cpu_ns = cpu_ns_of_rounds(timed, [(round_.launch, round_.round) for round_ in measured.timed])
    logs = {
        repetition: {key: math.log(cpu_ns[key]) for key in its if key in cpu_ns}
        for repetition, its in measured.logs.items()
    }
    known = {repetition: its for repetition, its in logs.items() if its}
    means = {
        repetition: fmean(known[repetition].values()) for repetition in measured.means if repetition in known
    }
    return replace(measured, logs=known, means=means, aa_logs={})


def _holds(centre: float, ci: Interval | None) -> Holds:
    """Whether a difference of logarithms is still there in this interval, in percent."""
    if ci is None:
        return "unknown"
    low, high = (ci[0], ci[1]) if centre > 0 else (-ci[1], -ci[0])
    if low > 0:
        return "yes"
    is_none = low >= -RELEVANT_PERCENT and high <= RELEVANT_PERCENT
    return "no" if high < 0 or is_none else "unknown"


def _launch_values(
    measured: Mapping[str, MeasuredVariant], baseline: str
) -> tuple[dict[str, dict[int, float]], dict[int, float]]:
    """ln(time per sample) of every variant by repetition, and that of the baseline's second blocks."""
    values: dict[str, dict[int, float]] = {variant: {} for variant in measured}
    control: dict[int, float] = {}
    for group in {record.group for record in measured.values()}:
        members = [record for record in measured.values() if record.group == group]
        for repetition in sorted({repetition for record in members for repetition in record.logs}):
            logs = {record.variant.id: record.logs.get(repetition, {}) for record in members}
            if baseline in logs and repetition in measured[baseline].aa_logs:
                logs[CONTROL] = measured[baseline].aa_logs[repetition]
            means = {
                record.variant.id: record.means[repetition]
                for record in members
                if repetition in record.means
            }
            for variant, value in (launch_values(logs) | means).items():
                of = control if variant == CONTROL else values[variant]
                samples = measured[baseline if variant == CONTROL else variant].variant.global_batch
                of[repetition] = value - math.log(samples or 1)
    return values, control


def _too_few(seen: str, enough: int, num: int = 1) -> str:
    """`6 rounds are too few to rule out chance in 2 comparisons; that takes at least 7`."""
    are = "is" if seen.startswith("1 ") else "are"
    return reason("few", seen=seen, are=are, num=num if num > 1 else None, enough=enough)


def _outlying_round(measured: MeasuredVariant, outlying: RoundTime) -> tuple[float, str] | None:
    """The ratio of a round to all others, and its text, if it is farther than these are from each other."""
    at = (outlying.launch, outlying.round)
    others = [round_.step_ns for round_ in measured.timed if (round_.launch, round_.round) != at]
    ns = next(round_.step_ns for round_ in measured.timed if (round_.launch, round_.round) == at)
    low, high = min(others), max(others)
    if 2 * low - high <= ns <= 2 * high - low:
        return None
    others_ms = f"{format_ms(low / 1e6)} to {format_ms(high / 1e6)}"
    where = variant_label(measured.variant)
    said = reason("outlying", num_rounds=len(others) + 1, where=where, step_ms=ns / 1e6, others=others_ms)
    return max(ns / high, low / ns), said


def opposite(difference: Difference) -> Difference:
    """The difference seen from the other side: t_baseline / t in place of t / t_baseline."""
    quiet = difference.without_load
    return replace(
        difference,
        **_mirrored(difference),
        verdict=OPPOSITE.get(difference.verdict, difference.verdict),
        without_load=quiet and replace(quiet, **_mirrored(quiet)),
    )


def _mirrored(found: Difference | WithoutLoad) -> dict[str, Any]:
    percent, ci = found.percent, found.ci
    return {
        "percent": None if percent is None else _inverse(percent),
        "ci": None if ci is None else (_inverse(ci[1]), _inverse(ci[0])),
    }


def samples_ratio(measured: MeasuredVariant, other: MeasuredVariant) -> float:
    """Global batch over the other's: 1 where step times may be compared as they are."""
    if measured.variant.global_batch is None or other.variant.global_batch is None:
        return 1.0
    return measured.variant.global_batch / other.variant.global_batch


def _inverse(percent: float) -> float:
    # The end of an early look's interval can be −100 % but for less than a float shows.
    return -100 * percent / max(100 + percent, 1e-9)
