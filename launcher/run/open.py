"""Opens the run directory: a new one under `runs/`, the one that `--out` names, or one to resume or to show.

Earlier runs on this machine say how much launches scatter, and how long one takes.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from gpurun.launcher.compare.label import value_text
from gpurun.launcher.errors import MachineError, SpecError
from gpurun.launcher.jobfile.load import job_text, load_job, load_text, masked_overrides, program_job
from gpurun.launcher.jobfile.model import JobSpec
from gpurun.launcher.machine.git import commit_of, is_changed, top_directory
from gpurun.launcher.machine.host import Machine, host_record
from gpurun.launcher.plan.devices import with_free_cores
from gpurun.launcher.plan.estimate import Earlier
from gpurun.launcher.plan.model import Plan
from gpurun.launcher.run.find import find_run
from gpurun.launcher.rundir.claim import refuse_if_alive
from gpurun.launcher.rundir.files import RunDir, read_json, write_bytes, write_json
from gpurun.launcher.rundir.paths import (
    IMPROVEMENT,
    LATEST,
    PLAN,
    check_job_owner,
    check_owner,
    elsewhere,
    inside_of_run,
    is_file,
    is_ours,
)
from gpurun.launcher.rundir.records import CodeVersion, between_s, elapsed_s
from gpurun.launcher.rundir.store import source_of
from gpurun.launcher.units import format_duration

OTHER_JOB = "was made from another job, or on another machine"
OTHER_BUDGET = (
    "{path} has a budget of {was}, which can't become {now}\n"
    "    changing the length of a run after seeing its results makes false verdicts more likely: resume it\n"
    "    with the budget that it has, or start a new run"
)
"""The message for a run that can't be continued."""


@dataclass(frozen=True)
class Invocation:
    """The run's command line; `invocation.json`."""

    job_file: Path
    overrides: tuple[str, ...]
    """The values of `--set`."""
    job_dir: Path | None = None
    """The directory from which relative file names of the job start, if not the job file's own."""
    text: str | None = None
    """The job itself, where it is in no file (`gpurun run`); `job_file` is then only a name."""

    @property
    def directory(self) -> Path:
        """The real path of the directory from which relative file names of the job start."""
        return (self.job_dir or self.job_file.parent).resolve()


def program_invocation(
    script: str | None,
    module: str | None,
    args: Sequence[str],
    devices: str,
    overrides: Sequence[str],
    compare: Mapping[str, object],
) -> Invocation:
    """The command line of `gpurun run`, in the current directory."""
    text = program_job(script, module, args, devices, compare)
    return Invocation(Path("gpurun run"), tuple(overrides), Path.cwd(), text)


def load_invocation(given: Invocation) -> JobSpec:
    """The job to run.

    Raises:
        SpecError: it is wrong.
    """
    if given.text is not None:
        return load_text(given.text, "", given.overrides, given.directory)
    return load_job(given.job_file, given.overrides, given.job_dir, runs_here=True)


def open_run(invocation: Invocation, spec: JobSpec, plan: Plan, machine: Machine, out: Path | None) -> RunDir:
    """A new run directory that holds the job as given and as resolved, the plan and the host.

    Raises:
        SpecError: `out` exists and isn't empty.
        MachineError: the directory can't be written.
    """
    path = out or new_directory(Path("runs") / plan.name)
    check_free(path)
    run = RunDir(path)
    try:
        fill(run, invocation, spec, plan, machine)
        if out is None:
            name_newest(path)
    except MachineError as error:
        raise elsewhere(error) from error
    return run


def name_newest(path: Path) -> None:
    """Lets `latest` beside a run, or a search, name it."""
    write_bytes(path.parent / LATEST, f"{path.name}\n".encode())


def check_free(path: Path) -> None:
    """Whether a new run may have this directory.

    Raises:
        SpecError: it exists and isn't empty, or lies inside of another run, which would hide it.
    """
    if around := next(filter(is_ours, path.absolute().parents), None):
        raise inside_of_run(path, around)
    if not path.exists() or (path.is_dir() and not any(path.iterdir())):
        return
    refuse_if_alive(RunDir(path), is_new=True)
    for name, kind in ((PLAN, "run"), (IMPROVEMENT, "search")):
        if (path / name).is_file():
            raise SpecError(
                f"{path} already holds a {kind}; name another --out, or continue that {kind}: --resume {path}"
            )
    what = "is a directory with other files" if path.is_dir() else "is a file"
    raise SpecError(f"{path} {what}; name another --out, one that is new or empty")


def fill(run: RunDir, invocation: Invocation, spec: JobSpec, plan: Plan, machine: Machine) -> None:
    """Writes what the run begins with. The plan comes last: a directory that has one can be resumed."""
    job_file = run.job if invocation.text is not None else invocation.job_file
    job_dir = str(invocation.job_dir) if invocation.job_dir is not None else None
    overrides = masked_overrides(invocation.overrides, spec)
    write_json(run.invocation, StoredInvocation(str(job_file.absolute()), overrides, job_dir))
    write_json(run.spec, spec.resolved())
    write_json(run.host, whole_record(spec, plan, machine))
    if (code := code_version(invocation.directory)) is not None:
        write_json(run.code, code)
    # A job with secrets as resolved: no value is left in a comment.
    text = job_text(spec.resolved()) if spec.secrets or spec.source is None else spec.source.text
    write_bytes(run.job, text.encode())
    write_json(run.plan, plan)


def code_version(directory: Path) -> CodeVersion | None:
    """The commit that a job's directory is at; `None` outside of git."""
    root = top_directory(directory) if directory.is_dir() else None
    commit = commit_of(root) if root is not None else None
    return CodeVersion(str(root), commit, is_changed(root)) if root is not None and commit else None


def whole_record(spec: JobSpec, plan: Plan, machine: Machine) -> dict[str, object]:
    """`host.json`: the machine, where the ranks are bound, and the nodes if there are several."""
    record = {**host_record(machine), "binding": binding_record(spec.bind, plan)}
    return {**record, "nodes": plan.nodes} if plan.nodes else record


def binding_record(bind: str, plan: Plan) -> dict[str, object]:
    """The hardware threads that the ranks run on, by group of launches; empty where they aren't bound."""
    ranks = {
        launch.group: {str(p.rank): p.cpus for p in launch.processes if p.cpus} for launch in plan.launches
    }
    return {"bind": bind, "cpus": {group: cpus for group, cpus in ranks.items() if cpus}}


def new_directory(parent: Path) -> Path:
    """`parent/YYYY-MM-DD_HH-MM-SS`, with a number appended if a run of that second exists already."""
    stamp = time.strftime("%Y-%m-%d_%H-%M-%S")
    path, number = parent / stamp, 2
    while path.exists():
        path, number = parent / f"{stamp}_{number}", number + 1
    return path


def own_run(path: Path) -> RunDir:
    """The run at `path`, as `find_run` takes it, if it is the user's own.

    Raises:
        SpecError: it is not, or no run is there.
    """
    run = find_run(path)
    check_owner(run.path)
    return run


def measured_in(path: Path) -> Path:
    """The directory of the job of the run at `path`, which may be gone.

    Raises:
        SpecError: no run of the user's own is there.
    """
    run = own_run(path)
    stored = run.read(run.invocation, StoredInvocation)
    return Path(stored.job_dir or Path(stored.job_file).parent)


def read_invocation(path: Path, more: tuple[str, ...] = ()) -> Invocation:
    """Reads the command line of the run at `path`, and adds further overrides.

    Raises:
        SpecError: no run is there, its job file is gone, or others may change it.
    """
    run = own_run(path)
    stored, name = run.read(run.invocation, StoredInvocation), source_of(path)
    job_file = Path(stored.job_file)
    remedy = f"use the copy in the run: {run.command} {run.job} --resume {name}"
    if not is_file(job_file):
        raise SpecError(f"the run's job file {job_file} no longer exists\n    {remedy}")
    check_job_owner(job_file, remedy)
    job_dir = Path(stored.job_dir) if stored.job_dir else None
    return Invocation(job_file, (*stored.overrides, *more), job_dir)


@dataclass(frozen=True)
class StoredInvocation:
    """`Invocation` as JSON has it; the path is absolute, so that a run can be resumed from anywhere."""

    job_file: str
    overrides: tuple[str, ...]
    job_dir: str | None = None


def run_to_resume(path: Path, plan: Plan) -> RunDir:
    """A run that can be resumed.

    Args:
        path: as `find_run` takes it.
        plan: of the job as it is now.

    Raises:
        SpecError: no run is there, it was made from another job, or another command works on it.
    """
    run = own_run(path)
    refuse_if_alive(run)
    name = source_of(run.path)
    if run.search.exists():
        raise SpecError(f"{name} is a search; to continue it: {run.command} --resume {name}")
    stored, now = _without_load(run.read(run.plan, Plan)), _without_load(as_read_back(plan))
    if stored.gate is not None:
        raise SpecError(f"{name} is the run of a gate, whose versions are gone: start the gate again")
    is_alike = stored.variants == now.variants and (
        replace(now, budget_s=stored.budget_s, launches=stored.launches) == stored
    )
    if is_alike and stored.budget_s and now.budget_s and stored != now:
        was_s, is_s = map(format_duration, (stored.budget_s, now.budget_s))
        raise SpecError(OTHER_BUDGET.format(path=name, was=was_s, now=is_s))
    if stored != now:
        raise SpecError(
            f"{name} {OTHER_JOB}: {plan_difference(stored, now)}\n    start a new run: gpurun JOB.yaml"
        )
    return run


def _without_load(plan: Plan) -> Plan:
    """The plan without what other processes used when it was made: its notes, and which GPUs were busy."""
    nodes = (
        replace(node, gpus=tuple(replace(gpu, busy_with=None) for gpu in node.gpus)) for node in plan.nodes
    )
    return replace(plan, notes=(), nodes=tuple(nodes))


def as_planned_for(spec: JobSpec, machine: Machine, resumed: Path | None) -> Machine:
    """The machine with its free cores: those of now, or when the run that is resumed began, for its threads.

    Raises:
        SpecError: there is no run to resume.
    """
    if resumed is None:
        return with_free_cores(spec, machine)
    run = find_run(resumed)
    host = run.read(run.host, _StoredHost) if run.host.exists() else _StoredHost()
    return replace(machine, free_cores=host.free_cores)


@dataclass(frozen=True)
class _StoredHost:
    """The part of `host.json` that a plan depends on."""

    free_cores: int | None = None


def as_read_back(plan: Plan) -> Plan:
    """The plan as its file holds it: JSON has lists, no tuples."""
    return msgspec.json.decode(msgspec.json.encode(plan), type=Plan)


def plan_difference(before: Plan, now: Plan) -> str:
    """The part of a run's plan that differs from the plan of the job now; of variants the first figure."""
    old, new = ({variant.id: variant for variant in plan.variants} for plan in (before, now))
    for what, ids in (("no longer has", old.keys() - new.keys()), ("also has", new.keys() - old.keys())):
        if ids:
            return f"the job {what} {', '.join(sorted(ids))}"
    for variant, other in zip(old.values(), new.values(), strict=True):
        for key, value, changed in differing(variant, other):
            return f"{key} of {variant.id} was {_shown(value)}, and is {_shown(changed)} now"
    parts = (key.replace("_", " ") for key, *_ in differing(before, now))
    return f"the {', '.join(parts)} of its plan differ"


def _shown(value: Any) -> str:
    return "not set" if value is None else value_text(value)


def differing(before: Any, now: Any) -> list[tuple[str, Any, Any]]:
    """Fields of two dataclasses of one class that differ, with both values."""
    pairs = ((each.name, getattr(before, each.name), getattr(now, each.name)) for each in fields(before))
    return [pair for pair in pairs if pair[1] != pair[2]]


MOST_RUNS = 20
"""Earlier runs that are looked at, the newest ones of a job; then as many of others."""


@dataclass(frozen=True)
class _Compared:
    """The part of `comparison.json` that is needed."""

    scatter: Mapping[str, float | None]
    host: Mapping[str, Any]


def find_earlier(job: str, hostname: str, runs: Path = Path("runs")) -> Earlier | None:
    """The newest run of this job on this machine that shows how much launches scatter, else of any job."""
    for name, path in _newest_first(job, runs):
        try:
            compared = read_json(path / "comparison.json", _Compared)
        except MachineError:
            continue
        shared, apart = compared.scatter.get("shared_percent"), compared.scatter.get("apart_percent")
        if compared.host.get("hostname") == hostname and (shared, apart) != (None, None):
            launch_s = _launch_s(RunDir(path)) if name == job else None
            return Earlier(path, shared, apart, launch_s)
    return None


def _newest_first(job: str, runs: Path) -> Iterator[tuple[str, Path]]:
    """Runs of the job, then those of others; their directories are named by the time."""
    found = sorted(runs.glob("*/*/comparison.json"), key=lambda path: path.parent.name, reverse=True)
    own = [path.parent for path in found if path.parent.parent.name == job]
    others = [path.parent for path in found if path.parent.parent.name != job]
    yield from ((path.parent.name, path) for path in (*own[:MOST_RUNS], *others[:MOST_RUNS]))


def _launch_s(run: RunDir) -> float | None:
    """Seconds from one launch to the next: the median of the second half, in which only close rivals run."""
    logs = [log for log in run.read_all_events().values() if log and log[-1].stage == "done"]
    seconds = [*map(elapsed_s, logs)]
    gaps = between_s(logs, run.read_commands()) or [0.0]
    return median(seconds[len(seconds) // 2 :]) + median(gaps) if seconds else None
