"""What several nodes change about programs, binding, looking from outside and what a job may ask for."""

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

from gpurun.launcher.errors import MachineError, NodesError, SpecError
from gpurun.launcher.inspect.requests import RanksSeen, WhatRanksDo, answer, take_question, take_snapshots
from gpurun.launcher.inspect.snapshot import RankSnapshot
from gpurun.launcher.jobfile.load import load_text
from gpurun.launcher.machine.host import Topology, inspect_machine
from gpurun.launcher.nodes.join import await_welcome, gather, waiting_text
from gpurun.launcher.nodes.messages import Hello
from gpurun.launcher.nodes.rendezvous import Facts, NodeFlags
from gpurun.launcher.plan.build import build_plan
from gpurun.launcher.plan.model import Node, NodeGpu, Plan
from gpurun.launcher.run.job import Prepared
from gpurun.launcher.run.open import as_read_back
from gpurun.launcher.run.running_attempt import Starter
from gpurun.launcher.rundir.files import RunDir, read_json, write_json
from gpurun.launcher.start_on_nodes import token_in, with_nodes
from tests.wording import Wording

FOUR = Topology({0: (0, 1, 2, 3)}, ((0,), (1,), (2,), (3,)))
EIGHT = Topology({0: tuple(range(8))}, tuple((cpu,) for cpu in range(8)))
NODES = (
    Node("a", "10.0.0.1", "eth0", 4, (NodeGpu("G-a0", "H200"), NodeGpu("G-a1", "H200")), FOUR),
    Node("b", "10.0.0.2", "ib0", 8, (NodeGpu("G-b0", "H200"),), EIGHT),
)


def plan_of(text: str, directory: Path) -> Any:
    (directory / "train.py").write_text("")
    return build_plan(load_text(f"nodes: 2\n{text}", "job.yaml", (), directory), NODES[0], NODES)


def test_programs_get_the_environment_of_torchrun_on_every_node(tmp_path: Path) -> None:
    plan = plan_of("script: train.py\ndevices: cuda\nenv: {NCCL_SOCKET_IFNAME: ib9}\n", tmp_path)
    envs = [process.env for process in plan.launches[0].processes]
    keys = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME")
    assert [tuple(env[key] for key in keys) for env in envs] == [
        ("0", "0", "2", "0", "2", "eth0"),
        ("1", "1", "2", "0", "2", "eth0"),
        ("2", "0", "1", "1", "8", "ib0"),
    ]
    assert [env["CUDA_VISIBLE_DEVICES"] for env in envs] == ["G-a0,G-a1", "G-a0,G-a1", "G-b0"]
    assert {env["NCCL_SOCKET_IFNAME"] for env in envs} == {"ib9"}
    assert {(env["MASTER_ADDR"], env["GROUP_WORLD_SIZE"], env["WORLD_SIZE"]) for env in envs} == {
        ("10.0.0.1", "2", "3")
    }


def test_a_lost_node_is_replaced_by_one_that_is_like_it(tmp_path: Path) -> None:
    text = "nodes: 2\nscript: train.py\ndevices: cuda\n"
    plan = plan_of(text.removeprefix("nodes: 2\n"), tmp_path)
    spec, machine = load_text(text, "job.yaml", (), tmp_path), inspect_machine()
    ready = Prepared(spec, machine, plan, RunDir(tmp_path / "run"), tmp_path)
    other = replace(NODES[1], host="c", address="10.0.0.3", gpus=(NodeGpu("G-c0", "H200"),))
    replaced = with_nodes(ready, machine, (NODES[0], other))
    assert replaced.plan.launches[0].processes[2].env["CUDA_VISIBLE_DEVICES"] == "G-c0"
    assert replaced.plan.notes[-1] == "node 1 is c; it was b before it was lost"
    assert read_json(ready.run.plan, Plan) == as_read_back(replaced.plan)
    with pytest.raises(SpecError, match="devices that this run has begun with"):
        with_nodes(ready, machine, (NODES[0], replace(other, gpus=other.gpus * 2)))


def test_the_store_of_a_program_listens_where_all_nodes_reach_it(tmp_path: Path) -> None:
    plan = plan_of("script: train.py\ndevices: cuda\n", tmp_path)
    launch = plan.launches[0]
    spec = load_text("nodes: 2\nscript: train.py\n", "job.yaml", (), tmp_path)
    starter = Starter(plan, spec, RunDir(tmp_path), tmp_path, NODES[0])
    requests = starter.prepare(launch, launch.id, dict.fromkeys(launch.variants, 1))
    assert requests[0].args[1:] == ("3", "10.0.0.1")


def test_ranks_are_bound_to_cores_of_their_own_node(tmp_path: Path) -> None:
    plan = plan_of("workload: gpt\nglobal_batch: 8\ndevices: cpu:2\nbind: cores\n", tmp_path)
    cpus = [process.cpus for process in plan.launches[0].processes]
    assert cpus == [(0, 1), (2, 3), (0, 1, 2, 3), (4, 5, 6, 7)]
    assert plan.variants[0].threads == 2  # the smaller node's, for all: they do the same work


def test_who_asks_for_stacks_gets_those_of_all_nodes(tmp_path: Path) -> None:
    plan = plan_of("script: train.py\ndevices: cpu:1\n", tmp_path)
    run, sight = RunDir(tmp_path / "run"), RankSnapshot(1, 42, 7, (), ())
    write_json(run.plan, plan)
    run.control("01").mkdir(parents=True, mode=0o700)
    found: list[tuple[RankSnapshot, ...]] = []
    person = threading.Thread(target=lambda: found.append(take_snapshots(run, "01")))
    person.start()
    while (asked := take_question(run, "01")) is None:
        assert person.is_alive()
    assert asked.question == WhatRanksDo()
    answer(run, "01", asked.token, RanksSeen((sight,)))
    person.join()
    assert found == [(sight,)]
    assert not list(run.control("01").iterdir())


def test_nodes_that_do_not_come_are_named(wording: Wording) -> None:
    class Silent:
        def poll(self, timeout_s: float) -> list[object]:
            return []

    hello = Hello("1", 0, NODES[0], "10.0.0.1", {}, None, "")
    with wording.raises(MachineError):
        gather(Silent(), hello, (2, 2), 0.0, print)  # type: ignore[arg-type]


@pytest.mark.parametrize("ranks", [[1], [1, 2], [2, 1], [3, 1, 2], [2], []])
def test_a_range_takes_the_nodes_that_are_there(
    ranks: list[int], monkeypatch: pytest.MonkeyPatch, wording: Wording
) -> None:
    """Counted from 0 on, without a gap: the one that fills it may still come."""

    class Coming:
        def __init__(self) -> None:
            self.hellos = [Hello("1", rank, NODES[1], "10.0.0.1", {}, None, "") for rank in ranks]

        def poll(self, timeout_s: float) -> list[Hello]:
            came, self.hellos = self.hellos, []
            return came

    monkeypatch.setattr("gpurun.launcher.nodes.join.LAST_CALL_S", 0.0)
    hello = Hello("1", 0, NODES[0], "10.0.0.1", {}, None, "")
    monkeypatch.setattr("gpurun.launcher.nodes.join.shared_address", lambda *_: "127.0.0.1")
    if 1 not in ranks:
        with wording.raises(MachineError):
            gather(Coming(), hello, (2, 4), 0.05, print)  # type: ignore[arg-type]
        return
    found = gather(Coming(), hello, (2, 4), 60.0, print)  # type: ignore[arg-type]
    assert len(found) == 1 + len(ranks)


def test_who_waits_says_for_whom_where_and_how_long(wording: Wording) -> None:
    first, second = (waiting_text(Facts(rank, "a", 29400), (3, 3), NodeFlags()) for rank in (0, 1))
    open_one = waiting_text(Facts(0, "a", 29400), (3, 3), NodeFlags(insecure=True))
    wording(open_one.splitlines()[0])
    wording(first)
    wording(second)
    wording(waiting_text(Facts(0, "a", 29400), (2, 4), NodeFlags()))


def test_a_node_waits_for_no_longer_than_its_timeout_and_a_moment(wording: Wording) -> None:
    class Silent:
        waits: ClassVar[list[float]] = []

        def await_connected(self, timeout_s: float) -> bool:
            return True

        def take(self, kind: object, timeout_s: float) -> None:
            self.waits.append(timeout_s)

    with wording.raises(NodesError):
        await_welcome(Silent(), 60.0)  # type: ignore[arg-type]
    assert Silent.waits == [65.0]


def test_nodes_that_share_a_directory_see_a_file_in_it_for_as_long_as_they_look(tmp_path: Path) -> None:
    with token_in(tmp_path) as name:
        assert [path.name for path in tmp_path.iterdir()] == [name]
    assert not list(tmp_path.iterdir())
