"""A rank that begins anew: `gpurun.launcher.worker.program.import_time` has the reason.

Run with the file descriptor of a `Beginning` as JSON, in the place and with the process number of the rank.
"""

import functools
import gc
import json
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from gpurun.launcher.processes.import_variables import changed
from gpurun.launcher.rundir.control import ControlDir
from gpurun.launcher.rundir.files import RunDir, append_lines, read_json
from gpurun.launcher.rundir.records import Event, ProgramConfig
from gpurun.launcher.worker.entry.zygote import (
    answer_signals,
    make_collectives_observable,
    make_observable,
    set_streams,
)
from gpurun.launcher.worker.program.import_time import OWN_MODULES, TORCH, AfterImport, OwnModules
from gpurun.launcher.worker.program.run_program import (
    end_child,
    run_program,
    watched_exit,
    with_own_directory,
)

if TYPE_CHECKING:
    from gpurun.launcher.worker.program.program_rank import ProgramRank


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
    run_without_torch(state["argv"])


def run_without_torch(argv: Sequence[str]) -> NoReturn:
    """Runs rank `argv[1]` of the launch described in the file `argv[0]`; never returns.

    The program itself imports torch, so that torch reads the variables that it sets before; steps are
    recorded from then on.
    """
    config, rank = read_json(Path(argv[0]), ProgramConfig), int(argv[1])
    run, pid = RunDir(Path(config.run_dir)), os.getpid()
    config = with_own_directory(config, run)
    if rank == 0:
        append_lines(run.events(config.launch), [Event.now("run", config.variant, 0)])
    before, own = dict(os.environ), OwnModules(OWN_MODULES)

    @functools.cache
    def observed() -> "ProgramRank":
        names = changed(before, os.environ)
        if hook in sys.meta_path:
            sys.meta_path.remove(hook)
        with own.shown():
            from gpurun.launcher.worker.program import program_rank  # imports torch, if the program hasn't

        with suppress(OSError), ControlDir(run.control(config.launch)) as control:
            make_collectives_observable(control, rank)
        program = program_rank.observed(config, rank, run)
        program.set_before = names
        return program

    hook = AfterImport(TORCH, lambda: observed() if os.getpid() == pid else None)
    sys.meta_path.insert(0, hook)
    own.hide()
    code = 0
    try:
        with watched_exit(pid, lambda status: observed().close(status)):
            run_program(config)
    except BaseException as error:
        if os.getpid() != pid:
            end_child(error)
        code = observed().report_failure(error)
    if os.getpid() != pid:
        end_child(None)
    observed().end(code)


if __name__ == "__main__":
    main(int(sys.argv[1]))
