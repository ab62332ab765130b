"""A comparison in MLflow and Weights & Biases, by the real libraries, offline."""

import json
import os
import platform
import shutil
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner

from gpurun.launcher.cli.main import cli
from gpurun.launcher.errors import MachineError
from gpurun.launcher.report.trackers import TRACKERS, Logged, Tracker, log_comparison
from tests.integration.command import FRAMEWORKS, ROOT, gpurun

TRACKED = Path(__file__).with_name("tracked.py")
RECORDED = ROOT / "docs" / "runs" / "gpt-splits"


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    absent = Tracker("Weights & Biases", "not_installed_anywhere", lambda _: "")
    monkeypatch.setitem(TRACKERS, "wandb", absent)
    with pytest.raises(MachineError, match="Biases is not installed here; install it: pip install not_i"):
        log_comparison("wandb", pytest.fail)


def test_a_servers_password_is_in_no_message(monkeypatch: pytest.MonkeyPatch) -> None:
    address = "https://me:hunter2-hunter2@mlflow.example.org"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
    monkeypatch.setattr("gpurun.launcher.report.trackers.DEFAULTS", {})

    def log(_: Logged) -> str:
        raise ConnectionError(f"no route to {address}")

    monkeypatch.setitem(TRACKERS, "mlflow", Tracker("MLflow", "json", log))
    with pytest.raises(MachineError, match="can't log to MLflow: no route to masked:") as error:
        log_comparison("mlflow", lambda: Logged(None, "", ""))  # type: ignore[arg-type]
    assert "hunter2" not in str(error.value)


def test_a_tracker_that_fails_keeps_no_other_format_from_being_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(RECORDED.with_name("balanced"), tmp_path / "run")  # it has no traces to index
    for name in ("mlflow", "wandb"):
        monkeypatch.setitem(TRACKERS, name, Tracker(name, "not_installed_anywhere", lambda _: ""))
    formats = ["mlflow", "html", "wandb", "json"]
    ran = CliRunner().invoke(cli, ["report", str(tmp_path / "run"), "--format", ",".join(formats)])
    assert isinstance(ran.exception, MachineError)
    assert [str(problem).partition(" is not")[0] for problem in ran.exception.problems] == ["mlflow", "wandb"]
    assert (tmp_path / "run/report.html").exists()
    assert json.loads(ran.stdout)["findings"][0]["text"]


@pytest.mark.slow
def test_a_comparison_is_logged_with_figures_tables_and_report(tmp_path: Path) -> None:
    shutil.copytree(RECORDED, tmp_path / "run")
    done = subprocess.run(
        [FRAMEWORKS, TRACKED],
        cwd=tmp_path,
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT / "src"),
            "HOME": str(tmp_path / "home"),
            "MLFLOW_ALLOW_FILE_STORE": "true",  # the default, SQLite, needs the whole of MLflow
            "MLFLOW_TRACKING_URI": f"file:{tmp_path}/mlflow",
        },
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stderr.splitlines() if not line.startswith("logging to ")] == [
        f"logged to the MLflow experiment gpt-splits at file:{tmp_path}/mlflow",
        f"logged to {tmp_path}/wandb, for the W&B project gpt-splits; to upload it: wandb sync",
    ]
    found = json.loads(done.stdout)
    shown = gpurun(tmp_path, "report", "run", "--json").json
    variants = {f"ddp {'/'.join(map(str, variant['split']))}": variant for variant in shown["variants"]}

    runs = found["mlflow"]["runs"]
    whole = runs.pop(f"{tmp_path.name}/run")
    assert (found["mlflow"]["name"], whole["user"]) == ("gpt-splits", "unknown")
    assert sorted(whole["files"]) == ["report.html", "summary.md"]
    assert shown["findings"][0]["text"].partition(";")[0] in whole["tags"]["mlflow.note.content"]
    assert {name: run["metrics"] for name, run in runs.items()} == {
        name: variant["figures"] for name, variant in variants.items()
    }
    for run in runs.values():
        assert (run["status"], run["tags"]["mlflow.parentRunId"]) == ("FINISHED", whole["id"])
        assert run["params"]["device_count"] == "2"

    logged = found["wandb"]
    whole = logged.pop("comparison")
    assert shown["findings"][0]["text"] in whole["notes"]
    assert whole["summary"]["report/_type"] == "html-file"
    assert whole["summary"]["variants/nrows"] == len(variants)
    for name, run in logged.items():
        assert (run["project"], run["runGroup"], run["exit"]) == ("gpt-splits", f"{tmp_path.name}/run", [0])
        assert run["config"]["split"].startswith(name.removeprefix("ddp "))
        assert run["summary"].items() >= variants[name]["figures"].items()
        assert "notes" not in run
    assert logged.keys() == variants.keys()
    assert platform.node() not in {run.get("host") for run in logged.values()}
