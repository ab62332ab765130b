"""Run directories at URLs (`s3://`, `gs://`, …): the store itself, and the copies that are read.

fsspec comes with torch, the package of a store does not. Neither is imported without a URL.
"""

import contextlib
import hashlib
import os
import secrets
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from gpurun.launcher.errors import GpurunError, MachineError, SpecError, unwritable
from gpurun.launcher.machine.cache import cache_directory
from gpurun.launcher.rundir.claim import read
from gpurun.launcher.rundir.files import RunDir, write_bytes, write_json
from gpurun.launcher.rundir.opening import open_regular
from gpurun.launcher.rundir.paths import CONTROL, MADE_BY_US, inside_of_run, is_name
from gpurun.launcher.rundir.url import PATTERN, Url, not_installed

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


def read_versions(run: Path) -> Versions:
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
    if (claim := read(RunDir(place))) is not None and claim.may_live:
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
    known = read_versions(place)
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
