"""Machines for plans to be made for: so many cores, such GPUs."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpurun.launcher.jobfile.load import check_source
from gpurun.launcher.jobfile.model import JobSpec
from gpurun.launcher.jobfile.read import read_spec
from gpurun.launcher.jobfile.yaml.tree import parse_source
from gpurun.launcher.machine.host import Machine, Topology
from gpurun.launcher.plan.build import build_plan
from gpurun.launcher.plan.launch_config import launch_config_for
from gpurun.launcher.plan.model import NodeGpu, Plan
from gpurun.launcher.plan.rank_config import LaunchConfig

UNKNOWN = Topology({}, ())


@dataclass(frozen=True)
class FakeGpu(NodeGpu):
    name: str = "H200"


class FakeMachine(Machine):
    def __init__(
        self,
        cpu_cores: int = 2,
        gpus: Sequence[NodeGpu] = (),
        topology: Topology = UNKNOWN,
        notes: tuple[str, ...] = (),
        **others: Any,
    ) -> None:
        of_host = {"hostname": "host", "cpu_model": "", "memory_gib": 64.0, "memory_available_gib": 64.0}
        found = {"cpu_cores": cpu_cores, "gpus": gpus, "topology": topology, "notes": notes}
        super().__init__(**of_host | found | others)  # type: ignore[arg-type]


def spec_of(text: str) -> JobSpec:
    """A job that is written in YAML."""
    return check_source(parse_source(text.encode(), "job.yaml"), Path())


def unchecked(text: str) -> JobSpec:
    """The same, of which no file and no module has to be there."""
    spec, mistakes = read_spec(parse_source(text.encode(), "job.yaml"))
    assert not mistakes, mistakes
    return spec


def planned(spec: JobSpec, machine: FakeMachine) -> tuple[Plan, Sequence[LaunchConfig]]:
    """The plan of a job, and what the ranks of each launch are given."""
    plan, run = build_plan(spec, machine), Path("/run")
    return plan, [
        launch_config_for(plan, spec, launch, run_dir=run, job_dir=Path("/job"), machine=machine)
        for launch in plan.launches
    ]
