"""What the command ends with once all variants have had their turn: pure."""

import re
from collections.abc import Sequence

from gpurun.launcher.compare.model import Comparison
from gpurun.launcher.errors import GpurunError, ParamsError, VariantError
from gpurun.launcher.units import plural

_HELD = re.compile(r"the devices can hold .*= (?P<samples>\d+) samples?, not")
"""Words of `balance/solve.py`."""
_MEASURED = ("ok", "unsteady")


def outcome_error(comparison: Comparison, mistake: ParamsError | None = None) -> GpurunError | None:
    """Why the command doesn't end with 0, though the results stand; `None`: it does.

    A variant that runs out of memory is a result where another one was measured: it does not fit. Where none
    was, nothing has been done that a script or a batch system could go on from.

    Args:
        comparison: what was measured.
        mistake: one in the job that was found on the way; where no variant was without it, it is the outcome.
    """
    variants = comparison.variants
    if mistake and not any(v.step_ms or v.probe for v in variants):
        return mistake
    lost = [v.id for v in variants if v.status in ("failed", "timeout")]
    if lost:
        return VariantError(f"{len(lost)} of {plural(len(variants), 'variant')} failed: {', '.join(lost)}")
    too_large = [v.id for v in variants if v.status == "oom"]
    if too_large and not any(v.status in _MEASURED for v in variants):
        hint = _what_fits([v.reason or "" for v in variants if v.status == "oom"])
        return VariantError(f"nothing could be measured; out of memory: {', '.join(too_large)}\n    {hint}")
    return None


def _what_fits(reasons: Sequence[str]) -> str:
    """The batch that devices were found to hold while a balanced split was looked for, or a smaller one."""
    held = [int(found["samples"]) for reason in reasons if (found := _HELD.search(reason))]
    if not held:
        return "set a smaller `global_batch`, or cut it into micro-batches: `accumulate`"
    return f"the devices could hold {min(held)} samples: set `global_batch: {min(held)}` or less"
