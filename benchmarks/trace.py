"""Speed and memory of `gpurun trace` on large traces, beside HolisticTraceAnalysis on the same file.

    python -m benchmarks.trace [--source TRACE.json.gz] [--mb 50 500 2000] [--hta-mb 500] [--ranks 64]

makes traces of these sizes in a temporary folder by repeating the real events of TRACE (later in time, with
step numbers and correlation ids of their own), analyses each in a fresh process, and notes what it took.
HTA (0.5 or newer) is installed into an environment of its own in that folder and runs on the file of
`--hta-mb`: its temporal and communication-overlap breakdowns. `--hta-mb 0` leaves it out. Then as many ranks
as `--ranks` says, of 20 MB each.
"""

import argparse
import gzip
import json
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.timing import record, table

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT.parent / "shared" / "traces" / "nccl_args_A100" / "rank0of2.json.gz"
MB = 1_000_000
RANK_MB = 20
MAX_COPIES = 100_000
MIN_SPEEDUP = 15
OURS = """
import sys, time
from pathlib import Path
import msgspec
from launcher.trace.analyse import analyse_paths
start = time.perf_counter()
msgspec.json.encode(analyse_paths([Path(sys.argv[1])]))
"""
HTA = """
import sys, time
from hta.trace_analysis import TraceAnalysis
start = time.perf_counter()
analysis = TraceAnalysis(trace_files={0: sys.argv[1]})
analysis.get_temporal_breakdown(visualize=False)
analysis.get_comm_comp_overlap(visualize=False)
"""
MEASURE = """
seconds = time.perf_counter() - start
import resource
own, children = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
cpu_s = sum(usage.ru_utime + usage.ru_stime for usage in (own, children))
sys.stderr.write(f"\\nMEASURED {seconds} {cpu_s} {own.ru_maxrss} {children.ru_maxrss}\\n")
"""


@dataclass(frozen=True)
class Result:
    """One program on one file or folder."""

    program: str
    file_mb: float
    wall_s: float
    """Of the whole command."""
    analysis_s: float
    """Without the start of the interpreter and its imports."""
    cpu_s: float
    peak_mb: float
    child_peak_mb: float
    """Of the largest child process."""


class Repeated:
    """The events of a trace as text that can be repeated."""

    def __init__(self, source: Path) -> None:
        trace = json.loads(gzip.decompress(source.read_bytes()))
        events = trace.pop("traceEvents")
        self.header = trace
        self.once = [json.dumps(event) for event in events if event.get("ph") != "X"]
        spans = [event for event in events if event.get("ph") == "X"]
        first = min(event["ts"] for event in spans)
        self.period_us = max(event["ts"] + event.get("dur", 0) for event in spans) - first + 1000
        self.templates = [_template(event) for event in spans]

    def write(self, target: Path, num_bytes: int, **header: Any) -> None:
        """Writes a trace of `num_bytes`, with `header` added to its keys."""
        with target.open("w") as file:
            file.write(json.dumps(self.header | header)[:-1] + ', "traceEvents": [\n')
            file.write(",\n".join(self.once))
            for copy in range(MAX_COPIES):
                if file.tell() >= num_bytes:
                    break
                file.write(",\n" + ",\n".join(self._copy(copy)))
            file.write("\n]}\n")

    def _copy(self, copy: int) -> Iterator[str]:
        for text, ts_us, correlation, step in self.templates:
            text = text.replace('"@ts"', str(round(ts_us + copy * self.period_us, 3)), 1)
            if correlation is not None:
                text = text.replace('"@correlation"', str(correlation + 10_000_000 * copy), 1)
            yield text if step is None else text.replace("@step", str(step + 100 * copy), 1)


def _template(event: dict[str, Any]) -> tuple[str, float, int | None, int | None]:
    """An event's text with marks for its time, correlation id and step number, and their values."""
    ts_us, correlation, step = event["ts"], None, None
    event = event | {"ts": "@ts"}
    if "correlation" in event.get("args", {}):
        correlation = event["args"]["correlation"]
        event["args"] = event["args"] | {"correlation": "@correlation"}
    if event.get("name", "").startswith("ProfilerStep#"):
        step = int(event["name"].rpartition("#")[2])
        event["name"] = "ProfilerStep#@step"
    return json.dumps(event), ts_us, correlation, step


def run(program: str, python: str, body: str, path: Path) -> Result:
    """Runs `body` on `path` in a fresh process."""
    started = time.perf_counter()
    command = [python, "-c", body + MEASURE, str(path)]
    streams = {"stderr": subprocess.PIPE, "stdout": subprocess.DEVNULL}
    done = subprocess.run(command, **streams, cwd=ROOT, text=True, check=False)
    wall_s = time.perf_counter() - started
    if done.returncode != 0:
        raise SystemExit(f"{program} failed on {path}:\n{done.stderr[-2000:]}")
    analysis_s, cpu_s, *peaks_kib = map(float, done.stderr.rpartition("MEASURED ")[2].split())
    files = path.iterdir() if path.is_dir() else [path]
    size_mb = sum(file.stat().st_size for file in files) / MB
    return Result(program, size_mb, wall_s, analysis_s, cpu_s, *(kib * 1024 / MB for kib in peaks_kib))


def install_hta(folder: Path) -> tuple[str, str]:
    """The interpreter of a new environment that has HTA, and the name and version of what was installed."""
    venv.create(folder, with_pip=True)
    python = str(folder / "bin" / "python")
    subprocess.run([python, "-m", "pip", "install", "-q", "HolisticTraceAnalysis>=0.5"], check=True)
    code = "from importlib.metadata import version; print(version('HolisticTraceAnalysis'))"
    number = subprocess.run([python, "-c", code], stdout=subprocess.PIPE, text=True, check=True).stdout
    return python, f"HTA {number.strip()}"


def run_sizes(events: Repeated, folder: Path, sizes_mb: Sequence[int], hta_mb: int) -> list[Result]:
    """Each size once; HTA on its own right after ours on the same file."""
    hta = install_hta(folder / "hta") if hta_mb else None
    results = []
    for size_mb in sorted({*sizes_mb, hta_mb} - {0}):
        file = folder / f"trace{size_mb}.json"
        events.write(file, size_mb * MB)
        results.append(run("gpurun", sys.executable, OURS, file))
        if hta and size_mb == hta_mb:
            results.append(run(hta[1], hta[0], HTA, file))
        file.unlink()
    return results


def run_ranks(events: Repeated, folder: Path, ranks: int) -> Result:
    """A folder of `ranks` traces."""
    (folder / "ranks").mkdir()
    first = folder / "ranks" / "rank0.json"
    for rank in range(ranks):
        info: Mapping[str, Any] = {"rank": rank, "world_size": ranks, "backend": "nccl"}
        if rank == 0:
            events.write(first, RANK_MB * MB, distributedInfo=info)
            head, _, rest = first.read_text().partition('"rank": 0')
        else:
            (folder / "ranks" / f"rank{rank}.json").write_text(f'{head}"rank": {rank}{rest}')
    return run(f"gpurun, {ranks} ranks", sys.executable, OURS, folder / "ranks")


def rows(results: Sequence[Result]) -> Iterator[Sequence[str]]:
    for each in results:
        bound_mb = 100 + each.file_mb / 4
        yield [
            each.program,
            f"{each.file_mb:.0f}",
            f"{each.wall_s:.2f}",
            f"{each.cpu_s:.2f}",
            f"{1000 * each.analysis_s / each.file_mb:.1f}",
            f"{each.peak_mb:.0f}",
            f"{bound_mb:.0f}" if each.program == "gpurun" else "",
        ]


def text(results: Sequence[Result], ranks: Result | None) -> str:
    header = [
        "program",
        "MB",
        "wall s",
        "CPU s",
        "ms per MB without start",
        "peak MB",
        "goal: at most",
    ]
    parts = [
        "Traces of these sizes, made by repeating the events of a real one, read and fully analysed in a "
        "fresh process each.",
        table(header, list(rows([*results, *([ranks] if ranks else [])]))),
        *_compared(results),
    ]
    if ranks:
        parts.append(
            f"{ranks.program.partition(', ')[2]}: {ranks.cpu_s / ranks.wall_s:.2f} cores busy on average; "
            f"the process that gathers the ranks peaks at {ranks.peak_mb:.0f} MB, each of those that read "
            f"at no more than {ranks.child_peak_mb:.0f} MB."
        )
    return "\n\n".join(parts)


def _compared(results: Sequence[Result]) -> Iterator[str]:
    per_mb = [each.analysis_s / each.file_mb for each in results if each.program == "gpurun"]
    if len(per_mb) > 1:
        middle = (max(per_mb) + min(per_mb)) / 2
        yield f"Time per MB stays within ±{max(per_mb) / middle - 1:.0%} (goal: ±20%)."
    for ours, other in pairwise(results):
        if other.program != "gpurun":
            yield (
                f"Speed over {other.program} on the same file: {other.wall_s / ours.wall_s:.1f} times by the "
                f"clock, {other.cpu_s / ours.cpu_s:.1f} times by CPU time (goal: {MIN_SPEEDUP})."
            )


def main(arguments: Sequence[str] = ()) -> None:
    """Writes the section "Traces"."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--source", type=Path, default=SOURCE)
    parser.add_argument("--mb", type=int, nargs="+", default=[50, 500, 2000])
    parser.add_argument("--hta-mb", type=int, default=500)
    parser.add_argument("--ranks", type=int, default=64)
    options = parser.parse_args(arguments)
    if not options.source.exists():
        raise SystemExit(f"{options.source} isn't here: name a real trace with --source TRACE.json.gz")
    events = Repeated(options.source)
    with tempfile.TemporaryDirectory() as name:
        results = run_sizes(events, Path(name), options.mb, options.hta_mb)
        ranks = run_ranks(events, Path(name), options.ranks) if options.ranks else None
    record("Traces", text(results, ranks))


if __name__ == "__main__":
    main(sys.argv[1:])
