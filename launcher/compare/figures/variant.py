"""Figures of variants: step time, efficiency, those of ranks, balanced splits, throughput over the batch."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, fields
from statistics import fmean, median
from typing import Any

from gpurun.launcher.compare.figures.ranks import ExposedComm, RankFigures, TracedSteps, slowest_rank
from gpurun.launcher.compare.figures.recorded import (
    Logs,
    MeasuredVariant,
    gpu_names,
    round_blocks_ns,
    slowest_steps,
    throughput,
    whole_rounds,
)
from gpurun.launcher.compare.figures.size_curves import (
    Balanced,
    BatchCurve,
    BatchPoint,
    DeviceCost,
    SplitCost,
    probe_result,
)
from gpurun.launcher.compare.label import varied_texts
from gpurun.launcher.compare.model import Difference, Noise, Scatter, StepTime, VariantResult
from gpurun.launcher.compare.ranking import Differences, is_ranked
from gpurun.launcher.grouping import grouped
from gpurun.launcher.jobfile.settings import Settings
from gpurun.launcher.plan.model import Identity
from gpurun.launcher.rundir.records import Balance, Checked, Prediction, StepRecord
from gpurun.launcher.stats.estimates import (
    MOST_LOG,
    components,
    hodges_lehmann,
    median_interval,
    order_rank,
    percent_from_log,
    percent_interval,
    t_interval,
    wilcoxon_interval,
)
from gpurun.launcher.strategies import STRATEGIES, Reach
from gpurun.launcher.units import Interval, scaled

_IDENTITY, _CHECKED = ([each.name for each in fields(of)] for of in (Identity, Checked))
CI_ALPHA = 0.05
"""Level of figures by themselves; verdicts have the level of the comparison."""


def variant_result(
    measured: MeasuredVariant,
    differences: Differences,
    times: Mapping[str, StepTime | None],
    vs_baseline: Difference | None,
    host: Mapping[str, Any],
    peaks: Mapping[str, float],
    ranks: tuple[RankFigures, ...],
    traced_steps: TracedSteps | None,
) -> VariantResult:
    """One variant's entry; a variant that failed keeps the times that it has, but isn't compared."""
    variant, status = measured.variant, measured.status
    step_ms = times[variant.id]
    middle_ms = step_ms.estimate if step_ms else None
    rates, scale = throughput(measured, middle_ms, host, peaks), (variant.global_batch or 1) / 1e6
    slowest = slowest_rank(ranks)  # the others' gap is mostly waiting
    return VariantResult(
        **{name: getattr(variant, name) for name in _IDENTITY},
        **{name: getattr(measured.facts, name) for name in _CHECKED},
        status=status.status,
        reason=status.reason,
        log=status.log,
        rounds=len(measured.timed),
        launches=len(measured.logs),
        step_ms=step_ms,
        vs_baseline=vs_baseline,
        scaling_efficiency=scaling_efficiency(measured, times, differences.measured.values()),
        compression="" if variant.comm_hook == Settings.comm_hook else variant.comm_hook,
        exposed_comm_ms=slowest.exposed_comm_ms if slowest else ExposedComm(),
        ranks=ranks,
        launch_ms=tuple(math.exp(value) * scale for value in differences.values(variant.id)),
        balanced=balanced(measured, step_ms, differences),
        probe=probe_result(
            measured.points,
            variant.workload,
            gpu_names(variant.devices, host)[0],
            variant.precision or "",
            peaks,
        ),
        wall_s=median(measured.ended_s[name] for name in measured.later(measured.ended_s))
        if measured.ended_s
        else None,
        traced_steps=traced_steps,
        **asdict(rates),
    )


def step_times(differences: Differences) -> dict[str, StepTime | None]:
    """Step of every variant: the baseline's times the ratio that both are compared by, so that they agree.

    A variant that isn't compared, or without a baseline that counts, has its own mean.
    """
    return {variant: _step_time(variant, differences) for variant in differences.measured}


def _step_time(variant: str, differences: Differences) -> StepTime | None:
    measured = differences.measured[variant]
    values = differences.values(variant)
    if not values:
        return None
    reference = differences.references.get(variant, differences.baseline)
    behind = differences.estimate(variant, reference)
    if behind is None or not differences.measured[reference].counts:
        middle = fmean(values)
    else:
        middle = fmean(differences.values(reference)) + behind
    scale = (measured.variant.global_batch or 1) / 1e6
    middle_ms = math.exp(middle) * scale
    return StepTime(middle_ms, _step_interval(measured, values, middle_ms))


def _step_interval(measured: MeasuredVariant, values: Sequence[float], middle_ms: float) -> Interval | None:
    """95 %: of the mean over launches, by their scatter; of a single launch by `within_launch`."""
    if len(values) > 1:
        low, high = t_interval([value - fmean(values) for value in values], CI_ALPHA) or (0.0, 0.0)
        return middle_ms * math.exp(low), middle_ms * math.exp(high)
    _, parts_ms = within_launch(measured)
    if measured.means:
        return _around_mean(parts_ms, middle_ms)
    interval = median_interval(parts_ms, CI_ALPHA) or _mean_interval(parts_ms)
    return interval and (min(interval[0], middle_ms), max(interval[1], middle_ms))


def _mean_interval(parts_ms: Sequence[float]) -> Interval | None:
    """Interval of the geometric mean, which takes a few parts to be lognormal: no end is below zero."""
    ends = t_interval([math.log(part_ms) for part_ms in parts_ms], CI_ALPHA)
    return ends and (math.exp(ends[0]), math.exp(min(ends[1], MOST_LOG)))


def _around_mean(parts_ms: Sequence[float], middle_ms: float) -> Interval | None:
    """Interval of the arithmetic mean: as wide as Student's to first order, and never below zero."""
    ends = t_interval([part_ms / fmean(parts_ms) - 1 for part_ms in parts_ms], CI_ALPHA)
    return ends and (middle_ms * math.exp(ends[0]), middle_ms * math.exp(min(ends[1], MOST_LOG)))


def within_launch(measured: MeasuredVariant) -> tuple[str, list[float]]:
    """Name and times in ms of what a single launch's interval of a step is made of.

    `round` and all rounds; of a program that has hardly any, `step` and its steps.
    """
    rounds_ms = [time.step_ns / 1e6 for time in measured.timed]
    if order_rank(len(rounds_ms), CI_ALPHA) or not measured.variant.kind.runs_program:
        return "round", rounds_ms
    return "step", [step.step_ns / 1e6 for step in slowest_steps(measured)]


def scaling_efficiency(
    measured: MeasuredVariant, times: Mapping[str, StepTime | None], everything: Iterable[MeasuredVariant]
) -> float | None:
    """t_single / (W · t) for W devices; `None` without a `single` variant that does the same work."""
    time = times[measured.variant.id]
    singles = (
        other
        for other in everything
        if STRATEGIES[other.variant.strategy].reach is Reach.DEVICE
        and other.counts
        and other.variant.same_but_devices(measured.variant)
    )
    single = next(singles, None)
    single_time = times[single.variant.id] if single else None
    if time is None or single_time is None or not measured.counts:
        return None
    return single_time.estimate / (len(measured.variant.devices) * time.estimate)


def noise(differences: Differences) -> Noise:
    """The difference of two measurements of the baseline, its two blocks of each round; and its scatter."""
    if not (baseline := differences.measured[differences.baseline]).counts:
        return Noise()
    rounds = [d for launch in paired_by_launch(baseline.aa_logs, baseline.logs) for d in launch]
    centre, ci = hodges_lehmann(rounds), wilcoxon_interval(rounds, CI_ALPHA)
    if differences.unit == "launch":
        control = differences.control_differences()
        centre, ci = fmean(control) if control else None, t_interval(control, CI_ALPHA)
    percent = None if centre is None else percent_from_log(centre)
    launches, rounds_ = _own_scatter(baseline)
    return Noise(percent, percent_interval(ci), scaled(launches, 100), scaled(rounds_, 100))


def _own_scatter(measured: MeasuredVariant) -> tuple[float | None, float | None]:
    """Between launches, and between rounds: of a program, which may end within a round, the whole ones."""
    launches, rounds = components([list(logs.values()) for logs in measured.logs.values()])
    if not measured.variant.kind.runs_program:
        return launches, rounds
    whole = whole_rounds(next(iter(measured.steps.values()), ()))
    _, rounds = components(
        [[log for key, log in logs.items() if key in whole] for logs in measured.logs.values()]
    )
    return (launches if launches or rounds else None), rounds


def scatter(differences: Differences) -> Scatter:
    """The scatter of differences to the baseline; with a single launch, that of its rounds."""
    baseline = differences.measured[differences.baseline]
    others = [
        measured for measured in differences.measured.values() if measured is not baseline and measured.counts
    ]
    shared = [measured for measured in others if measured.group == baseline.group]
    parts = [components(paired_by_launch(measured.logs, baseline.logs)) for measured in shared]
    values = {
        measured.variant.id: differences.scatter(measured.variant.id, differences.baseline)
        for measured in others
    }
    return Scatter(
        launch_percent=typical_percent(launch for launch, _ in parts),
        round_percent=typical_percent(round_ for _, round_ in parts),
        shared_percent=typical_percent(values[measured.variant.id] for measured in shared),
        apart_percent=typical_percent(
            values[measured.variant.id] for measured in others if measured not in shared
        ),
    )


def paired_by_launch(logs: Logs, others: Logs) -> list[list[float]]:
    """ln(t / t of the other) of the rounds that both have, by launch."""
    return [
        [log - others[repetition][key] for key, log in its.items() if key in others[repetition]]
        for repetition, its in logs.items()
        if repetition in others
    ]


def typical_percent(deviations: Iterable[float | None]) -> float | None:
    """The median of standard deviations of logarithms, in percent."""
    known = [deviation for deviation in deviations if deviation is not None]
    return 100 * median(known) if known else None


def ablation_interval_ms(steps: Iterable[StepRecord]) -> Interval | None:
    """95 % interval of `ablation_ms`, from its rounds; `None` with fewer than two.

    With fewer than the median's interval needs, it is the mean's, which takes the rounds to be normal.
    """
    steps = list(steps)
    with_ns, without_ns = round_blocks_ns(steps, "timed"), round_blocks_ns(steps, "ablation")
    differences_ms = [
        (median(with_ns[key]) - median(block_ns)) / 1e6
        for key, block_ns in without_ns.items()
        if key in with_ns
    ]
    return median_interval(differences_ms, CI_ALPHA) or t_interval(differences_ms, CI_ALPHA)


NEAR_BEST = 0.9
"""Share of the highest throughput: what a larger batch gains beyond it costs memory and steps."""
LEAST_POINTS = 3


def batch_curves(results: Sequence[VariantResult]) -> tuple[BatchCurve, ...]:
    """A curve for each way of splitting that was measured with at least three batches."""
    compared = (result for result in results if "global_batch" in result.varied and is_ranked(result))
    families = grouped(compared, _family)
    return tuple(_curve(label, found) for label, found in families.items() if len(found) >= LEAST_POINTS)


def knee(points: Sequence[BatchPoint]) -> int | None:
    """The smallest batch within 10 % of the highest throughput; `None` if that is the largest batch."""
    best = max(point.samples_per_s for point in points)
    first = next(point for point in points if point.samples_per_s >= NEAR_BEST * best)
    return None if first is points[-1] else first.global_batch


def _curve(label: str, results: Sequence[VariantResult]) -> BatchCurve:
    points = [
        BatchPoint(result.id, result.global_batch or 0, result.samples_per_s or 0.0) for result in results
    ]
    points.sort(key=lambda point: point.global_batch)
    return BatchCurve(label, tuple(points), knee(points))


def _family(result: VariantResult) -> str:
    """All that is varied but the batch: `ddp even precision=bf16`."""
    others = {key: value for key, value in result.varied.items() if key != "global_batch"}
    split = (result.split_name, f"on {len(result.devices)}") if STRATEGIES[result.strategy].has_split else ()
    return " ".join((result.strategy, *split, *varied_texts(others)))


def balanced(measured: MeasuredVariant, step: StepTime | None, differences: Differences) -> Balanced | None:
    """`None` where the split is not a balanced one, or not found yet."""
    balance, own = measured.balance, measured.variant
    if balance is None:
        return None
    work = (own.strategy, own.devices, own.varied)
    alike = [
        other
        for other in differences.measured.values()
        if other is not measured
        and (other.variant.strategy, other.variant.devices, other.variant.varied) == work
    ]
    others = [other.variant.id for other in alike if other.counts and other.variant.split != own.split]
    against = differences.all_against(own.id, others if measured.counts else ())
    optimum_ms, measured_ms = balance.best.compute_ms, step.estimate if step else None
    return Balanced(
        devices=tuple(
            DeviceCost(device=device, **vars(curve))
            for device, curve in zip(own.devices, balance.curves, strict=True)
        ),
        optimum_ms=optimum_ms,
        overhead_ms=balance.overhead_ms,
        predicted_ms=balance.predicted_ms,
        measured_ms=measured_ms,
        optimum_over_measured=optimum_ms / measured_ms if measured_ms else None,
        even=_cost(balance, balance.even),
        proportional=_cost(balance, balance.proportional),
        same_as=tuple(other.variant.id for other in alike if other.variant.split == own.split),
        beaten_by=tuple(variant for variant, found in against.items() if found.verdict == "faster"),
    )


def _cost(balance: Balance, prediction: Prediction | None) -> SplitCost | None:
    if prediction is None:
        return None
    return SplitCost(prediction.split, prediction.compute_ms + balance.overhead_ms)
