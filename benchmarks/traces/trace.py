"""Speed and memory of `gpurun trace` on large traces, compared with HTA and TraceLens on the same file.

    python -m benchmarks.traces.trace [PART …] [--source TRACE.json.gz] [--directory DIRECTORY]

makes large traces by repeating the real events of TRACE (later in time, with step numbers and correlation ids
of their own), analyses each in a fresh process, and records time and memory:
    sizes: traces of 50, 500 and 2000 MB, in turn, several rounds
    tables: one of 50 MB, without tables, with all but the critical path, and with all, in turn
    peers: one of 500 MB, with gpurun, with HTA (its temporal and communication-overlap breakdowns) and with
           TraceLens (the GPU's timeline and the table of kernels), each installed into an environment of its
           own
    ranks: 64 ranks of 20 MB each
Without a name, all of them. Environments of others are kept in DIRECTORY if one is given.
"""

import argparse
import gzip
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.timing import in_turn, machine_facts, record, table

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT.parent / "shared" / "traces" / "nccl_args_A100" / "rank0of2.json.gz"
MB = 1_000_000
SIZES_MB = (50, 500, 2000)
ROUNDS = 3
"""Of all sizes, each in another order, so that other load affects them alike."""
PEERS_MB = 500
RANK_MB = 20
NUM_RANKS = 64
CONTROL_S = 3.0
MAX_COPIES = 100_000
MIN_SPEEDUP = 15
OURS = (
    "import msgspec; from pathlib import Path\n"
    "from gpurun.launcher.trace.analysis.analyse import analyse_paths",
    "msgspec.json.encode(analyse_paths([Path(sys.argv[1])]))",
)
"""What to import, and then to measure; `sys.argv[1]` is the file."""
WITH_TABLES = (
    f"{OURS[0]}\nfrom gpurun.launcher.trace.model import TABLES",
    "msgspec.json.encode(analyse_paths([Path(sys.argv[1])], show=frozenset(TABLES) - {left_out}))",
)
SHOWN = {
    "no tables": OURS,
    "all but the critical path": (WITH_TABLES[0], WITH_TABLES[1].format(left_out="{'critical-path'}")),
    "all tables": (WITH_TABLES[0], WITH_TABLES[1].format(left_out="set()")),
}
"""The same for each choice of tables."""
PEERS = {
    ("HTA", "traceinsight", "traceinsight>=0.6"): (
        "from hta.trace_analysis import TraceAnalysis",
        "analysis = TraceAnalysis(trace_files={0: sys.argv[1]})\n"
        "analysis.get_temporal_breakdown(visualize=False)\n"
        "analysis.get_comm_comp_overlap(visualize=False)",
    ),
    ("TraceLens", "TraceLens", "git+https://github.com/AMD-AGI/TraceLens.git"): (
        "from TraceLens import TreePerfAnalyzer",
        "analysis = TreePerfAnalyzer.from_file(sys.argv[1])\n"
        "analysis.get_df_gpu_timeline()\n"
        "analysis.get_df_kernel_launchers()",
    ),
}
"""What to import and to measure, by a program's name, its distribution, and what to install."""
MEASURED = """
import resource, sys, time
{imports}
usages = lambda: [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
cpu_s = lambda: sum(usage.ru_utime + usage.ru_stime for usage in usages())
wall, cpu = time.perf_counter(), cpu_s()
{body}
wall, cpu = time.perf_counter() - wall, cpu_s() - cpu
peak = next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM"))
sys.stderr.write(f"\\nMEASURED {{wall}} {{cpu}} {{peak}} {{usages()[1].ru_maxrss}}\\n")
"""
"""`ru_maxrss` of a process itself would include what its parent held when it was started."""


@dataclass(frozen=True)
class Result:
    """One program on one file or directory."""

    program: str
    file_mb: float
    wall_s: float
    """Of the whole command."""
    analysis_s: float
    """Without the start of the interpreter and its imports."""
    cpu_s: float
    """Of the analysis, with child processes."""
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
        templates = [_template(event) for event in spans]
        self.text = ",\n" + ",\n".join(text for text, _ in templates)
        self.holes = [hole for _, holes in templates for hole in holes]

    def write(self, target: Path, num_bytes: int, **header: Any) -> None:
        """Writes a trace of `num_bytes`, with `header` added to its keys."""
        with target.open("w") as file:
            file.write(json.dumps(self.header | header)[:-1] + ', "traceEvents": [\n')
            file.write(",\n".join(self.once))
            for copy in range(MAX_COPIES):
                if file.tell() >= num_bytes:
                    break
                file.write(self._copy(copy))
            file.write("\n]}\n")

    def _copy(self, copy: int) -> str:
        shifts = {float: copy * self.period_us, int: 10_000_000 * copy, Step: 100 * copy}
        return self.text % tuple(round(value + shifts[type(value)], 3) for value in self.holes)


class Step(int):
    """The number of a step."""


def _template(event: dict[str, Any]) -> tuple[str, list[float | int]]:
    """An event's text with `%s` for its step number, time and correlation id, and these values."""
    event, marks = event | {"ts": "@ts"}, {'"@ts"': float(event["ts"])}
    if event.get("name", "").startswith("ProfilerStep#"):
        marks["@step"] = Step(event["name"].rpartition("#")[2])
        event["name"] = "ProfilerStep#@step"
    if "correlation" in event.get("args", {}):
        marks['"@correlation"'] = event["args"]["correlation"]
        event["args"] = event["args"] | {"correlation": "@correlation"}
    text = json.dumps(event)
    in_order = sorted(marks, key=text.index)
    text = text.replace("%", "%%")
    for mark in in_order:
        text = text.replace(mark, "%s", 1)
    return text, [marks[mark] for mark in in_order]


def run(program: str, python: str, code: tuple[str, str], path: Path) -> Result:
    """Runs the imports and the body in `code` on `path` in a fresh process."""
    started = time.perf_counter()
    imports, body = code
    command = [python, "-c", MEASURED.format(imports=imports, body=body), str(path)]
    done = subprocess.run(
        command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, cwd=ROOT, text=True, check=False
    )
    wall_s = time.perf_counter() - started
    if done.returncode != 0:
        raise SystemExit(f"{program} failed on {path}:\n{done.stderr[-2000:]}")
    analysis_s, cpu_s, *peaks_kib = map(float, done.stderr.rpartition("MEASURED ")[2].split())
    files = path.iterdir() if path.is_dir() else [path]
    size_mb = sum(file.stat().st_size for file in files) / MB
    return Result(program, size_mb, wall_s, analysis_s, cpu_s, *(kib * 1024 / MB for kib in peaks_kib))


def install(name: str, distribution: str, source: str, directory: Path) -> tuple[str, str]:
    """The interpreter of an environment that has the program, and its name and version."""
    python = str(directory / "bin" / "python")
    if not directory.exists():
        venv.create(directory, with_pip=True)
        subprocess.run([python, "-m", "pip", "install", "-q", source], check=True)
    code = f"from importlib.metadata import version; print(version('{distribution}'))"
    number = subprocess.run([python, "-c", code], stdout=subprocess.PIPE, text=True, check=True).stdout
    return python, f"{name} {number.strip()}"


def sizes(events: Repeated, directory: Path) -> None:
    """Writes the section "Traces"."""
    facts = machine_facts()
    files = [directory / f"trace{size_mb}.json" for size_mb in SIZES_MB]
    for file, size_mb in zip(files, SIZES_MB, strict=True):
        events.write(file, size_mb * MB)
    found = in_turn(
        {file: partial(run, "gpurun", sys.executable, OURS, file) for file in files}, ROUNDS, uncounted=0
    )
    for file in files:
        file.unlink()
    results = [_median(each) for each in found.values()]
    by_clock = _spread([each.analysis_s / each.file_mb for each in results])
    by_cpu = _spread([each.cpu_s / each.file_mb for each in results])
    text = (
        "Traces of these sizes, made by repeating the events of a real one, read and fully analysed in a "
        f"fresh process each, in turn; medians of {ROUNDS} rounds, and the highest peak.\n\n"
        f"{_table(results)}\n\n"
        f"Time per MB stays within ±{by_clock:.0%} by the clock, ±{by_cpu:.0%} by CPU time (goal: ±20%)."
    )
    record("Traces", text, facts)


def tables(events: Repeated, directory: Path) -> None:
    """Writes the section "Tables of a trace"."""
    facts = machine_facts()
    file = directory / f"trace{SIZES_MB[0]}.json"
    events.write(file, SIZES_MB[0] * MB)
    found = in_turn(
        {name: partial(run, name, sys.executable, code, file) for name, code in SHOWN.items()},
        ROUNDS,
        uncounted=0,
    )
    file.unlink()
    medians = _table([_median(each) for each in found.values()])
    text = f"One trace, analysed without and with tables, in turn; medians of {ROUNDS} rounds.\n\n{medians}"
    record("Tables of a trace", text, facts)


def _median(rounds: Sequence[Result]) -> Result:
    """Of each time by itself; of memory the most."""
    return replace(
        rounds[0],
        **{
            name: median(getattr(each, name) for each in rounds) for name in ("wall_s", "analysis_s", "cpu_s")
        },
        **{name: max(getattr(each, name) for each in rounds) for name in ("peak_mb", "child_peak_mb")},
    )


def peers(events: Repeated, directory: Path) -> None:
    """Writes the section "Traces compared with other programs"."""
    facts = machine_facts()
    installed = [(*install(*peer, directory / peer[0].lower()), code) for peer, code in PEERS.items()]
    file = directory / f"trace{PEERS_MB}.json"
    events.write(file, PEERS_MB * MB)
    ours = run("gpurun", sys.executable, OURS, file)
    others = [run(program, python, code, file) for python, program, code in installed]
    file.unlink()
    ratios = [
        f"gpurun is {each.wall_s / ours.wall_s:.1f} times as fast as {each.program} by the clock, "
        f"{each.cpu_s / ours.cpu_s:.1f} times by CPU time."
        for each in others
    ]
    text = (
        "The same trace, one program after the other: gpurun's whole analysis; of HTA the breakdown by kind "
        "of time and the overlap of communication; of TraceLens the GPU's timeline and the table of kernels."
        f"\n\n{_table([ours, *others])}\n\n{' '.join(ratios)} Goal for HTA: {MIN_SPEEDUP}."
    )
    record("Traces compared with other programs", text, facts)


def ranks(events: Repeated, directory: Path) -> None:
    """Writes the section "Traces of many ranks"."""
    facts = machine_facts()
    traces = directory / "ranks"
    traces.mkdir()
    first = traces / "rank0.json"
    info = {"rank": 0, "world_size": NUM_RANKS, "backend": "nccl"}
    events.write(first, RANK_MB * MB, distributedInfo=info)
    head, _, rest = first.read_text().partition('"rank": 0')
    for rank in range(1, NUM_RANKS):
        (traces / f"rank{rank}.json").write_text(f'{head}"rank": {rank}{rest}')
    given = [_cores_given()]
    result = run(f"gpurun, {NUM_RANKS} ranks", sys.executable, OURS, traces)
    given.append(_cores_given())
    shutil.rmtree(traces)
    text = (
        f"{_table([result])}\n\n"
        f"{result.cpu_s / result.analysis_s:.2f} of {os.cpu_count()} cores busy on average during the "
        f"analysis ({result.cpu_s / result.wall_s:.2f} with the start of the interpreter); as many busy "
        f"loops as cores got {given[0]:.2f} just before and {given[1]:.2f} just after: what the machine "
        f"gives. The process that gathers the ranks peaks at {result.peak_mb:.0f} MB, each of those that "
        "read at no more than "
        f"{result.child_peak_mb:.0f} MB (goal for one trace of {RANK_MB} MB: {_bound_mb(RANK_MB):.0f} MB)."
    )
    record("Traces of many ranks", text, facts)


def _cores_given() -> float:
    """CPU seconds per second of a busy loop on every core: less than the number of cores under other load."""
    body = (
        "import time; end = time.perf_counter() + float(__import__('sys').argv[1])\n"
        "while time.perf_counter() < end: pass\n"
        "print(time.process_time())"
    )
    command = [sys.executable, "-S", "-c", body, str(CONTROL_S)]
    loops = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(os.cpu_count() or 1)]
    return sum(float(loop.communicate()[0]) for loop in loops) / CONTROL_S


PARTS = {"sizes": sizes, "tables": tables, "peers": peers, "ranks": ranks}


def _table(results: Sequence[Result]) -> str:
    """All but the first of the times are without the start of the interpreter and its imports."""
    header = ["program", "MB", "command s", "CPU s", "ms per MB", "CPU ms per MB", "peak MB", "goal: at most"]
    return table(header, [_row(each) for each in results])


def _row(each: Result) -> list[str]:
    figures = [
        f"{each.file_mb:.0f}",
        f"{each.wall_s:.2f}",
        f"{each.cpu_s:.2f}",
        f"{1000 * each.analysis_s / each.file_mb:.1f}",
        f"{1000 * each.cpu_s / each.file_mb:.1f}",
        f"{each.peak_mb:.0f}",
    ]
    return [each.program, *figures, f"{_bound_mb(each.file_mb):.0f}" if each.program == "gpurun" else ""]


def _spread(figures: Sequence[float]) -> float:
    """Half their range, as a share of its middle."""
    return (max(figures) - min(figures)) / (max(figures) + min(figures))


def _bound_mb(file_mb: float) -> float:
    return 100 + file_mb / 4


def main(arguments: Sequence[str] = ()) -> None:
    """Writes the sections of the parts that are named, or of all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--source", type=Path, default=SOURCE)
    parser.add_argument(
        "--directory", type=Path, help="takes the files, up to 3 GB; default: a temporary one"
    )
    options = parser.parse_args(arguments)
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"no such part: {', '.join(unknown)}")
    if not options.source.exists():
        raise SystemExit(f"{options.source} isn't here: name a real trace with --source TRACE.json.gz")
    events = Repeated(options.source)
    with tempfile.TemporaryDirectory() as name:
        for part in options.parts or PARTS:
            PARTS[part](events, options.directory or Path(name))


if __name__ == "__main__":
    main(sys.argv[1:])
