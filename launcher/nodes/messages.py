"""Messages between the nodes of a job."""

from collections.abc import Callable, Mapping
from typing import Any, Literal

import msgspec

from gpurun.launcher.inspect.snapshot import RankSnapshot
from gpurun.launcher.plan.model import Node
from gpurun.launcher.processes.protocol import Exit, StartRequest
from gpurun.launcher.rundir.records import CaptureRequest, NodeRooms


class End(msgspec.Struct, frozen=True, tag=True):
    """How the run ends, on all nodes."""

    code: int
    text: str
    starts_again: bool = False
    """Whether all nodes join once more: a lost one may come back, or another in its place."""


class Hello(msgspec.Struct, frozen=True, tag=True):
    """A node introduces itself to node 0."""

    version: str
    rank: int
    node: Node
    rendezvous: str
    """The address at which it found node 0."""
    job: Mapping[str, Any]
    """The job as resolved, defaults and overrides included."""
    program_sha256: str | None
    """The hash of the workload's file, if it is one."""
    source_sha256: str
    """The hash of gpurun's own files."""


class Welcome(msgspec.Struct, frozen=True, tag=True):
    """All nodes have come, and agree."""

    hosts: tuple[str, ...]


class Run(msgspec.Struct, frozen=True, tag=True):
    """The place at which node 0 keeps the run."""

    path: str
    job_dir: str
    token: str
    """Name of a file in the run directory: a node that sees it shares the directory."""
    envs: tuple[Mapping[str, str], ...]
    """The environments that servers need in this run."""


class FindRooms(msgspec.Struct, frozen=True, tag=True):
    """Find how many samples each of your devices can hold (`global_batch: max`)."""

    first: int
    """Position of the node's first device among those of all nodes."""
    num_devices: int
    """The number of devices of all nodes."""


class RoomsFound(msgspec.Struct, frozen=True, tag=True):
    """The answer to `FindRooms`."""

    node: int
    found: NodeRooms


class Tested(msgspec.Struct, frozen=True, tag=True):
    """The results of a node's self-test."""

    node: int
    checks: tuple[
        tuple[str, Literal["ok", "failed", "skipped"], str, str | None, tuple[Mapping[str, Any], ...]], ...
    ]
    """Name, status, what was found, what to do, the figures."""
    devices: tuple[str, ...]
    blocked: tuple[str, ...]
    """The checks because of which no rank can be started on the node."""


class OfAttempt(msgspec.Struct, frozen=True):
    """A message that concerns the ranks of one attempt."""

    attempt: int


class FromNode(OfAttempt, frozen=True):
    """A message about a node's ranks."""

    node: int


RankKind = Literal["workload", "program"]


class StartRanks(OfAttempt, frozen=True, tag=True):
    """Start these ranks."""

    name: str
    kind: RankKind
    """The kind of the ranks' work: a message names no code."""
    config: bytes
    """The `LaunchConfig` or `ProgramConfig` as JSON, with node 0's paths."""
    requests: tuple[StartRequest, ...]
    """Their `entry` has no effect."""
    env: Mapping[str, str]
    """Environment of the server that starts them."""


class Port(OfAttempt, frozen=True, tag=True):
    """The port on which rank 0 listens."""

    content: bytes


class PreloadModules(msgspec.Struct, frozen=True, tag=True):
    """Import these modules for the ranks of later launches."""

    modules: tuple[str, ...]
    if_harmless: bool = False


class SnapshotRequest(OfAttempt, frozen=True, tag=True):
    """Take a snapshot of all ranks of the node."""


class TracesWanted(OfAttempt, frozen=True, tag=True):
    """A request of `gpurun capture`: write it where the node's ranks find it.

    It is sent twice: the ranks of a workload agree on the newest request that any of them knows, so that all
    nodes must have written it before the first bell rings.
    """

    request: CaptureRequest
    rings: bool
    """Whether the ranks are to know of it now; that has no answer."""


class Stop(OfAttempt, frozen=True, tag=True):
    """End all ranks, and send their files."""

    grace_s: float
    signals: tuple[int, ...]
    """The signals that they get before SIGKILL."""


class Settle(OfAttempt, frozen=True, tag=True):
    """All ranks have ended well: wait for the processes that they have left, or let them go on."""

    waits: bool
    """Or whether `Stop` is to end them."""


class Settled(FromNode, frozen=True, tag=True):
    """A node has done that."""


class LogText(msgspec.Struct, frozen=True, tag=True):
    """A message that node 0 shows its user, for the users of the other nodes."""

    text: str


class Ack(msgspec.Struct, frozen=True, tag=True):
    """Node 0 has written a chunk."""


class Exits(FromNode, frozen=True, tag=True):
    """Ranks have ended by themselves."""

    exits: tuple[Exit, ...]
    """The exits by the clock of their own host."""


class Chunk(msgspec.Struct, frozen=True, tag=True):
    """Part of a file of the run directory."""

    node: int
    path: str
    """Relative to the run directory."""
    offset: int
    content: bytes
    """Empty: a log was rotated, and begins again."""
    is_last: bool = False
    """Whether the file ends here."""


class Snapshots(FromNode, frozen=True, tag=True):
    """Snapshots of the node's ranks."""

    snapshots: tuple[RankSnapshot, ...]


class RequestWritten(FromNode, frozen=True, tag=True):
    """The answer to `TracesWanted`."""

    problem: str
    """Why it could not be; empty: it is."""


class StepCounts(FromNode, frozen=True, tag=True):
    """How many steps the node's ranks have completed; only whether this changes matters."""

    steps: tuple[int, ...]


class Stopped(Exits, frozen=True, tag=True):
    """All ranks of the node have ended, and their files have been sent."""


Message = (
    Hello | Welcome | FindRooms | RoomsFound | Run | StartRanks | Port | PreloadModules | SnapshotRequest
    | TracesWanted | Settle | Settled | Stop | LogText | Ack | Exits | Chunk | Snapshots | RequestWritten
    | StepCounts | Stopped | Tested
)  # fmt: skip

encode: Callable[[msgspec.Struct], bytes] = msgspec.msgpack.Encoder().encode
decode: Callable[[bytes], Message | End] = msgspec.msgpack.Decoder(Message | End).decode
"""Raises `msgspec.MsgspecError` where the other node runs another version, or is not a gpurun."""
