"""The place where the user's own cache is."""

import os
import stat
from collections.abc import Iterator
from pathlib import Path

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
