"""The product of what stands under `compare`."""

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from gpurun.launcher.errors import SpecError
from gpurun.launcher.jobfile.builtins import default_batch
from gpurun.launcher.jobfile.model import Compare, JobSpec
from gpurun.launcher.plan.model import PROGRAM, Variant

MAX_COMBINATIONS = 1000
"""More could not be measured in a day."""


@dataclass(frozen=True)
class Combination:
    """One value for every key that may vary, as the job states them."""

    workload: str
    strategy: str
    device_count: int
    split: str | tuple[int, ...]
    global_batch: int | None
    precision: str
    compile: bool
    channels_last: bool
    threads: int | str
    accumulate: int
    params: Mapping[str, Any]
    """The job's, with those of `compare` laid over them."""
    args: tuple[str, ...]
    """The program's: the job's, then those of `compare`."""
    env: Mapping[str, str]
    """The program's: the job's, with those of `compare` laid over them."""
    seed: int
    stated: Mapping[str, Any]
    """What stands under `compare` for this combination."""

    @property
    def samples(self) -> int:
        """The global batch of a workload's combination, which always has one."""
        assert self.global_batch is not None, "a program isn't split"
        return self.global_batch


class ImpossibleError(SpecError):
    """There can't be such a variant; the message is the reason, `key` the key of the job that asks for it."""

    def __init__(self, key: str, reason: str) -> None:
        super().__init__(reason)
        self.key = key


@dataclass(frozen=True)
class Candidate:
    """A variant with all the combinations that come to it, the first of which names it."""

    variant: Variant
    origins: tuple[Combination, ...]


def combinations(spec: JobSpec, num_devices: int, num_local: int) -> Iterator[Combination]:
    """Every combination of what varies, the last key fastest; the job itself where nothing varies.

    Args:
        num_devices: those of all nodes, which `ddp` uses unless the job says otherwise.
        num_local: those of the first node, which are all that `dp` can use.

    Raises:
        SpecError: there are too many.
    """
    lists = {key: values for key in Compare.keys if (values := getattr(spec.compare, key))}
    total = math.prod(len(values) for values in lists.values())
    if total > MAX_COMBINATIONS:
        message = f"`compare` makes {total:,} combinations; {MAX_COMBINATIONS:,} is the most"
        raise SpecError(spec.problem(("compare",), message, "vary fewer keys at a time"))
    for values in itertools.product(*lists.values()):
        stated = dict(zip(lists, values, strict=True))
        strategy = PROGRAM if spec.program else stated.get("strategy", spec.strategy)
        most = {"single": 1, "dp": num_local}.get(strategy, num_devices)
        yield _combination(spec, stated, strategy, most)


def _combination(spec: JobSpec, stated: dict[str, Any], strategy: str, most: int) -> Combination:
    workload = stated.get("workload", spec.workload) or ""
    default_count = 1 if strategy == "single" else spec.device_count or most
    return Combination(
        workload=workload,
        strategy=strategy,
        device_count=stated.get("device_count", default_count),
        split=stated.get("split", spec.split),
        global_batch=_batch(spec, stated, workload),
        precision=stated.get("precision", spec.precision),
        compile=stated.get("compile", spec.compile),
        channels_last=stated.get("channels_last", spec.channels_last),
        threads=stated.get("threads", spec.threads),
        accumulate=stated.get("accumulate", spec.accumulate),
        params={**spec.params, **stated.get("params", {})},
        args=(*spec.args, *stated.get("args", ())),
        env={**spec.env, **stated.get("env", {})},
        seed=stated.get("seed", spec.seed),
        stated=stated,
    )


def _batch(spec: JobSpec, stated: Mapping[str, Any], workload: str) -> int | None:
    """The global batch; `None` for a program whose job doesn't say it."""
    batch = stated.get("global_batch", spec.global_batch)
    return batch if spec.program else batch or default_batch(workload) or 1
