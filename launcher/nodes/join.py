"""Makes one job of separate commands: every node introduces itself to node 0, which compares them."""

import contextlib
import hashlib
import os
import platform
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import gpurun
from gpurun.launcher import __version__
from gpurun.launcher.compare.label import value_text
from gpurun.launcher.errors import GpurunError, MachineError, NodesEnded, NodesError, SpecError
from gpurun.launcher.jobfile.model import JobSpec
from gpurun.launcher.jobfile.values import MAX_NODES
from gpurun.launcher.machine.host import Machine
from gpurun.launcher.machine.network import (
    NodeAddress,
    UnknownHost,
    carried_gb_per_s,
    find_address,
    is_loopback,
    is_own,
)
from gpurun.launcher.nodes.messages import End, Hello, LogText, Welcome
from gpurun.launcher.nodes.node_link import NodeLink
from gpurun.launcher.nodes.rendezvous import (
    LAST_CALL_S,
    Facts,
    NodeFlags,
    RankOutOfRange,
    bounds_here,
    facts_without_job,
    find_facts,
)
from gpurun.launcher.nodes.transport.credentials import find_secret, identity_from
from gpurun.launcher.nodes.transport.exchange import LinkOptions
from gpurun.launcher.plan.devices import node_of
from gpurun.launcher.plan.model import Node
from gpurun.launcher.units import format_duration, plural

RESOLVE_EVERY_S = 0.5
"""How often a node asks for a name that isn't known yet."""
REFUSE_S = 10.0
"""How long a node that can't join tries to notify the others."""
ANSWER_S = 5.0
"""How long node 0's message that the time is up may take."""


@dataclass(frozen=True)
class Joined:
    """This node's part of a job of several nodes."""

    link: NodeLink
    rank: int
    hosts: tuple[str, ...]
    nodes: tuple[Node, ...]
    """The nodes by node rank; known only on node 0."""


def introduce(
    spec: JobSpec,
    job_dir: Path,
    facts: Facts,
    place: NodeAddress,
    machine: Machine,
    has_own_args: bool = False,
) -> Hello:
    """This node's introduction to node 0."""
    job = {key: value for key, value in spec.resolved().items() if not (has_own_args and key == "args")}
    return Hello(
        version=__version__,
        rank=facts.rank,
        node=at_place(node_of(machine, machine.hostname), place),
        rendezvous=place.rendezvous,
        job=job,
        program_sha256=program_sha256(job, job_dir),
        source_sha256=source_sha256(Path(gpurun.__file__).resolve().parent),
    )


def at_place(node: Node, place: NodeAddress) -> Node:
    """The node with this address and its interface."""
    speed = carried_gb_per_s(place.interface)
    return replace(node, address=place.address, interface=place.interface, network_gb_per_s=speed)


def refuse_to_join(error: GpurunError, flags: NodeFlags, say: Callable[[str], None]) -> None:
    """Announces to the other nodes an error that keeps this one from joining, if they come within seconds.

    The job itself may be what is wrong: nothing is taken from it.

    Args:
        say: shows what this node waits for.
    """
    with contextlib.suppress(GpurunError):  # it would hide the first error
        known = facts_without_job(flags, os.environ)
        if known is None:
            return
        facts, num_nodes = known
        say(f"node {facts.rank} can't join, and reports that to the other nodes (up to {REFUSE_S:g} s)")
        place = find_address(facts.host, facts.port, flags.interface, os.environ)
        options = link_options(facts, place, flags, num_nodes or MAX_NODES, REFUSE_S)
        NodeLink(options).refuse(_end_of(error, facts.rank, platform.node()), (num_nodes or 2) - 1, REFUSE_S)


@contextmanager
def joined(
    spec: JobSpec,
    job_dir: Path,
    flags: NodeFlags,
    machine: Machine,
    say: Callable[[str], None],
    num_nodes: int | None = None,
    has_own_args: bool = False,
) -> Iterator[Joined]:
    """Joins all nodes; however the block ends, all nodes end with the same cause and the same exit code.

    Args:
        say: shows what this node waits for.
        num_nodes: with how many the run has begun; `None`: it begins with as many as the job says.
        has_own_args: whether a program's arguments may differ between nodes, as torchrun's lines may.

    Raises:
        SpecError: facts are missing, or the nodes were started for different jobs.
        MachineError: node 0 can't be reached, its port is taken, or nodes are missing.
    """
    try:
        facts = find_facts(spec.nodes, flags, os.environ)
    except RankOutOfRange as error:
        refuse_to_join(error, flags, say)  # node 0 shows it, and keeps waiting for the right one
        raise
    place = find_place(facts, flags, lambda: say(f"waits until the name {facts.host} is known"))
    hello = introduce(spec, job_dir, facts, place, machine, has_own_args)
    bounds = (num_nodes, num_nodes) if num_nodes else bounds_here(spec.nodes, flags, os.environ)
    options = link_options(facts, place, flags, bounds[1], spec.silence_limit_s)
    say(waiting_text(facts, bounds, flags))
    link = NodeLink(options)
    try:
        yield meet(link, hello, bounds, flags.join_timeout_s, say)
    except NodesEnded:
        raise
    except BaseException as error:
        with contextlib.suppress(GpurunError):  # the link may have failed with the cause
            link.announce(_end_of(error, facts.rank, machine.hostname))
        raise
    finally:
        link.close()


def find_place(facts: Facts, flags: NodeFlags, on_wait: Callable[[], None]) -> NodeAddress:
    """This node's address towards node 0, whose name may exist only once node 0 does.

    Args:
        on_wait: called once, before it waits.

    Raises:
        MachineError: the name isn't known in time, or no interface leads there.
    """
    deadline = time.monotonic() + flags.join_timeout_s
    is_first = True
    while True:
        try:
            return find_address(facts.host, facts.port, flags.interface, os.environ)
        except UnknownHost:
            if not facts.resolves_late or time.monotonic() > deadline:
                raise
        if is_first:
            on_wait()
        is_first = False
        time.sleep(RESOLVE_EVERY_S)


def waiting_text(facts: Facts, bounds: tuple[int, int], flags: NodeFlags) -> str:
    """The message while this node waits, perhaps for minutes."""
    least, most = bounds
    count = str(most) if least == most else f"{least} to {most}"
    more = plural(most - 1, "other node") if least == most else f"{least - 1} to {most - 1} other nodes"
    others = more if facts.rank == 0 else "node 0"
    place, limit = f"{facts.host}:{facts.port}", format_duration(flags.join_timeout_s)
    waiting = f"node {facts.rank} of {count} waits for {others} at {place} (up to {limit})"
    return f"{_INSECURE.format(port=facts.port)}\n{waiting}" if flags.insecure else waiting


_INSECURE = "warning: with --insecure, whoever reaches port {port} of node 0 can run code as you on all nodes"


def link_options(
    facts: Facts, place: NodeAddress, flags: NodeFlags, num_nodes: int, silence_s: float
) -> LinkOptions:
    """Node 0 listens at the address of its name, or on all interfaces if that is a loopback address.

    Raises:
        GpurunError: there is no secret.
    """
    own_name = is_loopback(place.rendezvous) and facts.host not in ("localhost", place.rendezvous)
    return LinkOptions(
        rank=facts.rank,
        num_nodes=num_nodes,
        host=facts.host,
        address=place.rendezvous,
        port=facts.port,
        listen="" if own_name else place.rendezvous,
        own_host=platform.node(),
        join_timeout_s=flags.join_timeout_s,
        silence_s=silence_s,
        identity=None if flags.insecure else identity_from(find_secret(os.environ)),
    )


def _end_of(error: BaseException, rank: int, host: str) -> End:
    """The announcement to the other nodes, which names this node."""
    code = error.exit_code if isinstance(error, GpurunError) else 1
    text = str(error) if isinstance(error, GpurunError) else f"{type(error).__name__}: {error}"
    about_all = isinstance(error, NodesError | _Refused | _Missing)
    return End(code, text if about_all else f"node {rank} ({host}): {text}")


class _Refused(SpecError):
    """The nodes disagree."""


class _Missing(MachineError):
    """Not all nodes joined."""


def meet(
    link: NodeLink, hello: Hello, bounds: tuple[int, int], timeout_s: float, say: Callable[[str], None]
) -> Joined:
    """Returns when all nodes have joined, and node 0 has found that they agree.

    Args:
        bounds: the least and the most nodes.
        say: shows who was refused.

    Raises:
        GpurunError: nodes are missing, or disagree.
    """
    if hello.rank == 0:
        nodes = gather(link, hello, bounds, timeout_s, say)
        hosts = tuple(node.host for node in nodes)
        link.begin(hosts)
        for rank in range(1, len(nodes)):
            link.send(rank, Welcome(hosts))
    else:
        nodes = ()
        link.send(0, hello)
        hosts = await_welcome(link, timeout_s).hosts
        link.begin(hosts)
    return Joined(link, hello.rank, hosts, nodes)


def await_welcome(link: NodeLink, timeout_s: float) -> Welcome:
    """Waits for node 0's message that all nodes have joined.

    Node 0 decides when the time is up, and announces it. Its time began before it could be reached.

    Raises:
        NodesError: it was reached, but sends nothing.
        MachineError: it could not be reached.
    """
    while not link.await_connected(timeout_s):
        continue  # its own limit is the same, and would raise
    welcome = link.take(Welcome, timeout_s + ANSWER_S)
    if welcome is None:
        raise NodesError(
            f"node 0 was reached, but did not report within {timeout_s + ANSWER_S:g} s that all joined\n"
            "    possible causes: its gpurun was killed or stopped, the machine is down, or the connection "
            "is lost"
        )
    return welcome


def gather(
    link: NodeLink, hello: Hello, bounds: tuple[int, int], timeout_s: float, say: Callable[[str], None]
) -> tuple[Node, ...]:
    """All nodes by rank, as soon as the most have joined, or enough have and no other comes any more."""
    least, most = bounds
    deadline = last_call = time.monotonic() + timeout_s
    known = {0: hello}
    while len(known) < most:
        now = time.monotonic()
        if now > last_call and len(known) >= least and max(known) < len(known):
            break
        if now > deadline:
            raise _Missing(missing_nodes(max(least, max(known) + 1), known, timeout_s))
        for message in link.poll(0.1):
            if isinstance(message, LogText):
                say(message.text)
            if not isinstance(message, Hello):
                continue
            if (problem := disagreement(hello, message, known)) is not None:
                raise _Refused(problem)
            known[message.rank] = message
            last_call = min(deadline, now + LAST_CALL_S)
    others = [known[rank] for rank in range(1, len(known))]
    return (_seen_from(hello, others), *(other.node for other in others))


def _seen_from(hello: Hello, others: list[Hello]) -> Node:
    """Node 0 with the address at which the others find it, unless its interface was chosen.

    Its own may be reachable only from itself: many hosts resolve their own name to the loopback interface.
    """
    seen = others[0].rendezvous if others else hello.node.address
    if not is_loopback(hello.node.address) or is_loopback(seen) or not is_own(seen):
        return hello.node
    return at_place(hello.node, find_address(seen, 1, None, {}))


def disagreement(first: Hello, other: Hello, known: Mapping[int, Hello]) -> str | None:
    """Why the two can't train together, naming both; `None` if they can.

    Args:
        first: of node 0.
        other: of a node that has just joined.
        known: nodes that joined before, by rank.
    """
    if first.version != other.version:
        return _differ("versions of gpurun", "gpurun", first.version, other.version, first, other)
    if first.source_sha256 != other.source_sha256:
        return (
            f"the files of gpurun {first.version} differ between {_name(first)} and {_name(other)}"
            "\n    install the same on all nodes"
        )
    ours, theirs = first.job.get("nodes"), other.job.get("nodes")
    if ours != theirs:
        return _differ("world sizes", "`nodes`", ours, theirs, first, other)
    if (twin := known.get(other.rank)) is not None:
        return (
            f"{twin.node.host} ({twin.node.address}) and {other.node.host} ({other.node.address}) both claim "
            f"to be node {other.rank}\n    give each its own --node-rank"
        )
    for key in dict.fromkeys((*first.job, *other.job)):
        ours, theirs = first.job.get(key), other.job.get(key)
        if ours != theirs:
            return _differ("jobs", f"`{key}`", ours, theirs, first, other)
    if first.program_sha256 != other.program_sha256:
        return (
            f"the nodes have different programs: {program_of(first.job)} differs between "
            f"{_name(first)} and {_name(other)}\n    copy it, or use a shared directory"
        )
    return None


def _differ(what: str, key: str, ours: Any, theirs: Any, first: Hello, other: Hello) -> str:
    hint = "start every node with the same job or program, and with the same options"
    if key == "`devices`":
        hint = "list those of all nodes in the job of each, such as [cpu:0@0, cpu:0@1, cpu:1@1]"
    return (
        f"the nodes have different {what}: {key} is {_text(ours)} on {_name(first)} and "
        f"{_text(theirs)} on {_name(other)}\n    {hint}"
    )


def _text(value: Any) -> str:
    return "not set" if value is None else value_text(value)[:200]


def _name(hello: Hello) -> str:
    return f"node {hello.rank} ({hello.node.host})"


def missing_nodes(num_nodes: int, known: Mapping[int, Hello], timeout_s: float) -> str:
    """Which nodes did not join in time."""
    missing = [str(rank) for rank in range(num_nodes) if rank not in known]
    hosts = ", ".join(f"{rank} ({hello.node.host})" for rank, hello in sorted(known.items()))
    return (
        f"{len(known)} of {num_nodes} nodes joined within {timeout_s:g} s: {hosts}; "
        f"missing: node {', '.join(missing[:20])}\n"
        "    start gpurun there too, or wait longer: --join-timeout"
    )


def program_of(job: Mapping[str, Any]) -> str:
    """The file that a job runs: of `script: train.py`, or of a workload such as `train.py:build`."""
    return str(job.get("script") or job.get("workload") or "").partition(":")[0]


def program_sha256(job: Mapping[str, Any], job_dir: Path) -> str | None:
    """The hash of the file that the job runs; `None` if it names none."""
    path = job_dir / program_of(job)
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest() if path.suffix == ".py" else None
    except OSError:
        return None


def source_sha256(root: Path) -> str:
    """The hash of a package's Python files and their names. In a working copy its directories are links."""
    found = hashlib.sha256()
    for directory, names, files in os.walk(root, followlinks=True):
        names.sort()
        for path in (Path(directory, name) for name in sorted(files) if name.endswith(".py")):
            content = path.read_bytes()
            found.update(f"{path.relative_to(root)}\0{len(content)}\0".encode())
            found.update(content)
    return found.hexdigest()
