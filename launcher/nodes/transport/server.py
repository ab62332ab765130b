"""Node 0's end of the streams, and its port.

Of those who connect and prove nothing, it keeps few, and not for long: gRPC accepts whoever comes, until the
process has no file descriptor left. So it listens on a socket without a name, and gets each connection from
here, as the bytes that come: TLS is between gRPC and the other node.
"""

import asyncio
import contextlib
import errno
import os
import socket
import tempfile
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from gpurun.launcher.errors import MachineError
from gpurun.launcher.machine.network import family_of
from gpurun.launcher.nodes.messages import End, LogText, Message
from gpurun.launcher.nodes.transport.exchange import (
    HANDSHAKE_S,
    METHOD,
    SERVICE,
    Arrived,
    Connected,
    LinkEnd,
    LinkOptions,
    NotConnected,
    Peer,
    Reporter,
    carry,
    grpc_options,
)

MAX_STRANGERS = 64
"""So many connections may prove nothing, besides one of each node that is yet to come; one more ends the
oldest, since a node proves who it is within milliseconds. With three descriptors for each connection, 256
nodes stay below the usual limit of 1,024.
"""
_ACCEPT_AGAIN_S = 0.1
_BACKLOG = 1024
_PORTION_BYTES = 1 << 18
MOST_REFUSALS = 10
"""So many addresses whose connections were refused are reported, each once: anyone may connect."""
_REFUSED = "a connection from {address} was refused: {why}"
_NO_SECRET, _NO_NODE = "it didn't prove that it knows this job's secret", "it is no node of this job"
_OUT_OF_RANGE = "node rank {rank} ({host}) is out of range: of {num_nodes} nodes, ranks are 0 to {last}"
_TOO_LATE = "node {peer.rank} ({peer.host}) came too late: the run has begun with "
_OF_OTHERS = _TOO_LATE + "{num_nodes} nodes"
_TAKEN = (
    _TOO_LATE + "{first.host} as node {peer.rank}\n"
    "    for another run at the same time choose another port, on all its nodes: --rendezvous HOST:PORT"
)


class Listener:
    """The connections of node 0, from the port to gRPC."""

    def __init__(
        self,
        address: str,
        port: int,
        num_nodes: int,
        handshake_s: float,
        on_refused: Callable[[str], None] = lambda address: None,
    ) -> None:
        """Opens the port.

        Args:
            address: to listen on.
            num_nodes: how many nodes connect.
            handshake_s: how long a stranger may stay.
            on_refused: called with the address of one whose connection gRPC has closed.

        Raises:
            OSError: the port is taken, or the address is another machine's.
        """
        self._limit = MAX_STRANGERS + num_nodes
        self._handshake_s = handshake_s
        self._on_refused = on_refused
        self._socket = socket.create_server(
            (address, port), family=family_of(address), backlog=_BACKLOG, dualstack_ipv6=address == "::"
        )
        self._socket.setblocking(False)
        self.port: int = self._socket.getsockname()[1]
        self._connections: set[asyncio.Task[None]] = set()
        self._strangers: dict[asyncio.Task[None], asyncio.TimerHandle] = {}
        """Connections that have proved nothing, with the timer that ends them; the oldest comes first."""
        self._by_name: dict[str, asyncio.Task[None]] = {}
        """The tasks by the name under which gRPC knows a connection."""
        self._directory = Path(tempfile.mkdtemp(prefix="gpurun-"))
        self._directory_fd = os.open(self._directory, os.O_PATH | os.O_CLOEXEC)
        self._inner = self._directory_fd

    @property
    def inner_place(self) -> str:
        """The path at which gRPC has to listen; by way of /proc: a socket's path may have 107 bytes only."""
        return f"unix:/proc/self/fd/{self._directory_fd}/grpc"

    async def run(self) -> None:
        """Accepts connections until it is cancelled; gRPC listens already."""
        self._hide_inner()
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, origin = await loop.sock_accept(self._socket)
            except OSError:  # no descriptor left, for one
                self._end_oldest()
                await asyncio.sleep(_ACCEPT_AGAIN_S)
                continue
            self._begin(connection, origin[0])

    def _hide_inner(self) -> None:
        """Removes the socket's name: no one else can connect to it, and nothing stays behind."""
        self._inner = os.open(self._directory / "grpc", os.O_PATH | os.O_CLOEXEC)
        (self._directory / "grpc").unlink()
        self._directory.rmdir()

    def admit(self, name: str) -> None:
        """The other end of the connection with this name has proved that it is a node."""
        if name in self._by_name:
            self._forget(self._by_name[name])

    async def close(self) -> None:
        """Ends all connections, and closes the port."""
        self._socket.close()
        for connection in self._connections:
            connection.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)
        for fd in {self._directory_fd, self._inner}:
            os.close(fd)

    def _begin(self, outer: socket.socket, address: str) -> None:
        connection = asyncio.create_task(self._carry(outer))
        connection.add_done_callback(self._connections.discard)
        connection.add_done_callback(lambda _: self._report_stranger(connection, address))
        connection.add_done_callback(self._forget)
        connection.add_done_callback(lambda _: outer.close())  # which may be cancelled before it begins
        self._connections.add(connection)
        end_it = asyncio.get_running_loop().call_later(self._handshake_s, connection.cancel)
        self._strangers[connection] = end_it
        num_nodes_here = len(self._connections) - len(self._strangers)
        if len(self._strangers) > self._limit - num_nodes_here:
            self._end_oldest()

    def _report_stranger(self, connection: asyncio.Task[None], address: str) -> None:
        if connection in self._strangers and not connection.cancelled():
            self._on_refused(address)

    def _forget(self, connection: asyncio.Task[None]) -> None:
        """Takes a connection that is no stranger, or no longer there, off the list."""
        if end_it := self._strangers.pop(connection, None):
            end_it.cancel()

    def _end_oldest(self) -> None:
        for stranger in list(self._strangers)[:1]:
            self._forget(stranger)
            stranger.cancel()

    async def _carry(self, outer: socket.socket) -> None:
        """Carries bytes both ways until either end closes the connection."""
        loop = asyncio.get_running_loop()
        with contextlib.suppress(OSError):
            outer.setblocking(False)
            outer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            first = await loop.sock_recv(outer, _PORTION_BYTES)
            with socket.socket(socket.AF_UNIX) as inner:
                name = await self._connect(inner)
                try:
                    await loop.sock_sendall(inner, first)
                    await _first_of(_copy(outer, inner), _copy(inner, outer))
                finally:
                    del self._by_name[name]

    async def _connect(self, inner: socket.socket) -> str:
        """Connects to gRPC; the name under which it knows the connection."""
        inner.setblocking(False)
        inner.bind("")  # the kernel gives it a name of its own. Source: unix(7), autobind feature
        await asyncio.get_running_loop().sock_connect(inner, f"/proc/self/fd/{self._inner}")
        name = f"unix-abstract:{inner.getsockname()[1:].decode()}"
        task = asyncio.current_task()
        assert task is not None
        self._by_name[name] = task
        return name


async def _copy(source: socket.socket, target: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    while content := await loop.sock_recv(source, _PORTION_BYTES):
        await loop.sock_sendall(target, content)


async def _first_of(*copies: Coroutine[None, None, None]) -> None:
    """Returns when one has ended, and ends the other."""
    tasks = [asyncio.create_task(copy) for copy in copies]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class Server(LinkEnd):
    """Node 0's end of all streams."""

    def __init__(self, options: LinkOptions, report: Reporter) -> None:
        super().__init__(options, report)
        self.port = options.port
        self._sessions: dict[str, Peer] = {}
        self._end: End | None = None
        self._admit: Callable[[str], None]
        """Admits the connection of this name, which is a node's."""
        self._refusals: set[str] = set()
        """The refusals that were reported."""

    async def run(self) -> None:
        """Serves until it is cancelled."""
        options = self.options
        address = options.listen or ("::" if ":" in options.address else "0.0.0.0")
        try:
            listener = Listener(address, options.port, options.num_nodes, HANDSHAKE_S, self._refuse_address)
        except OSError as error:
            self.report(NotConnected(_why_not_served(error, options)))
            return
        self._admit, self.port = listener.admit, listener.port
        server = self._server_at(listener.inner_place)
        await server.start()
        accepting = asyncio.create_task(listener.run())
        self.report(Connected())
        try:
            await self.watch()
            await asyncio.Event().wait()
        finally:
            accepting.cancel()
            await server.stop(None)
            await listener.close()

    def _refuse_address(self, address: str) -> None:
        why = _NO_NODE if self.options.identity is None else _NO_SECRET
        self._report_refusal(_REFUSED.format(address=address, why=why))

    def _report_refusal(self, text: str) -> None:
        """Reports a refusal to node 0's user, until the run ends: each once, and not many."""
        if text not in self._refusals and len(self._refusals) < MOST_REFUSALS and not self.ended:
            self._refusals.add(text)
            self.report(Arrived(LogText(text)))

    def _server_at(self, place: str) -> Any:
        server = grpc.aio.server(
            options=grpc_options(self.options), maximum_concurrent_rpcs=2 * self.options.num_nodes + 16
        )
        handler = grpc.stream_stream_rpc_method_handler(self._exchange)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {METHOD: handler}),))
        if (own := self.options.identity) is None:
            server.add_insecure_port(place)
        else:
            proof = grpc.ssl_server_credentials([(own.key, own.certificate)], own.authority, True)
            server.add_secure_port(place, proof)
        return server

    async def _exchange(self, requests: object, context: Any) -> None:
        """One stream of another node."""
        if self.options.identity is not None:
            self._admit(context.peer())  # it knows the secret, whatever else is wrong with it
        try:
            peer = self._peer_of(dict(context.invocation_metadata()))
        except (KeyError, ValueError) as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"node 0 refused this node: {error}")
            return
        self._admit(context.peer())
        try:
            await carry(
                peer,
                context.read,
                context.write,
                lambda payload: self._deliver(peer, payload),
                lambda: self._heard(peer),
            )
        except ValueError as error:
            if self.options.identity is not None:
                self.report(NotConnected(f"node {peer.rank} ({peer.host}): {error}"))
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        finally:
            peer.has_left = self.ended
            if self.peers.get(peer.rank) is peer and not peer.is_turned_away:
                self.silence.close(peer.rank, time.monotonic())

    def _peer_of(self, metadata: dict[str, str]) -> Peer:
        session, rank, host = metadata["session"], int(metadata["rank"]), metadata["host"]
        if session in self._sessions:
            self._sessions[session].has_left = False
            return self._sessions[session]
        if len(session) > 64 or len(host) > 256:
            raise ValueError("it names itself at too great a length")
        if not 0 <= rank < (num_nodes := self.options.num_nodes):
            why = _OUT_OF_RANGE.format(rank=rank, host=host, num_nodes=num_nodes, last=num_nodes - 1)
            self._report_refusal(f"a node was refused: {why}")
            raise ValueError(f"{why}\n    start every node with the same job file, and its own --node-rank")
        peer = self._sessions[session] = Peer(rank, host)
        self.peers.setdefault(rank, peer)
        self._turn_away_if_late(peer)
        if self._end is not None and not peer.is_turned_away:
            peer.put(self._end)
        return peer

    def begin(self, hosts: tuple[str, ...]) -> None:
        super().begin(hosts)
        for peer in self._sessions.values():
            self._turn_away_if_late(peer)

    def _turn_away_if_late(self, peer: Peer) -> None:
        """Ends one that is none of the nodes, with the reason; the first of its rank may be started again."""
        first = self.peers[peer.rank]
        if not self.hosts or peer.is_turned_away:
            return
        if peer.rank >= len(self.hosts):
            self.silence.heard_s.pop(peer.rank, None)
            why = _OF_OTHERS.format(peer=peer, num_nodes=len(self.hosts))
        elif first is not peer and self.silence.is_heard(peer.rank, time.monotonic()):
            why = _TAKEN.format(peer=peer, first=first)
        else:
            return
        peer.is_turned_away = True
        peer.put(End(MachineError.exit_code, why))

    def _heard(self, peer: Peer) -> None:
        if self.peers.get(peer.rank) is peer and not peer.is_turned_away:
            self.silence.hear(peer.rank, time.monotonic())

    def _deliver(self, peer: Peer, payload: bytes) -> None:
        if peer.is_turned_away:
            return
        message = self.message(payload)
        if isinstance(message, End):
            self.announce(message)
        else:
            self.report(Arrived(message))

    def send(self, rank: int, message: Message) -> None:
        """Sends a message; one to node 0 itself comes after all that have arrived."""
        if rank == 0:
            self.report(Arrived(message))
        elif rank in self.peers:
            self.peers[rank].put(message)

    def announce(self, end: End) -> None:
        """Reports to all nodes how the run ends; only the first announcement counts."""
        if self._end is None:
            self._end, self.ended = end, True
            self.report(end)
            for peer in self._sessions.values():
                peer.put(end)

    @property
    def is_settled(self) -> bool:
        nodes = [peer for peer in self._sessions.values() if not peer.is_turned_away]
        settled = [peer.has_left or peer.lane.is_settled for peer in nodes]
        return len(settled) >= self.awaited_others and all(settled)


def _why_not_served(error: OSError, options: LinkOptions) -> str:
    """Why node 0 can't listen, and what to do about it."""
    if error.errno == errno.EADDRINUSE:
        return (
            f"port {options.port} of node 0 ({options.own_host}) is in use by another program\n"
            "    if that is node 0 of this job, give this node another --node-rank\n"
            f"    else choose another port, on all nodes: --rendezvous {options.host}:{options.port + 1}"
        )
    if error.errno == errno.EADDRNOTAVAIL:
        return (
            f"this is node 0, so the rendezvous host has to be this machine; but {options.host} "
            f"({options.address}) is not an address of {options.own_host}\n"
            "    only one node has --node-rank 0, the one that --rendezvous names"
        )
    return f"node 0 can't listen on {options.host}:{options.port}: {error}"
