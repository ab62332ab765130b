"""TrainJob of Kubeflow Trainer v2, and others that set torchrun's variables, `PET_*`.

Sources: kubeflow.org, "Runtime Patches" (Trainer 2.2 and newer), and the API reference of v1alpha1.
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
    QUEUE,
    command,
    deadline,
    environment,
    image,
    manifest,
    mounts,
    next_commands,
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


RUNTIME = "torch-distributed"
NODES = "node"
"""The runtime's replicated Job, whose Pods are the nodes; its container is called the same."""
MANAGER = "gpurun.io/submit"
"""The manager that these patches belong to."""
POD_LABEL = "jobset.sigs.k8s.io/jobset-name"
"""The label of the Pods: Trainer makes a JobSet, called like the TrainJob."""


def trainjob_script(wanted: Submission, options: SubmitOptions) -> str:
    """The manifest of the TrainJob."""
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
            wanted, options, "trainjob,secret", POD_LABEL
        ),
    ),
)
