"""Real files with bytes flipped and cut: a message or a report, never a traceback."""

import gzip
import random
from pathlib import Path

import msgspec
import pytest

from gpurun.launcher.errors import GpurunError
from gpurun.launcher.report.terminal.trace import render_tables, render_trace
from gpurun.launcher.trace.analysis.analyse import analyse_paths
from gpurun.launcher.trace.kineto import trace_file
from gpurun.launcher.trace.model import TABLES
from tests.damage.content import damaged
from tests.unit.trace.trace_files import REAL
from tests.whole import first

pytestmark = pytest.mark.skipif(
    not REAL.is_dir(), reason="needs the directory of real traces next to the repository"
)
FILES = ("dlrm_8xV100/worker7_step_12.1694128201553.pt.trace.json.gz", "ddp_2of128/sampled_rank-0.json.gz")
ROUNDS = 10


@pytest.mark.parametrize("seed", first(4, range(ROUNDS)))
@pytest.mark.parametrize("name", FILES)
def test_damaged_files_never_end_in_a_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, seed: int
) -> None:
    monkeypatch.setattr(trace_file, "BLOCK_BYTES", 1 << 16)
    chance = random.Random(f"{name} {seed}")
    packed = (REAL / name).read_bytes()
    if seed % 5 == 0:
        path = tmp_path / "rank0.json.gz"
        path.write_bytes(damaged(packed, chance))
    else:
        path = tmp_path / "rank0.json"
        path.write_bytes(damaged(gzip.decompress(packed), chance))
    try:
        report = analyse_paths([tmp_path], None, frozenset(TABLES))
    except GpurunError as error:
        problem: str | None = str(error)
    else:
        problem = None
        assert render_trace(report, 100)
        assert render_tables(report, TABLES, 100)
        assert msgspec.json.decode(msgspec.json.encode(report))["schema"] == 3
    assert problem is None or ("rank0.json" in problem and "byte" in problem)
