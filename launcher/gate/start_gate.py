"""Starts a gate: checks what the job is, makes both versions, and runs one session over them."""

import gc
import json
import os
import shutil
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path

from gpurun.launcher.errors import SpecError
from gpurun.launcher.gate.versions import Interpreter, Wanted, two_versions
from gpurun.launcher.jobfile.model import JobSpec
from gpurun.launcher.machine.host import inspect_machine
from gpurun.launcher.processes.pool_per_env import WorkerPools
from gpurun.launcher.run.job import Finished, Job, Output, carry_out, prepare
from gpurun.launcher.run.max_batch import wants_max
from gpurun.launcher.run.open import Invocation, load_invocation

NEEDED = ("torch", "msgspec", "numpy", "typing_extensions")
"""Distributions that a rank imports."""
PROBE = f"""
import importlib.metadata as m, json
found = {{}}
for name in {NEEDED!r}:
    try: found[name] = m.version(name)
    except m.PackageNotFoundError: pass
print(json.dumps(found))
"""
PROBE_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Request:
    """What the command line asks for."""

    job_file: Path
    overrides: tuple[str, ...]
    against: str
    threshold_percent: float
    budget_s: float
    shared: tuple[Path, ...] = ()
    """The values of `--with`."""
    python_a: str | None = None
    python_b: str | None = None


def run_gate(pools: WorkerPools, request: Request, out: Path | None, output: Output) -> Finished:
    """Runs both versions in turns until it is known whether the second is slower, or the budget is spent.

    After Ctrl-C it still returns what was measured.

    Raises:
        SpecError: the job file or the command line is wrong.
        MachineError: the machine lacks what the job asks for, or git can't make a worktree.
    """
    gc.enable()
    given = Invocation(request.job_file, request.overrides)
    spec = gate_job(load_invocation(given), request.budget_s)
    pools.secrets = spec.secrets
    wanted = Wanted(
        request.against,
        request.threshold_percent,
        tuple(Path(os.path.abspath(path)) for path in request.shared),
        interpreter("--python-a", request.python_a),
        interpreter("--python-b", request.python_b),
    )
    with two_versions(wanted, spec, given.folder) as gate:
        job = Job(given, spec, out, None, output)
        ready = prepare(job, inspect_machine(), pools.get({}), gate=gate)
        pools.keep_only(ready.environments)
        return carry_out(ready, pools, output)


def gate_job(spec: JobSpec, budget_s: float) -> JobSpec:
    """The job as a gate runs it: until the outcome is known, whatever size the job states.

    Raises:
        SpecError: it is a job of which there is no gate.
    """
    refusals = {
        "a gate runs on one machine: set `nodes: 1`": spec.nodes > 1,
        "both versions need the same batch: state `global_batch`, not `max`": wants_max(spec),
        f"{spec.workload} is a micro-benchmark, which has no step to compare": not spec.kind.is_ranked,
    }
    wrong = [text for text, is_so in refusals.items() if is_so]
    if wrong:
        raise SpecError(*wrong)
    steps = replace(spec.steps, launches=None, stated=frozenset())
    return replace(spec, name=f"{spec.name}-gate", until="decided", budget_s=budget_s, steps=steps)


def interpreter(option: str, value: str | None) -> Interpreter:
    """The Python that the command line names, if it has what a rank needs.

    Raises:
        SpecError: it can't run ranks.
    """
    if value is None:
        return Interpreter()
    path = shutil.which(value)
    if path is None:
        raise SpecError(f"{option} {value}: there is no such program")
    try:
        done = subprocess.run(
            [path, "-P", "-c", PROBE],
            capture_output=True,
            text=True,
            timeout=PROBE_TIMEOUT_S,
            check=True,
            stdin=subprocess.DEVNULL,
        )
        found = json.loads(done.stdout)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        raise SpecError(f"{option} {value}: this is no Python 3.11 or newer ({error})") from None
    lacking = [name for name in NEEDED if name not in found]
    if lacking:
        raise SpecError(
            f"{option} {value} has no {', '.join(lacking)}\n    install it: {value} -m pip install gpurun"
        )
    return Interpreter(os.path.abspath(path), found["torch"])
