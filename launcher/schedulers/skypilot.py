"""SkyPilot: its variables name this node, all nodes' addresses and their number.

Source: docs.skypilot.co, "Secrets and Environment Variables", "Distributed Multi-Node Jobs", "SkyPilot YAML".
"""

import re
import shlex
from collections.abc import Mapping
from typing import Any

import yaml

from gpurun.launcher.errors import SpecError
from gpurun.launcher.processes.guard import SECRET_VARIABLE
from gpurun.launcher.schedulers.base import (
    WRITTEN_BY,
    Call,
    Environ,
    Queue,
    Scheduler,
    Submission,
    SubmitOptions,
    number,
)
from gpurun.launcher.schedulers.kubernetes import image


def rendezvous(environ: Environ) -> str | None:
    """The first of the nodes' IP addresses, which are in the order of their ranks, one a line."""
    return next(iter(environ.get("SKYPILOT_NODE_IPS", "").split()), None)


def script(wanted: Submission, options: SubmitOptions) -> str:
    """The task's YAML."""
    command = shlex.join(wanted.command_in_image(options))
    kept = wanted.store_in_bash(options, "$SKYPILOT_TASK_ID")
    task = {
        "name": wanted.label,
        "num_nodes": wanted.num_nodes(options),
        "resources": resources(wanted, options),
        "workdir": ".",
        "secrets": {SECRET_VARIABLE: None},
        "run": f'exec {command} --out "runs/{wanted.spec.name}/$SKYPILOT_TASK_ID"{kept}',
    }
    head = f"""\
# {WRITTEN_BY}. The secret is in no file; to submit this again, from the directory of the job:
#   export {SECRET_VARIABLE}="$(openssl rand -base64 32)"
#   sky launch --secret {SECRET_VARIABLE} THIS_FILE
"""
    return head + yaml.safe_dump(task, sort_keys=False, allow_unicode=True, width=110)


def resources(wanted: Submission, options: SubmitOptions) -> dict[str, Any]:
    """The resources that a node needs.

    Raises:
        SpecError: it needs GPUs, but no kind is given.
    """
    gpus = wanted.stated_gpus(options)
    if gpus and options.gpu is None:
        raise SpecError("missing option --gpu: the kind of GPU, such as H100; `sky gpus list` shows them")
    if options.gpu and not _KIND.fullmatch(options.gpu):
        raise SpecError(
            f"--gpu {options.gpu!r} is no kind of GPU, such as H100; --gpus-per-node is their number"
        )
    wants = {
        "accelerators": f"{options.gpu}:{gpus}" if gpus else None,
        "cpus": f"{options.cpus_per_task}+" if options.cpus_per_task else None,
        "image_id": f"docker:{image(options)}",
    }
    return {key: value for key, value in wants.items() if value}


_KIND = re.compile(r"[A-Za-z0-9][\w.+-]*", re.ASCII)


def next_commands(wanted: Submission, options: SubmitOptions, job_id: str) -> Mapping[str, str]:
    """How to look after the job, by SkyPilot's own commands; `cancel` also gives the machines back."""
    fetch = f"rsync -a {job_id}:sky_workdir/runs/ runs/"
    return {
        "state": f"sky queue {job_id}",
        "logs": f"sky logs {job_id}",
        "results": f"at {options.out}, below the id of the task" if options.out else fetch,
        "cancel": f"sky down {job_id}",
    }


SKYPILOT = Scheduler(
    name="SkyPilot",
    node_rank=lambda environ: number(environ, "SKYPILOT_NODE_RANK"),
    rendezvous=rendezvous,
    num_nodes=lambda environ: number(environ, "SKYPILOT_NUM_NODES"),
    preemption="none; a spot machine that goes is lost, `sky jobs launch` gets another one",
    queue=Queue(
        command="sky",
        option_example="--infra=aws",
        script_name="submit-skypilot.yaml",
        takes=frozenset({"out", "gpus_per_node", "cpus_per_task", "image", "gpu"}),
        script=script,
        call=lambda wanted, options, path, secret: Call(
            (
                *("sky", "launch", *options.further, "--yes", "--detach-run", "--cluster", wanted.label),
                *("--secret", SECRET_VARIABLE, str(path)),
            ),
            env={SECRET_VARIABLE: secret},
        ),
        next_commands=next_commands,
    ),
)
