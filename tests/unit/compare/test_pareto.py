"""Which variants trade time for memory: known answers, and every answer against all pairs."""

from dataclasses import replace
from pathlib import Path

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from gpurun.launcher.compare.model import Comparison, VariantResult
from gpurun.launcher.compare.notes import memory_notes
from gpurun.launcher.compare.ranking import pareto_front

ONE = msgspec.json.decode(
    (Path(__file__).resolve().parents[2] / "data" / "comparison.json").read_bytes(), type=Comparison
).variants[0]


def variants(*times_and_peaks: tuple[float, float | None]) -> list[VariantResult]:
    """Variants of the same batch with these ms and GiB; the second rank holds half as much."""
    assert ONE.step_ms is not None
    return [
        replace(
            ONE,
            id=f"v{number}",
            step_ms=replace(ONE.step_ms, estimate=step_ms, ci=None),
            vs_baseline=None,
            ranks=(
                replace(ONE.ranks[0], peak_gib=gib),
                replace(ONE.ranks[1], peak_gib=gib and gib / 2),
            ),
        )
        for number, (step_ms, gib) in enumerate(times_and_peaks)
    ]


def front(*times_and_peaks: tuple[float, float | None]) -> list[str]:
    return [result.id for result in pareto_front(variants(*times_and_peaks))]


def test_only_what_saves_memory_is_worth_its_time() -> None:
    assert front((10, 4.0), (12, 2.0), (11, 4.0), (13, 3.0), (20, 1.0)) == ["v0", "v1", "v4"]
    assert front((10, 4.0), (12, 3.99)) == ["v0"]  # a saving of less than 1 %
    assert front((10, 0.0004), (12, 0.0001)) == ["v0"]  # kilobytes
    assert front((10, 4.0), (12, None)) == []


def test_the_sentence_is_there_where_there_is_a_choice() -> None:
    assert memory_notes(variants((10, 4.0), (12, 4.0))) == ()
    assert memory_notes([]) == ()
    (note,) = memory_notes(variants((10, 4.0), (12, 2.0), (13, 2.0)))
    assert "(10.0 ms, 4.00 GiB)" in note
    assert "(12.0 ms, 2.00 GiB)" in note
    assert note.endswith("Every other is slower than one of these and not clearly smaller.")
    (note,) = memory_notes(variants((10, 4.0), (12, 2.0)))
    assert note.endswith("GiB).")


@given(st.lists(st.tuples(st.floats(1, 100), st.floats(0.1, 80)), min_size=1, max_size=8))
def test_no_other_is_both_faster_and_clearly_smaller(points: list[tuple[float, float]]) -> None:
    found = front(*points)
    for number, (step_ms, gib) in enumerate(points):
        better = [each for each in points if each[0] < step_ms and each[1] <= gib]
        if f"v{number}" in found:
            assert not better
        else:
            assert any(each[0] <= step_ms and gib >= 0.98 * each[1] - 0.001 for each in points)
