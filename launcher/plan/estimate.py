"""How many rounds leave communication out, and a rough duration of a run before its speed is known."""

from dataclasses import dataclass, replace
from pathlib import Path

from gpurun.launcher.findings.finding import reason
from gpurun.launcher.jobfile.model import JobSpec
from gpurun.launcher.machine.accelerators import accelerator_of
from gpurun.launcher.plan.model import Launch, Plan

LAUNCHES_TO_COMPARE = 6
"""Launches of each, without which there is no verdict on what other launches would show."""
ABLATION_ROUNDS = 6
"""The fewest that give the ablation a 95 % interval: a sweep takes longer by a fraction of these rounds."""

_STEP_S = 0.03
"""A step of a small model; warm-up, gradient check and trace are counted in steps."""
_LATER_START = 0.25
"""Share of the time of a first start: torch is imported by then (0.3 to 0.5 of 2 s on CPU devices)."""
_BLOCK_OVERHEAD = 1.25
"""A block lasts at least as long as the kind of device asks for, plus a step and its barriers."""
_STEADY_STEPS = 10
"""Steps until a variant is seen to be steady."""


def more_launches(has_budget: bool) -> str:
    """The advice on keys of a job file that give enough launches."""
    return "a larger `budget`" if has_budget else f"`steps: {{launches: {LAUNCHES_TO_COMPARE}}}`"


def unused_budget(spec: JobSpec, budget_s: float | None) -> str | None:
    """A note of a budget that the job states and that its plan doesn't have."""
    if "budget" not in spec.stated or budget_s is not None:
        return None
    steps = f"{{launches: {LAUNCHES_TO_COMPARE}}}" if spec.kind.runs_program else "{rounds: 28}"
    return reason("unused-budget", setting=f"`steps: {steps}`")


def ablation_rounds(spec: JobSpec, launch: Launch) -> int:
    """How many of the launch's rounds, the first ones: six over the first launches of a group.

    Like the traces, the ablation explains and doesn't compare: a job that wants none of it has neither.
    """
    wanted = spec.kind.trains and spec.profile.steps > 0 and len(launch.processes) > 1
    before = launch.repetition * launch.rounds
    return min(max(ABLATION_ROUNDS - before, 0), launch.rounds) if wanted else 0


def estimate_s(plan: Plan, spec: JobSpec) -> float:
    """Seconds that the run takes at the most, if its steps are short where nothing is known of them.

    0 for a program, of which nothing can be said.
    """
    if plan.budget_s is not None:
        return max(plan.budget_s, sum(_launch_s(plan, spec, x) for x in plan.launches if x.repetition == 0))
    if spec.kind.runs_program:
        return 0.0
    return sum(_launch_s(plan, spec, launch) for launch in plan.launches)


@dataclass(frozen=True)
class Earlier:
    """A run whose variants were launched several times."""

    path: Path
    shared_percent: float | None
    """Standard deviation of the difference of two variants between launches that run both."""
    apart_percent: float | None
    """Standard deviation of that difference where each variant has launches of its own."""
    launch_s: float | None
    """The length of a launch after the first ones; `None` for another job's."""

    def scatter_percent(self, is_shared: bool) -> float | None:
        """The scatter over launches that variants share, or over launches of their own, which is larger."""
        return self.shared_percent if is_shared else self.apart_percent


@dataclass(frozen=True)
class Detectable:
    """The differences that the launches of a run can detect."""

    launches: int
    """The launches of each group that fit in the budget, or are planned."""
    is_shared: bool
    """Whether all variants are in the same launches, so that they can be compared within one."""
    percent: float | None = None
    """The smallest difference that is found with 80 % chance; `None`: not known, or none."""
    scatter_percent: float | None = None
    """The scatter of launches, in an earlier run."""
    enough_s: float | None = None
    """The time that the fewest launches for a verdict take."""

    @property
    def is_too_little(self) -> bool:
        return self.launches < LAUNCHES_TO_COMPARE


def detectable(plan: Plan, spec: JobSpec, earlier: Earlier | None) -> Detectable | None:
    """The differences that a run can detect, as far as that is known before; `None`: it compares nothing."""
    first, *others = plan.variants
    if not (others and spec.kind.is_ranked and all(other.same_task(first) for other in others)):
        return None
    groups = _groups_that_count(plan)
    launches = sum(launch.group in groups for launch in plan.launches) // len(groups)
    enough_s = None
    if plan.budget_s is not None and (repetition_s := _repetition_s(plan, spec, earlier)):
        enough_s = LAUNCHES_TO_COMPARE * repetition_s * _shortest(plan, spec)
        fit = max(1, int(plan.budget_s / repetition_s))
        launches = min(launches, max(fit, LAUNCHES_TO_COMPARE) if enough_s <= plan.budget_s else fit)
    scatter = earlier.scatter_percent(is_shared=len(groups) == 1) if earlier is not None else None
    if scatter is None:
        return Detectable(launches, len(groups) == 1, enough_s=enough_s)
    from gpurun.launcher.stats.estimates import detectable_percent  # loads numpy

    percent = detectable_percent(scatter, launches)
    return Detectable(launches, len(groups) == 1, percent, scatter, enough_s)


def _groups_that_count(plan: Plan) -> set[str]:
    """The groups whose launches are compared: all but those whose variants run together in a larger one."""
    members = {launch.group: {*launch.variants} for launch in plan.launches}
    return {
        group
        for group, variants in members.items()
        if not any(variants < other for other in members.values())
    }


def _shortest(plan: Plan, spec: JobSpec) -> float:
    """Share of a launch's time that it takes with a single round."""
    if spec.kind.runs_program:
        return 1.0
    later = [launch for launch in plan.launches if launch.repetition == 1]
    shortest = (_launch_s(plan, spec, replace(launch, rounds=1)) for launch in later)
    return sum(shortest) / sum(_launch_s(plan, spec, launch) for launch in later)


def _repetition_s(plan: Plan, spec: JobSpec, earlier: Earlier | None) -> float:
    """Seconds for a launch of each group, by an earlier run of the job, else if steps are short."""
    later = [launch for launch in plan.launches if launch.repetition == 1]
    if earlier is not None and earlier.launch_s is not None:
        return earlier.launch_s * len(later)
    return 0.0 if spec.kind.runs_program else sum(_launch_s(plan, spec, launch) for launch in later)


def _launch_s(plan: Plan, spec: JobSpec, launch: Launch) -> float:
    kind = accelerator_of(launch.processes[0].devices[0])
    num_variants = len(launch.variants)
    has_baseline = plan.baseline in launch.variants  # measured twice in every round
    blocks = launch.rounds * (num_variants + has_baseline) + ablation_rounds(spec, launch) * num_variants / 2
    extra_steps = spec.profile.steps + spec.gradient_check if launch.repetition == 0 else 0
    steps = num_variants * (max(spec.steps.warmup, _STEADY_STEPS) + extra_steps)
    block_s = max(_BLOCK_OVERHEAD * kind.block_ms / 1e3, plan.step_s)
    start_s = kind.start_s * (_LATER_START if launch.repetition else 1.0)
    return plan.crowding * (start_s + blocks * block_s + steps * max(_STEP_S, plan.step_s))
