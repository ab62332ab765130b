"""Logs the run in the current directory, and prints what MLflow and Weights & Biases then have, as JSON.

Runs in the environment of the frameworks, which has both.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gpurun.launcher.cli.main import cli

BLOCK, HEAD = 32768, 7


def in_mlflow() -> dict[str, Any]:
    """The experiment, and its runs by name."""
    from mlflow.tracking import MlflowClient

    client = MlflowClient()
    (experiment,) = [experiment for experiment in client.search_experiments() if experiment.name != "Default"]
    runs = {
        run.info.run_name: {
            **run.data.to_dictionary(),
            "id": run.info.run_id,
            "status": run.info.status,
            "user": run.info.user_id,
            "files": [file.path for file in client.list_artifacts(run.info.run_id)],
        }
        for run in client.search_runs([experiment.experiment_id])
    }
    return {"name": experiment.name, "runs": runs}


def in_wandb() -> dict[str, Any]:
    """The runs by name, with the last value of all that was logged."""
    from google.protobuf.json_format import MessageToDict
    from wandb.proto.wandb_internal_pb2 import Record

    found: dict[str, Any] = {}
    for path in Path("wandb").glob("offline-run-*/run-*.wandb"):
        records = [MessageToDict(Record.FromString(data)) for data in records_of(path.read_bytes())]
        (run,) = [record["run"] for record in records if "run" in record]
        summary = {
            item.get("key") or "/".join(item["nestedKey"]): json.loads(item["valueJson"])
            for record in records
            for kind, part in (("summary", "update"), ("history", "item"))
            for item in record.get(kind, {}).get(part, ())
        }
        config = {item["key"]: json.loads(item["valueJson"]) for item in run["config"]["update"]}
        code = [record["exit"].get("exitCode", 0) for record in records if "exit" in record]
        found[run["displayName"]] = run | {"config": config, "summary": summary, "exit": code}
    return found


def records_of(data: bytes) -> Iterator[bytes]:
    """The records of a log in LevelDB's format, behind a header of its own.

    Source: LevelDB, "log_format.md": blocks of 32 KiB; a fragment has a checksum, its length and its kind.
    """
    place, record = HEAD, b""
    while place + HEAD <= len(data):
        if (left := BLOCK - place % BLOCK) < HEAD:
            place += left
            continue
        length, kind = int.from_bytes(data[place + 4 : place + 6], "little"), data[place + 6]
        record += data[place + HEAD : place + HEAD + length]
        place += HEAD + length
        if kind in (1, 4):  # all of a record, or its last fragment
            yield record
            record = b""


if __name__ == "__main__":
    cli.main(["report", "run", "--format", "mlflow,wandb"], standalone_mode=False)
    json.dump({"mlflow": in_mlflow(), "wandb": in_wandb()}, sys.stdout)
