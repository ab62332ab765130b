"""How many rounds leave communication out, and a rough duration of a run before its speed is known."""

from gpurun.launcher.jobfile.model import JobSpec
from gpurun.launcher.machine.accelerators import accelerator_of
from gpurun.launcher.plan.model import Launch, Plan

ABLATION_ROUNDS = 6
"""The fewest that give the ablation a 95 % interval: a sweep takes longer by a fraction of these rounds."""

_STEP_S = 0.03
"""A step of a small model; warm-up, gradient check and trace are counted in steps."""
_BLOCK_OVERHEAD = 1.25
"""A block lasts at least as long as the kind of device asks for, plus a step and its barriers."""
_STEADY_STEPS = 10
"""Steps beyond `warmup` until a variant is seen to be steady."""


def ablation_rounds(spec: JobSpec, launch: Launch) -> int:
    """How many of the launch's rounds, the first ones; later launches of a group repeat its work.

    Like the traces, the ablation explains and doesn't compare: a job that wants none of it has neither.
    """
    wanted = (
        spec.kind.trains and spec.profile.steps > 0 and launch.repetition == 0 and len(launch.processes) > 1
    )
    return min(ABLATION_ROUNDS, launch.rounds) if wanted else 0


def estimate_s(plan: Plan, spec: JobSpec) -> float:
    """Seconds that the run takes at the most if its steps are short; early stops make it shorter.

    0 for a program, of which nothing can be said.
    """
    if not spec.kind.has_rounds:
        return 0.0
    return sum(_launch_s(plan, spec, launch) for launch in plan.launches)


def _launch_s(plan: Plan, spec: JobSpec, launch: Launch) -> float:
    kind = accelerator_of(launch.processes[0].devices[0])
    num_variants = len(launch.variants)
    has_baseline = plan.baseline in launch.variants  # measured twice in every round
    blocks = launch.rounds * (num_variants + has_baseline) + ablation_rounds(spec, launch) * num_variants / 2
    extra_steps = spec.profile.steps + spec.gradient_check if launch.repetition == 0 else 0
    steps = num_variants * (spec.steps.warmup + _STEADY_STEPS + extra_steps)
    return kind.start_s + blocks * _BLOCK_OVERHEAD * kind.block_ms / 1e3 + steps * _STEP_S
