"""Traces that other programs and older profilers write: what is read of them, and what is said."""

import ctypes
import importlib.util
import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpurun.launcher.report.terminal.changes import render_trace_diff
from gpurun.launcher.trace.analysis.analyse import analyse_paths
from gpurun.launcher.trace.diff import diff_traces
from gpurun.launcher.trace.kineto import trace_file
from gpurun.launcher.trace.kineto.demangle import LONGEST, demangled
from gpurun.launcher.trace.model import TraceReport
from gpurun.launcher.units import whole_parts
from tests.said import trace_notes
from tests.unit.trace.trace_files import Event, kernel, launch, span, step, write
from tests.wording import Wording

BEGIN_US = 1_704_161_511_420_306


def old_event(name: str, start_us: float | str, length_us: float, place: str = "CPU") -> Event:
    """As torch.autograd.profiler wrote them before it used Kineto."""
    return {
        "name": name,
        "ph": "X",
        "ts": start_us,
        "dur": length_us,
        "tid": 1,
        "pid": f"{place} functions",
        "args": {},
    }


def listed_in(path: Path, events: list[Event]) -> Path:
    """The path of a bare list of events."""
    path.write_text(json.dumps(events))
    return path


def listed(path: Path, events: list[Event]) -> TraceReport:
    """The report on a bare list of events."""
    return analyse_paths([listed_in(path, events)])


def test_exports_of_the_old_autograd_profiler(tmp_path: Path, wording: Wording) -> None:
    events = [old_event("aten::zeros", 10.5, 40), old_event("aten::empty", 12, 8.25)]
    (rank,) = listed(tmp_path / "cpu.json", events).ranks
    assert (rank.device, rank.total.compute_us) == ("CPU", 40)
    assert {row.name: row.host_us for row in rank.ops} == {"aten::zeros": 31.75, "aten::empty": 8.25}
    found = listed(
        tmp_path / "t.json", [*events, old_event("aten::zeros", 30, 25, "CUDA"), {"ph": "s", "ts": 1}]
    )
    assert found.ranks[0].total.compute_us == 25
    assert [(row.name, row.count, row.device_us) for row in found.ranks[0].kernels] == [
        ("aten::zeros", 1, 25)
    ]
    wording([each.replace(str(tmp_path), "TMP") for each in trace_notes(found)])
    nested = [*events, old_event("aten::zeros", 30, 93, "CUDA"), old_event("aten::zero_", 80, 39, "CUDA")]
    found = analyse_paths([listed_in(tmp_path / "n.json", nested)], None, {"kernels", "operators"})
    own = [("aten::zeros", 54.0), ("aten::zero_", 39.0)]
    assert [(row.name, row.device_us) for row in found.ranks[0].kernels] == own
    assert [(row.name, row.device_us) for row in found.kernels_by_shape or ()] == own
    assert [(row.kind, row.total_us) for row in found.operators or ()] == [("outside", 93.0)]


def test_times_of_the_old_profiler_may_be_absolute(tmp_path: Path) -> None:
    """So large that doubles don't have their nanoseconds."""
    events = [old_event("aten::mm", f"1704161511420{us}", 40) for us in ("306.001", "366.502")]
    text = json.dumps(events).replace('"1704161511420', "1704161511420").replace('", "dur"', ', "dur"')
    (tmp_path / "t.json").write_text(text)
    (rank,) = analyse_paths([tmp_path / "t.json"]).ranks
    assert (rank.total.span_us, rank.total.compute_us) == (100.501, 80)


def test_times_in_quotes_are_exact(tmp_path: Path, wording: Wording) -> None:
    """As torch_npu writes them, to the nanosecond."""
    first, second = (span("cpu_op", "aten::mm", 0, 13.08) for _ in range(2))
    first |= {"ts": "1704161511420306.491"}
    second |= {"ts": "1704161511420439.502", "dur": "4"}
    process = {"ph": "M", "name": "process_name", "pid": 800, "args": {"name": "Ascend Hardware"}}
    work = {"ph": "X", "name": "MatMul", "pid": 800, "tid": 3, "ts": "1704161511420450.001", "dur": 9.5}
    damaged = [span("cpu_op", "aten::mm", 0, 1) | {"ts": text} for text in ("nan", "-Inf", "soon", "1e999")]
    damaged.append(span("cpu_op", "aten::mm", 0, 1) | {"ts": 10**400})
    found = listed(tmp_path / "trace_view.json", [process, first, second, work, *damaged])
    assert found.base_time_ns == 1704161511420306000
    (rank,) = found.ranks
    assert (rank.device, rank.total.span_us, rank.total.compute_us) == ("CPU (NPU not read)", 137.011, 17.08)
    wording([each.replace(str(tmp_path), "TMP") for each in trace_notes(found)], found.conclusion)


def test_a_device_that_is_named_after_all_operators_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch_npu appends its device's events to those of the framework: to megabytes of them."""
    monkeypatch.setattr(trace_file, "BLOCK_BYTES", 4096)
    events = [span("cpu_op", "aten::mm", 0, 13.5) | {"ts": f"{BEGIN_US + 20 * i}.491"} for i in range(100)]
    process = {"ph": "M", "name": "process_name", "pid": 800, "args": {"name": "Ascend Hardware"}}
    (rank,) = listed(tmp_path / "trace_view.json", [*events, process]).ranks
    assert (rank.device, rank.total.compute_us) == ("CPU (NPU not read)", 1350)


@pytest.mark.parametrize(
    ("category", "name", "device"),
    [
        ("cuda_runtime", "cudaDeviceSynchronize", "CPU"),
        ("cuda_runtime", "cudaMemcpyAsync", "CPU (GPU not recorded)"),
        ("cpu_op", "nccl:all_reduce", "CPU (GPU not recorded)"),
    ],
)
def test_calls_of_the_profiler_make_no_gpu_program(
    tmp_path: Path, category: str, name: str, device: str
) -> None:
    events = [span("cpu_op", "aten::mm", 0, 50), span(category, name, 60, 900, correlation=1)]
    found = analyse_paths([write(tmp_path / "t.json", events)])
    assert found.ranks[0].device == device
    assert len(trace_notes(found)) == 1 + (device != "CPU")


def marked(path: Path, on_gpu: bool) -> TraceReport:
    work = [launch(5, 2, 1), kernel("gemm", 20, 30, 1)] if on_gpu else []
    return analyse_paths([write(path, [step(1, 0, 100), span("cpu_op", "aten::mm", 2, 20), *work])])


def test_a_cpu_and_a_gpu_are_compared_by_their_operators(tmp_path: Path, wording: Wording) -> None:
    diff = diff_traces(marked(tmp_path / "a.json", False), marked(tmp_path / "b.json", True))
    assert [(each.name, each.a_us, each.b_us) for each in diff.ops] == [("aten::mm", 20, 20)]
    assert (diff.kernels, diff.shapes, diff.operators) == ((), (), None)
    wording([each for each in trace_notes(diff) if "GPU" in each])
    assert [each.name for each in diff.classes] == ["span"]
    assert "part-changed" not in {each.code for each in diff.findings}


def test_without_steps_no_empty_table_is_shown_of_a_cpu_and_a_gpu(tmp_path: Path) -> None:
    ops = [span("cpu_op", "aten::mm", 0, 20)]
    on_cpu = analyse_paths([write(tmp_path / "a.json", ops)])
    longer = [span("cpu_op", "aten::mm", 0, 30)]
    work = [launch(5, 5, 1), kernel("gemm", 12, 80, 1)]
    on_gpu = analyse_paths([write(tmp_path / "b.json", [*longer, *work])])
    said = render_trace_diff(diff_traces(on_cpu, on_gpu), 100)
    assert [line.split()[-1] for line in said.splitlines() if line.startswith((" ", "A  "))] == ["operators"]


def test_a_trace_that_lacks_the_gpus_work_is_not_comparable(tmp_path: Path) -> None:
    """The CPU launches as much in both."""
    ops = [step(1, 0, 100), span("cpu_op", "aten::mm", 0, 20), launch(5, 5, 1)]
    lacks, has = (
        analyse_paths([write(tmp_path / f"{name}.json", [*ops, *work])])
        for name, work in (("lacks", []), ("has", [kernel("gemm", 12, 80, 1)]))
    )
    for (a, b), side in (((lacks, has), "A"), ((has, lacks), "B")):
        (answer, *more) = diff_traces(a, b).findings
        assert answer.text == f"a step can't be compared: {side} lacks the device's work"
        assert {each.level for each in more} == {"detail"}


def test_without_steps_names_are_compared_by_call(tmp_path: Path) -> None:
    """Shares of a trace shrink as another part grows."""

    def record(name: str, mm_us: float, pause_us: float) -> TraceReport:
        events = [span("cpu_op", "aten::mm", i * (mm_us + pause_us), mm_us) for i in range(3)]
        return analyse_paths([write(tmp_path / name, events)])

    diff = diff_traces(record("a.json", 100, 10), record("b.json", 750, 9000))
    assert [(each.a_us, each.b_us) for each in diff.ops] == [(100, 750)]
    assert "+650.0" in render_trace_diff(diff, 100)


@pytest.mark.parametrize(
    ("mangled", "name"),
    [
        (
            "_ZN5cudnn3ops4castI6__halffEEvPKT_PT0_",
            "void cudnn::ops::cast<__half, float>(__half const*, float*)",
        ),
        ("_ZN2at6native3addEv", "at::native::add()"),
        ("_Z6kernelPf", "kernel(float*)"),
        ("_Z9my_kernel6float4Pf", "my_kernel(float4, float*)"),
        ("_Z3addIfEv6float4", "void add<float>(float4)"),
        ("_ZN12_GLOBAL__N_11fEi.kd", "(anonymous namespace)::f(int) [clone .kd]"),
        ("_Z1fIJdfEEvDpPKT_", "void f<double, float>(double const*, float const*)"),
        (
            "_Z1fIDF16bLi4EEvPFvT_EM1AA2_KcOS0_",
            "void f<std::bfloat16_t, 4>(void (*)(std::bfloat16_t), char const (A::*) [2], std::bfloat16_t&&)",
        ),
        ("_ZZ1gvENKUlfE_clEf", "g()::{lambda(float)#1}::operator()(float) const"),
        ("_Z99short", "_Z99short"),
        ("_Z1fIiEvX", "_Z1fIiEvX"),
        ("_Z", "_Z"),
        ("void gemm<float>(int)", "void gemm<float>(int)"),
    ],
)
def test_names_of_cpp(mangled: str, name: str) -> None:
    assert demangled(mangled) == name


def test_names_of_torch_are_what_the_library_of_cpp_makes_of_them() -> None:
    library = ctypes.CDLL("libstdc++.so.6")
    demangle = library.__cxa_demangle
    demangle.argtypes, demangle.restype = [ctypes.c_char_p, *[ctypes.c_void_p] * 3], ctypes.c_void_p
    (torch,) = importlib.util.find_spec("torch").submodule_search_locations  # type: ignore[union-attr, misc]
    symbols = (Path(torch) / "lib" / "libc10.so").read_bytes()
    names = {*re.findall(rb"\0(_Z[NZLK0-9][\w.]+)(?=\0)", symbols)}
    known = {name.decode(): demangle(name, None, None, None) for name in names}
    expected = {name: ctypes.string_at(text).decode() for name, text in known.items() if text}
    read = {name: text for name in expected if (text := demangled(name)) != name}
    assert len(read) > max(1_000, 0.98 * len(expected))
    # The library leaves out a space behind an empty pack.
    others = {
        name: text for name, text in read.items() if "".join(text.split()) != "".join(expected[name].split())
    }
    assert not others


@given(st.text("_ZNSTIEPKRDpJLX0123abfiv", max_size=60))
def test_any_name_is_read_or_stays_as_it_is(text: str) -> None:
    assert demangled(f"_Z{text}")


@pytest.mark.parametrize(
    "mangled",
    [
        "_Z1f1xIiiE"
        + "".join(f"S_IS{known}_S{known}_E" for known in (*"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ",)),
        f"_Z1fIJ{'i' * 20}EEv{'Dp' * 20}T_",
        f"_Z1f{'P' * 100}i",
        f"_Z1f{'N1a' * 1_000}",
        f"_Z{'Z1fvE' * 3_000}1g",
        f"_Z1f{'1x' + 'Ii' * 2_000}",
        f"_Z1fI{'i' * 4_000}Ev{'PT_' * 1_000}{'1x' * 1_000}{'PS2_' * 1_000}",
    ],
)
def test_names_do_not_grow_without_limit(mangled: str) -> None:
    assert len(demangled(mangled)) <= LONGEST


@given(st.lists(st.floats(0, 1e6), max_size=8))
def test_parts_add_up_in_the_last_digit(parts: list[float]) -> None:
    shown = whole_parts(parts, sum(parts))
    assert sum(shown) == round(sum(parts))
    assert all(abs(shown_ms - other) < 1 for shown_ms, other in zip(shown, parts, strict=True))
