"""Traces of several ranks that are generated on one clock and written with each rank's own."""

from collections import defaultdict
from pathlib import Path
from typing import Any

from gpurun.launcher.trace.analysis.analyse import analyse_paths
from gpurun.launcher.trace.model import TraceReport
from tests.unit.trace.trace_files import Event, kernel, launch, rank_info, span, write

RING = "ncclDevKernel_AllReduce_Sum_f32_RING_LL"
SENDS = "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"


class Job:
    """Kernels of several ranks on one clock, written with each rank's own."""

    def __init__(
        self, num_ranks: int, skews_us: list[float] | None = None, drifts: list[float] | None = None
    ) -> None:
        self.events: dict[int, list[Event]] = defaultdict(list)
        self.issued: dict[int, list[float]] = defaultdict(list)
        self.num_ranks = num_ranks
        self.skews_us = skews_us or [0.0] * num_ranks
        self.drifts = drifts or [0.0] * num_ranks
        self.headers: dict[int, dict[str, Any]] = defaultdict(dict)
        self.starts_us: dict[int, list[float]] = defaultdict(list)
        """Of all communication by rank, on the clock without skew."""

    def kernel(self, rank: int, name: str, start_us: float, end_us: float, calls: bool, **args: Any) -> None:
        """A kernel; its arguments are the kernel's own, or only those of the call around its launch."""
        events = self.events[rank]
        number = len(events) + 1
        issued = self.at(rank, self.free_slot(rank, start_us - 5))
        begin, end = self.at(rank, start_us), self.at(rank, end_us)
        if "nccl" in name:
            self.starts_us[rank].append(start_us)
        if calls:
            events.append(span("cpu_op", "record_param_comms", issued - 1, 4, **args))
        events.append(launch(issued, 1, number))
        own = {} if calls else args
        events.append(kernel(name, round(begin, 3), round(end - begin, 3), number, stream=20, **own))

    def at(self, rank: int, us: float) -> float:
        """What the rank's own clock shows."""
        return us + self.skews_us[rank] + us * self.drifts[rank]

    def free_slot(self, rank: int, at_us: float) -> float:
        """The last moment up to `at_us` in which the rank's thread issues nothing else."""
        while any(abs(at_us - other) < 6 for other in self.issued[rank][-8:]):
            at_us -= 6
        self.issued[rank].append(at_us)
        return at_us

    def all_reduce(
        self,
        name: str,
        ranks: list[int],
        starts_us: list[float],
        end_us: float,
        calls: bool = False,
        args: dict[str, object] | None = None,
    ) -> None:
        facts = {
            "Collective name": "allreduce",
            "In msg nelems": 1000,
            "Out msg nelems": 1000,
            "dtype": "Float",
        }
        group = {"Process Group Name": name, "Process Group Ranks": str(ranks), "Group size": len(ranks)}
        for rank, start_us in zip(ranks, starts_us, strict=True):
            self.kernel(rank, RING, start_us, end_us, calls, **facts | group | (args or {}))

    def message(
        self,
        source: int,
        target: int,
        starts_us: tuple[float, float],
        ends_us: tuple[float, float],
        name: str = "pp",
        calls: bool = False,
    ) -> None:
        facts = {"In msg nelems": 500, "Out msg nelems": 500, "dtype": "Float", "Process Group Name": name}
        ranks = {"Process Group Ranks": str(list(range(self.num_ranks))), "Group size": self.num_ranks}
        send = {"Collective name": "send", "Dst Rank": target}
        receive = {"Collective name": "recv", "Src Rank": source}
        (sent, got), (sent_end, got_end) = starts_us, ends_us
        self.kernel(source, SENDS, sent, sent_end, calls, **facts | ranks | send)
        self.kernel(target, SENDS, got, got_end, calls, **facts | ranks | receive)

    def report(self, directory: Path, **info: Any) -> TraceReport:
        for rank in range(self.num_ranks):
            header = {"distributedInfo": rank_info(rank, self.num_ranks)["distributedInfo"] | info}
            write(directory / f"rank{rank}.json", self.events[rank], **header, **self.headers[rank])
        return analyse_paths([directory])
