"""The timeline's server on traces from 5 MB to 1 GB: making the index, then every zoom level, over HTTP.

    python -m benchmarks.timeline [--source TRACE.json.gz] [--mb 5 50 500 1000] [--keep DIR]

The traces repeat the real events of TRACE, as in `trace_speed`. Each is shown by a TensorBoard of its own,
as a browser would ask it: 1280 px wide, all lanes, at 9 places per zoom level, zooming and panning by turns.
"""

import argparse
import gzip
import json
import shutil
import statistics
import tempfile
import time
import urllib.parse
import urllib.request
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks.timing import record, table
from benchmarks.trace_speed import MB, make_trace
from launcher.run.view import open_view
from launcher.tensorboard_plugin.timeline.store import FOLDER

SOURCE = Path(__file__).resolve().parents[2] / "shared" / "traces" / "dlrm_8xV100"
ZOOMS = (1, 10, 100, 1000, 10_000)
PLACES = 9
WIDTH_PX = 1280


@dataclass(frozen=True)
class Figures:
    """One trace."""

    file_mb: float
    num_events: int
    index_s: float
    first_ms: float
    """`meta` and the first window, once indexed, by a server that has just started."""
    query_ms: tuple[float, ...]
    """Median per zoom level."""
    worst_ms: float
    payload_kb: tuple[float, ...]
    """As it is sent, packed, per zoom level: the largest."""
    others_ms: tuple[float, ...]
    """Search, selection, event, operators."""
    server_mb: float


def ask(url: str, route: str, **parameters: Any) -> tuple[float, int, Any]:
    """Milliseconds, bytes as sent, answer."""
    query = urllib.parse.urlencode({"run": ".", "variant": "traces", **parameters})
    request = urllib.request.Request(
        f"{url}data/plugin/gpurun/{route}?{query}", headers={"Accept-Encoding": "gzip"}
    )
    start = time.perf_counter()
    with urllib.request.urlopen(request, timeout=600) as answer:
        body = answer.read()
    elapsed_ms = 1e3 * (time.perf_counter() - start)
    return elapsed_ms, len(body), json.loads(gzip.decompress(body) if body[:2] == b"\x1f\x8b" else body)


def indexed_s(url: str) -> float:
    """Seconds until the index is there; asked every 20 ms."""
    start = time.perf_counter()
    while ask(url, "timeline/meta")[2]["state"] == "indexing":
        time.sleep(0.02)
    return time.perf_counter() - start


def windows(end_ns: int, zoom: int) -> list[tuple[int, int]]:
    """Places all over the trace, each a little longer or shorter than the one before."""
    found = []
    for place in range(PLACES):
        length = int(end_ns / zoom * (1 - 0.03 * (place % 2)))
        start = (end_ns - length) * place // max(PLACES - 1, 1)
        found.append((start, start + length))
    return found


def made(source: Path, place: Path, num_bytes: int) -> Path:
    """A trace of that size, alone in its folder and without an index."""
    file = place / "rank0.pt.trace.json"
    shutil.rmtree(place / FOLDER, ignore_errors=True)
    if not file.exists():
        place.mkdir(parents=True)
        make_trace(source, file, num_bytes)
    return file


def measure(folder: Path, file: Path) -> Figures:
    """All figures of one trace."""
    with open_view(folder) as server:
        index_s = indexed_s(server.url)
    with open_view(folder) as server:
        meta_ms, _, meta = ask(server.url, "timeline/meta")
        end_ns = meta["end_ns"]
        lanes = ",".join(str(lane["lane"]) for rank in meta["ranks"] for lane in rank["lanes"])
        shape = {"width_px": WIDTH_PX, "lanes": lanes}
        window_ms, _, _ = ask(server.url, "timeline/window", from_ns=0, to_ns=end_ns, **shape)
        times, sizes = [], []
        for zoom in ZOOMS:
            asked = [
                ask(server.url, "timeline/window", from_ns=start, to_ns=end, **shape)
                for start, end in windows(end_ns, zoom)
            ]
            times.append([each[0] for each in asked])
            sizes.append(max(each[1] for each in asked) / 1e3)
        found = ask(server.url, "timeline/search", q="gemm")
        others = (
            found[0],
            ask(server.url, "timeline/selection", from_ns=end_ns // 4, to_ns=end_ns // 2)[0],
            ask(server.url, "timeline/event", id=found[2]["events"][0]["id"])[0],
            ask(server.url, "operators")[0],
        )
        server_mb = psutil.Process(server.process.pid).memory_info().rss / MB
    return Figures(
        file_mb=file.stat().st_size / MB,
        num_events=meta["num_events"],
        index_s=index_s,
        first_ms=meta_ms + window_ms,
        query_ms=tuple(statistics.median(each) for each in times),
        worst_ms=max(max(each) for each in times),
        payload_kb=tuple(sizes),
        others_ms=others,
        server_mb=server_mb,
    )


def report(results: Sequence[Figures]) -> str:
    """Two tables: by size, and by zoom level."""
    sizes = [
        [
            f"{each.file_mb:.0f}",
            f"{each.num_events:,}",
            f"{each.index_s:.1f}",
            f"{1e3 * each.index_s / each.file_mb:.0f}",
            f"{each.first_ms:.0f}",
            f"{each.worst_ms:.0f}",
            *(f"{ms:.0f}" for ms in each.others_ms),
            f"{each.server_mb:.0f}",
        ]
        for each in results
    ]
    zooms = [
        [
            f"{each.file_mb:.0f}",
            *(f"{ms:.0f} ms, {kb:.0f} kB" for ms, kb in zip(each.query_ms, each.payload_kb, strict=True)),
        ]
        for each in results
    ]
    head = ["MB", "events", "index s", "ms per MB", "first window ms", "slowest window ms"]
    head += ["search ms", "selection ms", "event ms", "operators ms", "server MB"]
    return "\n\n".join(
        [
            "The server, over HTTP from the same machine. First window: of a server that has just started.",
            table(head, sizes),
            f"Median of {PLACES} windows of {WIDTH_PX} px with all lanes, by the share of the trace shown;"
            " and the largest answer, as sent.",
            table(["MB", *(f"1/{zoom:,}" for zoom in ZOOMS)], zooms),
        ]
    )


def main() -> None:
    """Runs all sizes and writes the tables down."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--source", type=Path, default=next(iter(sorted(SOURCE.glob("*.gz"))), None))
    parser.add_argument("--mb", type=int, nargs="+", default=[5, 50, 500, 1000])
    parser.add_argument("--keep", type=Path, help="a folder for the traces, which are used again")
    options, _ = parser.parse_known_args()
    results = []
    with ExitStack() as stack:
        folder = options.keep or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        for size in options.mb:
            file = made(options.source, folder / str(size), size * MB)
            results.append(measure(file.parent, file))
            if options.keep is None:
                file.unlink()
    record("Timeline of large traces", report(results))


if __name__ == "__main__":
    main()
