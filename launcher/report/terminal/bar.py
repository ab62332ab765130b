"""The stacked bar of a variant: what its slowest rank does, each part with its glyph and colour.

Only `parts_of` knows where the figures come from; drawing and legend take any parts.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich.text import Text

from gpurun.launcher.compare.figures.slowest import slowest_rank
from gpurun.launcher.compare.model import VariantResult
from gpurun.launcher.report.metrics import parts_ms


@dataclass(frozen=True)
class Part:
    """A piece of a bar. Glyphs separate the parts where there is no colour."""

    label: str
    ms: float
    glyph: str
    ascii_glyph: str
    style: str


PHASES = (
    ("data", "·", ".", "bright_black"),
    ("h2d", "░", "-", "cyan"),
    ("forward", "▇", "=", "blue"),
    ("backward", "▒", "#", "yellow"),
    ("optimizer", "▪", "+", "green"),
)
"""In the order in which they happen: name, glyph, glyph without box drawing, colour."""

TRACED = {
    "compute": ("▇", "=", "blue"),
    "transfer": ("▒", "#", "yellow"),
    "wait": ("░", "-", "red"),
    "copy": ("▪", "+", "cyan"),
    "input": ("◦", "o", "magenta"),
    "other_steps": ("▫", "*", "green"),
    "idle": ("·", ".", "bright_black"),
}
"""Glyph, glyph without box drawing, and colour of the parts of a traced step (`PARTS`)."""


def parts_of(variants: Sequence[VariantResult]) -> list[tuple[Part, ...]]:
    """A bar for each variant, of its slowest rank; all of one kind, so that a glyph means one thing.

    What the trace shows where every variant that was timed has one, else the phases.
    """
    traced = [_traced_parts(variant) for variant in variants]
    timed = [phase_parts(variant) for variant in variants]
    has_all = all(parts or not phases for parts, phases in zip(traced, timed, strict=True))
    return traced if has_all else timed


def phase_parts(variant: VariantResult) -> tuple[Part, ...]:
    """The phases of the variant's slowest rank; empty where none was measured."""
    rank = slowest_rank(variant.ranks)
    if rank is None:
        return ()
    parts = (Part(name, rank.phases_ms.get(name, 0.0), *look) for name, *look in PHASES)
    return tuple(part for part in parts if part.ms > 0)


def _traced_parts(variant: VariantResult) -> tuple[Part, ...]:
    """The traced step of the slowest rank, in proportion to the variant's step.

    A traced step is slower than a timed one, and there are only a few: its shares are what is to be seen.
    """
    rank = slowest_rank(variant.ranks)
    if rank is None or not rank.span_ms or variant.step_ms is None:
        return ()
    scale = variant.step_ms.estimate / rank.span_ms
    parts = (Part(name, scale * ms, *TRACED[name]) for name, ms in parts_ms(rank).items())
    return tuple(part for part in parts if part.ms > 0)


def draw(parts: Iterable[Part], cells: int, full_ms: float, plain: bool) -> Text:
    """The bar, `cells` wide for `full_ms`. Rounds the edges, not the parts, so lengths stay comparable."""
    bar, end_ms, drawn = Text(), 0.0, 0
    for part in parts:
        end_ms += part.ms
        edge = min(cells, round(cells * end_ms / full_ms)) if full_ms > 0 else 0
        bar.append((part.ascii_glyph if plain else part.glyph) * (edge - drawn), part.style)
        drawn = edge
    return bar


def legend(bars: Iterable[Sequence[Part]], plain: bool) -> Text:
    """Every label that occurs in the bars, once, with its glyph in its colour."""
    first = {part.label: part for parts in bars for part in parts}
    order = [name for name, *_ in PHASES] + list(TRACED)
    parts = sorted(first.values(), key=lambda part: order.index(part.label) if part.label in order else 0)
    items = (
        Text.assemble(f"{part.label} ", (part.ascii_glyph if plain else part.glyph, part.style))
        for part in parts
    )
    return Text("  ").join(items)
