"""The body of a rank that runs a program unchanged, with its steps observed from outside."""

import atexit
import builtins
import functools
import gc
import importlib.machinery
import io
import os
import random
import runpy
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import CodeType, ModuleType, TracebackType
from typing import Any

import torch
from torch.distributed import distributed_c10d
from torch.optim.optimizer import register_optimizer_step_post_hook

import gpurun
from gpurun.launcher import stepping
from gpurun.launcher.errors import MachineError
from gpurun.launcher.inspect.stacks import code_hashes
from gpurun.launcher.rundir.files import RunDir, read_json, write_json
from gpurun.launcher.rundir.records import NO_GROUP, NO_STEPS, NO_TRACE, ProgramConfig, VariantFacts
from gpurun.launcher.stats.schedule import only_warmup_text
from gpurun.launcher.worker.base.exit import exit_code, finish, print_to_log
from gpurun.launcher.worker.base.failure import record_failure
from gpurun.launcher.worker.base.process_group import await_port, stay_on_this_machine
from gpurun.launcher.worker.profiling.step_traces import StepCapture, StepTracer, open_block
from gpurun.launcher.worker.program.recorder import StepRecorder


@dataclass
class ProgramRank:
    """One rank of a program's launch."""

    config: ProgramConfig
    rank: int
    run: RunDir
    recorder: StepRecorder
    pid: int
    has_had_group: Callable[[], bool]
    """Whether the program has made a process group."""

    def execute(self) -> int:
        """Runs the program to its end, whatever that is; the exit code."""
        try:
            if self.config.module is not None:
                run_module(self.config.module, self.config.args)
            else:
                run_script(self.config.script or "", self.config.args)
        except BaseException as error:
            if os.getpid() != self.pid:
                raise  # a child of the program ends as under Python itself
            return self.report_failure(error)
        return 0

    def report_failure(self, error: BaseException) -> int:
        """Prints why the program ended as Python does; a failure is recorded first."""
        error = error.with_traceback(users_frames(error))
        if isinstance(error, SystemExit) and error.code in (None, 0):
            return 0
        try:
            record_failure(self.run, self.config.launch, self.rank, self.config.variant, "run", error)
        except MachineError as unwritable:
            print_to_log(str(unwritable))
        if isinstance(error, SystemExit):
            return exit_code(error)
        sys.excepthook(type(error), error, error.__traceback__)
        return 1

    def close(self, code: int) -> None:
        """Writes the last steps and the warnings about them."""
        self.recorder.close(wait=code == 0)
        if self.rank == 0:
            facts = {self.config.variant: self.facts(completed=code == 0)}
            write_json(self.run.launch_facts(self.config.launch), facts)

    def facts(self, completed: bool = True) -> VariantFacts:
        """Warnings about what was recorded."""
        steps, tracer = self.recorder.classifier, self.recorder.tracer
        warnings = []
        if steps.count == 0:
            warnings.append(NO_STEPS)
        elif completed and tracer is not None and steps.count < (last := tracer.first + tracer.config.steps):
            warnings.append(
                f"{NO_TRACE}the program ended before step {last + 1}, "
                f"and steps {tracer.first + 1} to {last} are traced"
            )
        if steps.count and self.config.world_size > 1 and not self.has_had_group():
            warnings.append(NO_GROUP)
        if steps.num_skipped:
            warnings.append(f"the GradScaler skipped {steps.num_skipped} of {steps.count} steps (not timed)")
        code = code_hashes(self.config.job_dir)
        untimed = (
            only_warmup_text(steps.count, self.config.warmup) if steps.count > steps.num_timed == 0 else None
        )
        return VariantFacts(warnings=tuple(warnings), unsteady=steps.unsteady, untimed=untimed, code=code)


def main(argv: Sequence[str]) -> None:
    """Runs rank `argv[1]` of the launch described in the file `argv[0]`; never returns."""
    config, rank = read_json(Path(argv[0]), ProgramConfig), int(argv[1])
    run = RunDir(Path(config.run_dir))
    join_launch(config, run)
    config = with_own_directory(config, run)
    set_threads()
    seed(config.seed)
    capture = StepCapture(run, config.launch, rank, open_block(run, config.launch, rank))
    recorder = StepRecorder(config, rank, run, tracer=tracer_for(config, rank, run), capture=capture)
    hooks = watch_steps(recorder)
    # DataLoader workers and other children aren't ranks; what they write would corrupt the rank's records.
    os.register_at_fork(after_in_child=recorder.abandon)
    has_had_group = keep_groups_alive()
    recorder.report_progress()
    program = ProgramRank(config, rank, run, recorder, os.getpid(), has_had_group)
    code = program.execute()
    hooks.close()
    try:
        program.close(code)
    except MachineError as error:
        print_to_log(str(error))
        code = os.EX_IOERR
    end_program()
    finish(code)


def join_launch(config: ProgramConfig, run: RunDir) -> None:
    """Sets what `init_process_group` finds in the environment: the port of the launch's store."""
    os.environ["MASTER_PORT"] = str(await_port(run.rendezvous(config.launch)))
    stay_on_this_machine()
    os.environ.pop("OPENBLAS_NUM_THREADS", None)  # meant for the server


def with_own_directory(config: ProgramConfig, run: RunDir) -> ProgramConfig:
    """The configuration with a directory for what the program saves, which no other launch finds there.

    It is in the environment, and in place of `{launch_dir}` in the arguments.
    """
    directory = run.program_files(config.launch)
    directory.mkdir(parents=True, exist_ok=True)
    os.environ["GPURUN_LAUNCH_DIR"] = str(directory)
    return replace(config, args=tuple(arg.replace("{launch_dir}", str(directory)) for arg in config.args))


def set_threads() -> None:
    """OMP_NUM_THREADS was read when the server started; torch takes the rank's own share from us."""
    wanted = os.environ.get("OMP_NUM_THREADS", "")
    if wanted.isdecimal() and int(wanted) > 0:
        torch.set_num_threads(int(wanted))


def seed(value: int | None) -> None:
    """Seeds all random number generators, if the job has a seed."""
    if value is None:
        return
    random.seed(value)
    torch.manual_seed(value)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(value % 2**32)


def tracer_for(config: ProgramConfig, rank: int, run: RunDir) -> StepTracer | None:
    """The tracer of this rank, if it is to have a trace."""
    wanted = config.profile
    if wanted is None or not wanted.steps or (wanted.ranks is not None and rank not in wanted.ranks):
        return None
    return StepTracer(wanted, run.trace(config.variant, rank), config.first_traced_step)


def watch_steps(recorder: StepRecorder) -> ExitStack:
    """Passes every step of every optimizer to `recorder` from now on, and every `gpurun.step()`.

    Closing the returned stack ends it.
    """
    hooks = ExitStack()
    handle = register_optimizer_step_post_hook(
        lambda optimizer, args, kwargs: recorder.optimizer_stepped(optimizer)
    )
    hooks.callback(handle.remove)
    hooks.callback(watch_skipped_steps(recorder))
    stepping.observe(recorder)
    hooks.callback(stepping.stop_observing)
    return hooks


def keep_groups_alive() -> Callable[[], bool]:
    """Keeps gloo's process groups from being destructed before the process ends.

    Returns whether there has been a group, as a function to call at the end.

    A DDP model that outlives `destroy_process_group` holds the last reference. Its end destructs the group
    with the GIL held, which joins a thread of gloo that may be waiting for the GIL: the rank hangs forever
    (torch 2.13; in one of ten runs, under any launcher). The group's threads sleep, so that keeping it is
    cheap; NCCL's resources are released by `destroy_process_group` itself.
    """
    original = distributed_c10d.destroy_process_group
    kept: list[Any] = []

    @functools.wraps(original)
    def destroy_process_group(group: Any = None) -> None:
        kept.extend(distributed_c10d._world.pg_map)
        original(group)

    for module in (distributed_c10d, torch.distributed):
        module.destroy_process_group = destroy_process_group  # type: ignore[attr-defined]
    return lambda: bool(kept) or distributed_c10d.is_initialized()


def watch_skipped_steps(recorder: StepRecorder) -> Callable[[], None]:
    """Reports steps that a GradScaler skips because a gradient overflowed: no optimizer is called then.

    Returns a function that undoes it.

    torch has no hook for that, so that the method itself is wrapped, for all its subclasses. A fused
    optimizer is called all the same and skips by itself: that is a step like any other.
    """
    scaler = torch.amp.GradScaler
    original = scaler.step

    @functools.wraps(original)
    def step(self: Any, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        calls = recorder.calls
        result = original(self, optimizer, *args, **kwargs)
        if recorder.calls == calls and self.is_enabled():
            recorder.optimizer_stepped(optimizer, skipped=True)
        return result

    scaler.step = step  # type: ignore[method-assign]
    return lambda: setattr(scaler, "step", original)


def run_script(script: str, args: tuple[str, ...]) -> None:
    """`python SCRIPT ARGS…`, from the working directory.

    Raises:
        BaseException: whatever the program raises, `SystemExit` included.
    """
    path = os.path.abspath(script)
    prepare(os.path.dirname(os.path.realpath(path)), [script, *args])
    main = new_main()
    main.__file__ = path
    main.__loader__ = importlib.machinery.SourceFileLoader("__main__", path)
    main.__dict__["__cached__"] = None
    exec(read_code(path), main.__dict__)


def run_module(module: str, args: tuple[str, ...]) -> None:
    """`python -m MODULE ARGS…`, from the working directory; raises like `run_script`."""
    prepare(os.getcwd(), ["-m", *args])  # runpy puts the module's file in place of the first
    new_main()
    # What the interpreter itself calls for `-m`, and all that sets `__spec__` right for `multiprocessing`.
    runpy._run_module_as_main(module)  # type: ignore[attr-defined]


def prepare(directory: str, argv: list[str]) -> None:
    """`sys.path` and `sys.argv` as the interpreter would set them; imports look in `directory` first."""
    sys.argv[:] = argv
    sys.orig_argv[:] = [sys.executable, *argv]
    sys.path.insert(0, directory)


def new_main() -> ModuleType:
    """An empty `__main__` in place of the server's."""
    main = ModuleType("__main__")
    main.__dict__["__builtins__"] = builtins
    sys.modules["__main__"] = main
    return main


def read_code(path: str) -> CodeType:
    """The compiled file; `io.open_code` and no inherited flags, as the interpreter does it."""
    with io.open_code(path) as file:
        return compile(file.read(), path, "exec", dont_inherit=True)


def users_frames(error: BaseException) -> TracebackType | None:
    """The error's traceback without the frames of this launcher and of runpy at its top.

    None of them remain for a program that could not be compiled.
    """
    trace = error.__traceback__
    own = (
        os.path.dirname(gpurun.__file__) + os.sep,
        runpy.__file__,
        "<frozen runpy>",
    )
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith(own):
        trace = trace.tb_next
    return trace


def end_program() -> None:
    """Does what the interpreter does when a program has ended, as far as the program can observe it.

    Waits for threads, calls exit handlers, and flushes files that were left open; it does not run
    destructors, in which gloo's threads abort now and then.
    """
    with suppress(Exception):
        threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    # The server's own objects are frozen, so that only the program's are found.
    for found in gc.get_objects():
        if isinstance(found, io.TextIOWrapper | io.BufferedWriter | io.BufferedRandom):
            with suppress(Exception):
                found.flush()
