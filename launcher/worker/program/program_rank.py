"""The body of a rank that runs a program unchanged, with its steps observed and timed from outside."""

import ctypes
import functools
import importlib
import importlib.machinery
import multiprocessing
import os
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import Any, NoReturn, ParamSpec

import msgspec
import torch
from torch.distributed import distributed_c10d
from torch.optim.optimizer import register_optimizer_step_post_hook

from gpurun.launcher import stepping
from gpurun.launcher.errors import MachineError
from gpurun.launcher.findings.finding import reason
from gpurun.launcher.findings.run_cases import OWN_PROCESSES
from gpurun.launcher.inspect.stacks import code_hashes
from gpurun.launcher.machine.accelerators import CPU, accelerator_of, gpu_kinds
from gpurun.launcher.processes.import_variables import changed, may_set, set_by
from gpurun.launcher.rundir.files import RunDir, append_lines, keep_lines, read_json, write_json
from gpurun.launcher.rundir.paths import main_file
from gpurun.launcher.rundir.records import (
    NO_GROUP,
    NO_STEPS,
    NO_TRACE,
    Event,
    Kind,
    ProgramConfig,
    StepRecord,
    VariantFacts,
)
from gpurun.launcher.rundir.remembered import name_of, remember, sets_variables
from gpurun.launcher.stats.schedule import only_warmup_text
from gpurun.launcher.units import listed
from gpurun.launcher.worker.accelerators.clock import Stamps
from gpurun.launcher.worker.accelerators.runtime import runtime_of, used_runtime
from gpurun.launcher.worker.base.blas import set_blas_threads, wanted_threads
from gpurun.launcher.worker.base.exit import finish, print_to_log
from gpurun.launcher.worker.base.failure import record_failure
from gpurun.launcher.worker.base.preload import IMPORTED_WITH, IMPORTS_HERE, PRELOADED, WITH_TORCH
from gpurun.launcher.worker.base.process_group import await_port, stay_on_this_machine
from gpurun.launcher.worker.base.seeding import replaced, seed
from gpurun.launcher.worker.meters.cpu_time import NoiseMeter
from gpurun.launcher.worker.profiling import StepCapture, StepTracer, open_block
from gpurun.launcher.worker.program.import_time import (
    OWN_MODULES,
    TORCH,
    Beginning,
    HiddenLoggers,
    HiddenPackages,
    OwnModules,
    top_of,
)
from gpurun.launcher.worker.program.observed import Observer
from gpurun.launcher.worker.program.own_profilers import OwnProfilers
from gpurun.launcher.worker.program.run_program import (
    await_threads,
    end_child,
    end_program,
    run_program,
    shown,
    users_frames,
    watched_exit,
    with_own_directory,
)
from gpurun.launcher.worker.program.step_rules import Classifier, KeptSteps, StepBoundary

P = ParamSpec("P")

FLUSH_NS = 500_000_000
"""Records are written this often: seldom enough to cost nothing, often enough to show progress."""
AT_LIMIT, AT_LIMIT_S = "gpurun/at-limit", 10.0
"""The key at which ranks count that they have made their last step, and how long they wait for each other."""
LISTENS_S = 1.0
"""How long a server may take to accept a connection."""
PROGRESS_PARTS = 2000
"""Progress is reported once in this part of the time so far."""
MAX_PROGRESS = 2 * PROGRESS_PARTS
"""Reports of progress in the file; of more, every second is removed."""


_python = ctypes.PyDLL(None)
_python.PyThreadState_Get.restype = ctypes.c_void_p
_python.PyThreadState_EnterTracing.argtypes = _python.PyThreadState_LeaveTracing.argtypes = [ctypes.c_void_p]


def harmless(method: Callable[P, None]) -> Callable[P, None]:
    """The method of a `StepRecorder`; an error in it ends the recording, not the program that it observes.

    What records Python's calls in the program (`sys.setprofile`, `sys.settrace`, cProfile, a profiler of
    torch's) sees this one alone, and none of those within.
    """

    @functools.wraps(method)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> None:
        recorder: Any = args[0]
        state = _python.PyThreadState_Get()
        _python.PyThreadState_EnterTracing(state)
        try:
            method(*args, **kwargs)
        except Exception as error:
            recorder.stop(error)
        finally:
            _python.PyThreadState_LeaveTracing(state)

    return guarded


def never_release(*values: object) -> None:
    """Keeps objects until the process ends, without their destructors being called even then.

    In a forked process CUDA can't be used, and the destructor of an event makes its device the current one:
    the error that this throws ends the process. Source: torch/include/c10/cuda/CUDAEvent.h, `~CUDAEvent`.
    """
    for value in values:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))


@dataclass
class StepRecorder:
    """One rank's steps, from its optimizers' calls or, once it uses them, from its `gpurun.step()` blocks.

    Every call of a method is a few µs of the program's time; what takes longer waits for `flush`.
    """

    config: ProgramConfig
    rank: int
    run: RunDir
    tracer: StepTracer | None = None
    capture: StepCapture | None = None
    """Counts the steps for observers, and takes the traces that they request."""
    observer: Observer = field(init=False)
    """Changes calls of the program, and knows what else it does."""
    profilers: OwnProfilers = field(init=False)
    """The program's own profilers, next to which nothing is traced."""
    stamps: Stamps | None = None
    """Chosen at the first step, when it is known whether the program uses CUDA."""
    at_limit: Callable[[], None] = lambda: None
    """Ends the program, whose last step has ended."""
    calls: int = 0
    """The calls of any optimizer."""
    noise: NoiseMeter = field(default_factory=NoiseMeter)
    classifier: Classifier = field(init=False)
    kept: KeptSteps = field(init=False)
    _boundary: StepBoundary = field(default_factory=StepBoundary)
    _device: torch.device | None = None
    """The device of the first optimizer whose weights are on a GPU."""
    _is_marked: bool = False
    """Whether the program marks its steps itself."""
    _depth: int = 0
    _start: Any = None
    _is_captured: bool = False
    _steps_ns: tuple[int, int] | None = None
    """When the first step began and the last one ended, on the clock of the events."""
    _is_slowed: bool = False
    """Whether the current step is traced or next to a traced one, or slow since others were traced."""
    _ended: "deque[tuple[Any, Any, Kind]]" = field(default_factory=deque)
    _num_ended: int = 0
    _began_ns: int = field(default_factory=time.perf_counter_ns)
    _flushed_ns: int = field(default_factory=time.perf_counter_ns)
    _reported_ns: int = 0
    _num_reports: int = 0
    _closed: bool = False

    def __post_init__(self) -> None:
        self._read = self.noise.read()
        self.classifier = Classifier(self.config.launch, self.config.warmup)
        self.kept = KeptSteps(self.config.launch)
        self.observer = Observer(self.config, self.rank, self.run)
        self.profilers = OwnProfilers(self.stop_tracing)

    @harmless
    def stop_tracing(self) -> None:
        """Ends traces that are being taken, since a profiler of the program begins; takes no other."""
        for each in (self.tracer, self.capture):
            if each is not None:
                each.give_up()

    @harmless
    def optimizer_stepped(self, optimizer: object, *_: object, skipped: bool = False) -> None:
        """An optimizer has updated its weights, or a GradScaler has skipped that; a hook of torch's."""
        self.calls += 1
        if self._device is None and self.stamps is None:
            self._device = device_of(optimizer)
        if self._is_marked or self._closed or self._is_capturing():
            return
        answer = self._boundary.call(optimizer)
        if answer == "inside":
            return
        now = self._now()
        if answer == "end":
            self._end(now, "skipped" if skipped else "timed")
        self._begin(now)

    @harmless
    def enter_step(self) -> None:
        """The program marks the beginning of a step; ignored within another one.

        What lies between two steps belongs to the second, as with optimizers: a loop waits for data there.
        """
        self._depth += 1
        is_first, self._is_marked = not self._is_marked, True
        if self._depth > 1 or self._closed:
            return
        if self._is_capturing():
            self._begin(None)
        elif is_first or self._start is None:
            self._begin(self._now())

    @harmless
    def leave_step(self, completed: bool) -> None:
        """The program marks the end of the step."""
        self._depth -= 1
        if self._depth or self._closed:
            return
        now = self._now() if completed and not self._is_capturing() else None
        if now is not None:
            self._end(now, "timed")
        self._begin(now)

    def flush(self) -> None:
        """Writes the steps whose times are known by now; of a long program a sample of them."""
        records = self._with_noise(self._records())
        if not records:
            return
        try:
            self.keep(records)
            self.observer.write()
            if self._flushed_ns - self._reported_ns >= (self._flushed_ns - self._began_ns) / PROGRESS_PARTS:
                self.report_progress()
        except MachineError as error:
            self.stop(error)

    def keep(self, records: list[StepRecord]) -> None:
        """Writes steps, as far as they are kept."""
        path, level = self.run.steps(self.config.variant, self.rank), self.kept.sample.level
        lines = self.kept.add(records)
        if self.kept.sample.level > level:
            keep_lines(path, StepRecord, self.kept.has)
        if lines:
            append_lines(path, lines)

    def _with_noise(self, records: list[StepRecord]) -> list[StepRecord]:
        """The steps since the last flush, with what of their time the rank waited for a core."""
        lasted_ns, self._flushed_ns = (now := time.perf_counter_ns()) - self._flushed_ns, now
        before, self._read = self._read, self.noise.read()
        self.noise.clear()
        self.noise.add(before, self._read)
        found = self.noise.per_step(1)

        def of_step(total_ns: int | None, step_ns: int) -> int | None:
            return None if total_ns is None else round(total_ns * step_ns / max(lasted_ns, 1))

        return [
            msgspec.structs.replace(
                record,
                queue_ns=of_step(found.queue_ns, record.step_ns),
                others_ns=of_step(found.others_ns, record.step_ns),
                cpu_ns=of_step(found.cpu_ns, record.step_ns),
                thread_cpu_ns=of_step(found.thread_cpu_ns, record.step_ns),
                children_ns=of_step(found.children_ns, record.step_ns),
            )
            for record in records
        ]

    def stop(self, error: Exception) -> None:
        """Records nothing more; the program continues, since its results matter more."""
        if not self._closed:
            print_to_log(f"gpurun: no more steps are recorded: {error}")
        self._closed = True

    def report_progress(self) -> None:
        """Rank 0 writes how many steps have ended."""
        self._reported_ns = time.perf_counter_ns()
        if self.rank == 0:
            variant, num = self.config.variant, self._num_ended
            self.add_progress(Event.now("run", variant, num, steps_ns=self._steps_ns if num else None))

    def add_progress(self, event: Event) -> None:
        """Appends to the reports of progress, which thin out where there are many."""
        path = self.run.events(self.config.launch)
        if self._num_reports >= MAX_PROGRESS:
            stays = cycle((True, False))
            keep_lines(path, Event, lambda report: report.stage != "run" or next(stays))
            self._num_reports //= 2
        append_lines(path, [event])
        self._num_reports += 1

    def close(self, wait: bool) -> None:
        """Writes the remaining steps; in any case the last, which has their number and the peak of memory.

        Args:
            wait: for the GPU, and for a trace that is being written; not after a failure, when it may hang.
        """
        self._write_rest(wait)
        self._closed = True
        if self.tracer is not None and wait:
            self.tracer.close()

    @harmless
    def _write_rest(self, wait: bool) -> None:
        if wait and self.stamps is not None:
            self.stamps.wait()
        self.flush()
        self.observer.write()
        if lines := self.kept.rest():
            append_lines(self.run.steps(self.config.variant, self.rank), lines)
        self.report_progress()

    def abandon(self) -> None:
        """Records nothing more: in a process that the program forked, whose steps aren't this rank's."""
        self._closed = True
        never_release(self._ended, self._start, self.tracer, self.capture)
        self._ended, self._start, self.tracer, self.capture = deque(), None, None, None

    def _is_capturing(self) -> bool:
        """Whether the program records a CUDA graph: an event in it has no time, and asking for one fails."""
        device = self.stamps.device if self.stamps else self._device
        return device is not None and runtime_of(device).is_capturing(device)

    def _now(self) -> Any:
        if self.stamps is None:
            device = self._device or next(iter(used_runtime().used_devices()), torch.device(CPU.name))
            self.stamps = runtime_of(device).stamps(device)
        return self.stamps.now()

    def _begin(self, now: Any) -> None:
        self._start = now
        if self._steps_ns is None and now is not None:
            self._steps_ns = (time.monotonic_ns(),) * 2

    def _end(self, now: Any, kind: Kind) -> None:
        if self._start is None or self._steps_ns is None:
            return  # it began while a graph was recorded
        kind_of_device = accelerator_of(self.stamps.device.type if self.stamps else CPU.name)
        is_slowed = self.profilers.slow_the_step(kind_of_device) or self._is_slowed
        self._ended.append((self._start, now, "profile" if is_slowed else kind))
        self._num_ended += 1
        self._steps_ns = (self._steps_ns[0], time.monotonic_ns())
        if time.perf_counter_ns() - self._flushed_ns > FLUSH_NS:
            self.flush()
        self._is_slowed = self._trace()
        if self._num_ended == self.config.limit:
            self.at_limit()

    def _trace(self) -> bool:
        """Whether tracing slows the step that begins now; only one profiler can run."""
        was_captured, tracer = self._is_captured, self.tracer
        if self.capture is not None:
            waits = self.profilers.are_in_use() or (tracer is not None and tracer.is_tracing)
            self._is_captured = self.capture.between_steps(waits)
        if tracer is not None and (self._is_captured or self.profilers.are_in_use()):
            tracer.postpone(self._num_ended)
        is_traced = tracer is not None and tracer.before(self._num_ended)
        if self._is_slowed and self.stamps is not None:
            is_traced |= accelerator_of(self.stamps.device.type).is_slow_after_trace
        return was_captured or self._is_captured or is_traced  # a capture is written in the step after it

    def _records(self) -> list[StepRecord]:
        if self.stamps is None or not self._ended:
            return []
        peak = runtime_of(self.stamps.device).peak_bytes(self.stamps.device)
        records = []
        while self._ended:
            start, end, kind = self._ended[0]
            step_ns = self.stamps.elapsed_ns(start, end)
            if step_ns is None:
                break  # the GPU has not finished this step, nor those after it
            self._ended.popleft()
            records.append(self.classifier.add(step_ns, kind, peak))
        return records


def device_of(optimizer: object) -> torch.device | None:
    """The device of an optimizer's weights, of which a program need not have made it the current one."""
    groups = getattr(optimizer, "param_groups", ())
    weights = (weight for group in groups for weight in group["params"])
    kinds = {kind.name for kind in gpu_kinds()}
    return next((weight.device for weight in weights if weight.device.type in kinds), None)


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
    has_spawned: Callable[[], bool]
    """Whether it has started processes that train."""
    beginning: Beginning | None = None
    """`None`: torch was imported with the program's own variables."""
    hooks: ExitStack = field(default_factory=ExitStack)
    """Closing it ends the recording."""
    set_before: Sequence[str] = ()
    """Variables that the program sets before it imports torch, which was imported with them."""
    ran_twice: bool = False
    """Whether what is above that import ran in two processes, one after the other."""

    def execute(self) -> int:
        """Runs the program to its end, whatever that is; the exit code."""
        torch_alone, others = self.hidden_packages()
        own = OwnModules(own_modules(self.config) - PRELOADED)
        remember_imports = self.what_remembers_imports()

        def close(code: int) -> None:
            self.close(code)
            remember_imports(code)

        torch_alone.hide()
        others.hide()
        own.hide()
        try:
            with watched_exit(self.pid, close):
                code = self.run_program()
            remember_imports(code)
        finally:
            torch_alone.show()
            others.show()
        return code

    def what_remembers_imports(self) -> Callable[[int], None]:
        """A function that does so if the program has ended with exit code 0; on one rank."""
        beginning = self.beginning
        if self.rank != 0 or self.config.script is None or beginning is None:
            return lambda code: None
        before = {name for name in sys.modules if top_of(name) not in PRELOADED}

        def remember_imports(code: int) -> None:
            if code == 0:
                imported = [name for name in sys.modules if name not in before]
                remember(beginning.remembered_by, imported, beginning.env)

        return remember_imports

    def hidden_packages(self) -> tuple[HiddenPackages, HiddenPackages]:
        """torch, and the packages that were imported early, each of which brings along what it needs."""
        beginning, loggers = self.beginning, HiddenLoggers()
        torch_alone, others = HiddenPackages({TORCH}), HiddenPackages(PRELOADED)
        torch_alone.on_show = lambda _: loggers.reveal(lambda name: top_of(name) not in PRELOADED)
        others.held = {*map(top_of, IMPORTS_HERE.needed_by_torch(IMPORTS_HERE.needs))}
        others.needed_by = lambda package: {*map(top_of, IMPORTS_HERE.needed_by([package]))}
        set_again = dict[str, str]()

        def reveal_loggers(modules: Collection[str]) -> None:
            packages = {*map(top_of, modules)}
            loggers.reveal(lambda name: top_of(name) in packages)

        def import_again(package: str) -> None:
            needed = IMPORTS_HERE.needed_by([package])
            if TORCH in needed and torch_alone in sys.meta_path:
                torch_alone.on_import(TORCH)
                torch_alone.show()
            set_again.update(IMPORTS_HERE.leave_again(needed))

        def forget(package: str, modules: Collection[str]) -> None:
            packages = {*map(top_of, modules)}
            loggers.drop(lambda name: top_of(name) in packages)
            of_torch = IMPORTS_HERE.needed_by_torch(IMPORTS_HERE.needed_by([package]))
            others.show({*map(top_of, of_torch)})
            set_again.update(IMPORTS_HERE.leave_again(of_torch))

        others.on_show, others.on_import, others.on_forget = reveal_loggers, import_again, forget
        if beginning is not None:
            torch_alone.on_import = lambda _: beginning.begin_anew_if_changed(torch.__file__)
            others.are_valid = lambda: beginning.is_unchanged(set_again)
        return torch_alone, others

    def run_program(self) -> int:
        """Runs the program as Python does; the exit code."""
        try:
            run_program(self.config)
        except BaseException as error:
            if os.getpid() != self.pid:
                end_child(error)
            return self.report_failure(error)
        if os.getpid() != self.pid:
            end_child(None)
        return 0

    def report_failure(self, error: BaseException) -> int:
        """Prints why the program ended as Python does; a failure is recorded first."""
        error = error.with_traceback(users_frames(error))
        is_good = isinstance(error, SystemExit) and error.code in (None, 0)
        if is_good or isinstance(error, KeyboardInterrupt):
            return shown(error)
        if self.ran_twice:
            sets = f"what is above `import torch` ran twice, since it sets {listed(self.set_before)}"
            print_to_log(f"gpurun: {sets}{next_time(self.config)}")
        try:
            record_failure(self.run, self.config.launch, self.rank, self.config.variant, "run", error)
        except MachineError as unwritable:
            print_to_log(str(unwritable))
        return shown(error)

    def end_at_limit(self) -> None:
        """Ends the program in the middle, once all ranks have come as far: none loses its peer in a step."""
        children = multiprocessing.active_children()
        for child in children:
            child.terminate()  # workers of a DataLoader would look for their parent only now and then
        for child in children:
            child.join(AT_LIMIT_S)
            for left in Path("/dev/shm").glob(f"torch_{child.pid}_*"):  # a tensor that was on its way
                left.unlink(missing_ok=True)
        if distributed_c10d.is_initialized():
            store, until_s = distributed_c10d._get_default_store(), time.monotonic() + AT_LIMIT_S
            store.add(AT_LIMIT, 1)
            while store.add(AT_LIMIT, 0) < self.config.world_size and time.monotonic() < until_s:
                time.sleep(0.01)
        os._exit(0)

    def end(self, code: int) -> NoReturn:
        """Ends the process, whose program has ended with this code."""
        await_threads()
        self.hooks.close()
        try:
            self.close(code)
        except MachineError as error:
            print_to_log(str(error))
            code = os.EX_IOERR
        end_program()
        finish(code)

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
        elif tracer is not None and not tracer.written and self.recorder.profilers.num_begun:
            traces = (self.run.trace(self.config.variant, n) for n in range(self.config.world_size))
            what = f"rank 0 has {NO_TRACE}" if any(trace.exists() for trace in traces) else NO_TRACE
            warnings.append(what + own_traces_text(self.recorder.profilers.traces, self.config.world_size))
        elif completed and tracer is not None and steps.count < (last := tracer.first + tracer.config.steps):
            warnings.append(
                f"{NO_TRACE}the program ended before step {last + 1}, "
                f"and steps {tracer.first + 1} to {last} are traced"
            )
        if steps.count and self.config.world_size > 1 and not self.has_had_group():
            warnings.append(NO_GROUP)
        if steps.num_skipped:
            warnings.append(f"the GradScaler skipped {steps.num_skipped} of {steps.count} steps (not timed)")
        if num_slowed := self.recorder.profilers.num_steps:
            warnings.append(
                f"the program's own profiler slowed {num_slowed} of {steps.count} steps (not timed)"
            )
        if self.set_before:
            twice = f", and ran what is above that twice{next_time(self.config)}" if self.ran_twice else ""
            warnings.append(
                f"the program sets {listed(self.set_before)} before it imports torch, so each rank began "
                f"anew with that: it started as slowly as under torchrun{twice}"
            )
        code = code_hashes(self.config.job_dir)
        untimed = reason(OWN_PROCESSES) if steps.count == 0 and self.has_spawned() else None
        if steps.count > steps.num_timed == 0:
            untimed = only_warmup_text(steps.count, self.config.warmup, num_slowed)
        return VariantFacts(warnings=tuple(warnings), unsteady=steps.unsteady, untimed=untimed, code=code)


def own_traces_text(paths: Sequence[str], num_ranks: int) -> str:
    """A note that the program's own profiler ran, and where its traces are, if rank 0 has written `paths`."""
    places = listed(sorted({os.path.dirname(path) for path in paths}))
    where = f"; `gpurun trace` reads what it wrote to {places}" if places else ""
    if places and num_ranks > 1:
        where += " on rank 0 (name the directories of all ranks)"
    return f"the program's own profiler ran{where}"


def main(
    argv: Sequence[str], set_before: Sequence[str] = (), imported_with: dict[str, str] | None = None
) -> NoReturn:
    """Runs rank `argv[1]` of the launch described in the file `argv[0]`; never returns.

    Args:
        set_before: variables that the program sets before it imports torch, which was imported with them.
        imported_with: that environment, where the program hasn't run yet.
    """
    config, rank = read_json(Path(argv[0]), ProgramConfig), int(argv[1])
    run = RunDir(Path(config.run_dir))
    join_launch(config, run)
    config = with_own_directory(config, run)
    control = str(run.control(config.launch))
    if not set_before:
        imported_with = begin_with(config, argv, control)
        set_threads()
    program = observed(config, rank, run)
    program.set_before, program.ran_twice = set_before, bool(set_before) and imported_with is None
    if not program.ran_twice:
        program.beginning = Beginning(
            tuple(argv), control, imported_with=imported_with, program=name_of(config)
        )
    program.end(program.execute())


def observed(config: ProgramConfig, rank: int, run: RunDir) -> "ProgramRank":
    """The rank, whose steps are recorded from now on."""
    seed(0 if config.seeds_steps and config.seed is None else config.seed)
    capture = StepCapture(run, config.launch, rank, open_block(run, config.launch, rank))
    recorder = StepRecorder(config, rank, run, tracer=tracer_for(config, rank, run), capture=capture)
    hooks = watch_steps(recorder)
    # DataLoader workers and other children aren't ranks; what they write would corrupt the rank's records.
    os.register_at_fork(after_in_child=recorder.abandon)
    has_had_group, has_spawned = keep_groups_alive(), note_spawned()
    report_other_stores((os.environ["MASTER_ADDR"], await_port(run.rendezvous(config.launch))))
    recorder.report_progress()
    program = ProgramRank(config, rank, run, recorder, os.getpid(), has_had_group, has_spawned, hooks=hooks)
    recorder.at_limit = program.end_at_limit
    return program


def begin_with(config: ProgramConfig, argv: Sequence[str], control: str) -> dict[str, str] | None:
    """Begins anew at once if torch is to be imported in another environment: so the program runs once.

    Returns that environment, as far as the program's text says it; `None`: it is this one.
    """
    script = main_file(config.script) if config.script else None
    try:
        source = Path(script).read_bytes() if script else b""
    except OSError:
        return None  # the program's own message says so
    if not is_seeded(config) and (may_set(script, config.module) or sets_variables(name_of(config), source)):
        Beginning(tuple(argv), control).begin_without_torch()
    env, values = dict(os.environ), set_by(source, os.environ)
    if changed({**env, **IMPORTED_WITH}, {**env, **values}):
        Beginning(tuple(argv), control, program=name_of(config)).begin_anew(values)
    return {**env, **values} if values else None


def is_seeded(config: ProgramConfig) -> bool:
    """Whether random numbers are seeded before the program's first line, for which torch is imported."""
    return config.seeds_steps or config.seed is not None


def own_modules(config: ProgramConfig) -> set[str]:
    """The modules here that the program may have by the same names, and torch alone doesn't import."""
    script = os.path.realpath(config.script or ".")
    directory = script if os.path.isdir(script) else os.path.dirname(script)
    found = {*OWN_MODULES}
    if WITH_TORCH:
        with suppress(OSError):
            beside = {*map(top_of, os.listdir(directory))}
            found |= (beside & sys.modules.keys()) - WITH_TORCH - {"gpurun", "__main__"}
    return found


def next_time(config: ProgramConfig) -> str:
    """The end of the sentence that something ran twice."""
    return "" if is_seeded(config) else "; the next run of this file runs it once"


def join_launch(config: ProgramConfig, run: RunDir) -> None:
    """Sets what `init_process_group` finds in the environment: the port of the launch's store."""
    os.environ["MASTER_PORT"] = str(await_port(run.rendezvous(config.launch)))
    stay_on_this_machine()


def set_threads() -> None:
    """OMP_NUM_THREADS was read when the server started; torch and numpy take the rank's share from us."""
    set_blas_threads(wanted_threads({**os.environ, **IMPORTED_WITH}))
    wanted = "" if "OMP_NUM_THREADS" in IMPORTED_WITH else os.environ.get("OMP_NUM_THREADS", "")
    if wanted.isdecimal() and int(wanted) > 0:
        torch.set_num_threads(int(wanted))


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
    handle = register_optimizer_step_post_hook(recorder.optimizer_stepped)
    hooks.callback(handle.remove)
    hooks.callback(watch_skipped_steps(recorder))
    stepping.observe(recorder)
    hooks.callback(stepping.stop_observing)
    hooks.enter_context(recorder.profilers.watch())
    hooks.enter_context(recorder.observer.watch())
    return hooks


def keep_groups_alive() -> Callable[[], bool]:
    """Keeps gloo's process groups, once all are destroyed, from being destructed before the process ends.

    Returns whether there has been a group, as a function to call at the end.

    A DDP model that outlives `destroy_process_group` holds the last reference. Its end destructs the group
    with the GIL held, which joins a thread of gloo that may be waiting for the GIL: the rank hangs forever
    (torch 2.13; in one of ten runs, under any launcher). The group's threads sleep, so that keeping it is
    cheap; NCCL's resources are released by `destroy_process_group` itself. A group that is destroyed alone is
    not kept: a program may make one in each epoch.
    """
    kept: list[Any] = []

    def destroy(original: Callable[[Any], None], group: Any = None) -> None:
        if group in (None, distributed_c10d.GroupMember.WORLD):
            kept.extend(distributed_c10d._world.pg_map)
        original(group)

    for module in (distributed_c10d, torch.distributed):
        replaced(module, "destroy_process_group", destroy)
    return lambda: bool(kept) or distributed_c10d.is_initialized()


def note_spawned() -> Callable[[], bool]:
    """Whether `torch.multiprocessing` has started processes since, as a function to call at the end."""
    context: Any = importlib.import_module("torch.multiprocessing.spawn").ProcessContext
    calls = list[None]()

    def note(original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        calls.append(None)
        original(*args, **kwargs)

    replaced(context, "__init__", note)  # of no traceback: it is made once they have been started
    return lambda: bool(calls)


def report_other_stores(own: tuple[str, int]) -> None:
    """Reports where the rank waits for the others if the program has set another address than the launch's.

    Nothing listens there: the environment tells torch that the launcher has a store. With the launch's port,
    each address of the store's machine leads to it: it listens at one, where torchrun's listens at all. From
    another machine, each address of others does.
    Source: torch/distributed/rendezvous.py, `_create_c10d_store`.

    Args:
        own: the host and the port of the launch's store.
    """
    module: Any = importlib.import_module("torch.distributed.rendezvous")  # a function has its name

    def create(original: Callable[..., Any], hostname: str, port: int, *args: Any, **kwargs: Any) -> Any:
        is_elsewhere = (hostname, port) != own and module._torchelastic_use_agent_store()
        if is_elsewhere and not listens(hostname, port):
            if port == own[1] and is_here(hostname) == is_here(own[0]):
                return original(own[0], port, *args, **kwargs)
            print_to_log(
                f"gpurun: this rank waits at {hostname}:{port} for the others, and nothing listens there: "
                f"their store is at {own[0]}:{own[1]}; leave MASTER_ADDR and MASTER_PORT as they are"
            )
        return original(hostname, port, *args, **kwargs)

    replaced(module, "_create_c10d_store", create)


def listens(hostname: str, port: int) -> bool:
    """Whether a server does there."""
    try:
        socket.create_connection((hostname, port), timeout=LISTENS_S).close()
    except OSError:
        return False
    return True


def is_here(hostname: str) -> bool:
    """Whether this machine has one of its addresses."""
    with suppress(OSError):
        for family, kind, _, _, address in socket.getaddrinfo(hostname, 0, type=socket.SOCK_STREAM):
            with suppress(OSError), socket.socket(family, kind) as probe:
                probe.bind(address)
                return True
    return False


def watch_skipped_steps(recorder: StepRecorder) -> Callable[[], None]:
    """Reports steps that a GradScaler skips because a gradient overflowed: no optimizer is called then.

    Returns a function that undoes it.

    torch has no hook for that, so that the method itself is wrapped, for all its subclasses. A fused
    optimizer is called all the same and skips by itself: that is a step like any other.
    """

    def step(original: Any, scaler: Any, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        calls = recorder.calls
        result = original(scaler, optimizer, *args, **kwargs)
        if recorder.calls == calls and scaler.is_enabled():
            recorder.optimizer_stepped(optimizer, skipped=True)
        return result

    return replaced(torch.amp.GradScaler, "step", step)
