"""Mistakes that lie between the keys of a job and need no knowledge of the machine."""

import math
from collections.abc import Iterator
from pathlib import Path

from gpurun.launcher.errors import Problem
from gpurun.launcher.jobfile.builtins import default_batch, is_workload
from gpurun.launcher.jobfile.checks.device_checks import find_misfits, find_misplaced, named_devices
from gpurun.launcher.jobfile.checks.kind import find_kind_mistakes
from gpurun.launcher.jobfile.checks.program_file import find_program_mistakes
from gpurun.launcher.jobfile.checks.workload import find_workload_mistakes
from gpurun.launcher.jobfile.kinds import KIND_KEYS
from gpurun.launcher.jobfile.model import SIZES, Baseline
from gpurun.launcher.jobfile.read import Draft
from gpurun.launcher.jobfile.section import ITEMS
from gpurun.launcher.jobfile.settings import SETTINGS
from gpurun.launcher.jobfile.yaml.tree import REMOVE_ONE
from gpurun.launcher.splits import is_same_split
from gpurun.launcher.strategies import strategy_named


def find_conflicts(draft: Draft, job_dir: Path) -> list[Problem]:
    """Mistakes between values that are right by themselves; what the draft doesn't know is left alone."""
    knows_devices = draft.knows(("devices",)) and draft.knows(("nodes",))
    devices = named_devices(draft.spec.devices, draft.spec.nodes) if knows_devices else None
    return [
        *find_kind_mistakes(draft),
        *_no_effect(draft),
        *_missing_batch(draft),
        *_max_of_nodes(draft),
        *_max_of_shards(draft),
        *_wrong_sums(draft),
        *_foreign_baseline(draft),
        *(find_misplaced(draft) if knows_devices else ()),
        *(find_misfits(draft, devices) if devices else ()),
        *find_workload_mistakes(draft, job_dir),
        *find_program_mistakes(draft, job_dir),
    ]


def _no_effect(draft: Draft) -> Iterator[Problem]:
    """A budget, or an end when all is decided, in a run of fixed size."""
    spec = draft.spec
    if not spec.has_fixed_size:
        return
    sizes = sorted(SIZES & spec.steps.stated)
    by = f"`steps.{sizes[0]}`" if sizes else "`until: fixed`" if spec.kind.is_ranked else "a micro-benchmark"
    wrong = {"until": spec.until == "decided" and (sizes or not spec.kind.is_ranked), "budget": True}
    for key in (key for key, is_wrong in wrong.items() if is_wrong and key in spec.stated):
        hint = f"only a run that ends when all is decided has a budget; {REMOVE_ONE}"
        yield spec.key_problem((key,), f"`{key}` has no effect: {by} makes for a run of fixed size", hint)


def _missing_batch(draft: Draft) -> Iterator[Problem]:
    """No batch, neither in the job nor as a built-in's own."""
    is_stated = "global_batch" in draft.spec.stated or not draft.spec.kind.has_batch
    if is_stated or draft.values("global_batch") != (None,):
        return
    if not all(draft.knows((key,)) for key in KIND_KEYS):  # maybe a program, which needs none
        return
    # One that there is not says nothing of a batch: that is a mistake of its own.
    named = [name for name in draft.values("workload") or (None,) if name is None or is_workload(name)]
    if named and all(map(default_batch, named)):
        return
    hint = "add the number of samples per optimizer step over all devices: `global_batch: 64`"
    lacking = [name for name in named if name is not None and not default_batch(name)]
    have = "has no batch of its own" if len(lacking) == 1 else "have no batch of their own"
    why = f": {', '.join(lacking)} {have}" if len(named) > len(lacking) > 0 else ""
    yield draft.spec.problem(("global_batch",), f"missing key `global_batch`{why}", hint)


def _max_of_nodes(draft: Draft) -> Iterator[Problem]:
    """The largest batch is looked for on one machine."""
    if draft.knows(("nodes",)) and draft.spec.nodes > 1 and "max" in (draft.values("global_batch") or ()):
        message = f"`global_batch: max` works on one machine only, but the job has {draft.spec.nodes} nodes"
        hint = (
            f"find the maximum with --set nodes=1, then set `global_batch` to {draft.spec.nodes} times that"
        )
        yield draft.spec.problem(("global_batch",), message, hint)


def _max_of_shards(draft: Draft) -> Iterator[Problem]:
    """The largest batch is looked for on one device at a time."""
    for path, name in draft.placed("strategy"):
        reason = strategy_named(name).max_batch_refusal
        if reason and "max" in (draft.values("global_batch") or ()):
            message = f"`global_batch: max` can't be found for `{name}`: {reason}"
            yield draft.spec.problem(path, message, "state a number, or leave out this strategy")


def _wrong_sums(draft: Draft) -> Iterator[Problem]:
    if "max" in (draft.values("global_batch") or ()):
        yield from _numbers_of_max(draft)
    batches = batches_of(draft)
    if not batches:
        return
    for path, split in draft.placed("split"):
        if isinstance(split, tuple) and sum(split) not in batches:
            wanted = " or ".join(str(batch) for batch in batches)
            message = f"the split {list(split)} adds up to {sum(split)}, not to the global batch of {wanted}"
            yield draft.spec.problem(path, message, _sum_hint(split, batches[0]))


def _numbers_of_max(draft: Draft) -> Iterator[Problem]:
    """Splits that name samples of a batch that is still to be found."""
    for path, split in draft.placed("split"):
        if isinstance(split, tuple):
            message = f"the split {list(split)} lists samples, but `global_batch: max` isn't known in advance"
            divisor = math.gcd(*split)
            ratio = ":".join(str(size // divisor) for size in split)
            hint = f'state `global_batch: {sum(split)}`, or give a ratio: `split: "{ratio}"`'
            yield draft.spec.problem(path, message, hint)


def batches_of(draft: Draft) -> tuple[int, ...]:
    """Every global batch that a variant may have; none where one of them isn't known, as with `max`."""
    stated, workloads = draft.values("global_batch"), draft.values("workload")
    if stated != (None,) or workloads is None:
        return stated if stated and None not in stated and "max" not in stated else ()
    own = tuple(default_batch(name) for name in workloads)
    return tuple(batch for batch in own if batch is not None) if None not in own else ()


def _sum_hint(split: tuple[int, ...], batch: int) -> str | None:
    last = batch - sum(split[:-1])
    return f"did you mean {[*split[:-1], last]}?" if last >= 1 else None


def _foreign_baseline(draft: Draft) -> Iterator[Problem]:
    """Values of `baseline` that no variant can have. What `params` and `env` may be the variants tell."""
    for key in Baseline.keys:
        value, choices = getattr(draft.spec.baseline, key, None), draft.values(key)
        if value is None or SETTINGS[key].shape is ITEMS or choices is None or None in choices:
            continue
        if value in choices or (key == "split" and _is_same_work(draft, value, choices)):
            continue
        listed = ", ".join(_text(choice) for choice in choices)
        message = f"no variant has `{key}: {_text(value)}`, so it can't be the baseline"
        yield draft.spec.problem(("baseline", key), message, f"the variants have {listed}")


def _is_same_work(
    draft: Draft, split: str | tuple[int, ...], choices: tuple[str | tuple[int, ...], ...]
) -> bool:
    """Whether a choice may come to the same samples; it may wherever the batch isn't known."""
    batches = batches_of(draft)
    return not batches or any(is_same_split(split, choice, batches) for choice in choices)


def _text(value: object) -> str:
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_text, value))}]"
    return str(value).lower() if isinstance(value, bool) else str(value)
