"""The threads of BLAS that ranks get: libraries are told by their names."""

import mmap
from pathlib import Path

import pytest

from gpurun.launcher.worker.base import blas


@pytest.mark.parametrize("name", ["openblas_bench/rank0", "openblas.txt"])
def test_a_mapped_file_that_is_no_library_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The control block of a rank is mapped, and its run directory may have any name."""
    monkeypatch.setattr(blas, "_SETTERS", [])
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"\0" * mmap.PAGESIZE)
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0):
        assert str(path) in Path("/proc/self/maps").read_text()
        blas.set_blas_threads(2)
