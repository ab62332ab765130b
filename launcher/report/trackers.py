"""A comparison in an experiment tracker: a run of the whole, with the report, and a run per variant.

Where that goes is up to the tool's own variables (`MLFLOW_TRACKING_URI`, `WANDB_PROJECT`, …). What the tools
would record by themselves (user, host, command line, git remote) is left out.
"""

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec

from gpurun.launcher.compare.label import value_text, variant_label
from gpurun.launcher.compare.model import Comparison, VariantResult
from gpurun.launcher.errors import MachineError
from gpurun.launcher.masking import hidden
from gpurun.launcher.report.markdown import status_text, summary_markdown, verdict_with_interval
from gpurun.launcher.report.metrics import figures_of, measured_metrics, values_of
from gpurun.launcher.report.tensorboard import hyperparameters, is_sound

DEFAULTS = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_LOGGING_LEVEL": "WARNING",
    "WANDB_ERROR_REPORTING": "false",
    "WANDB_MODE": "offline",
}
"""The defaults of the tools' variables, where they aren't set: no one hears of it but who was asked to."""
WANDB_SETTINGS = {
    "console": "off",
    "disable_code": True,
    "disable_git": True,
    "host": "",
    "program": "gpurun",
    "silent": True,
    "x_disable_machine_info": True,
    "x_disable_meta": True,
    "x_disable_stats": True,
    "x_save_requirements": False,
}
"""No user, host, command line or git remote, which it would add by itself."""
MLFLOW_NOTE_BYTES = 8000
"""Longer ones are cut by MLflow."""


@dataclass(frozen=True)
class Logged:
    """The values that are logged."""

    comparison: Comparison
    run_name: str
    """`NAME/TIMESTAMP`."""
    page: str
    """The HTML report."""


@dataclass(frozen=True)
class Tracker:
    """A tool."""

    title: str
    package: str
    """The name of the package on PyPI, and of its module."""
    log: Callable[[Logged], str]
    """Logs a comparison; returns where it is now."""


def log_comparison(name: str, logged: Callable[[], Logged]) -> str:
    """Logs the comparison as a new run; returns where it is now.

    Raises:
        MachineError: the tool isn't installed, or what it writes to can't be reached.
    """
    tracker = TRACKERS[name]
    spec = find_spec(tracker.package)
    if spec is None or spec.origin is None:  # the second: a directory of that name, such as W&B leaves behind
        hint = f"pip install {tracker.package}"
        raise MachineError(f"{tracker.title} is not installed here; install it: {hint}")
    for variable, value in DEFAULTS.items():
        os.environ.setdefault(variable, value)
    what, known = logged(), list(os.environ.items())
    try:
        return hidden(tracker.log(what), known)
    except Exception as error:  # each tool has exceptions of its own
        raise MachineError(hidden(f"can't log to {tracker.title}: {error}", known)) from error


def log_to_mlflow(logged: Logged) -> str:
    """Into the experiment of the job's name, the variants as child runs."""
    from mlflow.entities import Metric, Param
    from mlflow.tracking import MlflowClient

    client, comparison, now_ms = MlflowClient(), logged.comparison, round(time.time() * 1000)
    name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or comparison.name
    found = client.get_experiment_by_name(name)
    experiment = found.experiment_id if found else client.create_experiment(name)

    summary = summary_markdown(comparison)
    note = summary if len(summary.encode()) <= MLFLOW_NOTE_BYTES else comparison.summary
    tags = {"mlflow.note.content": note}
    whole = client.create_run(experiment, run_name=logged.run_name, tags=tags).info.run_id
    client.log_text(whole, summary, "summary.md")
    client.log_text(whole, logged.page, "report.html")
    figures = values_of(comparison.variants)
    for variant in comparison.variants:
        tags = {"mlflow.parentRunId": whole, **_outcome(variant)}
        run = client.create_run(experiment, run_name=variant_label(variant), tags=tags).info.run_id
        params = [Param(key, _text(value)) for key, value in hyperparameters(variant).items()]
        metrics = [Metric(key, value, now_ms, 0) for key, value in figures[variant.id].items()]
        client.log_batch(run, metrics, params)
        client.set_terminated(run, "FINISHED" if is_sound(variant) else "FAILED")
    client.set_terminated(whole)
    return f"logged to the MLflow experiment {name} at {client.tracking_uri}"


def log_to_wandb(logged: Logged) -> str:
    """Into the project of the job's name, all runs in one group."""
    import wandb

    comparison = logged.comparison
    project = os.environ.get("WANDB_PROJECT") or comparison.name
    place = {"project": project, "group": logged.run_name, "settings": WANDB_SETTINGS}
    with wandb.init(**place, name="comparison", job_type="comparison", notes=comparison.summary) as whole:
        columns, rows = _table(comparison)
        page = wandb.Html(logged.page, inject=False)
        whole.log({"variants": wandb.Table(columns=columns, data=rows), "report": page})
        directory, url = whole.settings.wandb_dir, None if whole.offline else whole.url
    figures = values_of(comparison.variants)
    for variant in comparison.variants:
        config = hyperparameters(variant)
        with wandb.init(**place, name=variant_label(variant), job_type="variant", config=config) as run:
            run.summary.update({**figures[variant.id], **_outcome(variant)})
            if not is_sound(variant):
                run.finish(exit_code=1)
    if url:
        return f"logged to the W&B project {project}: {url}"
    return f"logged to {directory}, for the W&B project {project}; to upload it: wandb sync"


def _table(comparison: Comparison) -> tuple[list[str], list[list[str | float | None]]]:
    """The columns of the table, and a row per variant."""
    figures = figures_of(comparison.variants)
    columns = [
        "variant",
        *(metric.label for metric in measured_metrics(comparison.variants)),
        "vs baseline",
        "status",
    ]
    rows: list[list[str | float | None]] = [
        [
            variant_label(variant),
            *(each.value if each else None for each in (column[position] for column in figures.values())),
            *_outcome(variant).values(),
        ]
        for position, variant in enumerate(comparison.variants)
    ]
    return columns, rows


def _text(value: str | float) -> str:
    """Whole numbers as a job has them."""
    return value_text(int(value) if isinstance(value, float) and value.is_integer() else value)


def _outcome(variant: VariantResult) -> Mapping[str, str]:
    """The result, as every table shows it."""
    return {"vs baseline": verdict_with_interval(variant), "status": status_text(variant)}


TRACKERS = {
    "mlflow": Tracker("MLflow", "mlflow", log_to_mlflow),
    "wandb": Tracker("Weights & Biases", "wandb", log_to_wandb),
}
"""All trackers by the name that `--format` has for them."""
