"""The critical path of jobs whose every dependency is known."""

from pathlib import Path

import pytest

from gpurun.launcher.trace.analysis.analyse import analyse_paths
from gpurun.launcher.trace.model import CriticalPath
from tests.unit.trace.on_request.simulated_job import draw
from tests.unit.trace.trace_files import kernel, launch, rank_info, write
from tests.whole import first

PARTS = ("compute", "transfer", "copies", "input", "host")


def path_of(directory: Path) -> CriticalPath:
    found = analyse_paths([directory], None, frozenset({"critical-path"})).critical_path
    assert found is not None
    return found


@pytest.mark.parametrize("seed", first(15, range(50)))
def test_what_a_job_would_gain_is_what_the_job_without_the_part_takes(tmp_path: Path, seed: int) -> None:
    job, skews_us = draw(seed)
    job.write(tmp_path, skews_us)
    found = path_of(tmp_path)
    length_us = job.length_ns() / 1000
    assert found.length_us == pytest.approx(length_us, rel=1e-6)
    assert found.contradictions == 0
    assert sum(each.path_us for each in found.parts) == pytest.approx(found.length_us)
    gains = {each.part: each.gain_us for each in found.parts}
    for part in PARTS:
        left_us = length_us - (gains.get(part) or 0.0)
        assert left_us == pytest.approx(job.length_ns(part) / 1000, rel=0.01), part


def test_kernels_that_overlap_on_one_stream_make_the_path_no_longer(tmp_path: Path) -> None:
    """As where the next one is launched before the last has ended."""
    events = [launch(0, 1, 1), kernel("long", 10, 100, 1), launch(2, 1, 2), kernel("within", 20, 30, 2)]
    events += [launch(4, 1, 3), kernel("next", 60, 80, 3)]
    write(tmp_path / "rank0.json", events, **rank_info(0, 1))
    found = path_of(tmp_path)
    assert (found.length_us, found.recorded_us, found.contradictions) == (140, 140, 1)
