"""Random and crafted connections to the port of node 0: they change nothing."""

import os
import random
import socket
import time
from itertools import chain, repeat
from pathlib import Path

from gpurun.launcher.nodes.messages import LogText
from gpurun.launcher.nodes.node_link import LinkLoop, NodeLink
from gpurun.launcher.nodes.transport.credentials import identity_from
from gpurun.launcher.nodes.transport.exchange import LinkOptions
from tests.strangers import CRAFTED, approach, noise

WAIT_S = 30.0


def fuzz_messages(num_random: int = 10_000, num_crafted: int = 1_000, *, least_s: float = 0) -> str:
    """Random and crafted connections to the port of node 0, while a node is connected to it.

    In less time than `least_s` seconds they are followed by as many others, and so on.
    """
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = int(server.getsockname()[1])
    chance, loop = random.Random(1), LinkLoop()
    identity = identity_from(b"of the nodes that are fuzzed")
    place = (2, "localhost", "127.0.0.1", port, "127.0.0.1")
    first, second = (
        NodeLink(LinkOptions(rank, *place, "host", WAIT_S, 10.0, identity), loop) for rank in (0, 1)
    )
    try:
        assert second.await_connected(WAIT_S)
        before, began_s, slowest_s, num_rounds = _resources(), time.monotonic(), 0.0, 0
        while not num_rounds or time.monotonic() - began_s < least_s:
            crafted = (CRAFTED[number % len(CRAFTED)] for number in range(num_crafted))
            for number, how in enumerate(chain(repeat(noise, num_random), crafted)):
                approach(port, how, chance)
                if number % 100 == 0:
                    slowest_s = max(slowest_s, _round_trip_s(first, second, str(number)))
            num_rounds += 1
        took_s, after = time.monotonic() - began_s, _resources()
    finally:
        second.close()
        first.close()
        loop.close()
    return (
        f"{num_rounds * num_random} random and {num_rounds * num_crafted} crafted connections in "
        f"{took_s:.0f} s, no message from any; messages between the nodes took at most "
        f"{1000 * slowest_s:.0f} ms. Before and after: "
        f"{before[0]} and {after[0]} MB of memory, {before[1]} and {after[1]} open files."
    )


def _round_trip_s(first: NodeLink, second: NodeLink, text: str) -> float:
    """Seconds until a message has come; nothing else may."""
    started_s = time.monotonic()
    second.send(0, LogText(text))
    assert first.poll(WAIT_S) == [LogText(text)]
    return time.monotonic() - started_s


def _resources() -> tuple[int, int]:
    """Resident memory of this process in MB, and its open files."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGESIZE") >> 20, len(os.listdir("/proc/self/fd"))
