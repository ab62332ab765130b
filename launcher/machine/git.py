"""Reads what git knows of a directory. Nothing that a repository configures is run: no hook, no file
monitor, and no filter but where a gate checks a commit out."""

import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from gpurun.launcher.errors import MachineError
from gpurun.launcher.machine.helper_process import is_in_use, locked_directory
from gpurun.launcher.units import COMMIT_CHARS

PURPOSE = "gate"
"""The purpose in the names of temporary directories with worktrees."""
CHECKOUT_S = 600.0
"""The most that a checkout may take."""
TIMEOUT_S = 10.0
OF_A_REPOSITORY = ("DIR", "WORK_TREE", "INDEX_FILE", "PREFIX", "OBJECT_DIRECTORY", "COMMON_DIR")
"""`GIT_DIR` and others that a hook sets: they would have git look elsewhere."""
HARMLESS = ("-c", "core.fsmonitor=false", "-c", f"core.hooksPath={os.devnull}")


@dataclass(frozen=True)
class GitResult:
    """The output of a git command, and how it ended."""

    code: int
    out: str
    err: str


def git(directory: Path, *args: str, timeout_s: float = TIMEOUT_S) -> GitResult:
    """Runs `git ARGS` in a directory; code 127 where there is no git, 124 where it takes too long."""
    unwanted = {f"GIT_{name}" for name in OF_A_REPOSITORY}
    environ = {key: value for key, value in os.environ.items() if key not in unwanted}
    try:
        done = subprocess.run(
            ["git", *HARMLESS, *args],
            cwd=directory,
            env=environ | {"GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C"},
            capture_output=True,
            text=True,
            errors="surrogateescape",
            timeout=timeout_s,
            stdin=subprocess.DEVNULL,
            check=False,
        )
    except OSError as error:
        return GitResult(127, "", f"git: {error.strerror}")
    except subprocess.TimeoutExpired:
        return GitResult(124, "", f"git {args[0]} took longer than {timeout_s:.0f} s")
    return GitResult(done.returncode, done.stdout.removesuffix("\n"), done.stderr.strip())


def top_directory(directory: Path) -> Path | None:
    """The top directory of the working copy that a directory is in; `None` outside of git."""
    found = git(directory, "rev-parse", "--show-toplevel")
    return Path(found.out) if found.code == 0 and found.out else None


def why_untracked(path: Path) -> str:
    """Why git gives back no version of a file, as a clause; empty: it has one."""
    found = git(path.parent, "ls-files", "--error-unmatch", "--", f":(literal){path.name}")
    if found.code == 0:
        return ""
    if "dubious ownership" in found.err:
        return f"git doesn't look at {path}, whose repository is another user's (see git's `safe.directory`)"
    return f"git doesn't track {path}"


def commit_of(directory: Path, ref: str = "HEAD") -> str | None:
    """The commit that a ref names, in full; `None`: there is none."""
    found = git(directory, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{ref}^{{commit}}")
    return found.out if found.code == 0 and found.out else None


def refs_of(directory: Path) -> dict[str, str]:
    """What the branches, the tags and HEAD are at, by name; empty outside of git."""
    form = "--format=%(objectname) %(refname)"
    found = git(directory, "for-each-ref", form, "refs/heads", "refs/tags").out.splitlines()
    head = commit_of(directory)
    refs = {name: commit for commit, _, name in (line.partition(" ") for line in found)}
    return {**refs, "HEAD": head} if head else refs


def is_changed(directory: Path) -> bool:
    """Whether tracked files differ from the last commit."""
    return bool(git(directory, *_no_filters(directory), "status", "--porcelain", "--untracked-files=no").out)


def _no_filters(directory: Path) -> list[str]:
    """Options that keep `status` from running the commands that the repository itself sets for its files."""
    found = git(directory, "config", "--local", "--includes", "--name-only", "--get-regexp", r"^filter\.")
    empty = (f"{key}={'false' if key.endswith('.required') else ''}" for key in found.out.splitlines())
    return [word for setting in empty for word in ("-c", setting)]


@contextlib.contextmanager
def checked_out(root: Path, commit: str) -> Iterator[Path]:
    """The files of a commit in a temporary directory; nothing is left of it after the block.

    Whoever is killed leaves it to the next gate in this repository.

    Raises:
        MachineError: git can't make a worktree.
    """
    prune(root)
    with locked_directory(PURPOSE) as directory:
        try:
            tree = str(directory / "code")
            added = git(root, "worktree", "add", "--detach", "--quiet", tree, commit, timeout_s=CHECKOUT_S)
            if added.code != 0:
                raise MachineError(f"git can't make a worktree of {commit[:COMMIT_CHARS]}: {added.err}")
            yield directory / "code"
        finally:
            with uninterrupted():
                remove(root, directory)


def prune(root: Path) -> None:
    """Removes worktrees of gates that were killed."""
    listed = git(root, "worktree", "list", "--porcelain").out.splitlines()
    trees = [Path(line.removeprefix("worktree ")) for line in listed if line.startswith("worktree ")]
    for tree in trees:
        directory = tree.parent
        if directory.name.startswith(f"gpurun-{PURPOSE}-") and not is_in_use(directory):
            remove(root, directory)


def remove(root: Path, directory: Path) -> None:
    """The worktree, with what git notes of it, and its directory."""
    git(root, "worktree", "remove", "--force", str(directory / "code"), timeout_s=CHECKOUT_S)
    shutil.rmtree(directory, ignore_errors=True)


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Lets Ctrl-C and SIGTERM wait until the block is left."""
    numbers = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
