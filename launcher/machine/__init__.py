"""This machine without torch: host, kinds of device, GPUs, topology, limits, process tree."""

from pathlib import Path

LOOPBACK = "127.0.0.1"
"""The address at which processes listen: no other machine can connect unless a job spans several nodes."""


def read_text(path: Path) -> str:
    """The text of a small file of the kernel's; empty where there is none, or it may not be read.

    The kernel cuts a process's name off after 15 bytes, which may be within a character.
    """
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def read_numbers(path: Path) -> dict[str, int]:
    """The numbers of such a file by name, where each line has a name and then its number."""
    lines = (line.split() for line in read_text(path).splitlines())
    return {words[0].rstrip(":"): int(words[1]) for words in lines if len(words) > 1 and words[1].isdecimal()}
