"""Which variant all others are compared with."""

from collections.abc import Mapping, Sequence
from typing import Any

from gpurun.launcher.errors import SpecError
from gpurun.launcher.jobfile.model import Baseline, JobSpec
from gpurun.launcher.plan.combination import Candidate, Combination
from gpurun.launcher.plan.model import Variant
from gpurun.launcher.splits import comes_to


def choose_baseline(spec: JobSpec, candidates: Sequence[Candidate]) -> str:
    """The id of the variant that `baseline` means, of several the one with most devices; else the first.

    Raises:
        SpecError: none matches, or several with equally many devices.
    """
    wanted = spec.baseline
    if wanted is None:
        return candidates[0].variant.id
    matching = [
        item.variant
        for item in candidates
        if any(_matches(wanted, origin, item.variant.split) for origin in item.origins)
    ]
    if not matching:
        listed = _listed([item.variant for item in candidates])
        raise SpecError(spec.problem(("baseline",), "no variant matches the baseline", f"there are {listed}"))
    most = max(len(variant.devices) for variant in matching)
    largest = [variant for variant in matching if len(variant.devices) == most]
    if len(largest) > 1:
        message = f"the baseline could be {_listed(largest)}"
        raise SpecError(spec.problem(("baseline",), message, "name more keys, so that one is left"))
    return largest[0].id


def _matches(wanted: Baseline, origin: Combination, samples: tuple[int, ...]) -> bool:
    named = {key: value for key in Baseline.keys if (value := getattr(wanted, key)) is not None}
    params, env, split = named.pop("params", {}), named.pop("env", {}), named.pop("split", None)
    args = named.pop("args", None)
    return (
        _has(origin.params, params)
        and _has(origin.env, env)
        and (args is None or args in (origin.stated.get("args"), origin.args))
        and all(getattr(origin, key) == value for key, value in named.items())
        and (split is None or _has_split(wanted, origin, samples))
    )


def _has(given: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
    return all(key in given and given[key] == value for key, value in wanted.items())


def _has_split(wanted: Baseline, origin: Combination, samples: tuple[int, ...]) -> bool:
    """By the samples, whatever the job calls them; `single` has no split, and is meant only by its name."""
    if origin.strategy == "single":
        return wanted.strategy == "single"
    if not samples:  # balanced: nobody knows its samples yet
        return wanted.split == origin.split
    return wanted.split is not None and comes_to(wanted.split, samples)


def _listed(variants: Sequence[Variant]) -> str:
    names = [variant.id for variant in variants]
    return ", ".join(names[:8]) + (", …" if len(names) > 8 else "")
