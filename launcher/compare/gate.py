"""Whether a variant became slower by more than a threshold, between two versions of the code or two runs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gpurun.launcher.stats.busy import QUEUE_PERCENT
from gpurun.launcher.stats.sequential import MIN_LAUNCHES
from gpurun.launcher.stats.threshold import Bounded, Outcome
from gpurun.launcher.units import Interval, format_number, format_percent, format_percent_interval, plural

SLOWER: Outcome = "slower"
NOT_SLOWER: Outcome = "not slower"
UNDECIDED: Outcome = "undecided"


@dataclass(frozen=True)
class GateRow:
    """One variant before (a) and after (b). Percent of b against a: positive is slower."""

    label: str
    a: str
    """Id of the variant before, in its run."""
    b: str
    a_ms: float | None
    b_ms: float | None
    percent: float | None
    ci: Interval | None
    """Two one-sided bounds, with 95 % confidence."""
    outcome: Outcome
    seen_percent: float | None
    """The smallest difference that would have been called slower with 80 % chance."""
    launches: int
    """Of each version."""
    why: str | None = None
    """Why nothing can be said, where it isn't the scatter of its launches."""
    is_open: bool = False
    """Whether more launches may decide it."""


@dataclass(frozen=True)
class Gate:
    """What a gate found."""

    threshold_percent: float
    outcome: Outcome
    """`slower` if one variant is; `not slower` if none is, beyond doubt."""
    before: str
    """Where a is from, as a sentence says it: `at main`, `in run a`."""
    rows: tuple[GateRow, ...]
    headline: str
    details: tuple[str, ...] = ()
    """What it could have seen, and what to do."""

    def of(self, outcome: Outcome) -> list[GateRow]:
        """The variants with this outcome."""
        return [row for row in self.rows if row.outcome == outcome]

    @property
    def summary(self) -> str:
        return " ".join((self.headline, *self.details))


def row_of(
    label: str,
    ids: tuple[str, str],
    times_ms: tuple[float | None, float | None],
    found: Bounded,
    launches: int,
    why: str | None = None,
) -> GateRow:
    """A variant's row; with a reason why nothing can be said, it is undecided."""
    outcome = UNDECIDED if why else found.outcome
    if why is None and found.ci is None:
        why = f"{plural(launches, 'launch')} of each version: a verdict takes {MIN_LAUNCHES}"
    seen = None if why else found.seen_percent
    return GateRow(label, *ids, *times_ms, found.percent, found.ci, outcome, seen, launches, why)


def gate_of(
    threshold_percent: float, before: str, rows: Sequence[GateRow], advice: Sequence[str] = ()
) -> Gate:
    """What the rows come to.

    Args:
        threshold_percent: the largest difference that is allowed.
        before: where a is from.
        rows: of all variants; a gate over nothing is undecided.
        advice: what to do where it is undecided.
    """
    outcomes = {row.outcome for row in rows}
    outcome = SLOWER if SLOWER in outcomes else NOT_SLOWER if outcomes == {NOT_SLOWER} else UNDECIDED
    gate = Gate(threshold_percent, outcome, before, tuple(rows), "")
    details = (*_visible(gate), *advice) if outcome == UNDECIDED else ()
    return Gate(threshold_percent, outcome, before, tuple(rows), HEADLINES[outcome](gate), details)


def _slower_headline(gate: Gate) -> str:
    """`ddp 32/32 is 13.8 % slower than at main (12.9 to 14.6): more than 3 %.`"""
    texts = [
        f"{row.label} is {format_percent(row.percent or 0.0, row.ci)} slower than {gate.before}{_range(row)}"
        for row in gate.of(SLOWER)
    ]
    return f"{'; '.join(texts)}: more than {percent_text(gate)}."


def _passing_headline(gate: Gate) -> str:
    """`ddp 32/32 is not slower than at main by more than 3 %: +0.4 % (−0.6 to 1.4).`"""
    if len(gate.rows) > 1:
        worst = max(gate.rows, key=lambda row: row.ci[1] if row.ci else 0.0)
        most = format_number(worst.ci[1], 1, signed=True) if worst.ci else "?"
        return (
            f"None of {len(gate.rows)} variants is slower than {gate.before} by more than "
            f"{percent_text(gate)}; {worst.label} by {most} % at the most."
        )
    (row,) = gate.rows
    return f"{row.label} is not slower than {gate.before} by more than {percent_text(gate)}: {_figure(row)}."


def _undecided_headline(gate: Gate) -> str:
    """`Whether ddp 32/32 is slower than at main by more than 3 % is undecided: +2 % (−1 to 5).`"""
    if not gate.rows:
        return "Undecided: no variant does the same work in both."
    open_ = gate.of(UNDECIDED)
    names = ", ".join(row.label for row in open_)
    figures = "; ".join(row.why or _figure(row) for row in open_)
    verb = "is" if len(open_) == 1 else "are"
    return (
        f"Whether {names} {verb} slower than {gate.before} by more than {percent_text(gate)} is undecided: "
        f"{figures}."
    )


HEADLINES = {SLOWER: _slower_headline, NOT_SLOWER: _passing_headline, UNDECIDED: _undecided_headline}


def _visible(gate: Gate) -> tuple[str, ...]:
    """What it could have seen, of the variant of which that is least."""
    seen = [row.seen_percent for row in gate.of(UNDECIDED) if row.seen_percent is not None]
    if not seen:
        return ()
    return (f"It would have seen a difference of {format_number(max(seen), 1)} %.",)


def _figure(row: GateRow) -> str:
    return f"{format_percent(row.percent or 0.0, row.ci, signed=True)}{_range(row)}"


def _range(row: GateRow) -> str:
    return (
        "" if row.percent is None or row.ci is None else f" ({format_percent_interval(row.percent, row.ci)})"
    )


def percent_text(gate: Gate) -> str:
    """The threshold as it was given: `3 %`."""
    return f"{gate.threshold_percent:g} %"


def slack_of(queue_percents: Sequence[float | None]) -> float:
    """By how many percent waiting for a core may have changed a difference; 0 up to what is accepted."""
    worst = max((percent for percent in queue_percents if percent is not None), default=0.0)
    return worst if worst > QUEUE_PERCENT else 0.0


def changed_files(a: Mapping[str, str], b: Mapping[str, str]) -> list[str]:
    """Files of the user's code that differ, by their hashes in both."""
    return sorted(name for name in a.keys() | b.keys() if a.get(name) != b.get(name))
