"""Node 0's end of the streams."""

import asyncio
import errno
import time
from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio

from gpurun.launcher.nodes.messages import End, Message
from gpurun.launcher.nodes.transport.exchange import (
    HANDSHAKE_S,
    METHOD,
    SERVICE,
    Arrived,
    Connected,
    LinkOptions,
    Peer,
    Refused,
    Reporter,
    Streams,
    carry,
    grpc_options,
)
from gpurun.launcher.nodes.transport.listener import Listener


class Server(Streams):
    """Node 0's end of all streams."""

    def __init__(self, options: LinkOptions, report: Reporter) -> None:
        super().__init__(options, report)
        self.port = options.port
        self._sessions: dict[str, Peer] = {}
        self._ranks: dict[int, Peer] = {}
        """The first session of each rank."""
        self._end: End | None = None
        self._admit: Callable[[str], None]
        """To call with the name of a connection that is a node's."""

    def peer_of(self, rank: int) -> Peer:
        return self._ranks[rank]

    async def run(self) -> None:
        """Serves until it is cancelled."""
        options = self.options
        address = options.listen or ("::" if ":" in options.address else "0.0.0.0")
        try:
            listener = Listener(address, options.port, options.num_nodes, HANDSHAKE_S)
        except OSError as error:
            self.report(Refused(_why_not_served(error, options)))
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
        try:
            peer = self._peer_of(dict(context.invocation_metadata()))
        except (KeyError, ValueError) as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"not a node of gpurun: {error}")
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
                self.report(Refused(f"node {peer.rank} ({peer.host}): {error}"))
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        finally:
            peer.has_left = self.ended
            if self._ranks.get(peer.rank) is peer:
                self.silence.close(peer.rank, time.monotonic())

    def _peer_of(self, metadata: dict[str, str]) -> Peer:
        session, rank, host = metadata["session"], int(metadata["rank"]), metadata["host"]
        if session in self._sessions:
            self._sessions[session].has_left = False
            return self._sessions[session]
        if not 0 <= rank < self.options.num_nodes or len(session) > 64 or len(host) > 256:
            raise ValueError(f"node rank {rank} of {self.options.num_nodes}")
        peer = self._sessions[session] = Peer(rank, host)
        self._ranks.setdefault(rank, peer)
        if self._end is not None:
            peer.put(self._end)
        return peer

    def _heard(self, peer: Peer) -> None:
        if self._ranks.get(peer.rank) is peer:
            self.silence.hear(peer.rank, time.monotonic())

    def _deliver(self, peer: Peer, payload: bytes) -> None:
        message = self.message(payload)
        if isinstance(message, End):
            self.announce(message)
        else:
            self.report(Arrived(message))

    def send(self, rank: int, message: Message) -> None:
        """Sends a message; one to node 0 itself comes after all that have arrived."""
        if rank == 0:
            self.report(Arrived(message))
        elif rank in self._ranks:
            self._ranks[rank].put(message)

    def announce(self, end: End) -> None:
        """Reports to all nodes how the run ends; only the first announcement counts."""
        if self._end is None:
            self._end, self.ended = end, True
            self.report(end)
            for peer in self._sessions.values():
                peer.put(end)

    @property
    def is_settled(self) -> bool:
        settled = [peer.has_left or peer.lane.is_settled for peer in self._sessions.values()]
        return len(settled) >= self.awaited_others and all(settled)


def _why_not_served(error: OSError, options: LinkOptions) -> str:
    """Why node 0 can't listen, and what to do about it."""
    if error.errno == errno.EADDRINUSE:
        return (
            f"port {options.port} of node 0 ({options.own_host}) is in use by another program\n"
            f"    choose another one, on all nodes: --rendezvous {options.host}:{options.port + 1}"
        )
    if error.errno == errno.EADDRNOTAVAIL:
        return (
            f"this is node 0, so the rendezvous host has to be this machine; but {options.host} "
            f"({options.address}) is not an address of {options.own_host}"
        )
    return f"node 0 can't listen on {options.host}:{options.port}: {error}"
