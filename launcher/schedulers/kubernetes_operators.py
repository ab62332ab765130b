"""Operators on Kubernetes: JobSet, TrainJob of Kubeflow, and others that set torchrun's variables.

A JobSet is a Job of Kubernetes that is started again as a whole; it makes the headless Service itself. A
TrainJob is one of Kubeflow Trainer v2, with the runtime `torch-distributed`, which sets `PET_*`.

Sources: jobset.sigs.k8s.io, "Failure Policy", and the API reference of v1alpha2; kubeflow.org, "Runtime
Patches" (Trainer 2.2 and newer), and the API reference of v1alpha1.
"""

from dataclasses import replace

from gpurun.launcher.schedulers.base import (
    Environ,
    Scheduler,
    Submission,
    SubmitOptions,
    number,
    number_if_plain,
)
from gpurun.launcher.schedulers.kubernetes import (
    GRACE_S,
    KUBERNETES,
    PORT,
    QUEUE,
    command,
    deadline,
    environment,
    image,
    job_spec,
    manifest,
    mounts,
    next_commands,
    pod_spec,
    resources,
    volumes,
)


def torchrun_rendezvous(environ: Environ) -> str | None:
    """`PET_RDZV_ENDPOINT`, or `PET_MASTER_ADDR` with its port."""
    if environ.get("PET_RDZV_ENDPOINT"):
        return environ["PET_RDZV_ENDPOINT"]
    host, port = environ.get("PET_MASTER_ADDR"), environ.get("PET_MASTER_PORT")
    bracketed = f"[{host}]" if host and ":" in host else host
    return f"{bracketed}:{port}" if bracketed and port else bracketed or None


TORCHELASTIC = Scheduler(
    name="PET_NNODES",
    node_rank=lambda environ: number(environ, "PET_NODE_RANK"),
    rendezvous=torchrun_rendezvous,
    num_nodes=lambda environ: number_if_plain(environ, "PET_NNODES"),
    preemption="as the operator does it",
    names_resolve_late=True,
)


NODES = "node"
"""The replicated Job, whose Pods are the nodes."""
MAX_RESTARTS = 10
LABEL = "jobset.sigs.k8s.io/jobset-name"


def jobset_script(wanted: Submission, options: SubmitOptions) -> str:
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
    return manifest(wanted, options, (document,))


JOBSET = replace(
    KUBERNETES,
    name="JobSet",
    preemption=f"SIGTERM, {GRACE_S} s before SIGKILL; the JobSet starts all Pods again, {MAX_RESTARTS} times",
    queue=replace(
        QUEUE,
        script_name="submit-jobset.yaml",
        script=jobset_script,
        next_commands=lambda wanted, options, job_id: next_commands(wanted, options, "jobset,secret", LABEL),
    ),
)


RUNTIME = "torch-distributed"
MANAGER = "gpurun.io/submit"
"""Whose patches these are."""


def trainjob_script(wanted: Submission, options: SubmitOptions) -> str:
    """The manifest of the TrainJob; the runtime's container is called as its replicated Job."""
    pod = {
        "terminationGracePeriodSeconds": GRACE_S,
        "containers": [{"name": NODES, "volumeMounts": mounts()}],
        "volumes": volumes(options),
    }
    patched = {"name": NODES, "template": {"spec": {"template": {"spec": pod}}}}
    runtime = {"template": {"spec": {"replicatedJobs": [patched]}}}
    document = {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": {"name": wanted.label},
        "spec": {
            "runtimeRef": {"name": RUNTIME},
            **deadline(options),
            "trainer": {
                "numNodes": wanted.num_nodes(options),
                "image": image(options),
                "command": command(wanted, options),
                "env": environment(wanted),
                "resourcesPerNode": resources(wanted, options),
            },
            "runtimePatches": [{"manager": MANAGER, "trainingRuntimeSpec": runtime}],
        },
    }
    return manifest(wanted, options, (document,))


TRAINJOB = replace(
    TORCHELASTIC,
    name="TrainJob",
    preemption=f"SIGTERM, {GRACE_S} s before SIGKILL; the runtime says whether the Pods are started again",
    queue=replace(
        QUEUE,
        script_name="submit-trainjob.yaml",
        script=trainjob_script,
        next_commands=lambda wanted, options, job_id: next_commands(
            wanted, options, "trainjob,secret", LABEL
        ),
    ),
)
