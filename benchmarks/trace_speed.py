"""Speed and memory of `gpurun trace` on large traces, beside HolisticTraceAnalysis on the same file.

    python benchmarks/trace_speed.py --source TRACE.json.gz [--mb 50 500 2000] [--hta-mb 500]

makes traces of these sizes in a temporary folder by repeating the real events of TRACE (later in time, with
step numbers and correlation ids of their own), analyses each in a fresh process, and prints a Markdown table.
HTA (0.5 or newer) is installed into an environment of its own in that folder and runs on the file of
`--hta-mb`: its temporal and communication-overlap breakdowns. `--hta-mb 0` leaves it out.
"""

import argparse
import gzip
import json
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

MB = 1_000_000
OURS = """
import sys
from pathlib import Path
import msgspec
from launcher.trace.analyse import analyse_paths
msgspec.json.encode(analyse_paths([Path(sys.argv[1])]))
"""
HTA = """
import sys
from hta.trace_analysis import TraceAnalysis
analysis = TraceAnalysis(trace_files={0: sys.argv[1]})
analysis.get_temporal_breakdown(visualize=False)
analysis.get_comm_comp_overlap(visualize=False)
"""
MEASURE = """
import resource
usage = resource.getrusage(resource.RUSAGE_SELF)
sys.stderr.write(f"\\nMEASURED {usage.ru_maxrss} {usage.ru_utime + usage.ru_stime}\\n")
"""


@dataclass(frozen=True)
class Result:
    """One program on one file."""

    program: str
    file_mb: float
    wall_s: float
    cpu_s: float
    peak_mb: float


def make_trace(source: Path, target: Path, num_bytes: int) -> None:
    """Writes a trace of `num_bytes` by repeating the events of `source`."""
    trace = json.loads(gzip.decompress(source.read_bytes()))
    events = trace.pop("traceEvents")
    spans = [event for event in events if event.get("ph") == "X"]
    first = min(event["ts"] for event in spans)
    period_us = max(event["ts"] + event.get("dur", 0) for event in spans) - first + 1000
    with target.open("w") as file:
        file.write(json.dumps(trace)[:-1] + ', "traceEvents": [\n')
        copy = 0
        while file.tell() < num_bytes:
            chosen = events if copy == 0 else spans
            lines = ",\n".join(json.dumps(repeated(event, copy, period_us)) for event in chosen)
            file.write((",\n" if copy else "") + lines)
            copy += 1
        file.write("\n]}\n")


def repeated(event: dict, copy: int, period_us: float) -> dict:
    """The event in its `copy`-th repetition."""
    event = dict(event)
    if "ts" in event:
        event["ts"] = round(event["ts"] + copy * period_us, 3)
    if event.get("name", "").startswith("ProfilerStep#"):
        event["name"] = f"ProfilerStep#{int(event['name'].rpartition('#')[2]) + 100 * copy}"
    if "correlation" in event.get("args", {}):
        event["args"] = event["args"] | {"correlation": event["args"]["correlation"] + 10_000_000 * copy}
    return event


def run(program: str, python: str, body: str, file: Path) -> Result:
    """Runs `body` on `file` in a fresh process."""
    started = time.perf_counter()
    command = [python, "-c", body + MEASURE, str(file)]
    done = subprocess.run(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, check=False)
    wall_s = time.perf_counter() - started
    if done.returncode != 0:
        raise SystemExit(f"{program} failed on {file}:\n{done.stderr[-2000:]}")
    peak_kib, cpu_s = done.stderr.rpartition("MEASURED ")[2].split()
    return Result(program, file.stat().st_size / MB, wall_s, float(cpu_s), int(peak_kib) * 1024 / MB)


def install_hta(folder: Path) -> str:
    """The interpreter of a new environment that has HTA."""
    venv.create(folder, with_pip=True)
    python = str(folder / "bin" / "python")
    subprocess.run([python, "-m", "pip", "install", "-q", "HolisticTraceAnalysis>=0.5"], check=True)
    return python


def table(results: Sequence[Result]) -> str:
    """The results in Markdown."""
    lines = ["| program | MB | wall s | CPU s | MB/s | peak MB |", "|---|---|---|---|---|---|"]
    for each in results:
        rate = each.file_mb / each.wall_s
        figures = (
            f"{each.file_mb:.0f} | {each.wall_s:.2f} | {each.cpu_s:.2f} | {rate:.1f} | {each.peak_mb:.0f}"
        )
        lines.append(f"| {each.program} | {figures} |")
    return "\n".join(lines)


def main() -> None:
    """Runs what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--source", type=Path, required=True)
    parser.add_argument("--mb", type=int, nargs="+", default=[50, 500])
    parser.add_argument("--hta-mb", type=int, default=500)
    options = parser.parse_args()
    results = []
    with tempfile.TemporaryDirectory() as folder:
        for size in sorted({*options.mb, options.hta_mb} - {0}):
            file = Path(folder) / f"trace{size}.json"
            make_trace(options.source, file, size * MB)
            results.append(run("gpurun", sys.executable, OURS, file))
            if size == options.hta_mb:
                results.append(run("HTA", install_hta(Path(folder) / "hta"), HTA, file))
            file.unlink()
    sys.stdout.write(table(results) + "\n")


if __name__ == "__main__":
    main()
