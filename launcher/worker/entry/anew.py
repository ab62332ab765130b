"""The beginning of a rank that begins anew: `gpurun.launcher.worker.program.import_time` has the reason.

Run with the file descriptor of a `Beginning` as JSON, in the place and with the process number of the rank.
"""

import gc
import json
import os
import sys
from pathlib import Path
from typing import NoReturn

from gpurun.launcher.worker.entry import late_rank
from gpurun.launcher.worker.entry.zygote import answer_signals, make_observable, set_streams


def main(fd: int) -> NoReturn:
    """Imports torch in the environment of this moment, or leaves that to the program, which runs in the one
    of before."""
    with os.fdopen(fd, "rb") as file:
        file.seek(0)
        state = json.load(file)
    names = state["names"]
    if names:
        from gpurun.launcher.worker.program import program_rank  # imports torch
    os.environ.clear()
    os.environ.update(state["env"])
    sys.path[:] = state["path"]
    set_streams()
    make_observable(Path(state["control"]), int(state["argv"][1]))
    answer_signals()
    gc.freeze()  # what was there before the program
    if names:
        program_rank.main(state["argv"], names, state["imported_with"])
    late_rank.main(state["argv"])


if __name__ == "__main__":
    main(int(sys.argv[1]))
