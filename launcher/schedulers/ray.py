"""Ray: a driver places one actor on each of several nodes, and each actor starts one gpurun.

Source: docs.ray.io, "Placement Groups" (STRICT_SPREAD), "Ray Jobs CLI".
"""

import shlex
from collections import Counter
from collections.abc import Mapping, Sequence

from gpurun.launcher.errors import NodesError
from gpurun.launcher.jobfile.values import node_bounds
from gpurun.launcher.machine.accelerators import CPU, accelerator_of
from gpurun.launcher.processes.guard import SECRET_VARIABLE
from gpurun.launcher.schedulers.base import (
    WRITTEN_BY,
    Queue,
    Scheduler,
    Submission,
    SubmitCommand,
    SubmitOptions,
    those_among,
)
from gpurun.launcher.schedulers.slurm import FIRST_JOB_PORT, NUM_JOB_PORTS

LAST_CALL_S, FEWER_S = 30, 5
"""How long the driver of `nodes: 2..4` waits for room on 4 nodes, then on 3; on 2, as long as it takes."""

_DRIVER = '''\
import contextlib
import ctypes
import os
import random
import secrets
import signal
import socket
import subprocess
import sys

import ray
from ray.exceptions import RayActorError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy


def end_with_the_actor():
    """The kernel sends SIGTERM to gpurun when its actor ends, whatever ended it."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)


@ray.remote(max_restarts=0)
class Node:
    def address(self):
        """This node's, with a port that is free: another job may run here too."""
        host = ray.util.get_node_ip_address()
        for port in random.sample(PORTS, len(PORTS)):
            with contextlib.suppress(OSError), socket.create_server(("", port)):
                return host, f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def run(self, words, secret):
        env = {**os.environ, SECRET: secret}
        command = COMMAND + words
        code = subprocess.run(command, cwd=DIRECTORY, env=env, preexec_fn=end_with_the_actor).returncode
        return code if code >= 0 else 128 - code  # as a shell reports a signal


def exit_code(rank):
    """Exit code of the gpurun on a node; where Ray has lost the node, gpurun's code for that."""
    try:
        return ray.get(started[rank])
    except RayActorError:
        lost = f"node {rank} ({addresses[rank][0]}) is lost: Ray can't reach its actor"
        print(lost, file=sys.stderr, flush=True)
        return LOST


ray.init()
for number in range(NODES, LEAST - 1, -1):
    group = placement_group([PER_NODE] * number, strategy="STRICT_SPREAD")
    print(f"waiting until {number} nodes have {PER_NODE} free", flush=True)
    if number == LEAST:
        ray.get(group.ready())
    elif not group.wait(LAST_CALL_S if number == NODES else FEWER_S):
        remove_placement_group(group)
        continue
    break
nodes = [
    Node.options(
        num_cpus=PER_NODE["CPU"],
        num_gpus=PER_NODE.get("GPU", 0),
        scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index),
    ).remote()
    for index in range(number)
]
addresses = ray.get([node.address.remote() for node in nodes])
chosen = ["--set", f"nodes={number}"] if LEAST < NODES else []
places = [[*chosen, "--rendezvous", addresses[0][1], "--node-rank", str(rank)] for rank in range(number)]
places = places if number > 1 else [chosen]
secret = secrets.token_urlsafe(32)
started = [node.run.remote(place, secret) for node, place in zip(nodes, places)]
ray.wait(started, num_returns=number)  # each gpurun says by itself what became of the others
sys.exit(max(map(exit_code, range(number))))
'''


def cpu_ranks(devices: str | Sequence[str]) -> int:
    """The CPUs that a node needs: one for each of its CPU ranks, and one for gpurun where it has none."""
    if isinstance(devices, str):
        number = devices.removeprefix(f"{CPU.name}:")
        return max(1, int(number)) if number != devices and number.isdecimal() else 1
    nodes = Counter(name.partition("@")[2] for name in devices if accelerator_of(name).is_host)
    return max(nodes.values(), default=1)


def script(wanted: Submission, options: SubmitOptions) -> str:
    """The driver, a Python program."""
    gpus = wanted.stated_gpus(options)
    cpus = options.cpus_per_task or cpu_ranks(wanted.spec.devices)
    per_node = {"CPU": cpus, **({"GPU": gpus} if gpus else {})}
    nodes = wanted.nodes(options)
    place = ["--out", f"runs/{wanted.spec.name}/{wanted.label}", *wanted.store(options, wanted.label)]
    command = [*wanted.command(options, nodes), *place]
    values: Mapping[str, object] = {
        "COMMAND": command,
        "DIRECTORY": str(wanted.directory),
        "NODES": node_bounds(nodes)[1],
        "LEAST": node_bounds(nodes)[0],
        "PER_NODE": per_node,
        "SECRET": SECRET_VARIABLE,
        "LAST_CALL_S": LAST_CALL_S,
        "FEWER_S": FEWER_S,
        "PORTS": range(FIRST_JOB_PORT, FIRST_JOB_PORT + NUM_JOB_PORTS),
        "LOST": NodesError.exit_code,
    }
    lines = "".join(f"{name} = {value!r}\n" for name, value in values.items())
    head = f"# {WRITTEN_BY}: one gpurun on each of several nodes, which have this directory."
    return f"{head}\n{lines}\n{_DRIVER}"


OF_ALL_COMMANDS = frozenset({"--address", "--headers", "--verify"})
"""Options that every command of `ray job` knows. Source: docs.ray.io, "Ray Jobs CLI API Reference"."""


def next_commands(wanted: Submission, options: SubmitOptions, job_id: str) -> Mapping[str, str]:
    """How to look after the job, by Ray's own commands."""
    job = shlex.join((*those_among(options.further, OF_ALL_COMMANDS), job_id))
    return {
        "state": f"ray job status {job}",
        "logs": f"ray job logs --follow {job}",
        "results": wanted.report(options, job_id),
        "cancel": f"ray job stop {job}",
    }


RAY = Scheduler(
    name="Ray",
    preemption="none; a node that goes is lost, and Ray doesn't start the job again",
    queue=Queue(
        command="ray",
        option_example="--address=http://head:8265",
        script_name="submit-ray-LABEL.py",
        takes=frozenset({"out", "gpus_per_node", "cpus_per_task"}),
        script=script,
        fewer=f"4; 3, if {LAST_CALL_S} s pass without room on 4; 2, after {FEWER_S} s more",
        call=lambda wanted, options, path, secret: SubmitCommand(
            (
                *("ray", "job", "submit", *options.further, "--no-wait"),
                *("--submission-id", wanted.label, "--", "python3", str(path)),
            )
        ),
        next_commands=next_commands,
    ),
)
