"""How the variants of an attempt ended, written to the run directory."""

from collections.abc import Sequence
from typing import Literal

from gpurun.launcher.jobfile.settings import SETTINGS
from gpurun.launcher.plan.model import Launch, Plan, Variant
from gpurun.launcher.run.attempts import attempts, finished_variants, run_variants
from gpurun.launcher.run.decisions import Ended, Settle
from gpurun.launcher.rundir.files import RunDir, read_json, write_json
from gpurun.launcher.rundir.records import VariantFacts, VariantStatus


def record_outcomes(run: RunDir, plan: Plan, launch: Launch, attempt: str, settle: Settle) -> tuple[str, ...]:
    """Writes how the variants of an attempt ended; variants of other launches that are skipped therefore."""
    for variant in finished_variants(run, launch):
        facts = merged_facts(run, plan, variant)
        write_json(run.facts(variant), facts)
        write_json(run.status(variant), status_of(facts))
    skipped = untried_with_same_model(run, plan, settle.lost) if settle.skips_same_failure else ()
    for variant in (*settle.lost, *skipped):
        write_json(run.status(variant), lost_status(run, attempt, settle.ended))
    return skipped


def untried_with_same_model(run: RunDir, plan: Plan, lost: Sequence[str]) -> tuple[str, ...]:
    """Other variants that have not been tried and build the same model as one of `lost`."""
    models = [model_of(plan.variant(variant)) for variant in lost]
    untried = [v for v in plan.variants if run.read_status(v.id) is None and not run.read_steps(v.id)]
    return tuple(v.id for v in untried if model_of(v) in models and v.id not in lost)


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
