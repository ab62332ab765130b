"""Jobs on two hosts: they run, and whatever goes wrong ends them on both, with its true cause."""

import json
import os
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.command import MODEL
from tests.integration.hosts import Hosts, await_file, ended, lacks

pytestmark = pytest.mark.skipif(lacks("ip", "tc", "unshare"), reason="needs root and iproute2")

JOB = """
name: two
workload: model.py:build
devices: cpu:1
nodes: 2
global_batch: 8
compare: {split: [even, [6, 2]]}
steps: {rounds: 2, early_stop: false}
profile: {steps: 1}
"""
QUIET = "\ndef misbehave(x, calls):\n    return\n"
ENDLESS = "\ndef misbehave(x, calls):\n    time.sleep(0.01)\n"
LONG = ("--set", "steps.rounds=1000", "--set", "profile.steps=0")


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    with Hosts(tmp_path) as both:
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


def clock_ahead(folder: Path) -> dict[str, str]:
    """The environment of a host whose clock is ahead."""
    (folder / "clock").mkdir()
    (folder / "clock" / "sitecustomize.py").write_text(CLOCK)
    return {"PYTHONPATH": os.pathsep.join([str(folder / "clock"), os.environ.get("PYTHONPATH", "")])}


def prepare(hosts: Hosts, body: str = QUIET, job: str = JOB) -> None:
    hosts.write("model.py", textwrap.dedent(MODEL) + body)
    hosts.write("job.yaml", job)


def test_a_run_over_a_slow_link_with_clocks_apart(tmp_path: Path, hosts: Hosts) -> None:
    prepare(hosts)
    with hosts.slowed(mbit_per_s=5, latency_ms=400):
        clocks = ({}, clock_ahead(tmp_path))
        first, second = ended(hosts.start_both("job.yaml", "--out", "run", env=clocks))
    assert first.code == 0, first.err
    assert second.code == 0, second.err
    run = hosts.folders[0] / "run"
    comparison = json.loads((run / "comparison.json").read_text())
    assert comparison["complete"]
    for variant in comparison["variants"]:
        assert variant["status"] == "ok"
        assert [(rank["host"], rank["device"]) for rank in variant["ranks"]] == [
            ("hosta", "cpu:0@0"),
            ("hostb", "cpu:0@1"),
        ]
        assert all((run / rank["trace"]).stat().st_size > 0 for rank in variant["ranks"])
    assert (run / "launches" / "01-ddp-2" / "log" / "rank1.log").is_file()
    assert {path.name for path in hosts.folders[1].iterdir()} == {"job.yaml", "model.py"}
    assert not list(hosts.temporary[1].glob("gpurun-*"))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_failure_on_either_host_is_explained_on_both(hosts: Hosts, rank: int) -> None:
    prepare(hosts, f"\ndef misbehave(x, calls):\n    if os.environ['RANK'] == '{rank}' and calls > 5:\n"
                   "        raise ValueError('no such thing')\n")  # fmt: skip
    first, second = ended(hosts.start_both("job.yaml", "--out", "run", "--set", "compare.split=[even]"))
    for end in (first, second):
        assert end.code == 4, end.err
        assert f"rank {rank} raised ValueError: no such thing" in end.err
        assert "model.py" in end.err
    comparison = json.loads((hosts.folders[0] / "run" / "comparison.json").read_text())
    assert f"rank {rank} raised ValueError" in comparison["variants"][0]["reason"]


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_agent_ends_the_other_node(hosts: Hosts, victim: int) -> None:
    prepare(hosts, ENDLESS)
    commands = hosts.start_both("job.yaml", "--out", "run", *LONG)
    await_file(hosts.folders[0] / "run" / "launches" / "01-ddp-2" / "events.jsonl", '"warmup"')
    commands[victim].kill()
    survivor = ended(commands)[1 - victim]
    assert survivor.code == 4
    assert f"node {victim} (host{'ab'[victim]}) is gone" in survivor.err


def test_a_cut_link_ends_both_nodes(hosts: Hosts) -> None:
    prepare(hosts, ENDLESS)
    commands = hosts.start_both("job.yaml", "--out", "run", *LONG)
    await_file(hosts.folders[0] / "run" / "launches" / "01-ddp-2" / "events.jsonl", '"warmup"')
    hosts.cut()
    first, second = ended(commands)
    assert (first.code, second.code) == (4, 4)
    assert "node 1 (hostb) is gone" in first.err
    assert "node 0 (hosta) is gone" in second.err
    kept = re.search(r"is kept in (\S+)", second.err)
    assert kept
    assert (Path(kept[1]) / "launches" / "01-ddp-2" / "log" / "rank1.log").is_file()
