"""Files that a job names: where they are, and what keeps one from being read."""

import os
from pathlib import Path

NAMED_FILES = 5
"""Of those that are skipped."""


def path_of(name: str) -> Path:
    """The path that a job means; `~` is a home directory, as in a shell."""
    return Path(os.path.expanduser(name))


def not_there(what: str, path: Path) -> str:
    """What to say of a path that a job names, where nothing is."""
    where = "" if path.is_absolute() else "; relative paths start at the job file's directory"
    return f"the {what} {path} does not exist{where}"


def why_no_file(path: Path) -> str | None:
    """Why there is nothing to read at a path, though a directory lists it; `None` if there is.

    Reading would end in an error that says less, or wait forever: for the writer of a pipe.
    """
    if path.is_file():
        return None
    return "not a regular file" if path.exists() else "a link to nothing" if path.is_symlink() else "gone"


def name_in(directory: Path, path: Path) -> str:
    """What to call a file of the directory, or `directory` itself where that is the file."""
    return path.name if path == directory else str(path.relative_to(directory))


def listed(named: list[str]) -> str:
    """The first of them, in words."""
    return ", ".join([*named[:NAMED_FILES], *(["…"] if len(named) > NAMED_FILES else [])])
