"""Kubeflow Trainer v2: a TrainJob of the runtime `torch-distributed`, which sets `PET_*` on every node.

Source: kubeflow.org, "Runtime Patches" (Trainer 2.2 and newer), and the API reference of v1alpha1.
"""

from dataclasses import replace

from gpurun.launcher.schedulers import kubernetes
from gpurun.launcher.schedulers.base import Submission, SubmitOptions
from gpurun.launcher.schedulers.jobset import LABEL, NODES
from gpurun.launcher.schedulers.kubernetes import GRACE_S, QUEUE
from gpurun.launcher.schedulers.torchelastic import TORCHELASTIC

RUNTIME = "torch-distributed"
MANAGER = "gpurun.io/submit"
"""Whose patches these are."""


def script(wanted: Submission, options: SubmitOptions) -> str:
    """The manifest of the TrainJob; the runtime's container is called as its replicated Job."""
    pod = {
        "terminationGracePeriodSeconds": GRACE_S,
        "containers": [{"name": NODES, "volumeMounts": kubernetes.mounts()}],
        "volumes": kubernetes.volumes(options),
    }
    patched = {"name": NODES, "template": {"spec": {"template": {"spec": pod}}}}
    runtime = {"template": {"spec": {"replicatedJobs": [patched]}}}
    document = {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": {"name": wanted.label},
        "spec": {
            "runtimeRef": {"name": RUNTIME},
            **kubernetes.deadline(options),
            "trainer": {
                "numNodes": wanted.num_nodes(options),
                "image": kubernetes.image(options),
                "command": kubernetes.command(wanted, options),
                "env": kubernetes.environment(wanted),
                "resourcesPerNode": kubernetes.resources(wanted, options),
            },
            "runtimePatches": [{"manager": MANAGER, "trainingRuntimeSpec": runtime}],
        },
    }
    return kubernetes.manifest(wanted, (document,))


TRAINJOB = replace(
    TORCHELASTIC,
    name="TrainJob",
    start_hint="a TrainJob of Kubeflow Trainer: gpurun submit JOB.yaml --to trainjob",
    preemption=f"SIGTERM, {GRACE_S} s before SIGKILL; the runtime says whether the Pods are started again",
    queue=replace(
        QUEUE,
        script_name="submit-trainjob.yaml",
        script=script,
        next_commands=lambda wanted, options, job_id: kubernetes.next_commands(
            wanted, options, "trainjob,secret", LABEL
        ),
    ),
)
