"""Whether a run directory can be made at all: asked before anything is imported or started for a run."""

import errno
import os
import tempfile
from pathlib import Path

from gpurun.launcher.errors import MachineError


def check_writable(folder: Path) -> None:
    """Returns if `folder`, or the nearest one above it that exists, takes a file; nothing is left there.

    Raises:
        MachineError: it doesn't.
    """
    nearest = next((each for each in (folder, *folder.absolute().parents) if os.path.lexists(each)), folder)
    if nearest == folder and not folder.is_dir():
        return  # whoever opens the run has more to say about a file in its place
    try:
        if not nearest.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        tempfile.TemporaryFile(dir=nearest).close()
    except OSError as error:
        from gpurun.launcher.rundir.files import (
            unwritable,  # not before: a fork comes next, which copies what is there
        )

        raise MachineError(
            f"{unwritable(folder, error)}\n    or name another run directory: --out"
        ) from error
