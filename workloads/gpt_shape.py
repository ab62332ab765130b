"""Sizes of `gpt`, without torch: a job is checked against them before anything runs."""

from dataclasses import dataclass, replace
from typing import Any

BYTES = 256
"""Tokens are bytes whatever the vocabulary, so that no tokenizer is needed: a larger one only widens the
first and the last layer, whose work then is that of a model with as many tokens."""


@dataclass(frozen=True)
class Shape:
    """What a model's size is made of."""

    layers: int
    width: int
    heads: int
    context: int
    """Tokens of a sample."""
    vocabulary: int
    tied: bool
    """Whether first and last layer share their weights, as in GPT-2."""


PRESETS = {
    "tiny": Shape(layers=4, width=256, heads=4, context=128, vocabulary=BYTES, tied=False),
    "small": Shape(layers=6, width=384, heads=6, context=256, vocabulary=BYTES, tied=False),
    "124M": Shape(layers=12, width=768, heads=12, context=1024, vocabulary=50257, tied=True),
}


def shape_of(preset: str, **own: int | None) -> Shape:
    """The preset's shape, with the numbers that take the place of its own.

    Raises:
        ValueError: there is no such preset, or no model can have this shape.
    """
    stated: dict[str, Any] = {name: number for name, number in own.items() if number is not None}
    return checked(replace(preset_of(preset), **stated))


def preset_of(name: str) -> Shape:
    """The preset of that name.

    Raises:
        ValueError: there is none.
    """
    if name not in PRESETS:
        raise ValueError(f"preset must be one of {', '.join(PRESETS)}, but it is {name}")
    return PRESETS[name]


def checked(shape: Shape) -> Shape:
    """The shape, if a model can have it.

    Raises:
        ValueError: a number is too small, or the heads don't share the width evenly.
    """
    for name, least in (("layers", 1), ("width", 1), ("heads", 1), ("context", 1), ("vocabulary", BYTES)):
        if getattr(shape, name) < least:
            raise ValueError(f"{name} must be at least {least}, but it is {getattr(shape, name)}")
    if shape.width % shape.heads:
        raise ValueError(
            f"width must be divisible by heads, but {shape.width} is not divisible by {shape.heads}"
        )
    return shape
