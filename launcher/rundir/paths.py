"""The names of a run directory's files, and whether it can be written."""

import errno
import os
import stat
import tempfile
from dataclasses import dataclass
from pathlib import Path

from gpurun.launcher.errors import MachineError, SpecError

OTHER_DIRECTORY = "or name another run directory: --out"


@dataclass(frozen=True)
class RunPaths:
    """Owns every file name of one run; touches no file."""

    path: Path

    @property
    def job(self) -> Path:
        return self.path / "job.yaml"

    @property
    def plan(self) -> Path:
        return self.path / "plan.json"

    @property
    def host(self) -> Path:
        return self.path / "host.json"

    @property
    def spec(self) -> Path:
        return self.path / "spec.json"

    @property
    def invocation(self) -> Path:
        return self.path / "invocation.json"

    @property
    def code(self) -> Path:
        """The commit that it was started from."""
        return self.path / "code.json"

    @property
    def max_batch(self) -> Path:
        """The result of `global_batch: max`."""
        return self.path / "max_batch.json"

    @property
    def comparison(self) -> Path:
        return self.path / "comparison.json"

    @property
    def running(self) -> Path:
        """Which command works on this run now; it exists only meanwhile."""
        return self.path / "running.json"

    @property
    def restarts(self) -> Path:
        return self.path / "restarts.jsonl"

    @property
    def looks(self) -> Path:
        """When a run with a budget judged what it had measured."""
        return self.path / "looks.jsonl"

    def launch(self, launch_id: str) -> Path:
        return self.path / "launches" / self._named(launch_id)

    def launch_config(self, launch_id: str) -> Path:
        return self.launch(launch_id) / "launch.json"

    def events(self, launch_id: str, rank: int = 0) -> Path:
        return self.launch(launch_id) / (f"rank{rank}.events.jsonl" if rank else "events.jsonl")

    def launch_facts(self, launch_id: str) -> Path:
        return self.launch(launch_id) / "facts.json"

    def control(self, launch_id: str) -> Path:
        """Directory of what the ranks and the command share while they run; only the owner has access."""
        return self.launch(launch_id) / "control"

    def capture_request(self, launch_id: str, number: int) -> Path:
        return self.control(launch_id) / f"capture{number}.json"

    def capture(self, launch_id: str, number: int) -> Path:
        """Directory of the traces that `gpurun capture` has taken."""
        return self.launch(launch_id) / "captures" / str(number)

    def root_cause(self, launch_id: str) -> Path:
        return self.launch(launch_id) / "failure.json"

    def hang(self, launch_id: str) -> Path:
        return self.launch(launch_id) / "hang.json"

    def rendezvous(self, launch_id: str) -> Path:
        return self.launch(launch_id) / "rendezvous"

    def failure(self, launch_id: str, rank: int) -> Path:
        return self.launch(launch_id) / "failures" / f"rank{rank}.json"

    def log(self, launch_id: str, rank: int) -> Path:
        return self.launch(launch_id) / "log" / f"rank{rank}.log"

    def variant(self, variant_id: str) -> Path:
        return self.path / "variants" / self._named(variant_id)

    def _named(self, identity: str) -> str:
        """The id of a launch or a variant, before it becomes a part of a path: a run may be anyone's.

        Raises:
            SpecError: it would lead elsewhere.
        """
        if not is_name(identity):
            raise SpecError(f"{self.path}: {identity!r} is no id of a launch or a variant")
        return identity

    def steps(self, variant_id: str, rank: int) -> Path:
        return self.variant(variant_id) / f"rank{rank}.jsonl"

    def points(self, variant_id: str) -> Path:
        """What a micro-benchmark measured."""
        return self.variant(variant_id) / "points.jsonl"

    def trace(self, variant_id: str, rank: int) -> Path:
        return self.variant(variant_id) / f"rank{rank}.pt.trace.json.gz"

    def memory_snapshot(self, variant_id: str, rank: int) -> Path:
        """Allocations of the traced steps, with their stacks; https://pytorch.org/memory_viz shows it."""
        return self.variant(variant_id) / f"rank{rank}.memory.pickle"

    def traced(self, variant_id: str) -> Path:
        """The analysis of the traces of all ranks."""
        return self.variant(variant_id) / "trace.json"

    def balance(self, variant_id: str) -> Path:
        """How a balanced split was found."""
        return self.variant(variant_id) / "balance.json"

    def facts(self, variant_id: str) -> Path:
        return self.variant(variant_id) / "facts.json"

    def status(self, variant_id: str) -> Path:
        return self.variant(variant_id) / "status.json"


def is_name(identity: str) -> bool:
    """Whether an id names a directory that lies where it should."""
    return Path(identity).name == identity and identity not in ("", ".", "..") and identity.isprintable()


def refuse_links(folder: Path) -> None:
    """Returns if everything in a run directory is a directory, a file or a socket: gpurun makes nothing else.

    A link would have us read, or write, elsewhere; a pipe would have us wait. Whoever made the run may have
    put them there.

    Raises:
        SpecError: there is something else.
    """
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                mode = entry.stat(follow_symlinks=False).st_mode
                if stat.S_ISDIR(mode):
                    refuse_links(Path(entry.path))
                elif not stat.S_ISREG(mode) and not stat.S_ISSOCK(mode):
                    what = "a symbolic link" if stat.S_ISLNK(mode) else "not a regular file"
                    raise SpecError(f"{entry.path} is {what}, which no run of gpurun contains; remove it")
    except FileNotFoundError:
        return  # a run in progress removes files


def check_owner(run: RunPaths) -> None:
    """Returns if a run is the user's own. To continue a run is to run its job, and to write into it.

    Raises:
        SpecError: it, or what it says of its job, is another user's, or may be changed by everyone.
    """
    for path in (run.path, run.plan, run.invocation, run.job):
        try:
            status = path.lstat()
        except FileNotFoundError:
            continue
        if status.st_uid != os.geteuid():
            raise SpecError(f"{path} belongs to another user; only runs of your own can be resumed")
        if status.st_mode & stat.S_IWOTH:
            raise SpecError(f"everyone may write to {path}; if you trust it, first: chmod -R o-w {run.path}")


def check_writable(folder: Path) -> None:
    """Returns if `folder`, or its nearest existing parent, can be written; leaves nothing there.

    Asked before anything is imported or started for a run.

    Raises:
        MachineError: it can't be written.
    """
    nearest = next((each for each in (folder, *folder.absolute().parents) if os.path.lexists(each)), folder)
    if nearest == folder and not folder.is_dir():
        return  # opening the run gives a better message about a file in its place
    try:
        if not nearest.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        tempfile.TemporaryFile(dir=nearest).close()
    except OSError as error:
        from gpurun.launcher.rundir.files import (
            unwritable,  # not before: a fork comes next, which copies what is there
        )

        raise MachineError(f"{unwritable(folder, error)}\n    {OTHER_DIRECTORY}") from error
