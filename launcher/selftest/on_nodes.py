"""A self-test of several nodes: each tests itself, then they measure the links between them together."""

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from gpurun.launcher.errors import MachineError
from gpurun.launcher.machine.host import inspect_machine
from gpurun.launcher.nodes.join import Joined, joined
from gpurun.launcher.nodes.messages import End, Tested, Welcome
from gpurun.launcher.nodes.rendezvous import NodeFlags
from gpurun.launcher.processes.pool import WorkerPools, say_on_stderr
from gpurun.launcher.run.job import Finished, Job, prepare
from gpurun.launcher.run.open import new_directory
from gpurun.launcher.rundir.files import read_json
from gpurun.launcher.rundir.records import DeviceFacts
from gpurun.launcher.selftest.check_table import blocking, findings, without_links
from gpurun.launcher.selftest.evidence import LINKS, PARTS, TITLES, CheckResult, Evidence
from gpurun.launcher.selftest.run_checks import joining_job, links_job
from gpurun.launcher.selftest.self_test import (
    RUNS,
    Result,
    SelfTest,
    carry_out_quietly,
    outcome_of,
    parsed,
    run_selftest,
    small_job,
)
from gpurun.launcher.start_on_nodes import OtherNode, followed

_WAIT_S = 1.0


def selftest_on_nodes(
    pools: WorkerPools,
    wish: str,
    num_nodes: int,
    out: Path | None,
    flags: NodeFlags,
    show: Callable[[CheckResult], None],
    begin: Callable[[str, int, int], None],
) -> tuple[Result, Path, str | None] | None:
    """Returns the result of `run_selftest` for all nodes; `None` on all but the first, which has the results.

    Raises:
        SpecError: as `run_selftest`; or the nodes were started differently.
        MachineError: as `run_selftest`; or node 0 can't be reached, or nodes are missing.
        NodesError: a node is lost; on others than the first, also where a check failed on any of them.
        Interrupted: as `run_selftest`, on any node.
    """
    job = small_job(joining_job(parsed(wish), num_nodes), Path.cwd(), LINKS)
    with joined(job.spec, job.job_dir, flags, inspect_machine(), say_on_stderr) as here:
        if here.rank != 0:
            follow(pools, job, here, wish, out)
            return None

        def begin_if_alive(title: str, number: int, count: int) -> None:
            end_with_the_others(here)
            begin(title, number, count)

        further = partial(add_the_others, pools=pools, here=here)
        ended = run_selftest(pools, wish, out, show, begin_if_alive, here.rank, further)
        failures = "; ".join(filter(None, (ended[0].failures, ended[2])))
        text = f"{failures}\n    the report is on node 0 ({here.hosts[0]})" if failures else ""
        here.link.announce(End(MachineError.exit_code if failures else 0, text))
        return ended


def end_with_the_others(here: Joined) -> None:
    """Raises:
    NodesError: a node is lost, or has ended the self-test.
    """
    here.link.take(Welcome, 0.0)  # none comes any more


def follow(pools: WorkerPools, job: Job, here: Joined, wish: str, out: Path | None) -> None:
    """Tests this node, which is not the first, sends what was found, and follows node 0 until it ends.

    Raises:
        GpurunError: as `selftest_on_nodes`.
    """
    own = out or new_directory(RUNS)
    run_selftest(
        pools,
        wish,
        own.with_name(f"{own.name}-node{here.rank}"),  # node 0 may share the directory
        lambda found: None,
        lambda *_: end_with_the_others(here),
        here.rank,
        lambda test: here.link.send(0, tested(test)),
    )
    with contextlib.ExitStack() as kept:
        OtherNode(pools, job, run_s=math.inf).follow(here, kept)


def tested(test: SelfTest) -> Tested:
    """What the self-test of this node has found, as a message."""
    checks = tuple((each.name, each.status, each.found, each.remedy, each.figures) for each in test.found)
    return Tested(test.node or 0, checks, test.seen.devices, tuple(blocking(test.seen)))


def add_the_others(test: SelfTest, pools: WorkerPools, here: Joined) -> None:
    """Adds what the other nodes have found, and what all of them measure together.

    Raises:
        GpurunError: as `selftest_on_nodes`.
    """
    test.begin(TITLES[LINKS], len(PARTS), len(PARTS))
    nodes = all_tested(test, here)
    for each in nodes[1:]:
        for check in each.checks:
            test.add(replace(CheckResult(*check), node=each.node, host=here.hosts[each.node]))
    failures = [
        f"{name} on node {each.node} ({here.hosts[each.node]})" for each in nodes for name in each.blocked
    ]
    of_links = without_links(failures) if failures else findings(together(test, nodes, pools, here), (LINKS,))
    for found in of_links:
        test.add(found)


def all_tested(test: SelfTest, here: Joined) -> list[Tested]:
    """The findings of each node, by node.

    Raises:
        NodesError: a node is lost, or has ended the self-test.
    """
    known = {0: tested(test)}
    while len(known) < len(here.hosts):
        if (result := here.link.take(Tested, _WAIT_S)) is not None:
            known[result.node] = result
    return [known[rank] for rank in range(len(known))]


def together(test: SelfTest, nodes: Sequence[Tested], pools: WorkerPools, here: Joined) -> Evidence:
    """Lets the devices of all nodes measure together.

    Raises:
        GpurunError: as `selftest_on_nodes`.
    """
    facts = (test.directory / "facts" / LINKS).resolve()

    def run() -> Finished:
        job = small_job(links_job([each.devices for each in nodes], facts), test.directory, LINKS)
        ready = prepare(job, test.seen.machine, pools.get({}), here.nodes)
        with followed(ready, pools, here) as ranks:
            return carry_out_quietly(ready, ranks)

    ran = outcome_of(run)
    places = [(name, each.node) for each in nodes for name in each.devices]
    files = [facts / f"rank{rank}.json" for rank in range(len(places))] if ran.problem is None else []
    return replace(
        test.seen,
        devices=tuple(f"{name}@{node} ({here.hosts[node]})" for name, node in places),
        health=(),
        facts=tuple(read_json(file, DeviceFacts) for file in files),
        nodes=tuple(node for _, node in places),
        hosts=here.hosts,
        network_gb_per_s=tuple(node.network_gb_per_s for node in here.nodes),
        jobs={LINKS: ran},
    )
