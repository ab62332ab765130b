"""Activities of ranks, from the stacks that Python's faulthandler wrote, and which files are the user's.

In a launch that hangs, the stacks separate the ranks that wait from the ranks that they wait for.
"""

import hashlib
import os
import re
import site
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise, takewhile
from pathlib import Path, PurePath

import gpurun
from gpurun.launcher.machine.accelerators import gpu_kinds

_THREAD = re.compile(r"^(Current thread|Thread) 0x[0-9a-f]+.*\(most recent call first\):$")
_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+|\?+) in (?P<function>.+)$')
_FATAL = re.compile(r"^Fatal Python error: (?P<what>.+)$", re.MULTILINE)

_EXCHANGES = ("/torch/distributed/", "/launcher/worker/base/process_group.py")
"""Files whose functions wait for other ranks, and do nothing else that takes long, but for `_CALLS_MODEL`."""
_MEETS = "init_process_group"
"""The function of torch.distributed in which ranks find each other."""
_CALLS_MODEL = "forward"
"""The function by which FSDP and similar modules call the model that they wrap.
Source: torch/distributed/fsdp/fully_sharded_data_parallel.py, `FullyShardedDataParallel.forward`.
"""
_COMPILES = "/torch/_inductor/compile_fx.py"
"""Compiles, also within the backward pass, which it compiles when it is first run.
Source: torch/_functorch/_aot_autograd/runtime_wrappers.py, `_backward_impl`.
"""
_GPU_MODULES = ("/torch/accelerator/", *(f"/torch/{kind.name}/" for kind in gpu_kinds()))
_DDP = "/torch/nn/parallel/distributed.py"
_DDP_EXCHANGES = ("_sync_buffers", "_sync_module_states", "_distributed_broadcast_coalesced")
"""The work of `DistributedDataParallel` besides calling the model, by function."""
_IMPORT_SYSTEM = "<frozen importlib"
_MODULE_BODY = "<module>"
_KNOWN_OWNERS = {"dataloader.py": "DataLoader"}
"""Stacks don't name classes; in this one training most often waits."""
MOST_RECORDED = 100
"""Frames of a thread that faulthandler writes, the innermost ones; no option changes it. Newer versions of
Python don't mark a stack that is cut.
Source: CPython, Python/traceback.c, `MAX_FRAME_DEPTH`.
"""
_MOST_FRAMES = 10
"""Shown of a crash in which no frame is the user's."""

COLLECTIVE = "waits for the other ranks in a collective"
RENDEZVOUS = "waits for the other ranks in `init_process_group`"
BACKWARD = "is in the backward pass"
"""Under DDP this includes waiting for the others, which no stack distinguishes from computing."""
GPU = "waits for its GPU"


@dataclass(frozen=True)
class Frame:
    """One line of a stack."""

    file: str
    line: str
    """A number, or question marks."""
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}"


Stack = tuple[Frame, ...]
"""Innermost frame first."""


@dataclass(frozen=True)
class Thread:
    """The stack of one thread; `current` is the one that took the signal, which is the main thread."""

    current: bool
    frames: Stack
    is_cut: bool = False
    """Whether there may be outer frames that faulthandler didn't write."""


@dataclass(frozen=True)
class Activity:
    """A rank's activity when it wrote its stacks."""

    waiting: str | None
    """How it waited, as a verb phrase; `None`: it did not wait."""
    frame: Frame | None
    """The innermost frame of the workload; if there is none, the innermost of all."""
    inside: str | None = None
    """The library function that this frame called: `DataLoader.__next__`."""
    importing: str | None = None
    """The module of a library whose import this frame caused: `torch._dynamo`."""

    @property
    def text(self) -> str:
        """`waits for its GPU`, `is at train.py:25 in forward`."""
        shown = self.frame is not None and is_workload(self.frame.file)
        if self.importing:
            return f"{self._import}, called at {self.frame}" if shown else self._import
        if self.waiting is None:
            return f"is at {self.frame}"
        return f"{self.waiting} ({self.frame})" if shown else self.waiting

    @property
    def _import(self) -> str:
        return f"is importing `{self.importing}`"

    @property
    def short(self) -> str:
        """`is in `forward` (train.py:25)`, `is in `DataLoader.__next__`, called at train.py:41`."""
        if self.waiting is not None or self.frame is None:
            return self.waiting or "reported no stack"
        place = f"{PurePath(self.frame.file).name}:{self.frame.line}"
        if self.importing:
            return f"{self._import}, called at {place}" if is_workload(self.frame.file) else self._import
        return (
            f"is in `{self.inside}`, called at {place}"
            if self.inside
            else f"is in `{self.frame.function}` ({place})"
        )


@dataclass(frozen=True)
class Fatal:
    """A crash that faulthandler has seen."""

    what: str
    """`Segmentation fault`."""
    frames: Stack
    """Frames from the innermost one to the first of the user's."""
    start: int
    """The byte of the log at which the report of the crash begins."""

    @property
    def place(self) -> Frame | None:
        """The user's frame in which it happened."""
        return next((frame for frame in self.frames if is_users(frame.file)), None)


def parse_threads(text: str) -> tuple[Thread, ...]:
    """All stacks in a text; other lines are ignored."""
    found: list[tuple[bool, list[Frame]]] = []
    inside = False
    for line in text.splitlines():
        if header := _THREAD.match(line):
            found.append((header[1] == "Current thread", []))
            inside = True
        elif inside and (match := _FRAME.match(line)):
            found[-1][1].append(Frame(match["file"], match["line"], match["function"]))
        else:
            inside = False
    return tuple(Thread(current, tuple(frames), len(frames) >= MOST_RECORDED) for current, frames in found)


def activity(threads: Sequence[Thread]) -> Activity | None:
    """The activity of the rank with these threads; `None` if there is no stack.

    The main thread decides. If it only waits for threads that compute for it (autograd's on a GPU, one per
    replica of `dp`), the first of them that is in the workload decides.
    """
    thread = main_thread(threads)
    if thread is None:
        return None
    main = thread.frames
    if workload_frame(main) is None and waiting_for(main) in (None, BACKWARD):
        helpers = [thread.frames for thread in threads if not thread.current and computes(thread.frames)]
        main = next((frames for frames in helpers if workload_frame(frames)), main)
    shown = in_files(main)
    waiting = waiting_for(main)
    importing = imported(main) if waiting is None else None
    return Activity(waiting, workload_frame(shown) or shown[0], called_inside(shown), importing)


def in_files(frames: Stack) -> Stack:
    """The frames without `<frozen importlib._bootstrap>`, which is in no file; all, if that is all."""
    return tuple(frame for frame in frames if not frame.file.startswith("<frozen ")) or frames


def imported(frames: Stack) -> str | None:
    """The library's module that the innermost frame of the workload imports, by itself or by a function."""
    inner = tuple(takewhile(lambda frame: not is_workload(frame.file), frames))
    found = [
        body.file
        for body, caller in pairwise(inner)
        if body.function == _MODULE_BODY and caller.file.startswith(_IMPORT_SYSTEM)
    ]
    return _module_name(found[-1]) if found else None


def _module_name(file: str) -> str:
    """`torch.distributed.nn` of `…/site-packages/torch/distributed/nn/__init__.py`."""
    place = _OF_PACKAGES.split(file)[-1]
    own = max((each for each in LIBRARY_DIRECTORIES if place.startswith(each)), key=len, default="")
    path = PurePath(place.removeprefix(own)).with_suffix("")
    parts = path.parts if own or place != file else path.parts[-1:]
    return ".".join(parts[:-1] if len(parts) > 1 and parts[-1] == "__init__" else parts)


def _in_import_of_torch(frames: Stack) -> bool:
    """Whether these innermost frames run the body of a module of torch, which waits for no rank."""
    body = frames[-1] if frames else None
    return body is None or (body.function == _MODULE_BODY and "/torch/" in body.file)


def main_thread(threads: Sequence[Thread]) -> Thread | None:
    """The thread that took the signal."""
    return next((thread for thread in threads if thread.current and thread.frames), None)


def called_inside(frames: Stack) -> str | None:
    """The library function that the innermost frame of the workload has called."""
    for callee, frame in pairwise(frames):
        if is_workload(callee.file):
            return None
        if is_workload(frame.file):
            owner = _KNOWN_OWNERS.get(PurePath(callee.file).name)
            return f"{owner}.{callee.function}" if owner else callee.function
    return None


def waiting_for(frames: Stack) -> str | None:
    """How this thread waits, from the frames above the innermost one of the workload."""
    inner = tuple(takewhile(lambda frame: not frame.file.startswith(_IMPORT_SYSTEM), frames))
    if len(inner) < len(frames) and _in_import_of_torch(inner):
        return None
    for frame in inner:
        if is_workload(frame.file) or frame.file.endswith(_COMPILES):
            return None
        if frame.function != _CALLS_MODEL and any(place in frame.file for place in _EXCHANGES):
            own = takewhile(lambda outer: not is_workload(outer.file), inner)
            return RENDEZVOUS if any(outer.function == _MEETS for outer in own) else COLLECTIVE
        if frame.file.endswith(_DDP) and frame.function in _DDP_EXCHANGES:
            return COLLECTIVE
        if frame.function == "_engine_run_backward":
            return BACKWARD
        if frame.function == "synchronize" and any(module in frame.file for module in _GPU_MODULES):
            return GPU
    return None


def workload_frame(frames: Stack) -> Frame | None:
    """The innermost frame of the user's code, or of a built-in workload."""
    return next((frame for frame in frames if is_workload(frame.file)), None)


def computes(frames: Stack) -> bool:
    """Whether a thread computes for the step: autograd's have no Python caller, those of `dp` are known.

    A background thread of the user's, which may wait for work all day, is neither.
    """
    if not frames:
        return False
    known = any("/launcher/worker/" in f.file or f.file.endswith("/parallel_apply.py") for f in frames)
    return known or frames[-1].function != "_bootstrap"


def fatal_error(log: str) -> Fatal | None:
    """The last crash in a log."""
    found = list(_FATAL.finditer(log))
    if not found:
        return None
    threads = parse_threads(log[found[-1].start() :])
    stack = next((thread.frames for thread in threads if thread.current), ())
    own = next((number for number, frame in enumerate(stack, 1) if is_users(frame.file)), _MOST_FRAMES)
    return Fatal(found[-1]["what"], stack[:own], found[-1].start())


OURS = f"{Path(gpurun.__file__).parent}/"
WORKLOADS = f"{OURS}workloads/"
LIBRARY_DIRECTORIES = tuple(
    f"{directory}/"
    for directory in {
        *site.getsitepackages(),
        *map(sysconfig.get_path, ("stdlib", "platstdlib", "purelib", "platlib")),
    }
)

_OF_PACKAGES = re.compile("/(site|dist)-packages/")
"""Directories of packages, also of other installations: of the user alone, or by PYTHONPATH."""


def is_users(file: str) -> bool:
    """Whether a file is neither part of gpurun nor of an installed library."""
    is_library = file.startswith((OURS, *LIBRARY_DIRECTORIES, "<"))
    return not (is_library or _OF_PACKAGES.search(file) or _is_installed(file))


def _is_installed(file: str) -> bool:
    """Whether it belongs to a package whose record lies next to it, as `pip install --target` puts it."""
    parts = PurePath(file).parts
    return any(parts[i] in _installed_in(str(PurePath(*parts[:i]))) for i in range(1, len(parts)))


@lru_cache(maxsize=4096)
def _installed_in(directory: str) -> frozenset[str]:
    """Names that packages have installed right there, by their records; none where these can't be read.

    Source: https://packaging.python.org/en/latest/specifications/recording-installed-packages/
    """
    names: set[str] = set()
    with suppress(OSError, UnicodeDecodeError):
        for record in Path(directory).glob("*.dist-info/RECORD"):
            lines = record.read_text("utf-8").splitlines()
            names.update(line.partition(",")[0].partition("/")[0] for line in lines)
    return frozenset(names)


def is_workload(file: str) -> bool:
    """Whether a file is the user's, or one of the built-in workloads."""
    return is_users(file) or file.startswith(WORKLOADS)


MOST_FILES = 2000
"""More would be a library that lies where the user's code does."""
GENERATED = "torchinductor_"
"""In the names of directories that compiled models are kept in."""


def code_hashes(job_dir: str | Path) -> dict[str, str]:
    """Every file of the user's code that this process has imported, or runs, with a hash of its content.

    Names are relative to `job_dir`. Files that can't be read are left out.
    """
    try:
        base, paths = os.path.realpath(job_dir), sorted(set(_users_files()))[:MOST_FILES]
    except OSError:  # the program has removed its working directory
        return {}
    found = {os.path.relpath(path, base): file_hash(path) for path in paths}
    return {name: digest for name, digest in found.items() if digest is not None}


def file_hash(path: str | Path) -> str | None:
    """A hash of a file's content; `None` where it can't be read, or is no file: a pipe would have us wait."""
    if not os.path.isfile(path):
        return None
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()[:16]
    except OSError:
        return None


def _users_files() -> Iterator[str]:
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if isinstance(file, str) and file.endswith(".py") and is_users(file) and GENERATED not in file:
            yield os.path.realpath(file)
