"""The two versions of a gate as directories: a commit gets a worktree, which is removed afterwards."""

import contextlib
import fcntl
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from gpurun.launcher.errors import MachineError, SpecError
from gpurun.launcher.jobfile.builtins import builtin_named
from gpurun.launcher.jobfile.model import JobSpec
from gpurun.launcher.machine.git import commit_of, git, is_changed, top_directory
from gpurun.launcher.plan.model import GatePlan, Side
from gpurun.launcher.units import plural

PREFIX = "gpurun-gate-"
"""Of the temporary directories with worktrees."""
CHECKOUT_S = 600.0
"""The most that a checkout may take."""
SHORT = 10
"""Characters of a commit."""
WORKING_COPY = "working copy"


@dataclass(frozen=True)
class Interpreter:
    """A Python that ranks run in."""

    path: str = ""
    """Absolute; empty: this command's."""
    torch: str = ""


@dataclass(frozen=True)
class Wanted:
    """Which versions the command line names."""

    against: str
    """A git ref, or a directory."""
    threshold_percent: float
    shared: tuple[Path, ...] = ()
    """What the first version takes from the working copy, absolute."""
    a: Interpreter = Interpreter()
    b: Interpreter = Interpreter()


@contextlib.contextmanager
def two_versions(wanted: Wanted, spec: JobSpec, job_dir: Path) -> Iterator[GatePlan]:
    """Both versions, for as long as the block lasts.

    Raises:
        SpecError: there is no such version, or the job can't run in it.
        MachineError: git can't make a worktree.
    """
    job_dir = job_dir.resolve()
    root = top_directory(job_dir)
    commit = commit_of(root, wanted.against) if root else None
    shared = tuple(str(path) for path in wanted.shared)
    if root is not None and commit is not None:
        refuse_outsiders(shared, root)
        with checked_out(root, commit) as code:
            for path in shared:
                share(Path(path), code / os.path.relpath(path, root))
            a = Side(wanted.against, str(code), str(code / job_dir.relative_to(root)), wanted.a.path)
            a = with_commit(a, commit[:SHORT], wanted.a)
            b, note = own_side(wanted, root, job_dir), missing_submodules(code)
            yield checked(GatePlan(wanted.threshold_percent, a, b, shared, note), spec)
        return
    if shared:
        raise SpecError(f"--with needs a git ref: put the files into {wanted.against} yourself")
    a = directory_side(wanted, root, job_dir)
    yield checked(GatePlan(wanted.threshold_percent, a, own_side(wanted, root, job_dir)), spec)


def own_side(wanted: Wanted, root: Path | None, job_dir: Path) -> Side:
    """The working copy."""
    return with_commit(
        Side(WORKING_COPY, str(root or job_dir), str(job_dir), wanted.b.path), commit_text(root), wanted.b
    )


def directory_side(wanted: Wanted, root: Path | None, job_dir: Path) -> Side:
    """The version in a directory: one like the working copy's top, or like that of the job file.

    Raises:
        SpecError: it is neither a directory nor a git ref.
    """
    folder = Path(wanted.against)
    if not folder.is_dir():
        where = f"a commit in {root}" if root else f"a commit ({job_dir} is not in a git repository)"
        raise SpecError(f"--against {wanted.against}: neither {where} nor a directory")
    folder = folder.resolve()
    top = top_directory(folder)
    is_whole = root is not None and top == folder
    inner = folder / job_dir.relative_to(root) if root is not None and is_whole else folder
    side = Side(wanted.against, str(folder), str(inner), wanted.a.path)
    return with_commit(side, commit_text(top), wanted.a)


def commit_text(root: Path | None) -> str:
    """`1a2b3c4d5e`, with a note if files differ from it; empty outside of git."""
    commit = commit_of(root) if root is not None else None
    if root is None or commit is None:
        return ""
    return f"{commit[:SHORT]}{' with uncommitted changes' if is_changed(root) else ''}"


def with_commit(side: Side, commit: str, python: Interpreter) -> Side:
    torch = f"torch {python.torch}" if python.torch else ""
    return Side(side.name, side.root, side.job_dir, side.python, ", ".join(filter(None, (commit, torch))))


def checked(gate: GatePlan, spec: JobSpec) -> GatePlan:
    """The gate, if both versions have what the job runs.

    Raises:
        SpecError: the file isn't in one of them, or both would run the same one.
    """
    is_same = (gate.a.job_dir, gate.a.python) == (gate.b.job_dir, gate.b.python)
    if is_same:
        raise SpecError(f"--against {gate.a.name} is the working copy itself: nothing to compare")
    for file in code_files(spec):
        if os.path.isabs(file) and gate.a.python == gate.b.python:
            raise SpecError(f"both versions would run {file}: name it relative to the job file")
        if not (Path(gate.a.job_dir) / file).exists():
            raise SpecError(
                f"{file} is not in {gate.a.name}\n"
                f"    if it isn't committed, let both versions have it: --with {file}"
            )
    names = (spec.workload, *spec.compare.workload)
    is_ours = all(builtin_named(name) for name in names if name) and spec.program is None
    if is_ours and gate.a.python == gate.b.python:
        raise SpecError(
            f"both versions would run the same code: {spec.workload} is a workload of gpurun itself\n"
            "    to compare two installations of torch, pass --python-a and --python-b"
        )
    return gate


def code_files(spec: JobSpec) -> list[str]:
    """Files with the code that the job runs, as it names them."""
    workloads = [str(name).rpartition(":")[0] for name in (spec.workload, *spec.compare.workload) if name]
    return [name for name in (spec.script, *workloads) if name and name.endswith(".py")]


def refuse_outsiders(shared: Sequence[str], root: Path) -> None:
    """What both versions have must be in the working copy.

    Raises:
        SpecError: something isn't there.
    """
    for path in shared:
        if not os.path.lexists(path):
            raise SpecError(f"--with {path}: there is no such file or directory")
        if not path.startswith(f"{root}/"):
            raise SpecError(f"--with {path}: it must be in {root}")


def share(source: Path, target: Path) -> None:
    """Puts the working copy's file into a worktree, or a link to its directory, which may be large."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if target.is_dir() and not target.is_symlink():
        shutil.rmtree(target)
    else:
        target.unlink(missing_ok=True)
    if source.is_dir():
        target.symlink_to(source)
    else:
        shutil.copy2(source, target)


@contextlib.contextmanager
def checked_out(root: Path, commit: str) -> Iterator[Path]:
    """The files of a commit in a temporary directory; nothing is left of it after the block.

    Whoever is killed leaves it to the next gate in this repository.

    Raises:
        MachineError: git can't make a worktree.
    """
    prune(root)
    folder = Path(tempfile.mkdtemp(prefix=PREFIX)).resolve()
    with locked(folder):
        try:
            tree = str(folder / "code")
            added = git(root, "worktree", "add", "--detach", "--quiet", tree, commit, timeout_s=CHECKOUT_S)
            if added.code != 0:
                raise MachineError(f"git can't make a worktree of {commit[:SHORT]}: {added.err}")
            yield folder / "code"
        finally:
            with uninterrupted():
                remove(root, folder)


def prune(root: Path) -> None:
    """Removes worktrees of gates that were killed."""
    listed = git(root, "worktree", "list", "--porcelain").out.splitlines()
    trees = [Path(line.removeprefix("worktree ")) for line in listed if line.startswith("worktree ")]
    for tree in trees:
        folder = tree.parent
        if folder.name.startswith(PREFIX) and not is_in_use(folder):
            remove(root, folder)


def remove(root: Path, folder: Path) -> None:
    """The worktree, with what git notes of it, and its directory."""
    git(root, "worktree", "remove", "--force", str(folder / "code"), timeout_s=CHECKOUT_S)
    shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Holds a lock that ends with this process, however it dies."""
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def is_in_use(folder: Path) -> bool:
    """Whether a gate that still runs has its lock."""
    try:
        with (folder / "lock").open() as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Lets Ctrl-C and SIGTERM wait until the block is left."""
    numbers = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def missing_submodules(code: Path) -> tuple[str, ...]:
    """A note that a worktree has no submodules, if the commit has some."""
    modules = code / ".gitmodules"
    if not modules.is_file():
        return ()
    num = modules.read_text(errors="replace").count("[submodule ")
    return (f"{plural(num, 'submodule')} can't be checked out: take what both need by --with",)
