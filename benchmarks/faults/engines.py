"""The same jobs of two nodes by every engine that runs here: how many end as they should."""

import datetime
import json
import os
import secrets
import signal
import subprocess
import tempfile
import textwrap
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from benchmarks.faults.clusters import ALL, RANKS, Engine, Environ, Started, engines
from benchmarks.timing import machine_facts, record, table
from gpurun.launcher.machine.git import commit_of, git
from gpurun.launcher.rundir.files import append_lines, read_lines
from tests.integration.command import write
from tests.integration.nodes.hosts import await_file

KEPT = Path(__file__).with_name("engines.jsonl")
"""A line per job that was run, by any call."""
LEFT_S = 20.0
"""How long processes may take to end after the command or the job has."""
TOKEN = "ENGINES_BENCHMARK"
"""A variable by which the processes of a job are known."""
SOURCES = ("launcher", "src", "workloads")
"""Where gpurun itself is; below the working directory, which is the repository."""
SHORT = 7
"""Characters of a commit."""

COMPARED = """
    name: two
    workload: sleep
    params: {alpha_ms: 20, beta_ms: 20}
    devices: cpu:1
    nodes: 2
    global_batch: 8
    compare: {split: [even, [6, 2]]}
    steps: {rounds: 8}
    profile: {steps: 0}
"""
PROGRAM = """
    name: two
    script: train.py
    devices: cpu:1
    nodes: 2
    profile: {steps: 0}
"""
TRAIN = """
    import time
    import torch
    from torch.nn.parallel import DistributedDataParallel

    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    model = DistributedDataParallel(torch.nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(40):
        if step == 3:
            open(f"began-{rank}", "w").close()
        BODY
        optimizer.zero_grad()
        model(torch.randn(8, 4)).sum().backward()
        optimizer.step()
"""
FAILS = "assert rank != 1 or step < 5, 'no such thing'"


@dataclass(frozen=True)
class Tried:
    """What came of one job; a line of `KEPT`."""

    engine: str
    case: str
    when: str
    commit: str
    seconds: float
    wrong: str
    """Empty: all is as it should be."""


def check_compared(engine: Engine, directory: Path, env: Environ) -> str:
    """A comparison: both splits are measured, the uneven one is slower, gradients agree."""
    write(directory, "job.yaml", COMPARED)
    is_fine, said = engine.submit(directory, env).end()
    if not is_fine:
        return said[-2000:]
    (path,) = (directory / "runs" / "two").glob("*/comparison.json")
    comparison = json.loads(path.read_text())
    even, uneven = comparison["variants"]
    found = [(each["status"], each["vs_baseline"]["verdict"], each["split"]) for each in (even, uneven)]
    wanted = [("ok", "baseline", [4, 4]), ("ok", "slower", [6, 2])]
    error = max(variant["gradient_error"] for variant in (even, uneven))
    return "" if found == wanted and error < 1e-5 else f"{found}, gradient error {error}"


def check_failed(engine: Engine, directory: Path, env: Environ) -> str:
    """Rank 1, on the second node, raises."""
    program(directory, FAILS)
    is_fine, said = engine.submit(directory, env).end()
    words = "rank 1 raised AssertionError: no such thing"
    return "" if words in said and not is_fine else said[-2000:]


def check_cancelled(engine: Engine, directory: Path, env: Environ) -> str:
    """The engine's own way to cancel: Ctrl-C, `scancel`."""
    return _ended_early(engine, directory, env, lambda started: started.cancel(), "")


def check_killed(engine: Engine, directory: Path, env: Environ) -> str:
    """SIGKILL to gpurun on the second node, which whatever reports the failure names."""
    return _ended_early(engine, directory, env, lambda _: kill_second(env[TOKEN]), engine.second)


def _ended_early(
    engine: Engine, directory: Path, env: Environ, end: Callable[[Started], object], words: str
) -> str:
    program(directory, "time.sleep(1)")
    started = engine.submit(directory, env)
    for rank in range(2):
        await_file(directory / f"began-{rank}")
    end(started)
    is_fine, said = started.end()
    return "" if not is_fine and words in said else said[-2000:]


def program(directory: Path, body: str) -> None:
    """A job whose program does this in every step."""
    write(directory, "train.py", textwrap.dedent(TRAIN).replace("BODY", body))
    write(directory, "job.yaml", PROGRAM)


def kill_second(token: str) -> None:
    """SIGKILL to gpurun on the second node: to its first process, whose ranks and supervisor must follow."""
    os.kill(min(pid for pid in processes_of(token) if _is_second(pid)), signal.SIGKILL)


def _is_second(pid: int) -> bool:
    words, variables = _arguments(pid), dict(each.partition("=")[::2] for each in _environment(pid))
    if not any(word.endswith("job.yaml") for word in words):
        return False
    if "--node-rank" in words:
        return words[words.index("--node-rank") + 1] == "1"
    return next((variables[name] for name in RANKS if name in variables), "") == "1"


def _arguments(pid: int) -> list[str]:
    return _words(pid, "cmdline")


def _environment(pid: int) -> list[str]:
    return _words(pid, "environ")


def _words(pid: int, name: str) -> list[str]:
    try:
        return Path(f"/proc/{pid}/{name}").read_text(errors="replace").split("\0")
    except OSError:
        return []


def processes_of(token: str) -> list[int]:
    """All that have the variable."""
    numbers = (int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal())
    return [pid for pid in numbers if f"{TOKEN}={token}" in _environment(pid)]


CASES = {
    "same comparison": check_compared,
    "failed rank named": check_failed,
    "cancelled": check_cancelled,
    "node killed": check_killed,
}


def try_case(name: str, engine: Engine, case: str) -> Tried:
    """One job, and what it left behind."""
    began_s, token = time.monotonic(), secrets.token_hex(8)
    with tempfile.TemporaryDirectory() as directory:
        try:
            wrong = CASES[case](engine, Path(directory), {TOKEN: token})
        except (AssertionError, subprocess.TimeoutExpired) as error:  # it took too long
            wrong = str(error)
        deadline = time.monotonic() + LEFT_S
        while (left := processes_of(token)) and time.monotonic() < deadline:
            time.sleep(0.1)
        for pid in left:  # so that the next case doesn't meet them
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    wrong = f"left behind: {[_arguments(pid) for pid in left]}" if left and not wrong else wrong
    when = f"{datetime.datetime.now():%Y-%m-%d %H:%M}"
    return Tried(name, case, when, (commit_of(Path()) or "")[:SHORT], time.monotonic() - began_s, wrong)


def main(times: int = 1, only: Sequence[str] = ALL, since: str | None = None) -> None:
    """Each case so many times by each engine, in turn, and the section "Engines" of all since a commit.

    Args:
        times: 0 only writes the section.
        only: the engines that are run.
        since: the commit; without one, the last that changed gpurun itself.
    """
    unknown = [name for name in only if name not in ALL]
    if unknown:
        raise SystemExit(f"there is no engine {', '.join(unknown)}; there are {', '.join(ALL)}")
    if git(Path(), "status", "--porcelain", "--", *SOURCES).out:
        raise SystemExit(f"commit {', '.join(SOURCES)} first: results are kept by commit")
    first = commit_of(Path(), since or git(Path(), "log", "-1", "--format=%H", "--", *SOURCES).out)
    if first is None:
        raise SystemExit(f"there is no commit {since}")
    facts = machine_facts()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # in the background of a shell it is ignored
    with engines(only if times else ()) as found:
        for _ in range(times):
            for name, engine in found.items():
                for case in CASES:
                    append_lines(KEPT, [try_case(name, engine, case)])
    record("Engines", text_of(counted(list(read_lines(KEPT, Tried)), first)), facts)


def counted(tried: Sequence[Tried], since: str) -> list[Tried]:
    """Those of this commit and of later ones."""
    commits = {attempt.commit for attempt in tried}
    later = {each for each in commits if git(Path(), "merge-base", "--is-ancestor", since, each).code == 0}
    return [attempt for attempt in tried if attempt.commit in later]


def text_of(tried: Sequence[Tried]) -> str:
    """Right of how many, by engine and case; and what was wrong."""
    names = [name for name in ALL if any(attempt.engine == name for attempt in tried)]
    rows = [[name, *(_score(tried, name, case) for case in CASES)] for name in names]
    wrong = [
        f"- {attempt.engine}, {attempt.case}, at {attempt.commit}: {' '.join(attempt.wrong.split())[-300:]}"
        for attempt in tried
        if attempt.wrong
    ]
    commits = ", ".join(dict.fromkeys(attempt.commit for attempt in tried))
    text = (
        "The same jobs of two nodes by each engine. Same comparison: both splits are measured, 6/2 is "
        "slower, gradients agree. Failed rank: the report names rank 1 and its error. Cancelled: by Ctrl-C, "
        "`scancel`, or SIGTERM to Ray's driver, as `ray job stop` sends it. Node killed: "
        "SIGKILL to gpurun on the second node, which is named. In all of them no "
        "process is left. `python -m benchmarks engines --times N` adds to these, which are those at "
        f"{commits}; `--since COMMIT` counts earlier ones too.\n\n"
    )
    return "\n".join([text + table(["engine", *CASES], rows), "", *wrong])


def _score(tried: Sequence[Tried], engine: str, case: str) -> str:
    found = [attempt for attempt in tried if (attempt.engine, attempt.case) == (engine, case)]
    return f"{sum(not attempt.wrong for attempt in found)} of {len(found)}"
