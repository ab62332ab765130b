"""Nodes other than the first: they start what node 0 tells them to, and send it what comes of it."""

import contextlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from launcher.cluster.link import Link
from launcher.cluster.messages import (
    Dump,
    Dumped,
    Exits,
    Launch,
    Message,
    Port,
    Preloads,
    Run,
    Said,
    Stop,
    Stopped,
    Taken,
)
from launcher.cluster.timeline import rank_exits
from launcher.cluster.transfer import Outbox
from launcher.host import usable_cores
from launcher.run.ranks import Ranks
from launcher.run.wire import StartRequest
from launcher.rundir import RunDir, write_bytes, write_json

_POLL_S = 0.05
_WAIT_S = 1.0
_STACKS_S = 1.5
"""How long ranks may take to write their stacks; they do it within milliseconds."""


@dataclass(frozen=True)
class Places:
    """Where node 0's folders are on this node."""

    run: Path
    """The shared run directory, or `scratch`."""
    scratch: Path
    """This node's own."""
    job_dir: Path
    leaders_run: str
    leaders_job_dir: str

    def order(self, name: str) -> Path:
        """Always this node's own: what stands in it differs from node to node."""
        return RunDir(self.scratch).order(name)

    def translate(self, text: str, name: str) -> str:
        """A path of node 0 as this node calls it; any other text stays."""
        moved: Mapping[str, Path] = {
            str(RunDir(Path(self.leaders_run)).order(name)): self.order(name),
            self.leaders_run: self.run,
            self.leaders_job_dir: self.job_dir,
        }
        for theirs, ours in moved.items():
            if text == theirs or text.startswith(f"{theirs}/"):
                return f"{ours}{text[len(theirs) :]}"
        return text


@dataclass
class Follower:
    """A node that does what node 0 says."""

    link: Link
    pool: Ranks
    places: Places
    say: Callable[[str], None]
    attempt: int = 0
    name: str = ""
    outbox: Outbox = field(init=False)

    def __post_init__(self) -> None:
        self.outbox = Outbox(self.places.run, self.link.rank)

    def run(self) -> None:
        """Never returns by itself.

        Raises:
            NodesEnded: the run is over.
            NodesError: node 0 is gone.
        """
        while True:
            for message in self.link.poll(_POLL_S):
                self.handle(message)
            self.report_exits()

    def handle(self, message: Message) -> None:
        """Does what node 0 wants."""
        if isinstance(message, Said):
            self.say(message.text)
        elif isinstance(message, Preloads):
            self.pool.preload(message.modules)
        elif isinstance(message, Launch):
            self.launch(message)
        elif isinstance(message, Port):
            write_bytes(RunDir(self.places.run).rendezvous(self.name), message.content)
        elif isinstance(message, Dump):
            self.dump_stacks()
            self.link.send(0, Dumped(message.attempt, self.link.rank))
        elif isinstance(message, Stop):
            self.stop(message.grace_s)

    def launch(self, message: Launch) -> None:
        """Starts this node's ranks, with its own paths."""
        self.attempt, self.name = message.attempt, message.name
        order = msgspec.json.decode(message.order, type=dict[str, Any])
        own = order | {"run_dir": str(self.places.run), "job_dir": str(self.places.job_dir)}
        if "threads" in order:
            own["threads"] = min(order["threads"], max(1, usable_cores() // len(message.requests)))
        write_json(self.places.order(self.name), own)
        self.pool.start([self.translated(request) for request in message.requests])

    def translated(self, request: StartRequest) -> StartRequest:
        """The request with this node's paths."""
        places = self.places
        return msgspec.structs.replace(
            request,
            args=tuple(places.translate(text, self.name) for text in request.args),
            log=places.translate(request.log, self.name),
            cwd=places.translate(request.cwd, self.name),
        )

    def report_exits(self) -> None:
        """Tells at once which ranks have ended: the number of this message says who was first."""
        if exits := self.pool.poll(0.0):
            self.link.send(0, Exits(self.attempt, self.link.rank, rank_exits(exits)))

    def stop(self, grace_s: float) -> None:
        """Ends the ranks, and sends all that they wrote."""
        self.report_exits()
        self.pool.stop(grace_s)
        exits = rank_exits(self.pool.poll(0.0))
        self.send_files()
        self.link.send(0, Stopped(self.attempt, self.link.rank, exits))

    def dump_stacks(self) -> None:
        """Has the ranks write their stacks, and sends the logs once they no longer grow."""
        self.pool.dump_stacks()
        deadline = time.monotonic() + _STACKS_S
        before, size = -1, self.log_bytes()
        while size != before and time.monotonic() < deadline:
            time.sleep(5 * _POLL_S)
            before, size = size, self.log_bytes()
        self.send_files()

    def log_bytes(self) -> int:
        """Size of all logs of this attempt on this node."""
        folder = RunDir(self.places.run).launch(self.name) / "log"
        with contextlib.suppress(OSError):
            return sum(path.stat().st_size for path in folder.iterdir())
        return 0

    def send_files(self) -> None:
        """Sends what node 0 doesn't have; a shared directory has it all."""
        if self.places.run == self.places.scratch:
            self.outbox.send(lambda chunk: self.link.send(0, chunk), self.await_taken)

    def await_taken(self) -> None:
        """Returns when one more chunk has arrived."""
        while self.link.take(Taken, _WAIT_S) is None:
            continue  # Node 0 is alive, or this would have raised: it is busy, or the link is slow.


def find_run(message: Run, scratch: Path, job_dir: Path) -> Places:
    """Whether node 0's run directory is this node's, too: then the token that it put there is seen."""
    theirs = Path(message.path)
    try:
        shared = (theirs / message.token).is_file()
    except OSError:
        shared = False
    return Places(theirs if shared else scratch, scratch, job_dir, message.path, message.job_dir)
