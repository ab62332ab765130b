"""The product of what is under `compare`: names, baseline, the largest batch that all can hold."""

import itertools
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gpurun.launcher.errors import Problem, SpecError
from gpurun.launcher.jobfile.kinds import JobKind, default_batch, variant_kind
from gpurun.launcher.jobfile.model import Baseline, JobSpec
from gpurun.launcher.jobfile.section import Setting
from gpurun.launcher.jobfile.settings import ADDED_TO_THE_TOP, SETTINGS, Settings, settings_for
from gpurun.launcher.jobfile.yaml.tree import Path
from gpurun.launcher.plan.model import MAX_DEVICES_OF_ALL, MAX_PROCESSES, Variant, allowed, num_devices
from gpurun.launcher.splits import BALANCED, comes_to
from gpurun.launcher.strategies import PROGRAM, STRATEGIES, strategy_named
from gpurun.launcher.units import format_count

MAX_COMBINATIONS = 1000
"""More could not be measured in a day."""
VARY_FEWER = "vary fewer keys at a time"
MAX_NAME_CHARS = 100
"""Together with a path's other parts this stays far below the 255 bytes of a file name."""


@dataclass(frozen=True, kw_only=True)
class Combination(Settings):
    """One value for every setting, as the job states them; what is varied is merged into the job's own."""

    workload: str
    device_count: int
    global_batch: int | None
    stated: Mapping[str, Any]
    """The values under `compare` for this combination."""
    unknown: frozenset[str] = frozenset()
    """Settings, and other keys of the job, that can't be relied on."""

    @property
    def samples(self) -> int:
        """The global batch of a workload's combination, which always has one."""
        assert self.global_batch is not None, "a program isn't split"
        return self.global_batch


@dataclass(frozen=True)
class VariantOrigins:
    """A variant with all the combinations that come to it, the first of which names it."""

    variant: Variant
    origins: tuple[Combination, ...]


def combinations(
    spec: JobSpec,
    num_devices: int,
    num_local: int,
    with_own: bool = False,
    unknown: frozenset[Path] = frozenset(),
    sets: Sequence[Mapping[str, Any]] = (),
) -> Iterator[Combination]:
    """Every combination of what varies, the last key fastest; the job itself where nothing varies.

    Args:
        num_devices: those of all nodes.
        num_local: those of the first node, which are all that a strategy of one process can use.
        with_own: whether to add the job's own setting, which may not be one of them.
        unknown: places of values that can't be relied on.
        sets: values of settings; these are all combinations, in place of what is under `compare`.

    Raises:
        SpecError: there are too many.
    """
    if sets:
        yield from (_combination(spec, dict(stated), num_devices, num_local) for stated in sets)
        return
    lists = spec.compare.lists()
    total = math.prod(len(values) for values in lists.values())
    if total > MAX_COMBINATIONS:
        message = f"`compare` makes {format_count(total)} combinations; {allowed(MAX_COMBINATIONS)}"
        raise SpecError(spec.problem(("compare",), message, VARY_FEWER))
    for values in itertools.product(*(enumerate(several) for several in lists.values())):
        placed = dict(zip(lists, values, strict=True))
        not_known = _unknown_keys(unknown, {key: at for key, (at, _) in placed.items()})
        stated = {key: value for key, (_, value) in placed.items() if key not in not_known}
        yield replace(_combination(spec, stated, num_devices, num_local), unknown=not_known)
    if with_own:
        yield _combination(spec, own_values(spec), num_devices, num_local)


def _unknown_keys(unknown: frozenset[Path], picked: Mapping[str, int]) -> frozenset[str]:
    """The unknown settings of the combination of the items with these numbers."""
    if not unknown:
        return frozenset()
    own = {str(path[0]) for path in unknown} - picked.keys()
    varied = {
        str(path[1])
        for path in unknown
        if len(path) > 1 and path[0] == "compare" and path[2:3] in ((), (picked.get(str(path[1])),))
    }
    return frozenset(own | varied)


def own_values(spec: JobSpec) -> dict[str, Any]:
    """The job's own values of the keys that it compares, as they would be under `compare`."""
    own = {
        key: SETTINGS[key].absent if key in ADDED_TO_THE_TOP else getattr(spec, key)
        for key in spec.compare.lists()
    }
    return {key: value for key, value in own.items() if value is not None}


def _combination(spec: JobSpec, stated: dict[str, Any], num_devices: int, num_local: int) -> Combination:
    strategy = PROGRAM if spec.kind.runs_program else stated.get("strategy", spec.strategy)
    workload = stated.get("workload", spec.workload) or ""
    kind = variant_kind(strategy, workload)
    held = settings_for(kind, strategy)
    values = {
        name: _value(spec, name, stated, kind) if name in held else setting.absent
        for name, setting in SETTINGS.items()
    }
    values |= {
        "strategy": strategy,
        "workload": workload,
        "device_count": strategy_named(strategy).num_devices(values["device_count"], num_devices, num_local)
        if "device_count" not in stated
        else stated["device_count"],
        "global_batch": values["global_batch"] or (default_batch(workload) or 1 if kind.trains else None),
    }
    found = Combination(stated=stated, **values)
    absent = {name: SETTINGS[name].absent for name in held if not found.has(name)}
    return replace(found, **absent) if absent else found


def _value(spec: JobSpec, name: str, stated: Mapping[str, Any], kind: JobKind) -> Any:
    """A combination's value of a setting, with what varies merged into the job's own."""
    setting = SETTINGS[name]
    is_stated = name in stated or name in spec.stated
    if kind in setting.optional_for and not is_stated:
        return setting.absent
    own = getattr(spec, name)
    return setting.shape.merge(own, stated[name]) if name in stated else own


def max_batch(spec: JobSpec, caps: Sequence[int], num_local: int | None = None) -> int:
    """The largest global batch that every split of the job can hold on devices with these caps.

    Args:
        spec: the job.
        caps: the most samples of each device, of all nodes.
        num_local: how many of them the first node has; by default all.
    """
    return max(1, min(_batches(spec, caps, num_local or len(caps))))


def _batches(spec: JobSpec, caps: Sequence[int], num_local: int) -> Iterator[int]:
    for wanted in combinations(spec, len(caps), num_local):
        held = caps[: wanted.device_count]
        if not STRATEGIES[wanted.strategy].has_split:
            yield caps[0]
        elif wanted.split == BALANCED:
            yield sum(held)
        elif isinstance(wanted.split, str) and ":" in wanted.split:
            weights = [int(part) for part in wanted.split.split(":")]
            pairs = zip(held, weights, strict=False)
            yield min(cap * sum(weights) // weight for cap, weight in pairs)
        else:
            yield len(held) * min(held)


def choose_baseline(spec: JobSpec, candidates: Sequence[VariantOrigins], is_own: bool = False) -> str:
    """The id of the variant that `baseline` means, of several the one with most devices; else the first.

    Args:
        spec: the job.
        candidates: its variants.
        is_own: whether the job's own setting, where it can be, comes before the first variant.

    Raises:
        SpecError: none matches, or several with equally many devices.
    """
    wanted = spec.baseline
    if wanted is None:
        stated = own_values(spec) if is_own else None
        own = (
            candidate
            for candidate in candidates
            if any(origin.stated == stated for origin in candidate.origins)
        )
        return next(own, candidates[0]).variant.id
    matching = [
        item.variant
        for item in candidates
        if any(_matches(wanted, origin, item.variant.split) for origin in item.origins)
    ]
    if not matching:
        listed = _listed([item.variant for item in candidates])
        raise SpecError(
            spec.problem(("baseline",), "no variant matches `baseline`", f"the variants are {listed}")
        )
    most = max(len(variant.devices) for variant in matching)
    largest = [variant for variant in matching if len(variant.devices) == most]
    if len(largest) > 1:
        message = f"`baseline` matches several variants: {_listed(largest)}"
        raise SpecError(spec.problem(("baseline",), message, "add keys until only one matches"))
    return largest[0].id


def _matches(wanted: Baseline, origin: Combination, samples: tuple[int, ...]) -> bool:
    named = {key: value for key in Baseline.keys if (value := getattr(wanted, key)) is not None}
    split = named.pop("split", None)
    return (split is None or _has_split(wanted, origin, samples)) and all(
        SETTINGS[key].shape.matches(getattr(origin, key), origin.stated.get(key), value)
        for key, value in named.items()
    )


def _has_split(wanted: Baseline, origin: Combination, samples: tuple[int, ...]) -> bool:
    """Compares samples, whatever the job calls them; a strategy without a split is meant only by its name."""
    if not origin.has("split"):
        return bool(wanted.strategy == origin.strategy)
    if not samples:  # balanced: its samples are not known yet
        return bool(wanted.split == origin.split)
    return wanted.split is not None and comes_to(wanted.split, samples)


def _listed(variants: Sequence[Variant]) -> str:
    names = [variant.id for variant in variants]
    return ", ".join(names[:8]) + (", …" if len(names) > 8 else "")


def too_large(spec: JobSpec, started: int, variants: Sequence[Variant]) -> Iterator[Problem]:
    """The mistakes of a job that starts too many processes, or whose variants use too many devices."""
    if started > MAX_PROCESSES:
        message = f"the plan would start {format_count(started)} processes; {allowed(MAX_PROCESSES)}"
        yield spec.problem(("compare",), message, "vary fewer keys, or lower `steps.launches`")
    if (used := num_devices(variants)) > MAX_DEVICES_OF_ALL:
        message = f"its variants use {format_count(used)} devices in all; {allowed(MAX_DEVICES_OF_ALL)}"
        yield spec.problem(("compare",), message, VARY_FEWER)


def variant_id(variant: Variant) -> str:
    """`strategy-count[-split][-key-value…]`: the split where the strategy has one, then what varies."""
    split = [variant.split_name] if STRATEGIES[variant.strategy].has_split else []
    return _name(variant, split, variant.varied)


def group_id(first: Variant, is_apart: Callable[[Setting], bool]) -> str:
    """`strategy-count[-key-value…]` of the variants that share processes; of a program the variant's own."""
    if first.kind.runs_program:
        return first.id
    return _name(first, (), {key: value for key, value in first.varied.items() if is_apart(SETTINGS[key])})


def make_unique(names: Sequence[str]) -> tuple[str, ...]:
    """The names, with `-2`, `-3`, … after those that occur twice."""
    taken: Counter[str] = Counter()
    unique: list[str] = []
    for name in names:
        candidate = name
        while taken[candidate]:
            taken[name] += 1
            candidate = f"{name}-{taken[name]}"
        taken[candidate] += 1
        unique.append(candidate)
    return tuple(unique)


def _name(variant: Variant, split: Iterable[str], varied: Mapping[str, Any]) -> str:
    parts = [variant.strategy, str(len(variant.devices)), *split]
    for key, value in varied.items():
        setting = SETTINGS[key]
        parts += [] if setting.names_variant else setting.shape.id_words(key, value)
    return re.sub(r"[^A-Za-z0-9._+-]+", "-", "-".join(parts))[:MAX_NAME_CHARS]
