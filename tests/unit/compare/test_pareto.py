"""Which variants trade time for memory: known answers, and every answer against all pairs."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpurun.launcher.compare.headline import fitting_in
from gpurun.launcher.compare.model import Difference, VariantResult
from gpurun.launcher.compare.notes import memory_notes
from gpurun.launcher.compare.ranking import opposite, pareto_front
from gpurun.launcher.units import GIB
from tests.known import known
from tests.sample import COMPARISON
from tests.wording import Wording

ONE = COMPARISON.variants[0]


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


def test_the_sentence_is_there_where_there_is_a_choice(wording: Wording) -> None:
    assert memory_notes(variants((10, 4.0), (12, 4.0))) == ()
    assert memory_notes([]) == ()
    (note,) = memory_notes(variants((10, 4.0), (12, 2.0), (13, 2.0)))
    assert "(10.0 ms, 4.00 GiB)" in note.text
    assert "(12.0 ms, 2.00 GiB)" in note.text
    wording(note.text)
    (note,) = memory_notes(variants((10, 4.0), (12, 2.0)))
    assert note.text.endswith("GiB)")


@dataclass(frozen=True)
class Everywhere:
    """The same between any two variants, the later one against the earlier."""

    difference: Difference

    def between(self, variant: str, other: str) -> Difference:
        return self.difference if variant > other else opposite(self.difference)

    def all_against(self, other: str, variants: Iterable[str]) -> dict[str, Difference]:
        return {variant: self.between(variant, other) for variant in variants}


SLOWER = Everywhere(Difference(10.0, (9.0, 11.0), "slower"))
UNDECIDED = Everywhere(Difference(0.1, (-1.0, 1.2), "inconclusive"))


@pytest.mark.parametrize(
    ("gib", "pairwise", "fastest"),
    [(4.0, SLOWER, "v0"), (3.5, SLOWER, "v1"), (3.5, UNDECIDED, "v1"), (0.5, SLOWER, None)],
)
def test_the_fastest_that_fits(
    gib: float, pairwise: Everywhere, fastest: str | None, wording: Wording
) -> None:
    results = variants((10, 4.0), (12, 2.0), (20, 1.0))
    found = fitting_in(int(gib * GIB), results, pairwise)
    fits, what = known(found)
    wording(what.text)
    assert fits.fastest == fastest
    assert fits.variants == tuple(f"v{i}" for i in range(3) if (4.0, 2.0, 1.0)[i] <= gib)


def test_what_a_peak_is_and_whose_is_not_known(wording: Wording) -> None:
    results = variants((10, 4.0), (12, None))
    found = fitting_in(8 * GIB, results, SLOWER)
    wording(known(found)[1].text)
    assert fitting_in(8 * GIB, variants((10, None)), SLOWER) is None


@given(st.lists(st.tuples(st.floats(1, 100), st.floats(0.1, 80)), min_size=1, max_size=8))
def test_no_other_is_both_faster_and_clearly_smaller(points: list[tuple[float, float]]) -> None:
    found = front(*points)
    for number, (step_ms, gib) in enumerate(points):
        better = [each for each in points if each[0] < step_ms and each[1] <= gib]
        if f"v{number}" in found:
            assert not better
        else:
            assert any(each[0] <= step_ms and gib >= 0.98 * each[1] - 0.001 for each in points)


@pytest.mark.parametrize("devices", [("cpu:0", "cpu:1"), ("cuda:0", "cuda:1")])
def test_that_replicas_on_cpus_have_one_peak_is_said(devices: tuple[str, str]) -> None:
    results = [replace(variant, devices=devices) for variant in variants((10, 4.0), (12, 2.0))]
    of_replicas = [replace(results[0], strategy="dp"), results[1]]
    said = "on CPU devices, the peak of dp is that of all devices together"
    found = fitting_in(8 * GIB, of_replicas, SLOWER)
    on_cpus = devices[0] == "cpu:0"
    assert (said in known(found)[1].text, said in memory_notes(of_replicas)[0].text) == (on_cpus, on_cpus)
    assert said not in memory_notes(results)[0].text
