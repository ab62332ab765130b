"""A rough duration of a run, before anything is known of the workload's speed."""

from gpurun.launcher.jobfile.model import JobSpec
from gpurun.launcher.machine.accelerators import accelerator_of
from gpurun.launcher.plan.ablation import ablation_rounds
from gpurun.launcher.plan.model import Launch, Plan

_STEP_S = 0.03
"""A step of a small model; warm-up, gradient check and trace are counted in steps."""
_BLOCK_S = 0.25
"""A round's block of steps lasts at least 200 ms, plus its barriers."""
_STEADY_STEPS = 10
"""Steps beyond `warmup` until a variant is seen to be steady."""


def estimate_s(plan: Plan, spec: JobSpec) -> float:
    """Seconds that the run takes at the most if its steps are short; early stops make it shorter.

    0 for a program, of which nothing can be said.
    """
    if spec.program is not None:
        return 0.0
    return sum(_launch_s(plan, spec, launch) for launch in plan.launches)


def _launch_s(plan: Plan, spec: JobSpec, launch: Launch) -> float:
    start = accelerator_of(launch.processes[0].devices[0]).start_s
    num_variants = len(launch.variants)
    has_baseline = plan.baseline in launch.variants  # measured twice in every round
    blocks = launch.rounds * (num_variants + has_baseline) + ablation_rounds(spec, launch) * num_variants / 2
    extra_steps = spec.profile.steps + spec.gradient_check if launch.repetition == 0 else 0
    steps = num_variants * (spec.steps.warmup + _STEADY_STEPS + extra_steps)
    return start + blocks * _BLOCK_S + steps * _STEP_S
