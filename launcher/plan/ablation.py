"""In which rounds steps are timed without communication as well."""

from launcher.plan.model import Launch

ABLATION_ROUNDS = 6
"""The fewest that give the ablation a 95 % interval: a sweep takes longer by a fraction of these rounds."""


def ablation_rounds(launch: Launch) -> int:
    """How many of the launch's rounds, the first ones; later launches of a group repeat its work."""
    communicates = len(launch.processes) > 1
    return min(ABLATION_ROUNDS, launch.rounds) if communicates and launch.repetition == 0 else 0
