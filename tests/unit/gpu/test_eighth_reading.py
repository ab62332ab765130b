"""What an eighth reading found, of C++ that none had opened: torch's profiler and Kineto."""

from pathlib import Path

import pytest

from gpurun.launcher.trace.analysis.analyse import analyse_paths
from gpurun.launcher.trace.kineto.classify import dtype_bytes
from tests.unit.trace.trace_files import launch, rank_info, span, write

# 58: bytes of elements


@pytest.mark.parametrize(
    ("names", "num_bytes"),
    [
        (("Float8_e4m3fn", "c10::Float8_e4m3fn", "c10::Float8_e5m2", "Float8_e4m3fnuz", "Byte", "Char"), 1),
        (("c10::Float8_e5m2fnuz", "c10::Float8_e8m0fnu", "c10::Float4_e2m1fn_x2", "Bool", "bool"), 1),
        (("Half", "c10::Half", "c10::BFloat16", "UInt16", "short unsigned int"), 2),
        (("Float", "float", "UInt32", "unsigned int", "ComplexHalf", "c10::complex<c10::Half>"), 4),
        (("Long", "long int", "UInt64", "long unsigned int", "c10::complex<float>"), 8),
        (("ComplexDouble", "c10::complex<double>"), 16),
        (("Undefined", "c10::dummy_int1_7_t<4>", ""), None),
    ],
)
def test_every_type_that_is_sent_has_a_size(names: tuple[str, ...], num_bytes: int | None) -> None:
    """torch/headeronly/core/ScalarType.h:103, torch 2.13, is the list of types, and line 320 their names in
    `dtype`; `Input type` has what GCC calls them, as torch 2.13 wrote them here for a tensor of each."""
    assert {dtype_bytes(name) for name in names} == {num_bytes}


# 59: streams with one number on several GPUs of a process


@pytest.mark.parametrize(("device", "computed_us"), [(0, 110), (1, 30)])
def test_a_wait_is_for_a_stream_of_its_own_gpu(tmp_path: Path, device: int, computed_us: float) -> None:
    """Kineto's libkineto/src/CuptiActivity.h, `CudaSyncActivity::visitTypedMetadata` (main of August 2026): a
    wait has its device and its stream, which every GPU counts for itself."""

    def kernel(on: int, start_us: float, length_us: float, correlation: int) -> dict[str, object]:
        places = {"device": on, "stream": 7, "correlation": correlation}
        return span("kernel", f"k{correlation}", start_us, length_us, 7, **places) | {"pid": on}

    facts = {"device": device, "stream": 7, "correlation": 3}
    events = [
        *(launch(0, 1, 1), kernel(0, 10, 90, 1), launch(2, 1, 2), kernel(1, 12, 10, 2)),
        span("cuda_runtime", "cudaStreamSynchronize", 3, 97, correlation=3),
        span("cuda_sync", "Stream Sync", 3, 97, 7, **facts) | {"pid": device},
        *(launch(101, 1, 4), kernel(1, 110, 20, 4)),
    ]
    write(tmp_path / "rank0.json", events, **rank_info(0, 1))
    found = analyse_paths([tmp_path], None, frozenset({"critical-path"})).critical_path
    assert found is not None
    assert [each.path_us for each in found.parts if each.part == "compute"] == [computed_us]
