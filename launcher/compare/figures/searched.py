"""Trials and results of a search, from the files of its run."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from statistics import geometric_mean
from types import MappingProxyType
from typing import Any, Literal

from gpurun.launcher.compare.label import value_text
from gpurun.launcher.findings.finding import Finding, finding, reason
from gpurun.launcher.findings.finding_kinds import ADVICE
from gpurun.launcher.grouping import grouped
from gpurun.launcher.jobfile.yaml.describe import flow_text
from gpurun.launcher.rundir.files import RunDir
from gpurun.launcher.rundir.records import Effect, SearchRecord, SearchSpace, TimeChange, TrialRecord
from gpurun.launcher.units import (
    change_text,
    format_percent,
    format_percent_interval,
    interval_figures,
)

LEAST_SAVING = 0.01
"""Share of the memory from which one variant is called smaller than another."""
LEAST_GIB = 1 / 1024
"""The least difference of peaks that matters, in GiB."""


def smaller_than_all_before(peaks_gib: Sequence[float | None]) -> list[int]:
    """Which peaks, that of the fastest first, are smaller than all before; none if one is unknown."""
    front: list[int] = []
    least_gib = math.inf
    for number, peak_gib in enumerate(peaks_gib):
        if peak_gib is None:
            return []
        if not front or peak_gib < least_gib - max(LEAST_SAVING * least_gib, LEAST_GIB):
            front.append(number)
            least_gib = peak_gib
    return front


@dataclass(frozen=True)
class Tried:
    """A combination that `gpurun tune` has tried."""

    variant: str
    settings: Mapping[str, Any]
    trials: int
    step_ms: float | None
    """The geometric mean over its trials; `None`: one failed."""
    peak_gib: float | None
    """The peak of the fullest device in one step; `None` if unknown: of programs, and with `compile`."""
    label: str = ""
    status: Literal["ok", "oom", "failed", "timeout", "hung", "too large"] = "ok"
    """`too large`: it takes more memory than the job states."""
    reason: str | None = None
    """Why it failed."""
    ms_per_sample: float | None = None
    """The value that combinations are compared by where their global batches differ; else `None`."""

    @property
    def ms(self) -> float:
        """The value that combinations are compared by; infinite where a trial failed."""
        return self.ms_per_sample or self.step_ms or math.inf


@dataclass(frozen=True, kw_only=True)
class SearchResult(SearchSpace):
    """The result of a search, and its conclusions."""

    tried: int
    against_own: float | None
    """How many percent slower the best is than the job's own setting, negative where it is faster; interval
    and verdict are that variant's. `None` while that isn't known, or where it is that setting."""
    combinations: tuple[Tried, ...]
    """In the order in which they were tried."""
    is_over: bool
    """Whether the comparison of the best has begun."""
    summary: str
    front: tuple[str, ...] = ()
    """The combinations than which no other is both as fast and as small, by their trials, the fastest first;
    empty where global batches differ or the memory of one isn't known."""
    effects: tuple[Effect, ...] = ()
    """The effect of each value on the time of a step, or of a sample where global batches differ: at `best`,
    and on average."""


def search_result(
    run: RunDir,
    best: str | None,
    percent: float | None,
    behind: Mapping[str, TimeChange] = MappingProxyType({}),
) -> SearchResult | None:
    """The result of a search so far; `None` for a run that isn't a search.

    Args:
        run: whose directory has the records of the search.
        best: the leader of those that are compared at its end; `None` before any is measured.
        percent: how much slower that is than their baseline.
        behind: how much slower the others are than that, by the comparison at the end.
    """
    record = run.read_search()
    if record is None:
        return None
    tried = _tried(run.read_trials(), record.memory_gib)
    best = best or record.best
    effects = (
        replace(effect, at_best=effect.at_best and behind.get(effect.at_best.variant or "", effect.at_best))
        for effect in record.effects_at.get(best or "", ())
    )
    derived = {
        "best": best,
        "tried": len(tried),
        "against_own": percent if best != record.own else None,
        "combinations": tried,
        "is_over": bool(record.finalists),
        "summary": _summary(record, tried),
        "front": _front(tried),
        "effects": tuple(effects),
    }
    return SearchResult(**{each.name: getattr(record, each.name) for each in fields(SearchSpace)} | derived)


MOST_EFFECTS = 5
NOT_GIVEN = "not given"


def parts_of(settings: Mapping[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """Setting, part and value: a mapping has several parts, arguments too; the part of others is empty."""
    for name, value in settings.items():
        if name == "args":
            yield from ((name, option, text) for option, text in _options(value))
        elif isinstance(value, Mapping):
            yield from ((name, part, item) for part, item in value.items())
        else:
            yield name, "", value


def _options(args: Sequence[str]) -> list[tuple[str, str]]:
    """`--batch 64 --fast` as options with their values; what comes before the first one by its position."""
    found: list[tuple[str, str]] = []
    option = ""
    for position, word in enumerate(args):
        if word.startswith("-") and not word[1:2].isdigit():
            option, _, value = word.partition("=")
            found.append((option, value))
        elif option:
            found[-1] = (found[-1][0], f"{found[-1][1]} {word}".lstrip())
        else:
            found.append((str(position), word))
    return found


def key_of(setting: str, part: str) -> str:
    """`bucket_mb`, `params width`, `args --workers`."""
    return f"{setting} {part}".rstrip()


def shown_value(setting: str, value: Any) -> str:
    """The value of a setting or of its part, as an effect has it."""
    if value is None:
        return NOT_GIVEN
    return value_text(value) or ("given" if setting == "args" else "none")


def texts_of(settings: Mapping[str, Any]) -> dict[str, str]:
    """The values of settings and of their parts as effects have them, by key."""
    return {key_of(name, part): shown_value(name, value) for name, part, value in parts_of(settings)}


def winner_findings(search: SearchResult, is_settled: bool) -> tuple[Finding, ...]:
    """Why the best combination is faster than the job's own; where that is settled, how to have it."""
    settings = {combination.variant: combination.settings for combination in search.combinations}
    own, best = (settings.get(name or "", {}) for name in (search.own, search.best))
    texts, best_texts = texts_of(own), texts_of(best)
    compared = {each.key for each in search.effects} & best_texts.keys()
    num_other = sum(texts.get(key) != best_texts[key] for key in compared)
    names = dict.fromkeys(effect.key.partition(" ")[0] for effect in search.effects)
    other = [
        f"`{name}: {flow_text(best[name])}`" for name in names if name in best and best[name] != own.get(name)
    ]
    has_step = is_settled and other and own
    use_it = (
        (finding("act-on-cause", weight=0.5, case="settings", settings=other, what="fastest"),)
        if has_step
        else ()
    )
    return (*(costly_value(search, own) if num_other > 1 else ()), *use_it)  # else the answer says it


def untried(found: Sequence[Finding], search: SearchResult | None) -> tuple[Finding, ...]:
    """The findings without advice about keys whose values the search has tried."""
    tried = {f"`{effect.key}`" for effect in search.effects} if search else set()
    advice = (ADVICE[each.figures["case"]] if each.code == "act-on-cause" else "" for each in found)
    return tuple(
        each for each, words in zip(found, advice, strict=True) if not any(key in words for key in tried)
    )


def costly_value(search: SearchResult, own: Mapping[str, Any]) -> tuple[Finding, ...]:
    """The value of the job's `own` setting that costs most at the best combination; none if none does."""
    lacked = {effect.key: NOT_GIVEN for effect in search.effects if effect.key.partition(" ")[0] in own}
    values = lacked | texts_of(own)
    costs = [effect for effect in search.effects if values.get(effect.key) == effect.value]
    known = [(effect, effect.at_best) for effect in costs if effect.at_best]
    slower = [(effect, change) for effect, change in known if change.ci and change.ci[0] > 0]
    return tuple(
        finding(
            "value-costs",
            weight=0.5,
            key=effect.key,
            value=str(effect.value),
            against=str(effect.against),
            percent=change.percent,
            change=change_text(change.percent),
            **interval_figures(change.percent, change.ci),
        )
        for effect, change in _largest(slower)[:1]
    )


def effects_note(search: SearchResult) -> tuple[Finding, ...]:
    """The largest effects at the best combination, each with its average; then averages of which the interval
    excludes 0. Empty where there are none."""
    measured = [(effect, effect.at_best) for effect in search.effects if effect.at_best]
    others = [(effect, effect.average) for effect in search.effects if effect.average and not effect.at_best]
    clear = [
        (effect, average)
        for effect, average in others
        if average.ci and not average.ci[0] <= 0 <= average.ci[1]
    ]
    shown = [effect for effect, _ in (*_largest(measured), *_largest(clear))][:MOST_EFFECTS]
    if not shown:
        return ()
    has_batches = any(combination.ms_per_sample is not None for combination in search.combinations)
    quantity = "the time of a sample" if has_batches else "step time"
    effects = "; ".join(map(_effect_text, shown))
    return (finding("plan-note", case="effects", quantity=quantity, effects=effects),)


def _largest(effects: Sequence[tuple[Effect, TimeChange]]) -> list[tuple[Effect, TimeChange]]:
    return sorted(effects, key=lambda pair: -abs(math.log1p(pair[1].percent / 100)))


def _effect_text(effect: Effect) -> str:
    """`strategy=dp instead of ddp +40 % (36 to 44), on average −31 % (−45 to −13)`."""
    return reason(
        "effect",
        key=effect.key,
        value=str(effect.value),
        against=str(effect.against),
        at_best=effect.at_best and _change_text(effect.at_best),
        average=effect.average and _change_text(effect.average),
    )


def _change_text(change: TimeChange) -> str:
    percent = format_percent(change.percent, change.ci, signed=True)
    return f"{percent} ({format_percent_interval(change.percent, change.ci)})" if change.ci else percent


def _front(tried: Sequence[Tried]) -> tuple[str, ...]:
    """The variants of the Pareto front over time and memory, of the trials that can be used."""
    usable = [combination for combination in tried if combination.status == "ok"]
    if any(combination.ms_per_sample is not None for combination in usable):
        return ()
    usable.sort(key=lambda combination: combination.ms)
    return tuple(
        usable[position].variant
        for position in smaller_than_all_before([combination.peak_gib for combination in usable])
    )


def _tried(trials: Sequence[TrialRecord], memory_gib: float | None) -> tuple[Tried, ...]:
    """Each combination with all of its trials."""
    by_variant = grouped(trials, lambda trial: trial.variant)
    has_batches = len({trial.global_batch for trial in trials}) > 1
    return tuple(_together(own, memory_gib, has_batches) for own in by_variant.values())


def _together(trials: Sequence[TrialRecord], memory_gib: float | None, has_batches: bool) -> Tried:
    first, last = trials[0], trials[-1]
    times = [trial.step_ms for trial in trials if trial.step_ms is not None]
    peaks = [trial.peak_gib for trial in trials if trial.peak_gib is not None]
    step_ms = geometric_mean(times) if len(times) == len(trials) else None
    return Tried(
        variant=first.variant,
        settings=first.settings,
        trials=len(trials),
        step_ms=step_ms,
        peak_gib=max(peaks, default=None),
        label=first.label or value_text(first.settings),
        status="too large" if any(trial.is_too_large(memory_gib) for trial in trials) else last.status,
        reason=last.reason,
        ms_per_sample=step_ms / first.global_batch
        if has_batches and step_ms and first.global_batch
        else None,
    )


LEAST_MISSED = 0.1
"""Percent; less isn't worth a figure."""


def _summary(record: SearchRecord, tried: Sequence[Tried]) -> str:
    """How many combinations were tried, and how much better others may be."""
    nums = {
        "num_tried": len(tried),
        "num_distinct": record.distinct,
        "num_failed": len(record.failed) or None,
    }
    if not record.finalists:
        best = next((combination.label for combination in tried if combination.variant == record.best), None)
        return f"{reason('searching', leader=best, **nums)}."
    missed = record.at_most_missed_percent
    has_all = len(tried) == record.distinct
    said = reason(
        "searched-few" if missed is None and not has_all else "searched",
        tried=reason("tried", **nums),
        num_compared=len(record.finalists),
        missed_percent=None if has_all or missed is None else max(missed, LEAST_MISSED),
    )
    return f"{said}."
