"""Landlock: the kernel keeps a process, and all that it starts, from writing but below some places.

That holds for programs in any language, and can't be undone. Modes, owners, times and extended attributes of
files are not restricted, nor is what was open before.

Sources: linux/landlock.h; https://docs.kernel.org/userspace-api/landlock.html
"""

import ctypes
import os
import struct
import sys
from collections.abc import Iterable

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
"""Numbers of the system calls."""
_ASK_VERSION, _BENEATH = 1, 1
_SET_NO_NEW_PRIVS = 38
"""Source: linux/prctl.h"""
LEAST_VERSION = 3
"""With truncation; of Linux 6.2."""
_TO_A_FILE = 1 << 1 | 1 << 14
"""WRITE_FILE and TRUNCATE."""
_WRITES = _TO_A_FILE | sum(1 << bit for bit in range(4, 14))
"""Also REMOVE_DIR, REMOVE_FILE, MAKE_CHAR, MAKE_DIR, MAKE_REG, MAKE_SOCK, MAKE_FIFO, MAKE_BLOCK, MAKE_SYM and
REFER."""


def can_restrict_writes() -> bool:
    """Whether the kernel has it, with all that is needed."""
    try:
        return sys.platform == "linux" and _call(_CREATE_RULESET, None, 0, _ASK_VERSION) >= LEAST_VERSION
    except OSError:  # it isn't built in, or not enabled
        return False


def restrict_writes(places: Iterable[str]) -> None:
    """Lets this thread, and the threads and processes that it starts, write only below these places.

    To be called before there are other threads. What doesn't exist is left out. Programs that change their
    user when they start, such as sudo, can't do so any more.

    Raises:
        OSError: the kernel can't.
    """
    rules = _call(_CREATE_RULESET, struct.pack("=Q", _WRITES), 8, 0)
    try:
        for place in places:
            _allow(rules, place)
        if _libc.prctl(_SET_NO_NEW_PRIVS, 1, 0, 0, 0):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        _call(_RESTRICT_SELF, rules, 0)
    finally:
        os.close(rules)


def _allow(rules: int, place: str) -> None:
    try:
        opened = os.open(place, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return
    try:
        rights = _WRITES if os.path.isdir(place) else _TO_A_FILE
        _call(_ADD_RULE, rules, _BENEATH, struct.pack("=Qi", rights, opened), 0)
    finally:
        os.close(opened)


_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


def _call(number: int, *args: int | bytes | None) -> int:
    """The result of a system call. Raises OSError."""
    found: int = _libc.syscall(
        ctypes.c_long(number), *(ctypes.c_long(each) if isinstance(each, int) else each for each in args)
    )
    if found < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return found
