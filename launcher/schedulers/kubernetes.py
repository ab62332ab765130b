"""Kubernetes: the Pods of an Indexed Job are the nodes, and its headless Service gives them names.

TrainJob of Kubeflow Trainer v2, and others that set torchrun's variables, `PET_*`, are below it.

Sources: kubernetes.io, "Job with Pod-to-Pod Communication", "Pod failure policy", "Define a Command and
Arguments for a Container"; kubeflow.org, "Runtime Patches" (Trainer 2.2 and newer), and the API reference of
v1alpha1.
"""

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from gpurun.launcher.errors import Interrupted, SpecError
from gpurun.launcher.processes.guard import SECRET_VARIABLE
from gpurun.launcher.schedulers.base import (
    WRITTEN_BY,
    Environ,
    Queue,
    Scheduler,
    Submission,
    SubmitCommand,
    SubmitOptions,
    number,
    number_if_plain,
    those_among,
)

Manifest = dict[str, Any]
PORT = 29400
"""The port on node 0. A Pod has addresses of its own, so that no other job can take it."""
RUNS, POD_NAME = "/runs", "$(POD_NAME)"
"""The path at which Pods see the volume for run directories, and the name that each has for its own."""
DEFAULT_CLAIM = "gpurun-runs"
GRACE_S = 60
"""Between SIGTERM and SIGKILL: what was measured is on disk already, so this is for the report."""
NVIDIA = "nvidia.com/gpu"
"""The resource of NVIDIA's device plugin."""
CONTAINER = "gpurun"
POD_LABEL = "batch.kubernetes.io/job-name"
"""The label of a Job's Pods."""
TRAINJOB_RUNTIME = "torch-distributed"
TRAINJOB_NODES = "node"
"""The replicated Job of that runtime, whose Pods are the nodes; its container is called the same."""
TRAINJOB_MANAGER = "gpurun.io/submit"
"""The manager that these patches belong to."""
TRAINJOB_POD_LABEL = "jobset.sigs.k8s.io/jobset-name"
"""The label of the Pods: Trainer makes a JobSet, called like the TrainJob."""
MOST_SHOWN = 100
"""Characters of a wrong name that a message repeats."""
_LABEL = r"[a-z0-9](?:[-a-z0-9]*[a-z0-9])?"
_SUBDOMAIN = rf"(?=[a-z0-9.-]{{1,253}}(?:/|\Z)){_LABEL}(?:\.{_LABEL})*"
"""Source: kubernetes.io, "Object Names and IDs"."""
_CLAIM = re.compile(_SUBDOMAIN)
_RESOURCE = re.compile(rf"{_SUBDOMAIN}/[A-Za-z0-9](?:[\w.-]{{0,61}}[A-Za-z0-9])?", re.ASCII)
"""Source: kubernetes.io, "Extended resources"."""
_HOST_PART = r"[A-Za-z0-9](?:[A-Za-z0-9-]*[A-Za-z0-9])?"
_HOST = rf"(?:{_HOST_PART}(?:\.{_HOST_PART})*|\[[0-9A-Fa-f:]+\])"
_PART = r"[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*"
_IMAGE = re.compile(
    rf"(?:{_HOST}(?::[0-9]{{1,5}})?/)?{_PART}(?:/{_PART})*"
    r"(?::\w[\w.-]{0,127})?(?:@[A-Za-z][A-Za-z0-9]*(?:[-_+.][A-Za-z][A-Za-z0-9]*)*:[0-9a-fA-F]{32,128})?",
    re.ASCII,
)
"""Source: github.com/distribution/reference, the grammar in `reference.go`."""
_MAX_NAME = 255
"""Characters of an image's name, without tag and digest."""
OF_ALL_COMMANDS = frozenset(
    {
        *("-n", "--namespace", "--context", "--cluster", "--user", "--kubeconfig", "-s", "--server"),
        *(
            "--as",
            "--as-group",
            "--as-uid",
            "--certificate-authority",
            "--client-certificate",
            "--client-key",
        ),
        *("--insecure-skip-tls-verify", "--tls-server-name", "--request-timeout"),
    }
)
"""Options that every command of `kubectl` knows, but for passwords. Source: `kubectl options`."""


def script(wanted: Submission, options: SubmitOptions) -> str:
    """The manifests of the Service and of the Job."""
    name = wanted.label
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name},
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {POD_LABEL: name},
        },
    }
    job = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name},
        "spec": job_spec(wanted, options),
    }
    return manifest(wanted, options, (service, job))


def job_spec(wanted: Submission, options: SubmitOptions) -> Manifest:
    """An Indexed Job of one Pod a node, which fails as a whole unless it was preempted.

    All gpuruns of a job end as interrupted if one of them gets SIGTERM: each Pod is seen as preempted.
    """
    nodes = wanted.num_nodes(options)
    rules = (
        {"onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        {
            "onExitCodes": {
                "containerName": CONTAINER,
                "operator": "In",
                "values": [Interrupted.exit_code],
            }
        },
    )
    return {
        "completions": nodes,
        "parallelism": nodes,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        "podFailurePolicy": {"rules": [{"action": "Ignore", **rule} for rule in rules]},
        **deadline(options),
        "template": {"spec": pod_spec(wanted, options)},
    }


def deadline(options: SubmitOptions) -> Manifest:
    """The time limit, if there is one."""
    return {"activeDeadlineSeconds": options.time} if options.time else {}


def pod_spec(wanted: Submission, options: SubmitOptions) -> Manifest:
    """One node: of several, a Pod that shares its machine with no other Pod of the Job."""
    name = wanted.label
    apart = {"labelSelector": {"matchLabels": {POD_LABEL: name}}, "topologyKey": "kubernetes.io/hostname"}
    affinity = {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [apart]}}
    is_one_of_several = wanted.num_nodes(options) > 1
    place = ["--rendezvous", f"{name}-0.{name}:{PORT}"] if is_one_of_several else []
    return {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": GRACE_S,
        **({"affinity": affinity} if is_one_of_several else {}),
        "containers": [
            {
                "name": CONTAINER,
                "image": image(options),
                "command": command(wanted, options, place),
                "env": environment(wanted),
                "resources": resources(wanted, options),
                "volumeMounts": mounts(),
            }
        ],
        "volumes": volumes(options),
        "subdomain": name,
    }


def image(options: SubmitOptions) -> str:
    """The container image.

    Raises:
        SpecError: there is none.
    """
    if options.image is None:
        raise SpecError(
            "missing option --image: a container image that holds gpurun and, in its working directory, "
            "the files of this one"
        )
    name = re.sub(r"(:[^:/@]*)?(@.*)?\Z", "", options.image)
    if len(name) > _MAX_NAME or not _IMAGE.fullmatch(options.image):
        raise SpecError(
            f"--image {options.image[:MOST_SHOWN]!r} is no name of an image\n"
            "    [HOST[:PORT]/]NAME[:TAG][@DIGEST], NAME in lower case: registry.example.org/team/gpurun:1"
        )
    return options.image


def command(wanted: Submission, options: SubmitOptions, place: Sequence[str] = ()) -> list[str]:
    """The words of the container's command. Kubernetes replaces `$(POD_NAME)`; `$$` is a `$`.

    A Pod that is started again has another name, and so a run directory of its own.
    """
    words = [word.replace("$", "$$") for word in (*wanted.command_in_image(options), *place)]
    escaped = replace(options, out=options.out and options.out.replace("$", "$$"))
    return [*words, "--out", f"{RUNS}/{POD_NAME}", *wanted.store(escaped, POD_NAME)]


def environment(wanted: Submission) -> list[Manifest]:
    """The Pod's name, and the secret by which the nodes know each other."""
    return [
        {"name": "POD_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
        {
            "name": SECRET_VARIABLE,
            "valueFrom": {"secretKeyRef": {"name": wanted.label, "key": "secret"}},
        },
    ]


def resources(wanted: Submission, options: SubmitOptions) -> Manifest:
    """The resources that a node needs.

    Raises:
        SpecError: `gpu` is no name of a resource.
    """
    kind = options.gpu or NVIDIA
    if not _RESOURCE.fullmatch(kind):
        raise SpecError(f"--gpu {kind}: on Kubernetes it names a resource: {NVIDIA} or amd.com/gpu")
    gpus, cores = wanted.stated_gpus(options), options.cpus_per_task
    wants = {
        "requests": {"cpu": str(cores)} if cores else {},
        "limits": {kind: gpus} if gpus else {},
    }
    return {key: value for key, value in wants.items() if value}


def mounts() -> list[Manifest]:
    return [{"name": "runs", "mountPath": RUNS}, {"name": "shm", "mountPath": "/dev/shm"}]


def volumes(options: SubmitOptions) -> list[Manifest]:
    """The volume for run directories, and shared memory, of which a container has 64 MB otherwise.

    Where a store keeps the run directories, no volume has to.
    """
    runs = {"persistentVolumeClaim": {"claimName": claim(options)}}
    return [
        {"name": "runs", **({"emptyDir": {}} if is_in_store_alone(options) else runs)},
        {"name": "shm", "emptyDir": {"medium": "Memory"}},
    ]


def manifest(wanted: Submission, options: SubmitOptions, documents: Sequence[Manifest]) -> str:
    """The documents as YAML, which quotes whatever a job is called."""
    name = wanted.label
    head = f"""\
# {WRITTEN_BY}. The Secret is in no file; to make it and submit this again:
#   openssl rand -base64 32 | kubectl create secret generic {name} --from-file=secret=/dev/stdin
#   kubectl create -f THIS_FILE
# Add what your cluster wants besides, such as tolerations, a priority class or requests of memory.
"""
    if not is_in_store_alone(options) and wanted.num_nodes(options) > 1:
        head += f"# Pods on several machines mount the claim {claim(options)}: it has to be ReadWriteMany.\n"
    texts = (
        yaml.safe_dump(document, sort_keys=False, allow_unicode=True, width=110) for document in documents
    )
    return head + "---\n".join(texts)


def call(wanted: Submission, options: SubmitOptions, path: Path, secret: str) -> SubmitCommand:
    """Creates what the manifest has, and the Secret."""
    document = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": wanted.label},
        "stringData": {"secret": secret},
    }
    text = f"{path.read_text()}---\n{yaml.safe_dump(document, sort_keys=False)}"
    return SubmitCommand(("kubectl", *options.further, "create", "-f", "-"), text)


def undo(call: SubmitCommand, output: str) -> str:
    """Deletes what `kubectl create` says that it has created."""
    created = re.findall(r"(?m)^(\S+/\S+) created$", output)
    *options, _, _, _ = call.argv[1:]
    kubectl = shlex.join(("kubectl", *those_among(options, OF_ALL_COMMANDS)))
    return f"{kubectl} delete {' '.join(created)}" if created else ""


def next_commands(wanted: Submission, options: SubmitOptions, kinds: str, label: str) -> Mapping[str, str]:
    """How to look after what a manifest made: objects of these kinds, and Pods with this label."""
    kubectl = shlex.join(("kubectl", *those_among(options.further, OF_ALL_COMMANDS)))
    pods = f"-l {label}={wanted.label}"
    most = max(5, wanted.num_nodes(options))
    return {
        "state": f"{kubectl} get pods {pods}",
        "logs": f"{kubectl} logs -f --prefix --tail=-1 --max-log-requests={most} {pods}",
        "results": results(options),
        "cancel": f"{kubectl} delete {kinds} {wanted.label}",
    }


def is_in_store_alone(options: SubmitOptions) -> bool:
    """Whether run directories outlast their Pods only in the store."""
    return options.out is not None and options.volume is None


def results(options: SubmitOptions) -> str:
    """The place of run directories."""
    place = f"at {options.out}" if options.out else f"in the volume of the claim {claim(options)}"
    return f"{place}, below the name of node 0's Pod"


def claim(options: SubmitOptions) -> str:
    """The PersistentVolumeClaim for run directories.

    Raises:
        SpecError: none can be called that.
    """
    name = options.volume or DEFAULT_CLAIM
    if not _CLAIM.fullmatch(name):
        raise SpecError(
            f"--volume {name[:MOST_SHOWN]!r} is no name of a PersistentVolumeClaim: lower-case letters, "
            "digits, `-` and `.`, at most 253\n    `kubectl get pvc` lists those that there are"
        )
    return name


QUEUE = Queue(
    command="kubectl",
    option_example="--namespace=ml",
    script_name="submit-kubernetes.yaml",
    takes=frozenset({"out", "time", "gpus_per_node", "cpus_per_task", "image", "volume", "gpu"}),
    script=script,
    call=call,
    undo=undo,
    next_commands=lambda wanted, options, job_id: next_commands(
        wanted, options, "job,service,secret", POD_LABEL
    ),
)

KUBERNETES = Scheduler(
    name="the Indexed Job",
    node_rank=lambda environ: number(environ, "JOB_COMPLETION_INDEX"),
    preemption=f"SIGTERM, {GRACE_S} s before SIGKILL; all Pods of the Job are then started again",
    names_resolve_late=True,
    queue=QUEUE,
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


def trainjob_script(wanted: Submission, options: SubmitOptions) -> str:
    """The manifest of the TrainJob."""
    pod = {
        "terminationGracePeriodSeconds": GRACE_S,
        "containers": [{"name": TRAINJOB_NODES, "volumeMounts": mounts()}],
        "volumes": volumes(options),
    }
    patched = {"name": TRAINJOB_NODES, "template": {"spec": {"template": {"spec": pod}}}}
    runtime = {"template": {"spec": {"replicatedJobs": [patched]}}}
    document = {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": {"name": wanted.label},
        "spec": {
            "runtimeRef": {"name": TRAINJOB_RUNTIME},
            **deadline(options),
            "trainer": {
                "numNodes": wanted.num_nodes(options),
                "image": image(options),
                "command": command(wanted, options),
                "env": environment(wanted),
                "resourcesPerNode": resources(wanted, options),
            },
            "runtimePatches": [{"manager": TRAINJOB_MANAGER, "trainingRuntimeSpec": runtime}],
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
            wanted, options, "trainjob,secret", TRAINJOB_POD_LABEL
        ),
    ),
)
