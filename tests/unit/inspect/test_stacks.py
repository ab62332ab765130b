"""What ranks were doing, from stacks as faulthandler writes them."""

import faulthandler
import os
import subprocess
import sys
import sysconfig
import threading
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryFile
from textwrap import dedent
from typing import cast

import msgspec
import pytest

from gpurun.launcher.cli.commands.runs import outside_launcher, render_stacks
from gpurun.launcher.inspect import snapshot
from gpurun.launcher.inspect.hang_diagnosis import Hang, RankView, diagnose, find_hang
from gpurun.launcher.inspect.snapshot import RankSnapshot, ask_gpus, ask_stacks, utilisation
from gpurun.launcher.inspect.stacks import (
    BACKWARD,
    COLLECTIVE,
    GPU,
    LIBRARY_DIRECTORIES,
    RENDEZVOUS,
    WORKLOADS,
    activity,
    fatal_error,
    is_users,
    is_workload,
    parse_threads,
)
from gpurun.launcher.machine.gpus.gpu import Gpu, GpuProcess, Gpus
from gpurun.launcher.machine.process_tree import cpu_s
from gpurun.launcher.rundir.control import ControlDir, RankState
from tests.known import known
from tests.wording import Wording

STDLIB = sysconfig.get_path("stdlib")
LIBRARY = sysconfig.get_path("purelib")
LAUNCHER = WORKLOADS.replace("/workloads/", "/launcher")
USER = "/home/ada/train.py"
TOP = ('  File "<frozen runpy>", line 198 in _run_module_as_main',)


def stack(*frames: str, header: str = "Current thread") -> str:
    """`file:line function` per frame, innermost first; `torch/…` lies among the libraries, `~/…` is ours."""
    lines = [f"{header} 0x00007fe7dc442b80 (most recent call first):"]
    for frame in frames:
        place, function = frame.rsplit(" ", 1)
        file, line = place.rsplit(":", 1)
        file = file.replace("~", LAUNCHER) if file.startswith("~") else file
        file = f"{LIBRARY}/{file}" if file.startswith("torch") else file
        lines.append(f'  File "{file}", line {line} in {function}')
    return "\n".join([*lines, *TOP]) + "\n"


IN_FORWARD = stack(
    f"{USER}:25 lookup",
    f"{USER}:14 forward",
    "torch/nn/parallel/distributed.py:1715 _run_ddp_forward",
    "~/worker/training/forward_backward.py:75 forward_backward",
)
IN_BACKWARD = stack(
    "torch/autograd/graph.py:979 _engine_run_backward",
    "~/worker/training/forward_backward.py:78 forward_backward",
)
COMPILES_BACKWARD = stack(
    f"{STDLIB}/ast.py:50 parse",
    "torch/_inductor/compile_fx.py:2609 compile_fx_backward",
    "torch/_functorch/_aot_autograd/runtime_wrappers.py:3473 backward",
    "torch/autograd/graph.py:979 _engine_run_backward",
    f"{USER}:12 main",
)
IN_BARRIER = stack(
    "torch/distributed/distributed_c10d.py:3000 all_reduce",
    "torch/distributed/c10d_logger.py:83 wrapper",
    "~/worker/base/process_group.py:35 barrier",
)
IN_USERS_COLLECTIVE = stack("torch/distributed/distributed_c10d.py:3000 all_reduce", f"{USER}:30 forward")
IN_RENDEZVOUS = stack(
    "torch/distributed/rendezvous.py:190 _create_c10d_store",
    "torch/distributed/distributed_c10d.py:1770 init_process_group",
    "torch/distributed/c10d_logger.py:83 wrapper",
    f"{USER}:4 main",
)
IN_TORCH = stack("torch/nn/functional.py:7 linear", "torch/nn/parallel/distributed.py:1715 _run_ddp_forward")


IN_REPLICA = stack(f"{USER}:25 forward", "~/worker/strategies/cpu_parallel.py:40 run", header="Thread")
JOINING = stack(f"{STDLIB}/threading.py:320 wait", "~/worker/strategies/cpu_parallel.py:60 join")
"""A replica's thread, and the main one, which waits for it."""
IN_BACKGROUND = stack(f"{USER}:5 read_ahead", header="Thread").replace(
    TOP[0], '  File "t.py", line 1 in _bootstrap'
)
"""A thread of the user's, which counts for nothing."""


@pytest.mark.parametrize(
    ("text", "waiting", "place"),
    [
        (IN_FORWARD, None, f"{USER}:25 in lookup"),
        (IN_BACKWARD, BACKWARD, "_engine_run_backward"),
        (IN_BARRIER, COLLECTIVE, "all_reduce"),
        (IN_USERS_COLLECTIVE, COLLECTIVE, f"{USER}:30 in forward"),
        (IN_RENDEZVOUS, RENDEZVOUS, f"{USER}:4 in main"),
        (IN_TORCH, None, "functional.py:7 in linear"),
        (stack("torch/nn/parallel/distributed.py:2000 _sync_buffers"), COLLECTIVE, "_sync_buffers"),
        (
            stack("torch/cuda/__init__.py:900 synchronize", "~/worker/accelerators/clock.py:9 read"),
            GPU,
            "synchronize",
        ),
        (stack(f"{WORKLOADS}sleep.py:24 forward", "torch/nn/x.py:1 f"), None, "sleep.py:24 in forward"),
        (stack("~/worker/base/process_group.py:75 await_port"), COLLECTIVE, "await_port"),
        (stack(f"{USER}:9 backward", "torch/autograd/graph.py:979 _engine_run_backward"), None, ":9 in"),
        (f"{IN_REPLICA}\n{JOINING}", None, f"{USER}:25 in forward"),
        (COMPILES_BACKWARD, None, ":12 in main"),
        (f"{IN_BACKGROUND}\n{IN_BACKWARD}", BACKWARD, "_engine_run_backward"),
    ],
)
def test_waiting_differs_from_working(text: str, waiting: str | None, place: str) -> None:
    doing = known(activity(parse_threads(f"step 3\n{text}")))
    assert doing.waiting == waiting
    assert place in str(doing.frame)


def hang(*texts: str) -> Hang | None:
    return find_hang({rank: activity(parse_threads(text)) for rank, text in enumerate(texts)})


def test_before_the_first_step_is_distinguished() -> None:
    start, later = (RankView(rank, 7, steps, "", (), ()) for rank, steps in ((0, 0), (1, 3)))
    assert Hang(None, "", (), ranks=(start, start)).is_before_first_step
    assert not Hang(None, "", (), ranks=(start, later)).is_before_first_step
    assert not Hang(None, "", ()).is_before_first_step


CRASH = dedent(f"""\
    step 7
    Fatal Python error: Segmentation fault

    Thread 0x00007fb9d3c61b81 (most recent call first):
      File "{LIBRARY}/torch/x.py", line 1 in other

    Current thread 0x00007fb9d3c61b80 (most recent call first):
      File "{LIBRARY}/ctypes.py", line 519 in string_at
      File "{USER}", line 26 in misbehave
      File "{USER}", line 14 in forward
      File "<frozen runpy>", line 88 in _run_code

    Extension modules: msgspec._core, torch._C (total: 2)
    """)


def test_a_crash_is_reported_as_far_as_the_users_line() -> None:
    fatal = known(fatal_error(CRASH))
    assert (fatal.what, len(fatal.frames), str(fatal.place)) == (
        "Segmentation fault",
        2,
        f"{USER}:26 in misbehave",
    )
    assert CRASH[: fatal.start] == "step 7\n"
    assert fatal_error("all is well") is None


def test_whose_a_file_is() -> None:
    assert is_users(USER)
    assert not any(is_users(file) for file in (f"{LIBRARY}/torch/x.py", f"{LAUNCHER}/cli.py", "<string>"))
    assert is_workload(f"{WORKLOADS}gpt.py")
    assert not is_users("/home/me/.local/lib/python3.11/site-packages/torch/x.py")
    assert not is_users(f"{WORKLOADS}gpt.py")


def test_packages_installed_next_to_the_users_code_are_not_theirs(tmp_path: Path) -> None:
    """As `pip install --target DIRECTORY` does."""
    record = tmp_path / "timm-1.0.dist-info" / "RECORD"
    record.parent.mkdir()
    record.write_text("timm/__init__.py,sha256=x,1\nsix.py,sha256=x,1\ntimm-1.0.dist-info/RECORD,,\n")
    assert not is_users(str(tmp_path / "timm" / "layers" / "norm.py"))
    assert not is_users(str(tmp_path / "six.py"))
    assert is_users(str(tmp_path / "train.py"))
    assert is_users(str(tmp_path / "models" / "timm" / "net.py"))


def test_a_function_is_never_shown_with_the_place_of_another() -> None:
    """The import system has frames in no file; a library's function is named with the line that called it."""
    user, library = (
        '  File "/job/train.py", line 41 in main',
        f'  File "{LIBRARY_DIRECTORIES[0]}torch/utils/data/dataloader.py"',
    )
    frozen = '  File "<frozen importlib._bootstrap>", line 1360 in _find_and_load'
    head = "Current thread 0x1 (most recent call first):"
    shown = [
        known(activity(parse_threads("\n".join((head, *lines))))).short
        for lines in (
            (f"{library}, line 9 in __next__", user),
            (f"{library}, line 2 in <module>", frozen, user),
            (frozen, f"{library}, line 2 in <module>"),
        )
    ]
    assert shown == [
        "is in `DataLoader.__next__`, called at train.py:41",
        "is importing `torch.utils.data.dataloader`, called at train.py:41",
        "is in `<module>` (dataloader.py:2)",
    ]


FROZEN = "<frozen importlib._bootstrap>:241"
IMPORT = (f"{FROZEN} _call_with_frames_removed", f"{FROZEN} _find_and_load")
REMOTE_MODULE = (
    f"{STDLIB}/collections/__init__.py:503 namedtuple",
    "torch/distributed/nn/api/remote_module.py:43 <module>",
    *IMPORT,
    "torch/distributed/nn/__init__.py:7 <module>",
    *IMPORT,
)


@pytest.mark.parametrize(
    ("frames", "text"),
    [
        (
            (*REMOTE_MODULE, "torch/nn/parallel/distributed.py:870 __init__", f"{USER}:4 <module>"),
            "is importing `torch.distributed.nn`, called at train.py:4",
        ),
        (REMOTE_MODULE, "is importing `torch.distributed.nn`"),
        (
            (
                "torch/distributed/tensor/_ops/utils.py:9 register",
                "torch/distributed/x.py:1 <module>",
                *IMPORT,
            ),
            "is importing `torch.distributed.x`",
        ),
        (
            (*IMPORT, "torch/distributed/nn/__init__.py:7 <module>", *IMPORT, f"{USER}:4 f"),
            "is importing `torch.distributed.nn`, called at train.py:4",
        ),
        (
            ("torch/distributed/x.py:9 barrier", f"{STDLIB}/lib.py:3 <module>", *IMPORT, f"{USER}:4 f"),
            COLLECTIVE,
        ),
        ((f"{USER}:9 <module>", *IMPORT, f"{USER}:4 f"), "is in `<module>` (train.py:9)"),
    ],
)
def test_a_rank_that_imports_modules_of_torchs_waits_for_no_rank(frames: tuple[str, ...], text: str) -> None:
    assert known(activity(parse_threads(stack(*frames)))).short == text


HANGS: dict[str, tuple[tuple[str, ...], int | None]] = {
    "one does not wait": ((IN_BARRIER, IN_FORWARD, IN_BARRIER), 1),
    "several do not wait": ((IN_BARRIER, IN_FORWARD, IN_FORWARD), 1),
    "the last one waits": ((*[IN_FORWARD] * 3, IN_BARRIER), 0),
    "another is in the backward pass, of which no waiting is claimed": ((IN_BACKWARD, IN_FORWARD), 1),
    "all compile their backward pass": ((COMPILES_BACKWARD, COMPILES_BACKWARD), 0),
    "alone in the backward pass": ((IN_BACKWARD,), 0),
    "in a barrier and in the backward pass": ((IN_BARRIER, IN_BACKWARD), None),
    "in two collectives": ((IN_BARRIER, IN_USERS_COLLECTIVE), None),
    "all work": ((IN_FORWARD, IN_FORWARD), 0),
    "no stack of one": ((IN_BARRIER, ""), 1),
    "a stack of one alone": (("", IN_BARRIER, ""), 0),
    "they do not find each other": ((IN_RENDEZVOUS, IN_RENDEZVOUS), None),
    "one looks for the other": ((IN_RENDEZVOUS, IN_FORWARD), 1),
    "they do not find each other, with arguments that aren't the user's": (
        (IN_RENDEZVOUS.replace(USER, f"{LAUNCHER}/worker/base/process_group.py"),) * 2,
        None,
    ),
    "all import": ((stack(*REMOTE_MODULE), stack(*REMOTE_MODULE)), 0),
}


@pytest.mark.parametrize("name", HANGS)
def test_the_rank_that_does_not_wait_is_named(name: str, wording: Wording) -> None:
    texts, rank = HANGS[name]
    found = known(hang(*texts))
    assert found.rank == rank
    wording(found.headline, found.details)


def test_without_stacks_nothing_is_said_of_a_hang() -> None:
    assert hang("", "") == find_hang({})


def test_a_printed_stack_leaves_out_the_import_system() -> None:
    (thread,) = parse_threads(stack(*REMOTE_MODULE, f"{USER}:4 <module>"))
    assert [frame.line for frame in outside_launcher(thread.frames)] == ["503", "43", "7", "4"]


def innermost(depth: int) -> str:
    """The stack of this thread, that deep below here, as faulthandler writes it."""
    if depth:
        return innermost(depth - 1)
    with TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file, all_threads=False)
        file.seek(0)
        return file.read()


def test_a_stack_says_where_its_outer_calls_are_missing() -> None:
    """In what is printed, in the JSON of the command, and in `hang.json`."""

    def hang_of(text: str) -> Hang:
        (thread,) = parse_threads(text.replace("Stack (", "Current thread 0x1 ("))
        return Hang(None, "", (), ranks=(RankView(0, 7, 0, "", (), (thread,)),))

    missing = "    … (calls further out than the innermost 100 are not recorded)"
    deep = hang_of(innermost(150))
    (thread,) = deep.ranks[0].threads
    assert [frame.function for frame in thread.frames] == ["innermost"] * 100
    *_, repeated, last = render_stacks("01", deep, {}).splitlines()
    assert repeated.endswith("in innermost (repeated 99 times)")
    assert last == missing
    assert msgspec.to_builtins(deep)["ranks"][0]["threads"][0]["is_cut"]
    assert missing not in render_stacks("01", hang_of(stack(*[f"{USER}:4 f"] * 98)), {})


def test_each_look_shows_where_ranks_are_now() -> None:
    files = {"stacks0.txt": stack("old.py:1 before")}

    class Control:
        """Its rank writes its stacks below those of the look before."""

        def num_bytes(self, name: str) -> int:
            return len(files["stacks0.txt"])

        def ask_for_stacks(self, state: object) -> None:
            files["stacks0.txt"] += stack("new.py:2 now")

        def read(self, name: str, start: int) -> bytes:
            return files["stacks0.txt"][start:].encode()

    ((thread,),) = ask_stacks(cast(ControlDir, Control()), {0: cast(RankState, None)}).values()
    assert thread.frames[0].function == "now"


# What ranks use of a machine, seen from outside


RANK, OTHER, OUTSIDE = (GpuProcess(pid, name, 1.0) for pid, name in ((7, "p"), (8, "p"), (9, None)))


def gpu(percent: int | None, *users: GpuProcess) -> Gpu:
    return Gpu("GPU-a", "x", index=0, utilisation_percent=percent, processes=users)


@pytest.mark.parametrize(
    ("gpus", "percent"),
    [
        ((), 0),
        ((gpu(0, RANK), gpu(90, OTHER)), 0),
        ((gpu(3, RANK, OTHER),), 3),
        ((gpu(0, RANK), gpu(5, OUTSIDE)), 5),  # in a container it may be this rank
        ((gpu(5),), 5),
        ((replace(gpu(5), processes=None),), 5),
        ((gpu(None, RANK),), None),
        ((gpu(None, OTHER),), 0),
    ],
)
def test_a_rank_uses_each_gpu_that_is_not_surely_anothers(gpus: tuple[Gpu, ...], percent: int | None) -> None:
    assert utilisation(Gpus(gpus), (RANK.pid,)) == percent


def test_of_drivers_that_do_not_answer_nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    assert utilisation(Gpus(nvml_error="GPU is lost"), (7,)) is utilisation(None, (7,)) is None
    answers = threading.Event()
    monkeypatch.setattr(snapshot, "inspect_gpus", lambda environ: answers.wait())
    monkeypatch.setattr(snapshot, "GPUS_S", 0.0)
    assert ask_gpus() is None
    answers.set()


def test_a_process_has_the_cpu_time_of_its_children_too() -> None:
    before_s = cpu_s([os.getpid()])
    subprocess.run([sys.executable, "-S", "-c", "x = sum(range(5_000_000))"], check=True)
    assert cpu_s([os.getpid()]) >= before_s + 0.02
    assert cpu_s([]) == 0


def test_a_program_that_waits_for_processes_of_its_own_gets_advice(wording: Wording) -> None:
    spawns = parse_threads(stack("torch/multiprocessing/spawn.py:340 spawn", f"{USER}:9 main"))
    seen = [RankSnapshot(rank, 7, 0, spawns, ()) for rank in (0, 1)]
    wording(diagnose(seen).details)
    for other in (replace(seen[1], steps=1), replace(seen[1], threads=parse_threads(IN_FORWARD))):
        assert len(diagnose([seen[0], other]).details) == 2


def test_a_program_without_a_guard_is_found_whatever_python_warns_of_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "train.py"
    program.write_text("import re\nre.compile('\\d')\n")
    monkeypatch.setattr(snapshot, "command_of", lambda pid: "python -c 'from multiprocessing.spawn import …'")
    threads = parse_threads(stack(f"{program}:2 <module>"))
    assert snapshot.unguarded(threads, [1]) == str(program)
