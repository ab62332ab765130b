"""The timeline on traces from 5 MB to 1 GB: building the index, every zoom level over HTTP, a real browser.

    python -m benchmarks.traces.timeline [--source TRACE.json.gz] [--mb 5 50 500 1000] [--keep DIR]

The traces repeat the real events of TRACE, as in `benchmarks.traces.trace`. A separate TensorBoard serves
each, with the requests of a browser: 1280 px wide, all lanes, 9 places per zoom level, zooming and panning
in turn. Then Chromium opens it (`benchmarks.traces.browsing`). With --keep, traces and figures of each size
stay in DIR, so that sizes measured by separate commands appear in the same tables.
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
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import psutil

from benchmarks.timing import record, table
from benchmarks.traces.browsing import MOVES, Browsing, browse
from benchmarks.traces.trace import MB, Repeated
from gpurun.launcher.tensorboard_plugin.timeline.index_store import Traces, home_of
from gpurun.launcher.tensorboard_plugin.timeline.indexing import ENTRY
from gpurun.launcher.tensorboard_plugin.view import TensorBoardServer, open_view

SOURCE = Path(__file__).resolve().parents[3] / "shared" / "traces" / "dlrm_8xV100"
ZOOMS = (1, 10, 100, 1000, 10_000)
PLACES = 9
WIDTH_PX = 1280
FIGURES = "figures.json"


@dataclass(frozen=True)
class Figures:
    """One trace."""

    file_mb: float
    num_events: int
    index_s: float
    indexer_mb: float
    first_ms: float
    """`meta` and the first window, once indexed, by a server that has just started."""
    query_ms: tuple[float, ...]
    """Median per zoom level."""
    worst_ms: float
    payload_kb: tuple[float, ...]
    """Largest answer per zoom level, as sent (compressed)."""
    others_ms: tuple[float, ...]
    """Search, selection, event, operators."""
    browser: Browsing
    server_mb: float
    """Peak memory of the server, including the browser's visit."""


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


def indexed(server: TensorBoardServer) -> tuple[float, float]:
    """Seconds until the index exists, polled every 20 ms; and the peak MB of the process building it."""
    start, most_mb = time.perf_counter(), 0.0
    while ask(server.url, "timeline/meta")[2]["state"] == "indexing":
        children = psutil.Process(server.process.pid).children()
        most_mb = max([most_mb, *(peak_mb(child.pid) for child in children if is_indexer(child))])
        time.sleep(0.02)
    return time.perf_counter() - start, most_mb


def is_indexer(process: psutil.Process) -> bool:
    """Whether it is the process that builds an index; TensorBoard has children of its own."""
    with suppress(psutil.Error):
        return ENTRY in process.cmdline()
    return False


def peak_mb(pid: int) -> float:
    """Peak resident memory of a process so far, in MB; 0 after its end."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024 / MB
    return 0.0


def windows(end_ns: int, zoom: int) -> list[tuple[int, int]]:
    """Places all over the trace, each a little longer or shorter than the one before."""
    found = []
    for place in range(PLACES):
        length = int(end_ns / zoom * (1 - 0.03 * (place % 2)))
        start = (end_ns - length) * place // max(PLACES - 1, 1)
        found.append((start, start + length))
    return found


def made(source: Path, place: Path, num_bytes: int) -> Path:
    """A trace of that size, alone in its directory and without an index."""
    file = place / "rank0.pt.trace.json"
    shutil.rmtree(home_of(Traces(place, (file,), place)), ignore_errors=True)
    if not file.exists():
        place.mkdir(parents=True)
        Repeated(source).write(file, num_bytes)
    return file


def measure(directory: Path, file: Path) -> Figures:
    """All figures of one trace."""
    with open_view(directory) as server:
        index_s, indexer_mb = indexed(server)
    with open_view(directory) as server:
        served = asked(server.url)
        return Figures(
            file_mb=file.stat().st_size / MB,
            index_s=index_s,
            indexer_mb=indexer_mb,
            **served,
            browser=browse(server.url),
            server_mb=peak_mb(server.process.pid),
        )


def asked(url: str) -> dict[str, Any]:
    """The figures of a server's answers."""
    meta_ms, _, meta = ask(url, "timeline/meta")
    end_ns = meta["end_ns"]
    lanes = ",".join(str(lane["lane"]) for rank in meta["ranks"] for lane in rank["lanes"])
    shape = {"width_px": WIDTH_PX, "lanes": lanes}
    window_ms, _, _ = ask(url, "timeline/window", from_ns=0, to_ns=end_ns, **shape)
    zooms = [
        [
            ask(url, "timeline/window", from_ns=start, to_ns=end, **shape)
            for start, end in windows(end_ns, zoom)
        ]
        for zoom in ZOOMS
    ]
    return {
        "num_events": meta["num_events"],
        "first_ms": meta_ms + window_ms,
        "query_ms": tuple(statistics.median(each[0] for each in zoom) for zoom in zooms),
        "worst_ms": max(each[0] for zoom in zooms for each in zoom),
        "payload_kb": tuple(max(each[1] for each in zoom) / 1e3 for zoom in zooms),
        "others_ms": others_ms(url, end_ns),
    }


def others_ms(url: str, end_ns: int) -> tuple[float, ...]:
    """Search, selection, event, operators."""
    found = ask(url, "timeline/search", q="gemm")
    return (
        found[0],
        ask(url, "timeline/selection", from_ns=end_ns // 4, to_ns=end_ns // 2)[0],
        ask(url, "timeline/event", id=found[2]["events"][0]["id"])[0],
        ask(url, "operators")[0],
    )


def kept(directory: Path) -> list[Figures]:
    """The figures of all sizes that have been measured in `directory`, smallest first."""
    found = [msgspec.json.decode(path.read_bytes(), type=Figures) for path in directory.glob(f"*/{FIGURES}")]
    return sorted(found, key=lambda each: each.file_mb)


def by_size(results: Sequence[Figures]) -> str:
    """Building the index, the first window, and other requests."""
    head = ["MB", "events", "index s", "ms per MB", "first window ms", "slowest window ms"]
    head += ["search ms", "selection ms", "event ms", "operators ms", "server MB", "indexer MB"]
    rows = [
        [
            f"{each.file_mb:.0f}",
            f"{each.num_events:,}",
            f"{each.index_s:.1f}",
            f"{1e3 * each.index_s / each.file_mb:.0f}",
            f"{each.first_ms:.0f}",
            f"{each.worst_ms:.0f}",
            *(f"{ms:.0f}" for ms in each.others_ms),
            f"{each.server_mb:.0f}",
            f"{each.indexer_mb:.0f}",
        ]
        for each in results
    ]
    return table(head, rows)


def by_zoom(results: Sequence[Figures]) -> str:
    """Time and largest answer at each zoom level."""
    rows = [
        [
            f"{each.file_mb:.0f}",
            *(f"{ms:.0f} ms, {kb:.0f} kB" for ms, kb in zip(each.query_ms, each.payload_kb, strict=True)),
        ]
        for each in results
    ]
    return table(["MB", *(f"1/{zoom:,}" for zoom in ZOOMS)], rows)


def in_browser(results: Sequence[Figures]) -> str:
    """The times in the browser."""
    head = ["MB", "first paint ms", "first picture ms", "zoom or pan ms", "heap MB", "heap with garbage MB"]
    rows = [
        [
            f"{each.file_mb:.0f}",
            f"{each.browser.paint_ms:.0f}",
            f"{each.browser.picture_ms:.0f}",
            f"{each.browser.move_ms:.0f}",
            f"{each.browser.heap_mb:.1f}",
            f"{each.browser.peak_heap_mb:.1f}",
        ]
        for each in results
    ]
    return table(head, [*rows, ["goal", "", "≤ 2000", "≤ 100", "≤ 200", "≤ 200"]])


def report(results: Sequence[Figures]) -> str:
    """Three tables: by size, by zoom level, in the browser."""
    return "\n\n".join(
        [
            "The server, over HTTP from the same machine. First window: of a server that has just started."
            " Memory: the most that was resident; goal for the server: ≤ 400 MB.",
            by_size(results),
            f"Median of {PLACES} windows of {WIDTH_PX} px with all lanes, by the share of the trace shown;"
            " and the largest answer, as sent. Goal: ≤ 100 ms.",
            by_zoom(results),
            "Chromium, 1280 × 800, once indexed. First picture: from the start of loading the tab to the"
            f" frame with all lanes. Zoom or pan: median of the requests of {len(MOVES)} key presses from the"
            " whole trace to single events and back, as the page sees them. Heap: JavaScript and array"
            " buffers after all of these, and the largest in between.",
            in_browser(results),
        ]
    )


def main() -> None:
    """Runs all sizes and writes the tables down."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--source", type=Path, default=next(iter(sorted(SOURCE.glob("*.gz"))), None))
    parser.add_argument("--mb", type=int, nargs="+", default=[5, 50, 500, 1000])
    parser.add_argument("--keep", type=Path, help="a directory for traces and figures, which are reused")
    options, _ = parser.parse_known_args()
    with ExitStack() as stack:
        directory = options.keep or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        for size in options.mb:
            file = made(options.source, directory / str(size), size * MB)
            figures = measure(file.parent, file)
            (file.parent / FIGURES).write_bytes(msgspec.json.encode(figures))
            if options.keep is None:
                file.unlink()
        record("Timeline of large traces", report(kept(directory)))


if __name__ == "__main__":
    main()
