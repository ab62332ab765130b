"""Time until everything has stopped on both nodes after a failure on one of them."""

import statistics
import tempfile
import textwrap
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from benchmarks.timing import record, table
from tests.integration.command import MODEL
from tests.integration.nodes.hosts import Command, Hosts, await_file, ended

JOB = """
name: two
workload: model.py:build
devices: cpu:1
nodes: 2
global_batch: 8
steps: {rounds: 1000}
profile: {steps: 0}
gradient_check: false
"""
BODY = """
def misbehave(x, calls):
    time.sleep(0.01)
    if os.environ["RANK"] == "1" and os.path.exists("fail"):
        raise ValueError("no such thing")
"""
CUT = "the link is cut"
Blow = Callable[[Hosts, list[Command]], AbstractContextManager[object]]


def fail(hosts: Hosts, _: list[Command]) -> AbstractContextManager[object]:
    """A rank of node 1 raises."""
    (hosts.folders[1] / "fail").touch()
    return nullcontext()


def kill(node: int) -> Blow:
    """SIGKILL to a node's command."""

    def blow(_: Hosts, commands: list[Command]) -> AbstractContextManager[object]:
        commands[node].kill()
        return nullcontext()

    return blow


CASES: dict[str, tuple[Blow, tuple[str, ...]]] = {
    "a rank of node 1 raises": (
        fail,
        ("raised ValueError: no such thing", "raised ValueError: no such thing"),
    ),
    "SIGKILL of node 0's gpurun": (kill(0), ("", "node 0 (hosta) is lost")),
    "SIGKILL of node 1's gpurun": (kill(1), ("node 1 (hostb) is lost", "")),
    CUT: (
        lambda hosts, _: hosts.cut(),
        ("node 1 (hostb) is lost", "node 0 (hosta) is lost"),
    ),
}


def main(times: int = 2, times_cut: int = 4) -> None:
    """Writes the section "Several nodes"; the cut link, which no process reports, is tried most often."""
    rows = []
    for name, (blow, causes) in CASES.items():
        spent_s, right = [], 0
        tried = times_cut if name == CUT else times
        for _ in range(tried):
            seconds, said = stop_time(blow)
            spent_s.append(seconds)
            right += all(cause in text for cause, text in zip(causes, said, strict=True))
        row = (name, f"{right} of {tried}", f"{statistics.median(spent_s):.1f}", f"{max(spent_s):.1f}")
        rows.append(row)
    text = (
        "Two hosts in network namespaces, one gloo rank each: from the event to the end of the last command. "
        "The cause counts as right if every node that is left names it.\n\n"
    )
    record(
        "Several nodes",
        text + table(("event", "cause right", "all stopped after, s: median", "most"), rows),
    )


def stop_time(blow: Blow) -> tuple[float, list[str]]:
    """Seconds from the event to the end of both commands, and their output."""
    with tempfile.TemporaryDirectory() as name, Hosts(Path(name)) as hosts:
        hosts.write("model.py", textwrap.dedent(MODEL) + BODY)
        hosts.write("job.yaml", JOB)
        commands = hosts.start_both("job.yaml", "--out", "run")
        await_file(hosts.folders[0] / "run" / "launches" / "01-ddp-2" / "events.jsonl", '"warmup"')
        started = time.monotonic()
        with blow(hosts, commands):
            results = ended(commands)
        return time.monotonic() - started, [result.err for result in results]
