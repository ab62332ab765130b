"""`gpurun submit` to Kubernetes and Kubeflow Trainer: real `kubectl`, against a stand-in server."""

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from tests.integration.command import gpurun, write
from tests.integration.nodes.kubernetes_api import cluster
from tests.whole import first
from tools.system_packages import without

pytestmark = pytest.mark.skipif(bool(reason := without("kubernetes-client")), reason=reason)

MADE = {
    "kubernetes": {"services", "jobs", "secrets", "pods"},
    "trainjob": {"trainjobs", "secrets", "pods"},
}


@pytest.mark.parametrize("name", first(1, MADE))
def test_a_job_is_created_looked_after_and_deleted(name: str, tmp_path: Path) -> None:
    """With the commands that `submit` prints, in the namespace that it was given."""
    write(tmp_path, "job.yaml", "{name: two, workload: mlp, global_batch: 8, devices: 'cpu:1', nodes: 2}")
    with cluster(tmp_path) as (server, config):
        env = {"KUBECONFIG": str(config), "HOME": str(tmp_path)}
        options = ("--image", "reg/me:1", "--kubectl=--namespace=ml", "--kubectl=--validate=false")
        done = gpurun(tmp_path, "submit", "job.yaml", "--to", name, *options, env=env).ended()
        assert {resource for resource, _ in server.objects} == MADE[name]
        assert server.namespaces == {"ml"}
        pods = server.labelled("pods", "")
        for service in server.labelled("services", ""):
            selector = ",".join(f"{key}={value}" for key, value in service["spec"]["selector"].items())
            assert server.labelled("pods", selector) == pods
        said = dict(re.findall(r"(\w+): +(kubectl .*)", done.out + done.err))
        names = [pod["metadata"]["name"] for pod in pods]
        state, logs, _ = (
            subprocess.run(
                shlex.split(said[each]),
                env={**os.environ, **env},
                capture_output=True,
                text=True,
                check=False,
            ).stdout
            for each in ("state", "logs", "cancel")
        )
        assert [line.split()[0] for line in state.splitlines()[1:]] == names
        assert sorted(re.findall(r"hello from (\S+)", logs)) == names
        assert not server.objects
