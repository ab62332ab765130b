"""The connection between nodes: proof of the secret, order, reconnection, silence."""

import os
import random
import re
import secrets
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpurun.launcher.errors import MachineError, NodesEnded, NodesError, SpecError
from gpurun.launcher.jobfile.load import load_text
from gpurun.launcher.machine.host import inspect_machine
from gpurun.launcher.nodes.join import joined
from gpurun.launcher.nodes.messages import End, LogText, Message, Settled, StartRanks, encode
from gpurun.launcher.nodes.node_link import LINGER_S, LOST_LINGER_S, LinkLoop, NodeLink
from gpurun.launcher.nodes.rendezvous import NodeFlags
from gpurun.launcher.nodes.transport.credentials import NodeCertificate, find_secret, identity_from
from gpurun.launcher.nodes.transport.exchange import (
    CLOSED_S,
    LinkOptions,
    Lost,
    MessageLane,
    Silence,
    StreamFrame,
    decode_frame,
)
from gpurun.launcher.nodes.transport.server import MAX_STRANGERS, MOST_REFUSALS, Server
from tests.integration.command import free_port
from tests.known import known
from tests.strangers import CRAFTED, REFUSED, SILENT, approach, few_files, noise
from tests.wording import Wording

SECRET, OTHER = (identity_from(text * 16) for text in (b"s", b"o"))
WAIT_S = 30.0
"""What takes longer hangs."""


def options(
    rank: int,
    port: int,
    identity: NodeCertificate | None = SECRET,
    silence_s: float = 30.0,
    num_nodes: int = 3,
) -> LinkOptions:
    return LinkOptions(
        rank,
        num_nodes,
        "localhost",
        "127.0.0.1",
        port,
        "127.0.0.1",
        f"host{rank}",
        WAIT_S,
        silence_s,
        identity,
    )


@pytest.fixture(scope="module")
def loop() -> Iterator[LinkLoop]:
    """One for all links: gRPC warns of several in a process."""
    shared = LinkLoop()
    yield shared
    shared.close()


@contextmanager
def linked(loop: LinkLoop, *chosen: LinkOptions) -> Iterator[list[NodeLink]]:
    links = [NodeLink(options, loop) for options in chosen]
    try:
        yield links
    finally:
        ending = [threading.Thread(target=link.close, args=(0.1,)) for link in links]
        for thread in ending:
            thread.start()
        for thread in ending:
            thread.join()


@contextmanager
def connected(loop: LinkLoop, *chosen: LinkOptions) -> Iterator[list[NodeLink]]:
    """The same, once all are connected."""
    with linked(loop, *chosen) as links:
        assert all(link.await_connected(WAIT_S) for link in links)
        yield links


def collect(link: NodeLink, count: int) -> list[Message]:
    found: list[Message] = []
    while len(found) < count:
        more = link.poll(WAIT_S)
        assert more, f"nothing came in {WAIT_S} s after {found}"
        found += more
    return found


class Cable:
    """A proxy in front of a port, which can break all connections that go through it, and listens in."""

    def __init__(self, port: int) -> None:
        self._to = port
        self.heard = bytearray()
        """All that was sent to the port."""
        self._ends: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def cut(self) -> None:
        for end in self._ends:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()
        for thread in self._threads:
            thread.join()
        for end in self._ends:
            end.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(("127.0.0.1", self._to))
                self._ends += [near, far]
                for way in ((near, far, self.heard), (far, near, bytearray())):
                    self._threads.append(threading.Thread(target=self._copy, args=way))
                    self._threads[-1].start()

    def _copy(self, source: socket.socket, target: socket.socket, heard: bytearray) -> None:
        with suppress(OSError):
            while content := source.recv(1 << 16):
                heard += content
                target.sendall(content)
        for end in (source, target):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def port() -> int:
    return free_port()


def test_connections_that_break_cost_no_message_and_no_order(port: int, loop: LinkLoop) -> None:
    with (
        connected(loop, options(0, port)) as (first,),
        closing(Cable(port)) as cable,
        connected(loop, options(1, cable.port)) as (second,),
    ):
        sent: list[Message] = [LogText(str(number)) for number in range(60)]
        for number, message in enumerate(sent):
            second.send(0, message)
            first.send(1, message)
            if number % 20 == 10:
                cable.cut()
        assert collect(first, len(sent)) == sent
        assert collect(second, len(sent)) == sent


def test_connections_and_heartbeats_are_linear_in_the_number_of_nodes(port: int, loop: LinkLoop) -> None:
    """Each node has one connection, to node 0."""
    num_nodes = 9
    with connected(loop, *(options(rank, port, num_nodes=num_nodes) for rank in range(num_nodes))):
        found = [each for each in psutil.net_connections("tcp") if each.status == "ESTABLISHED"]
        assert sum(connection.laddr[1:2] == (port,) for connection in found) == num_nodes - 1
        assert sum(connection.raddr[1:2] == (port,) for connection in found) == num_nodes - 1


def test_a_message_to_oneself_comes_after_those_that_have_come(port: int, loop: LinkLoop) -> None:
    with linked(loop, options(0, port), options(1, port)) as (first, second):
        second.send(0, LogText("theirs"))
        theirs = collect(first, 1)
        first.send(0, LogText("ours"))
        assert [*theirs, *collect(first, 1)] == [LogText("theirs"), LogText("ours")]


def test_a_message_that_was_taken_does_not_come_again(port: int, loop: LinkLoop) -> None:
    with linked(loop, options(0, port)) as (link,):
        link.send(0, LogText("first"))
        link.send(0, Settled(1, 0))
        assert link.take(Settled, WAIT_S) == Settled(1, 0)
        assert link.poll(0.0) == [LogText("first")]


def test_where_a_node_is_lost_the_others_are_waited_for_a_shorter_time(
    port: int, loop: LinkLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits_s: list[float] = []

    async def closed(limit_s: float) -> None:
        limits_s.append(limit_s)

    with linked(loop, options(0, port)) as (link,), monkeypatch.context() as patched:
        patched.setattr(link, "_close", closed)
        link.close()
        with pytest.raises(NodesError):
            link._lost(Lost(1, "hostb", "it is silent"))
        link.close()
    assert limits_s == [LINGER_S, LOST_LINGER_S]


def test_the_first_end_is_the_end_for_all(port: int, loop: LinkLoop) -> None:
    with connected(loop, *(options(rank, port) for rank in range(3))) as links:
        links[2].announce(End(3, "it is over"))
        for link in links:
            with pytest.raises(NodesEnded) as ended:
                link.poll(WAIT_S)
            assert (str(ended.value), ended.value.exit_code) == ("it is over", 3)


def test_a_node_that_ends_without_a_word_is_lost(port: int, loop: LinkLoop, wording: Wording) -> None:
    with linked(loop, options(0, port, silence_s=3.0)) as (first,):
        with connected(loop, options(1, port)):
            pass
        with wording.raises(NodesError):
            collect(first, 1)
    with linked(loop, options(1, port)) as (second,):
        with linked(loop, options(0, port)):
            assert second.await_connected(WAIT_S)
        with wording.raises(NodesError):
            collect(second, 1)


@pytest.mark.parametrize(
    ("was_there", "twin"), [(True, False), (False, False), (False, True)], ids=["True", "False", "twin"]
)
def test_a_node_that_comes_too_late_learns_it_and_costs_nothing(
    port: int, loop: LinkLoop, was_there: bool, twin: bool, wording: Wording
) -> None:
    """Also one that connects at the moment when the run begins with the others, and a second of a rank."""
    third = replace(options(1, port), own_host="twin") if twin else options(2, port)
    with connected(loop, options(0, port), options(1, port)) as (first, second):
        if not was_there:
            first.begin(("host0", "host1"))
        with linked(loop, third) as (late,):
            if was_there:
                assert late.await_connected(WAIT_S)
                first.begin(("host0", "host1"))
            with wording.raises(NodesEnded) as end:
                late.poll(WAIT_S)
            assert end.value.exit_code == 3
            late.announce(End(1, "this is heard by no one"))
        second.send(0, LogText("still here"))
        assert collect(first, 1) == [LogText("still here")]


def test_one_that_is_started_again_waits_until_the_lost_one_is_noticed(port: int, loop: LinkLoop) -> None:
    with linked(loop, options(0, port)) as (first,):
        with connected(loop, options(1, port)):
            first.begin(("host0", "host1"))
        with connected(loop, options(1, port)) as (again,):
            first.announce(End(3, "it is lost", starts_again=True))
            with pytest.raises(NodesEnded, match="it is lost") as end:
                again.poll(WAIT_S)
            assert end.value.starts_again


def test_a_silent_node_counts_as_lost_when_it_is_said() -> None:
    said: list[Any] = []
    server = Server(options(0, 1), said.append)
    server.begin(("host0", "host1", "host2"))
    for rank in (1, 2):
        server.silence.hear(rank, 0.0)
        server._report_change(rank, is_quiet=True)
        server.silence.close(rank, 1.0)
        server._report_change(rank, is_quiet=True)
    limits = [re.search(r"after (\d+) s", failure.message.text) for failure in said]
    assert [float(found[1]) for found in limits if found] == [30.0, CLOSED_S] * 2


@pytest.mark.parametrize("of_node_0", [SECRET, None])
def test_insecure_on_one_side_only_is_named_at_once(
    of_node_0: NodeCertificate | None, loop: LinkLoop, monkeypatch: pytest.MonkeyPatch, wording: Wording
) -> None:
    monkeypatch.setattr("gpurun.launcher.nodes.node_link._CLOSED_TIMES", 2)
    port = free_port()
    ends = options(0, port, of_node_0), options(1, port, None if of_node_0 else SECRET)
    with linked(loop, *ends) as (_, second), wording.raises(MachineError, hide=r"(?<=:)\d+"):
        second.await_connected(WAIT_S)


def test_a_node_with_another_secret_learns_it_and_node_0_says_once_from_where_it_came(
    port: int, loop: LinkLoop
) -> None:
    with linked(loop, options(0, port), options(1, port, OTHER), options(2, port, OTHER)) as (first, *others):
        for rank, other in enumerate(others, 1):
            with pytest.raises(MachineError, match=f"does not have the secret of node {rank}"):
                other.await_connected(WAIT_S)
        with linked(loop, options(1, port)) as (node,):
            node.send(0, LogText("a node"))
            assert collect(first, 2) == [
                REFUSED,
                LogText("a node"),
            ]


def test_a_rank_out_of_range_ends_at_once_and_node_0_says_so(port: int, loop: LinkLoop) -> None:
    with linked(loop, options(0, port), options(7, port)) as (first, other):
        with pytest.raises(MachineError, match=r"7 \(host7\) .* ranks are 0 to 2\n .*--node-rank"):
            other.await_connected(WAIT_S)
        assert "a node was refused: node rank 7 (host7) is out of range" in str(collect(first, 1))


def test_node_0_also_hears_of_a_rank_that_the_nodes_own_job_excludes(port: int, loop: LinkLoop) -> None:
    flags = NodeFlags(3, f"127.0.0.1:{port}", insecure=True)
    job = load_text("workload: sleep\ndevices: cpu:1\nnodes: 3\nglobal_batch: 8\n", "", (), Path())
    with linked(loop, options(0, port, None)) as (first,):
        with pytest.raises(SpecError, match="node rank 3 is out of range"):
            joined(job, Path(), flags, inspect_machine(), print).__enter__()
        assert any("node rank 3 (" in str(message) for message in collect(first, 1))


def test_strangers_fill_no_screen() -> None:
    said: list[object] = []
    server = Server(options(0, 1), said.append)
    for number in range(2 * MOST_REFUSALS):
        server._refuse_address(f"10.0.0.{number}")
    assert len(said) == MOST_REFUSALS


def test_what_strangers_send_to_the_port_changes_nothing(port: int, loop: LinkLoop) -> None:
    chance = random.Random(7)
    approaches = (noise, *CRAFTED)
    with connected(loop, options(0, port), options(1, port)) as (first, second):
        for number in range(200):
            approach(port, approaches[number % len(approaches)], chance)
        launch = StartRanks(1, "01", "workload", b"{}", (), {})
        with linked(loop, options(2, port, None), options(2, port, OTHER)) as (open_one, other_one):
            for intruder in (open_one, other_one):
                intruder.send(0, launch)
                intruder.announce(End(0, "over"))
            with pytest.raises(MachineError):
                other_one.poll(WAIT_S)
        second.send(0, LogText("still here"))
        assert collect(first, 2) == [REFUSED, LogText("still here")]


def test_what_was_said_to_node_0_can_be_neither_read_nor_said_again(port: int, loop: LinkLoop) -> None:
    said = LogText("said once, and to node 0 alone")
    with (
        closing(Cable(port)) as cable,
        linked(loop, options(0, port), options(1, cable.port)) as (first, second),
    ):
        second.send(0, said)
        assert collect(first, 1) == [said]
        assert said.text.encode() not in cable.heard
        with socket.create_connection(("127.0.0.1", port), WAIT_S) as stranger, suppress(OSError):
            stranger.sendall(bytes(cable.heard))  # it grows meanwhile
            while stranger.recv(1 << 12):
                pass
        second.send(0, LogText("the next one"))
        assert collect(first, 2) == [REFUSED, LogText("the next one")]


def test_2000_silent_connections_keep_no_node_out(port: int, loop: LinkLoop) -> None:
    with (
        connected(loop, options(0, port)) as (first,),
        few_files(4 * MAX_STRANGERS),
        subprocess.Popen(
            [sys.executable, "-c", SILENT, str(port)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as strangers,
    ):
        known(strangers.stdout).readline()
        with connected(loop, options(1, port)) as (second,):
            second.send(0, LogText("in"))
            assert collect(first, 2) == [REFUSED, LogText("in")]  # it says so of `PRI`
        strangers.communicate(b"\n")


# What the two ends of a connection know without a network: order, frames, silence


@given(st.lists(st.sampled_from(["put", "send", "lose", "reconnect"]), max_size=60))
def test_every_message_arrives_once_and_in_order_however_often_the_stream_breaks(steps: list[str]) -> None:
    ours, theirs = MessageLane(), MessageLane()
    sent: list[bytes] = []
    arrived: list[bytes] = []
    lost = False

    def pass_on() -> None:
        for sender, other in ((ours, theirs), (theirs, ours)):
            while not lost and (frame := sender.next_frame()) is not None:
                payload = other.accept(decode_frame(encode(frame)))
                arrived.extend([payload] if payload is not None else [])

    for step in [*steps, "reconnect"]:
        if step == "put":
            sent.append(str(len(sent)).encode())
            ours.put(sent[-1])
        elif step == "lose":
            lost = True
            ours.next_frame()
        elif step == "reconnect":
            lost = False
            ours.rewind()
            theirs.rewind()
        pass_on()
    assert arrived == sent
    assert ours.is_settled
    assert theirs.is_settled


@pytest.mark.parametrize(
    "frame", [StreamFrame(2, 0), StreamFrame(0, 1), StreamFrame(-1, 0), StreamFrame(2**62, 0)]
)
def test_a_frame_that_no_end_would_send_is_refused(frame: StreamFrame) -> None:
    with pytest.raises(ValueError, match="confirming"):
        MessageLane().accept(frame)


@pytest.mark.parametrize("content", [b"", b"\xc1", b"\x93\x01\x00\xa1x", encode(LogText("x"))])
def test_other_bytes_are_no_frame(content: bytes) -> None:
    with pytest.raises(ValueError, match="not a frame"):
        decode_frame(content)


def test_only_silence_while_listening_counts() -> None:
    silence = Silence(10.0, 0.0)
    silence.hear(1, 0.0)
    silence.hear(2, 0.0)
    for second in range(1, 10):
        silence.hear(1, float(second))
        assert silence.check(float(second)) is None
    assert silence.check(109.5) is None  # this node was busy or suspended
    assert silence.check(110.4) is None
    assert silence.check(110.6) == (2, pytest.approx(10.1))


def test_a_node_is_lost_sooner_if_ranks_lost_it_or_its_connection_was_closed() -> None:
    closed, cut, suspected = (Silence(30.0, 0.0) for _ in range(3))
    for silence in (closed, cut, suspected):
        silence.hear(1, 0.0)
    closed.close(1, 1.0)  # by the node's kernel: it was heard a second ago
    cut.close(1, 15.0)  # by our own keepalive
    suspected.suspicious = True
    late = {"closed": closed, "cut": cut, "suspected": suspected}
    found = {name: _lost_after_s(silence) for name, silence in late.items()}
    assert found == {"closed": CLOSED_S + 1, "cut": 31.0, "suspected": 16.0}


def _lost_after_s(silence: Silence) -> float:
    return next(second for second in map(float, range(60)) if silence.check(second) is not None)


# The secret that the nodes of a job share


@pytest.mark.parametrize("weak", ["short", "abcdefghijklmnopqrstuvwxyz123456"])
def test_a_secret_that_is_refused_is_refused_before_a_node_waits(
    weak: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPURUN_SECRET", weak)
    job = load_text("workload: sleep\ndevices: cpu:1\nnodes: 2\nglobal_batch: 8\n", "", (), Path())
    said: list[str] = []
    flags = NodeFlags(1, "127.0.0.1:29400")
    with pytest.raises(SpecError, match=r"GPURUN_SECRET (is shorter|follows a simple pattern)"):
        joined(job, Path(), flags, inspect_machine(), said.append).__enter__()
    assert said == []


def test_a_secret_is_made_once_for_a_user(tmp_path: Path, wording: Wording) -> None:
    environ = {"XDG_CONFIG_HOME": str(tmp_path)}
    secret, path = find_secret(environ), tmp_path / "gpurun" / "secret"
    assert len(secret) >= 32
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert find_secret(environ) == secret
    assert os.listdir(path.parent) == ["secret"]
    path.chmod(0o640)
    with wording.raises(MachineError):
        find_secret(environ)


def test_a_secret_from_the_environment_has_to_be_long(tmp_path: Path, wording: Wording) -> None:
    good = secrets.token_hex(8)
    assert find_secret({"GPURUN_SECRET": good}) == good.encode()
    with pytest.raises(SpecError, match="shorter than 16 bytes"):
        find_secret({"GPURUN_SECRET": "short"})
    for weak in ("s" * 40, "abcdefghijklmnopqrstuvwxyz", "1234567890123456", "geheim!?" * 2, "0123" * 8):
        with pytest.raises(SpecError, match="could be guessed"):
            find_secret({"GPURUN_SECRET": weak})
    (tmp_path / "file").touch()
    with wording.raises(MachineError):
        find_secret({"XDG_CONFIG_HOME": str(tmp_path / "file")})


def test_grpc_is_told_to_write_nothing_before_it_is_imported() -> None:
    """It reads the variable at that moment, and writes lines such as `Got goaway` otherwise."""
    code = (
        "import builtins, os; original = builtins.__import__\n"
        "def note(name, *rest):\n"
        "    if name.partition('.')[0] == 'grpc': print(os.environ['GRPC_VERBOSITY']); os._exit(0)\n"
        "    return original(name, *rest)\n"
        "builtins.__import__ = note\n"
        "import gpurun.launcher.start_on_nodes"
    )
    environ = {name: value for name, value in os.environ.items() if name != "GRPC_VERBOSITY"}
    argv = [sys.executable, "-uc", code]
    assert subprocess.run(argv, env=environ, capture_output=True, text=True, check=False).stdout == "NONE\n"
