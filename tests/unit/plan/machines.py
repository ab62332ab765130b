"""Machines for plans to be made for: so many cores, such GPUs."""

from dataclasses import dataclass

from gpurun.launcher.machine.host import Topology

UNKNOWN = Topology({}, ())


@dataclass(frozen=True)
class FakeGpu:
    uuid: str
    name: str = "H200"
    busy_with: str | None = None
    numa_node: int | None = None
    kind: str = "cuda"
    bus: str = ""
    capability: tuple[int, int] | None = None
    unusable: str | None = None


@dataclass(frozen=True)
class FakeMachine:
    cpu_cores: int = 2
    gpus: tuple[FakeGpu, ...] = ()
    topology: Topology = UNKNOWN
    notes: tuple[str, ...] = ()
    free_cores: int | None = None
