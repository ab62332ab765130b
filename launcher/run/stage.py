"""What a launch does at the moment, and what follows from that for its time and for its end."""

from dataclasses import replace

from gpurun.launcher.failures.root_cause import Failure
from gpurun.launcher.rundir.records import Event

START_S = 60.0
"""What a launch has at least, whatever a variant may take, until its ranks are there and have built the
model: importing torch is no part of a variant, and takes its time on a busy machine."""

BALANCE = "balance"
"""The stage in which the devices are measured for a balanced split, all at once."""


def allowed_s(limit_s: float, doing: Event | None) -> float:
    """Seconds that a launch may spend on what it does now, where a variant may take `limit_s`."""
    is_on_variant = doing is not None and doing.variant is not None
    return limit_s if is_on_variant else max(limit_s, START_S)


def is_balancing(doing: Event | None) -> bool:
    """Whether the devices are being measured for a balanced split."""
    return doing is not None and doing.stage == BALANCE


def located(cause: Failure, doing: Event | None) -> Failure:
    """The cause with what the launch was doing, where the rank left no word of it and can't be elsewhere."""
    if cause.stage is not None or doing is None or not is_balancing(doing):
        return cause
    return replace(cause, stage=BALANCE, variant=doing.variant)
