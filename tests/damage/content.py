"""Damaged content of files of any kind."""

import random

_SYNTAX = b'"{}[],:\\0-e.'
"""Bytes that mean something in JSON."""


def damaged(content: bytes, chance: random.Random) -> bytes:
    """Some bytes changed; cut off, with a gap, or with a part twice."""
    text = bytearray(content)
    for _ in range(chance.choice((0, 1, 3, 30))):
        text[chance.randrange(len(text))] = chance.choice((chance.randrange(256), *_SYNTAX))
    start = chance.randrange(len(text))
    kind = chance.choice(("none", "none", "cut", "hole", "twice"))
    if kind == "cut":
        return bytes(text[:start])
    if kind == "hole":
        return bytes(text[:start] + text[start + chance.randrange(5000) :])
    if kind == "twice":
        return bytes(text[:start] + text[max(start - chance.randrange(5000), 0) :])
    return bytes(text)
