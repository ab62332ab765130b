"""`Finding`: one statement of a report, as data; and `Screen`: the first lines of a report."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from gpurun.launcher.findings.finding_kinds import KINDS, Level
from gpurun.launcher.findings.run_cases import REASONS
from gpurun.launcher.units import (
    format_count,
    format_duration,
    format_factor_interval,
    format_gib,
    format_half,
    format_like,
    format_ms,
    format_percent,
    format_percent_interval,
    format_rate,
    listed,
    plural,
)

_GROUP = re.compile(r"\[([^][]*)\]")
"""A part of a sentence that is left out where a figure in it isn't known; groups may hold groups."""
_SLOT = re.compile(r"\{(\w+)(?::(\w[\w ]*))?\}")


_AS_IT_IS = ("{leader}", "{other}", "{where}", "{who}", "{what}", "{why}", "{of}", "{note}")
"""Names and texts that keep their first letter."""
_OF_THE_SCREEN = ("Answer", "Step", "Gate", "Traces", "")
"""Titles that a sentence by itself doesn't need."""


@dataclass(frozen=True)
class Finding:
    """One statement about a run, of a kind that `KINDS` describes."""

    code: str
    level: Level
    text: str
    """The sentence of the kind with these figures, without a full stop."""
    variant: str | None = None
    """The id of the variant that it is about; `None`: it is about the run."""
    ranks: tuple[int, ...] = ()
    host: str | None = None
    figures: Mapping[str, Any] = field(default_factory=dict)
    """By name with their unit, as the sentence has them or more exactly."""
    weight: float = 0.0
    """The share of a step, or of the verdict, that it concerns."""

    @property
    def about(self) -> tuple[str, ...]:
        """The ids of the variants that it is about."""
        several = self.figures.get("variants")
        others = [each for each in several if isinstance(each, str)] if isinstance(several, list) else []
        return tuple(dict.fromkeys((*([self.variant] if self.variant else []), *others)))

    @property
    def headline(self) -> str:
        """`Fastest: the baseline ddp 32/32; dp 32/32 is 46 % slower (43 to 48).`"""
        title = KINDS[self.code].title
        return self.sentence if title in _OF_THE_SCREEN else f"{title}: {self.text}."

    @property
    def sentence(self) -> str:
        """The text as a sentence; a name that it begins with stays as it is."""
        template = KINDS[self.code].sentence_of(self.figures)
        template = template if self.figures.get("of") else template.removeprefix("{of}")
        slot = _SLOT.match(template, 1)
        first = str(self.figures.get(slot[1], "")) if slot and template[0] == "[" else ""
        is_kept = template.startswith(_AS_IT_IS) or (first and self.text.startswith(first))
        text = self.text if is_kept else f"{self.text[:1].upper()}{self.text[1:]}"
        return text if text.endswith(".") else f"{text}."


def finding(
    code: str,
    variant: str | None = None,
    ranks: Iterable[int] = (),
    host: str | None = None,
    weight: float = 0.0,
    **figures: Any,
) -> Finding:
    """A finding of a kind, with its sentence.

    Args:
        code: of the kind.
        figures: the names and figures that the kind's sentence has slots for; `None`: it isn't known.
    """
    known = {
        name: list(value) if isinstance(value, tuple) else value  # as it is read back
        for name, value in figures.items()
        if value is not None
    }
    text = worded(KINDS[code].sentence_of(known), known).removesuffix(".")
    return Finding(code, KINDS[code].level, text, variant, tuple(ranks), host, known, float(weight))


def noticed(case: str, **figures: Any) -> Finding:
    """Something odd."""
    return finding("noticed", of="", case=case, **figures)


def reason(case: str, **figures: Any) -> str:
    """A reason that a row or a file holds, with its figures; those that are `None` aren't known."""
    return worded(REASONS[case], {name: value for name, value in figures.items() if value is not None})


def with_figures(found: Finding, **figures: Any) -> Finding:
    """The finding with these figures too, or instead of its own, and the sentence that they give."""
    both = {**found.figures, **figures}
    return finding(found.code, found.variant, found.ranks, found.host, found.weight, **both)


def below_its_name(found: Finding) -> Finding:
    """The finding without the variant's name, for a place that has it already."""
    begins = KINDS[found.code].sentence_of(found.figures).startswith("{of}")
    name = str(found.figures.get("of", "")) if begins else f"in {found.figures.get('where')} "
    return replace(found, text=found.text.removeprefix(name), figures={**found.figures, "of": ""})


def relative_to(directory: Path, found: Finding) -> Finding:
    """The finding with the paths in its figures from the directory on."""
    texts = {name: text for name, text in found.figures.items() if isinstance(text, str)}
    return with_figures(found, **{name: text.replace(f"{directory}/", "") for name, text in texts.items()})


def worded(template: str, figures: Mapping[str, Any]) -> str:
    """The sentence with its figures; optional groups whose figures aren't known are left out."""
    while match := _GROUP.search(template):
        has_all = all(slot[1] in figures for slot in _SLOT.finditer(match[1]))
        template = template[: match.start()] + (match[1] if has_all else "") + template[match.end() :]
    return _SLOT.sub(lambda slot: _shown(slot[1], slot[2], figures), template)


def _shown(name: str, noun: str | None, figures: Mapping[str, Any]) -> str:
    """A figure with its unit, which its name ends with; a number of things with their noun."""
    value = figures[name]
    if isinstance(value, str):
        return value
    if noun is not None:
        return plural(value, noun)
    if isinstance(value, Mapping):  # of what, how many ms more; or its share
        of = (lambda ms: f"(+{format_ms(ms)} ms)") if name.endswith("_ms") else format_percent
        return listed([f"{each} {of(figure)}" for each, figure in value.items()])
    if name in ("percent", "change_percent"):
        return format_percent(value, figures.get("ci"), signed=name != "percent")
    if name == "range_ms" and isinstance(value, list):
        return " to ".join(format_like(figures.get("step_ms", end), end) for end in value)
    if name == "half_ms":
        return format_half(figures.get("step_ms", value), value)
    if name == "threshold_percent":
        return f"{value:g} %"
    if name == "ratio_ci":
        return format_factor_interval((100 * (value[0] - 1), 100 * (value[1] - 1)))
    if name == "ci":
        return format_percent_interval(figures.get("percent", figures.get("change_percent", 0.0)), value)
    for suffix, shown in _BY_UNIT.items():
        if name.endswith(suffix):
            return " to ".join(map(shown, value)) if isinstance(value, list) else shown(value)
    return format_count(value) if isinstance(value, int) else listed([str(each) for each in value])


def _gib(value: float) -> str:
    return format_gib(value, 2)


def _mhz(value: float) -> str:
    return f"{format_count(value)} MHz"


_BY_UNIT: Mapping[str, Callable[[float], str]] = {
    "_percent": format_percent,
    "_ms": format_ms,
    "_gib": _gib,
    "_per_s": format_rate,
    "_s": format_duration,
    "_mhz": _mhz,
    "pid": str,
    "_step": str,
    "_byte": str,
}


def of_files(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """The findings, with those as one that differ in the name of the file only."""
    files: dict[str, list[str]] = {}
    first: dict[str, Finding] = {}
    for each in findings:
        key = repr((each.code, {**each.figures, "file": None} if "file" in each.figures else id(each)))
        first.setdefault(key, each)
        files.setdefault(key, []).append(str(each.figures.get("file")))
    return tuple(
        each if len(files[key]) == 1 else with_figures(each, file=_shortened(files[key]))
        for key, each in first.items()
    )


def _shortened(files: Sequence[str]) -> str:
    """`a.json and b.json`; `a.json and 7 others`."""
    return listed([*files]) if len(files) == 2 else f"{files[0]} and {plural(len(files) - 1, 'other')}"


def of_level(findings: Sequence[Finding], *levels: Level) -> tuple[Finding, ...]:
    """The findings of these levels, in their order."""
    return tuple(each for each in findings if each.level in levels)


_ORDER: tuple[Level, ...] = ("answer", "danger", "cause", "remedy", "detail")


def ranked(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Findings by level; causes and remedies by the share that they concern, the largest first."""
    return tuple(sorted(findings, key=lambda each: (_ORDER.index(each.level), -each.weight)))


NEXT = "Next"
"""The title of what to do."""
AFTER_ALL = 1e-3
"""The weight of causes that concern nothing in the answer, up to which they are details."""
MOST_DANGERS = 2
"""The most dangers that are written out; of more, their number is shown."""


@dataclass(frozen=True)
class Screen:
    """Findings by the place where they are shown. Each is in one place."""

    lines: tuple[tuple[str, str], ...]
    """Up to three: a title, and the sentence without a full stop."""
    dangers: tuple[str, ...]
    details: tuple[Finding, ...]
    """All other findings, by the place that they concern."""


def screen_of(findings: Sequence[Finding], most_dangers: int = MOST_DANGERS) -> Screen:
    """The first screen of these findings, which are ranked."""
    answer, then = (of_level(findings, level)[:1] for level in ("answer", "remedy"))
    why = tuple(cause for cause in of_level(findings, "cause")[:1] if cause.weight > AFTER_ALL)
    dangers = of_level(findings, "danger")
    titles = [*((KINDS[each.code].title, each) for each in answer)]
    titles += [*(("Why", each) for each in why), *((NEXT, each) for each in then)]
    more = len(dangers) - most_dangers
    shown = tuple(each.text for each in dangers[:most_dangers])
    first = {id(each) for each in (*answer, *why, *then, *dangers[:most_dangers])}
    return Screen(
        tuple((title, each.text) for title, each in titles),
        (*shown, *([f"and {more} more"] if more > 0 else [])),
        tuple(each for each in findings if id(each) not in first),
    )
