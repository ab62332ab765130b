"""Odd requests to the tab's server, within the process."""

import logging
import random
import shutil
import tempfile
import time
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from werkzeug.test import Client

from benchmarks.fuzz.rundir import RECORDED, SECRET
from gpurun.launcher.tensorboard_plugin.answers.operators import KINDS
from gpurun.launcher.tensorboard_plugin.plugin import GpurunPlugin
from gpurun.launcher.trace.model import TABLES

COUNT = 50_000
METHODS = ("GET",) * 6 + ("HEAD", "POST", "PUT", "DELETE", "OPTIONS", "BREW")
ODD_VALUES = (
    *("", "0", "1", "-1", "9" * 17, "9" * 40, "1e308", "nan", "0x10", "²", "None", "true", "[]", "{}", "1:2"),
    *("../../etc/passwd", "..", "/", ".", "\0", "%00", "a" * 5000, "\x1b[31m", "<script>", "'\"", "\ufffd"),
)
HEADERS = ("Host", "Sec-Fetch-Site", "Range", "If-None-Match", "Accept-Encoding", "Origin")
HEADER_VALUES = (
    "evil.example",
    "cross-site",
    "bytes=0-",
    "bytes=9999999-1",
    "*",
    "gzip;q=x",
    "-1",
    "x" * 3000,
)
CODES = {200, 206, 304, 400, 403, 404, 405, 413, 416, 503}
USUAL: Mapping[str, tuple[str, ...]] = {
    "run": ("run",),
    "variant": ("ddp-2-even", "ddp-2-3-1"),
    "against": ("ddp-2-3-1",),
    "rank": ("0", "1"),
    "from_ns": ("0", "-1000"),
    "to_ns": ("1000000", "90000000"),
    "width_px": ("16", "800"),
    "lanes": ("0", "0,1", "1,1,0"),
    "kind": KINDS,
    "table": TABLES,
    "step": ("1", "2"),
    "q": ("gemm", "all", "a"),
    "id": ("0", "17"),
    "collective": ("0", "3"),
    "after_ns": ("0",),
    "again": ("1",),
    "prepare": ("1",),
}
"""What the page asks for."""


def case(chance: random.Random, directory: Path) -> None:
    """A few requests: each is answered, or refused with a sentence, and none shows other files."""
    for _ in range(chance.randint(1, 5)):
        route = chance.choice(list(apps()))
        answer = Client(apps()[route]).open(
            route, method=chance.choice(METHODS), query_string=query(chance), headers=headers(chance)
        )
        assert answer.status_code in CODES, (answer.status, route, answer.request.url, answer.text[:500])
        assert SECRET not in answer.data


def query(chance: random.Random) -> dict[str, Any]:
    """Some of what the page asks for, and up to three odd values."""
    asked = {key: chance.choice(values) for key, values in USUAL.items() if chance.random() < 0.7}
    odd = (chance.choice(list(USUAL)) for _ in range(chance.randint(0, 3)))
    return asked | {key: [chance.choice(ODD_VALUES)] * chance.choice((1, 1, 2, 100)) for key in odd}


def headers(chance: random.Random) -> dict[str, str]:
    """What a browser on another site, a proxy or a program may add."""
    return {
        chance.choice(HEADERS): chance.choice(HEADER_VALUES) for _ in range(chance.choice((0, 0, 0, 1, 2)))
    }


@cache
def apps() -> Mapping[str, Any]:
    """The routes of one server for the whole process, over a recorded run with the index of its traces."""
    directory = Path(tempfile.mkdtemp())
    shutil.copytree(RECORDED, directory / "run")
    (directory / "secret.json").write_bytes(SECRET)
    plugin = GpurunPlugin(SimpleNamespace(logdir=str(directory), flags=None))
    return dict(plugin.get_plugin_apps())


def prepare() -> None:
    """Waits for the indexes, which processes of their own make."""
    logging.getLogger("gpurun").setLevel(logging.CRITICAL)
    client = Client(apps()["/timeline/meta"])
    for variant in USUAL["variant"]:
        while "indexing" in client.get("/", query_string={"run": "run", "variant": variant}).text:
            time.sleep(0.05)
