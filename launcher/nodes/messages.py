"""Messages of a job on several nodes: between a node's command and its link, and between nodes."""

from collections.abc import Mapping
from typing import Any

import msgspec

from gpurun.launcher.inspect.snapshot import RankSnapshot
from gpurun.launcher.plan.nodes import Node
from gpurun.launcher.processes.protocol import StartRequest

PULSE_S = 0.1
"""The time between two heartbeats, and the longest that a message waits in its mailbox."""


class LinkOptions(msgspec.Struct, frozen=True):
    """Everything that `gpurun.launcher.worker.entry.store_link` needs; its one argument, as JSON."""

    parent: int
    """The process whose end ends it."""
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


class Send(msgspec.Struct, frozen=True, tag=True):
    """Put a message into a node's mailbox; its number there orders it among all nodes' messages."""

    to: int
    payload: bytes


class Announce(msgspec.Struct, frozen=True, tag=True):
    """Announce how the run ends; only the first announcement of all nodes counts."""

    payload: bytes


class JoinRendezvous(msgspec.Struct, frozen=True, tag=True):
    """Go through torch's rendezvous; heartbeats begin with its end."""

    num_nodes: int


class Quit(msgspec.Struct, frozen=True, tag=True):
    """No more requests follow: end."""

    linger_s: float
    """How long node 0 keeps its store at most, so that the others can read how the run ended."""


LinkRequest = Send | Announce | JoinRendezvous | Quit


class Connected(msgspec.Struct, frozen=True, tag=True):
    """The store is reachable."""


class Refused(msgspec.Struct, frozen=True, tag=True):
    """The store can't be reached or created."""

    text: str


class RendezvousDone(msgspec.Struct, frozen=True, tag=True):
    """All nodes have come through torch's rendezvous."""

    num_nodes: int


class Mail(msgspec.Struct, frozen=True, tag=True):
    """A message for this node. Messages come in the order of the store's counter."""

    payload: bytes


class Heartbeats(msgspec.Struct, frozen=True, tag=True):
    """How many heartbeats each node has sent."""

    counts: tuple[int, ...]


class End(msgspec.Struct, frozen=True, tag=True):
    """How the run ends, on all nodes."""

    code: int
    text: str


class ConnectionLost(msgspec.Struct, frozen=True, tag=True):
    """The connection to the store is lost."""

    text: str


LinkReport = Connected | Refused | RendezvousDone | Mail | Heartbeats | End | ConnectionLost


class Hello(msgspec.Struct, frozen=True, tag=True):
    """A node introduces itself to node 0."""

    version: str
    rank: int
    node: Node
    rendezvous: str
    """The address at which it found node 0."""
    job: Mapping[str, Any]
    """As resolved, defaults and overrides included."""
    program_sha256: str | None
    """Of the workload's file, if it is one."""


class Welcome(msgspec.Struct, frozen=True, tag=True):
    """All nodes have come, and agree."""

    hosts: tuple[str, ...]


class Run(msgspec.Struct, frozen=True, tag=True):
    """Where node 0 keeps the run."""

    path: str
    job_dir: str
    token: str
    """Name of a file in the run directory: a node that sees it shares the directory."""
    envs: tuple[Mapping[str, str], ...]
    """The environments that servers need in this run."""


class Launch(msgspec.Struct, frozen=True, tag=True):
    """Start these ranks."""

    attempt: int
    name: str
    order: bytes
    """The `LaunchConfig` or `ProgramConfig` as JSON, with node 0's paths."""
    requests: tuple[StartRequest, ...]
    env: Mapping[str, str]
    """Environment of the server that starts them."""


class Port(msgspec.Struct, frozen=True, tag=True):
    """The port on which rank 0 listens."""

    attempt: int
    content: bytes


class PreloadModules(msgspec.Struct, frozen=True, tag=True):
    """Import these modules for the ranks of later launches."""

    modules: tuple[str, ...]


class SnapshotRequest(msgspec.Struct, frozen=True, tag=True):
    """Take a snapshot of all ranks of the node."""

    attempt: int


class Stop(msgspec.Struct, frozen=True, tag=True):
    """End all ranks, and send their files."""

    attempt: int
    grace_s: float


class LogText(msgspec.Struct, frozen=True, tag=True):
    """A message that node 0 shows its user, for the users of the other nodes."""

    text: str


class Ack(msgspec.Struct, frozen=True, tag=True):
    """Node 0 has written a chunk."""


class RankExit(msgspec.Struct, frozen=True):
    """`processes.protocol.Exit`, on the clock of its own host."""

    rank: int
    pid: int
    returncode: int
    time_ns: int
    signals_sent: tuple[int, ...]
    oom_killed: bool


class Exits(msgspec.Struct, frozen=True, tag=True):
    """Ranks have ended by themselves."""

    attempt: int
    node: int
    exits: tuple[RankExit, ...]


class Chunk(msgspec.Struct, frozen=True, tag=True):
    """Part of a file of the run directory."""

    node: int
    path: str
    """Relative to the run directory."""
    offset: int
    content: bytes


class Snapshots(msgspec.Struct, frozen=True, tag=True):
    """Snapshots of the node's ranks."""

    attempt: int
    node: int
    snapshots: tuple[RankSnapshot, ...]


class Steps(msgspec.Struct, frozen=True, tag=True):
    """How many steps the node's ranks have completed; only whether this changes matters."""

    attempt: int
    node: int
    steps: tuple[int, ...]


class Stopped(msgspec.Struct, frozen=True, tag=True):
    """All ranks of the node have ended, and their files have been sent."""

    attempt: int
    node: int
    exits: tuple[RankExit, ...]


Message = (
    Hello | Welcome | Run | Launch | Port | PreloadModules | SnapshotRequest | Stop | LogText | Ack
    | Exits | Chunk | Snapshots | Steps | Stopped
)  # fmt: skip

_encoder = msgspec.msgpack.Encoder()
_messages: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)
_ends = msgspec.msgpack.Decoder(End)


def encode(message: Message | End) -> bytes:
    return _encoder.encode(message)


def decode(payload: bytes) -> Message:
    """The message.

    Raises:
        msgspec.MsgspecError: it is no message: the other node runs another version, or is not a gpurun.
    """
    return _messages.decode(payload)


def decode_end(payload: bytes) -> End:
    """Likewise, for an announcement."""
    return _ends.decode(payload)
