"""Which variant all others are compared with."""

from collections.abc import Sequence

from gpurun.launcher.errors import SpecError
from gpurun.launcher.jobfile.model import Baseline, JobSpec
from gpurun.launcher.jobfile.settings import SETTINGS
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
    split = named.pop("split", None)
    return (split is None or _has_split(wanted, origin, samples)) and all(
        SETTINGS[key].shape.matches(getattr(origin, key), origin.stated.get(key), value)
        for key, value in named.items()
    )


def _has_split(wanted: Baseline, origin: Combination, samples: tuple[int, ...]) -> bool:
    """By the samples, whatever the job calls them; a strategy without a split is meant only by its name."""
    if not origin.has("split"):
        return bool(wanted.strategy == origin.strategy)
    if not samples:  # balanced: its samples are not known yet
        return bool(wanted.split == origin.split)
    return wanted.split is not None and comes_to(wanted.split, samples)


def _listed(variants: Sequence[Variant]) -> str:
    names = [variant.id for variant in variants]
    return ", ".join(names[:8]) + (", …" if len(names) > 8 else "")
