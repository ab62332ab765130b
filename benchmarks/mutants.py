"""Hand-made faults of gpurun, to compare two test suites: a faster one has to notice as many of them.

    python -m benchmarks.mutants check [--tree DIR]
    python -m benchmarks.mutants run --tree DIR --out FILE.jsonl --whole "COMMAND" [--first "OPTIONS"]
                                     [--names A B]

`run` edits one file of the tree at a time, in place, and always restores it, also after Ctrl-C and SIGTERM.
For each mutant it runs the tests that most probably notice it; if these pass, the whole suite by COMMAND.
It appends a line to FILE.jsonl for each, and skips the names that are there already (except those with the
result `error`). A mutant whose verdict came by a timeout counts as killed, by `timeout`. The tree needs an
environment of its own.
"""

import argparse
import contextlib
import ctypes
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

FIRST_S, WHOLE_S = 300.0, 1500.0
DEFAULT_TREE = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Mutant:
    """One fault."""

    name: str
    path: str
    """Relative to the tree."""
    old: str
    """Occurs exactly once in the file."""
    new: str
    first: tuple[str, ...]
    """Test files or directories that most probably notice it; those that the tree lacks are left out."""
    fault: str
    """What a user would notice."""


MUTANTS: list[Mutant] = [
    # --- processes/ -----------------------------------------------------------------------------------------
    Mutant(
        "nodes-secret-reaches-ranks",
        "launcher/processes/guard.py",
        "        env.pop(SECRET_VARIABLE, None)\n",
        "        env.get(SECRET_VARIABLE, None)\n",
        ("tests/integration/programs/test_secrets.py", "tests/integration/nodes/test_nodes.py"),
        "the secret by which nodes know each other stays in the environment of every rank",
    ),
    Mutant(
        "terminated-ranks-look-failed",
        "launcher/processes/pool.py",
        "            self._signals += (number,)\n",
        "            self._signals += ()\n",
        ("tests/integration/processes", "tests/unit/failures/test_root_cause.py"),
        "ranks that the command itself ended by SIGTERM count as failures of their own",
    ),
    Mutant(
        "second-ctrl-c-does-not-hurry",
        "launcher/processes/incoming_signals.py",
        'elif number == signal.SIGINT and killed_s == float("inf"):',
        'elif number == signal.SIGTERM and killed_s == float("inf"):',
        ("tests/integration/processes/test_signals.py",),
        "Ctrl-C during the clean-up doesn't kill the ranks at once; a batch system's second SIGTERM does",
    ),
    # --- run/ -----------------------------------------------------------------------------------------------
    Mutant(
        "resumed-rounds-repeated",
        "launcher/run/attempts.py",
        "v: max(1, num - done) for v, num in rounds.items()",
        "v: max(done, num) for v, num in rounds.items()",
        ("tests/unit/run/test_session.py", "tests/integration/run/test_run.py"),
        "a launch that starts again repeats the rounds that are already measured",
    ),
    Mutant(
        "timeouts-exit-with-0",
        "launcher/run/job.py",
        'lost = [v.id for v in variants if v.status in ("failed", "timeout", "hung")]',
        'lost = [v.id for v in variants if v.status in ("failed",)]',
        ("tests/unit/failures/test_root_cause.py", "tests/unit/run"),
        "a run whose variants timed out exits with 0 instead of 4",
    ),
    Mutant(
        "killed-attempt-forgotten",
        "launcher/run/max_batch.py",
        'if attempt.outcome in ("begins", "fails") and attempt.batch not in ended',
        'if attempt.outcome in ("fails",) and attempt.batch not in ended',
        ("tests/unit/run/test_max_batch.py", "tests/integration/run/test_max_batch.py"),
        "`global_batch: max` tries a batch again and again whose process was killed for memory",
    ),
    # --- nodes/ and its start -------------------------------------------------------------------------------
    Mutant(
        "ranks-in-node-0s-directory",
        "launcher/nodes/follower.py",
        "cwd=places.translate(request.cwd, self.name)",
        "cwd=request.cwd",
        ("tests/unit/nodes/test_nodes.py", "tests/integration/nodes/test_nodes.py"),
        "ranks of another node start in the directory where the job is on node 0",
    ),
    Mutant(
        "rejoined-node-leaves-holes",
        "launcher/nodes/transfer.py",
        "        self.base_bytes = dict(self.sent_bytes)\n",
        "        self.base_bytes = {}\n",
        ("tests/unit/nodes/test_transfer.py", "tests/integration/nodes/test_nodes.py"),
        "after a node is replaced, the others' logs and records get holes of zeros on node 0",
    ),
    Mutant(
        "secret-readable-by-group",
        "launcher/nodes/transport/credentials.py",
        "stat.S_IMODE(found.st_mode) & 0o077",
        "stat.S_IMODE(found.st_mode) & 0o007",
        ("tests/unit/nodes/test_transport.py",),
        "a secret that the user's group can read is accepted",
    ),
    Mutant(
        "shared-token-left-behind",
        "launcher/start_on_nodes.py",
        "            (directory / name).unlink()\n",
        "            (directory / name).touch()\n",
        ("tests/integration/nodes/test_nodes.py", "tests/unit/nodes"),
        "every job on several nodes leaves a `.shared-…` file in its run directory",
    ),
    # --- inspect/ -------------------------------------------------------------------------------------------
    Mutant(
        "second-look-shows-old-stacks",
        "launcher/inspect/snapshot.py",
        "control.read(stacks_name(rank), before[rank])",
        "control.read(stacks_name(rank), 0)",
        ("tests/integration/run/test_operations.py", "tests/integration/nodes/test_nodes.py"),
        "the second `gpurun stacks` of a launch shows where the ranks were at the first",
    ),
    Mutant(
        "missed-collective-off-by-one",
        "launcher/inspect/snapshot.py",
        "return Gap(CalledCollective(group, lowest + 1, name, backend), waiting, missing)",
        "return Gap(CalledCollective(group, lowest, name, backend), waiting, missing)",
        ("tests/unit/inspect/test_collectives.py",),
        "the number of the collective in which ranks wait is that of the one before",
    ),
    # --- failures/ ------------------------------------------------------------------------------------------
    Mutant(
        "survivor-blamed-for-killed-rank",
        "launcher/failures/root_cause.py",
        "each.time_ns - _REAP_DELAY_NS <= first.time_ns",
        "each.time_ns <= first.time_ns",
        ("tests/unit/failures/test_root_cause.py", "tests/integration/run/test_failures.py"),
        "a rank that lost its peer is blamed instead of the killed one, whose end was noticed a moment later",
    ),
    Mutant(
        "failures-show-secrets",
        "launcher/failures/reporter.py",
        "text = self.hide(plain(text))  # it quotes what programs wrote",
        "text = plain(text)  # it quotes what programs wrote",
        ("tests/integration/programs/test_secrets.py", "tests/unit/test_masking.py"),
        "the explanation of a failure shows tokens that the program has printed",
    ),
    # --- logs/ ----------------------------------------------------------------------------------------------
    Mutant(
        "each-log-keeps-the-whole-limit",
        "launcher/logs/relay.py",
        "share_bytes = keep_bytes // max(len(self._logs), 1)",
        "share_bytes = keep_bytes // 1",
        ("tests/unit/run/test_operations.py", "tests/integration/run/test_operations.py"),
        "the logs of n ranks take n times what `logs: keep` allows",
    ),
    # --- worker/ --------------------------------------------------------------------------------------------
    Mutant(
        "ranks-share-random-numbers",
        "launcher/worker/entry/zygote.py",
        '        sys.modules["torch"].seed()\n',
        '        sys.modules["torch"].initial_seed()\n',
        ("tests/integration/processes",),
        "all ranks, and all launches, of a program without a seed draw the same random numbers of torch",
    ),
    Mutant(
        "users-broken-connection-is-no-cause",
        "launcher/worker/base/failure.py",
        "        return in_torch(error)\n",
        "        return True\n",
        (
            "tests/unit/failures",
            "tests/integration/run/test_failures.py",
            "tests/integration/programs/test_programs.py",
        ),
        "a rank whose own connection broke (to a data server) is said to have lost its peer only",
    ),
    Mutant(
        "traced-steps-are-timed",
        "launcher/worker/program/program_rank.py",
        "is_slowed = self.profilers.slow_the_step() or self._is_slowed",
        "is_slowed = self.profilers.slow_the_step() or self._is_captured",
        ("tests/unit/worker/test_program_steps.py", "tests/integration/programs/test_programs.py"),
        "the steps of a program that its planned trace slows down count as timed",
    ),
    Mutant(
        "every-epoch-in-one-order",
        "launcher/worker/training/batches.py",
        "generator=step_generator(self.seed, epoch))",
        "generator=step_generator(self.seed, 0))",
        (
            "tests/integration/training/test_trainer_state.py",
            "tests/integration/training",
            "tests/unit/worker",
        ),
        "every epoch goes through the dataset in the order of the first",
    ),
    Mutant(
        "gradients-shown-as-activations",
        "launcher/worker/meters/memory.py",
        '        if phase == "backward":\n',
        '        if phase == "forward":\n',
        ("tests/unit/worker/test_memory.py", "tests/integration/training"),
        "in what fills the memory, gradients are counted as activations",
    ),
    Mutant(
        "capture-takes-a-step-more",
        "launcher/worker/profiling.py",
        "        if self._recorded < self._request.steps:\n",
        "        if self._recorded <= self._request.steps:\n",
        ("tests/unit/worker/test_program_steps.py", "tests/integration/run/test_operations.py"),
        "`gpurun capture --steps 3` of a program records four steps",
    ),
    Mutant(
        "nan-gradients-pass",
        "launcher/worker/training/gradient_check.py",
        "    if error is None or error <= limit or is_compressed:  # NaN is not ≤ anything\n",
        "    if error is None or not error > limit or is_compressed:  # NaN is not ≤ anything\n",
        ("tests/integration/training/test_gradients.py", "tests/integration/training"),
        "a variant whose gradient isn't a number gets no warning",
    ),
    # --- cli/ -----------------------------------------------------------------------------------------------
    Mutant(
        "directory-of-runs-loses-its-newest",
        "launcher/cli/commands/runs.py",
        "    if found != path and path.name != LATEST:\n",
        "    if found == path and path.name == LATEST:\n",
        ("tests/unit/cli/test_command_line.py",),
        "`gpurun runs --delete runs/NAME` deletes the newest run in it instead of refusing",
    ),
    Mutant(
        "undecided-gate-passes",
        "launcher/cli/output.py",
        "    if gate.outcome != NOT_SLOWER:\n",
        '    if gate.outcome not in (NOT_SLOWER, "undecided"):\n',
        (
            "tests/unit/compare/test_diff.py",
            "tests/unit/compare/test_gate.py",
            "tests/integration/run/test_gate.py",
        ),
        "an undecided gate exits with 0 instead of 6",
    ),
    # --- everything else: one each --------------------------------------------------------------------------
    Mutant(
        "proportional-split-upside-down",
        "launcher/balance.py",
        "split_proportional(batch, [1 / beta for beta in betas])",
        "split_proportional(batch, [1 * beta for beta in betas])",
        ("tests/unit/balance/test_balance.py",),
        "the split by speed, next to the balanced one, gives the slower device more samples",
    ),
    Mutant(
        "one-beaten-rival-makes-a-winner",
        "launcher/compare/ranking.py",
        "return all(rival.is_slower for rival in self.rivals)",
        "return any(rival.is_slower for rival in self.rivals)",
        ("tests/unit/compare",),
        "a variant is called the fastest as soon as a single other one is shown to be slower",
    ),
    Mutant(
        "sold-gigabytes-are-gib",
        "launcher/jobfile/values.py",
        "return sizes[0] * 10**9",
        "return sizes[0] * GIB",
        ("tests/unit/jobfile", "tests/unit/plan"),
        "`memory: H100 80GB` is taken for 80 GiB, 7 % more than the GPU has",
    ),
    Mutant(
        "live-temporary-directory-removed",
        "launcher/machine/helper_process.py",
        "if is_own(directory, purpose) and not is_in_use(directory) and not is_kept(directory):",
        "if is_own(directory, purpose) and not is_kept(directory):",
        ("tests/integration/tensorboard", "tests/unit/machine", "tests/integration/processes"),
        "a command removes the temporary directories of another one that still runs",
    ),
    Mutant(
        "max-batch-overfills-a-device",
        "launcher/plan/combination.py",
        "            yield min(cap * sum(weights) // weight for cap, weight in pairs)\n",
        "            yield max(cap * sum(weights) // weight for cap, weight in pairs)\n",
        ("tests/unit/run/test_max_batch.py", "tests/unit/plan"),
        "`global_batch: max` with a ratio such as 3:1 chooses a batch that one device can't hold",
    ),
    Mutant(
        "gradient-agreement-understated",
        "launcher/report/footnotes.py",
        "digit = ceil(error / 10**exponent)",
        "digit = ceil(error / 10**exponent - 0.5)",
        ("tests/unit/report/test_table.py", "tests/unit/report"),
        "`Gradients agree to 2e-7` although they differ by more: rounded to nearest, not up",
    ),
    Mutant(
        "reused-pid-holds-a-claim",
        "launcher/rundir/claim.py",
        "return self.boot_id == boot_id() and start_ticks(self.pid) == self.start_ticks",
        "return self.boot_id == boot_id() and start_ticks(self.pid) is not None",
        (
            "tests/unit/run/test_operations.py",
            "tests/integration/processes/test_other_hosts.py",
            "tests/unit/rundir",
        ),
        "a run whose command was killed stays `in use` once another process has its number",
    ),
    Mutant(
        "requeued-job-resumes-on-other-nodes",
        "launcher/schedulers/slurm.py",
        '[ "$(cat "$out.nodes")" = "$SLURM_JOB_NODELIST" ]',
        '[ "$(cat "$out.nodes")" != "$SLURM_JOB_NODELIST" ]',
        ("tests/unit/schedulers/test_slurm_script.py", "tests/unit/schedulers"),
        "queued again on the same nodes, a Slurm job begins again; on others, it mixes times of both",
    ),
    Mutant(
        "half-failed-combination-is-a-finalist",
        "launcher/search/policy.py",
        "if all(trial.log_time is not None for trial in own)",
        "if any(trial.log_time is not None for trial in own)",
        ("tests/unit/search/test_policy.py", "tests/unit/search"),
        "a combination of which a later trial failed can win `gpurun tune`",
    ),
    Mutant(
        "limits-of-cpus-and-gpus-swapped",
        "launcher/selftest/machine_checks.py",
        "LEAST_OF_BEST[seen.kind.is_host]",
        "LEAST_OF_BEST[not seen.kind.is_host]",
        ("tests/unit/selftest",),
        "a GPU may be half as fast as its like before the self-test says so; a CPU device not 15 % slower",
    ),
    Mutant(
        "level-of-the-next-look",
        "launcher/stats/estimates.py",
        "if look.launches >= launches",
        "if look.launches > launches",
        ("tests/unit/stats/test_stats_paired.py", "tests/unit/stats"),
        "an interval is given the level of the look after its own",
    ),
    Mutant(
        "progress-counts-the-running-round",
        "launcher/tensorboard_plugin/answers/live.py",
        "min(max(rounds - 1, 0), launch.rounds)",
        "min(max(rounds, 0), launch.rounds)",
        ("tests/unit/tensorboard_plugin/test_tab_progress.py", "tests/unit/tensorboard_plugin"),
        "the tab and `gpurun metrics` count the round that runs as done",
    ),
    Mutant(
        "waiting-for-data-drawn-twice",
        "launcher/tensorboard_plugin/static/shared/phases.js",
        "(rank.idle_ms ?? 0) - input,",
        "(rank.idle_ms ?? 0),",
        ("tests/browser/test_tab.py", "tests/browser/test_report_file.py", "tests/browser"),
        "in the tab, time without data counts as input and once more as idle: bars are longer than the step",
    ),
    Mutant(
        "copies-under-communication-exposed",
        "launcher/trace/analysis/digest.py",
        "inside.copies.subtract(inside.compute.join(inside.comm))",
        "inside.copies.subtract(inside.compute)",
        ("tests/unit/trace/test_trace_steps.py", "tests/unit/trace"),
        "copies that overlap communication count as exposed: the parts of a step add up to more than it",
    ),
    Mutant(
        "ties-go-to-the-later-device",
        "launcher/splits.py",
        "(samples[device] - quotas[device], device)",
        "(samples[device] - quotas[device], -device)",
        ("tests/unit/test_splits.py",),
        "1:1 of 9 samples is 4/5, not 5/4 as documented",
    ),
    Mutant(
        "short-secrets-shown",
        "launcher/masking.py",
        "if len(value) >= SHORTEST and not is_mask(value)",
        "if len(value) >= SHORT and not is_mask(value)",
        ("tests/unit/test_masking.py",),
        "passwords of four to seven characters are not masked in messages",
    ),
    # --- workloads/ -----------------------------------------------------------------------------------------
    Mutant(
        "sigmoid-after-the-last-layer",
        "workloads/classics.py",
        "nn.Sequential(*layers[:-1])",
        "nn.Sequential(*layers)",
        ("tests/unit/test_shi2016.py", "tests/unit/workloads"),
        "the fully connected networks end with a sigmoid, which the published ones don't have",
    ),
    Mutant(
        "text-one-byte-short",
        "workloads/gpt.py",
        "torch.randint(len(text) - length + 1, (size, 1), generator=generator)",
        "torch.randint(len(text) - length, (size, 1), generator=generator)",
        ("tests/unit/workloads",),
        "the last bytes of a text are never read, and one just long enough is refused by an error of torch",
    ),
]


# --- check --------------------------------------------------------------------------------------------------


def mistakes(tree: Path) -> list[str]:
    """What is wrong with the table, or doesn't fit the tree."""
    found: list[str] = []
    names = [one.name for one in MUTANTS]
    found += [f"{name}: the name occurs twice" for name in sorted({n for n in names if names.count(n) > 1})]
    for one in MUTANTS:
        file = tree / one.path
        if not file.is_file():
            found.append(f"{one.name}: there is no {file}")
            continue
        text = file.read_text(encoding="utf-8")
        if (count := text.count(one.old)) != 1:
            found.append(f"{one.name}: `old` occurs {count} times in {one.path}")
            continue
        if one.old == one.new:
            found.append(f"{one.name}: nothing changes")
        if one.path.endswith(".py") and (why := _compile_error(text.replace(one.old, one.new), one.path)):
            found.append(f"{one.name}: {why}")
        if not any((tree / place).exists() for place in one.first):
            found.append(f"{one.name}: none of its `first` exists, so that only the whole suite is run")
    return found


def _compile_error(text: str, path: str) -> str | None:
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory, Path(path).name)
        file.write_text(text, encoding="utf-8")
        done = subprocess.run([sys.executable, "-m", "py_compile", str(file)], capture_output=True, text=True)
    return done.stderr.strip() if done.returncode else None


# --- run ----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def mutated(tree: Path, one: Mutant) -> Iterator[None]:
    """The tree with the fault, for as long as the block lasts; content and times are as before afterwards.

    The mutant's time differs from the original's by over a second, so that no compiled file of the one is
    taken for one of the other.
    """
    file = tree / one.path
    before, status = file.read_bytes(), file.stat()
    text = before.decode()
    if text.count(one.old) != 1:
        raise SystemExit(f"{one.name}: `old` occurs {text.count(one.old)} times in {file}")
    try:
        file.write_bytes(text.replace(one.old, one.new).encode())
        if abs(time.time() - status.st_mtime) < 5:
            os.utime(file, (status.st_atime, status.st_mtime + 60))
        yield
    finally:
        file.write_bytes(before)
        os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))


@dataclass(frozen=True)
class Ran:
    """How a command ended."""

    code: int | None
    """`None`: it took too long."""
    output: str
    seconds: float


def run_limited(command: list[str] | str, tree: Path, limit_s: float) -> Ran:
    """Runs a command in the tree; when it returns, nothing is left of it."""
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTEST_ADDOPTS")}
    start_s = time.monotonic()
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as output:
        process = subprocess.Popen(
            command,
            shell=isinstance(command, str),
            cwd=tree,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        code: int | None = None
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = process.wait(limit_s)
        finally:
            _end(process)
        output.seek(0)
        return Ran(code, output.read(), time.monotonic() - start_s)


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Ends the command, politely first, then all that it has left: this process is their subreaper."""
    for number, grace_s in ((signal.SIGINT, 20.0), (signal.SIGTERM, 10.0)):
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(grace_s)
    deadline = time.monotonic() + 10.0
    while (left := _descendants()) and time.monotonic() < deadline:
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
        _reap(process)
    _reap(process)


def _reap(process: "subprocess.Popen[bytes]") -> None:
    """Reaps orphans that have become ours."""
    process.poll()
    for pid in _children_of(os.getpid()):
        if pid != process.pid:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)


def _stats() -> list[tuple[int, int, str]]:
    """Process, parent and state of all processes."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError, ValueError):
                line = Path("/proc", name, "stat").read_text(errors="replace")
                state, parent = line[line.rindex(")") + 2 :].split()[:2]
                found.append((int(name), int(parent), state))
    return found


def _children_of(parent: int) -> list[int]:
    return [pid for pid, of, _ in _stats() if of == parent]


def _descendants() -> list[int]:
    """Living processes below this one."""
    stats, queue, found = _stats(), [os.getpid()], list[int]()
    while queue:
        parent = queue.pop()
        below = [(pid, state) for pid, of, state in stats if of == parent]
        queue += [pid for pid, _ in below]
        found += [pid for pid, state in below if state not in "ZX"]
    return found


_LINE = re.compile(r"^(?:FAILED|ERROR) +(\S+.*)$", re.MULTILINE)
_CRASH = re.compile(r"^worker '\w+' crashed while running '([^']+)'", re.MULTILINE)


def noticed_by(output: str) -> str:
    """The first test that failed, else the last line."""
    if found := _LINE.search(output):
        return found[1].split(" - ")[0].strip()[:200]
    if found := _CRASH.search(output):
        return found[1][:200]
    lines = [line for line in output.splitlines() if line.strip()]
    return lines[-1].strip()[:200] if lines else "no output"


NO_TESTS, USAGE, INTERNAL = 5, 4, 3
"""Exit codes of pytest that say nothing about a mutant."""


def judge(tree: Path, one: Mutant, first: str, whole: str) -> dict[str, object]:
    """Runs the tests with the fault in place."""
    result: dict[str, object] = {"name": one.name, "path": one.path}
    start_s, logs = time.monotonic(), list[str]()
    places = [place for place in one.first if (tree / place).exists()]
    stage, ran = "first", Ran(0, "", 0.0)
    if places:
        options = ["-x", "-q", "-p", "no:cacheprovider", *shlex.split(first)]
        command = [str(tree / ".venv/bin/python"), "-m", "pytest", *options, *places]
        ran = run_limited(command, tree, FIRST_S)
        logs.append(ran.output)
        result["first_seconds"] = round(ran.seconds, 1)
        if ran.code in (USAGE, INTERNAL):
            return result | {"result": "error", "stage": stage, "by": noticed_by(ran.output)}
    if ran.code in (0, NO_TESTS):
        stage, ran = "whole", run_limited(whole, tree, WHOLE_S)
        logs.append(ran.output)
        result["whole_seconds"] = round(ran.seconds, 1)
        if ran.code in (126, 127):
            return result | {"result": "error", "stage": stage, "by": noticed_by(ran.output)}
    by = "timeout" if ran.code is None else noticed_by(ran.output)
    verdict = {"result": "survived"} if ran.code == 0 else {"result": "killed", "stage": stage, "by": by}
    seconds = round(time.monotonic() - start_s, 1)
    return result | verdict | {"seconds": seconds, "tail": logs[-1][-3000:] if ran.code != 0 else ""}


def check_tree(tree: Path) -> None:
    """Commands that tests start must run the tree's own code: `.venv` may be that of another checkout."""
    python = tree / ".venv/bin/python"
    if not python.exists():
        raise SystemExit(f"there is no {python}; run `make setup` in {tree}")
    code = "import gpurun; print(gpurun.__file__)"
    done = subprocess.run([python, "-P", "-c", code], cwd="/", capture_output=True, text=True)
    place = Path(done.stdout.strip() or "/").resolve()
    if tree.resolve() not in place.parents:
        raise SystemExit(f"{python} imports {place}, not the gpurun of {tree}\n{done.stderr.strip()}")


def known_results(out: Path) -> set[str]:
    """Names that need not be run again."""
    lines = out.read_text().splitlines() if out.exists() else []
    return {one["name"] for one in map(json.loads, filter(None, lines)) if one["result"] != "error"}


def run(tree: Path, names: Sequence[str], first: str, whole: str, out: Path) -> int:
    """Runs the mutants one after the other."""
    tree = tree.resolve()
    if unknown := set(names) - {one.name for one in MUTANTS}:
        raise SystemExit(f"there is no mutant {', '.join(sorted(unknown))}")
    check_tree(tree)
    ctypes.CDLL(None).prctl(36, ctypes.c_ulong(1), 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that `finally` restores the file
    signal.signal(signal.SIGHUP, lambda *_: sys.exit(129))
    done = known_results(out)
    for one in MUTANTS:
        if one.name in done or (names and one.name not in names):
            continue
        with mutated(tree, one):
            result = judge(tree, one, first, whole)
        with out.open("a") as file:
            file.write(json.dumps(result) + "\n")
        by = f"by {result['by']} ({result.get('stage')})" if "by" in result else ""
        print(f"{one.name:40} {result['result']:9} {result.get('seconds', 0):7} s  {by}", flush=True)
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    checking = commands.add_parser("check", help="whether all mutants fit a tree")
    checking.add_argument("--tree", type=Path, default=DEFAULT_TREE)
    running = commands.add_parser("run", help="which mutants the tests notice")
    running.add_argument(
        "--tree", type=Path, required=True, help="a checkout with its own .venv; edited in place"
    )
    running.add_argument("--names", nargs="+", default=[], metavar="NAME")
    running.add_argument(
        "--whole", required=True, metavar="COMMAND", help="runs the whole suite; a shell's line"
    )
    running.add_argument(
        "--first",
        default='--workers 2 -m "not gpu and not slow"',
        metavar="OPTIONS",
        help="options of pytest for the tests that are run first, which are part of the suite",
    )
    running.add_argument("--out", type=Path, required=True, metavar="FILE.jsonl")
    listing = commands.add_parser("list", help="names, files and faults")
    del listing
    given = parser.parse_args()
    if given.command == "list":
        for one in MUTANTS:
            print(f"{one.name}\t{one.path}\t{one.fault}")
        return 0
    if given.command == "check":
        found = mistakes(given.tree)
        print("\n".join(found) if found else f"{len(MUTANTS)} mutants fit {given.tree}")
        return 1 if found else 0
    return run(given.tree, given.names, given.first, given.whole, given.out.resolve())


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
