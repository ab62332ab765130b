"""`gpurun metrics`, read by Prometheus's own parser."""

import contextlib
import os
import shutil
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse

from gpurun.launcher.compare.model import Comparison
from gpurun.launcher.errors import MachineError, SpecError
from gpurun.launcher.report.metrics import values_of
from gpurun.launcher.rundir.claim import claimed, entered
from gpurun.launcher.rundir.control import ControlDir, make_directory
from gpurun.launcher.rundir.files import RunDir, read_json
from gpurun.launcher.rundir.paths import Url
from gpurun.launcher.rundir.store import keep_at
from gpurun.launcher.tensorboard_plugin import plugin
from gpurun.launcher.tensorboard_plugin.answers.live import LiveDevices
from gpurun.launcher.tensorboard_plugin.openmetrics import (
    CONTENT_TYPE,
    MOST_REQUESTS,
    metrics_server,
    text_of,
)

RECORDED = Path(__file__).parents[3] / "docs/runs/gpt-splits"
Samples = dict[tuple[str, str], float]
"""By name and the values of the labels."""


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    shutil.copytree(RECORDED, tmp_path / "run")
    return RunDir(tmp_path / "run")


@pytest.fixture
def address(run: RunDir) -> Iterator[str]:
    with metrics_server(run.path) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.port}/metrics"
        server.shutdown()
        thread.join()


def scrape(address: str, **headers: str) -> Samples:
    with urllib.request.urlopen(urllib.request.Request(address, headers=headers)) as response:
        assert response.headers["Content-Type"] == CONTENT_TYPE
        families = list(parse(response.read().decode()))
    assert len({family.name for family in families}) == len(families)
    return {
        (each.name, " ".join(each.labels.values())): each.value
        for family in families
        for each in family.samples
    }


def test_a_scrape_has_the_figures_of_all_reports(run: RunDir, address: str) -> None:
    samples = scrape(address)
    assert samples[("gpurun_run_info", "gpt-splits gpt")] == 1
    assert samples[("gpurun_running", "")] == 0
    comparison = read_json(run.comparison, Comparison)
    for variant, figures in values_of(comparison.variants).items():
        assert samples[("gpurun_variant_status", f"{variant} ok")] == 1
        for key, value in figures.items():
            assert samples[(f"gpurun_{key}", variant)] == pytest.approx(value, rel=1e-11)


def test_whether_a_copy_of_what_is_at_a_url_is_running_is_not_known(
    run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    copy = tmp_path / "cache/gpurun/stores/0/run"
    shutil.copytree(run.path, copy)
    keep_at(copy, Url("s3://bucket/run"))
    assert "gpurun_running" in text_of(run, LiveDevices())
    assert "gpurun_running" not in text_of(RunDir(copy), LiveDevices())


def test_a_run_in_progress_counts_its_steps(
    run: RunDir, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that has ended has none: its number may be another process's by now."""
    odd = 'a "b" \\ \n{c}'
    plan = msgspec.json.decode(run.plan.read_bytes())
    run.plan.write_bytes(msgspec.json.encode({**plan, "name": odd}))
    run.comparison.unlink()
    with claimed(run):
        entered(run, "01-ddp-2")
        make_directory(run.control("01-ddp-2"))
        with ControlDir(run.control("01-ddp-2")) as control:
            block = control.block(1, create=True)
            with monkeypatch.context() as patched:
                patched.setattr("gpurun.launcher.rundir.control.start_ticks", lambda _: 1)
                control.block(0, create=True).close()
        block.count_step()
        samples = scrape(address)
        block.close()
    assert samples[("gpurun_run_info", f"{odd} gpt")] == 1
    assert samples[("gpurun_running", "")] == 1
    assert samples[("gpurun_steps_total", "01-ddp-2 1")] == 1
    assert ("gpurun_steps_total", "01-ddp-2 0") not in samples
    assert samples[("gpurun_latest_step_ms", "ddp-2-even 0")] > 0
    assert not [name for name, _ in samples if name == "gpurun_step_ms"]


@pytest.mark.parametrize(
    ("path", "headers", "code"),
    [
        ("/metrics", {"Host": "evil.example"}, 403),
        ("/metrics", {"Sec-Fetch-Site": "cross-site"}, 403),
        ("/", {}, 404),
    ],
)
def test_what_is_not_answered(address: str, path: str, headers: dict[str, str], code: int) -> None:
    with pytest.raises(urllib.error.HTTPError) as refused:
        scrape(address.replace("/metrics", path), **headers)
    assert refused.value.code == code
    refused.value.close()


def test_only_get_is_answered(address: str) -> None:
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(urllib.request.Request(address, data=b"x"))
    assert (refused.value.code, refused.value.headers["Allow"]) == (405, "GET, HEAD")
    refused.value.close()


def test_a_run_that_is_gone_and_one_that_is_not_there(run: RunDir, address: str, tmp_path: Path) -> None:
    os.rename(run.path, tmp_path / "elsewhere")
    with pytest.raises(urllib.error.HTTPError, match="503") as refused:
        scrape(address)
    refused.value.close()
    with pytest.raises(SpecError, match="there is no run"), metrics_server(run.path):
        pass
    port = int(address.rpartition(":")[2].partition("/")[0])
    with (
        pytest.raises(MachineError, match=f"can't listen on port {port}"),
        metrics_server(tmp_path / "elsewhere", port),
    ):
        pass


def port_of(address: str) -> int:
    return int(address.rpartition(":")[2].partition("/")[0])


@pytest.fixture
def num_threads(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """The number of threads beside those of before; no time limit ends connections that send nothing."""
    monkeypatch.setattr(plugin._Impatient, "timeout", None)
    before = set(threading.enumerate())
    return lambda: len(set(threading.enumerate()) - before)


def test_those_who_send_nothing_cost_no_scrape(address: str, num_threads: Callable[[], int]) -> None:
    with contextlib.ExitStack() as opened:
        silent: list[socket.socket] = []
        for number in range(MOST_REQUESTS + 20):
            silent.append(opened.enter_context(socket.create_connection(("127.0.0.1", port_of(address)))))
            if number >= MOST_REQUESTS:
                assert silent[number - MOST_REQUESTS].recv(1) == b"", "the oldest is closed by the server"
            while num_threads() > MOST_REQUESTS:
                threading.Event().wait(0.01)
        assert scrape(address)
        assert silent[20].recv(1) == b""
        silent[-1].setblocking(False)
        with pytest.raises(BlockingIOError):
            silent[-1].recv(1)
    while num_threads():
        threading.Event().wait(0.01)
    assert scrape(address)


def test_those_who_send_nothing_cost_a_bounded_number_of_threads(
    address: str, num_threads: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long the threads of closed connections take to end."""
    may_end, finish = threading.Event(), plugin._Impatient.finish
    monkeypatch.setattr(plugin._Impatient, "finish", lambda self: may_end.wait() and finish(self))
    with contextlib.ExitStack() as opened:
        opened.callback(may_end.set)
        silent = [
            opened.enter_context(socket.create_connection(("127.0.0.1", port_of(address))))
            for _ in range(3 * MOST_REQUESTS)
        ]
        begun, refused = silent[: 2 * MOST_REQUESTS], silent[2 * MOST_REQUESTS :]
        assert all(connection.recv(1) == b"" for connection in begun), "closed for those that came later"
        assert num_threads() == 2 * MOST_REQUESTS
        assert all(connection.recv(1) == b"" for connection in refused)
    while num_threads():
        threading.Event().wait(0.01)
    assert scrape(address)


def test_who_connects_and_stays_silent_is_given_up_without_a_word(
    address: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(plugin._Impatient, "timeout", 0.01)
    for said in (b"", b"GET /metr", b"GET /metrics HTTP/1.1\r\nHost: local"):
        with socket.create_connection(("127.0.0.1", port_of(address))) as silent:
            silent.sendall(said)
            assert silent.recv(1) == b""
    assert scrape(address)
    assert capfd.readouterr() == ("", "")
