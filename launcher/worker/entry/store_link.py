"""A node's connection to the store at node 0: mailboxes, heartbeats, and one announcement that ends all.

Started as `python -P -m gpurun.launcher.worker.entry.store_link OPTIONS` with a socket as file descriptor 3.
A call to the store may block for as long as the network is down. The command never blocks: it only talks to
this process, and treats its silence as that of the network.
"""

import contextlib
import errno
import os
import select
import socket
import sys
import time
from datetime import timedelta
from typing import NoReturn

import msgspec
from torch._C._distributed_c10d import TCPStore
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from gpurun.launcher.machine.network import family_of
from gpurun.launcher.machine.process_tree import die_with
from gpurun.launcher.nodes.messages import (
    PULSE_S,
    Announce,
    Connected,
    ConnectionLost,
    Heartbeats,
    JoinRendezvous,
    LinkOptions,
    LinkReport,
    LinkRequest,
    Mail,
    Refused,
    RendezvousDone,
    Send,
    decode_end,
)
from gpurun.launcher.processes.channel import STREAM_FD, Channel

_FOR_EVER_S = 10**9
_CONNECT_S = 5.0
"""What one attempt to reach node 0 may take; with dropped packets it would last for minutes."""
_NO_END = b"-"
_END_KEY = "end"
_LINKS, _HEARD = "links", "heard"
"""How many nodes are connected, and how many of them know how the run ended."""


LinkChannel = Channel[LinkReport, LinkRequest]


class StoreLink:
    """Carries out the command's requests, and reports what the other nodes do."""

    def __init__(self, channel: LinkChannel, options: LinkOptions, store: TCPStore) -> None:
        self._channel, self._options, self._store = channel, options, store
        self._num_nodes = 0
        """0 until all nodes have joined."""
        self._mails_read = 0
        self._ended = False
        self._next_pulse_s = time.monotonic()
        self._handler: object = None
        store.add(_LINKS, 1)

    def serve(self) -> None:
        """Returns when the command ends the connection."""
        stream = self._channel.stream
        while True:
            pause_s = max(0.0, self._next_pulse_s - time.monotonic())
            requests: list[LinkRequest] | None = []
            if select.select([stream], [], [], pause_s)[0]:
                requests = self._channel.receive()
            if requests is None:
                return
            self._pulse_if_due()
            for request in requests:
                if not self._carry_out(request):
                    return
                self._pulse_if_due()  # a part of a file may take seconds on a slow link

    def _carry_out(self, request: LinkRequest) -> bool:
        """Whether there is more to come."""
        if isinstance(request, Send):
            number = self._store.add(_mailbox(request.to), 1)
            self._store.set(_mail(request.to, number), request.payload)  # type: ignore[arg-type]  # bytes do as well
        elif isinstance(request, Announce):
            self._store.compare_set(_END_KEY, _NO_END.decode(), request.payload.hex())
        elif isinstance(request, JoinRendezvous):
            self._meet(request.num_nodes)
        else:
            self._linger(request.linger_s)
            return False
        return True

    def _meet(self, num_nodes: int) -> None:
        """torch's rendezvous: it returns on all nodes, or on none.

        It considers a node dead whose last heartbeat is older than an hour by the clocks of two different
        hosts, unless that limit is never reached. Which nodes are alive is decided by counting heartbeats.
        """
        options = self._options
        host = f"[{options.address}]" if ":" in options.address else options.address
        parameters = RendezvousParameters(
            "c10d",
            f"{host}:{options.port}",
            options.run_id,
            num_nodes,
            num_nodes,
            options.own_address,
            is_host=False,
            keep_alive_max_attempt=_FOR_EVER_S // 5,
            join_timeout=round(options.join_timeout_s),
        )
        self._handler = get_rendezvous_handler(parameters)  # kept: it holds the store's connection
        info = self._handler.next_rendezvous()
        self._store.add(_beat(options.rank), 1)
        self._store.wait([_beat(rank) for rank in range(num_nodes)])
        self._num_nodes = num_nodes
        self._channel.send(RendezvousDone(info.world_size))

    def _pulse_if_due(self) -> None:
        if time.monotonic() >= self._next_pulse_s:
            self._pulse()
            self._next_pulse_s = time.monotonic() + PULSE_S

    def _pulse(self) -> None:
        count = self._store.add(_mailbox(self._options.rank), 0)
        self._deliver(count)
        if self._num_nodes:
            self._store.add(_beat(self._options.rank), 1)
            counts = self._store.multi_get([_beat(rank) for rank in range(self._num_nodes)])
            self._report_if_read(Heartbeats(tuple(int(count) for count in counts)))
        if not self._ended and (announced := self._store.get(_END_KEY)) != _NO_END:
            self._ended = True
            self._store.add(_HEARD, 1)
            self._channel.send(decode_end(bytes.fromhex(announced.decode())))

    def _linger(self, limit_s: float) -> None:
        """Node 0 ends last: it holds the store in which the others read how the run ended."""
        deadline = time.monotonic() + limit_s
        while self._options.rank == 0 and time.monotonic() < deadline:
            self._pulse()
            if self._store.add(_HEARD, 0) >= self._store.add(_LINKS, 0):
                return
            time.sleep(PULSE_S / 2)

    def _deliver(self, count: int) -> None:
        """Delivers in order: waits for a message that has a number but has not arrived."""
        while self._mails_read < count:
            key = _mail(self._options.rank, self._mails_read + 1)
            if not self._store.check([key]):
                return
            payload = self._store.get(key)
            self._store.delete_key(key)
            self._mails_read += 1
            self._channel.send(Mail(payload))

    def _report_if_read(self, report: LinkReport) -> None:
        """Drops the report while the command is busy: old heartbeats are of no use."""
        if select.select([], [self._channel.stream], [], 0)[1]:
            self._channel.send(report)


def open_store(options: LinkOptions) -> TCPStore:
    """Node 0's store, or a connection to it as soon as it is there.

    Raises:
        OSError: node 0 can't listen there.
        RuntimeError: it could not be reached in time.
    """
    timeout = timedelta(seconds=options.join_timeout_s)
    if options.rank > 0:
        await_listener(options)
        return TCPStore(options.address, options.port, is_master=False, timeout=timeout)
    place = (options.listen, options.port)
    listener = socket.create_server(place, family=family_of(options.address), backlog=1024)
    store = TCPStore(
        options.address,
        options.port,
        is_master=True,
        wait_for_workers=False,
        timeout=timeout,
        master_listen_fd=listener.detach(),
    )
    store.set(_END_KEY, _NO_END.decode())
    return store


def await_listener(options: LinkOptions) -> None:
    """Returns as soon as node 0 listens.

    torch's own client retries less and less often: of three that waited for a node 0 that started after 40 s,
    one was connected 24 s later.

    Raises:
        TimeoutError: node 0 doesn't within the time that nodes wait for each other.
    """
    deadline = time.monotonic() + options.join_timeout_s
    while (left_s := deadline - time.monotonic()) > 0:
        with contextlib.suppress(OSError):
            socket.create_connection((options.address, options.port), timeout=min(left_s, _CONNECT_S)).close()
            return
        time.sleep(PULSE_S)
    raise TimeoutError


def why_refused(error: OSError | RuntimeError, options: LinkOptions) -> str:
    """Why there is no store, and what to do about it."""
    place = f"{options.host}:{options.port}"
    if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
        return (
            f"port {options.port} of node 0 ({options.own_host}) is in use by another program\n"
            f"    choose another one, on all nodes: --rendezvous {options.host}:{options.port + 1}"
        )
    if isinstance(error, OSError) and error.errno == errno.EADDRNOTAVAIL:
        return (
            f"this is node 0, so the rendezvous host has to be this machine; but {options.host} "
            f"({options.address}) is not an address of {options.own_host}"
        )
    if options.rank == 0:
        return f"node 0 can't listen on {place}: {error}"
    return (
        f"node {options.rank} ({options.own_host}) didn't reach node 0 at {place} within "
        f"{options.join_timeout_s:g} s\n"
        "    check that gpurun is running there as node 0, and that no firewall blocks the port"
    )


def _mailbox(rank: int) -> str:
    return f"mail/{rank}"


def _mail(rank: int, number: int) -> str:
    return f"mail/{rank}/{number}"


def _beat(rank: int) -> str:
    return f"beat/{rank}"


def serve(options: LinkOptions, channel: LinkChannel) -> None:
    """Connects, and serves until the command or the network ends it."""
    try:
        store = open_store(options)
    except (OSError, RuntimeError) as error:
        channel.send(Refused(why_refused(error, options)))
        return
    channel.send(Connected())
    try:
        StoreLink(channel, options, store).serve()
    except ConnectionError:
        raise  # the command is gone
    except Exception as error:  # the store's and torch's rendezvous' errors have no common class
        channel.send(ConnectionLost(str(error).partition("\n")[0]))


def main() -> NoReturn:
    """Serves until the command or the network ends it, then exits without destroying torch's objects."""
    options = msgspec.json.decode(sys.argv[1], type=LinkOptions)
    die_with(options.parent)
    with contextlib.suppress(ConnectionError):
        serve(options, Channel(socket.socket(fileno=STREAM_FD), LinkRequest))
    os._exit(0)


if __name__ == "__main__":
    main()
