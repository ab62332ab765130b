"""The command's exit code: what counts as a result, and what as a failure."""

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from gpurun.launcher.compare.model import Comparison
from gpurun.launcher.run.job import outcome_error
from gpurun.launcher.rundir.records import Status
from tests.wording import Wording

COMPARISON = msgspec.json.decode(
    (Path(__file__).resolve().parents[2] / "data" / "comparison.json").read_bytes(), type=Comparison
)


@pytest.mark.parametrize(
    ("statuses", "words"),
    [
        (("ok", "oom"), None),
        (("unsteady", "oom", "oom"), None),
        (("oom",), "no variant could be measured; out of memory: v0"),
        (("oom", "oom"), "out of memory: v0, v1"),
        (("oom", "failed", "ok"), "1 of 3 variants failed: v1"),
        (("timeout", "hung"), "2 of 2 variants failed: v0, v1"),
        (("ok", "ok"), None),
    ],
)
def test_running_out_of_memory_is_a_result_only_next_to_another_one(
    statuses: tuple[Status, ...], words: str | None
) -> None:
    variants = tuple(
        replace(COMPARISON.variants[0], id=f"v{number}", status=status)
        for number, status in enumerate(statuses)
    )
    error = outcome_error(replace(COMPARISON, variants=variants))
    assert (error is None) == (words is None)
    if error is not None and words is not None:
        assert error.exit_code == 4
        assert words in str(error)


def test_where_nothing_fits_the_batch_to_try_is_named(wording: Wording) -> None:
    small = "rank 0 ran out of memory: the devices can hold 119 + 119 = 238 samples, not 318"
    even, balanced = (
        replace(COMPARISON.variants[0], id=name, status="oom", reason=reason)
        for name, reason in (("even", "rank 0 ran out of memory"), ("balanced", small))
    )
    error = outcome_error(replace(COMPARISON, variants=(even, balanced)))
    wording(str(error))
    assert "set a smaller `global_batch`" in str(outcome_error(replace(COMPARISON, variants=(even,))))
    program = replace(even, strategy="script", workload="")
    wording(str(outcome_error(replace(COMPARISON, variants=(program,)))))
