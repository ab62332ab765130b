"""Real text as bytes: that of files, or the Python standard library's own source, which is always there."""

import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch

from gpurun.workloads.limits import listed, name_in, not_there, path_of, why_no_file

MAX_BYTES = 4 << 20


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
    library = Path(sysconfig.get_path("stdlib"))
    return read_corpus(sorted(library.glob("*.py")), "the library", library).text


def open_corpus(place: str) -> Corpus:
    """The text of a file, or of all files in a directory in order of their names.

    Raises:
        ValueError: there is no such file or directory, or no text in it.
    """
    path = path_of(place)
    if not path.exists():
        raise ValueError(not_there("text", path))
    return read_corpus(sorted(path.rglob("*")) if path.is_dir() else [path], place, path)


def read_corpus(paths: list[Path], place: str, directory: Path) -> Corpus:
    """The first `MAX_BYTES` of the text of files in `directory`; what is no text is skipped, and said.

    Raises:
        ValueError: no file has text.
    """
    content, skipped, num_files = bytearray(), list[str](), 0
    for path, outcome in read_files(paths):
        num_files += 1
        if isinstance(outcome, str):
            skipped.append(f"{name_in(directory, path)} ({outcome})")
        else:
            content += outcome
        if len(content) >= MAX_BYTES:
            break
    if not content:
        reason = f"its files are not text: {listed(skipped)}" if skipped else "it has no files"
        raise ValueError(f"there is no text in {place}: {reason}")
    text = torch.frombuffer(content[:MAX_BYTES], dtype=torch.uint8)
    return Corpus(text, skipped_notes(skipped, num_files, place))


def read_files(paths: list[Path]) -> Iterator[tuple[Path, bytes | str]]:
    """Each file with its content, or with the reason why it is no text; directories have none."""
    for path in paths:
        if path.is_dir():
            continue
        yield path, why_no_file(path) or read_text(path)


def read_text(path: Path) -> bytes | str:
    """A file's content, or the reason why it is no text."""
    try:
        content = path.read_bytes()
    except OSError as error:
        return error.strerror or type(error).__name__
    return "binary" if b"\0" in content else content or "empty"


def skipped_notes(skipped: list[str], num_files: int, place: str) -> tuple[str, ...]:
    """The notes about files that were left out."""
    if not skipped:
        return ()
    return (f"skipped {len(skipped)} of {num_files} files in {place}, not text: {listed(skipped)}",)


def random_windows(size: int, length: int, generator: torch.Generator, text: torch.Tensor) -> torch.Tensor:
    """`size` stretches of `length` bytes of the text, as int64 of shape (size, length)."""
    starts = torch.randint(len(text) - length + 1, (size, 1), generator=generator)
    return text[starts + torch.arange(length)].long()
