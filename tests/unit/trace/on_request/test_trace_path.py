"""The critical path of jobs whose every dependency is known."""

from pathlib import Path

import pytest

from gpurun.launcher.trace.analysis.analyse import analyse_paths
from gpurun.launcher.trace.requested_tables import CriticalPath
from tests.unit.trace.on_request.simulated_job import draw

PARTS = ("compute", "transfer", "copies", "input", "host")


def path_of(directory: Path) -> CriticalPath:
    found = analyse_paths([directory], None, frozenset({"critical-path"})).critical_path
    assert found is not None
    return found


@pytest.mark.parametrize("seed", range(50))
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
