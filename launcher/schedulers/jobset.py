"""JobSet: as a Job of Kubernetes, started again as a whole; it makes the headless Service itself.

Source: jobset.sigs.k8s.io, "Failure Policy", and the API reference of v1alpha2.
"""

from dataclasses import replace

from gpurun.launcher.schedulers.base import Submission, SubmitOptions
from gpurun.launcher.schedulers.kubernetes import (
    GRACE_S,
    KUBERNETES,
    PORT,
    QUEUE,
    job_spec,
    manifest,
    next_commands,
    pod_spec,
)

NODES = "node"
"""The replicated Job, whose Pods are the nodes."""
MAX_RESTARTS = 10
LABEL = "jobset.sigs.k8s.io/jobset-name"


def script(wanted: Submission, options: SubmitOptions) -> str:
    """The manifest of the JobSet."""
    name = wanted.label
    pod = pod_spec(wanted, options, f"{name}-{NODES}-0-0.{name}:{PORT}", {LABEL: name})
    job = job_spec(wanted, options, pod, "FailJob")
    rules = [
        {"name": "preempted", "action": "RestartJobSet", "onJobFailureReasons": ["PodFailurePolicy"]},
        {"name": "failed", "action": "FailJobSet"},
    ]
    document = {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": name},
        "spec": {
            "failurePolicy": {"maxRestarts": MAX_RESTARTS, "rules": rules},
            "replicatedJobs": [{"name": NODES, "replicas": 1, "template": {"spec": job}}],
        },
    }
    return manifest(wanted, (document,))


JOBSET = replace(
    KUBERNETES,
    name="JobSet",
    start_hint="a JobSet on Kubernetes: gpurun submit JOB.yaml --to jobset",
    preemption=f"SIGTERM, {GRACE_S} s before SIGKILL; the JobSet starts all Pods again, {MAX_RESTARTS} times",
    queue=replace(
        QUEUE,
        script_name="submit-jobset.yaml",
        script=script,
        next_commands=lambda wanted, options, job_id: next_commands(wanted, options, "jobset,secret", LABEL),
    ),
)
