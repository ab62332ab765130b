"""Sentences of the tab, from a comparison's figures and its own explanations; nothing is computed again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gpurun.launcher.compare.figures.ranks import TRACED, RankFigures, slowest_rank
from gpurun.launcher.compare.label import variant_label
from gpurun.launcher.compare.model import Comparison, VariantResult
from gpurun.launcher.compare.variant_causes import cause, is_far_from_timed, loss_of
from gpurun.launcher.findings.finding import below_its_name
from gpurun.launcher.report.footnotes import difference_texts, interval_text
from gpurun.launcher.report.metrics import REST, parts_ms, timed_parts
from gpurun.launcher.report.terminal.table import balanced_lines
from gpurun.launcher.rundir.records import NO_TRACE
from gpurun.launcher.tensorboard_plugin.logdir import Listed, outline, read_comparison, read_plan
from gpurun.launcher.tensorboard_plugin.timeline.format import short_name
from gpurun.launcher.units import format_ms, format_number, plural

HIDDEN_PARTS = "Transfer, wait and copy count only where no compute hides them."
TRACED_BARS = (
    f"Each bar is a rank's traced step: the mean over the steps with the least interference. {HIDDEN_PARTS}"
)
RANKED_BARS = f"Bars: the slowest rank's step as timed, in the proportions of its traced step. {HIDDEN_PARTS}"
"""The bars of the ranking, of variants with traces."""
TIMED_BARS = "Without a trace of such steps, bars are the timed phases, communication and waiting included."
"""The bars of variants without traces."""
RANK_ROWS = (
    "One row per rank, sorted by exposed wait, most first; steps across. Right: the mean by rank, ms. "
    "A click opens that rank next to the slowest one."
)
"""How a variant of many ranks is drawn."""
RANKED_LATER = "Variants that run in turns are ranked together, when their launch is done."
NOT_RANKED_YET = "Nothing can be ranked yet."
NAMED_FROM = 0.005
"""A part that is a smaller share of the step has no place in its sentence."""


def explanation(variant: VariantResult, comparison: Comparison) -> str | None:
    """The sentence next to a variant's bars, in ms of its traced steps; `None` without traces."""
    found = (each for each in comparison.about(variant.id) if each.level == "cause" and each.ranks)
    if known := next(found, None):
        return below_its_name(known).sentence
    best = next((each for each in comparison.variants if each.id == comparison.leader), None)
    loss = loss_of(variant, best if best is not None and best.id != variant.id else None)
    return below_its_name(cause(loss, variant)).sentence if loss else _sentence(_all_compute(variant))


def _all_compute(variant: VariantResult) -> str | None:
    slowest = slowest_rank(variant.ranks)
    if slowest is None or slowest.span_ms is None or slowest.compute_ms is None:
        return None
    return (
        f"{format_ms(slowest.compute_ms)} of {format_ms(slowest.span_ms)} ms are compute;"
        f" no other part is significant ({_traced_steps(slowest.span_ms, variant)})"
    )


def _traced_steps(span_ms: float, variant: VariantResult) -> str:
    """`mean of 8 of 16 traced steps`, with the timed step where it is far from the traced one."""
    steps, timed = variant.traced_steps, variant.step_ms.estimate if variant.step_ms else span_ms
    of = f"mean of {steps.used} of {plural(steps.recorded, 'traced step')}" if steps else "in traced steps"
    return f"{of}; timed ones take {format_ms(timed)} ms" if is_far_from_timed(span_ms, timed) else of


def _sentence(text: str | None) -> str | None:
    return f"{text[0].upper()}{text[1:]}." if text else None


def step_sentence(variant: VariantResult) -> str | None:
    """The parts of the slowest rank's step; `None` where none was timed."""
    if variant.step_ms is None:
        return None
    label, step_ms = variant_label(variant), variant.step_ms.estimate
    rank = slowest_rank(variant.ranks)
    parts = _traced_parts(rank) if rank is not None else {}
    total_ms = sum(parts.values())
    if rank is None or not total_ms:
        return f"{label} takes {format_ms(step_ms)} ms a step{_longest_phase(rank, step_ms)}."
    name, lost_ms = max(list(parts.items())[1:], key=lambda part: part[1])
    text = f"{label} computes for {format_number(100 * parts['compute'] / total_ms, 0)} % of its step"
    if lost_ms >= NAMED_FROM * total_ms:
        lost = f"{name.replace('_', ' ')}, {format_ms(lost_ms)} of {format_ms(total_ms)} ms"
        text += f"; the largest other part is {lost}"
    return f"{text} ({_traced_steps(rank.span_ms or total_ms, variant)})."


def _longest_phase(rank: RankFigures | None, step_ms: float) -> str:
    """`, 50.4 ms of it in forward on rank 0`; empty where no phase was timed."""
    parts = timed_parts(rank, step_ms) if rank is not None else {}
    if rank is None or not parts:
        return ""
    name, ms = max(parts.items(), key=lambda part: part[1])
    where = name.replace("_", " ")
    return f", {format_ms(ms)} ms of it {where if name == REST else f'in {where}'} on rank {rank.rank}"


def _traced_parts(rank: RankFigures) -> Mapping[str, float]:
    """The parts of a traced step in ms, compute first; empty without a trace."""
    return {name: max(0.0, ms) for name, ms in parts_ms(rank).items()} if rank.span_ms else {}


def untraced(variant: VariantResult, comparison: Comparison) -> str | None:
    """Why a program that was to be traced has no trace; `None` of other variants."""
    texts = (str(each.figures.get("found")) for each in comparison.about(variant.id))
    found = next((text for text in texts if text.startswith(NO_TRACE)), None)
    return _sentence(found.removeprefix(NO_TRACE)) if found else None


def difference_interval(variant: VariantResult) -> str:
    """`± 0.8`, in percentage points; `+29.1 to +181.6`, in percent, where the terminal shows both ends."""
    text, difference = difference_texts(variant.vs_baseline)[1].plain, variant.vs_baseline
    if " " in text and difference is not None and difference.ci is not None:
        return interval_text(difference.ci)
    return f"± {text}" if text else ""


def far_note(variant: VariantResult, comparison: Comparison) -> str | None:
    """The report's finding that traced steps aren't like those that rank the variant; `None` without one."""
    about = (each for each in comparison.about(variant.id) if each.figures.get("case") in TRACED)
    texts = (each.text.removeprefix(str(each.figures.get("of"))) for each in about)
    return next((f"{variant_label(variant)}: {text}." for text in texts), None)


def system_line(host: Mapping[str, Any], comparison: Comparison | None) -> str:
    """`2 × NVIDIA H200 · bf16 · torch 2.13`."""
    gpus = [str(gpu.get("name")) for gpu in host.get("gpus") or [] if isinstance(gpu, Mapping)]
    names = [f"{gpus.count(name)} × {name}" for name in dict.fromkeys(gpus)]
    if not names and isinstance(host.get("cpu_model"), str):
        names = [f"{host.get('cpu_cores')} × {host['cpu_model']}"]
    variants = comparison.variants if comparison else ()
    precisions = sorted({variant.precision for variant in variants if variant.precision})
    versions = host.get("versions")
    torch = versions.get("torch") if isinstance(versions, Mapping) else None
    return " · ".join([*names, *precisions, *([f"torch {torch}"] if torch else [])])


def cost_sentences(variant: VariantResult, variants: Sequence[VariantResult]) -> list[str]:
    """Prediction, measurement and what other splits would take; nothing of a split that isn't balanced."""
    if variant.balanced is None:
        return []
    # The others only lend their names.
    named = [variant, *(replace(other, balanced=None) for other in variants if other.id != variant.id)]
    num_above = 2 + len(variant.balanced.devices)  # the heading, and the table with its header
    return [line.strip() for line in balanced_lines(named)[num_above:]]


NOUNS = {"ops": "operator", "kernels": "kernel", "modules": "module"}
WAITING_FROM = 0.05
"""Share of a collective's time from which on its waiting is mentioned."""
_MANY = ("collectives", "copies")

Answer = Mapping[str, Any]


@dataclass(frozen=True)
class ShownVariant:
    """The name of a variant in the sentences, how long its timed steps are, and its slowest rank."""

    label: str
    step_ms: float | None = None
    slowest_rank: int | None = None


def shown_as(listed: Listed, variant: str) -> ShownVariant:
    """A variant that the run has, as sentences call it; a directory of traces by its title."""
    if listed.kind == "traces":
        return ShownVariant(listed.title(outline(listed).name))
    if comparison := read_comparison(listed):
        result = next(each for each in comparison.variants if each.id == variant)
        step_ms = result.step_ms.estimate if result.step_ms else None
        slowest = slowest_rank(result.ranks)
        return ShownVariant(variant_label(result), step_ms, slowest.rank if slowest else None)
    plan = read_plan(listed)
    return ShownVariant(
        next(variant_label(each) for each in (plan.variants if plan else ()) if each.id == variant)
    )


def operators_said(answer: Answer, shown: ShownVariant, against: ShownVariant | None) -> dict[str, str]:
    """The headline of the table, and how its figures were come by.

    Args:
        answer: the table.
        shown: whose operators it has.
        against: whose it compares them with.
    """
    return {
        "sentence": _most_time(answer, shown.label, against),
        "details": f"{_how(answer)}{_as_timed(answer, shown, against)}",
    }


def _most_time(answer: Answer, label: str, against: ShownVariant | None) -> str:
    """The part that takes most, or most of the difference."""
    rows = [row for row in answer["rows"] if row["name"] is not None]
    noun = NOUNS[answer["kind"]]
    if not any(row["named"] for row in rows):
        return f"{label}: the trace names no {noun}s."
    if against and answer["against_step_ms"] is not None:
        return _difference(answer, rows, label, against.label)
    top = max(rows, key=lambda row: row["self_ms"])
    if not top["self_ms"] > 0:
        return f"{label}: no {noun} takes any time in the trace."
    many = not top["named"] and top["name"].startswith(_MANY)
    whole = "step" if answer["steps"] else "trace"
    waits = top["wait_ms"] >= WAITING_FROM * top["self_ms"]
    waiting = f", {format_ms(top['wait_ms'])} ms of it waiting" if waits else ""
    takes = f"{label}: {_row_name(top)} {'take' if many else 'takes'} {format_ms(top['self_ms'])}"
    if answer["rest_ms"] > top["self_ms"]:
        rest = format_number(100 * answer["rest_ms"] / answer["step_ms"], 0)
        idle = f"no {noun} runs for {format_ms(answer['rest_ms'])} of {format_ms(answer['step_ms'])} ms"
        most = f"{_row_name(top)} {'take' if many else 'takes'} most of the rest"
        return f"{label}: {idle}, {rest} % of the {whole}; {most}, {format_ms(top['self_ms'])} ms{waiting}."
    if top["self_ms"] > answer["step_ms"]:
        return f"{takes} ms side by side, in a {whole} of {format_ms(answer['step_ms'])} ms{waiting}."
    share = f"{format_number(top['share_percent'], 0)} % of the {whole}"
    return f"{takes} of {format_ms(answer['step_ms'])} ms, {share}{waiting}."


def _difference(answer: Answer, rows: Sequence[Answer], label: str, other: str) -> str:
    longer_ms = answer["step_ms"] - answer["against_step_ms"]
    sign = 1 if longer_ms >= 0 else -1
    main = max(rows, key=lambda row: sign * row["difference_ms"])
    own_ms = sign * main["difference_ms"]
    share = f"; {_row_name(main)} alone {format_ms(own_ms)} ms" if own_ms > 0 else ""
    more = "more" if sign > 0 else "less"
    where = "in traced steps" if answer["steps"] else "over the whole trace"
    return f"{label} takes {format_ms(abs(longer_ms))} ms {more} than {other} {where}{share}."


def _row_name(row: Answer) -> str:
    return short_name(row["name"]) if row["named"] else str(row["name"])


def _how(answer: Answer) -> str:
    rank = f"rank {answer['slowest_rank']}"
    slowest = (
        f"{rank}, for which the others wait most" if answer["is_straggler"] else f"the slowest rank, {rank}"
    )
    counts = f"Self time counts on {slowest}" if len(answer["ranks"]) > 1 else "Self time"
    of, whole = f"mean of {plural(answer['steps'], 'traced step')}", "step"
    if not answer["steps"]:
        of, whole = "over the whole trace, which has no step markers", "trace"
    return f"{counts}, {of}; collectives count only their exposed part. Columns add up to the {whole}."


def _as_timed(answer: Answer, shown: ShownVariant, against: ShownVariant | None) -> str:
    """The ranking's step times, next to those of the trace."""
    if shown.step_ms is None:
        return ""
    other_ms = against.step_ms if against and answer["against_step_ms"] is not None else None
    other = f" against {format_ms(other_ms)} ms" if other_ms is not None else ""
    return f" As timed, a step takes {format_ms(shown.step_ms)} ms{other}."
