"""What the nodes of a job agree on, plan and send each other: without a network."""

import json
import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import Mock

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpurun.launcher.errors import MachineError, NodesError, SpecError
from gpurun.launcher.failures.root_cause import root_cause
from gpurun.launcher.inspect.requests import RanksSeen, WhatRanksDo, answer, take_question, take_snapshots
from gpurun.launcher.inspect.snapshot import RankSnapshot
from gpurun.launcher.jobfile.load import load_text
from gpurun.launcher.jobfile.model import JobSpec
from gpurun.launcher.machine.host import Topology, inspect_machine
from gpurun.launcher.machine.network import find_address, resolve
from gpurun.launcher.nodes.cluster_pool import Timeline
from gpurun.launcher.nodes.follower import Follower, Places
from gpurun.launcher.nodes.join import (
    await_welcome,
    disagreement,
    find_place,
    gather,
    missing_nodes,
    program_sha256,
    source_sha256,
    waiting_text,
)
from gpurun.launcher.nodes.messages import Hello, decode, encode
from gpurun.launcher.nodes.rendezvous import Facts, NodeFlags, bounds_here, find_facts, parse_endpoint
from gpurun.launcher.plan.build import build_plan
from gpurun.launcher.plan.model import Node, NodeGpu, Plan
from gpurun.launcher.processes.protocol import Exit, StartRequest
from gpurun.launcher.run.job import Prepared
from gpurun.launcher.run.open import as_read_back
from gpurun.launcher.run.running_attempt import Starter
from gpurun.launcher.rundir.files import RunDir, read_json, write_json
from gpurun.launcher.rundir.records import FailureRecord
from gpurun.launcher.schedulers.slurm import expand_hosts, slurm_port
from gpurun.launcher.start_on_nodes import token_in, with_nodes
from tests.wording import Wording

JOB = {"nodes": 2, "global_batch": 8, "workload": "train.py:build"}
FIRST = Hello("1", 0, Node("a", "10.0.0.1", "eth0", 4, ()), "10.0.0.1", JOB, "abc", "f00")
OTHER = Hello("1", 1, Node("b", "10.0.0.2", "eth0", 4, ()), "10.0.0.1", JOB, "abc", "f00")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, None),
        (
            {"job": {**JOB, "nodes": 3}},
            "different world sizes: `nodes` is 2 on node 0 (a) and 3 on node 1 (b)",
        ),
        ({"job": {**JOB, "global_batch": 16}}, "different jobs: `global_batch` is 8 on node 0 (a) and 16"),
        ({"job": {**JOB, "seed": 1}}, "`seed` is not set on node 0 (a) and 1 on node 1 (b)"),
        ({"job": {**JOB, "devices": "cpu:2"}}, "such as [cpu:0@0, cpu:0@1, cpu:1@1]"),
        ({"program_sha256": "def"}, "train.py differs between node 0 (a) and node 1 (b)"),
        (
            {"source_sha256": "bad"},
            "the files of gpurun 1 differ between node 0 (a) and node 1 (b)",
        ),
        ({"version": "2"}, "different versions of gpurun: gpurun is 1 on node 0 (a) and 2 on node 1 (b)"),
        ({"rank": 0}, "a (10.0.0.1) and b (10.0.0.2) both claim to be node 0"),
        ({"rank": 0, "job": {**JOB, "nodes": 3}}, "`nodes` is 2 on node 0 (a) and 3 on node 0 (b)"),
    ],
)
def test_what_nodes_disagree_on(changes: dict[str, Any], words: str | None) -> None:
    problem = disagreement(FIRST, msgspec.structs.replace(OTHER, **changes), {0: FIRST})
    assert (problem is None) if words is None else words in (problem or "")


def test_who_is_missing_is_named(wording: Wording) -> None:
    wording(missing_nodes(4, {0: FIRST, 2: OTHER}, 60.0))


@pytest.mark.parametrize("job", [{"workload": "train.py:build"}, {"script": "train.py"}])
def test_a_program_is_known_by_its_content(tmp_path: Path, job: dict[str, Any]) -> None:
    (tmp_path / "train.py").write_text("1")
    before = program_sha256(job, tmp_path)
    (tmp_path / "train.py").write_text("2")
    assert before
    assert program_sha256(job, tmp_path) not in (None, before)
    assert program_sha256({"workload": "gpt", "script": None}, tmp_path) is None


def test_messages_survive_the_way() -> None:
    assert decode(encode(OTHER)) == OTHER
    with pytest.raises(msgspec.MsgspecError):
        decode(b"\x00junk")


MINUTES_NS = 60 * 10**9


def exited(rank: int, time_ns: int, code: int = 1) -> Exit:
    return Exit(rank, code, time_ns)


def record(rank: int, time_ns: int, secondary: bool = False) -> FailureRecord:
    return FailureRecord(time_ns, rank, None, "round", "exception", "ValueError", "no", "", secondary)


@given(skew_ns=st.integers(-90 * MINUTES_NS, 90 * MINUTES_NS), first=st.integers(0, 1))
def test_the_first_message_decides_who_failed_first_whatever_the_clocks_say(skew_ns: int, first: int) -> None:
    now_ns = 10**18
    clocks = {0: now_ns, 1: now_ns + skew_ns}
    timeline = Timeline()
    exits = []
    records = []
    for node in (first, 1 - first):
        exits += timeline.place([exited(node, clocks[node])], now_ns)
        records.append(record(node, clocks[node] - 1000 + timeline.shifts_ns[node]))
    assert root_cause(exits, records, now_ns + 10**6).rank == first


def test_times_of_one_host_keep_their_distances() -> None:
    first, second = Timeline().place([exited(3, 500), exited(2, 400)], 10_000)
    assert first.time_ns - second.time_ns == 100
    assert second.time_ns == 10_000


def test_paths_of_node_0_become_this_nodes_own(tmp_path: Path) -> None:
    places = Places(tmp_path / "r", tmp_path / "s", tmp_path / "j", "/their/run", "/their/job")
    assert places.translate("/their/run/launches/x/launch.json", "x") == str(places.launch_config("x"))
    assert (
        places.translate("/their/run/launches/x/log/rank1.log", "x")
        == f"{tmp_path}/r/launches/x/log/rank1.log"
    )
    assert places.translate("/their/job", "x") == f"{tmp_path}/j"
    for same in ("1", "/their/runs", "--lr=0.1"):
        assert places.translate(same, "x") == same


def test_host_names_and_interfaces_that_are_not_there(wording: Wording) -> None:
    with pytest.raises(MachineError, match=r"'no-such-host\.invalid' does not resolve"):
        resolve("no-such-host.invalid", 1)
    with wording.raises(SpecError, hide=r"^\S+|(?<=it has ).*"):
        find_address("127.0.0.1", 1, "nope0", {})
    assert find_address("127.0.0.1", 1, None, {}).interface == "lo"
    assert find_address("127.0.0.1", 1, None, {"GLOO_SOCKET_IFNAME": "lo"}).address == "127.0.0.1"


@pytest.mark.parametrize("resolves_late", [True, False])
def test_a_name_that_resolves_late_is_waited_for(
    resolves_late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As that of another Pod does."""
    real, asked, waited = socket.getaddrinfo, [], []

    def later(host: str, *args: Any, **options: Any) -> Any:
        asked.append(host)
        if len(asked) < 4:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return real("127.0.0.1", *args, **options)

    monkeypatch.setattr(socket, "getaddrinfo", later)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    facts = Facts(1, "demo-0.demo", 29400, resolves_late)
    if resolves_late:
        assert find_place(facts, NodeFlags(), lambda: waited.append(1)).rendezvous == "127.0.0.1"
        assert waited == [1]
    else:
        with pytest.raises(MachineError, match=r"'demo-0\.demo' does not resolve"):
            find_place(facts, NodeFlags(), lambda: waited.append(1))


CPU_NODES = tuple(Node(f"n{i}", f"10.0.0.{i}", "eth0", 4, ()) for i in range(2))
GPU_NODES = tuple(
    Node(f"n{i}", f"10.0.0.{i}", "ib0", 4, tuple(NodeGpu(f"G{i}{j}", "H200") for j in range(2)))
    for i in range(2)
)


def spec_of(**job: Any) -> JobSpec:
    text = json.dumps({"name": "t", "workload": "gpt", "global_batch": 64, "nodes": 2, **job})
    return load_text(text, "job.yaml", (), Path())


def test_ranks_are_spread_over_nodes() -> None:
    plan = build_plan(spec_of(devices="cuda"), GPU_NODES[0], GPU_NODES)
    (launch,) = plan.launches
    assert plan.variants[0].devices == ("cuda:0@0", "cuda:1@0", "cuda:0@1", "cuda:1@1")
    assert [process.node for process in launch.processes] == [0, 0, 1, 1]
    assert launch.processes[3].env == {
        "RANK": "3",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "4",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "1",
        "GLOO_SOCKET_IFNAME": "ib0",
        "NCCL_SOCKET_IFNAME": "ib0",
        "CUDA_VISIBLE_DEVICES": "G11",
    }


def test_a_list_of_devices_may_name_their_nodes() -> None:
    own = ["cpu:0@0", "cpu:0@1", "cpu:1@1", "cpu:02@1"]
    plan = build_plan(spec_of(devices=own, split="1:1:2:4"), CPU_NODES[0], CPU_NODES)
    assert plan.variants[0].devices == ("cpu:0@0", "cpu:0@1", "cpu:1@1", "cpu:2@1")
    assert plan.variants[0].split == (8, 8, 16, 32)
    assert [process.env["LOCAL_WORLD_SIZE"] for process in plan.launches[0].processes] == ["1", "3", "3", "3"]
    for wrong, words in (
        (["cpu:0", "cpu:0@1"], "some of `devices` name their node"),
        (["cpu:0@0", "cpu:0@2"], "devices of node 0, 2, but the job has 2 nodes"),
    ):
        with pytest.raises(SpecError, match=words):
            spec_of(devices=wrong)


@pytest.mark.parametrize("nodes", ["1..2", "4..2", "2..2", "2..1025", "2..4"])
def test_mistakes_about_a_range_of_nodes(nodes: str, wording: Wording) -> None:
    with wording.raises(SpecError):
        spec_of(nodes=nodes, devices=["cpu:0@0", "cpu:0@1"])


def test_nodes_may_have_different_numbers_of_gpus() -> None:
    """The world is made of what came, also where the job leaves open how many nodes that are."""
    uneven = (replace(GPU_NODES[0], gpus=GPU_NODES[0].gpus[:1]), GPU_NODES[1])
    spec = spec_of(devices="cuda", nodes="2..4", split="2:1:1")
    plan = build_plan(spec, uneven[0], uneven)
    assert plan.variants[0].devices == ("cuda:0@0", "cuda:0@1", "cuda:1@1")
    assert [process.env["LOCAL_WORLD_SIZE"] for process in plan.launches[0].processes] == ["1", "2", "2"]
    assert spec.resolved()["nodes"] == "2..4"


def test_devices_have_the_threads_of_the_node_with_the_fewest_cores_for_them() -> None:
    larger = replace(CPU_NODES[1], cpu_cores=16)
    plan = build_plan(spec_of(devices="cpu:2", threads="auto"), CPU_NODES[0], (CPU_NODES[0], larger))
    assert plan.variants[0].threads == 2


def test_one_process_stays_on_node_0() -> None:
    plan = build_plan(
        spec_of(devices="cpu:2", compare={"strategy": ["ddp", "dp", "single"]}), CPU_NODES[0], CPU_NODES
    )
    assert [len(variant.devices) for variant in plan.variants] == [4, 2, 1]
    assert {p.node for launch in plan.launches for p in launch.processes if len(launch.processes) == 1} == {0}
    with pytest.raises(SpecError, match="dp is one process"):
        build_plan(spec_of(devices="cpu:2", strategy="dp", device_count=3), CPU_NODES[0], CPU_NODES)


def test_nodes_of_different_kinds_are_refused(wording: Wording) -> None:
    mixed = (CPU_NODES[0], GPU_NODES[1])
    with wording.raises(MachineError):
        build_plan(spec_of(), CPU_NODES[0], mixed)
    with pytest.raises(MachineError, match=r"node 0 \(n0\)"):
        build_plan(spec_of(devices="cuda"), CPU_NODES[0], mixed)


def test_ranks_start_in_this_nodes_copy_of_the_jobs_directory(tmp_path: Path) -> None:
    places = Places(tmp_path / "r", tmp_path / "s", tmp_path / "j", "/their/run", "/their/job")
    follower = Follower(Mock(), Mock(), places, print, name="x")
    request = StartRequest(
        1, ("--lr=0.1", "/their/run"), {}, "/their/run/rank1.log", "/their/job", control="/their/run/c"
    )
    assert follower.translated(request, "module:function") == StartRequest(
        1,
        ("--lr=0.1", f"{tmp_path}/r"),
        {},
        f"{tmp_path}/r/rank1.log",
        f"{tmp_path}/j",
        "module:function",
        f"{tmp_path}/r/c",
    )


# What several nodes change about programs, binding, looking from outside and what a job may ask for


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
    ready = Prepared(plan, spec, RunDir(tmp_path / "run"), tmp_path, machine)
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
    requests = starter.prepare_attempt(launch, launch.id, dict.fromkeys(launch.variants, 1))
    assert requests[0].args[1:] == ("3", "10.0.0.1", "0")


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


# Which node this is and where the nodes meet, from every source


SLURM = {
    "SLURM_JOB_ID": "123456",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "1",
    "SLURM_NODEID": "1",
    "SLURM_LOCALID": "0",
    "SLURM_STEP_NODELIST": "gpu[08-09]",
    "SLURM_STEP_NUM_NODES": "2",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
    "OMPI_COMM_WORLD_NODE_RANK": "0",
    "OMPI_COMM_WORLD_SIZE": "2",
    "PMIX_RANK": "1",
}
"""Of Open MPI 4.1.4, as `mpirun --map-by ppr:1:node` sets them on the second node."""
HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "2", "PMI_FD": "8", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "1"}
"""Of MPICH 4.0.2, as `mpirun -ppn 1` sets them on the second node."""
BELOW_SLURM = {**SLURM, "SLURM_NODEID": "0", "SLURM_STEP_NODELIST": "gpu09", "SLURM_STEP_NUM_NODES": "1"}
"""Below mpirun: Slurm's variables describe the daemons that mpirun has started on the other nodes."""
POD = {"JOB_COMPLETION_INDEX": "1", "HOSTNAME": "demo-1", "KUBERNETES_SERVICE_HOST": "10.96.0.1"}
"""In a Pod of an Indexed Job."""
TRAINJOB = {
    **POD,
    "PET_NNODES": "2",
    "PET_NODE_RANK": "1",
    "PET_MASTER_PORT": "29400",
    "PET_NPROC_PER_NODE": "auto",
}
TRAINJOB["PET_MASTER_ADDR"] = "demo-node-0-0.demo"
PET = {"PET_NODE_RANK": "1", "PET_MASTER_ADDR": "head", "PET_MASTER_PORT": "1234", "PET_NNODES": "2"}


@pytest.mark.parametrize(
    ("flags", "environ", "facts"),
    [
        (NodeFlags(1, "a:5"), {}, Facts(1, "a", 5)),
        (NodeFlags(1, "a"), {}, Facts(1, "a", 29400)),
        (NodeFlags(0, "[fd00::1]:5"), {}, Facts(0, "fd00::1", 5)),
        (NodeFlags(0, "fd00::1"), {}, Facts(0, "fd00::1", 29400)),
        (NodeFlags(0, "a:5"), {"OMPI_COMM_WORLD_RANK": "1"}, Facts(0, "a", 5)),
        (NodeFlags(), PET, Facts(1, "head", 1234, True)),
        (NodeFlags(), {"PET_NODE_RANK": "0", "PET_RDZV_ENDPOINT": "h:7"}, Facts(0, "h", 7, True)),
        (NodeFlags(), SLURM, Facts(1, "gpu08", 23456)),
        (NodeFlags(0), SLURM, Facts(0, "gpu08", 23456)),
        (NodeFlags(None, "b:9"), SLURM, Facts(1, "b", 9)),
        (NodeFlags(), {**SLURM, **PET}, Facts(1, "head", 1234, True)),
        (
            NodeFlags(),
            {**SLURM, "PMI_RANK": "1", "PMI_SIZE": "2", "PMIX_RANK": "1"},
            Facts(1, "gpu08", 23456),
        ),
        (NodeFlags(None, "a:5"), OPEN_MPI, Facts(1, "a", 5)),
        (NodeFlags(None, "a:5"), HYDRA, Facts(1, "a", 5)),
        (NodeFlags(None, "a:5"), {"PMIX_RANK": "1"}, Facts(1, "a", 5)),
        (NodeFlags(None, "a:5"), {**BELOW_SLURM, **OPEN_MPI}, Facts(1, "a", 5)),
        (NodeFlags(None, "demo-0.demo"), POD, Facts(1, "demo-0.demo", 29400, True)),
        (NodeFlags(), TRAINJOB, Facts(1, "demo-node-0-0.demo", 29400, True)),
    ],
)
def test_facts(flags: NodeFlags, environ: Mapping[str, str], facts: Facts) -> None:
    assert find_facts(2, flags, environ) == facts


@pytest.mark.parametrize(
    ("flags", "environ", "words"),
    [
        (NodeFlags(), {}, "the rank of this node must be set"),
        (NodeFlags(0), {}, "the rendezvous address must be set"),
        (NodeFlags(2, "a"), {}, "node rank 2 is out of range: with 2 nodes, ranks are 0 to 1"),
        (NodeFlags(0, "a:99999"), {}, "not HOST[:PORT]"),
        (NodeFlags(0, ":1"), {}, "not HOST[:PORT]"),
        (NodeFlags(), {**PET, "PET_NNODES": "3"}, "`nodes: 2`, but PET_NNODES specifies 3"),
        (NodeFlags(), {**PET, "PET_NODE_RANK": "x"}, "PET_NODE_RANK should be a number"),
        (NodeFlags(), {**SLURM, "SLURM_STEP_NUM_NODES": "4"}, "--set nodes=4"),
        (NodeFlags(), {**SLURM, "SLURM_LOCALID": "1"}, "--ntasks-per-node=1"),
        (NodeFlags(), {**SLURM, "SLURM_STEP_NODELIST": "gpu[8-"}, "can't be read"),
        (NodeFlags(), {**BELOW_SLURM, **OPEN_MPI}, "the rendezvous address must be set"),
        (NodeFlags(None, "a"), {**HYDRA, "PMI_SIZE": "3"}, "but mpirun specifies 3"),
        (NodeFlags(None, "a"), {**HYDRA, "MPI_LOCALRANKID": "1"}, "several processes on this node"),
        (NodeFlags(None, "a"), {**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_RANK": "1"}, "--map-by ppr:1:node"),
        (NodeFlags(None, "a"), {"OMPI_COMM_WORLD_RANK": "0"}, "without OMPI_COMM_WORLD_LOCAL_RANK and OMPI"),
        (NodeFlags(None, "a"), {**OPEN_MPI, "PMIX_RANK": "7"}, "but PMIX_RANK is 7"),
        (NodeFlags(), POD, "the rendezvous address must be set"),
        (NodeFlags(), {key: SLURM[key] for key in ("SLURM_JOB_ID", "SLURM_NODEID")}, "the rank of this node"),
    ],
)
def test_missing_and_contradictory_facts(flags: NodeFlags, environ: Mapping[str, str], words: str) -> None:
    with pytest.raises(SpecError, match=words.replace("[", r"\[")):
        find_facts(2, flags, environ)


@pytest.mark.parametrize(
    ("given", "bounds"), [({}, (2, 4)), (PET, (2, 2)), ({**PET, "PET_NNODES": "2:4"}, (2, 4))]
)
def test_a_range_of_nodes_is_what_the_scheduler_gives(
    given: Mapping[str, str], bounds: tuple[int, int], wording: Wording
) -> None:
    assert bounds_here("2..4", NodeFlags(), given) == bounds
    assert find_facts("2..4", NodeFlags(3, "a"), given).rank == 3
    with wording.raises(SpecError):
        bounds_here("2..4", NodeFlags(), {**PET, "PET_NNODES": "5"})


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("a", ("a",)),
        ("a,b-1", ("a", "b-1")),
        ("n[0-1,5],login", ("n0", "n1", "n5", "login")),
        ("gpu[08-11]", ("gpu08", "gpu09", "gpu10", "gpu11")),
        ("r[1-2]n[1-2]x", ("r1n1x", "r1n2x", "r2n1x", "r2n2x")),
    ],
)
def test_host_lists(text: str, hosts: tuple[str, ...]) -> None:
    assert expand_hosts(text) == hosts


@given(st.text(alphabet="ab0123[]-,. ", max_size=30))
def test_a_host_list_is_read_or_refused(text: str) -> None:
    try:
        hosts = expand_hosts(text)
    except SpecError:
        return
    assert hosts
    assert not any(set("[]") & set(host) for host in hosts)


def test_a_host_list_without_end_is_refused() -> None:
    with pytest.raises(SpecError):
        expand_hosts("n[0-999999999]x[0-999999999]")


@given(st.integers(0, 2**32))
def test_ports_of_slurm_jobs_are_not_those_of_outgoing_connections(job_id: int) -> None:
    assert 1024 <= slurm_port(job_id) < 32768
    assert parse_endpoint(f"h:{slurm_port(job_id)}") == ("h", slurm_port(job_id))


def test_a_working_copy_is_known_by_what_its_links_lead_to(tmp_path: Path) -> None:
    """There, gpurun is a directory of links."""
    for name in ("launcher", "package"):
        (tmp_path / name).mkdir()
    (tmp_path / "package" / "launcher").symlink_to("../launcher")
    (tmp_path / "launcher" / "start.py").write_text("1")
    before = source_sha256(tmp_path / "package")
    (tmp_path / "launcher" / "start.py").write_text("2")
    assert source_sha256(tmp_path / "package") != before
