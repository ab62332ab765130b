"""The command's own streams, as its ranks get them."""

import os
import pty
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from gpurun.launcher.cli.output import own_streams
from gpurun.launcher.rundir.rank_files import RankFiles


@contextmanager
def streams(*fds: int) -> Iterator[None]:
    """Within it, these are stdin, stdout and stderr."""
    with ExitStack() as stack:
        for number, fd in enumerate(fds):
            saved = os.dup(number)
            stack.callback(os.close, saved)
            stack.callback(os.dup2, saved, number)
            os.dup2(fd, number)
        yield


@pytest.fixture
def fds(tmp_path: Path) -> Iterator[dict[str, int]]:
    """What streams may be, by name."""
    with ExitStack() as stack:
        opened = [*pty.openpty(), *os.pipe()]
        for fd in opened:
            stack.callback(os.close, fd)
        ours, _ = (stack.enter_context(each) for each in socket.socketpair())
        files = {
            "file": stack.enter_context((tmp_path / "file").open("w")),
            "other": stack.enter_context((tmp_path / "other").open("w")),
            "null": stack.enter_context(open(os.devnull, "r+b", buffering=0)),
        }
        found = {name: file.fileno() for name, file in files.items()}
        yield found | {"terminal": opened[1], "pipe": opened[2], "socket": ours.fileno()}


@pytest.mark.parametrize(
    ("stdin", "stdout", "stderr", "given", "taken", "passes_to"),
    [
        ("pipe", "file", "terminal", True, True, None),
        ("pipe", "file", "other", True, True, 2),
        ("file", "file", "file", True, False, 1),
        ("null", "null", "terminal", True, True, None),
        ("socket", "socket", "terminal", False, False, None),
        ("pipe", "socket", "other", True, False, 2),
        ("pipe", "socket", "socket", True, False, 1),
        ("terminal", "terminal", "terminal", False, False, None),
        ("pipe", "terminal", "other", True, False, 2),
    ],
)
def test_ranks_open_the_streams_that_can_be_opened(
    fds: dict[str, int],
    stdin: str,
    stdout: str,
    stderr: str,
    given: bool,
    taken: bool,
    passes_to: int | None,
) -> None:
    """A terminal that another process reads is given to none."""
    with streams(fds[stdin], fds[stdout], fds[stderr]):
        found = own_streams(lends_stdout=True)
        alone = own_streams(lends_stdout=False)
    assert found.stdin == alone.stdin == (f"/proc/{os.getpid()}/fd/0" if given else "")
    assert found.stdout == (f"/proc/{os.getpid()}/fd/1" if taken else "")
    assert found.passes_to == passes_to
    assert found.takes_stdout == (stdout != "terminal")
    assert (alone.stdout, alone.passes_to) == ("", None if stderr == "terminal" else 2)
    assert not found.reads_terminal


def test_streams_of_another_user_are_none_of_the_ranks(
    fds: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after `su`."""

    def refused(path: str, *_: object) -> int:
        raise PermissionError(path)

    with streams(fds["pipe"], fds["file"], fds["other"]), monkeypatch.context() as patched:
        patched.setattr(os, "open", refused)
        found = own_streams(lends_stdout=True)
    assert (found.stdin, found.stdout, found.passes_to) == ("", "", 2)
    assert found.files == RankFiles("", 0, 0, passed=1)
