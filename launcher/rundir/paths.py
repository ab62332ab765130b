"""The layout and bounds of a run directory, URLs of stores, and files of directories that may be anyone's.

Every reader checks such a directory and opens its files here, though all may change at any time.
"""

import errno
import os
import re
import stat
import struct
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

from gpurun.launcher.errors import MachineError, SpecError, TraceError, unreadable, unwritable
from gpurun.launcher.machine.resource_limits import remedy
from gpurun.launcher.units import format_number

CONTROL = "control"
JOB, PLAN, INVOCATION = "job.yaml", "plan.json", "invocation.json"
LAUNCHES = "launches"
LATEST = "latest"
"""A text file with the name of the newest run; a link would make TensorBoard read that run twice."""
SELFTEST, IMPROVEMENT = "selftest.json", "improve.json"
"""The results of a self-test and of `gpurun improve`, whose directories hold runs of their own."""
CHANGE = "change.diff"
"""The change that `gpurun improve` has proven, as `git apply` takes it."""
PROGRAM_FILES = "files"
"""In the directory of a launch, for what its program saves."""
CACHES = "caches"
"""In the directory of a launch, in place of caches that it may not write."""
MAX_KEPT_ROUNDS = 1000
"""The most rounds that are kept of a program's launch per rank; of more, a random sample, of about half as
many at least. The standard error of the median round is then up to 6 % of the rounds' standard deviation
(1.25 / √500), for normal noise."""


Stamp = tuple[int, int]
"""Size of a file in bytes, and time of its last change in ns."""


def stamp_of(path: Path) -> Stamp:
    """Size and time of a file, which change with its content; -1 where there is none."""
    try:
        found = path.stat()
    except (OSError, ValueError):
        return (-1, -1)
    return found.st_size, found.st_mtime_ns


@lru_cache(maxsize=1000)
def is_name(identity: str) -> bool:
    """Whether an id names a directory that lies where it should."""
    return Path(identity).name == identity and identity not in ("", ".", "..") and identity.isprintable()


def is_rank(number: str) -> bool:
    """Whether this is a rank's number as file names have it: `12`, not `012`, `foo` or `²`."""
    return number.isascii() and number.isdecimal() and len(number) < 8 and str(int(number)) == number


def rank_files(directory: Path, suffix: str) -> dict[int, Path]:
    """The files `rank0SUFFIX`, `rank1SUFFIX` and so on of a directory by rank, in order."""
    found = {
        path.name.removeprefix("rank").removesuffix(suffix): path for path in directory.glob(f"rank*{suffix}")
    }
    return {rank: found[str(rank)] for rank in sorted(int(number) for number in found if is_rank(number))}


def older_part(log: Path) -> Path:
    """The file with the output before that in `log`, once there was too much."""
    return log.with_name(f"{log.name}.1")


def is_of_program(directory: Path) -> bool:
    """Whether it is `launches/ID/files` or `…/caches`, or the same path relative to a run directory."""
    return directory.name in (PROGRAM_FILES, CACHES) and directory.parent.parent.name == LAUNCHES


def check_owner(run: Path) -> None:
    """Returns if a run is the user's own. To continue it is to run its job, and to write into its directory.

    Raises:
        SpecError: it, or what it says of its job, is another user's, or may be changed by everyone.
    """
    for path in (run, run / PLAN, run / INVOCATION, run / JOB):
        try:
            status = path.lstat()
        except FileNotFoundError:
            continue
        if status.st_uid != os.geteuid():
            raise SpecError(f"{path} belongs to another user; only runs of your own can be resumed")
        if who := _other_writers(path, status):
            raise SpecError(f"{who} may write to {path}; if you trust it, first: chmod -R go-w {run}")


def check_job_owner(job_file: Path, remedy: str) -> None:
    """Returns if only the user, or root, may change the job file that a run names; it may lie anywhere.

    Raises:
        SpecError: others may; ends with the remedy.
    """
    status = job_file.stat()
    if status.st_uid not in (os.geteuid(), 0):
        raise SpecError(f"the run's job file {job_file} belongs to another user\n    {remedy}")
    if who := _other_writers(job_file, status):
        raise SpecError(f"{who} may write to the run's job file {job_file}\n    {remedy}")


def _other_writers(path: Path, status: os.stat_result) -> str:
    """Who else than its owner may change a file or directory; empty if no one may.

    On many systems every user has a group of their own, whose right to write means nothing.
    """
    if status.st_mode & stat.S_IWOTH:
        return "everyone"
    if not status.st_mode & stat.S_IWGRP:
        return ""
    if _lists_writers(path):
        return "others, by an access control list (see getfacl),"
    import grp  # rarely needed
    import pwd

    try:
        group, owner = grp.getgrgid(status.st_gid), pwd.getpwuid(status.st_uid)
    except KeyError:  # no one knows who is in it
        return f"the group {status.st_gid}"
    is_own = group.gr_gid == owner.pw_gid and group.gr_name == owner.pw_name
    return "" if is_own and set(group.gr_mem) <= {owner.pw_name} else f"the group {group.gr_name}"


def _lists_writers(path: Path) -> bool:
    """Whether its access control list has users or groups who may write, as the group's bits then allow.

    Source: linux/posix_acl_xattr.h, a version of 4 bytes and then tag, permissions and id of each entry;
    ACL_USER is 2, ACL_GROUP 8, ACL_WRITE 2.
    """
    try:
        entries = os.getxattr(path, "system.posix_acl_access")[4:]
    except OSError:  # it has none, or the file system knows none
        return False
    return any(tag in (2, 8) and allowed & 2 for tag, allowed, _ in struct.iter_unpack("<HHI", entries))


def check_writable(directory: Path) -> None:
    """Returns if `directory`, or its nearest existing parent, can be written; leaves nothing there.

    Asked before anything is imported or started for a run.

    Raises:
        MachineError: it can't be written, or recorded.
    """
    whole = str(directory.absolute())
    if (shown := whole.encode(errors="backslashreplace").decode()) != whole:
        raise MachineError(f"{shown} isn't UTF-8, as records of a run are: rename that directory")
    places = (directory, *directory.absolute().parents)
    nearest = next((each for each in places if os.path.lexists(each)), directory)
    if nearest == directory and not directory.is_dir():
        return  # opening the run gives a better message about a file in its place
    try:
        if not nearest.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        from tempfile import TemporaryFile  # 10 ms, which reading a job doesn't need

        with TemporaryFile(dir=nearest) as file:
            file.write(b"\0")  # a name alone needs no space
    except OSError as error:
        raise elsewhere(unwritable(directory, error)) from error


def elsewhere(error: MachineError) -> MachineError:
    """The error about a new run, which may be written to another place; it may have another remedy."""
    if limit := remedy(str(error)):  # it holds everywhere
        return MachineError(f"{error}\n    {limit}")
    joint = "or name" if str(error).endswith("free some space") else "name"
    return MachineError(f"{error}\n    {joint} another run directory: --out")


def num_bytes(path: Path) -> int:
    """The size of a file; 0 if it does not exist."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def bytes_below(directory: Path) -> int:
    """The size of all files in a directory; links are not followed."""
    places = (Path(place) / name for place, _, names in os.walk(directory) for name in names)
    return sum(num_bytes(path) for path in places if not path.is_symlink())


MADE_BY_US = (PLAN, INVOCATION)
"""Files of every run: a plan by itself may be another program's."""


def is_ours(directory: Path) -> bool:
    """Whether a directory is certainly a run of gpurun, so that it may be deleted."""
    return all((directory / name).is_file() for name in MADE_BY_US)


def is_our_search(directory: Path) -> bool:
    """Whether a directory is certainly a search of `gpurun improve`, and holds nothing but its runs."""
    if not (directory / IMPROVEMENT).is_file():
        return False
    return all(each.name in (IMPROVEMENT, CHANGE) or is_ours(each) for each in directory.iterdir())


def inside_of_run(place: object, run: object) -> SpecError:
    """The error for a run that would lie in another one, which hides it from whoever lists runs."""
    return SpecError(f"{place} lies inside of the run {run}; name another --out, outside of it")


PATTERN = re.compile(r"(?P<kind>[A-Za-z][A-Za-z0-9+.:-]+):(?P<slashes>/+)(?P<rest>.*)", re.DOTALL)
_PATHS = ("file", "local", "hdfs", "dbfs", "memory")
"""Kinds of stores whose URL may have no bucket or host before its path: `file:///data/run`."""
_READ_ONLY = ("http", "https", "github", "gist", "git", "zip", "tar", "data")
_PACKAGES = {"smbclient": "smbprotocol", "libarchive": "libarchive-c"}
"""Names on PyPI by that of the module, where they differ."""


class Url(str):
    """The URL at which a run is kept, or is to be."""


def as_url(text: str, is_used_here: bool = True) -> Url | None:
    """`None`: it is a path.

    Args:
        text: as a user writes it.
        is_used_here: whether the store's package is needed on this machine.

    Raises:
        SpecError: it is a URL that names no directory, or no kind of store that there is.
        MachineError: the store's package isn't installed.
    """
    if (found := PATTERN.fullmatch(text)) is None:
        return None
    from fsspec import available_protocols  # also knows those of other packages

    kind, slashes, rest = found["kind"].lower(), len(found["slashes"]), found["rest"].rstrip("/")
    if kind not in available_protocols():
        if slashes == 1:
            return None
        raise SpecError(
            f"{text}: fsspec knows no store {kind}://\n"
            f"    write s3://BUCKET/PATH or gs://BUCKET/PATH; a directory of that name is ./{text}"
        )
    place = ("/" if slashes > 2 else "") + rest
    is_path, is_file = kind in _PATHS, kind in ("file", "local")
    if slashes == 1 or not rest or (slashes > 2 and not is_path) or (slashes == 2 and is_file):
        meant = f"{kind}:///{rest or 'PATH'}" if is_path else f"{kind}://{rest or 'BUCKET/PATH'}"
        raise SpecError(f"{text} is not the URL of a directory in a store; write {meant}")
    if is_used_here:
        _check_package(f"{kind}://{place}", kind)
    return Url(f"{kind}://{place}")


def to_write(url: Url) -> Url:
    """The URL, for a run that is kept there.

    Raises:
        SpecError: what is there can only be read, or ends with the process.
    """
    kind = url.partition(":")[0]
    if kind == "memory" or kind in _READ_ONLY:
        why = "is lost when the command ends" if kind == "memory" else "can only be read"
        raise SpecError(f"{url} {why}; keep the run at s3://BUCKET/PATH or gs://BUCKET/PATH")
    return url


def _check_package(url: str, kind: str) -> None:
    """Doesn't import it: that takes long."""
    from fsspec.registry import known_implementations

    module = known_implementations.get(kind, {}).get("class", "fsspec").partition(".")[0]
    if find_spec(module) is None:
        raise not_installed(url, module)


def not_installed(url: str, module: str) -> MachineError:
    """The message about a package that the store of a URL needs."""
    package = _PACKAGES.get(module, module)
    return MachineError(f"{url} needs the package {package}; install it: pip install {package}")


_RECORD = re.compile(r"(?!.*events\.jsonl$|rank.*\.jsonl$|.*\.pt\.trace\.json$).*\.jsonl?")
_DEEPEST = 16
"""A run of gpurun has directories on fewer levels."""
MAX_ENTRIES = 1_000_000
"""The most entries of a run, without what programs save: ten times those of 100 launches on 256 devices."""


def real_path(path: Path) -> Path:
    """The path of a file or directory now, all links resolved.

    Raises:
        OSError: there is none.
    """
    fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        return Path(os.readlink(f"/proc/self/fd/{fd}"))
    finally:
        os.close(fd)


def places_of(paths: Sequence[Path]) -> tuple[Path, ...]:
    """The real paths of files and directories that a user names: they may be links.

    Raises:
        TraceError: one doesn't exist.
    """
    try:
        return tuple(map(real_path, paths))
    except OSError as error:
        hint = f"; {_near(Path(error.filename))}" if isinstance(error, FileNotFoundError) else ""
        raise TraceError(f"{error.filename}: {(error.strerror or str(error)).lower()}{hint}") from error


def _near(path: Path) -> str:
    """The hint for a name that isn't there, or leads nowhere."""
    import difflib

    if path.is_symlink():
        return f"it is a link to {os.readlink(path)}"
    names = os.listdir(path.parent) if path.parent.is_dir() else []
    near = difflib.get_close_matches(path.name, names, n=1, cutoff=0.75)
    return f"did you mean {path.with_name(near[0])}?" if near else "name a trace, or a directory of traces"


def refuse_links(directory: Path) -> int:
    """How many bytes the records in a run directory have together, without steps and events.

    Returns if everything in it is a directory, a file or a socket: gpurun makes nothing else. A link would
    have us read, or write, elsewhere; a pipe would have us wait. Whoever made the run may have put them
    there. What programs save for themselves is not looked at, since gpurun never opens it.

    Raises:
        SpecError: there is something else, too much, or a directory that can't be read.
    """
    num_bytes = 0
    for number, of_entry in enumerate(_everything_in(directory, 0)):
        if number >= MAX_ENTRIES:
            most = format_number(MAX_ENTRIES, 0)
            raise SpecError(f"{directory} has more than {most} files and directories; remove some")
        num_bytes += of_entry
    return num_bytes


def _everything_in(directory: Path, depth: int) -> Iterator[int]:
    """The bytes of each entry, if it is a record."""
    if depth > _DEEPEST:
        raise SpecError(f"{directory} lies deeper than any directory of a run; remove it")
    try:
        with os.scandir(directory) as entries:
            for entry in entries:
                yield _num_bytes_of(entry)
                if entry.is_dir(follow_symlinks=False) and not is_of_program(Path(entry.path)):
                    yield from _everything_in(Path(entry.path), depth + 1)
    except FileNotFoundError:
        pass  # a run in progress removes files
    except PermissionError as error:
        if directory.name != CONTROL:  # which only ranks and their owner need
            raise SpecError(unreadable(directory, error)) from None


def _num_bytes_of(entry: "os.DirEntry[str]") -> int:
    status = entry.stat(follow_symlinks=False)
    if not any(is_it(status.st_mode) for is_it in (stat.S_ISDIR, stat.S_ISREG, stat.S_ISSOCK)):
        what = "a symbolic link" if stat.S_ISLNK(status.st_mode) else "not a regular file"
        raise SpecError(f"{entry.path} is {what}, which no run of gpurun contains; remove it")
    return status.st_size if stat.S_ISREG(status.st_mode) and _RECORD.fullmatch(entry.name) else 0


def main_file(script: str) -> str:
    """The file that Python runs: of a directory, its `__main__.py`."""
    return os.path.join(script, "__main__.py") if os.path.isdir(script) else script


def holds_main(path: str | Path) -> bool:
    """Whether it is a directory or archive that Python runs, since it has a `__main__.py`."""
    if os.path.isdir(path):
        return os.path.isfile(main_file(str(path)))
    if str(path).endswith(".py"):
        return False
    import zipfile  # rarely needed

    with suppress(OSError, zipfile.BadZipFile):
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                return "__main__.py" in archive.namelist()
    return False


def is_file(path: Path) -> bool:
    """Whether there is such a file; the name may be any text."""
    try:
        return path.is_file()
    except OSError:  # a name that is too long
        return False
