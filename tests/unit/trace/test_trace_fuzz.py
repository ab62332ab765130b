"""Real files with bytes flipped and cut: a message or a report, never a traceback."""

import gzip
import random
from pathlib import Path

import msgspec
import pytest

from gpurun.launcher.errors import GpurunError
from gpurun.launcher.report.terminal.trace import render_trace
from gpurun.launcher.trace.analysis.analyse import analyse_paths
from gpurun.launcher.trace.kineto import file_blocks
from tests.unit.trace.trace_files import REAL

pytestmark = pytest.mark.skipif(
    not REAL.is_dir(), reason="needs the folder of real traces next to the repository"
)
FILES = ("dlrm_8xV100/worker7_step_12.1694128201553.pt.trace.json.gz", "ddp_2of128/sampled_rank-0.json.gz")
ROUNDS = 25


def damaged(content: bytes, chance: random.Random) -> bytes:
    text = bytearray(content)
    for _ in range(chance.choice((0, 1, 3, 30))):
        text[chance.randrange(len(text))] = chance.choice((chance.randrange(256), *b'"{}[],:\\0-e.'))
    start = chance.randrange(len(text))
    kind = chance.choice(("none", "none", "cut", "hole", "twice"))
    if kind == "cut":
        return bytes(text[:start])
    if kind == "hole":
        return bytes(text[:start] + text[start + chance.randrange(5000) :])
    if kind == "twice":
        return bytes(text[:start] + text[max(start - chance.randrange(5000), 0) :])
    return bytes(text)


@pytest.mark.parametrize("seed", range(ROUNDS))
@pytest.mark.parametrize("name", FILES)
def test_damaged_files_never_end_in_a_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, seed: int
) -> None:
    monkeypatch.setattr(file_blocks, "BLOCK_BYTES", 1 << 16)
    chance = random.Random(f"{name} {seed}")
    packed = (REAL / name).read_bytes()
    if seed % 5 == 0:
        path = tmp_path / "rank0.json.gz"
        path.write_bytes(damaged(packed, chance))
    else:
        path = tmp_path / "rank0.json"
        path.write_bytes(damaged(gzip.decompress(packed), chance))
    try:
        report = analyse_paths([tmp_path])
    except GpurunError as error:
        problem: str | None = str(error)
    else:
        problem = None
        assert render_trace(report, 100)
        assert msgspec.json.decode(msgspec.json.encode(report))["schema"] == 1
    assert problem is None or ("rank0.json" in problem and "byte" in problem)
