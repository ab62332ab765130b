"""Another node's end of its stream."""

import asyncio
import secrets
import time
from typing import Any

import grpc
import grpc.aio

from gpurun.launcher.nodes.messages import End, Message
from gpurun.launcher.nodes.transport.exchange import (
    METHOD,
    SERVICE,
    Arrived,
    Connected,
    LinkOptions,
    Lost,
    NotConnected,
    Peer,
    Report,
    Reporter,
    Streams,
    carry,
    grpc_options,
)

_RETRY_S = 0.1
_REFUSED = (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION)
_OTHER_SECRET = (
    "node 0 at {o.host}:{o.port} does not have the secret of node {o.rank} ({o.own_host})\n"
    "    copy ~/.config/gpurun/secret from one node to the others, or set GPURUN_SECRET on all to one value"
)
_ALL_OR_NONE = "    give --insecure on all nodes or on none; or another program listens on that port"
_NO_TLS = (
    "node 0 at {o.host}:{o.port} does without a secret, and node {o.rank} ({o.own_host}) has one\n"
    + _ALL_OR_NONE
)
_WANTS_SECRET = (
    "node 0 at {o.host}:{o.port} closes connections without a secret, and node {o.rank} ({o.own_host}) was "
    "started with --insecure\n" + _ALL_OR_NONE
)
_CLOSED_TIMES = 30
"""In a row, every 0.1 s: it is no coincidence that node 0 closes each connection at once."""
_NOT_REACHED = (
    "node {o.rank} ({o.own_host}) didn't reach node 0 at {o.host}:{o.port} within {o.join_timeout_s:g} s\n"
    "    check that gpurun is running there as node 0, that no firewall blocks the port, and that --insecure "
    "is given on all nodes or on none"
)


class Client(Streams):
    """Another node's end of its stream."""

    def __init__(self, options: LinkOptions, report: Reporter) -> None:
        super().__init__(options, report)
        self._peer = Peer(0, options.host)
        self._session = secrets.token_hex(16)
        self._connected = False
        self._num_closed = 0
        self._deadline_s = time.monotonic() + options.join_timeout_s

    def peer_of(self, rank: int) -> Peer:
        return self._peer

    async def run(self) -> None:
        """Keeps a stream to node 0 until it is cancelled, or node 0 is lost."""
        watching = asyncio.create_task(self.watch())
        try:
            async with self._channel() as channel:
                exchange = channel.stream_stream(f"/{SERVICE}/{METHOD}")
                while (
                    verdict := self._judge(*await self._exchange(exchange))
                ) is None and not watching.done():
                    await asyncio.sleep(_RETRY_S)
            if verdict is not None:
                self.report(verdict)
        finally:
            watching.cancel()

    def _channel(self) -> Any:
        address = self.options.address
        place = (
            f"ipv6:[{address}]:{self.options.port}"
            if ":" in address
            else f"ipv4:{address}:{self.options.port}"
        )
        if (own := self.options.identity) is None:
            return grpc.aio.insecure_channel(place, options=grpc_options(self.options))
        proof = grpc.ssl_channel_credentials(own.authority, own.key, own.certificate)
        return grpc.aio.secure_channel(place, proof, options=grpc_options(self.options))

    async def _exchange(self, exchange: Any) -> tuple[Any, str]:
        """One stream; with what status it ended, and why."""
        metadata = (
            ("session", self._session),
            ("rank", str(self.options.rank)),
            ("host", self.options.own_host),
        )
        call = exchange(metadata=metadata)
        try:
            await carry(self._peer, call.read, call.write, self._deliver, self._heard)
            return await call.code(), await call.details()
        except grpc.aio.AioRpcError as error:
            return error.code(), error.details() or ""
        except asyncio.InvalidStateError:  # the stream broke while it was written to
            return await call.code(), await call.details()
        except ValueError as error:
            return grpc.StatusCode.INVALID_ARGUMENT, f"node 0 ({self.options.host}): {error}"
        finally:
            call.cancel()
            self.silence.close(0, time.monotonic())

    def _judge(self, status: Any, details: str) -> Report | None:
        """The meaning of the end of a stream; `None`: it is worth connecting again."""
        if status in _REFUSED:
            return NotConnected(details)
        if self.ended:
            return Lost(0, self.host_of(0), "it has ended")
        if self._connected:
            refused = "Connection refused" in details
            return Lost(0, self.host_of(0), "it refuses connections", is_running=False) if refused else None
        if (text := self._refusal(details)) is not None:
            return NotConnected(text.format(o=self.options))
        if time.monotonic() > self._deadline_s:
            return NotConnected(_NOT_REACHED.format(o=self.options))
        return None

    def _refusal(self, details: str) -> str | None:
        """The meaning of node 0's refusal to let this node connect; `None`: perhaps it isn't there yet."""
        if "SSL_ERROR_SSL" in details:
            return _NO_TLS if "WRONG_VERSION_NUMBER" in details else _OTHER_SECRET
        is_closed = self.options.identity is None and "Socket closed" in details
        self._num_closed = self._num_closed + 1 if is_closed else 0
        return _WANTS_SECRET if self._num_closed >= _CLOSED_TIMES else None

    def _heard(self) -> None:
        self.silence.hear(0, time.monotonic())
        if not self._connected:
            self._connected = True
            self.report(Connected())

    def _deliver(self, payload: bytes) -> None:
        message = self.message(payload)
        if isinstance(message, End):
            self.ended = True
            self.report(message)
        else:
            self.report(Arrived(message))

    def send(self, rank: int, message: Message) -> None:
        """Sends a message to node 0."""
        self._peer.put(message)

    def announce(self, end: End) -> None:
        """Asks node 0 to notify all nodes of how the run ends."""
        self._peer.put(end)

    @property
    def is_settled(self) -> bool:
        return self._peer.lane.is_settled
