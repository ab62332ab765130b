"""The process group of one launch, which listens on the loopback interface only where there is one machine.

What the ranks exchange between blocks goes by gloo, on the CPU, and never inside a timed step.
"""

from __future__ import annotations

import gc
import os
import signal
import socket
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from gpurun.launcher.machine import LOOPBACK
from gpurun.launcher.machine.accelerators import ACCELERATORS, CPU, accelerator_of
from gpurun.launcher.machine.network import family_of
from gpurun.launcher.rundir.files import RunDir, write_bytes
from gpurun.launcher.strategies import NCCL_ALGORITHMS

if TYPE_CHECKING:  # ranks of programs do without jobs and their parser
    from gpurun.launcher.plan.rank_config import LaunchConfig

T = TypeVar("T")

_POLL_S = 0.005
_RENDEZVOUS_TIMEOUT_S = 120.0
"""Ranks start within milliseconds of each other; a minute may pass on a machine that swaps."""

LIBUV_TAKES_SOCKETS = torch.__version__ >= "2.8"
"""Whether torch's newer store can listen on a socket of ours.  Source: PyTorch's pull request 150215"""


NCCL_VARIABLES = {
    "algorithm": ("NCCL_ALGO",),
    "protocol": ("NCCL_PROTO",),
    "channels": ("NCCL_MIN_NCHANNELS", "NCCL_MAX_NCHANNELS"),
}
"""NCCL's variables of settings that a job can choose. Source: NCCL's user guide, "Environment Variables"."""


def init_group(config: LaunchConfig, rank: int) -> None:
    """Joins all ranks of the launch.

    Tensors on the CPU always use the CPU's backend.

    Raises:
        TimeoutError: rank 0 has not opened the store in time.
    """
    stay_on_this_machine()
    os.environ.update(nccl_variables(config.nccl))
    port_file = RunDir(Path(config.run_dir)).rendezvous(config.launch)
    enter = open_store if rank == 0 else join_store
    store = enter(port_file, config.world_size, config.address)
    own = None if config.backend in (None, CPU.backend) else torch.device(config.devices[rank])
    dist.init_process_group(
        backend_of(config, rank),
        store=store,
        rank=rank,
        world_size=config.world_size,
        timeout=timedelta(seconds=config.collective_timeout_s),
        device_id=own,  # connects at once, so that what fails in it fails here, and not in the first step
    )


def stay_on_this_machine() -> None:
    """Keeps collectives on the loopback interface, unless the job names another one.

    The backends would otherwise take the first interface that the host's name resolves to.
    """
    for kind in ACCELERATORS.values():
        os.environ.setdefault(kind.interface_variable, "lo")


def nccl_variables(chosen: Mapping[str, Any]) -> dict[str, str]:
    """The environment variables by which a job configures NCCL; it reads them when it connects."""
    texts = {name: nccl_algorithm(value) if name == "algorithm" else value for name, value in chosen.items()}
    return {variable: str(text) for name, text in texts.items() for variable in NCCL_VARIABLES[name]}


def nccl_algorithm(name: str) -> str:
    """The value that has NCCL use the algorithm for all that supports it: `allreduce:tree,tree`.

    Since 2.24 NCCL fails in a collective that can't be, unless the ones that can are named. Before, it knew
    lists without names only, so that it reads what is behind the last comma; there the rest went by the ring.
    Source: NCCL's user guide, "NCCL_ALGO"; src/graph/tuning.cc of NCCL 2.21 and 2.24, `parseList`.
    """
    return ";".join(f"{collective}:{name}" for collective in NCCL_ALGORITHMS[name]) + f",{name}"


def backend_of(config: LaunchConfig, rank: int) -> str:
    """The backend argument of `init_process_group`: `gloo`, or `cpu:gloo,cuda:nccl`."""
    kind = accelerator_of(config.devices[rank])
    if config.backend is None or config.backend == CPU.backend:
        return CPU.backend
    return f"{CPU.name}:{CPU.backend},{kind.name}:{config.backend}"


def open_store(port_file: Path, world_size: int, address: str = LOOPBACK, wanted: int = 0) -> TCPStore:
    """Rank 0's store. The kernel chooses the port, and it is bound before any rank reads it: no race.

    Given only a port, the store would listen on all interfaces; so it gets a socket that is bound already.

    Args:
        port_file: where the port is written.
        world_size: the number of ranks.
        address: that it listens on.
        wanted: the port; 0: a free one.
    """
    backlog = max(128, world_size)
    listener = socket.create_server((address, wanted), family=family_of(address), backlog=backlog)
    port = listener.getsockname()[1]
    store = TCPStore(
        address,
        port,
        world_size,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
        use_libuv=LIBUV_TAKES_SOCKETS,
    )
    write_bytes(port_file, str(port).encode())
    return store


def join_store(port_file: Path, world_size: int, address: str = LOOPBACK) -> TCPStore:
    """Another rank's store, as soon as rank 0 has written its port."""
    port = await_port(port_file)
    timeout = timedelta(seconds=_RENDEZVOUS_TIMEOUT_S)
    return TCPStore(address, port, world_size, is_master=False, wait_for_workers=False, timeout=timeout)


def await_port(port_file: Path) -> int:
    """The port in the file, which appears complete or not at all."""
    deadline = time.monotonic() + _RENDEZVOUS_TIMEOUT_S
    while time.monotonic() < deadline:
        try:
            return int(port_file.read_text())
        except FileNotFoundError:
            time.sleep(_POLL_S)
    raise TimeoutError(f"rank 0 did not write its port to {port_file} within {_RENDEZVOUS_TIMEOUT_S:g} s")


def close_group() -> None:
    """Closes the group; only after success, since after a failure it may wait forever.

    The last reference to a DDP model must be gone: collecting it later would use a destroyed group.
    """
    dist.barrier()
    gc.collect()
    dist.destroy_process_group()


def serve_store(argv: Sequence[str]) -> None:
    """The store through which a program's ranks find each other, in a process that outlives all of them.

    `torchrun` keeps it in its agent: then no rank hosts it, a rank may end before the others, and the port is
    taken before any rank reads it.

    Args:
        argv: the file for the port, the number of ranks, the address to listen on, and the port (0: free).
    """
    path, world_size, address, port = argv
    store = open_store(Path(path), int(world_size), address, int(port))
    while store is not None:
        signal.pause()


class Peers:
    """The other ranks; the base is of a process that has none."""

    def barrier(self) -> None:
        """Returns on all ranks within some tens of microseconds."""
        return

    def maximum(self, values: Sequence[float]) -> list[float]:
        """Element by element, the largest value over ranks."""
        return list(values)

    def gather(self, value: T) -> list[T]:
        """Every rank's value, by rank."""
        return [value]


class GroupPeers(Peers):
    """The ranks of a process group. CPU tensors use gloo, whatever backend the gradients use."""

    def __init__(self) -> None:
        self._token = torch.zeros(1)

    def barrier(self) -> None:
        # Not dist.barrier: that uses NCCL where there is one, and waits for the GPU too.
        dist.all_reduce(self._token)

    def maximum(self, values: Sequence[float]) -> list[float]:
        tensor = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        return [float(value) for value in tensor]

    def gather(self, value: T) -> list[T]:
        everyone = [value] * dist.get_world_size()
        dist.all_gather_object(everyone, value)
        return everyone
