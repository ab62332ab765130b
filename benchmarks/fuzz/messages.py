"""Random and crafted connections to the port of node 0: they change nothing."""

import ctypes
import os
import random
import time
from itertools import chain, repeat
from pathlib import Path

from gpurun.launcher.nodes.messages import LogText, Message
from gpurun.launcher.nodes.node_link import LinkLoop, NodeLink
from gpurun.launcher.nodes.transport.credentials import identity_from
from gpurun.launcher.nodes.transport.exchange import LinkOptions
from tests.integration.command import free_port
from tests.strangers import CRAFTED, REFUSED, approach, noise

WAIT_S = 30.0


def fuzz_messages(num_random: int = 10_000, num_crafted: int = 1_000, *, least_s: float = 0) -> str:
    """Random and crafted connections to the port of node 0, while a node is connected to it.

    In less time than `least_s` seconds they are followed by as many others, and so on. Node 0 reports once
    that connections from their address were refused.
    """
    port = free_port()
    chance, loop = random.Random(1), LinkLoop()
    identity = identity_from(b"of the nodes that are fuzzed")
    place = (2, "localhost", "127.0.0.1", port, "127.0.0.1")
    first, second = (
        NodeLink(LinkOptions(rank, *place, "host", WAIT_S, 10.0, identity), loop) for rank in (0, 1)
    )
    try:
        assert second.await_connected(WAIT_S)
        before, began_s, slowest_s, num_rounds = _resources(), time.monotonic(), 0.0, 0
        reports: list[Message] = []
        while not num_rounds or time.monotonic() - began_s < least_s:
            crafted = (CRAFTED[number % len(CRAFTED)] for number in range(num_crafted))
            for number, how in enumerate(chain(repeat(noise, num_random), crafted)):
                approach(port, how, chance)
                if number % 100 == 0:
                    slowest_s = max(slowest_s, _round_trip_s(first, second, str(number), reports))
            num_rounds += 1
        _round_trip_s(first, second, "the last one", reports)
        assert reports == [REFUSED], reports
        took_s, resident_mb, after = time.monotonic() - began_s, _resident_mb(), _resources()
    finally:
        second.close()
        first.close()
        loop.close()
    return (
        f"{num_rounds * num_random} random and {num_rounds * num_crafted} crafted connections in "
        f"{took_s:.0f} s, no message from any, and one report of all that were refused; messages between "
        f"the nodes took at most {1000 * slowest_s:.0f} ms. Before and after: "
        f"{before[0]} and {after[0]} MB of memory, without {resident_mb - after[0]} MB that were free and "
        f"that glibc kept for later, {before[1]} and {after[1]} open files."
    )


def _round_trip_s(first: NodeLink, second: NodeLink, text: str, reports: list[Message]) -> float:
    """Seconds until a message has come; with it, only the report of refused connections may, and only once.

    Args:
        reports: what has come besides the messages so far; extended.
    """
    started_s, message = time.monotonic(), LogText(text)
    second.send(0, message)
    arrived: list[Message] = []
    while message not in arrived:
        new = first.poll(WAIT_S)
        assert new, f"message {text!r} did not arrive within {WAIT_S:.0f} s"
        arrived += new
    took_s = time.monotonic() - started_s
    arrived.remove(message)
    reports += arrived
    assert reports in ([], [REFUSED]), reports
    return took_s


def _resources() -> tuple[int, int]:
    """Memory of this process in MB, without what glibc can return to the kernel, and its open files.

    Every thread of gRPC has a heap of its own, which keeps the pages that many connections once needed.
    Source: mallopt(3), M_ARENA_MAX; malloc_trim(3)
    """
    ctypes.CDLL(None).malloc_trim(0)
    return _resident_mb(), len(os.listdir("/proc/self/fd"))


def _resident_mb() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE") >> 20
