"""A run that is kept on a real S3 server, as the command writes and reads it."""

import json
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.command import SLEEP_JOB, gpurun, write

SERVER = """
import sys
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
server.start()
print("http://%s:%d" % server.get_host_and_port(), flush=True)
sys.stdin.read()
"""
RUN = "s3://bucket/team/run"


@pytest.fixture
def env(tmp_path: Path) -> Iterator[dict[str, str]]:
    """Variables with which every command finds the server."""
    argv = [sys.executable, "-P", "-c", SERVER]
    streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(argv, text=True, **streams) as server:  # type: ignore[call-overload]
        address = server.stdout.readline().strip()
        with urllib.request.urlopen(urllib.request.Request(f"{address}/bucket", method="PUT")):
            pass
        yield {
            "AWS_ENDPOINT_URL": address,
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_DEFAULT_REGION": "us-east-1",
            "XDG_CACHE_HOME": str(tmp_path / "cache"),
        }
        server.communicate()


def last_modified(env: dict[str, str], name: str) -> str:
    """When a file of the run was written to the server."""
    place = RUN.replace("s3:/", env["AWS_ENDPOINT_URL"])
    with urllib.request.urlopen(urllib.request.Request(f"{place}/{name}", method="HEAD")) as answer:
        return str(answer.headers["Last-Modified"])


def test_a_run_on_s3_is_read_and_continued(tmp_path: Path, env: dict[str, str]) -> None:
    write(tmp_path, "job.yaml", SLEEP_JOB)
    job = ("job.yaml", "--set", "compare.split=[even]", "--set", "gradient_check=false")
    result = gpurun(tmp_path, *job, "--out", RUN, env=env)
    assert result.code == 0, result.err
    assert f"the run is also at {RUN}" in result.err
    local = gpurun(tmp_path, "report", "runs/naps/latest", "--json")
    (tmp_path / "runs").rename(tmp_path / "elsewhere")

    assert gpurun(tmp_path, "report", RUN, "--json", env=env).json == local.json
    traced = gpurun(tmp_path, "trace", f"{RUN}/variants/ddp-2-even", "--json", env=env)
    assert [rank["rank"] for rank in traced.json["ranks"]] == [0, 1]

    before = last_modified(env, "plan.json")
    resumed = gpurun(tmp_path, "--resume", RUN, "--json", env=env)
    assert resumed.code == 0, resumed.err
    assert f"the run is also at {RUN}" in resumed.err
    assert resumed.json["variants"] == local.json["variants"]
    assert json.loads(local.out)["complete"]
    assert last_modified(env, "plan.json") == before  # nothing is copied twice
