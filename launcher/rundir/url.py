"""URLs of stores (`s3://`, `gs://`, …) as users write them."""

import re
from importlib.util import find_spec

from gpurun.launcher.errors import MachineError, SpecError

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
