"""Time until everything has stopped on both nodes after a failure on one of them."""

import json
import statistics
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
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
    (hosts.directories[1] / "fail").touch()
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


PROGRAM = """
import time
import torch
from torch.nn.parallel import DistributedDataParallel

torch.distributed.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(STEPS):
    time.sleep(0.05)
    if step == 20:
        open("began", "w").close()
    optimizer.zero_grad()
    model(torch.randn(8, 4)).sum().backward()
    optimizer.step()
torch.distributed.destroy_process_group()
"""
STEPS = 100
WORKLOAD_ROUNDS = 12
WORKLOAD = ("job.yaml", "--set", f"steps.rounds={WORKLOAD_ROUNDS}")
SURVIVED: dict[str, tuple[tuple[str, ...], float]] = {
    "a program, link cut for 20 s": (("run", "train.py", "--devices", "cpu:1", "--nodes", "2"), 20.0),
    "a workload, link cut for 8 s": (WORKLOAD, 8.0),
}


def survive(args: tuple[str, ...], cut_s: float) -> bool:
    """Whether a run with such a cut in its middle ends well on both nodes, with all steps of all ranks."""
    with two_hosts() as hosts:
        hosts.write("train.py", PROGRAM.replace("STEPS", str(STEPS)))
        commands, run = hosts.start_both(*args, "--out", "run"), hosts.directories[0] / "run"
        if args is WORKLOAD:
            await_file(run / "launches" / "01-ddp-2" / "events.jsonl", '"round"')
        else:
            await_file(hosts.directories[0] / "began")
        with hosts.cut():
            time.sleep(cut_s)
        results = ended(commands)
        (variant,) = json.loads((run / "comparison.json").read_text())["variants"]
        least = WORKLOAD_ROUNDS if args is WORKLOAD else STEPS - 1  # a program's first step ends none
        steps = [len(path.read_text().splitlines()) for path in run.glob("variants/*/rank*.jsonl")]
        is_whole = len(steps) == 2 and len(set(steps)) == 1 and steps[0] >= least
        return all(one.code == 0 for one in results) and variant["status"] == "ok" and is_whole


@contextmanager
def two_hosts() -> Iterator[Hosts]:
    """With the job and its model."""
    with tempfile.TemporaryDirectory() as name, Hosts(Path(name)) as hosts:
        hosts.write("model.py", textwrap.dedent(MODEL) + BODY)
        hosts.write("job.yaml", JOB)
        yield hosts


def main(times: int = 2, times_cut: int = 4) -> None:
    """Writes the section "Several nodes"; the cut link, which no process reports, is tried most often."""
    survived = [
        (name, f"{sum(survive(*case) for _ in range(times))} of {times}") for name, case in SURVIVED.items()
    ]
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
        text
        + table(("event", "cause right", "all stopped after, s: median", "most"), rows)
        + "\n\nCuts that end before `silence:`, 30 s for programs and 10 s for workloads:\n\n"
        + table(("event", "ended well, with every step"), survived),
    )


def stop_time(blow: Blow) -> tuple[float, list[str]]:
    """Seconds from the event to the end of both commands, and their output."""
    with two_hosts() as hosts:
        commands = hosts.start_both("job.yaml", "--out", "run")
        await_file(hosts.directories[0] / "run" / "launches" / "01-ddp-2" / "events.jsonl", '"warmup"')
        started = time.monotonic()
        with blow(hosts, commands):
            results = ended(commands)
        return time.monotonic() - started, [result.err for result in results]
