"""Run directories at URLs (`s3://`, `gs://`, …): written locally and copied as they grow; read as copies.

fsspec comes with torch, the package of a store does not. Neither is imported without a URL.
"""

import contextlib
import hashlib
import os
import re
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from gpurun.launcher.errors import MachineError, SpecError
from gpurun.launcher.rundir.files import open_regular, unwritable, write_bytes, write_json
from gpurun.launcher.rundir.paths import CONTROL, cache_directory, is_name

URL = re.compile(r"[a-z][a-z0-9+.-]+://.+")
PLAN = "plan.json"
EVERY_S = 5.0
"""How often a running job is copied."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 30.0
"""Before the store is tried again; doubled each time."""
FINAL_S = 60.0
"""How long the command waits for the store once the run has ended."""
SMALL_BYTES = 1 << 20
GROWTH = 1.25
"""A larger file is copied again when it has grown by this factor, and at the end: stores only replace."""
BLOCK_BYTES = 1 << 20
MOST_URL_BYTES = 1 << 12
_VERSIONS = ".versions.json"
"""In a copy: what was read of each file."""
_STORE = ".store"
"""In a run directory: the URL where it is kept too. Neither is copied."""

Stamp = tuple[int, int, int]
"""Size, time and inode of a file."""


class Url(str):
    """Where a run is kept, or is to be."""


def as_url(text: str) -> Url | None:
    """`None`: it is a path."""
    return Url(text.rstrip("/")) if URL.fullmatch(text) else None


class Store:
    """A directory at a URL. Its functions raise whatever the store's package raises."""

    def __init__(self, url: Url) -> None:
        """Raises:
        SpecError: there is no such kind of store, or its package isn't installed.
        """
        self.url = url
        try:
            from fsspec.core import url_to_fs
            from fsspec.implementations.local import LocalFileSystem

            self.fs, root = url_to_fs(url)
        except (ImportError, ValueError) as error:
            hint = "pip install fsspec" if getattr(error, "name", "") == "fsspec" else ""
            raise SpecError(f"{url}: {hint or error}") from error
        self.root = str(root).rstrip("/")
        self._is_local = isinstance(self.fs, LocalFileSystem)

    def versions(self) -> dict[str, str]:
        """What is there: relative name → something that changes with the content; `""` where it is a file."""
        self.fs.invalidate_cache()
        found: Mapping[str, Any] = self.fs.find(self.root, detail=True)
        return {
            str(path)[len(self.root) :].lstrip("/"): hashlib.sha256(str(facts).encode()).hexdigest()
            for path, facts in found.items()
            if not path.rpartition("/")[2].startswith(".")  # of a copy that broke off
        }

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
        self._copied: dict[str, Stamp] = {}
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
            self._failed(error)
            return False
        if self.error is not None:
            self._say(f"{self._store.url} can be written again")
        self.error, self._failures = None, 0
        return True

    def outdated(self, final: bool = True) -> dict[str, Stamp]:
        """What is not in the store as it is here; the plan, which makes a directory a run, comes last."""
        found = {
            name: stamp
            for name, stamp in stamps(self._run).items()
            if stamp != self._copied.get(name) and (final or self._is_worth_it(name, stamp))
        }
        return dict(sorted(found.items(), key=lambda each: (each[0] == PLAN, each[0])))

    def _is_worth_it(self, name: str, stamp: Stamp) -> bool:
        before = self._copied.get(name)
        return before is None or stamp[0] < SMALL_BYTES or not before[0] <= stamp[0] < GROWTH * before[0]

    def _copy(self, final: bool) -> None:
        for name, stamp in self.outdated(final).items():
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

    def _failed(self, error: Exception) -> None:
        if self.error is None:
            self._say(
                f"can't write to {self._store.url}: {_reason(error)}\n"
                "    the run goes on, and is copied as soon as that is possible"
            )
        self.error = error
        self._next_s = self._clock() + min(FIRST_PAUSE_S * 2**self._failures, LONGEST_PAUSE_S)
        self._failures = min(self._failures + 1, 10)


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
                status = path.lstat()
                found[path.relative_to(run).as_posix()] = status.st_size, status.st_mtime_ns, status.st_ino
    return found


@contextlib.contextmanager
def copied(run: Path, url: Url | None, say: Callable[[str], None]) -> Iterator[None]:
    """Copies the run to the URL until the block is left, and then what is missing; `None`: to nowhere."""
    if url is None:
        yield
        return
    copier, stop = Copier(run, Store(url), say), threading.Event()

    def copy() -> None:
        while not stop.wait(EVERY_S):
            copier.step()

    thread = threading.Thread(target=copy, daemon=True, name="copier")
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(FINAL_S)
        say(_finish(copier, run, url, is_free=not thread.is_alive()))


def _finish(copier: Copier, run: Path, url: Url, is_free: bool) -> str:
    """Copies the rest; what has come of that."""
    deadline = time.monotonic() + FINAL_S
    while is_free and not copier.step(final=True) and time.monotonic() < deadline:
        time.sleep(FIRST_PAUSE_S)
    missing = len(copier.outdated())
    if not missing:
        return f"the run is also at {url}"
    return (
        f"not at {url}: {missing} of {len(stamps(run))} files, since it can't be written: "
        f"{_reason(copier.error)}\n    nothing is lost; to copy them later: gpurun --resume {run}"
    )


def keep_at(run: Path, url: Url) -> None:
    """From now on the run is kept at the URL too, whoever continues it."""
    write_bytes(run / _STORE, url.encode())


def kept_at(run: Path) -> Url | None:
    """Where it is kept too."""
    try:
        with open_regular(run / _STORE) as file:
            return as_url(file.read(MOST_URL_BYTES).decode())
    except (OSError, UnicodeError):
        return None


def refuse_taken(url: Url) -> None:
    """Returns if a new run may be kept at the URL.

    Raises:
        SpecError: there is one already.
        MachineError: the store can't be reached.
    """
    try:
        is_taken = bool(Store(url).versions())
    except FileNotFoundError:
        return
    except SpecError:
        raise
    except Exception as error:
        raise _unreachable(url, error) from error
    if is_taken:
        raise SpecError(f"{url} already holds files; name another --out, or continue them: --resume {url}")


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
        place = (
            cache_directory()
            / "stores"
            / hashlib.sha256(url.encode()).hexdigest()[:16]
            / url.rpartition("/")[2]
        )
        place.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise unwritable(Path(str(error.filename)), error) from error
    if versions.keys() == {""}:
        _read(store, "", place)
        return place
    _renew(store, place, versions)
    keep_at(place, url)
    return place


def _renew(store: Store, place: Path, versions: Mapping[str, str]) -> None:
    """Makes the copy what is in the store."""
    kept = place / _VERSIONS
    try:
        known = msgspec.json.decode(kept.read_bytes(), type=dict[str, str])
    except (OSError, ValueError):
        known = {}
    for name, version in versions.items():
        if not all(is_name(part) for part in name.split("/")):
            raise SpecError(f"{store.url} has a file {name!r}, which no run of gpurun contains; remove it")
        if known.get(name) != version or not (place / name).exists():
            _read(store, name, place / name)
            known[name] = version
    for name in [name for name in known if name not in versions]:
        (place / name).unlink(missing_ok=True)
        del known[name]
    write_json(kept, known)


def _read(store: Store, name: str, target: Path) -> None:
    try:
        store.get(name, target)
    except Exception as error:
        raise MachineError(f"can't copy {store.url}/{name} to {target}: {_reason(error)}") from error


def _unreachable(url: Url, error: Exception) -> MachineError:
    return MachineError(f"can't read {url}: {_reason(error)}")


def _reason(error: Exception | None) -> str:
    """In one line."""
    text = " ".join(str(error).split())
    return text or type(error).__name__
