"""What the nodes of a job agree on and send each other: without a network."""

import json
import socket
import time
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpurun.launcher.errors import MachineError, SpecError
from gpurun.launcher.failures.root_cause import root_cause
from gpurun.launcher.jobfile.load import load_text
from gpurun.launcher.jobfile.model import JobSpec
from gpurun.launcher.machine.network import find_address, resolve
from gpurun.launcher.nodes.cluster_pool import Timeline
from gpurun.launcher.nodes.follower import Follower, Places
from gpurun.launcher.nodes.join import disagreement, find_place, missing_nodes, program_sha256
from gpurun.launcher.nodes.messages import Hello, decode, encode
from gpurun.launcher.nodes.rendezvous import Facts, NodeFlags
from gpurun.launcher.plan.build import build_plan
from gpurun.launcher.plan.model import Node, NodeGpu
from gpurun.launcher.processes.protocol import Exit, StartRequest
from gpurun.launcher.rundir.records import FailureRecord
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
    return Exit(rank, 100 + rank, code, time_ns)


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
