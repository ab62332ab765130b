"""The combinations that a search chooses from: which can be, who can try them, and where they differ."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from gpurun.launcher.compare.figures.searched import NOT_GIVEN, key_of, parts_of, shown_value
from gpurun.launcher.errors import SpecError
from gpurun.launcher.jobfile.model import JobSpec
from gpurun.launcher.jobfile.settings import SETTINGS
from gpurun.launcher.plan.build import build_launch, groups_of
from gpurun.launcher.plan.devices import MachineLike
from gpurun.launcher.plan.expand import expand
from gpurun.launcher.plan.model import Launch, Plan, Variant
from gpurun.launcher.rundir.records import Effect, TimeChange, Unmeasured
from gpurun.launcher.search.policy import Levels, MeasuredCombination, Posterior, changes, fastest_with
from gpurun.launcher.strategies import STRATEGIES

NORMAL_95 = 1.96
"""Standard deviations around a normal variable's mean that hold 95 % of its values."""


@dataclass(frozen=True)
class Space:
    """All that a job's lists under `compare` allow, and the job's own setting."""

    num_combinations: int
    """The number of combinations of the lists; several may come to the same work."""
    plan: Plan
    """The plan, with a launch for all variants that the same ranks can try, one after the other."""
    impossible: tuple[Unmeasured, ...]

    @property
    def variants(self) -> tuple[Variant, ...]:
        return self.plan.variants

    @property
    def own(self) -> int:
        """The position of the job's own setting, or of what the job calls the baseline."""
        return next(i for i, variant in enumerate(self.variants) if variant.id == self.plan.baseline)

    def launch_of(self, variant: str) -> Launch:
        """The launch whose ranks can try it."""
        return next(launch for launch in self.plan.launches if variant in launch.variants)


def build_space(spec: JobSpec, machine: MachineLike) -> Space:
    """The space of a job on this machine.

    Raises:
        SpecError: nothing varies, no combination can be, or there are too many.
        MachineError: the machine has fewer devices than the job asks for.
    """
    expansion = expand(spec, machine, with_own=True)
    if len(expansion.variants) < 2:
        where = spec.problem(("compare",), "there is nothing to search: one combination only")
        raise SpecError(
            replace(where, hint="list values under `compare`: `compare: {bucket_mb: [5, 25, 100]}`")
        )
    groups = groups_of(expansion.variants, processes_for, lambda setting: setting.needs_processes)
    plan = Plan(
        name=spec.name,
        workload=str(spec.program or spec.workload),
        baseline=expansion.baseline,
        variants=expansion.variants,
        left_out=(),
        launches=tuple(build_launch(spec, group, machine) for group in groups),
        notes=expansion.notes,
    )
    impossible = (Unmeasured(skipped.combination, skipped.reason) for skipped in expansion.left_out)
    lists = spec.compare.lists().values()
    return Space(int(np.prod([len(values) for values in lists])), plan, tuple(impossible))


def processes_for(variant: Variant) -> str:
    """A key that is equal for variants that the same ranks can try, by building model and strategy again."""
    strategy = STRATEGIES[variant.strategy]
    needed = {name: getattr(variant, name) for name, setting in SETTINGS.items() if setting.needs_processes}
    layout = (strategy.process_per_device, strategy.has_backend, strategy.has_replicas)
    return json.dumps((layout, variant.devices, needed), sort_keys=True)


@dataclass(frozen=True)
class SearchKey:
    """A key by which variants differ, or a part of one: of a mapping, or an option of a program."""

    setting: str
    part: str
    """Empty for a whole setting."""
    values: tuple[Any, ...]
    """The values of each variant; `NOT_GIVEN` where it has no such part."""

    @property
    def name(self) -> str:
        """`bucket_mb`, `params width`, `args --workers`."""
        return key_of(self.setting, self.part)

    @property
    def levels(self) -> list[int]:
        """The number of each variant's value, by its first occurrence."""
        numbers = {value: number for number, value in enumerate(dict.fromkeys(map(repr, self.values)))}
        return [numbers[repr(value)] for value in self.values]

    def text(self, level: int) -> str:
        """The value with this number, as a report shows it."""
        return shown_value(self.setting, self.values[self.levels.index(level)])


def keys_of(variants: Sequence[Variant]) -> list[SearchKey]:
    """All by which these variants differ."""
    rows = [_values(variant) for variant in variants]
    names = dict.fromkeys(name for row in rows for name in row)
    keys = [SearchKey(*name, tuple(row.get(name, NOT_GIVEN) for row in rows)) for name in names]
    return [key for key in keys if max(key.levels)]


def levels_of(variants: Sequence[Variant]) -> Levels:
    """A row per variant, a column per key that varies: the number of its value."""
    columns = [key.levels for key in keys_of(variants)]
    return np.array(columns or [[0] * len(variants)], dtype=np.int64).T


def effects(
    space: Space, compared: Iterable[str], belief: Posterior, known: Sequence[MeasuredCombination], at: int
) -> tuple[Effect, ...]:
    """The effect of each compared value on the time of a step: at one variant, and on average.

    Args:
        space: of the job.
        compared: keys under `compare`; others follow from them, as the number of devices from the strategy.
        belief: of the log time of every variant.
        known: the variants that were measured.
        at: the position of the variant whose values the others are compared with.
    """
    variants, compared = space.variants, set(compared)
    keys = [key for key in keys_of(variants) if key.setting in compared]
    if not keys:
        return ()
    levels = np.array([key.levels for key in keys], dtype=np.int64).T
    has = np.array([[variant.has(key.setting) for key in keys] for variant in variants])
    best = next((result for result in known if result.combination == at), None)
    found: list[Effect] = []
    for change in changes(belief, levels, has, [result.combination for result in known], at):
        key, at_best = keys[change.key], None
        if best is not None and has[at, change.key] and levels[at, change.key] == change.against:
            at_best = _measured_change(
                fastest_with(change, levels, has, known, at), best, belief.trial_variance, variants
            )
        average = _time_change(change.log_time, change.deviation)
        found.append(Effect(key.name, key.text(change.level), key.text(change.against), at_best, average))
    return tuple(found)


def _measured_change(
    result: MeasuredCombination | None,
    best: MeasuredCombination,
    trial_variance: float,
    variants: Sequence[Variant],
) -> TimeChange | None:
    if result is None:
        return None
    variance = sum(each.variance + trial_variance / each.trials for each in (result, best))
    change = _time_change(result.log_time - best.log_time, math.sqrt(variance))
    return replace(change, variant=variants[result.combination].id)


def _time_change(log_time: float, deviation: float) -> TimeChange:
    reach = NORMAL_95 * deviation
    percent, low, high = (100 * math.expm1(log_time + by) for by in (0.0, -reach, reach))
    return TimeChange(percent, (low, high))


def _values(variant: Variant) -> dict[tuple[str, str], Any]:
    """The value of everything by which variants may differ, by setting and part."""
    settings = {name: getattr(variant, name) for name in SETTINGS if name != "split"}
    named = {"split": variant.split_name, **settings}
    return {(name, part): value for name, part, value in parts_of(named)}


def refusals(spec: JobSpec) -> list[str]:
    """Why a job can't be tuned; none where it can."""
    several, is_max = len(set(spec.compare.workload)) > 1, spec.global_batch == "max"
    reasons = {
        "a search runs on one machine: set `nodes: 1`": spec.is_on_nodes,
        "a search needs a number for `global_batch`: `max` may differ between combinations": is_max,
        "several workloads do different work: tune them one by one": several,
        f"{spec.workload} is a micro-benchmark, of which no variant is faster": not spec.kind.is_ranked,
    }
    return [text for text, applies in reasons.items() if applies]


def settings_text(variant: Variant) -> Mapping[str, Any]:
    """A variant's values of the keys that vary, with what its name begins with."""
    named = {"strategy": variant.strategy} if STRATEGIES[variant.strategy].in_jobs else {}
    split = {"split": variant.split_name} if STRATEGIES[variant.strategy].has_split else {}
    return {**named, "device_count": len(variant.devices), **split, **variant.varied}
