"""Whether all nodes were started for the same job, from their introductions. Pure."""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gpurun.launcher.compare.label import value_text
from gpurun.launcher.nodes.messages import Hello


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
            f"the nodes have different sources of gpurun {first.version}: {_name(first)} and {_name(other)} "
            "have not the same files\n    install the same on all nodes"
        )
    wants = {hello.rank: hello.job.get("nodes") for hello in (first, other)}
    if first.job.get("nodes") != other.job.get("nodes"):
        return _differ("world sizes", "`nodes`", wants[first.rank], wants[other.rank], first, other)
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
    return (
        f"the nodes have different {what}: {key} is {_text(ours)} on {_name(first)} and "
        f"{_text(theirs)} on {_name(other)}\n    start every node with the same job file and the same --set"
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
    """Of the file that the job runs; `None` if it names none."""
    path = job_dir / program_of(job)
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest() if path.suffix == ".py" else None
    except OSError:
        return None


def source_sha256(root: Path) -> str:
    """Of all Python files of a package, with their names."""
    found = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        found.update(f"{path.relative_to(root)}\0{path.stat().st_size}\0".encode())
        found.update(path.read_bytes())
    return found.hexdigest()


def shared_address(first: Hello, others: Sequence[Hello]) -> str:
    """The address at which the others found node 0.

    Its own may be reachable only from itself: many hosts resolve their own name to the loopback interface.
    """
    return others[0].rendezvous if others else first.node.address
