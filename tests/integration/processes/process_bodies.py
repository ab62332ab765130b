"""What the ranks of the process tests do. Imported in the ranks only; torch where it is needed."""

import ctypes
import importlib
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from gpurun.launcher.plan.rank_config import LaunchConfig
from gpurun.launcher.rundir.files import RunDir, read_json

STEPS_BEFORE_FAULT = 3


def mark(directory: str, name: str, content: str = "") -> None:
    """Says that this point was reached; complete when it can be seen."""
    part = Path(directory) / f".{name}"
    part.write_text(content)
    part.rename(Path(directory) / name)


def sleep_for_ever(argv: Sequence[str]) -> None:
    mark(argv[0], f"ready{argv[1]}")
    while True:
        signal.pause()


def hold_the_gil(argv: Sequence[str]) -> None:
    """No Python code of this process, no handler and no thread, runs again."""
    sleep = ctypes.PyDLL(None).sleep  # before it is said that it is ready: loading it runs Python code
    mark(argv[0], f"ready{argv[1]}")
    sleep(600)


def save_at_sigusr2(argv: Sequence[str]) -> None:
    """As programs do that a batch system warns of a preemption."""
    signal.signal(signal.SIGUSR2, lambda *_: mark(argv[0], "saved"))
    sleep_for_ever(argv)


def ignore_sigterm(argv: Sequence[str]) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sleep_for_ever(argv)


def end_and_say_so(argv: Sequence[str]) -> None:
    def end(*_: object) -> None:
        mark(argv[0], "asked to end")
        sys.exit()

    signal.signal(signal.SIGTERM, end)
    sleep_for_ever(argv)


def leave_grandchild(argv: Sequence[str]) -> None:
    """A daemon by the book: fork, setsid, fork."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            mark(argv[0], f"grandchild{argv[1]}", str(os.getpid()))
            signal.pause()
        os._exit(0)
    os.wait()
    while not (Path(argv[0]) / f"grandchild{argv[1]}").exists():
        time.sleep(0.001)
    sleep_for_ever(argv)


def describe_self(argv: Sequence[str]) -> None:
    """Everything that a rank should not have inherited."""
    print("to stdout")
    print("to stderr", file=sys.stderr)
    facts = {
        "random": random.random(),
        "stdin": sys.stdin.read(),
        "sid": os.getsid(0) == os.getpid(),
        "cwd": os.getcwd(),
        "variable": os.environ.get("GPURUN_TEST"),
        "sigterm": signal.getsignal(signal.SIGTERM) == signal.SIG_DFL,
        "fds": sorted(
            os.readlink(f"/proc/self/fd/{fd}").split(":")[0]
            for fd in os.listdir("/proc/self/fd")
            if os.path.exists(f"/proc/self/fd/{fd}")
        ),
    }
    mark(argv[0], f"facts{argv[1]}", json.dumps(facts))


def describe_torch(argv: Sequence[str]) -> None:
    """Random state and threads of a rank under the server with torch."""
    import numpy
    import torch

    tasks = len(os.listdir("/proc/self/task"))
    facts = {
        "torch": torch.rand(1).item(),
        "numpy": float(numpy.random.rand()),
        "tasks": tasks,
        "dynamo": "torch._dynamo" in sys.modules,
        "sum": torch.ones(1000, 1000).sum().item(),
    }
    mark(argv[0], f"facts{argv[1]}", json.dumps(facts))


def end_with(argv: Sequence[str]) -> None:
    """Ends by what `argv[2]` says."""
    print("last words")
    FAULTS[argv[2]]()


def all_reduce_until_fault(argv: Sequence[str]) -> None:
    """`argv`: config file, rank, faulty rank, fault. All ranks reduce; one of them fails on the way.

    A fault `startup X` comes before the group exists, `end X` when it is gone.
    """
    import torch
    import torch.distributed as dist

    from gpurun.launcher.worker.base.exit import finish
    from gpurun.launcher.worker.base.failure import record_failure
    from gpurun.launcher.worker.base.process_group import close_group, init_group

    config, rank = read_json(Path(argv[0]), LaunchConfig), int(argv[1])
    torch.set_num_threads(1)
    when, _, name = argv[3].rpartition(" ") if argv[3] not in FAULTS else ("", "", argv[3])

    def fail_at(place: str) -> None:
        if rank == int(argv[2]) and when == place:
            FAULTS[name]()

    try:
        fail_at("startup")
        init_group(config, rank)
        for step in range(STEPS_BEFORE_FAULT + 2):
            if step == STEPS_BEFORE_FAULT:
                fail_at("")
            dist.all_reduce(torch.ones(1))
        close_group()
        fail_at("end")
    except BaseException as error:
        record_failure(RunDir(Path(config.run_dir)), config.launch, rank, "ddp-2-even", "round", error)
        raise
    finish(0)


def describe_listeners(argv: Sequence[str]) -> None:
    """Addresses on which this process listens while the group is open."""
    import torch
    import torch.distributed as dist

    from gpurun.launcher.worker.base.process_group import close_group, init_group

    config, rank = read_json(Path(argv[0]), LaunchConfig), int(argv[1])
    init_group(config, rank)
    dist.all_reduce(torch.ones(1))
    mark(config.run_dir, f"listeners{rank}", json.dumps(listening_addresses()))
    close_group()


def listening_addresses() -> list[str]:
    """Source: Documentation/networking/proc_net_tcp.rst; state 0A is LISTEN."""
    own = {os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if _is_open(fd)}
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in own:
                found.append(fields[1].split(":")[0])
    return found


def _is_open(fd: str) -> bool:
    return os.path.lexists(f"/proc/self/fd/{fd}")


def _raise() -> None:
    raise ValueError("a loss of 7 is too much")


def _import_nothing() -> None:
    importlib.import_module("no_such_module_anywhere")


def _load(fault: Callable[[], object]) -> None:
    """Has a DataLoader's worker process fail."""
    from torch.utils.data import DataLoader, Dataset

    class Broken(Dataset[int]):
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> int:
            fault()
            return index

    list(DataLoader(Broken(), num_workers=1))


FAULTS: dict[str, Callable[[], object]] = {
    "none": lambda: None,
    "raise": _raise,
    "exit": lambda: sys.exit(3),
    "hard exit": lambda: os._exit(3),
    "early exit": lambda: os._exit(0),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "segfault": lambda: ctypes.string_at(0),
    "abort": os.abort,
    "import": _import_nothing,
    "loader-raise": lambda: _load(_raise),
    "loader-kill": lambda: _load(lambda: os.kill(os.getpid(), signal.SIGKILL)),
}
