"""What the commands of many nodes cost: they join, run, lose a rank and end. One machine, without torch."""

import multiprocessing
import resource
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.timing import machine_facts, record, table
from gpurun.launcher.errors import NodesEnded
from gpurun.launcher.inspect.snapshot import RankSnapshot
from gpurun.launcher.nodes.cluster_pool import ClusterPool
from gpurun.launcher.nodes.follower import Follower, find_run
from gpurun.launcher.nodes.join import meet
from gpurun.launcher.nodes.messages import End, Hello, Run
from gpurun.launcher.nodes.node_link import LinkLoop, NodeLink
from gpurun.launcher.nodes.transport.credentials import identity_from
from gpurun.launcher.nodes.transport.exchange import LinkOptions
from gpurun.launcher.plan.model import Node
from gpurun.launcher.processes.protocol import Exit, StartRequest
from gpurun.launcher.rundir.files import RunDir, write_json
from tests.integration.command import free_port

COUNTS = (4, 32, 256)
PROCESSES = 8
"""That the other nodes are spread over: each has its own connection and its own thread."""
RUN_S = 20.0
JOIN_S = 300.0
SECRET = b"of all simulated nodes"


@dataclass
class SimulatedRanks:
    """`RankPool` and `Pools` at once: one rank, which does nothing until it fails or is stopped."""

    fails_after_s: float | None = None
    requests: Sequence[StartRequest] = ()
    started_s: float = 0.0
    exits: list[Exit] = field(default_factory=list)

    def get(self, env: Mapping[str, str], python: str = "") -> "SimulatedRanks":
        return self

    def start(self, processes: Sequence[StartRequest]) -> None:
        self.requests, self.started_s = processes, time.monotonic()

    def preload(self, modules: Sequence[str], if_harmless: bool = False) -> None: ...

    def forward(self, number: int) -> None: ...

    def steps_elsewhere(self) -> tuple[int, ...]:
        return ()

    def observe(self, directory: Path) -> tuple[RankSnapshot, ...]:
        return ()

    def poll(self, timeout_s: float) -> list[Exit]:
        if timeout_s > 0:
            time.sleep(timeout_s)
        if self.fails_after_s and self.requests and time.monotonic() > self.started_s + self.fails_after_s:
            self._end(1)
        exits, self.exits = self.exits, []
        return exits

    def has_settled(
        self, say: Callable[[str], None], waits: bool = True, keep: Callable[[str], None] = lambda _: None
    ) -> bool:
        return True

    def stop(self, grace_s: float, signals: tuple[int, ...] = ()) -> None:
        self._end(-15)

    def _end(self, code: int) -> None:
        self.exits += [Exit(request.rank, code, time.time_ns()) for request in self.requests]
        self.requests = ()


def main() -> None:
    """Writes the section "Many nodes"."""
    facts = machine_facts()
    rows = [simulate(count) for count in COUNTS]
    header = (
        *("nodes", "joined, s", "node 0's CPU while it runs, %", "node 0's memory, MB"),
        *("cause known, s", "all stopped, s", "all ended, s"),
    )
    text = (
        "Node 0 is a process of its own, the other nodes are threads of eight processes, each with its own "
        "encrypted connection, on the same cores. After 20 s one of them reports a failed rank, then all are "
        "stopped, and then the run ends. Each figure counts from the event before it.\n\n"
    )
    record("Many nodes", text + table(header, rows), facts)


def simulate(num_nodes: int) -> tuple[str, ...]:
    """One run; a row of the table."""
    port = free_port()
    with tempfile.TemporaryDirectory() as name, other_nodes(num_nodes, port):
        run = RunDir(Path(name))
        began_s = time.monotonic()
        link = NodeLink(options(0, num_nodes, port))
        here = meet(link, hello(0, num_nodes), (num_nodes, num_nodes), JOIN_S, print)
        joined_s = time.monotonic()
        for rank in range(1, num_nodes):
            link.send(rank, Run(name, name, "none", ()))
        pool = ClusterPool(SimulatedRanks(), here.link, run, num_nodes, print)
        write_json(run.launch_config("01"), {})
        pool.start([request(run, rank) for rank in range(num_nodes)])
        cpu_s, running_s = time.process_time(), time.monotonic()
        while not (exits := pool.poll(0.2)):
            pass
        load, failed_s = time.process_time() - cpu_s, time.monotonic()
        assert [exit_.returncode for exit_ in exits] == [1]
        pool.stop(1.0)
        stopped_s = time.monotonic()
        assert len(pool.poll(0.0)) == num_nodes - 1
        link.announce(End(0, ""))
        link.close()
        ended_s = time.monotonic()
    megabytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return (
        str(num_nodes),
        f"{joined_s - began_s:.1f}",
        f"{100 * load / (failed_s - running_s):.1f}",
        f"{megabytes:.0f}",
        f"{failed_s - running_s - RUN_S:.2f}",
        f"{stopped_s - failed_s:.2f}",
        f"{ended_s - stopped_s:.2f}",
    )


def options(rank: int, num_nodes: int, port: int) -> LinkOptions:
    identity = identity_from(SECRET)
    return LinkOptions(
        rank, num_nodes, "localhost", "127.0.0.1", port, "127.0.0.1", f"h{rank}", JOIN_S, 10.0, identity
    )


def hello(rank: int, num_nodes: int) -> Hello:
    node = Node(f"h{rank}", "127.0.0.1", "lo", 1, ())
    return Hello("simulated", rank, node, "127.0.0.1", {"nodes": num_nodes}, None, "")


def request(run: RunDir, rank: int) -> StartRequest:
    env = {"GROUP_RANK": str(rank), "RANK": str(rank)}
    return StartRequest(rank, (str(run.launch_config("01")), str(rank)), env, str(run.log("01", rank)), "/")


@contextmanager
def other_nodes(num_nodes: int, port: int) -> Iterator[None]:
    """All nodes but the first, in processes that end with the run."""
    context = multiprocessing.get_context("spawn")
    ranks = [range(first, num_nodes, PROCESSES) for first in range(1, min(PROCESSES, num_nodes - 1) + 1)]
    processes = [context.Process(target=nodes_of_a_process, args=(own, num_nodes, port)) for own in ranks]
    for process in processes:
        process.start()
    try:
        yield
    finally:
        for process in processes:
            process.join(30.0)
            process.terminate()
    assert [process.exitcode for process in processes] == [0] * len(processes)


def nodes_of_a_process(ranks: Sequence[int], num_nodes: int, port: int) -> None:
    """Returns when all of its nodes have heard of the end."""
    loop = LinkLoop()
    base = options(0, num_nodes, port)
    threads = [threading.Thread(target=one_node, args=(rank, num_nodes, base, loop)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    loop.close()


def one_node(rank: int, num_nodes: int, base: LinkOptions, loop: LinkLoop) -> None:
    """Follows node 0 until the run is over."""
    link = NodeLink(LinkOptions(**{**vars(base), "rank": rank, "own_host": f"h{rank}"}), loop)
    ranks = SimulatedRanks(RUN_S if rank == num_nodes // 2 else None)
    with tempfile.TemporaryDirectory() as name:
        meet(link, hello(rank, num_nodes), (num_nodes, num_nodes), JOIN_S, print)
        run = link.take(Run, JOIN_S)
        assert run is not None
        try:
            Follower(link, ranks, find_run(run, Path(name), Path(name)), print).run()
        except NodesEnded as end:
            if end.exit_code != 0:
                raise
        finally:
            link.close()
