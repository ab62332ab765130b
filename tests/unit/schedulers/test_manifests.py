"""The manifests in docs/clusters.md, for engines that `gpurun submit` doesn't know."""

import importlib
import re
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from gpurun.launcher.cli.commands.job import job
from gpurun.launcher.errors import Interrupted
from gpurun.launcher.nodes.rendezvous import Facts, NodeFlags, find_facts
from gpurun.launcher.processes.guard import SECRET_VARIABLE
from gpurun.launcher.schedulers.kubernetes import DEFAULT_CLAIM
from tests.unit.schedulers.test_submissions import found_in, kubernetes_words, without_empty, words_of

PAGE = (Path(__file__).parents[3] / "docs" / "clusters.md").read_text(encoding="utf-8")
TOP, JOBSET, SKYPILOT = map(yaml.safe_load, re.findall(r"(?ms)^```yaml\n(.*?)^```$", PAGE))
"""The job at the top of the page, and the manifests that start it."""


def parsed(words: list[str]) -> dict[str, Any]:
    """The arguments of `gpurun JOB.yaml` as the command's own parser reads them."""
    return job.make_context("gpurun", words).params


def facts(options: dict[str, Any], environ: dict[str, str]) -> Facts:
    return find_facts(TOP["nodes"], NodeFlags(options["node_rank"], options["rendezvous"]), environ)


@pytest.mark.slow
def test_the_jobset_is_what_the_published_models_know() -> None:
    models = importlib.import_module("kubeflow_trainer_api.models")  # which takes a second
    assert without_empty(models.JobsetV1alpha2JobSet.from_dict(JOBSET).to_dict()) == JOBSET
    (node,) = JOBSET["spec"]["replicatedJobs"]
    part = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}, **node["template"]}
    for version in ("1.29", "1.37"):
        kubernetes_validate.validate(part, version, strict=True)


def test_the_pods_of_the_jobset_are_the_nodes_of_the_job() -> None:
    name = JOBSET["metadata"]["name"]
    (node,) = JOBSET["spec"]["replicatedJobs"]
    spec = node["template"]["spec"]
    assert spec["completions"] == spec["parallelism"] == TOP["nodes"]
    (pod,) = found_in(spec, "containers")
    (container,) = pod
    assert list(found_in(spec, "onExitCodes")) == [
        {"containerName": container["name"], "operator": "In", "values": [Interrupted.exit_code]}
    ]
    first, *words = kubernetes_words(container["command"])
    options = parsed(words)
    assert (first, str(options["job_file"]), options["out"]) == (
        "gpurun",
        "job.yaml",
        (Path("/runs/pod"), None),
    )
    node_0 = f"{name}-{node['name']}-0-0.{name}"
    assert facts(options, {"JOB_COMPLETION_INDEX": "1"}) == Facts(1, node_0, 29400, True)
    assert [each["name"] for each in container["env"]] == ["POD_NAME", SECRET_VARIABLE]
    assert list(found_in(container, "secretKeyRef")) == [{"name": name, "key": "secret"}]
    assert f"create secret generic {name} --from-file=secret=" in PAGE
    assert list(found_in(spec, "claimName")) == [DEFAULT_CLAIM]


@pytest.mark.parametrize("rank", [0, 1])
def test_the_task_of_skypilot_runs_one_gpurun_per_node(rank: int, tmp_path: Path) -> None:
    environ = {
        "SKYPILOT_NODE_RANK": str(rank),
        "SKYPILOT_NODE_IPS": "10.0.0.7\n10.0.0.8\n",
        "SKYPILOT_NUM_NODES": "2",
        "SKYPILOT_TASK_ID": "sky-1",
    }
    options = parsed(words_of(tmp_path, SKYPILOT["run"], **environ))
    assert (str(options["job_file"]), options["out"]) == ("job.yaml", (Path("runs/two/sky-1"), None))
    assert facts(options, environ) == Facts(rank, "10.0.0.7", 29400)
    assert SKYPILOT["num_nodes"] == TOP["nodes"]
    assert SKYPILOT["secrets"] == {SECRET_VARIABLE: None}
    assert f"sky launch --cluster {SKYPILOT['name']} --secret {SECRET_VARIABLE} " in PAGE
