"""The tab on a machine with other users: who gets an answer, and what making an index may take."""

import http.client
import json
import os
import resource
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest

from gpurun.launcher.machine.helper_process import helper_argv
from gpurun.launcher.tensorboard_plugin.logdir import Listing
from gpurun.launcher.tensorboard_plugin.timeline import indexing
from gpurun.launcher.tensorboard_plugin.timeline.index_store import Traces
from gpurun.launcher.tensorboard_plugin.timeline.indexing import Broken, Indexes, Indexing
from gpurun.launcher.tensorboard_plugin.view import TensorBoardServer, open_view
from gpurun.launcher.trace.kineto import trace_file
from tests.integration.tensorboard.test_tab import trace


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TensorBoardServer]:
    directory = tmp_path_factory.mktemp("shared")
    trace(directory, 0, 0)
    with open_view(directory) as opened:
        yield opened


def ask(server: TensorBoardServer, path: str, **headers: str) -> tuple[int, str]:
    """A request as anyone on this machine can make it, with any header."""
    place = urlsplit(server.url)
    assert place.hostname is not None
    connection = http.client.HTTPConnection(place.hostname, place.port, timeout=60)
    try:
        connection.request(
            "GET", path, headers={name.replace("_", "-"): each for name, each in headers.items()}
        )
        answer = connection.getresponse()
        return answer.status, answer.read().decode(errors="replace")
    finally:
        connection.close()


FONT = "/font-roboto/RxZJdnzeo3R5zSexge8UUZBw1xU1rKptJj_0jans920.woff2"


def runs(server: TensorBoardServer) -> str:
    return f"{urlsplit(server.url).path}data/plugin/gpurun/runs"


def test_who_does_not_know_the_random_path_gets_nothing(server: TensorBoardServer) -> None:
    assert ask(server, runs(server))[0] == 200
    for path in ("/", "/data/plugin/gpurun/runs", "/data/logdir", "/x/data/plugin/gpurun/runs"):
        assert ask(server, path)[0] == 404


def test_no_process_has_the_random_path_where_other_users_can_read_it(server: TensorBoardServer) -> None:
    secret = urlsplit(server.url).path.strip("/")
    family = [server.process.pid, *(each.pid for each in psutil.Process(server.process.pid).children(True))]
    assert len(secret) >= 22
    assert not [pid for pid in family if secret in " ".join(psutil.Process(pid).cmdline())]
    listening = [
        each for each in psutil.Process(server.process.pid).net_connections() if each.status == "LISTEN"
    ]
    assert len(listening) == len({*family}) == 1, "no other process or port answers about the run"


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:6006", "127.0.0.1.evil.example", "169.254.0.1", ""]
)
def test_a_name_that_was_made_to_mean_this_machine_is_refused(server: TensorBoardServer, host: str) -> None:
    own = urlsplit(server.url).path
    for path in (runs(server), own, f"{own}data/environment", f"{own}data/plugins_listing", FONT):
        code, body = ask(server, path, Host=host)
        assert code == 403
        assert "serves localhost only" in body


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:80", "127.0.0.1", "[::1]:6006"])
def test_other_names_of_this_machine_are_answered(server: TensorBoardServer, host: str) -> None:
    for path in (runs(server), urlsplit(server.url).path, FONT):
        assert ask(server, path, Host=host)[0] == 200


@pytest.mark.parametrize(
    ("site", "code"), [("cross-site", 403), ("same-site", 403), ("same-origin", 200), ("none", 200)]
)
def test_pages_of_other_origins_begin_no_work(server: TensorBoardServer, site: str, code: int) -> None:
    assert ask(server, runs(server), Sec_Fetch_Site=site)[0] == code
    assert ask(server, runs(server).replace("runs", "static/index.js"), Sec_Fetch_Site=site)[0] == code


def test_1500_connections_of_strangers_keep_the_owner_from_nothing(server: TensorBoardServer) -> None:
    """Silent ones, and some that go on sending a request that is never answered as the owner's is."""
    hard = resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE)[1]
    resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE, (1024, hard))
    place, own = urlsplit(server.url), resource.getrlimit(resource.RLIMIT_NOFILE)
    with ExitStack() as opened:
        resource.setrlimit(resource.RLIMIT_NOFILE, (own[1], own[1]))  # often 1024 too
        opened.callback(resource.setrlimit, resource.RLIMIT_NOFILE, own)
        for number in range(1500):
            stranger = opened.enter_context(socket.create_connection((place.hostname, place.port or 0)))
            if number % 3:
                stranger.sendall(b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9999\r\n\r\nx")
        assert ask(server, runs(server))[0] == 200
        assert psutil.Process(server.process.pid).num_fds() < 512
    assert ask(server, runs(server))[0] == 200


def traces_in(directory: Path) -> Traces:
    directory.mkdir(exist_ok=True)
    trace(directory, 0, 0)
    (listed,) = Listing(str(directory)).all().values()
    found = listed.indexed("traces")
    assert found is not None
    return found


@pytest.mark.slow
def test_only_so_many_indexes_are_made_or_queued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(indexing, "MAX_BUILDS", 2)
    indexes = Indexes()
    asked = [traces_in(tmp_path / str(number)) for number in range(4)]
    assert all(isinstance(indexes.get(each), Indexing) for each in asked)
    assert len(indexes._builds) == 2
    indexes.wait()
    assert isinstance(indexes.get(asked[3]), Indexing)
    indexes.wait()


@pytest.mark.slow
def test_files_of_one_variant_are_bounded_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_file, "MAX_UNPACKED_BYTES", 100)
    indexes, traces = Indexes(), traces_in(tmp_path)
    indexes.get(traces)
    indexes.wait()
    found = indexes.get(traces)
    assert isinstance(found, Broken)
    assert "unpack to more than" in found.problems[0].message


LIMITS = """\
import json, os, resource, sys
from gpurun.launcher.machine.helper_process import yield_to_others
yield_to_others()
limit, _ = resource.getrlimit(resource.RLIMIT_DATA)
print(json.dumps([limit, open("/proc/self/oom_score_adj").read().strip(), os.nice(0)]))
try:
    bytearray(limit)
except MemoryError:
    print("refused")
"""


def test_what_reads_traces_is_the_first_to_go_when_memory_is_short() -> None:
    argv = [sys.executable, "-P", "-c", LIMITS]
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    limits, refused = done.stdout.splitlines()
    limit, score, nice = json.loads(limits)
    assert limit < psutil.virtual_memory().total
    assert (score, refused) == ("1000", "refused")
    assert nice > os.nice(0)
    assert helper_argv("a:b")[1] == "-I"
