"""The stacked bar beside a variant: one part per phase, with a glyph and a colour of its own.

Only `phase_parts` knows where the figures come from; drawing and legend take any parts.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich.text import Text

from launcher.compare.model import VariantResult
from launcher.compare.slowest import slowest_rank


@dataclass(frozen=True)
class Part:
    """A piece of a bar. The glyph tells parts apart where there is no colour."""

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


def phase_parts(variant: VariantResult) -> tuple[Part, ...]:
    """The phases of the variant's slowest rank; empty where none was measured."""
    rank = slowest_rank(variant.ranks)
    if rank is None:
        return ()
    parts = (Part(name, rank.phases_ms.get(name, 0.0), *look) for name, *look in PHASES)
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
    order = [name for name, *_ in PHASES]
    parts = sorted(first.values(), key=lambda part: order.index(part.label) if part.label in order else 0)
    items = (
        Text.assemble(f"{part.label} ", (part.ascii_glyph if plain else part.glyph, part.style))
        for part in parts
    )
    return Text("  ").join(items)
