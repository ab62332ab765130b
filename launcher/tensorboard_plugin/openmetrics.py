"""`gpurun metrics`: a run as OpenMetrics, for Prometheus; the same figures as in the tab and the reports.

Source: OpenMetrics 1.0, "Text format".
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from werkzeug import wrappers

from gpurun.launcher.errors import GpurunError, MachineError
from gpurun.launcher.machine import LOOPBACK
from gpurun.launcher.report.metrics import described, measured_metrics, values_of
from gpurun.launcher.run.find import find_run
from gpurun.launcher.rundir.claim import read
from gpurun.launcher.rundir.control import read_states
from gpurun.launcher.rundir.files import RunDir
from gpurun.launcher.rundir.store import source_of
from gpurun.launcher.tensorboard_plugin.answers.live import LiveDevices, progress_answer
from gpurun.launcher.tensorboard_plugin.logdir import Listed, own, read_comparison, read_plan
from gpurun.launcher.tensorboard_plugin.plugin import EXPECTED, BoundedServer, refusal

CONTENT_TYPE = "application/openmetrics-text; version=1.0.0; charset=utf-8"
PATH = "/metrics"
MOST_REQUESTS = 16
"""At a time; for further ones, the oldest connections that ask for nothing are closed."""
DEVICE_FIGURES = {
    "memory_gib": "Memory in use on the device (GiB).",
    "utilisation_percent": "Share of the time in which the device computes (%).",
    "sm_clock_mhz": "Clock of the device (MHz).",
    "power_w": "Power of the device (W).",
    "temperature_c": "Temperature of the device (°C).",
}
"""The figures of a device that the tab shows now."""

Sample = tuple[Mapping[str, str], float | None]
"""Labels and value; `None`: not known, and left out."""


@dataclass(frozen=True)
class MetricFamily:
    """A metric with all its samples."""

    name: str
    kind: Literal["gauge", "counter", "info"]
    meaning: str
    samples: Iterable[Sample]

    def lines(self) -> Iterator[str]:
        """The metric's lines of the text format; none where nothing is known."""
        suffix = {"counter": "_total", "info": "_info"}.get(self.kind, "")
        known = [(labels, value) for labels, value in self.samples if value is not None]
        if known:
            yield f"# TYPE gpurun_{self.name} {self.kind}"
            yield f"# HELP gpurun_{self.name} {self.meaning}"
        for labels, value in known:
            inside = ",".join(f"{key}={_quoted(text)}" for key, text in labels.items())
            yield f"gpurun_{self.name}{suffix}{f'{{{inside}}}' if inside else ''} {value:.12g}"


def _quoted(text: str) -> str:
    r"""The text as a label value: `\`, `"` and line breaks are escaped."""
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'


def text_of(run: RunDir, devices: LiveDevices) -> str:
    """All that is known of a run now."""
    families = _families(own(run), devices)
    return "".join(f"{line}\n" for family in families for line in family.lines()) + "# EOF\n"


def _families(listed: Listed, devices: LiveDevices) -> Iterator[MetricFamily]:
    plan, now = read_plan(listed), progress_answer(listed, devices)
    job = {"name": plan.name, "workload": plan.workload} if plan else {}
    is_copy = isinstance(source_of(listed.path), str)  # of a run that may go on elsewhere
    is_running = None if is_copy else now["status"] == "running"
    yield MetricFamily("run", "info", "The run.", [(job, 1)])
    yield MetricFamily("running", "gauge", "1 while a command works on the run.", [({}, is_running)])
    yield MetricFamily("done_ratio", "gauge", "Share of the plan that is done.", [({}, now["done"])])
    yield MetricFamily("left_seconds", "gauge", "Estimate of what remains.", [({}, now["seconds_left"])])
    yield MetricFamily("steps", "counter", "Optimizer steps of a rank that runs.", _steps(listed.run))
    yield from _live(now)
    yield from _figures(listed)


def _steps(run: RunDir) -> Iterator[Sample]:
    """The steps of the ranks on this machine, in the launch that runs now."""
    claim = read(run)
    if claim is not None and claim.launch is not None:
        for rank, state in read_states(run.control(claim.launch)).items():
            if state.is_running:
                yield {"launch": claim.launch, "rank": str(rank)}, state.steps


def _live(now: Mapping[str, Any]) -> Iterator[MetricFamily]:
    """The figures that the tab shows while the run goes on."""
    rows = now["variants"]
    status = [({"variant": row["id"], "status": row["status"]}, 1) for row in rows]
    yield MetricFamily("variant_status", "gauge", "1 for what has become of a variant.", status)
    ranks = [
        ({"variant": row["id"], "rank": str(rank["rank"])}, rank) for row in rows for rank in row["ranks"]
    ]
    latest = [(labels, rank["step_ms"][-1] if rank["step_ms"] else None) for labels, rank in ranks]
    yield MetricFamily("latest_step_ms", "gauge", "Latest timed step of a rank (ms).", latest)
    for key, meaning in DEVICE_FIGURES.items():
        samples = [({"device": device["device"]}, device.get(key)) for device in now["live"]]
        yield MetricFamily(f"device_{key}", "gauge", meaning, samples)


def _figures(listed: Listed) -> Iterator[MetricFamily]:
    """The figures that every report shows of the launches that have ended."""
    comparison = read_comparison(listed)
    results = comparison.variants if comparison else ()
    values = values_of(results)
    for metric in described(measured_metrics(results)):
        samples = [({"variant": variant}, row.get(metric["key"])) for variant, row in values.items()]
        unit = f" ({metric['unit']})" if metric["unit"] else ""
        yield MetricFamily(
            metric["key"], "gauge", f"{metric['title']}{unit}, by the launches that have ended.", samples
        )


def app_for(path: Path) -> Callable[[dict[str, Any], Any], Any]:
    """Answers scrapes of the run that `path` means then: of `runs/NAME/latest`, the newest at the time."""
    devices = LiveDevices()

    def answer(environ: dict[str, Any], start_response: Any) -> Any:
        request = wrappers.Request(environ)
        if refusal(request, is_loopback=True) is not None:
            response = wrappers.Response("only requests to this machine by its own name are answered\n", 403)
        elif request.method not in ("GET", "HEAD"):
            response = wrappers.Response("only GET is answered\n", 405, {"Allow": "GET, HEAD"})
        elif request.path != PATH:
            response = wrappers.Response(f"the figures are at {PATH}\n", 404)
        else:
            environ[EXPECTED]()
            response = _scrape(path, devices)
        return response(environ, start_response)

    return answer


def _scrape(path: Path, devices: LiveDevices) -> wrappers.Response:
    try:
        return wrappers.Response(text_of(find_run(path), devices), content_type=CONTENT_TYPE)
    except GpurunError as error:
        return wrappers.Response(f"{error}\n", 503)


class _Server(BoundedServer):
    """A thread per request, of so many at a time: one that sends nothing keeps no other waiting."""

    most_connections = MOST_REQUESTS


@contextmanager
def metrics_server(path: Path, port: int = 0) -> Iterator[BoundedServer]:
    """A server on 127.0.0.1, to be started by `serve_forever`.

    Args:
        path: a run, as `find_run` takes it.
        port: 0 lets the kernel choose a free one.

    Raises:
        SpecError: there is no such run.
        MachineError: the port is taken.
    """
    find_run(path)
    try:
        listening = socket.create_server((LOOPBACK, port), backlog=_Server.request_queue_size)
    except OSError as error:
        raise MachineError(f"can't listen on port {port} of {LOOPBACK}: {error.strerror}") from error
    with listening:  # werkzeug's own would end the process where the port is taken
        server = _Server(LOOPBACK, port, app_for(path), fd=listening.fileno())
    with server, suppress(KeyboardInterrupt):  # the way to end it
        yield server
