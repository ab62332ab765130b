"""A session with ranks that follow a script and a clock that never waits."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from gpurun.launcher.errors import GpurunError, Interrupted, ParamsError
from gpurun.launcher.failures.reporter import Reporter
from gpurun.launcher.jobfile.load import load_text
from gpurun.launcher.logs.relay import Relay
from gpurun.launcher.plan.build import build_plan
from gpurun.launcher.plan.rank_config import LaunchConfig
from gpurun.launcher.processes.protocol import Exit
from gpurun.launcher.run.running_attempt import Starter
from gpurun.launcher.run.session import Session
from gpurun.launcher.rundir.files import RunDir, write_json
from gpurun.launcher.rundir.records import (
    Event,
    FailureRecord,
    VariantStatus,
)
from tests.unit.plan.machines import FakeMachine
from tests.unit.run.fake_ranks import FakeClock, FakeRanks, Script

EVEN, SPLIT = "ddp-2-even", "ddp-2-6-2"
SPLITS = "compare: {split: [even, [6, 2]]}\n"
STRATEGIES = "compare: {strategy: [ddp, dp]}\n"


@dataclass
class Case:
    """A run of a job with fake ranks."""

    directory: Path
    job: str
    scripts: Sequence[Script] | Callable[[LaunchConfig], Script]
    said: list[str] = field(default_factory=list)
    clock: FakeClock = field(default_factory=FakeClock)
    broken: dict[str, BaseException] = field(default_factory=dict)
    is_part: bool = False

    def __post_init__(self) -> None:
        self.directory.mkdir(exist_ok=True)
        own = "steps: {together: never}\n" if "budget:" in self.job else "steps: {rounds: 6, launches: 1}\n"
        size = "" if "\nsteps:" in self.job else own
        text = f"workload: gpt\nglobal_batch: 8\ndevices: cpu:2\n{size}{self.job}"
        if "script:" in self.job:
            (self.directory / "train.py").write_text("")
            text = f"devices: cpu:2\n{self.job}"
        spec = load_text(text, "job.yaml", (), self.directory)
        machine: Any = FakeMachine(cpu_cores=8)
        self.plan = build_plan(spec, machine)
        self.run = RunDir(self.directory / "run")
        write_json(self.run.plan, self.plan)
        scripts = self.scripts if callable(self.scripts) else list(self.scripts)
        self.ranks = FakeRanks(self.run, self.clock, scripts, **self.broken)  # type: ignore[arg-type]
        self.session = Session(
            starter=Starter(self.plan, spec, self.run, self.directory, machine),
            pools=self.ranks,
            on_event=lambda *_: None,
            reporter=Reporter(self.run, self.said.append),
            relay=Relay(self.said.append),
            clock=self.clock,
            is_part=self.is_part,
        )

    def fails(self) -> GpurunError:
        with pytest.raises(GpurunError) as caught:
            self.session.execute()
        return caught.value

    def done(self) -> "Case":
        self.session.execute()
        return self

    def status(self, variant: str) -> VariantStatus:
        status = self.run.read_status(variant)
        assert status is not None
        return status

    def statuses(self) -> list[str | None]:
        found = [self.run.read_status(variant.id) for variant in self.plan.variants]
        return [status.status if status else None for status in found]


def stage(name: Any, variant: str | None = None) -> Event:
    return Event(0, name, variant)


def exits(*codes: int) -> list[tuple[float, Exit]]:
    return [(3.0, Exit(rank, code, 0)) for rank, code in enumerate(codes)]


def record(rank: int, error: str, at: str, variant: str | None = None) -> FailureRecord:
    kind: Any = "user" if error == ParamsError.__name__ else "exception"
    return FailureRecord(0, rank, variant, at, kind, error, "no luck", "", False)


WELL: Script = [(1.0, stage("build")), (2.0, stage("round", EVEN)), (3.0, stage("done")), *exits(0, 0)]
KILLED: Script = [(2.0, stage("round", SPLIT)), *exits(0, -9)[1:]]


CTRL_C = Interrupted("Ctrl-C")
