"""SkyPilot: its variables name this node, all nodes' addresses and their number.

Source: docs.skypilot.co, "Secrets and Environment Variables", "Distributed Multi-Node Jobs".
"""

from gpurun.launcher.schedulers.base import Environ, Scheduler, number


def rendezvous(environ: Environ) -> str | None:
    """The first of the nodes' IP addresses, which are in the order of their ranks, one a line."""
    return next(iter(environ.get("SKYPILOT_NODE_IPS", "").split()), None)


SKYPILOT = Scheduler(
    name="SkyPilot",
    start_hint="gpurun JOB.yaml in the `run` of a SkyPilot task",
    node_rank=lambda environ: number(environ, "SKYPILOT_NODE_RANK"),
    rendezvous=rendezvous,
    num_nodes=lambda environ: number(environ, "SKYPILOT_NUM_NODES"),
)
