"""Which launches of a run were made, and what is still missing, read from the run directory."""

from collections.abc import Sequence
from typing import Literal

from gpurun.launcher.compare.figures.rounds import round_times
from gpurun.launcher.jobfile.settings import SETTINGS
from gpurun.launcher.plan.model import Launch, Plan, Variant
from gpurun.launcher.run.decisions import Ended
from gpurun.launcher.rundir.files import RunDir, read_json
from gpurun.launcher.rundir.records import RoundTime, VariantFacts, VariantStatus

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


def untried_with_same_model(run: RunDir, plan: Plan, variants: Sequence[str]) -> list[str]:
    """Variants that have not been tried and build the same model as one of `variants`."""
    models = [model_of(plan.variant(variant)) for variant in variants]
    return [
        other.id
        for other in plan.variants
        if model_of(other) in models and run.read_status(other.id) is None and not run.read_steps(other.id)
    ]


def model_of(variant: Variant) -> tuple[object, ...]:
    """Everything that a workload's `build` may depend on, except its processes."""
    return tuple(getattr(variant, name) for name, one in SETTINGS.items() if one.builds_model)


def merged_facts(run: RunDir, plan: Plan, variant_id: str) -> VariantFacts:
    """What all launches found out about a variant; unsteady if it was in more than half of them."""
    found = []
    for launch in plan.launches:
        for attempt in attempts(run, launch):
            path = run.launch_facts(attempt)
            facts = read_json(path, dict[str, VariantFacts]) if path.exists() else {}
            found += [facts.get(variant_id)] if variant_id in run_variants(run, attempt) else []
    known = [facts for facts in found if facts is not None]
    checked = next((facts for facts in known if facts.gradient_reference), VariantFacts())
    unsteady = [facts.unsteady for facts in known if facts.unsteady]
    return VariantFacts(
        gradient_error=checked.gradient_error,
        gradient_reference=checked.gradient_reference,
        warnings=tuple(dict.fromkeys(w for facts in known for w in facts.warnings)),
        unsteady=unsteady[0] if 2 * len(unsteady) > len(found) else None,
        flops_per_sample=next((f.flops_per_sample for f in known if f.flops_per_sample is not None), None),
        bytes_per_sample=next((f.bytes_per_sample for f in known if f.bytes_per_sample is not None), None),
        loss=next((f.loss for f in known if f.loss is not None), None),
    )


def run_variants(run: RunDir, attempt: str) -> set[str]:
    """Variants that an attempt was to measure."""
    return {variant.id for variant in run.read_launch_head(attempt).variants}


def status_of(facts: VariantFacts) -> VariantStatus:
    """The status of a variant that was measured completely."""
    if facts.unsteady:
        return VariantStatus("unsteady", facts.unsteady)
    return VariantStatus("ok")


def lost_status(run: RunDir, attempt: str, ended: Ended) -> VariantStatus:
    """The status of a variant that an attempt failed to measure."""
    failure, hang = ended.failure, ended.hang
    rank = failure.rank if failure else hang.rank if hang else None
    log = str(run.log(attempt, rank or 0).relative_to(run.path))
    if failure is None:
        where = f": {hang.headline}" if hang and hang.headline else ""
        return VariantStatus("timeout", f"{ended.late}{where}", attempt, rank, log)
    status: Literal["oom", "failed"] = "oom" if failure.kind == "oom" else "failed"
    return VariantStatus(status, failure.reason, attempt, rank, log)
