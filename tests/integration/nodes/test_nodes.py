"""Jobs on two hosts: they run, and whatever goes wrong ends them on both, with its true cause."""

import json
import os
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from gpurun.launcher.selftest.check_table import NODE_CHECKS
from tests.integration.command import MODEL, ending
from tests.integration.nodes.hosts import ADDRESSES, NAMES, Command, Hosts, await_file, ended
from tools.system_packages import without

pytestmark = pytest.mark.skipif(bool(reason := without("iproute2")), reason=reason)

JOB = """
name: two
workload: model.py:build
devices: cpu:1
nodes: 2
global_batch: 8
compare: {split: [even, [6, 2], [2, 6]]}
steps: {rounds: 2}
profile: {steps: 1}
"""
PICKY = """
def misbehave(x, calls):
    if len(x) == 6:
        raise ValueError("no such thing on " + os.environ["RANK"])
"""
ENDLESS = """
def misbehave(x, calls):
    from gpurun import device_index
    time.sleep(0.01)
    if len(x) > 5 + 6 * device_index(): torch.empty(1 << 50)
"""
"""The device of node 0 holds 5 samples, that of node 1 holds 11; a margin is left of each."""
LONG = ("--set", "steps.rounds=1000", "--set", "profile.steps=0", "--set", "gradient_check=false")
TRAIN = """
import os, signal, time
import torch
from torch.nn.parallel import DistributedDataParallel

torch.distributed.init_process_group("gloo")
rank = torch.distributed.get_rank()
names = ("LOCAL_RANK", "GROUP_RANK", "GROUP_WORLD_SIZE", "MASTER_ADDR", "GPURUN_SECRET")
print(*(os.environ.get(name) for name in names))
again = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
print("attempt", again)
model = DistributedDataParallel(torch.nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


def wait_for_ever():
    while True:
        time.sleep(60)


for step in range(1_000_000):
    if rank == 1 and step == 5 and again == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 1 and step == 5 and again == 2:
        wait_for_ever()
    model(torch.randn(8, 4)).sum().backward()
    optimizer.step()
"""
"""Its rank 1 is killed at first, then nothing happens to it, and the third time it hangs."""


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    with Hosts(tmp_path_factory.mktemp("hosts")) as both:
        yield both


CLOCK = """
import datetime, time

ahead = datetime.timedelta(minutes=7)
real_time, real_time_ns, real_datetime = time.time, time.time_ns, datetime.datetime
time.time = lambda: real_time() + ahead.total_seconds()
time.time_ns = lambda: real_time_ns() + 420 * 10**9


class Datetime(real_datetime):
    @classmethod
    def now(cls, tz=None):
        now = real_datetime.now(tz) + ahead
        return cls.combine(now.date(), now.timetz())


# Other hosts get such times, and know only the ordinary kind.
Datetime.__module__, Datetime.__name__, Datetime.__qualname__ = "datetime", "datetime", "datetime"
datetime.datetime = Datetime
"""
"""For every Python process of a host, before it imports anything else: a clock that is 7 minutes ahead."""


def clock_ahead(directory: Path) -> dict[str, str]:
    """The environment of a host whose clock is ahead."""
    (directory / "clock").mkdir()
    (directory / "clock" / "sitecustomize.py").write_text(CLOCK)
    return {"PYTHONPATH": os.pathsep.join([str(directory / "clock"), os.environ.get("PYTHONPATH", "")])}


def prepare(hosts: Hosts, body: str) -> None:
    hosts.write("model.py", textwrap.dedent(MODEL) + body)
    hosts.write("job.yaml", JOB)


def pods(hosts: Hosts, out: str, env: Sequence[Mapping[str, str]] = ({}, {})) -> list[Command]:
    """The command on both hosts, in Pods of an Indexed Job."""
    job = ("job.yaml", "--rendezvous", "two-0.two:29400", "--out", out)
    return [
        hosts.start(rank, *job, env={"JOB_COMPLETION_INDEX": str(rank), **env[rank]}) for rank in range(2)
    ]


@pytest.mark.slow
def test_pods_that_are_known_late_and_preempted_run_over_a_slow_link_with_clocks_apart(
    tmp_path: Path, hosts: Hosts
) -> None:
    prepare(hosts, PICKY)
    hosts.write_names(())
    preempted = pods(hosts, "preempted")
    for pod in preempted:
        await_file(pod.stderr, "waits until the name two-0.two is known")
    hosts.write_names(("two-0.two",))
    await_file(preempted[1].stderr, "results and tables are on node 0")
    preempted[1].process.terminate()
    assert [pod.code for pod in ended(preempted)] == [130, 130]  # by which the Job knows that it may go on

    with hosts.slowed(mbit_per_s=5, latency_ms=400):
        nodes = ended(pods(hosts, "run", ({}, clock_ahead(tmp_path))))
    run = hosts.directories[0] / "run"
    for node in nodes:
        assert node.code == 4, node.err
        for rank, host in enumerate(NAMES):
            assert f"thing on {rank}\n    it happened on node {rank} ({host})" in node.err
    comparison = json.loads((run / "comparison.json").read_text())
    even, ours, theirs = comparison["variants"]
    assert [ending(variant) for variant in (even, ours, theirs)] == ["ok", "failed", "failed"], nodes[0].err
    assert "rank 0 raised ValueError" in ours["reason"]
    assert "rank 1 raised ValueError" in theirs["reason"]
    places = [("hosta", "cpu:0@0"), ("hostb", "cpu:0@1")]
    assert [(rank["host"], rank["device"]) for rank in even["ranks"]] == places
    assert all((run / rank["trace"]).stat().st_size > 0 for rank in even["ranks"])
    assert (run / "launches" / "01-ddp-2" / "log" / "rank1.log").is_file()
    assert not (hosts.directories[1] / "run").exists()
    assert not list(hosts.temporary[1].glob("gpurun-*"))


@pytest.mark.slow
def test_a_program_starts_again_outlives_a_node_hangs_and_loses_node_0(hosts: Hosts) -> None:
    hosts.write("train.py", TRAIN)
    job = ("train.py", "--nodes", "2", "--out", "program", "--set", "devices=[cpu:0@0, cpu:0@1, cpu:1@1]")
    wanted = ("--set", "restarts=2", "--set", "hang_timeout=10s", "--set", "on_hang=continue")
    commands = hosts.start_both("run", *job, *wanted)
    launches = hosts.directories[0] / "program" / "launches"
    lost = commands[1]
    await_file(commands[0].stderr, "[rank 0] attempt 1")
    lost.kill()
    await_file(commands[0].stderr, "restart 2 of 2")
    commands[1] = hosts.start_node(1, "run", *job, *wanted)
    await_file(launches / "01-script-3~3" / "hang.json", "wait_for_ever")
    (stacks,) = ended([hosts.start(0, "stacks", "program")])
    with hosts.cut():
        await_file(commands[1].stderr, "node 0 (hosta): no heartbeat for 3 s; after 30 s it counts as lost")
    await_file(commands[1].stderr, "node 0 (hosta): heartbeats again")
    commands[0].kill()
    first, second = ended(commands)
    assert "is in `wait_for_ever`" in stacks.out, stacks
    assert "rank 1 of node 1 (hostb) (process " in stacks.out
    for said in (first.err, lost.stderr.read_text()):
        assert "SIGKILL\n    it happened on node 1 (hostb)" in said, said
        assert "restart 1 of 2" in said
    assert "node 1 (hostb) is lost" in first.err
    for said in (first.err, second.err):
        assert "in `wait_for_ever` (train.py" in said
        assert "waits in all_reduce" in said
    assert second.code == 4
    assert "node 0 (hosta) is lost" in second.err
    logs = [(launches / "01-script-3" / "log" / f"rank{rank}.log").read_text() for rank in (0, 1)]
    assert ["0 0 2 10.213.7.1 None" in logs[0], "0 1 2 10.213.7.1 None" in logs[1]] == [True, True]


@pytest.mark.slow
def test_traces_of_all_nodes_come_and_a_cut_link_ends_both(hosts: Hosts) -> None:
    prepare(hosts, ENDLESS)
    found = ("--set", "compare.split=[balanced]", "--set", "global_batch=max")
    commands = hosts.start_both("job.yaml", "--out", "link", *LONG, *found)
    run = hosts.directories[0] / "link"
    await_file(run / "launches" / "01-ddp-2" / "events.jsonl", '"warmup"')
    (captured,) = ended([hosts.start(0, "capture", "link", "--steps", "2")])
    assert captured.code == 0, captured.err
    traces = run / "launches" / "01-ddp-2" / "captures" / "1"
    assert sorted(path.name for path in traces.iterdir()) == [
        f"rank{rank}.pt.trace.json.gz" for rank in (0, 1)
    ]
    with hosts.cut():
        first, second = ended(commands)
    balance = json.loads((run / "variants" / "ddp-2-balanced" / "balance.json").read_text())
    assert balance["best"]["split"] == [4, 10]  # both nodes measured, and came to the same
    assert (first.code, second.code) == (4, 4)
    assert "node 1 (hostb) is lost" in first.err
    assert "node 0 (hosta) is lost" in second.err
    kept = re.search(r"is kept in (\S+)", second.err)
    assert kept
    assert (Path(kept[1]) / "launches" / "01-ddp-2" / "log" / "rank1.log").is_file()


QUICK = """
from gpurun.launcher.selftest import evidence

for part in ("training", "gradients", "faults", "programs"):
    del evidence.PARTS[part]
"""
"""For every Python process of a host: the parts of a self-test that its own test runs are left out."""


@pytest.mark.slow
def test_a_self_test_of_both_names_the_slow_link_between_them(tmp_path: Path, hosts: Hosts) -> None:
    (tmp_path / "sitecustomize.py").write_text(QUICK)
    env = {"PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    words = ("selftest", "--devices", "cpu:1", "--nodes", "2", "--out", "tested", "--json")
    with hosts.slowed(mbit_per_s=200, latency_ms=100):
        first, second = ended([hosts.start_node(host, *words, env=env) for host in range(2)])
    assert (first.code, second.code, second.out) == (3, 3, ""), first.err + second.err
    result = json.loads(first.out)
    assert result == json.loads((hosts.directories[0] / "tested" / "selftest.json").read_text())
    own = json.loads((hosts.directories[1] / "tested-node1" / "selftest.json").read_text())
    places = [(0, "hosta"), (1, "hostb"), (None, None)]
    of_each = [
        [each for each in result["checks"] if (each["node"], each["host"]) == place] for place in places
    ]
    assert of_each[0] + own["checks"] + of_each[2] == result["checks"]
    assert of_each[0][0]["name"] == own["checks"][0]["name"] == "torch and driver"
    assert [each["name"] for each in of_each[2]] == [check.name for check in NODE_CHECKS]
    failed = {check["name"]: check for check in result["checks"] if check["status"] == "failed"}
    assert failed.keys() == {"rate over nodes", "pairs of nodes"}, result
    slow = failed["pairs of nodes"]
    assert "cpu:0@0 (hosta) and cpu:0@1 (hostb): 0.0" in slow["found"]
    assert "GB/s, but the network carries 1.25" in slow["found"]
    assert "ethtool" in slow["remedy"]
    assert "the report is on node 0 (hosta)" in second.err


LEAVES = """
import os, subprocess
import torch

torch.distributed.init_process_group("gloo")
subprocess.Popen(["sleep", "2"])
print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"])
torch.distributed.destroy_process_group()
"""


@pytest.mark.slow
def test_each_node_has_its_line_of_torchrun_and_waits_for_what_its_ranks_leave(hosts: Hosts) -> None:
    hosts.write("train.py", LEAVES)
    address = ("--master-addr", ADDRESSES[0], "--master-port", "29411")
    line = ("--nnodes", "2", "--nproc-per-node", "1", *address)
    commands = [
        hosts.start(host, "--out", "left", "torchrun", *line, "--node-rank", str(host), "train.py")
        for host in range(2)
    ]
    first, second = ended(commands)
    assert (first.code, second.code) == (0, 0), first.err
    assert first.err.count("(`sleep 2`), which the program has left; Ctrl-C ends it") == 2
    assert second.out == "rank 1 of 2\n"
    assert (hosts.directories[0] / "left" / "comparison.json").exists()
