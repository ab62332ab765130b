"""Starts a gate: two versions of the code, launched in turns in one session."""

import contextlib
import gc
import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from gpurun.launcher.errors import SpecError
from gpurun.launcher.jobfile.kinds import builtin_named
from gpurun.launcher.jobfile.model import JobSpec
from gpurun.launcher.machine.git import checked_out, commit_of, top_directory
from gpurun.launcher.machine.host import inspect_machine
from gpurun.launcher.plan.build import with_mistakes_of_plan
from gpurun.launcher.plan.model import GatePlan, Metric, Side
from gpurun.launcher.processes.pool import WorkerPools
from gpurun.launcher.run.job import Finished, Job, Output, carry_out, prepare
from gpurun.launcher.run.max_batch import wants_max
from gpurun.launcher.run.open import Invocation, code_version, load_invocation
from gpurun.launcher.units import COMMIT_CHARS, plural

WORKING_COPY = "working copy"


@dataclass(frozen=True)
class Interpreter:
    """A Python that ranks run in."""

    path: str = ""
    """Absolute; empty: this command's."""
    torch: str = ""


@dataclass(frozen=True)
class GateRequest:
    """The versions that the command line names, and what is compared of them."""

    against: str
    """A git ref, or a directory."""
    threshold_percent: float
    shared: tuple[Path, ...] = ()
    """The files that the first version takes from the working copy."""
    a: Interpreter = Interpreter()
    b: Interpreter = Interpreter()
    metric: Metric = "wall"


@contextlib.contextmanager
def two_versions(wanted: GateRequest, spec: JobSpec, job_dir: Path) -> Iterator[GatePlan]:
    """The plan of both versions, whose directories last as long as the block.

    Raises:
        SpecError: there is no such version, or the job can't run in it.
        MachineError: git can't make a worktree.
    """
    job_dir = job_dir.resolve()
    root = top_directory(job_dir)
    commit = commit_of(root, wanted.against) if root else None
    shared = tuple(map(os.path.abspath, wanted.shared))
    if root is not None and commit is not None:
        refuse_outsiders(shared, root)
        with checked_out(root, commit) as code:
            for path in shared:
                share(Path(path), code / os.path.relpath(path, root))
            a = Side(wanted.against, str(code), str(code / job_dir.relative_to(root)), wanted.a.path)
            a = with_commit(a, commit[:COMMIT_CHARS], wanted.a)
            b, note = own_side(wanted, root, job_dir), missing_submodules(code)
            yield checked(GatePlan(wanted.threshold_percent, a, b, shared, note), spec)
        return
    if shared:
        raise SpecError(f"--with needs a git ref: put the files into {wanted.against} yourself")
    a = directory_side(wanted, root, job_dir)
    yield checked(GatePlan(wanted.threshold_percent, a, own_side(wanted, root, job_dir)), spec)


def own_side(wanted: GateRequest, root: Path | None, job_dir: Path) -> Side:
    """The working copy."""
    code = code_version(job_dir)
    side = Side(WORKING_COPY, str(root or job_dir), str(job_dir), wanted.b.path)
    return with_commit(side, code.text if code else "", wanted.b)


def directory_side(wanted: GateRequest, root: Path | None, job_dir: Path) -> Side:
    """The version in a directory: one like the working copy's top, or like that of the job file.

    Raises:
        SpecError: it is neither a directory nor a git ref.
    """
    if not wanted.against.strip():
        raise SpecError("--against has no value: name a git ref, such as main, or a directory")
    directory = Path(wanted.against)
    if not directory.is_dir():
        where = f"a commit in {root}" if root else f"a commit ({job_dir} is not in a git repository)"
        raise SpecError(f"--against {wanted.against}: neither {where} nor a directory")
    directory = directory.resolve()
    top = top_directory(directory)
    is_whole = root is not None and top == directory
    inner = directory / job_dir.relative_to(root) if root is not None and is_whole else directory
    side = Side(wanted.against, str(directory), str(inner), wanted.a.path)
    code = code_version(directory)
    return with_commit(side, code.text if code else "", wanted.a)


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
    """Requires that the files that both versions share are in the working copy.

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


def missing_submodules(code: Path) -> tuple[str, ...]:
    """A note that a worktree has no submodules, if the commit has some."""
    modules = code / ".gitmodules"
    if not modules.is_file():
        return ()
    num = modules.read_text(errors="replace").count("[submodule ")
    return (f"{plural(num, 'submodule')} can't be checked out: take what both need by --with",)


NEEDED = ("torch", "msgspec", "numpy", "typing_extensions")
"""Distributions that a rank imports."""
PROBE = f"""
import importlib.metadata as m, json
found = {{}}
for name in {NEEDED!r}:
    try: found[name] = m.version(name)
    except m.PackageNotFoundError: pass
print(json.dumps(found))
"""
PROBE_TIMEOUT_S = 60.0


def run_gate(
    pools: WorkerPools,
    given: Invocation,
    wanted: GateRequest,
    budget_s: float,
    out: Path | None,
    output: Output,
) -> Finished:
    """Runs both versions in turns until it is known whether the second is slower, or the budget is spent.

    After Ctrl-C it still returns what was measured.

    Raises:
        SpecError: the job file or the command line is wrong.
        MachineError: the machine lacks what the job asks for, or git can't make a worktree.
    """
    gc.enable()
    with with_mistakes_of_plan(inspect_machine):
        spec = gate_job(load_invocation(given), budget_s)
    pools.know(spec)
    with two_versions(wanted, spec, given.directory) as gate:
        job = Job(given, spec, out, None, output)
        gate = replace(gate, metric=wanted.metric)
        ready = prepare(job, inspect_machine(), pools.get({}), gate=gate)
        return carry_out(ready, pools, output)


def gate_job(spec: JobSpec, budget_s: float) -> JobSpec:
    """The job as a gate runs it: until the outcome is known, whatever size the job states.

    Raises:
        SpecError: it is a job of which there is no gate.
    """
    refusals = {
        "a gate runs on one machine: set `nodes: 1`": spec.is_on_nodes,
        "both versions need the same batch: state `global_batch`, not `max`": wants_max(spec),
        f"{spec.workload} is a micro-benchmark, which has no step to compare": not spec.kind.is_ranked,
    }
    wrong = [text for text, is_so in refusals.items() if is_so]
    if wrong:
        raise SpecError(*wrong)
    steps = replace(spec.steps, launches=None, stated=frozenset())
    return replace(spec, name=f"{spec.name}-gate", until="decided", budget_s=budget_s, steps=steps)


def interpreter(option: str, value: str | None) -> Interpreter:
    """The Python that the command line names, if it has what a rank needs.

    Raises:
        SpecError: it can't run ranks.
    """
    if value is None:
        return Interpreter()
    path = shutil.which(value)
    if path is None:
        raise SpecError(f"{option} {value}: there is no such program")
    try:
        done = subprocess.run(
            [path, "-P", "-c", PROBE],
            capture_output=True,
            text=True,
            timeout=PROBE_TIMEOUT_S,
            check=True,
            stdin=subprocess.DEVNULL,
        )
        found = json.loads(done.stdout)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        raise SpecError(f"{option} {value}: this is no Python 3.11 or newer ({error})") from None
    lacking = [name for name in NEEDED if name not in found]
    if lacking:
        install = f"install what is missing: {value} -m pip install {' '.join(lacking)}"
        raise SpecError(f"{option} {value} has no {', '.join(lacking)}\n    {install}")
    return Interpreter(os.path.abspath(path), found["torch"])
