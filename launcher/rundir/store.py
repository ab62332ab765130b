"""Run directories at URLs (`s3://`, `gs://`, …): the store itself, and copies from it and to it.

fsspec comes with torch, the package of a store does not. Neither is imported without a URL.
"""

import contextlib
import hashlib
import os
import secrets
import shutil
import stat
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from gpurun.launcher.errors import CTRL_C, GpurunError, Interrupted, MachineError, SpecError, unwritable
from gpurun.launcher.rundir.claim import live_claim
from gpurun.launcher.rundir.files import RunDir, open_regular, write_bytes, write_json
from gpurun.launcher.rundir.paths import (
    CONTROL,
    MADE_BY_US,
    PATTERN,
    PLAN,
    Url,
    inside_of_run,
    is_name,
    not_installed,
)

CACHE = "gpurun"
"""The name of our directory in the user's cache."""


def cache_directory() -> Path:
    """The user's own cache for gpurun, with access for no one else.

    It is in `$XDG_CACHE_HOME` or `~/.cache`; where that can't be written, or is another user's, in the
    directory for temporary files.

    Raises:
        OSError: no such directory can be made.
    """
    for place in _cache_places():
        if _make_private(place):
            return place
    raise PermissionError("there is no directory for the cache; set XDG_CACHE_HOME to one that you own")


def _cache_places() -> Iterator[Path]:
    given = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(given):
        yield Path(given) / CACHE
    home = os.path.expanduser("~")  # unchanged for a user without a home
    if os.path.isabs(home):
        yield Path(home) / ".cache" / CACHE
    import tempfile  # some milliseconds, for the last resort

    yield Path(tempfile.gettempdir()) / f"{CACHE}-{os.geteuid()}"


def _make_private(place: Path) -> bool:
    """Whether `place` is now a directory, not a link, that is ours alone."""
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        place.mkdir(mode=0o700, exist_ok=True)
        fd = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        status = os.fstat(fd)
        if status.st_uid != os.geteuid():
            return False
        if stat.S_IMODE(status.st_mode) != 0o700:
            os.fchmod(fd, 0o700)
        return os.access(place, os.W_OK | os.X_OK)
    except OSError:
        return False
    finally:
        os.close(fd)


EVERY_S = 5.0
"""How often a running job is copied, and a copy that is shown made again."""
STOP_S = 10.0
"""How long the end of `gpurun view` waits for what is being read."""
BLOCK_BYTES = 1 << 20
MOST_URL_BYTES, MOST_VERSIONS_BYTES = 1 << 12, 1 << 26
VERSIONS = ".versions.json"
"""In a run directory, or a copy: which version of each file in the store is which here."""
_STORE = ".store"
"""In a run directory: the URL where it is kept too. Neither is copied."""
_PROBE = ".probe"

Stamp = tuple[int, int, int]
"""Size, time and inode of a file."""
Versions = dict[str, tuple[str, Stamp]]
"""The version of a file in the store, and the stamp of the same here, by name."""


class Store:
    """A directory at a URL. Its functions raise whatever the store's package raises."""

    def __init__(self, url: Url) -> None:
        """Raises:
        SpecError: there is no such kind of store.
        MachineError: its package isn't installed, or it can't be reached.
        """
        self.url = url
        try:
            from fsspec.core import url_to_fs
            from fsspec.implementations.local import LocalFileSystem

            self.fs, root = url_to_fs(url)
        except ImportError as error:
            first = error.__cause__ or error  # fsspec's own words follow from it
            raise not_installed(url, (getattr(first, "name", None) or "fsspec").partition(".")[0]) from error
        except ValueError as error:
            raise SpecError(f"{url}: {error}") from error
        except Exception as error:
            raise _unreachable(url, error) from error
        self.root = str(root).rstrip("/")
        self._is_local = isinstance(self.fs, LocalFileSystem)

    def versions(self) -> dict[str, str]:
        """The objects in the store: relative name → something that changes with the content; `""`: a file."""
        self.fs.invalidate_cache()
        found: Mapping[str, Any] = self.fs.find(self.root, detail=True)
        return {
            str(path)[len(self.root) :].lstrip("/"): hashlib.sha256(str(facts).encode()).hexdigest()
            for path, facts in found.items()
            if not path.rpartition("/")[2].startswith(".")  # of a copy that broke off
        }

    def run_around(self) -> str | None:
        """The path of a run that this place lies in; its files would count as that run's."""
        parts = self.root.split("/")
        above = ("/".join(parts[:num]) for num in range(1, len(parts)))
        return next(
            (at for at in above if at and all(self._has(f"{at}/{name}") for name in MADE_BY_US)), None
        )

    def _has(self, path: str) -> bool:
        """Whether a file is there, as far as one may see: credentials may be for a part of a bucket only."""
        with contextlib.suppress(PermissionError):
            return bool(self.fs.exists(path))
        return False

    def put(self, source: Path, name: str) -> None:
        """Copies a file as it is now. Who reads the store sees the old content or the new, never a part."""
        path = f"{self.root}/{name}"
        with source.open("rb") as file, self._whole(path) as target:
            left = os.fstat(file.fileno()).st_size
            while left > 0 and (block := file.read(min(left, BLOCK_BYTES))):
                left -= target.write(block)

    @contextlib.contextmanager
    def _whole(self, path: str) -> Iterator[Any]:
        """A file to write, which appears at `path` when all of it is there."""
        if self._is_local:  # fsspec would move it from the directory for temporary files, block by block
            with _draft(Path(path)) as draft, draft.open("wb") as file:
                yield file
        else:
            with self.fs.transaction, self._create(path) as file:
                yield file

    def _create(self, path: str) -> Any:
        try:
            return self.fs.open(path, "wb")
        except FileNotFoundError:  # a store with real directories
            self.fs.makedirs(path.rpartition("/")[0], exist_ok=True)
            return self.fs.open(path, "wb")

    def get(self, name: str, target: Path) -> None:
        """Reads a file; `target` has the old content or the new, never a part."""
        path = f"{self.root}/{name}".rstrip("/")
        with _draft(target) as draft, draft.open("wb") as file, self.fs.open(path, "rb") as source:
            shutil.copyfileobj(source, file, BLOCK_BYTES)

    def remove(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self.fs.rm_file(f"{self.root}/{name}")


@contextlib.contextmanager
def _draft(target: Path) -> Iterator[Path]:
    """A file next to `target`, which replaces it unless an error is raised."""
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = target.with_name(f".{target.name}.{secrets.token_hex(8)}")
    try:
        yield draft
        draft.replace(target)
    finally:
        draft.unlink(missing_ok=True)


def _read_versions(run: Path) -> Versions:
    """The versions of the files that were copied, in either direction."""
    try:
        with open_regular(run / VERSIONS) as file:
            return msgspec.json.decode(file.read(MOST_VERSIONS_BYTES), type=Versions)
    except (OSError, ValueError):
        return {}


def _stamp(path: Path) -> Stamp:
    status = path.lstat()
    return status.st_size, status.st_mtime_ns, status.st_ino


def stamps(run: Path) -> dict[str, Stamp]:
    """The files of a run that are of use elsewhere: not what its processes share while they run."""
    found = {}
    for directory, names, files in os.walk(run):
        names[:] = [name for name in names if name != CONTROL]
        for name in files:
            path = Path(directory, name)
            if name.startswith(".") or path == run / "running.json":
                continue
            with contextlib.suppress(OSError):
                found[path.relative_to(run).as_posix()] = _stamp(path)
    return found


def keep_at(run: Path, url: Url) -> None:
    """From now on the run is kept at the URL too, whoever continues it."""
    write_bytes(run / _STORE, url.encode())


def kept_at(run: Path) -> Url | None:
    """Where it is kept too."""
    try:
        with open_regular(run / _STORE) as file:
            text = file.read(MOST_URL_BYTES).decode()
    except (OSError, UnicodeError):
        return None
    found = PATTERN.fullmatch(text)
    return Url(text) if found and found["slashes"] != "/" else None


def refuse_taken(url: Url) -> None:
    """Returns if a new run may be kept at the URL.

    One that is away is refused too: a mistake in the URL looks the same, and nothing was measured yet.

    Raises:
        SpecError: there is one already.
        MachineError: the store can't be reached.
    """
    store = Store(url)
    try:
        around = store.run_around()
        is_taken = around is None and bool(store.versions())
    except FileNotFoundError:
        return
    except Exception as error:
        now = "nothing was started: check the URL and the credentials, or wait until the store is back; or"
        remedy = f"run without this --out, and copy the run later: --resume RUN --out {url}"
        raise MachineError(f"{_unreachable(url, error)}\n    {now}\n    {remedy}") from error
    if around is not None:
        raise inside_of_run(url, around)
    if is_taken:
        raise SpecError(f"{url} already holds files; name another --out, or continue them: --resume {url}")


def refuse_unwritable(url: Url) -> None:
    """Returns if files can be written there, or the store can't be reached now: the copier waits for it.

    Raises:
        MachineError: there is no such bucket, or it may not be written.
    """
    store = Store(url)
    try:
        with store._whole(f"{store.root}/{_PROBE}") as file:
            file.write(b"")
    except (FileNotFoundError, PermissionError) as error:
        raise MachineError(
            f"can't write to {url}: {reason(error)}\n"
            "    create the bucket or get permission to write there, or name another place: --out URL"
        ) from error
    except Exception:
        return
    with contextlib.suppress(Exception):
        store.remove(_PROBE)


def fetched(url: Url) -> Path:
    """A copy of what is at the URL, in the user's cache: a directory, or the one file.

    Only what has changed since the last time is read again.

    Raises:
        SpecError: there is nothing.
        MachineError: it can't be read, or not be kept here.
    """
    store = Store(url)
    try:
        versions = store.versions()
    except FileNotFoundError:
        versions = {}
    except Exception as error:
        raise _unreachable(url, error) from error
    if not versions:
        raise SpecError(f"there is nothing at {url}")
    try:
        place = _copies() / hashlib.sha256(url.encode()).hexdigest()[:16] / url.rpartition("/")[2]
        place.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise unwritable(Path(str(error.filename)), error) from error
    if versions.keys() == {""}:
        _read(store, "", place)
        return place
    if live_claim(RunDir(place)) is not None:
        return place  # a command continues the run there: that is newer
    _renew(store, place, versions)
    keep_at(place, url)
    return place


def source_of(path: Path) -> Path | Url:
    """The URL of which `path` is a copy that `fetched` made, or a part of one; else `path` itself."""
    for run in (path, *path.parents):
        if (url := kept_at(run)) is not None:
            part = Url("/".join((url, *path.relative_to(run).parts)))
            return part if _is_copy(run) else path
    return path


def _is_copy(run: Path) -> bool:
    """Whether it is in the cache; only asked of a run at a URL, since asking makes that directory."""
    try:
        return run.is_relative_to(_copies())
    except OSError:  # no cache, so no copies
        return False


@contextlib.contextmanager
def refreshed(path: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Until the block is left, a copy of what is at a URL gets what is new there; nothing, if it is none.

    Args:
        path: what `fetched` returned, or any other.
        say: gets, once, that the store can't be read, and that it can be again.
    """
    url = source_of(path)
    if not isinstance(url, str):
        yield
        return
    stop = threading.Event()

    def refresh() -> None:
        is_away = False
        while not stop.wait(EVERY_S):
            try:
                fetched(url)
            except GpurunError as error:
                if not is_away:
                    say(f"{error}\n    what is shown is what was there before")
                is_away = True
                continue
            if is_away:
                say(f"{url} can be read again")
            is_away = False

    thread = threading.Thread(target=refresh, daemon=True, name="refresh")
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(STOP_S)


def _copies() -> Path:
    return cache_directory() / "stores"


def _renew(store: Store, place: Path, versions: Mapping[str, str]) -> None:
    """Makes the copy what is in the store."""
    known = _read_versions(place)
    for name, version in versions.items():
        if not all(is_name(part) for part in name.split("/")):
            raise SpecError(f"{store.url} has a file {name!r}, which no run of gpurun contains; remove it")
        if name not in known or known[name][0] != version or not (place / name).exists():
            _read(store, name, place / name)
            known[name] = version, _stamp(place / name)
    for name in [name for name in known if name not in versions]:
        (place / name).unlink(missing_ok=True)
        del known[name]
    write_json(place / VERSIONS, known)


def _read(store: Store, name: str, target: Path) -> None:
    try:
        store.get(name, target)
    except Exception as error:
        raise MachineError(f"can't copy {store.url}/{name} to {target}: {reason(error)}") from error


def _unreachable(url: Url, error: Exception) -> MachineError:
    return MachineError(f"can't read {url}: {reason(error)}")


def reason(error: Exception | None) -> str:
    """In one line."""
    text = " ".join(str(error).split())
    return text or type(error).__name__


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
        self._copied: dict[str, Stamp] | None = None if _read_versions(run) else {}
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
        name: stamp for name, (version, stamp) in _read_versions(run).items() if there.get(name) == version
    }
