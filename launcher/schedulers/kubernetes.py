"""Kubernetes: the Pods of an Indexed Job are the nodes, and its headless Service gives them names.

Source: kubernetes.io, "Job with Pod-to-Pod Communication".
"""

from gpurun.launcher.schedulers.base import Scheduler, number

KUBERNETES = Scheduler(
    name="the Indexed Job",
    start_hint="an Indexed Job on Kubernetes, with --rendezvous JOB-0.SERVICE:29400",
    node_rank=lambda environ: number(environ, "JOB_COMPLETION_INDEX"),
    rendezvous=lambda environ: None,
    num_nodes=lambda environ: None,
    names_resolve_late=True,
)
