"""What `global_batch: max` comes to, once it is known what every device holds."""

from collections.abc import Iterator, Sequence

from gpurun.launcher.jobfile.model import JobSpec
from gpurun.launcher.plan.combination import combinations
from gpurun.launcher.splits import BALANCED


def largest_batch(spec: JobSpec, caps: Sequence[int], num_local: int | None = None) -> int:
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
        if wanted.strategy == "single":
            yield caps[0]
        elif wanted.split == BALANCED:
            yield sum(held)
        elif isinstance(wanted.split, str) and ":" in wanted.split:
            weights = [int(part) for part in wanted.split.split(":")]
            pairs = zip(held, weights, strict=False)
            yield min(cap * sum(weights) // weight for cap, weight in pairs)
        else:
            yield len(held) * min(held)
