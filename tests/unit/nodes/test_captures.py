"""`gpurun capture` of a job on several nodes, whose links and ranks only pretend; control blocks are real."""

import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from gpurun.launcher.errors import SpecError
from gpurun.launcher.inspect.requests import (
    Answer,
    Declined,
    TracesRequested,
    WantTraces,
    ask,
    traces_requested,
)
from gpurun.launcher.nodes.cluster_pool import ClusterPool
from gpurun.launcher.nodes.follower import Follower, Places
from gpurun.launcher.nodes.messages import Chunk, Message, TracesWanted, decode, encode
from gpurun.launcher.processes.protocol import WORKER_ENTRY, Exit, StartRequest
from gpurun.launcher.rundir.control import NOT_STARTED, ControlDir, make_directory
from gpurun.launcher.rundir.files import RunDir, read_json
from gpurun.launcher.rundir.records import CaptureRequest

LAUNCH = "01-ddp-3"


@dataclass
class Link:
    """One node's end; what it sends is decoded again, as on a network."""

    rank: int
    mails: list[deque[Message]]
    passed: list[tuple[int, Message]]
    own_host: str = "hostb"

    def send(self, rank: int, message: Message) -> None:
        received = decode(encode(message))
        self.passed.append((rank, received))  # type: ignore[arg-type]
        self.mails[rank].append(received)  # type: ignore[arg-type]

    def poll(self, timeout_s: float) -> list[Message]:
        mails = self.mails[self.rank]
        return [mails.popleft() for _ in range(len(mails))]  # another thread may add to them

    def suspect(self, suspicious: bool) -> None:
        """No link here is ever lost."""


class Quiet:
    """Ranks that say nothing, and their servers."""

    def get(self, env: Mapping[str, str], python: str = "") -> Any:
        return self

    def start(self, processes: Sequence[StartRequest]) -> None:
        """They are control blocks only."""

    def poll(self, timeout_s: float) -> list[Exit]:
        return []


@dataclass
class Cluster:
    """Three nodes, each with a rank and a directory of its own."""

    root: Path
    mails: list[deque[Message]] = field(default_factory=lambda: [deque() for _ in range(3)])
    passed: list[tuple[int, Message]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.runs = [RunDir(self.root / f"run{node}") for node in range(3)]
        link = [Link(node, self.mails, self.passed) for node in range(3)]
        self.pool = ClusterPool(Quiet(), link[0], self.runs[0], 3, print)  # type: ignore[arg-type]
        config = self.runs[0].launch_config(LAUNCH)
        config.parent.mkdir(parents=True)
        config.write_text("{}")
        self.pool.start([start_request(rank, config) for rank in (3, 0, 1, 2)])
        self.followers = [
            Follower(
                link[node],  # type: ignore[arg-type]
                Quiet(),
                Places(self.runs[node].path, self.runs[node].path, self.root, str(self.runs[0].path), "/job"),
                print,
            )
            for node in (1, 2)
        ]

    def begin(self, node: int, steps: int = 0) -> None:
        """The node's rank starts, and completes steps."""
        make_directory(self.runs[node].control(LAUNCH))
        with ControlDir(self.runs[node].control(LAUNCH)) as control:
            block = control.block(node, create=True)
            for _ in range(steps):
                block.count_step()
            block.close()

    def bell(self, node: int) -> int:
        with ControlDir(self.runs[node].control(LAUNCH)) as control:
            block = control.block(node)
            number = block.bell
            block.close()
        return number

    def written(self, node: int) -> CaptureRequest:
        return read_json(self.runs[node].control(LAUNCH) / "capture1.json", CaptureRequest)

    def asked(self, wanted: WantTraces) -> Answer:
        """What another terminal on node 0 gets to hear."""
        answers: list[Answer] = []

        def terminal() -> None:
            with ControlDir(self.runs[0].control(LAUNCH)) as control:
                answers.append(ask(control, wanted))

        person = threading.Thread(target=terminal)
        follow = threading.Thread(target=self.follow, args=(person,))
        person.start()
        follow.start()
        while person.is_alive():
            self.pool.poll(0.01)
        follow.join()
        return answers[0]

    def follow(self, person: threading.Thread) -> None:
        """The other nodes work while somebody waits for an answer, and then take what is left."""
        is_last = False
        while not is_last:
            is_last = not person.is_alive()
            for follower in self.followers:
                for message in follower.link.poll(0.0):
                    follower.handle(message)


def start_request(rank: int, config: Path) -> StartRequest:
    """A rank on the node of its number, or number 3, which is a program's store on node 0."""
    return StartRequest(
        entry=WORKER_ENTRY,
        args=(str(config),),
        rank=rank,
        env={"GROUP_RANK": str(rank % 3)},
        log=str(config.parent / "log" / f"rank{rank}.log"),
        cwd="/job",
        control=str(config.parent / "control") if rank < 3 else "",
    )


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return Cluster(tmp_path)


def test_all_nodes_have_the_request_before_any_rank_knows_of_it(cluster: Cluster) -> None:
    """The ranks of a workload agree on the newest that any of them knows, and read it."""
    for node in range(3):
        cluster.begin(node, steps=7)
    assert cluster.asked(WantTraces(2, None)) == TracesRequested(1, (0, 1, 2))
    orders = [(node, mail.rings) for node, mail in cluster.passed if isinstance(mail, TracesWanted)]
    assert orders == [(1, False), (2, False), (1, True), (2, True)]
    assert [cluster.bell(node) for node in range(3)] == [1, 1, 1]
    assert {cluster.written(node) for node in range(3)} == {CaptureRequest(1, 2, None, 9)}


def test_a_rank_that_is_nowhere_or_has_not_started_rings_no_bell(cluster: Cluster) -> None:
    cluster.begin(0)
    cluster.begin(1)
    refused = cluster.asked(WantTraces(2, (3,)))
    assert refused == Declined("01-ddp-3 has no rank 3; it has ranks 0, 1, 2")
    with pytest.raises(SpecError, match="has no rank 3"):
        traces_requested(refused)
    make_directory(cluster.runs[2].control(LAUNCH))
    assert cluster.asked(WantTraces(2, None)) == Declined(f"node 2 (hostb): {NOT_STARTED}")
    assert [cluster.bell(node) for node in (0, 1)] == [0, 0]


def test_traces_are_sent_once_they_are_whole_and_nothing_of_the_control_directory(cluster: Cluster) -> None:
    for node in range(3):
        cluster.begin(node)
    cluster.asked(WantTraces(2, (1,)))
    cluster.passed.clear()
    first, other = cluster.followers
    first.send_traces()
    assert not cluster.passed
    path = cluster.runs[1].captured_trace(LAUNCH, 1, 1)
    path.parent.mkdir(parents=True)
    path.write_bytes(b"trace")
    first.await_ack = lambda: None  # type: ignore[method-assign]
    for _ in range(2):
        first.send_traces()
        other.send_traces()
    (sent,) = [mail for _, mail in cluster.passed if isinstance(mail, Chunk)]
    assert (sent.path, sent.content) == (f"launches/{LAUNCH}/captures/1/rank1.pt.trace.json.gz", b"trace")
    cluster.pool.poll(0.0)
    assert cluster.runs[0].captured_trace(LAUNCH, 1, 1).read_bytes() == b"trace"
