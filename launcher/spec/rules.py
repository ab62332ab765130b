"""Mistakes that lie between the keys of a job and need no knowledge of the machine."""

from collections.abc import Iterator
from pathlib import Path

from launcher.errors import Problem
from launcher.spec.draft import Draft
from launcher.spec.fit import find_misfits, named_devices
from launcher.spec.model import Baseline
from launcher.spec.workload import find_workload_mistakes
from launcher.splits import is_same_split


def find_conflicts(draft: Draft, job_dir: Path) -> list[Problem]:
    """Mistakes between values that are right by themselves; what the draft doesn't know is left alone."""
    knows_devices = draft.knows(("devices",)) and draft.knows(("nodes",))
    devices = named_devices(draft.spec.devices) if knows_devices else None
    return [
        *_wrong_sums(draft),
        *_foreign_baseline(draft),
        *(find_misfits(draft, devices * draft.spec.nodes) if devices else ()),
        *find_workload_mistakes(draft, job_dir),
    ]


def _wrong_sums(draft: Draft) -> Iterator[Problem]:
    batches = draft.values("global_batch")
    if batches is None:
        return
    for path, split in draft.placed("split"):
        if isinstance(split, tuple) and sum(split) not in batches:
            wanted = " or ".join(str(batch) for batch in batches)
            message = f"the split {list(split)} adds up to {sum(split)}, not to the global batch of {wanted}"
            yield draft.spec.problem(path, message, _sum_hint(split, batches[0]))


def _sum_hint(split: tuple[int, ...], batch: int) -> str | None:
    last = batch - sum(split[:-1])
    return f"{[*split[:-1], last]} would" if last >= 1 else None


def _foreign_baseline(draft: Draft) -> Iterator[Problem]:
    """Values of `baseline` that no variant can have. What `params` may be only the variants tell."""
    for key in Baseline.model_fields:
        value, choices = getattr(draft.spec.baseline, key, None), draft.values(key)
        if value is None or key == "params" or choices is None or None in choices:
            continue
        if value in choices or (key == "split" and _is_same_work(draft, value, choices)):
            continue
        listed = ", ".join(_text(choice) for choice in choices)
        message = f"no variant has `{key}: {_text(value)}`, so it can't be the baseline"
        yield draft.spec.problem(("baseline", key), message, f"the job has {listed}")


def _is_same_work(
    draft: Draft, split: str | tuple[int, ...], choices: tuple[str | tuple[int, ...], ...]
) -> bool:
    """Whether a choice may come to the same samples; it may wherever the batch isn't known."""
    batches = draft.values("global_batch")
    return batches is None or any(is_same_split(split, choice, batches) for choice in choices)


def _text(value: object) -> str:
    return str(list(value)) if isinstance(value, tuple) else str(value)
