"""A run that is kept on a real S3 server, as the command writes and reads it."""

import json
from pathlib import Path

import pytest

from tests.integration.command import SLEEP_JOB, gpurun, write
from tests.s3 import S3Server

RUN = "s3://bucket/team/run"


def last_modified(server: S3Server, name: str) -> str:
    """When a file of the run was written to the server."""
    return server.ask("HEAD", f"{RUN.removeprefix('s3://')}/{name}")["last-modified"]


@pytest.mark.slow
def test_a_run_on_s3_is_read_and_continued(tmp_path: Path, server: S3Server) -> None:
    env = {**server.env, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    write(tmp_path, "job.yaml", SLEEP_JOB)
    job = ("job.yaml", "--set", "compare.split=[even]", "--set", "gradient_check=false")
    result = gpurun(tmp_path, *job, "--out", RUN, env=env).ended()
    assert f"the run is also at {RUN}" in result.err
    local = gpurun(tmp_path, "report", "runs/naps/latest", "--json")
    (tmp_path / "runs").rename(tmp_path / "elsewhere")

    assert gpurun(tmp_path, "report", RUN, "--json", env=env).json == local.json
    assert f"gpurun view {RUN}\n" in gpurun(tmp_path, "report", RUN, env=env).out
    traced = gpurun(tmp_path, "trace", f"{RUN}/variants/ddp-2-even", "--json", env=env)
    assert [rank["rank"] for rank in traced.json["ranks"]] == [0, 1]

    before = last_modified(server, "plan.json")
    resumed = gpurun(tmp_path, "--resume", RUN, "--json", env=env).ended()
    assert f"the run is also at {RUN}" in resumed.err
    assert resumed.json["variants"] == local.json["variants"]
    assert json.loads(local.out)["complete"]
    assert last_modified(server, "plan.json") == before  # nothing is copied twice
