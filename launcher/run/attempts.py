"""Which launches of a run were made, and what is still missing, read from the run directory."""

from collections.abc import Sequence

from gpurun.launcher.compare.figures.recorded import round_times
from gpurun.launcher.plan.model import Launch, Plan
from gpurun.launcher.run.decisions import Remaining
from gpurun.launcher.rundir.files import RunDir
from gpurun.launcher.rundir.records import RoundTime

UNRANKED = ("oom", "failed", "timeout", "skipped")


def attempt_id(launch: Launch, attempt: int) -> str:
    """`03-ddp-2`, then `03-ddp-2~2`, …: a launch that ended early starts again under a new name."""
    return launch.id if attempt == 1 else f"{launch.id}~{attempt}"


def attempts(run: RunDir, launch: Launch) -> list[str]:
    """Ids of the attempts of a launch that were started, in order."""
    found: list[str] = []
    while run.launch_config(attempt := attempt_id(launch, len(found) + 1)).exists():
        found.append(attempt)
    return found


def num_restarts(run: RunDir, launch: Launch) -> int:
    """How often a launch has been started again after a failure."""
    return sum(restart.launch.partition("~")[0] == launch.id for restart in run.read_restarts())


def finished_variants(run: RunDir, launch: Launch) -> set[str]:
    """Variants that an attempt of this launch measured completely."""
    finished: set[str] = set()
    for attempt in attempts(run, launch):
        events = run.read_events(attempt)
        if events and events[-1].stage == "done":
            finished |= run_variants(run, attempt)
    return finished


def remaining(run: RunDir, plan: Plan, launch: Launch) -> Remaining:
    """What is still missing of a launch; the baseline runs next to it where it can: rounds are pairs."""
    missing = missing_variants(run, launch)
    status = run.read_status(plan.baseline)
    usable = status is None or status.status in ("ok", "unsteady")
    variants = [v for v in launch.variants if v in missing or (v == plan.baseline and usable)]
    rounds = launch.rounds - rounds_done(run, plan, launch, missing)
    started, restarts = len(attempts(run, launch)), num_restarts(run, launch)
    return Remaining(tuple(missing), tuple(variants), rounds, started, restarts)


def missing_variants(run: RunDir, launch: Launch) -> list[str]:
    """Variants of a launch that are still to be measured, in the plan's order."""
    finished = finished_variants(run, launch)
    lost = {v for v in launch.variants if (s := run.read_status(v)) and s.status in UNRANKED}
    return [v for v in launch.variants if v not in finished | lost]


def rounds_done(run: RunDir, plan: Plan, launch: Launch, variants: Sequence[str]) -> int:
    """Rounds of a launch, over all its attempts, that every rank has completed for all of `variants`."""
    names = set(attempts(run, launch))
    counts = []
    for variant in variants:
        times = variant_rounds(run, plan, variant)
        counts.append(sum(time.launch in names for time in times))
    return min(counts, default=0)


def variant_rounds(run: RunDir, plan: Plan, variant_id: str) -> tuple[RoundTime, ...]:
    """Complete rounds of a variant so far, over all launches."""
    return round_times(run.read_steps(variant_id), plan.variant(variant_id).world_size, "timed")


def run_variants(run: RunDir, attempt: str) -> set[str]:
    """Variants that an attempt was to measure."""
    return {variant.id for variant in run.read_launch_head(attempt).variants}
