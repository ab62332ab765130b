"""Real text as bytes: that of files, or the Python standard library's own source, which is always there."""

import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch

MAX_BYTES = 4 << 20
NAMED_FILES = 5
"""Of those that are skipped."""


@dataclass(frozen=True)
class Corpus:
    """Text of several files, one after the other."""

    text: torch.Tensor
    """uint8, at most `MAX_BYTES` of them."""
    notes: tuple[str, ...] = ()
    """Which files were skipped, and why."""


@lru_cache(maxsize=1)
def corpus() -> torch.Tensor:
    """The first `MAX_BYTES` of the library's top-level modules in order of their names, as uint8."""
    return read_corpus(sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")), "the library").text


def open_corpus(place: str) -> Corpus:
    """The text of a file, or of all files in a folder in order of their names.

    Raises:
        ValueError: there is no such file or folder, or no text in it.
    """
    path = Path(place)
    if not path.exists():
        raise ValueError(
            f"the text {place} does not exist; relative names are looked for beside the job file"
        )
    return read_corpus(sorted(path.rglob("*")) if path.is_dir() else [path], place)


def read_corpus(paths: list[Path], place: str) -> Corpus:
    """The first `MAX_BYTES` of the files' text; what is no text is skipped, and said.

    Raises:
        ValueError: no file has text.
    """
    content, skipped, num_files = bytearray(), list[str](), 0
    for path, outcome in read_files(paths):
        num_files += 1
        if isinstance(outcome, str):
            skipped.append(f"{path.name} ({outcome})")
        else:
            content += outcome
        if len(content) >= MAX_BYTES:
            break
    if not content:
        reason = f"its files are no text: {', '.join(skipped[:NAMED_FILES])}" if skipped else "it has no file"
        raise ValueError(f"there is no text in {place}: {reason}")
    text = torch.frombuffer(content[:MAX_BYTES], dtype=torch.uint8)
    return Corpus(text, skipped_notes(skipped, num_files, place))


def read_files(paths: list[Path]) -> Iterator[tuple[Path, bytes | str]]:
    """Each file with its content, or with the reason why it is no text; folders have none."""
    for path in paths:
        if path.is_dir():
            continue
        try:
            content = path.read_bytes() if path.is_file() else b""
        except OSError as error:
            yield path, error.strerror or type(error).__name__
            continue
        if b"\0" in content:
            yield path, "binary"
        else:
            yield path, content or ("empty" if path.is_file() else "no file")


def skipped_notes(skipped: list[str], num_files: int, place: str) -> tuple[str, ...]:
    """What to say about files that were left out."""
    if not skipped:
        return ()
    verb = "is" if len(skipped) == 1 else "are"
    named = [*skipped[:NAMED_FILES], *(["…"] if len(skipped) > NAMED_FILES else [])]
    return (f"{len(skipped)} of {num_files} files in {place} {verb} no text and skipped: {', '.join(named)}",)


def random_windows(size: int, length: int, generator: torch.Generator, text: torch.Tensor) -> torch.Tensor:
    """`size` stretches of `length` bytes of the text, as int64 of shape (size, length)."""
    starts = torch.randint(len(text) - length + 1, (size, 1), generator=generator)
    return text[starts + torch.arange(length)].long()
