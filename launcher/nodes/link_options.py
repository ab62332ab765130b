"""What a node's link is started with."""

import msgspec

PULSE_S = 0.1
"""Between two heartbeats, and the longest that a message lies in its mailbox."""


class LinkOptions(msgspec.Struct, frozen=True):
    """Everything that `gpurun.launcher.worker.entry.link_process` needs; its one argument, as JSON."""

    parent: int
    """Process that it dies with."""
    rank: int
    """Node rank; node 0 has the store."""
    host: str
    """The rendezvous host as the user calls it."""
    address: str
    """Its IP address."""
    port: int
    listen: str
    """Address that node 0 listens on; empty: all of them."""
    own_host: str
    own_address: str
    run_id: str
    join_timeout_s: float
