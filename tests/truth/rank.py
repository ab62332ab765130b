"""The body of a rank: our trainer and our profiler, with a fault in the model, the dataset or the link.

What a device computes is an operator that sleeps: it takes the time that it should, however many ranks share
the cores of the machine, and the profiler records it as what it replaces. A straggler's extra work is real.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket, PrefixStore
from torch.nn import functional as F

from gpurun import Workload
from gpurun.launcher.plan.rank_config import LaunchConfig
from gpurun.launcher.rundir.files import RunDir, write_json
from gpurun.launcher.rundir.records import ProfileConfig, VariantConfig
from gpurun.launcher.worker.base.process_group import init_group, join_store, open_store
from gpurun.launcher.worker.profiling import capture
from gpurun.launcher.worker.training.forward_backward import NoClock
from gpurun.launcher.worker.training.trainer import Trainer
from tests.launches import launch_config
from tests.truth.plan import Case, Lengths, Series, Session, capture_id, delays_file, lengths_file

WIDTH = 64
BACKWARD = 2 / 3
"""Share of the backward pass in the work of a step."""
TIMEOUT = timedelta(seconds=60)

LIBRARY = torch.library.Library("truth", "DEF")
LIBRARY.define("work(Tensor x, float ms) -> Tensor")
LIBRARY.define("copy(Tensor x, float ms) -> Tensor")


@dataclass
class Watch:
    """How long things really took in the step that is running."""

    spent_ms: dict[str, float] = field(default_factory=lambda: {"work": 0.0, "fault": 0.0})

    @contextmanager
    def timing(self, what: Literal["work", "fault"]) -> Iterator[None]:
        start_ns = time.monotonic_ns()
        yield
        self.spent_ms[what] += (time.monotonic_ns() - start_ns) / 1e6

    def take(self) -> Lengths:
        """What was spent since the last time."""
        taken = Lengths(self.spent_ms["work"], self.spent_ms["fault"])
        self.spent_ms = {"work": 0.0, "fault": 0.0}
        return taken


watch = Watch()


def sleeping(x: Tensor, ms: float) -> Tensor:
    time.sleep(ms / 1000)
    return x.clone()


def work(x: Tensor, ms: float) -> Tensor:
    with watch.timing("work"):
        return sleeping(x, ms)


LIBRARY.impl("work", work, "CPU")
LIBRARY.impl("copy", sleeping, "CPU")


class Work(torch.autograd.Function):
    """Takes its time in both passes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ms: float) -> Tensor:
        ctx.ms = ms
        result: Tensor = torch.ops.truth.work(x, ms * (1 - BACKWARD))
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return torch.ops.truth.work(grad, ctx.ms * BACKWARD), None


@dataclass
class Now:
    """The case that is running on this rank; model, dataset and link look here."""

    rank: int
    series: Series
    case: Case
    factor: Tensor = field(default_factory=lambda: torch.rand(160, 160))

    @property
    def work_ms(self) -> float:
        return self.series.fixed_ms + self.series.sample_ms * self.case.split[self.rank]


class Model(nn.Module):
    """One layer, work of a known length, and what the case adds to that."""

    def __init__(self, now: Now) -> None:
        super().__init__()
        self.layer, self.now = nn.Linear(WIDTH, WIDTH), now

    def forward(self, x: Tensor) -> Tensor:
        now = self.now
        host_ms = now.case.ms_on(now.rank, "host")
        with watch.timing("fault"):
            time.sleep(host_ms / 2000)
            self.copy(x)
        hidden: Tensor = Work.apply(self.layer(x), now.work_ms)
        with watch.timing("fault"):
            time.sleep(host_ms / 2000)
            self.multiply()
        return hidden

    @torch.no_grad()
    def copy(self, x: Tensor) -> None:
        copy_ms = self.now.case.ms_on(self.now.rank, "copies")
        if copy_ms:
            torch.ops.truth.copy(x, copy_ms)

    @torch.no_grad()
    def multiply(self) -> None:
        """Matrix products for as long as the straggler's extra work lasts."""
        end = time.monotonic() + self.now.case.ms_on(self.now.rank, "straggler") / 1000
        while time.monotonic() < end:
            torch.mm(self.now.factor, self.now.factor)


class Data:
    """Samples that take their time to read."""

    def __init__(self, now: Now) -> None:
        self.now = now
        self.sample = (torch.rand(WIDTH), torch.rand(WIDTH))

    def __len__(self) -> int:
        return 256

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.sample

    def __getitems__(self, indices: list[int]) -> list[tuple[Tensor, Tensor]]:
        """A batch at once: many short sleeps would add up to a longer one."""
        with watch.timing("fault"):
            time.sleep(self.now.case.ms_on(self.now.rank, "input") / 1000)
        return [self.sample] * len(indices)


class Link:
    """A ring with one member more, which joins a collective a given time after the last rank.

    For the ranks that is a link that takes longer: inside gloo's collective, all of them, by as much. How
    long that is for the last rank, with what gloo itself takes, the link measures by the clock of all.
    """

    def __init__(self, session: Session, rank: int) -> None:
        """The last member, of rank `session.world_size`, is the link itself."""
        self.session, self.rank, self.count = session, rank, 0
        port_file, size = Path(session.run_dir) / "link.port", session.world_size + 1
        self.store = (open_store if rank == session.world_size else join_store)(port_file, size)
        self.group: Any = dist.ProcessGroupGloo(PrefixStore("gloo", self.store), rank, size, TIMEOUT)

    def all_reduce(self, tensor: Tensor) -> dist.Work:
        self.count += 1
        self.store.set(f"{self.count}/{self.rank}", str(time.monotonic_ns()))
        work: dist.Work = self.group.allreduce([tensor])
        return work

    def delay(self, ms: float) -> float:
        """The link's part in one collective of the ranks: how long the last of them was in it, in ms."""
        self.count += 1
        arrived_ns = max(map(int, self.of_ranks(str(self.count))))
        time.sleep(ms / 1000)
        self.group.allreduce([torch.zeros(WIDTH * WIDTH + WIDTH)]).wait()
        return (time.monotonic_ns() - arrived_ns) / 1e6

    def of_ranks(self, key: str) -> list[bytes]:
        """What each rank has set `key` to; waits until all have."""
        return [self.store.get(f"{key}/{rank}") for rank in range(self.session.world_size)]


def run_link(session: Session) -> None:
    """The process that is the link."""
    torch.set_num_threads(1)
    link = Link(session, session.world_size)
    for _, case, number in session.captures:
        if case.fault == "transfer":
            delays_ms = [link.delay(case.ms) for _ in range(session.num_steps + 1)]
            path = delays_file(session.run_dir, capture_id(case, number))
            write_json(path, delays_ms[1:])  # the first step isn't in the trace
    link.of_ranks("done")


def run_rank(session: Session, rank: int) -> None:
    """Traces all cases, one after the other, with one model."""
    torch.set_num_threads(1)
    series, case, _ = next(session.captures)
    now = Now(rank, series, case)
    config = config_of(session)
    init_group(config, rank)
    link = Link(session, rank)
    workload = Workload(Model(now), None, F.mse_loss, dataset=Data(now))
    trainer = Trainer(workload, config, rank)
    trainer.strategy.model.register_comm_hook(None, hook(link, now))  # type: ignore[attr-defined]
    for now.series, now.case, number in session.captures:
        trace(trainer, now, session, number)
    dist.barrier()
    link.store.set(f"done/{rank}", "")


def hook(link: Link, now: Now) -> Any:
    def reduce(state: None, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        tensor = bucket.buffer().div_(dist.get_world_size())
        if now.case.fault == "transfer":
            work = link.all_reduce(tensor)
        else:
            work = dist.all_reduce(tensor, async_op=True)
        return work.get_future().then(lambda future: future.value()[0])

    return reduce


def trace(trainer: Trainer, now: Now, session: Session, number: int) -> None:
    variant_id = capture_id(now.case, number)
    variant = VariantConfig(variant_id, now.case.split, 1)
    inputs = iter([trainer.prepare(variant, step) for step in range(session.num_steps + 1)])
    lengths = []

    def run_one_step() -> None:
        watch.take()
        trainer.step(next(inputs), NoClock())
        lengths.append(watch.take())

    path = RunDir(Path(session.run_dir)).trace(variant_id, now.rank)
    capture(run_one_step, ProfileConfig(session.num_steps, shapes=True), path, align=dist.barrier)
    write_json(lengths_file(session.run_dir, variant_id, now.rank), lengths[1:])


def config_of(session: Session) -> LaunchConfig:
    variants = (
        VariantConfig(capture_id(case, number), case.split, 1) for _, case, number in session.captures
    )
    return launch_config(
        *variants,
        launch="truth",
        run_dir=session.run_dir,
        workload="truth",
        job_dir=session.run_dir,
        strategy="ddp",
        devices=("cpu",) * session.world_size,
        backend="gloo",
        seed=session.seed,
        warmup=0,
        rounds=0,
    )
