"""Environment variables that a program sets before it imports torch: the rank has imported it already.

torch, and the libraries that it loads, read many variables when they are imported: OMP_NUM_THREADS (libgomp),
TORCH_LOGS (torch/_logging/_internal.py), TORCH_DISTRIBUTED_DEBUG (torch/distributed/__init__.py),
PYTORCH_JIT (torch/jit/_state.py), TORCHDYNAMO_* and TORCHINDUCTOR_* (torch/_dynamo/config.py,
torch/_inductor/config.py). So a rank begins anew, once, if the environment has changed until the program
imports torch: a new interpreter imports it with these variables, and then runs the program from its
beginning. What the program did before is done twice.
"""

import json
import os
import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import gpurun
from gpurun.launcher.processes.guard import WITH_OUR_CODE
from gpurun.launcher.rundir.control import STACKS_SIGNAL

READ_LATER = (
    "MASTER_",  # by `init_process_group`: torch/distributed/rendezvous.py
    "RANK",
    "WORLD_SIZE",
    "LOCAL_",
    "CUDA_",  # by the driver, when it is used for the first time
    "NCCL_",  # when a communicator is made
    "GLOO_",  # when a process group is made
    "TOKENIZERS_",  # by these packages, at their own import or later
    "TRANSFORMERS_",
    "HF_",
    "WANDB_",
    "MLFLOW_",
    "COMET_",
)
"""Beginnings of variables that nothing reads when torch is imported."""
ANEW = "gpurun.launcher.worker.entry.anew"
"""The module with which a rank goes on."""
_NAME = "torch"


def changed(before: Mapping[str, str], now: Mapping[str, str]) -> tuple[str, ...]:
    """The variables that differ, but those that torch's import doesn't read, in alphabetical order."""
    names = sorted(before.keys() | now.keys())
    return tuple(
        name for name in names if before.get(name) != now.get(name) and not name.startswith(READ_LATER)
    )


@dataclass(eq=False)
class HiddenTorch(MetaPathFinder, Loader):
    """torch as it is before its import, from `hide` until the program imports it."""

    on_import: Callable[[], None]
    """Called then, before the program has it."""
    _modules: dict[str, ModuleType] = field(default_factory=dict)
    _spec: ModuleSpec | None = None

    def hide(self) -> None:
        """Hides the package and all of its modules."""
        self._modules = {name: each for name, each in sys.modules.items() if name.split(".")[0] == _NAME}
        for name in self._modules:
            del sys.modules[name]
        sys.meta_path.insert(0, self)

    def show(self) -> None:
        """Undoes that; does nothing the second time."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)
            sys.modules.update(self._modules)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Finds the package; not every caller imports it, some only ask whether there is one."""
        if name != _NAME or (found := self._modules[_NAME].__spec__) is None:
            return None
        spec = ModuleSpec(name, self, origin=found.origin, is_package=True)
        spec.submodule_search_locations = found.submodule_search_locations
        spec.has_location = True
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """The package as it is."""
        self.on_import()
        self._spec = self._modules[_NAME].__spec__  # importlib replaces it
        return self._modules[_NAME]

    def exec_module(self, module: ModuleType) -> None:
        """Nothing is left to do but what importlib expects."""
        module.__spec__ = self._spec
        self.show()


@dataclass(frozen=True)
class Beginning:
    """The rank before its program began."""

    argv: tuple[str, ...]
    """Of the rank's entry."""
    control: str
    """The directory with the control blocks."""
    path: tuple[str, ...] = field(default_factory=lambda: tuple(sys.path))
    env: dict[str, str] = field(default_factory=lambda: dict(os.environ))
    pid: int = field(default_factory=os.getpid)

    def begin_anew_if_changed(self) -> None:
        """Replaces the rank by a new one, which imports torch in the environment of this moment."""
        names = changed(self.env, os.environ)
        if not names or os.getpid() != self.pid:
            return
        state = os.memfd_create("gpurun-anew", 0)  # 0: it stays open in the new interpreter
        os.write(state, json.dumps({**asdict(self), "names": names}).encode())
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        signal.pthread_sigmask(signal.SIG_BLOCK, {STACKS_SIGNAL})  # until it has a handler again
        argv = [sys.executable, "-P", "-c", WITH_OUR_CODE, str(gpurun.__file__), ANEW, str(state)]
        os.execv(sys.executable, argv)
