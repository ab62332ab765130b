"""How results of the other nodes come into node 0's run directory."""

import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpurun.launcher.errors import MachineError, NodesEnded, NodesError, SpecError
from gpurun.launcher.inspect.requests import (
    Answer,
    Declined,
    TracesRequested,
    WantTraces,
    ask,
    traces_requested,
)
from gpurun.launcher.inspect.snapshot import RankSnapshot
from gpurun.launcher.logs.relay import Relay, rotate
from gpurun.launcher.nodes import cluster_pool
from gpurun.launcher.nodes.cluster_pool import ClusterPool
from gpurun.launcher.nodes.follower import Follower, Places
from gpurun.launcher.nodes.messages import Chunk, Message, StartRanks, Stop, TracesWanted, decode, encode
from gpurun.launcher.nodes.transfer import CHUNK_BYTES, WINDOW_CHUNKS, Inbox, Outbox
from gpurun.launcher.processes.protocol import WORKER_ENTRY, Exit, StartRequest
from gpurun.launcher.rundir.control import NOT_STARTED, ControlDir, make_directory
from gpurun.launcher.rundir.files import RunDir, read_json, write_bytes
from gpurun.launcher.rundir.rank_files import ERROR_FILE
from gpurun.launcher.rundir.records import CaptureRequest
from gpurun.launcher.start_on_nodes import scratch_directory
from tests.wording import Wording


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


def test_a_log_that_is_rotated_between_two_transfers_loses_no_line(tmp_path: Path) -> None:
    """The new log may be shorter than what was sent of the one before, longer, or empty, and the node may
    have joined again meanwhile."""
    outbox, inbox = Outbox(tmp_path / "theirs", 1), Inbox(tmp_path / "ours")
    log = tmp_path / "theirs/launches/x/log/rank1.log"
    log.parent.mkdir(parents=True)
    for number, num_lines in enumerate([5, 2, 9, 0, 1]):
        if number:
            assert rotate(log, 20)
        if number % 2:
            outbox.join_again()
            inbox = Inbox(tmp_path / "ours")
        for part in range(2):
            with log.open("a") as file:
                file.writelines(f"line {number} {part} {line}\n" for line in range(num_lines))
            outbox.send(inbox.write, lambda: None)
            for theirs in log.parent.iterdir():
                ours = tmp_path / "ours" / theirs.relative_to(tmp_path / "theirs")
                assert ours.read_bytes() == theirs.read_bytes()


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
    """Another node has been replaced: this one still knows what it has sent, and node 0 has begun again."""
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
    with scratch_directory() as empty:
        RunDir(empty).program_files("01-script-2").mkdir(parents=True)
    assert not empty.exists()
    with scratch_directory() as scratch:
        saved = RunDir(scratch).program_files("01-script-2")
        saved.mkdir(parents=True)
        (saved / "rank1.pt").write_bytes(b"weights")
    assert (saved / "rank1.pt").read_bytes() == b"weights"
    wording(capsys.readouterr().err, hide=r"\S+/gpurun-node-[^/]+")
    shutil.rmtree(scratch)


def filled(scratch: Path, name: str = "log/rank1.log") -> Path:
    """The directory, with this file of a launch in it."""
    path = RunDir(scratch).launch("01-script-2") / name
    path.parent.mkdir(parents=True)
    path.write_bytes(b"x")
    return scratch


def test_the_next_start_removes_what_a_killed_one_has_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing that is in use, was named to its user, holds what a program saved, or is another's."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    code = (
        "import os; from gpurun.launcher.start_on_nodes import scratch_directory\n"
        "with scratch_directory() as left, scratch_directory() as saved:\n"
        "    print(left, saved, flush=True); os.kill(os.getpid(), 9)"
    )
    argv, env = [sys.executable, "-c", code], {**os.environ, "TMPDIR": str(tmp_path)}
    done = subprocess.run(argv, env=env, capture_output=True, text=True, check=False)
    left, saved = map(Path, done.stdout.split())
    filled(left), filled(saved, "files/rank1.pt")
    scratch = scratch_directory()
    named = filled(scratch.__enter__())
    assert not left.exists()
    lost = NodesError("node 0 is lost")
    with pytest.raises(NodesError, match=str(named)):
        scratch.__exit__(NodesError, lost, None)
    left.symlink_to(saved, target_is_directory=True)
    other_host = Path(str(left).replace(platform.node(), "another"))
    other_host.mkdir()
    with scratch_directory() as used, scratch_directory():
        assert {left, saved, named, used, other_host} <= set(tmp_path.iterdir())
    left.unlink()
    left.mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: os.getuid() + 1)  # as another user's command sees it
        with scratch_directory():
            assert left.exists()
    with scratch_directory():
        assert not left.exists()


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


# `gpurun capture` of a job on several nodes, whose links and ranks only pretend; control blocks are real


LAUNCH = "01-ddp-3"


@dataclass
class Link:
    """One node's end; what it sends is decoded again, as on a network. Node 0 gets messages singly."""

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
        num = len(mails) if self.rank else min(len(mails), 1)  # another thread may add to them
        return [mails.popleft() for _ in range(num)]

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

    def observe(self, directory: Path) -> tuple[RankSnapshot, ...]:
        return ()


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
        """What another terminal on node 0 gets to hear. The other nodes work from this request on."""
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
            is_sent = any(isinstance(mail, TracesWanted) for _, mail in self.passed)
            for follower in self.followers if is_last or is_sent else ():
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


def test_an_answer_that_comes_too_late_is_no_answer_to_the_next_question(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The nodes answer a question for snapshots while they are asked for traces, which node 2 declines."""
    monkeypatch.setattr(cluster_pool, "_NODES_ANSWER_S", 0.0)
    cluster.begin(0)
    cluster.begin(1)
    make_directory(cluster.runs[2].control(LAUNCH))
    assert cluster.pool.observe(cluster.runs[0].control(LAUNCH)) == ()
    monkeypatch.setattr(cluster_pool, "_NODES_ANSWER_S", 60.0)
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


class Failing(Quiet):
    """A rank that fails at once, in a function under torch's `record`."""

    def __init__(self) -> None:
        self.exits: list[Exit] = []

    def start(self, processes: Sequence[StartRequest]) -> None:
        for process in processes:
            Path(process.log).parent.mkdir(parents=True)
            Path(process.log).write_text("ValueError: bad shard\n")
            Path(process.env[ERROR_FILE]).write_text('{"message": {"message": "bad shard"}}')
            self.exits.append(Exit(process.rank, 1, 0))

    def poll(self, timeout_s: float) -> list[Exit]:
        exits, self.exits = self.exits, []
        return exits

    def stop(self, grace_s: float, signals: tuple[int, ...]) -> None:
        """It has ended."""


class LastLink(Link):
    """What has come is all."""

    def poll(self, timeout_s: float) -> list[Message]:
        if not (found := super().poll(timeout_s)):
            raise NodesEnded("the run is over", 4)
        return found


def test_what_a_nodes_failed_rank_has_written_is_where_torchrun_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Node 0's directory isn't here."""
    monkeypatch.setenv(ERROR_FILE, str(tmp_path / "copied"))
    theirs, launch = RunDir(tmp_path / "theirs"), "01-script-1"
    request = start_request(1, theirs.launch_config(launch))
    env = {**request.env, ERROR_FILE: str(theirs.program_error(launch, 1))}
    request = msgspec.structs.replace(request, env=env)
    messages: list[Message] = [StartRanks(1, launch, "program", b"{}", (request,), {}), Stop(1, 0.0, ())]
    link = LastLink(1, [deque(), deque(messages)], [])
    places = Places(tmp_path / "own", tmp_path / "scratch", tmp_path, str(theirs.path), "/job")
    relay = Relay(print, as_torchrun=True, passes_to=2)
    follower = Follower(link, Failing(), places, print, relay)  # type: ignore[arg-type]
    with pytest.raises(NodesEnded):
        follower.run()
    assert capfd.readouterr().err == "ValueError: bad shard\n"
    copied = json.loads((tmp_path / "copied").read_bytes())
    assert copied == {"message": {"message": "bad shard", "errorCode": 1}}
