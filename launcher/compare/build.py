"""Run directory in, `Comparison` out. Works at any time, also on a run that is not finished."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from launcher.compare.difference import Differences, planned_looks
from launcher.compare.figures import (
    exposed_comm,
    launch_medians_ms,
    noise,
    rank_figures,
    scaling_efficiency,
    step_time,
)
from launcher.compare.findings import findings
from launcher.compare.measured import Measured, read_measured
from launcher.compare.model import Comparison, VariantResult
from launcher.compare.notes import notes
from launcher.compare.standings import standings
from launcher.compare.summary import summary
from launcher.compare.traced import read_traced
from launcher.plan.model import Plan
from launcher.plan.nodes import Node
from launcher.rundir import RunDir, read_json

SCHEMA = 1


def compare_run(run: RunDir) -> Comparison:
    """Everything that the run has found out so far.

    Raises:
        MachineError: the plan can't be read: this is no run directory, or one that was never started.
    """
    plan = read_json(run.plan, Plan)
    job = read_mapping(run.spec)
    looks = planned_looks(plan, stops_early(job))
    measured = {variant.id: read_measured(run, plan, variant) for variant in plan.variants}
    differences = Differences(measured, plan.baseline, looks)
    results = tuple(variant_result(run, one, differences, plan.nodes) for one in measured.values())
    ranking = standings(results, differences)
    return Comparison(
        schema=SCHEMA,
        name=plan.name,
        job=job,
        host=read_mapping(run.host),
        baseline=plan.baseline,
        ci_level=1 - looks[-1][1] if len(plan.variants) > 1 else None,
        noise=noise(measured[plan.baseline]),
        variants=results,
        fastest=ranking.leader.id if ranking else None,
        summary=summary(ranking, plan.baseline),
        notes=notes(plan, measured),
        complete=all(is_complete(one, plan) for one in measured.values()),
    )


def variant_result(
    run: RunDir, measured: Measured, differences: Differences, nodes: Sequence[Node] = ()
) -> VariantResult:
    """One variant's entry; a variant that failed keeps the times that it has, but isn't compared."""
    variant, status, facts = measured.variant, measured.status, measured.facts
    step_ms = step_time(measured)
    traced = read_traced(run, variant.id)
    ranks = rank_figures(run, measured, traced, nodes)
    found = findings(measured, ranks, step_ms.median if step_ms else None)
    return VariantResult(
        id=variant.id,
        strategy=variant.strategy,
        devices=variant.devices,
        split=variant.split,
        split_name=variant.split_name,
        global_batch=variant.global_batch,
        precision=variant.precision,
        accumulate=variant.accumulate,
        varied=variant.varied,
        status=status.status,
        reason=status.reason,
        log=status.log,
        rounds=len(measured.timed),
        launches=len(measured.launch_medians_ns),
        step_ms=step_ms,
        samples_per_s=1e3 * variant.global_batch / step_ms.median if step_ms else None,
        vs_baseline=differences.vs_baseline(variant.id),
        scaling_efficiency=scaling_efficiency(measured, differences.measured.values()),
        gradient_error=facts.gradient_error,
        gradient_reference=facts.gradient_reference,
        exposed_comm_ms=exposed_comm(ranks),
        warnings=(*facts.warnings, *(traced.warnings if traced else ()), *found),
        ranks=ranks,
        launch_medians_ms=launch_medians_ms(measured),
    )


def stops_early(job: Mapping[str, Any]) -> bool:
    """The job's `steps.early_stop`; true, as the job file's default, where a run has no job data."""
    steps = job.get("steps")
    return bool(steps.get("early_stop", True)) if isinstance(steps, Mapping) else True


def is_complete(measured: Measured, plan: Plan) -> bool:
    """Whether nothing is left to measure: the variant is closed and, unless it failed, in every launch."""
    planned = sum(measured.variant.id in launch.variants for launch in plan.launches)
    return measured.finished and (not measured.counts or len(measured.launch_medians_ns) == planned)


def read_mapping(path: Path) -> dict[str, Any]:
    """A file's JSON object; empty where there is no file."""
    return read_json(path, dict[str, Any]) if path.exists() else {}
