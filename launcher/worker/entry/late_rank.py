"""A rank that runs a program without torch until the program itself imports it.

So torch reads the variables that the program sets before; its steps are recorded from that import on.
"""

import functools
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
from gpurun.launcher.worker.entry.zygote import make_collectives_observable
from gpurun.launcher.worker.program.import_time import OWN_MODULES, TORCH, AfterImport, OwnModules
from gpurun.launcher.worker.program.run_program import (
    end_child,
    run_program,
    watched_exit,
    with_own_directory,
)

if TYPE_CHECKING:
    from gpurun.launcher.worker.program.program_rank import ProgramRank


def main(argv: Sequence[str]) -> NoReturn:
    """Runs rank `argv[1]` of the launch described in the file `argv[0]`; never returns."""
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
