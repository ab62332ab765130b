"""Copies a run directory to a store as it grows."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from gpurun.launcher.errors import CTRL_C, Interrupted, MachineError
from gpurun.launcher.rundir.files import RunDir, write_json
from gpurun.launcher.rundir.store import EVERY_S, VERSIONS, Stamp, Store, read_versions, reason, stamps
from gpurun.launcher.rundir.url import Url

PLAN = "plan.json"
_GOES_ON = "the run goes on, and is copied as soon as that is possible"
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 30.0
"""Seconds before the store is tried again; doubled each time."""
FINAL_S, INTERRUPTED_S = 60.0, 30.0
"""How long the command waits for the store once the run has ended; a Pod is killed 60 s after SIGTERM."""
SMALL_BYTES = 1 << 20
GROWTH = 1.25
"""A larger file is copied again when it has grown by this factor, and at the end: stores only replace."""


class Copier:
    """Copies a run directory to a store, again and again; while the store is away, nothing is lost."""

    def __init__(
        self,
        run: Path,
        store: Store,
        say: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._run, self._store, self._say, self._clock = run, store, say, clock
        self._copied: dict[str, Stamp] | None = None if read_versions(run) else {}
        """`None`: an earlier command has copied the run, and the store hasn't been asked yet."""
        self._failures = 0
        self._next_s = float("-inf")
        self.error: Exception | None = None
        """Why the store can't be written now."""

    def step(self, final: bool = False) -> bool:
        """Copies what has changed, unless the store failed a moment ago; whether all is there then.

        Args:
            final: whether large files are copied even if they have grown by little.
        """
        if self._clock() < self._next_s:
            return False
        try:
            self._copy(final)
        except Exception as error:  # every store has exceptions of its own
            self._failed(error, final)
            return False
        if self.error is not None:
            self._say(f"{self._store.url} can be written again")
        self.error, self._failures = None, 0
        return True

    @property
    def is_known(self) -> bool:
        """Whether it is known what the store has."""
        return self._copied is not None

    def outdated(self, final: bool = True) -> dict[str, Stamp]:
        """The files that differ from the store; the plan, which makes a directory a run, comes last."""
        copied = self._copied or {}
        found = {
            name: stamp
            for name, stamp in stamps(self._run).items()
            if stamp != copied.get(name) and (final or _is_worth_it(copied.get(name), stamp))
        }
        return dict(sorted(found.items(), key=lambda each: (each[0] == PLAN, each[0])))

    def _copy(self, final: bool) -> None:
        if self._copied is None:
            self._copied = _in_both(self._run, self._store)
        outdated = self.outdated(final)
        for name, stamp in outdated.items():
            try:
                self._store.put(self._run / name, name)
            except FileNotFoundError:
                if (self._run / name).exists():
                    raise
                continue  # it was removed meanwhile
            self._copied[name] = stamp
        for name in self._copied.keys() - stamps(self._run).keys():
            self._store.remove(name)
            del self._copied[name]
        if final and outdated:
            self._remember(self._copied)

    def _remember(self, copied: Mapping[str, Stamp]) -> None:
        """Notes what the store has, for a command that continues the run: it would copy all again."""
        there = self._store.versions()
        with contextlib.suppress(MachineError):
            found = {name: (there[name], stamp) for name, stamp in copied.items() if name in there}
            write_json(self._run / VERSIONS, found)

    def _failed(self, error: Exception, final: bool) -> None:
        if self.error is None:
            now = "the run has ended; trying again" if final else _GOES_ON
            do = "write to" if self.is_known else "read"
            self._say(f"can't {do} {self._store.url}: {reason(error)}\n    {now}")
        self.error = error
        self._next_s = self._clock() + min(FIRST_PAUSE_S * 2**self._failures, LONGEST_PAUSE_S)
        self._failures = min(self._failures + 1, 10)


@dataclass
class Copy:
    """The copy of a run, and how it ended."""

    limit_s: float = FINAL_S
    """How long the command waits for it once the run has ended."""
    error: MachineError | None = None
    """The error at the end: files are missing in the copy."""
    interruption: Interrupted | None = None
    """The signal that came meanwhile."""


@contextlib.contextmanager
def copied(run: Path, url: Url | None, say: Callable[[str], None]) -> Iterator[Copy]:
    """Copies the run to the URL until the block is left, and then what is missing; `None`: to nowhere."""
    copy = Copy()
    if url is None:
        yield copy
        return
    copier, stop = Copier(run, Store(url), say), threading.Event()
    thread = threading.Thread(target=_keep_copying, args=(copier, stop, copy), daemon=True, name="copier")
    thread.start()
    try:
        yield copy
    except Interrupted:
        copy.limit_s = INTERRUPTED_S
        raise
    finally:
        stop.set()
        _await_end(thread, copy)
        missing, total = len(copier.outdated()), len(stamps(run))
        copy.error = _incomplete(run, url, copier.is_known) if missing else None
        which = f"not at {url}: {missing} of {total} files"
        if not copier.is_known:
            which = f"not known: which of {total} files are at {url}"
        said = f"{which}, since {_cause(copier, copy)}\n    nothing is lost: they are in {run}"
        say(said if missing else f"the run is also at {url}")


def _await_end(thread: threading.Thread, copy: Copy) -> None:
    """Waits until all is copied, but no longer than the limit, even if the store never answers a request.

    Ctrl-C ends that at once. Other signals announce that the machine is taken away: what can be copied until
    then is copied.
    """
    try:
        thread.join(copy.limit_s)
    except Interrupted as ended:
        copy.interruption = ended
        copy.limit_s = 0.0 if ended.cause == CTRL_C else min(copy.limit_s, INTERRUPTED_S)
        thread.join(copy.limit_s)


def _cause(copier: Copier, copy: Copy) -> str:
    """Why files are missing there."""
    if copier.error:
        return f"it can't be {'written' if copier.is_known else 'read'}: {reason(copier.error)}"
    return f"{copy.interruption.cause} came first" if copy.interruption else "it does not answer in time"


def _keep_copying(copier: Copier, stop: threading.Event, copy: Copy) -> None:
    while not stop.wait(EVERY_S):
        copier.step()
    ended_s = time.monotonic()
    while not copier.step(final=True) and time.monotonic() + FIRST_PAUSE_S < ended_s + copy.limit_s:
        time.sleep(FIRST_PAUSE_S)


def _incomplete(run: Path, url: Url, is_known: bool) -> MachineError:
    are = "are" if is_known else "may be"
    return MachineError(
        f"results {are} missing at {url}; to copy them later: {RunDir(run).command} --resume {run}\n"
        "    --out URL copies them to another place"
    )


def _is_worth_it(before: Stamp | None, now: Stamp) -> bool:
    """Whether a file is copied while it grows."""
    return before is None or now[0] < SMALL_BYTES or not before[0] <= now[0] < GROWTH * before[0]


def _in_both(run: Path, store: Store) -> dict[str, Stamp]:
    """The files that an earlier command has copied, and that no one has changed in the store since."""
    there = store.versions()
    return {
        name: stamp for name, (version, stamp) in read_versions(run).items() if there.get(name) == version
    }
