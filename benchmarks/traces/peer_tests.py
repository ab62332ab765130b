"""Figures that the tests of Kineto's TensorBoard plugin and of HTA state, and gpurun's on the same traces.

Tests of the plugin hold traces and figures as Python code: both are read from the code, which doesn't run.
"""

from __future__ import annotations

import ast
import json
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpurun.launcher.errors import TraceError
from gpurun.launcher.trace.analysis.analyse import analyse_paths
from gpurun.launcher.trace.model import Breakdown, TraceReport

Found = tuple[str, str, str, float, float | None, str]
"""Trace, table, name of the figure, theirs, ours; why they differ, if they do."""
API = (
    "the plugin takes calls of the GPU's API out of an operator's own time on the CPU, "
    "and merges an operator with one of its name inside it"
)
TIE = "the plugin joins by external id, gpurun by the time of the launch: here where an operator ends"
ALL_EVENTS = "without steps, gpurun's time is that of the GPU's work, the plugin's that of all events"
ON_CPU = "operators of a trace without GPU work are compute to gpurun, CPU time to the plugin"
CALLS = (
    "the plugin counts the call on the CPU as communication too, and gloo's as the GPU's; "
    "a moment with two collectives once, where gpurun's sum has each"
)
MEMORY = "HTA doesn't distinguish pinned memory from other, or kinds of memsets"
_REASONS: Mapping[tuple[str, str], str] = {
    ("test_external_id", "operators"): TIE,
    ("test_no_profilerstep", "steps"): ALL_EVENTS,
    ("test_pure_cpu", "steps"): ON_CPU,
}
_REASONS_OF_TABLES: Mapping[str, str] = {"operators": API, "communication": CALLS}
_COSTS: Mapping[str, Callable[[Breakdown], float]] = {
    "Kernel": lambda each: each.compute_us,
    "Memcpy": lambda each: each.memcpy_us - each.memset_us,
    "Memset": lambda each: each.memset_us,
    "Runtime": lambda each: each.host_while_idle_us.runtime,
    "DataLoader": lambda each: each.host_while_idle_us.data,
    "CpuOp": lambda each: each.host_while_idle_us.op,
    "Other": lambda each: each.host_while_idle_us.other,
    "Total": lambda each: each.span_us,
}
_OPERATORS = {"calls": "count", "self_host_duration": "host_us", "self_device_duration": "device_us"}
POINTER_BYTES = 1000
"""Smaller files are pointers to traces that aren't there."""
_OVERLAP = ("compute alone", "overlap", "communication alone", "other")
_WAIT = ("transfer", "waiting")


def of_plugin(tests: Path) -> Iterator[Found]:
    """The figures in the directory of the plugin's tests, `tb_plugin/test`."""
    yield from _samples(tests.parent / "samples", (tests / "result_check_file.txt").read_text())
    code = ast.parse((tests / "test_profiler.py").read_text())
    for test in ast.walk(code):
        if isinstance(test, ast.FunctionDef) and test.name.startswith("test_"):
            with tempfile.TemporaryDirectory() as directory:
                yield from _Test(test.name, Path(directory)).figures(test.body)


def _samples(samples: Path, text: str) -> Iterator[Found]:
    """Steps, operators and kernels of the first trace of each sample, as the plugin's server answered."""
    answers = [json.loads(line) for line in text.splitlines()]
    for number, run in enumerate(sorted(path for path in samples.iterdir() if path.is_dir())):
        steps, _, operators, kernels, _ = answers[5 * number : 5 * number + 5]
        (rank,) = analyse_paths([min(run.glob("*.json.gz"))]).ranks
        measured = {str(each.step): each for each in rank.steps}
        for label, *cells in steps["steps"]["rows"]:
            for (name, of), us in zip(_COSTS.items(), cells[::2], strict=False):
                step = measured.get(label)
                yield run.name, "steps", f"{label}: {name}", us, of(step) if step else None, ""
        ops = {each.name: each for each in rank.ops}
        for row in operators["data"]:
            op = ops.get(row["name"])
            pairs = {"calls": "count", "device_self_duration": "device_us", "host_self_duration": "host_us"}
            for theirs, ours in pairs.items():
                figure = getattr(op, ours) if op else None
                yield run.name, "operators", f"{row['name']}: {ours}", row[theirs], figure, API
        ours_of = {each.name: each for each in rank.kernels}
        for name, _, calls, us, *_ in kernels["data"]["rows"]:
            kernel = ours_of.get(name)
            yield run.name, "kernels", f"{name}: count", calls, kernel.count if kernel else None, ""
            yield run.name, "kernels", f"{name}: µs", us, kernel.device_us if kernel else None, ""


@dataclass
class _Test:
    """One test of the plugin, read from top to bottom."""

    name: str
    directory: Path
    traces: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    step: int = 0
    op: str = ""
    report: TraceReport | None = None

    def figures(self, statements: Sequence[ast.stmt]) -> Iterator[Found]:
        """The figures that these statements assert of the traces before them."""
        for each in statements:
            if isinstance(each, ast.Assign):
                self._assign(ast.unparse(each.targets[0]), each.value)
            elif isinstance(each, ast.Expr) and isinstance(each.value, ast.Call):
                yield from self._asserted(each.value)
            elif isinstance(each, ast.If) and "op_agg.name ==" in ast.unparse(each.test):
                self.op = (
                    ast.literal_eval(each.test.comparators[0]) if isinstance(each.test, ast.Compare) else ""
                )
            yield from self.figures(getattr(each, "body", []))

    def _assign(self, name: str, value: ast.expr) -> None:
        if name.startswith("json_content") and isinstance(value, ast.Constant):
            self.traces[name] = json.loads(str(value.value))
            self.report = None
        elif name == "step" and "steps_costs[" in ast.unparse(value):
            self.step = int(ast.unparse(value).rpartition("[")[2].rstrip("]"))

    def _asserted(self, call: ast.Call) -> Iterator[Found]:
        if not ast.unparse(call.func).startswith("self.assert") or len(call.args) < 2 or not self.traces:
            return
        left, right = ast.unparse(call.args[0]), call.args[1]
        if left.startswith("step.costs[ProfileRole."):
            name = left.rpartition(".")[2].rstrip("]")
            yield self._figure("steps", f"step {self.step}: {name}", right, self._cost(name))
        elif left.startswith("op_agg.") and (attribute := left.removeprefix("op_agg.")) in _OPERATORS:
            yield self._figure("operators", f"{self.op}: {attribute}", right, self._of_op(attribute))
        elif left.startswith(("dist_profile.steps_to_overlap", "dist_profile.steps_to_wait")):
            rank = int(left.rpartition("worker")[2].rstrip("']"))
            names = _OVERLAP if "overlap" in left else _WAIT
            for name, us in zip(names, ast.literal_eval(right), strict=True):
                yield self._figure("communication", f"rank {rank}: {name}", us, self._comm(rank, name))

    def _figure(self, kind: str, name: str, theirs: ast.expr | float, ours: float | None) -> Found:
        us = _value(theirs) if isinstance(theirs, ast.expr) else theirs
        reason = _REASONS.get((self.name, kind), _REASONS_OF_TABLES.get(kind, ""))
        return f"plugin's {self.name}", kind, name, us, ours, reason

    def _analysed(self) -> TraceReport | None:
        """The traces that the test has made up to here; of one that it makes again the latest."""
        if self.report is None:
            for rank, events in enumerate(self.traces.values()):
                info = {"rank": rank, "world_size": len(self.traces)}
                content = {"distributedInfo": info, "traceEvents": events}
                (self.directory / f"rank{rank}.json").write_text(json.dumps(content))
            try:
                self.report = analyse_paths([self.directory])
            except TraceError:
                return None
        return self.report

    def _cost(self, name: str) -> float | None:
        report = self._analysed()
        if report is None:
            return None
        rank = report.ranks[0]
        stretches: Sequence[Breakdown] = rank.steps or (rank.total,)
        return _COSTS[name](stretches[self.step]) if self.step < len(stretches) else None

    def _of_op(self, attribute: str) -> float | None:
        report = self._analysed()
        rows = [row for row in report.ranks[0].ops if row.name == self.op] if report else []
        return float(getattr(rows[0], _OPERATORS[attribute])) if rows else None

    def _comm(self, rank: int, name: str) -> float | None:
        report = self._analysed()
        if report is None:
            return None
        total = report.ranks[rank].total
        overlap_us = total.comm_compute_overlap_us
        return {
            "compute alone": total.compute_us - overlap_us,
            "overlap": overlap_us,
            "communication alone": total.exposed_comm_us,
            "other": total.span_us - total.compute_us - total.exposed_comm_us,
            "transfer": total.transfer_us,
            "waiting": total.wait_us,
        }[name]


def _value(expression: ast.expr) -> float:
    """The result of additions and subtractions of numbers."""
    if isinstance(expression, ast.BinOp) and isinstance(expression.op, ast.Add | ast.Sub):
        sign = 1 if isinstance(expression.op, ast.Add) else -1
        return _value(expression.left) + sign * _value(expression.right)
    return float(ast.literal_eval(expression))


def _but_last_step(directory: Path) -> TraceReport:
    """Without the last step, as HTA reads traces."""
    last = analyse_paths([directory]).ranks[0].steps[-1].step
    return analyse_paths([directory], slice(None, last))


def _work(report: TraceReport) -> int:
    """Pieces of GPU work."""
    return sum(row.count for rank in report.ranks for row in rank.kernels)


_HTA: Sequence[tuple[str, str, str, str, Callable[[Path], float]]] = (
    (
        *("trace_parse", r"len\(nccl_kernels\), (\d+)", "nccl_parser_config", "NCCL kernels"),
        lambda directory: len(analyse_paths([directory]).collectives),
    ),
    (
        *("trace_analysis", r"len\(gpu_kernels_df\), (\d+)", "ns_resolution_trace", "pieces of GPU work"),
        lambda directory: _work(_but_last_step(directory)),
    ),
    (
        *("trace_analysis", r"len\(mem_bw_summary_df\), (\d+)", "negative_queue_length_values_check"),
        *("directions of copies, and memsets", lambda directory: len(_copies(directory))),
    ),
    (
        *("trace_diff", r'"test_num_gpu_events": (\d+)', "trace_compare/base", "GPU work of step 1010"),
        lambda directory: _work(analyse_paths([directory], slice(1010, 1011))),
    ),
)
"""Test, the figure in its code, directory of its trace, what it is, ours."""


def _copies(directory: Path) -> Sequence[object]:
    return analyse_paths([directory], None, frozenset({"copies"})).copies or ()


def of_hta(tests: Path) -> Iterator[Found]:
    """The figures in the directory of HTA's tests, as far as its traces are there: some are only pointers."""
    for test, figure, name, what, ours in _HTA:
        code = (tests / f"test_{test}.py").read_text()
        found = re.search(figure, code)
        directory = tests / "data" / name
        if found and any(file.stat().st_size > POINTER_BYTES for file in directory.glob("*.json.gz")):
            yield f"HTA's {name}", "counts", what, float(found[1]), ours(directory), MEMORY
