"""What the nodes of a job agree on and send each other: without a network."""

import json
import shutil
import socket
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

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
from gpurun.launcher.nodes.follower import Places
from gpurun.launcher.nodes.join import disagreement, find_place, missing_nodes, program_sha256
from gpurun.launcher.nodes.messages import Chunk, Hello, decode, encode
from gpurun.launcher.nodes.rendezvous import Facts, NodeFlags
from gpurun.launcher.nodes.transfer import CHUNK_BYTES, WINDOW_CHUNKS, Inbox, Outbox
from gpurun.launcher.plan.build import build_plan
from gpurun.launcher.plan.nodes import Node, NodeGpu
from gpurun.launcher.processes.protocol import Exit
from gpurun.launcher.rundir.files import RunDir, write_bytes
from gpurun.launcher.rundir.records import FailureRecord
from gpurun.launcher.start_on_nodes import scratch_directory
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


@given(
    st.dictionaries(
        st.sampled_from(["variants/a/rank1.jsonl", "launches/x/log/rank1.log", "launches/x/events.jsonl"]),
        st.lists(st.binary(max_size=20), min_size=1, max_size=3),
        max_size=3,
    )
)
def test_files_arrive_as_they_are_and_only_once(tmp_path_factory: Any, files: dict[str, list[bytes]]) -> None:
    theirs, ours = (tmp_path_factory.mktemp(name) for name in ("theirs", "ours"))
    outbox, inbox = Outbox(theirs, 1), Inbox(ours)
    sent: list[Chunk] = []

    def send(chunk: Chunk) -> None:
        sent.append(chunk)
        inbox.write(chunk)

    for part in range(3):
        for name, parts in files.items():
            (theirs / name).parent.mkdir(parents=True, exist_ok=True)
            with (theirs / name).open("ab") as file:
                file.write(b"".join(parts[part : part + 1]))
        outbox.send(send, lambda: None)
    for name, parts in files.items():
        arrived = ours / name
        assert (arrived.read_bytes() if arrived.exists() else b"") == b"".join(parts)
    assert sum(len(chunk.content) for chunk in sent) == sum(len(b"".join(p)) for p in files.values())


def test_what_a_resumed_run_has_of_a_file_is_kept(tmp_path: Path) -> None:
    ours, name = tmp_path / "ours", Path("variants/a/rank1.jsonl")
    (ours / name).parent.mkdir(parents=True)
    (ours / name).write_text("of the first command\n")
    theirs = tmp_path / "theirs" / name  # this node's directory is new with every command
    theirs.parent.mkdir(parents=True)
    outbox, inbox = Outbox(tmp_path / "theirs", 1), Inbox(ours)
    for line in ("of the second\n", "and more\n"):
        with theirs.open("a") as file:
            file.write(line)
        outbox.send(inbox.write, lambda: None)
    assert (ours / name).read_text() == "of the first command\nof the second\nand more\n"


def test_what_a_node_sends_after_it_has_joined_again_follows_what_node_0_has(tmp_path: Path) -> None:
    """Another node has been replaced: this one still knows what it has sent, and node 0 has begun anew."""
    name = "variants/a/rank1.jsonl"
    (tmp_path / "theirs" / name).parent.mkdir(parents=True)
    outbox = Outbox(tmp_path / "theirs", 1)
    for line in ("first\n", "second\n", "third\n"):
        inbox = Inbox(tmp_path / "ours")
        outbox.join_again()
        for part in (line[:3], line[3:]):
            with (tmp_path / "theirs" / name).open("a") as file:
                file.write(part)
            outbox.send(inbox.write, lambda: None)
    assert (tmp_path / "ours" / name).read_text() == "first\nsecond\nthird\n"


def test_a_line_that_a_crash_of_node_0_cut_off_costs_no_other(tmp_path: Path) -> None:
    name = "variants/a/rank1.jsonl"
    (tmp_path / name).parent.mkdir(parents=True)
    (tmp_path / name).write_bytes(b"whole\ncut o")
    inbox = Inbox(tmp_path)
    inbox.write(Chunk(1, name, 0, b"of the "))
    inbox.write(Chunk(1, name, 7, b"next\n", is_last=True))
    assert (tmp_path / name).read_bytes() == b"whole\ncut o\nof the next\n"


@pytest.mark.parametrize("name", ["variants/a/rank1.jsonl", "variants/a/.rank1.pt.trace.json.gz.part"])
def test_a_file_of_another_node_is_written_through_no_link(tmp_path: Path, name: str) -> None:
    """A program may leave links in the run directory of its node."""
    target = tmp_path / "elsewhere"
    target.write_bytes(b"mine")
    link = tmp_path / "run" / name
    link.parent.mkdir(parents=True)
    link.symlink_to(target)
    sent = name.replace("/.", "/").removesuffix(".part")
    with pytest.raises(MachineError, match="can't write"):
        Inbox(tmp_path / "run").write(Chunk(1, sent, 0, b"theirs\n"))
    assert target.read_bytes() == b"mine"


def test_what_a_program_saves_stays_on_its_node(tmp_path: Path) -> None:
    """Checkpoints may be huge; also those that a restart, or other software, has saved."""
    kept = ("launches/01-script-2/log/rank1.log", "variants/files/rank1.jsonl")
    saved = ("launches/01-script-2/files/model.pt", "launches/01-script-2~3/files/below/rank1.log")
    for name in (*kept, *saved):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"x\n")
    sent: list[Chunk] = []
    Outbox(tmp_path, 1).send(sent.append, lambda: None)
    assert sorted(chunk.path for chunk in sent) == sorted(kept)


def test_what_a_program_saves_on_a_node_outlives_the_command(
    capsys: pytest.CaptureFixture[str], wording: Wording
) -> None:
    """A rank's part of a checkpoint is nowhere else."""
    with scratch_directory(1) as empty:
        RunDir(empty).program_files("01-script-2").mkdir(parents=True)
    assert not empty.exists()
    with scratch_directory(1) as scratch:
        saved = RunDir(scratch).program_files("01-script-2")
        saved.mkdir(parents=True)
        (saved / "rank1.pt").write_bytes(b"weights")
    assert (saved / "rank1.pt").read_bytes() == b"weights"
    wording(capsys.readouterr().err, hide=r"\S+/gpurun-node1-\w+")
    shutil.rmtree(scratch)


def test_a_file_that_was_replaced_is_sent_whole(tmp_path: Path) -> None:
    name = Path("variants/a/rank1.pt.trace.json.gz")
    theirs, ours = tmp_path / "theirs" / name, tmp_path / "ours" / name
    theirs.parent.mkdir(parents=True)
    outbox, inbox = Outbox(tmp_path / "theirs", 1), Inbox(tmp_path / "ours")
    for content in (b"a long first trace", b"of the next launch", b"short"):
        write_bytes(theirs, content)
        outbox.send(inbox.write, lambda: None)
        assert ours.read_bytes() == content
    sent: list[Chunk] = []
    outbox.send(sent.append, lambda: None)
    assert sent == []


@pytest.mark.parametrize(
    "name",
    ["variants/a\0b/x", "variants/../../x", "/etc/x", "job.yaml", "variants/\x1b[2J/x", "launches/a\n/x", ""],
)
def test_a_file_of_another_node_has_a_name_that_a_run_may_have(
    tmp_path: Path, name: str, wording: Wording
) -> None:
    with wording.raises(MachineError):
        Inbox(tmp_path).write(Chunk(1, name, 0, b"content", is_last=True))
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_arrives_in_part_leaves_the_one_before(tmp_path: Path) -> None:
    inbox, name = Inbox(tmp_path), "variants/a/rank1.pt.trace.json.gz"
    inbox.write(Chunk(1, name, 0, b"whole", is_last=True))
    inbox.write(Chunk(1, name, 0, b"new b"))
    assert (tmp_path / name).read_bytes() == b"whole"
    inbox.write(Chunk(1, name, 5, b"eginning", is_last=True))
    assert (tmp_path / name).read_bytes() == b"new beginning"
    assert [path.name for path in (tmp_path / name).parent.iterdir()] == ["rank1.pt.trace.json.gz"]


def test_no_more_than_a_window_is_on_its_way(tmp_path: Path) -> None:
    path = tmp_path / "variants" / "a" / "rank1.pt.trace.json.gz"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"x" * (CHUNK_BYTES * (2 * WINDOW_CHUNKS) + 1))
    (path.parent / ".hidden").write_bytes(b"unfinished")
    on_the_way, most = 0, 0

    def send(chunk: Chunk) -> None:
        nonlocal on_the_way, most
        on_the_way += 1
        most = max(most, on_the_way)

    def await_taken() -> None:
        nonlocal on_the_way
        on_the_way -= 1

    Outbox(tmp_path, 1).send(send, await_taken)
    assert (on_the_way, most) == (0, WINDOW_CHUNKS)


@pytest.mark.parametrize("path", ["/etc/passwd", "../x", "variants/../../x", "job.yaml", "", "launchesx/y"])
def test_a_file_that_belongs_nowhere_is_refused(tmp_path: Path, path: str, wording: Wording) -> None:
    with wording.raises(MachineError):
        Inbox(tmp_path).write(Chunk(1, path, 0, b"x"))


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
