"""Answers of the routes about runs, as plain data; see README.md. The HTML report is made from them too."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from gpurun.launcher.compare.figures.ranks import slowest_rank
from gpurun.launcher.compare.label import variant_label
from gpurun.launcher.compare.model import Comparison, VariantResult
from gpurun.launcher.findings.finding import screen_of
from gpurun.launcher.machine.accelerators import recorded_gpus
from gpurun.launcher.plan.model import Identity
from gpurun.launcher.report.footnotes import detail_lines, with_next_step
from gpurun.launcher.report.markdown import lines_after
from gpurun.launcher.report.metrics import PARTS, PHASES, answer_figures, described, figures_of, timed_parts
from gpurun.launcher.report.terminal.improve import answer
from gpurun.launcher.report.terminal.table import KNEE, NO_KNEE, curve_tables
from gpurun.launcher.rundir.improvement import Improvement
from gpurun.launcher.rundir.paths import SELFTEST, bytes_below, is_name
from gpurun.launcher.rundir.records import MEASURED
from gpurun.launcher.rundir.store import source_of
from gpurun.launcher.strategies import strategy_named
from gpurun.launcher.tensorboard_plugin.answers.sentences import (
    HIDDEN_PARTS,
    RANK_ROWS,
    RANKED_BARS,
    TIMED_BARS,
    TRACED_BARS,
    cost_sentences,
    difference_interval,
    explanation,
    far_note,
    step_sentence,
    system_line,
    untraced,
)
from gpurun.launcher.tensorboard_plugin.logdir import (
    TRACES,
    Listed,
    Listing,
    Status,
    changed_s,
    find_all,
    improvement_file,
    outline,
    read_comparison,
    read_host,
    read_improvement,
    read_plan,
    status,
    variant_steps,
    version,
)
from gpurun.launcher.tensorboard_plugin.timeline.format import UnreadableFile

RELOAD_S = 5
OUTSIDE = (
    "is a link that leads out of the log directory or to nothing, so it isn't opened; "
    "copy the trace into it, or start TensorBoard on a directory that holds both"
)
OTHER = "Another version of gpurun compared these variants."
MAX_RUNS = 500
"""The limit of a list; of a longer one the newest are named."""


def runs_answer(listing: Listing) -> dict[str, Any]:
    """All runs, the newest first."""
    found = sorted(listing.all().values(), key=changed_s, reverse=True)
    runs = [_brief(listed) for listed in found[:MAX_RUNS]]
    return {
        "version": version(runs),
        "logdir": listing.logdir,
        "reload_s": RELOAD_S,
        "truncated": len(found) > MAX_RUNS,
        "runs": runs,
    }


@dataclass(frozen=True)
class PastRun:
    """A run as `gpurun runs` lists it."""

    run: str
    """The path or URL that other commands take."""
    job: str
    status: Literal[Status, "failed"]
    """`failed`: it ended, and no variant has figures."""
    changed_s: float
    """When it was last written, in unix time."""
    num_bytes: int
    headline: str | None
    """The answer in one sentence, as in every report; `None` before anything is compared."""


def past_runs(directories: Iterable[Path]) -> list[PastRun]:
    """The runs in these directories, or that these are, the newest first; each once.

    The runs of which a self-test consists compare nothing that a user has asked for; those of a search of
    `gpurun improve` are one.
    """
    found = {listed.path: (place, listed) for place in directories for listed in find_all(place.resolve())}
    runs, searches = list[PastRun](), dict[Path, tuple[Improvement, list[tuple[Path, Listed]]]]()
    for place, listed in found.values():
        if listed.kind != "gpurun" or (listed.path.parent / SELFTEST).exists():
            continue
        if (search := read_improvement(listed)) is not None:
            searches.setdefault(listed.path.parent, (search, []))[1].append((place, listed))
        else:
            runs.append(_past(place, listed))
    runs += [_past_search(*search) for search in searches.values()]
    return sorted(runs, key=lambda run: run.changed_s, reverse=True)


def _past_search(found: Improvement, stages: Sequence[tuple[Path, Listed]]) -> PastRun:
    """A search of `gpurun improve`, with its answer."""
    place, listed = max(stages, key=lambda stage: changed_s(stage[1]))
    run = _past(place, listed)
    name = str(source_of(place / Path(listed.name).parent))
    return replace(
        run,
        run=name,
        job=found.name,
        status="done" if found.complete else "running" if run.status == "running" else "stopped",
        num_bytes=bytes_below(listed.path.parent),
        headline=answer(found, name)[0][1],
    )


def _past(place: Path, listed: Listed) -> PastRun:
    comparison = read_comparison(listed)
    headline, reason = _conclusion(listed, comparison)["headline"], _failure(comparison)
    return PastRun(
        run=str(source_of(place / listed.name)),
        job=outline(listed).name,
        status="failed" if reason is not None else status(listed),
        changed_s=changed_s(listed),
        num_bytes=bytes_below(listed.path),
        headline=f"{headline} {reason}" if reason else headline,
    )


def _failure(comparison: Comparison | None) -> str | None:
    """Why none of a run's variants has figures, the first line of the first reason; `None` where one has."""
    results = comparison.variants if comparison is not None and comparison.complete else ()
    if not results or any(result.status in MEASURED or result.probe is not None for result in results):
        return None
    reasons = (result.reason for result in results if result.status != "skipped" and result.reason)
    return next(reasons, "").partition("\n")[0]


def _brief(listed: Listed) -> dict[str, Any]:
    return {
        "name": listed.name,
        "title": listed.title(outline(listed).name),
        "kind": listed.kind,
        "status": status(listed),
        "mtime_s": changed_s(listed),
        "version": run_version(listed),
    }


def run_version(listed: Listed) -> str:
    """Another one whenever `run` would answer otherwise."""
    run = listed.run
    if listed.kind == "traces":
        return version(listed.trace_names, files=listed.traces_of(TRACES))
    directories = sorted((run.path / "variants").glob("*"))
    files = (run.comparison, run.plan, run.host, improvement_file(listed), *directories)
    return version(status(listed), files=files)


def run_answer(listed: Listed, comparison: Comparison | None = None) -> dict[str, Any]:
    """One run with all its variants.

    Args:
        comparison: what the run found out; by default what its `comparison.json` says.
    """
    comparison = comparison or read_comparison(listed)
    findings = comparison.findings if comparison and comparison.is_current else ()
    host = read_host(listed)
    return {
        "version": run_version(listed),
        "name": listed.name,
        "title": listed.title(outline(listed).name),
        "kind": listed.kind,
        "status": status(listed),
        "comparison": comparison,
        "host": {**host, "gpus": recorded_gpus(host)} if "gpus" in host else host,
        "system": system_line(host, comparison),
        **_conclusion(listed, comparison),
        "alerts": screen_of(findings, len(findings)).dangers,
        "facts": detail_lines(comparison) if comparison else [],
        "knee": {"some": KNEE, "none": NO_KNEE},
        "compare": comparison.variants[0].kind.example if comparison and comparison.variants else None,
        "bars": {
            "traced": TRACED_BARS,
            "ranked": RANKED_BARS,
            "timed": TIMED_BARS,
            "ranks": RANK_ROWS,
            "hidden": HIDDEN_PARTS,
            "meanings": {**PHASES, **{name: meaning for name, (meaning, _) in PARTS.items()}},
        },
        "metrics": described(figures_of(comparison.variants)) if comparison else [],
        "variants": variants(listed, comparison),
        "improvement": _improvement(listed),
    }


def _improvement(listed: Listed) -> dict[str, Any] | None:
    """The result of `gpurun improve`, of which this run is a part, in the words of the terminal."""
    found = read_improvement(listed)
    if found is None:
        return None
    (_, headline), *rest = answer(found, str(listed.path.parent))
    return {
        "headline": headline,
        "details": [[label, text] for label, text in rest if text],
        "remedies": found.remedies,
        "diff": found.diff,
        "notes": found.notes,
    }


def _conclusion(listed: Listed, comparison: Comparison | None) -> dict[str, str | None]:
    """The sentences of every report; not those of another gpurun, which the terminal no longer shows."""
    if comparison is None:
        return {"headline": None, "details": None}
    if not comparison.is_current:
        return {
            "headline": OTHER,
            "details": f"`gpurun report {shlex.quote(str(listed.path))}` compares them with this version.",
        }
    is_stopped = status(listed) == "stopped"
    shown = with_next_step(comparison, listed.path.name) if is_stopped else comparison
    after = lines_after(screen_of(shown.findings))
    return {"headline": comparison.headline, "details": "\n".join(after)}


def steps_answer(listed: Listed, chosen: Sequence[str]) -> dict[str, Any]:
    """Every timed step of the variants chosen, thinned out."""
    return {"variants": {variant: variant_steps(listed, variant) for variant in chosen}}


def variants(listed: Listed, comparison: Comparison | None) -> list[dict[str, Any]]:
    """The variants in the plan's order, also those that aren't measured yet."""
    if listed.kind == "traces":
        return [_of_traces(listed)]
    plan = read_plan(listed)
    if comparison is not None:
        figures = answer_figures(comparison.variants)
        return [
            {
                **_entry(listed, each, explanation(each, comparison)),
                "figures": figures[each.id],
                "difference_interval": difference_interval(each),
                "curve_tables": curve_tables(each, is_alone=len(comparison.variants) == 1),
                "cost_sentences": cost_sentences(each, comparison.variants),
                "step_sentence": step_sentence(each),
                "far_note": far_note(each, comparison),
                "untraced": untraced(each, comparison),
                "slowest_rank": slowest.rank if (slowest := slowest_rank(each.ranks)) else None,
                "timed_parts": _timed_parts(each),
            }
            for each in comparison.variants
            if is_name(each.id)
        ]
    return [_entry(listed, each, None) for each in (plan.variants if plan else ()) if is_name(each.id)]


def _timed_parts(variant: VariantResult) -> dict[str, Mapping[str, float]]:
    """The phases of the step in ms by rank, of those without a trace."""
    step_ms = None if variant.step_ms is None else variant.step_ms.estimate
    untraced = (rank for rank in variant.ranks if not rank.span_ms)
    return {str(rank.rank): parts for rank in untraced if (parts := timed_parts(rank, step_ms))}


def variant_ids(listed: Listed) -> list[str]:
    """The ids that a request may name."""
    if listed.kind == "traces":
        return [TRACES]
    comparison, plan = read_comparison(listed), read_plan(listed)
    source: Sequence[Identity] = comparison.variants if comparison else plan.variants if plan else ()
    return [each.id for each in source if is_name(each.id)]


_UNTOLD: Mapping[str, Any] = {
    "figures": {},
    "difference_interval": "",
    "curve_tables": [],
    "cost_sentences": [],
    "step_sentence": None,
    "far_note": None,
    "untraced": None,
    "slowest_rank": None,
    "timed_parts": {},
}
"""The fields of a variant in place of a comparison's, where there is none."""


def _entry(listed: Listed, variant: Identity, explained: str | None) -> dict[str, Any]:
    ended = (variant.status, variant.reason) if isinstance(variant, VariantResult) else ("planned", None)
    return {
        "id": variant.id,
        "label": variant_label(variant),
        "strategy": variant.strategy,
        "process_per_device": strategy_named(variant.strategy).process_per_device,
        "devices": variant.devices,
        "split": variant.split,
        "precision": variant.precision,
        "status": ended[0],
        "reason": ended[1],
        "explanation": explained,
        **_UNTOLD,
        "traces": _traces(listed, variant.id),
    }


def _of_traces(listed: Listed) -> dict[str, Any]:
    """The one variant of a directory of traces."""
    unknown: Mapping[str, Any] = dict.fromkeys(("strategy", "precision", "reason", "explanation"))
    return {
        "id": TRACES,
        "label": listed.path.name,
        **unknown,
        "process_per_device": True,
        "devices": [],
        "split": [],
        **_UNTOLD,
        "status": "ok",
        "traces": _traces(listed, TRACES),
        "problems": unopened(listed, TRACES),
    }


def unopened(listed: Listed, variant: str) -> list[UnreadableFile]:
    """Traces of the variant that aren't opened, and why."""
    return [UnreadableFile(path.name, None, OUTSIDE) for path in listed.outside(variant)]


def _traces(listed: Listed, variant: str) -> list[dict[str, Any]]:
    return [
        {
            "rank": rank,
            "file": path.relative_to(listed.path).as_posix(),
            "bytes": path.stat().st_size,
        }
        for path, rank in listed.traces_of(variant).items()
    ]
