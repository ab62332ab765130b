"""What the tests of TraceLens, of Kineto's TensorBoard plugin and of HTA state, and what gpurun says.

    python -m benchmarks.traces.peers DIRECTORY

DIRECTORY is searched for their tests with their traces:
    TraceLens (AMD-AGI/TraceLens): `tests/traces`, traces NAME.json.gz with a report in NAME_perf_report_csvs/
        next to them, or one trace next to perf_csvs/. Of the latter, whose reports mix in another trace, only
        the GPU's time is compared.
    the plugin (pytorch/kineto before 94979607): `tb_plugin` with `test` and `samples`
    HTA (facebookresearch/HolisticTraceAnalysis): `tests` with `data`
Nothing is kept but how many figures are equal.
"""

import argparse
import csv
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.timing import machine_facts, record, table
from benchmarks.traces.peer_tests import POINTER_BYTES, of_hta, of_plugin
from gpurun.launcher.trace.analysis.analyse import analyse_paths
from gpurun.launcher.trace.model import Breakdown, TraceReport

SUFFIX = "_perf_report_csvs"
MIXED = "perf_csvs"
EQUAL = 1e-5
"""Relative: TraceLens adds up doubles of microseconds since the machine's start, which rounds digits."""
EQUAL_US = 0.3
Row = Mapping[str, str]
Reason = str


@dataclass(frozen=True)
class Figure:
    """One figure of both."""

    trace: str
    kind: str
    """The table that it is in."""
    name: str
    theirs: float
    ours: float | None
    """`None`: gpurun has no such row."""
    reason: Reason = ""
    """Why they differ, if they do."""

    @property
    def is_equal(self) -> bool:
        if self.ours is None:
            return False
        least = EQUAL_US if self.kind == "GPU time" or self.name.endswith("µs") else 0.0
        return abs(self.ours - self.theirs) <= max(least, EQUAL * abs(self.theirs))


def figures(trace: Path, reports: Path) -> list[Figure]:
    """Every figure of these reports that has a counterpart."""
    report = analyse_paths([trace], None, frozenset({"kernels", "shapes"}))
    name = trace.name.removesuffix(".json.gz")
    parts: Mapping[str, Callable[[str, TraceReport, Iterable[Row]], Iterable[Figure]]] = {
        "gpu_timeline.csv": timeline,
        "kernel_summary.csv": kernels,
        "ops_summary.csv": operators,
        "GEMM.csv": products,
    }
    found: list[Figure] = []
    for file, compare in parts.items():
        is_comparable = reports.name != MIXED or compare is timeline
        if is_comparable and (reports / file).exists():
            with (reports / file).open(newline="") as rows:
                found += compare(f"{trace.parent.name}/{name}", report, csv.DictReader(rows))
    return found


NO_MEMSETS = "this report of TraceLens leaves memsets out"
MEMSETS = "TraceLens counts memsets as compute; gpurun as copies"
LATER = "TraceLens' time begins at the step's mark on the GPU; gpurun's with the first work in the file"


def timeline(trace: str, report: TraceReport, rows: Iterable[Row]) -> Iterable[Figure]:
    """The parts of the GPU's time, µs."""
    total = report.ranks[0].total
    ours: Mapping[str, Callable[[Breakdown], float]] = {
        "computation_time": lambda each: each.compute_us,
        "exposed_comm_time": lambda each: each.exposed_comm_us,
        "exposed_memcpy_time": lambda each: each.exposed_memcpy_us,
        "busy_time": lambda each: each.span_us - each.idle_us,
        "idle_time": lambda each: each.idle_us,
        "total_time": lambda each: each.span_us,
        "total_comm_time": lambda each: each.comm_us,
        "total_memcpy_time": lambda each: each.memcpy_us,
    }
    theirs = {row["type"]: 1000 * float(row["time ms"]) for row in rows}
    is_later = theirs["total_time"] < total.span_us - EQUAL_US
    for name, us in theirs.items():
        of = ours.get(name)
        if of is not None:
            is_memset = name in ("computation_time", "exposed_memcpy_time", "total_memcpy_time")
            left_out = abs(theirs["busy_time"] + total.memset_us - ours["busy_time"](total)) <= EQUAL_US
            reasons = [LATER] * is_later + [MEMSETS] * bool(is_memset and total.memset_us)
            if total.memset_us and left_out:
                reasons = [NO_MEMSETS]
            yield Figure(trace, "GPU time", name, us, of(total), "; ".join(reasons))


def kernels(trace: str, report: TraceReport, rows: Iterable[Row]) -> Iterable[Figure]:
    """Time and number of each kernel by the operator that launched it."""
    ours: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0, 0.0])
    for each in report.kernels_by_shape or ():
        sums = ours[each.op or "", each.name]
        sums[0] += each.device_us
        sums[1] += each.count
    theirs: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0, 0.0])
    for row in rows:
        sums = theirs[row.get("Parent cpu_op", ""), row["Kernel name"]]
        sums[0] += float(row["Kernel duration (µs)_sum"])
        sums[1] += float(row["Kernel duration (µs)_count"])
    for (op, name), (us, count) in theirs.items():
        own = ours.get((op, name))
        yield Figure(trace, "kernels", f"{op}: {name}: µs", us, own[0] if own else None)
        yield Figure(trace, "kernels", f"{op}: {name}: count", count, own[1] if own else None)


def operators(trace: str, report: TraceReport, rows: Iterable[Row]) -> Iterable[Figure]:
    """Time on the GPU of what each operator launched directly."""
    ours = {each.name: each.device_us for each in report.ranks[0].ops}
    reason = NO_MEMSETS if report.ranks[0].total.memset_us else ""
    for row in rows:
        us = float(row["total_direct_kernel_time_sum"])
        if us:
            yield Figure(trace, "operators", f"{row['name']}: µs", us, ours.get(row["name"]), reason)


BIAS = "TraceLens adds the bias to the FLOPs of addmm; torch's own counter and gpurun don't"


def products(trace: str, report: TraceReport, rows: Iterable[Row]) -> Iterable[Figure]:
    """GFLOPs of a matrix product."""
    ours: dict[tuple[str, str], float] = {}
    for each in report.shapes or ():
        if each.flops is not None:
            ours.setdefault((each.name, each.shapes), each.flops / 1e9)
    for row in rows:
        shapes = _shapes(row["Input Dims_first"])
        reason = BIAS if row["param: bias"] == "True" else ""
        name, mflop = f"{row['name']} {shapes}: GFLOP", float(row["GFLOPS_first"] or "nan")
        yield Figure(trace, "products", name, mflop, ours.get((row["name"], shapes)), reason)


def _shapes(text: str) -> str:
    """`((768,), (788, 768), ())` as gpurun writes it."""
    parts = text.replace("[", "(").replace("]", ")").strip("()").split("),")
    sides = [[side.strip(" ()") for side in part.split(",")] for part in parts]
    return ", ".join("×".join(filter(None, each)) for each in sides if any(each))


def text(found: Sequence[Figure]) -> str:
    """The section."""
    groups: dict[tuple[str, str], list[Figure]] = defaultdict(list)
    for each in found:
        groups[each.trace, each.kind].append(each)
    rows = [_row(trace, kind, same) for (trace, kind), same in groups.items()]
    different = [each for each in found if not each.is_equal]
    return "\n\n".join(
        [
            f"{len(found)} figures of TraceLens' reports and of the tests of Kineto's TensorBoard plugin and "
            "of HTA (those of its traces that its repository holds), and gpurun's on the same traces: "
            f"{len(found) - len(different)} are equal (to {100 * EQUAL:g} %, or {EQUAL_US} µs).",
            "HTA's figures of `vision_transformer`, `inference_single_rank` and `h100` aren't compared: "
            "the copy of its repository that was at hand lacks these large traces.",
            table(["trace", "figures of", "compared", "equal", "largest difference", "why"], rows),
        ]
    )


def _row(trace: str, kind: str, same: Sequence[Figure]) -> list[str]:
    different = [each for each in same if not each.is_equal]
    known = [abs(each.ours / each.theirs - 1) for each in different if each.ours is not None and each.theirs]
    reasons = sorted({reason for each in different for reason in (each.reason or "unexplained").split("; ")})
    return [
        trace,
        kind,
        str(len(same)),
        str(len(same) - len(different)),
        f"{max(known):.2%}" if known else "",
        "; ".join(reasons),
    ]


def _trace_of(reports: Path) -> str:
    """The name of the trace that a report is about, or a pattern for it."""
    return "*.json.gz" if reports.name == MIXED else f"{reports.name.removesuffix(SUFFIX)}.json.gz"


def main(arguments: Sequence[str] = ()) -> None:
    """Writes the section "Figures of peers' tests"."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--differences", action="store_true", help="list them instead")
    options = parser.parse_args(arguments)
    facts, found = machine_facts(), list[Figure]()
    for reports in sorted(options.directory.rglob("*csvs")):
        for trace in reports.parent.glob(_trace_of(reports)):
            if trace.stat().st_size > POINTER_BYTES:
                found += figures(trace, reports)
    for name, read in (("result_check_file.txt", of_plugin), ("test_trace_parse.py", of_hta)):
        for file in options.directory.rglob(name):
            found += [Figure(*each) for each in read(file.parent)]
    if not found:
        raise SystemExit(f"{options.directory}: none of these tests")
    if options.differences:
        for each in found:
            if not each.is_equal:
                print(each.trace, each.kind, each.name, each.theirs, each.ours, each.reason, sep="\t")
        return
    record("Figures of peers' tests", text(found), facts)


if __name__ == "__main__":
    main(sys.argv[1:])
