"""The parts of a timed step: all that is known of one without a trace. The same in terminal and tab."""

from collections.abc import Mapping

from gpurun.launcher.compare.figures.ranks import RankFigures

PHASES = {
    "input": "waiting for data",
    "h2d": "copying the batch to the device",
    "forward": "the forward pass, with what it communicates and waits for",
    "backward": "the backward pass, with what it communicates and waits for",
    "optimizer": "the update of the weights",
    "between_phases": "outside of all phases",
}
"""The meaning of each phase by its name, in the order in which they happen."""
REST = "between_phases"
RECORDED = {"input": "data"}
"""Phases that have another name in the records of steps."""
MOST_OF_STEP = 0.9
"""Share of a step from which on its phases are all of it."""


def timed_parts(rank: RankFigures, step_ms: float | None) -> Mapping[str, float]:
    """The phases of the rank in ms, as long together as the variant's step; empty where none was measured.

    Medians of phases don't add up to that of the step: they are scaled to it, unless they are a smaller part
    of it than that explains.

    Args:
        rank: of which the phases are.
        step_ms: the variant's step; `None`: as long as the phases.
    """
    times_ms = {name: rank.phases_ms.get(RECORDED.get(name, name), 0.0) for name in PHASES if name != REST}
    phases_ms = sum(times_ms.values())
    if not phases_ms:
        return {}
    if step_ms is None:
        step_ms = phases_ms
    scale = step_ms / phases_ms if phases_ms > MOST_OF_STEP * step_ms else 1.0
    parts = {name: scale * ms for name, ms in times_ms.items()}
    rest_ms = step_ms - sum(parts.values())
    return {**parts, REST: rest_ms if rest_ms > 1e-6 * step_ms else 0.0}
