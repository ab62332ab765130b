"""Runs that a whole test session shares: each is made by the first test that asks for it, and only read.

Reports, the tab, `trace`, `diff`, `runs` and `logs` are tested on them. A test that changes a run copies it.
"""

import fcntl
import json
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from gpurun.launcher.machine.git import git
from tests import forkserver
from tests.integration.command import (
    MODEL_JOB,
    SLEEP_JOB,
    Result,
    free_port,
    gpurun,
    misbehaving,
    write,
)

PROGRAMS = Path(__file__).parent / "integration" / "programs" / "programs.py"


def made(root: Path, name: str) -> Result:
    """What the command said that made the run, which is at `Result.directory / "run"`.

    Args:
        root: a directory that all processes of the session share.
    """
    directory = root / name
    directory.mkdir(parents=True, exist_ok=True)
    kept = directory / "made.json"
    with (directory / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # made by another process of the session, it may take seconds
        if not kept.exists():
            shutil.rmtree(directory / "work", ignore_errors=True)  # of an asker that failed
            (directory / "work").mkdir()
            result = RECIPES[name](directory / "work")
            kept.write_text(json.dumps(asdict(result) | {"directory": str(result.directory)}))
    return Result(**{**(found := json.loads(kept.read_text())), "directory": Path(found["directory"])})


@contextmanager
def unchanged(run: Path) -> Iterator[None]:
    """Fails if a file of the run has come, gone or been written meanwhile, or the run has been moved."""
    before = _files(run)
    yield
    assert _files(run) == before, f"{run} is shared by all tests: copy it to change it"


def _files(run: Path) -> dict[Path, tuple[int, int]]:
    stats = {path: path.lstat() for path in run.rglob("*")}
    files = {path: (stat.st_mtime_ns, stat.st_size) for path, stat in stats.items() if not path.is_dir()}
    return files | {run: (run.lstat().st_ctime_ns, 0)}


def splits(directory: Path) -> Result:
    """Two splits under DDP, with traces: 4/4 takes 25 ms, 6/2 takes 35."""
    write(directory, "job.yaml", SLEEP_JOB)
    return gpurun(directory, "job.yaml", "--out", "run")


def strategies(directory: Path) -> Result:
    """Four strategies; a step of each takes 10 ms. Its output is JSON."""
    job = """
        workload: sleep
        params: {alpha_ms: 10}
        devices: cpu:2
        global_batch: 4
        compare: {strategy: [single, ddp, dp, zero1]}
        steps: {rounds: 4, launches: 2}
        profile: {steps: 0}
        baseline: {strategy: ddp}
    """
    write(directory, "job.yaml", job)
    return gpurun(directory, "job.yaml", "--out", "run", "--json")


SEGFAULT = "__import__('ctypes').string_at(0)"
FAULTS = {
    "8/2": ("raise ValueError('no such thing')", "ValueError: no such thing"),
    "9/1": ("sys.exit(3)", "exit code 3"),
    "1/9": ("os._exit(4)", "exit code 4"),
    "2/8": ("os.kill(os.getpid(), signal.SIGKILL)", "SIGKILL"),
    "3/7": (SEGFAULT, "SIGSEGV: Segmentation fault at {directory}/model.py:{line} in misbehave"),
}
"""By split: what rank 1 does once the gradients have been checked and the warm-up has begun, and its name."""
ALL_LEAVE = "7/3"
"""In this one all ranks end with 0, which is a failure too."""


def failed(directory: Path) -> Result:
    """A rank fails in each way of `FAULTS`; two more splits are measured."""
    faults = "".join(
        f"\n    if RANK == 1 and x.shape[0] == {split.rpartition('/')[2]}: {body}"
        for split, (body, _) in FAULTS.items()
    )
    leave = "\n    if x.shape[0] == {0: 7, 1: 3}[RANK]: os._exit(0)"
    names = ", ".join(f"[{split.replace('/', ', ')}]" for split in (*FAULTS, ALL_LEAVE, "6/4"))
    job = MODEL_JOB.replace("[6, 2], [5, 3]", names).replace("global_batch: 8", "global_batch: 10")
    misbehaving(directory, f"RANK = int(os.environ['RANK'])\nif calls > 20:{leave}{faults}", job)
    return gpurun(directory, "job.yaml", "--out", "run")


def hang(directory: Path) -> Result:
    """Rank 1 sleeps for ever in the split 6/2, until `timeout` ends it."""
    misbehaving(directory, "if x.shape[0] == 2 and calls > 20: time.sleep(1000)")
    return gpurun(directory, "job.yaml", "--out", "run", "--set", "timeout=5s")


def out_of_memory(directory: Path) -> Result:
    """7/1 is out of memory and 6/2 fails; resumed, 6/2 is measured. `before` has the first steps of 5/3."""
    misbehaving(
        directory,
        """
        if x.shape[0] == 7: torch.empty(1 << 50)
        if x.shape[0] == 6 and not os.path.exists("fixed"): raise ValueError("broken")
        """,
        MODEL_JOB.replace("[5, 3]", "[5, 3], [7, 1]"),
    )
    gpurun(directory, "job.yaml", "--out", "run").ended(4)
    shutil.copy(directory / "run" / "variants" / "ddp-2-5-3" / "rank0.jsonl", directory / "before")
    (directory / "fixed").touch()
    return gpurun(directory, "--resume", "run")


def interrupted(directory: Path) -> Result:
    """Ended by Ctrl-C in its third round."""
    job = SLEEP_JOB.replace("rounds: 8", "rounds: 4")
    write(directory, "job.yaml", job.replace("profile: {steps: 1}", "profile: {steps: 0}"))
    pipe = subprocess.PIPE
    argv = ("gpurun", "job.yaml", "--out", "run")
    with forkserver.start(*argv, cwd=directory, stdout=pipe, stderr=pipe, start_new_session=True) as command:
        events = directory / "run/launches/01-ddp-2/events.jsonl"
        while command.poll() is None and not (events.exists() and '"round":3' in events.read_text()):
            time.sleep(0.01)
        command.send_signal(signal.SIGINT)
        said, messages = command.communicate(timeout=60)
    return Result(command.returncode, said, messages, directory)


NAMES = (
    *("ddp", "no_destroy", "loader", "children", "ending", "seeds", "threads", "chatty"),
    *("wrong_exit", "early"),
)
"""The programs of `programs.py` that run; the last two fail."""


def program(directory: Path) -> Result:
    """All of `NAMES`, each a variant, on two ranks."""
    shutil.copy(PROGRAMS, directory)
    job = f"""
        script: programs.py
        devices: cpu:2
        env: {{GIVEN: by the job, DIRECTORY: {directory}, OMP_NUM_THREADS: 3}}
        seed: 7
        compare: {{args: {json.dumps([[name] for name in NAMES])}}}
        steps: {{launches: 1}}
        profile: {{steps: 2}}
        logs: {{keep: 1 MiB}}
    """
    write(directory, "job.yaml", job)
    return gpurun(directory, "job.yaml", "--out", "run")


def nodes(directory: Path) -> Result:
    """Two splits on two nodes, both of them here, that share a directory."""
    text = MODEL_JOB.replace("cpu:2", "cpu:1").replace(", [5, 3]", "")
    misbehaving(directory, 'assert "GPURUN_SECRET" not in os.environ, "it is for nodes alone"', text)
    with (directory / "job.yaml").open("a") as job:
        job.write("nodes: 2\n")
    place = ("--rendezvous", f"localhost:{free_port()}", "--out", "run")
    null = subprocess.DEVNULL
    argv = ("gpurun", "job.yaml", "--node-rank", "1", *place)
    with forkserver.start(*argv, cwd=directory, stdout=null, stderr=null) as other:
        result = gpurun(directory, "job.yaml", "--node-rank", "0", *place)
        if result.code:
            other.kill()
    assert other.returncode == result.code == 0, result.err
    return result


GATED = """
    import time
    import torch
    from settings import STEP_S

    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters())
    for _ in range(30):
        time.sleep(STEP_S)
        model(torch.randn(2, 4)).sum().backward()
        optimizer.step()
"""


def gate(directory: Path) -> Result:
    """A program whose steps sleep 20 ms, against its commit, where they sleep 2. Its output is JSON."""
    root = directory / "repository"
    (root / "library").mkdir(parents=True)
    write(root, "library/settings.py", "STEP_S = 0.002\n")
    write(root, "program.py", GATED)
    write(root, "job.yaml", "script: program.py\ndevices: cpu:1\nprofile: {steps: 0}\n")
    git(root, "init", "--quiet", "--initial-branch", "main")
    git(root, "add", "--all")
    identity = ("-c", "user.name=a", "-c", "user.email=a@b")
    assert git(root, *identity, "commit", "--quiet", "--message", "x").code == 0
    write(root, "library/settings.py", "STEP_S = 0.020\n")
    args = ("gate", "job.yaml", "--against", "main", "--out", "../run", "--fail-slower", "50%", "--json")
    files = ("--junit", "../gate.xml", "--markdown", "../gate.md")
    result = gpurun(root, *args, *files, env={"PYTHONPATH": str(root / "library")})
    return Result(result.code, result.out, result.err, directory)


def search(directory: Path) -> Result:
    """`gpurun tune` over two strategies, two splits and two workloads. Its output is JSON."""
    job = """
        workload: sleep
        devices: cpu:2
        global_batch: 8
        gradient_check: false
        profile: {steps: 0}
        compare:
          strategy: [ddp, single]
          split: [even, [6, 2]]
          params: [{alpha_ms: 1, beta_ms: 1}, {alpha_ms: 6, beta_ms: 1}]
    """
    write(directory, "job.yaml", job)
    return gpurun(directory, "tune", "job.yaml", "--out", "run", "--budget", "8s", "--json")


def selftest(directory: Path) -> Result:
    """The self-test of two CPU devices. Its output is JSON."""
    return gpurun(directory, "selftest", "--devices", "cpu:2", "--out", "run", "--json")


RECIPES: dict[str, Callable[[Path], Result]] = {
    make.__name__: make
    for make in (
        splits,
        strategies,
        failed,
        hang,
        out_of_memory,
        interrupted,
        program,
        nodes,
        gate,
        search,
        selftest,
    )
}
"""How each is made, by name."""
