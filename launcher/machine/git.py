"""What git knows of a directory. Nothing that a repository configures is run: no hook, no file monitor."""

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

TIMEOUT_S = 10.0
OF_A_REPOSITORY = ("DIR", "WORK_TREE", "INDEX_FILE", "PREFIX", "OBJECT_DIRECTORY", "COMMON_DIR")
"""`GIT_DIR` and others that a hook sets: they would have git look elsewhere."""
HARMLESS = ("-c", "core.fsmonitor=false", "-c", f"core.hooksPath={os.devnull}")


@dataclass(frozen=True)
class GitResult:
    """What a command of git printed, and how it ended."""

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
    return GitResult(done.returncode, done.stdout.strip(), done.stderr.strip())


def top_directory(directory: Path) -> Path | None:
    """Of the working copy that a directory is in; `None` outside of git."""
    found = git(directory, "rev-parse", "--show-toplevel")
    return Path(found.out) if found.code == 0 and found.out else None


def commit_of(directory: Path, ref: str = "HEAD") -> str | None:
    """The commit that a ref names, in full; `None`: there is none."""
    found = git(directory, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{ref}^{{commit}}")
    return found.out if found.code == 0 and found.out else None


def is_changed(directory: Path) -> bool:
    """Whether tracked files differ from the last commit."""
    return bool(git(directory, "status", "--porcelain", "--untracked-files=no").out)
