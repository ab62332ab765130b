"""Doubling and halving find the largest batch; what it comes to; and where throughput bends."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.balance.largest import MAX_SAMPLES, RESOLUTION, next_attempt, with_margin
from launcher.compare.batch_curve import knee
from launcher.compare.model import BatchCurve, BatchPoint
from launcher.errors import SpecError
from launcher.plan.largest import largest_batch
from launcher.records import Attempt
from launcher.report.batch_curve import batch_curve_lines
from launcher.run.fit import bounds
from launcher.spec.load import check_source
from launcher.spec.model import JobSpec
from launcher.spec.source import parse_source


@given(room=st.integers(0, 2 * MAX_SAMPLES))
def test_the_search_ends_within_3_percent_below_what_fits(room: int) -> None:
    fits, fails, attempts = 0, None, 0
    while (batch := next_attempt(fits, fails)) is not None:
        attempts += 1
        if batch <= room:
            fits = batch
        else:
            fails = batch
    assert attempts <= 30
    assert fits <= room
    assert fits == MAX_SAMPLES or room - fits <= max(0, fits // RESOLUTION)
    assert 0 <= with_margin(fits) <= fits


def test_an_attempt_that_never_ended_failed() -> None:
    told = [
        ("begins", 1),
        ("fits", 1),
        ("begins", 2),
        ("fits", 2),
        ("begins", 4),
        ("fails", 4),
        ("begins", 3),
    ]
    assert bounds([Attempt(*one) for one in told]) == (2, 3)
    assert bounds([]) == (0, None)


def job(text: str) -> JobSpec:
    return check_source(parse_source(f"workload: gpt\nglobal_batch: 1\n{text}".encode(), "job.yaml"), Path())


@pytest.mark.parametrize(
    ("text", "batch"),
    [
        ("split: even\ndevices: cpu:2\n", 40),
        ("split: balanced\ndevices: cpu:2\n", 120),
        ('split: "3:1"\ndevices: cpu:2\n', 80),
        ("strategy: single\ndevices: cpu:2\n", 100),
        ("compare: {split: [even, balanced]}\ndevices: cpu:2\n", 40),
    ],
)
def test_every_split_of_the_job_must_hold_the_batch(text: str, batch: int) -> None:
    caps = (100, 20)
    assert largest_batch(job(text), caps if '"3:1"' not in text else (60, 20)) == batch


def test_max_is_one_batch_not_one_of_several() -> None:
    with pytest.raises(SpecError, match="can't be one of several batches"):
        job("compare: {global_batch: [8, max]}\n")


def points(*figures: tuple[int, float]) -> tuple[BatchPoint, ...]:
    return tuple(BatchPoint(f"v{batch}", batch, per_s) for batch, per_s in figures)


def test_the_knee_is_the_first_batch_within_a_tenth_of_the_best() -> None:
    assert knee(points((8, 50.0), (16, 91.0), (32, 99.0), (64, 100.0))) == 16
    assert knee(points((8, 50.0), (16, 70.0), (32, 100.0))) is None
    assert knee(points((8, 100.0), (16, 100.0), (32, 60.0))) == 8


def test_the_picture_marks_the_knee() -> None:
    found = points((8, 50.0), (16, 91.0), (32, 100.0))
    lines = batch_curve_lines([BatchCurve("ddp even on 2", found, 16)])
    assert lines[0] == "Throughput of ddp even on 2 over its global batch:"
    assert lines[2].split()[:2] == ["8", "50"]
    assert [line.count("#") for line in lines[2:]] == [20, 36, 40]
    assert [("knee" in line) for line in lines[2:]] == [False, True, False]
    assert "No knee" in batch_curve_lines([BatchCurve("dp even", found, None)])[-1]
