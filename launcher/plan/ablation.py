"""In which rounds steps are timed without communication as well."""

from gpurun.launcher.jobfile.builtins import is_probe
from gpurun.launcher.jobfile.model import JobSpec
from gpurun.launcher.plan.model import Launch

ABLATION_ROUNDS = 6
"""The fewest that give the ablation a 95 % interval: a sweep takes longer by a fraction of these rounds."""


def ablation_rounds(spec: JobSpec, launch: Launch) -> int:
    """How many of the launch's rounds, the first ones; later launches of a group repeat its work.

    Like the traces, the ablation explains and doesn't compare: a job that wants none of it has neither.
    """
    if is_probe(spec.workload):
        return 0
    wanted = spec.profile.steps > 0 and launch.repetition == 0 and len(launch.processes) > 1
    return min(ABLATION_ROUNDS, launch.rounds) if wanted else 0
