"""Mistakes that lie between the keys of a job and need no knowledge of the machine."""

from collections.abc import Iterator
from pathlib import Path

from launcher.errors import Problem
from launcher.spec.builtins import builtin_workloads
from launcher.spec.describe import did_you_mean, shorten
from launcher.spec.model import Baseline, JobSpec
from launcher.spec.tree import Path as KeyPath
from launcher.spec.values import Split


def find_conflicts(spec: JobSpec, job_dir: Path) -> list[Problem]:
    """Mistakes in a job whose every value is right by itself."""
    return [*_wrong_sums(spec), *_foreign_baseline(spec), *_missing_workload(spec, job_dir)]


def _wrong_sums(spec: JobSpec) -> Iterator[Problem]:
    batches = spec.compare.global_batch or (spec.global_batch,)
    for path, split in _splits(spec):
        if isinstance(split, tuple) and sum(split) not in batches:
            wanted = " or ".join(str(batch) for batch in batches)
            message = f"the split {list(split)} adds up to {sum(split)}, not to the global batch of {wanted}"
            yield spec.problem(path, message, _sum_hint(split, batches[0]))


def _splits(spec: JobSpec) -> list[tuple[KeyPath, Split]]:
    if spec.compare.split:
        return [(("compare", "split", position), split) for position, split in enumerate(spec.compare.split)]
    return [(("split",), spec.split)]


def _sum_hint(split: tuple[int, ...], batch: int) -> str | None:
    last = batch - sum(split[:-1])
    return f"{[*split[:-1], last]} would" if last >= 1 else None


def _foreign_baseline(spec: JobSpec) -> Iterator[Problem]:
    """Values of `baseline` that no variant can have. What `params` may be only the variants tell."""
    if spec.baseline is None:
        return
    for key in Baseline.model_fields:
        value = getattr(spec.baseline, key)
        choices = getattr(spec.compare, key) or (getattr(spec, key),)
        if value is None or key == "params" or None in choices or value in choices:
            continue
        listed = ", ".join(_text(choice) for choice in choices)
        message = f"no variant has `{key}: {_text(value)}`, so it can't be the baseline"
        yield spec.problem(("baseline", key), message, f"the job has {listed}")


def _text(value: object) -> str:
    return str(list(value)) if isinstance(value, tuple) else str(value)


def _missing_workload(spec: JobSpec, job_dir: Path) -> Iterator[Problem]:
    file, colon, _ = spec.workload.rpartition(":")
    if not colon and spec.workload not in builtin_workloads():
        known = builtin_workloads()
        hint = did_you_mean(spec.workload, known) or f"built in are {', '.join(known)}"
        message = f"there is no built-in workload `{shorten(spec.workload)}`"
        yield spec.problem(("workload",), message, hint)
    if file.endswith(".py"):
        yield from _missing_file(spec, job_dir, file)


def _missing_file(spec: JobSpec, job_dir: Path, file: str) -> Iterator[Problem]:
    try:
        exists = (job_dir / file).is_file()
    except OSError:  # a name that is too long
        exists = False
    if not exists:
        hint = "it is looked for beside the job file"
        yield spec.problem(("workload",), f"there is no file {file[:200]}", hint)
