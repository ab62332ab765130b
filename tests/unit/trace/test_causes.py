"""The engine that finds causes, by itself."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpurun.launcher.findings.finding_kinds import ADVICE, KINDS, SPENT
from gpurun.launcher.findings.trace_cases import WITHOUT
from gpurun.launcher.trace.causes import (
    PARTS,
    Cause,
    MeasuredRanks,
    Part,
    RankTime,
    advice_finding,
    advice_for,
    cause_finding,
    causes,
    grown,
    most_lost,
    of_all_ranks,
    with_cpu,
    with_savings,
)
from gpurun.launcher.trace.model import CpuFacts, Saving, StragglerReport

TIMES = st.integers(0, 10**9)
OWN: tuple[Part, ...] = ("input", "copies", "host", "transfer", "gaps", "blocked")


@st.composite
def ranks(draw: st.DrawFn) -> tuple[RankTime, ...]:
    """Ranks whose parts don't take longer than their step."""
    found = []
    for number in range(draw(st.integers(1, 4))):
        parts = {part: float(draw(TIMES)) for part in OWN}
        wait_ns = float(draw(TIMES))
        comm_ns = wait_ns + parts["transfer"]
        span_ns = wait_ns + sum(parts.values()) + draw(TIMES) + 1
        samples = draw(st.none() | st.integers(0, 64))
        found.append(RankTime(number, span_ns, parts, comm_ns, wait_ns, samples))
    return tuple(found)


@given(ranks(), st.booleans())
def test_no_cause_is_larger_than_its_step(found: tuple[RankTime, ...], has_last: bool) -> None:
    slowest = max(found, key=lambda rank: rank.work_ns).rank
    last = StragglerReport(slowest, 1, 1, 1.0) if has_last else None
    sizes = causes(MeasuredRanks(found, slowest, by_collectives=has_last, last=last))
    assert all(0 <= cause.share <= 1 for cause in sizes)
    assert [cause.saved_ns for cause in sizes] == sorted((cause.saved_ns for cause in sizes), reverse=True)
    assert grown(sizes, sizes, 1.0) is None
    first = most_lost(sizes)
    assert first is not None
    assert cause_finding(first, where="ddp 4/4").text.startswith("in ddp 4/4 ")


@pytest.mark.parametrize(
    ("calls", "shown"), [(("wait", "wait"), "wait"), (("wait", "copy"), None), (("wait", None), None)]
)
def test_the_call_of_a_rank_is_that_of_every_rank_only_where_all_are_in_it(
    calls: tuple[str | None, ...], shown: str | None
) -> None:
    facts = {rank: CpuFacts(blocked_in=call) for rank, call in enumerate(calls)}
    gaps = Cause("gaps", (0, 1), 30.0, 100.0, {"who": "every rank", "case": "gaps"})
    assert with_cpu(gaps, facts[0], facts).figures.get("call") == shown
    alone = replace(gaps, ranks=(0,), figures={"who": "rank 0"})
    assert with_cpu(alone, facts[0], facts).figures["call"] == "wait"


def test_the_call_in_which_one_rank_copies_is_not_that_of_all() -> None:
    ranks = tuple(RankTime(rank, 100.0, {"host": 40.0 - 10 * rank}) for rank in (0, 1))
    figures = {"who": "rank 0", "without": WITHOUT["all"], "call": "cudaMemcpyAsync"}
    cause = Cause("host", (0,), 40.0, 100.0, figures, replayed_ns=90.0)
    found = of_all_ranks(cause, MeasuredRanks(ranks, 0, is_whole=True))
    assert (found.figures["who"], found.figures.get("call")) == ("every rank", None)


@pytest.mark.parametrize("last", [None, StragglerReport(0, 3, 3, 1.0)], ids=["by work", "by collectives"])
def test_a_rank_that_is_late_for_want_of_data_is_not_called_slow(last: StragglerReport | None) -> None:
    late = RankTime(0, 50.0, {"input": 30.0})
    waiting = RankTime(1, 50.0, {"input": 0.0}, comm_ns=30.0, wait_ns=30.0)

    def found(*ranks: RankTime) -> list[tuple[Part, tuple[int, ...], float]]:
        sizes = causes(MeasuredRanks(ranks, 0, by_collectives=last is not None, last=last))
        return [(cause.part, cause.ranks, cause.saved_ns) for cause in sizes if cause.saved_ns]

    assert found(late, waiting) == [("input", (0,), 30.0)]
    assert found(replace(late, lost_ns={"input": 0.0}), waiting) == [("straggler", (0,), 30.0)]


@pytest.mark.parametrize(
    ("second", "said"),
    [
        (RankTime(1, 10e6, {"host": 8.2e6}), "44 % to 82 % of its step (8.00 of 18.0 to 8.20 of 10.0 ms)"),
        (RankTime(1, 10e6, {"host": 8e6}), "44 % to 80 % of its step (8.00 of 18.0 to 8.00 of 10.0 ms)"),
        (RankTime(1, 18e6, {"host": 5e6}), "28 % to 44 % of its step (5.00 to 8.00 of 18.0 ms)"),
        (RankTime(1, 18e6, {"host": 8e6}), "44 % of its step (8.00 of 18.0 ms)"),
        (RankTime(1, 18.01e6, {"host": 8e6}), "44 % of its step (8.00 of 18.0 ms)"),
        (RankTime(1, 18.1e6, {"host": 8e6}), "44 % of its step (8.00 ms)"),
    ],
)
def test_a_share_of_every_rank_is_from_the_least_to_the_most(second: RankTime, said: str) -> None:
    """Of a shorter step, as much is a larger share."""
    first = RankTime(0, 18e6, {"host": 8e6})
    (cause,) = (each for each in causes(MeasuredRanks((first, second), 0)) if each.part == "host")
    assert f"every rank spends {said} waiting" in cause.text


@pytest.mark.parametrize(
    ("least_ns", "said"),
    [
        (4e6, "every rank spends 40 % to 90 % of its step (4.00 to 9.00 of 10.0 ms; without that on all "
         "ranks, a step would be 4.00 ms shorter) waiting for the CPU to launch work; rank 1 came last to 5 "
         "of 8 collectives"),
        (4e5, "rank 0 spends 90 % of its step (9.00 of 10.0 ms; without that on all ranks, a step would be "
         "4.00 ms shorter) waiting for the CPU to launch work"),
    ],
)  # fmt: skip
def test_what_is_saved_on_all_ranks_is_said_of_all(least_ns: float, said: str) -> None:
    """The rank that works longest isn't the one that the others wait for."""
    ranks = (RankTime(0, 10e6, {"host": 9e6}), RankTime(1, 10e6, {"host": least_ns}))
    measured = MeasuredRanks(ranks, 0, by_collectives=True, last=StragglerReport(1, 8, 5, 1.0))
    (cause, *_) = with_savings(causes(measured), [Saving("host", None, None, 4_000.0)], 2)
    assert of_all_ranks(cause, measured).text == said


def test_a_loss_that_saves_nothing_counts_for_nothing_though_no_replay_is_of_its_rank() -> None:
    """As of the only rank of a pipeline's stage, which would else wait for another stage."""
    host = Cause("host", (0,), 30e6, 100e6, {"who": "rank 0"})
    bubble = Cause("bubble", (1,), 20e6, 100e6, {"who": "stage 1", "other": "stage 0"})
    found = with_savings([host, bubble], [Saving("host", None, None, 0.0)], 2)
    assert [(each.part, each.saved_ns) for each in found] == [("bubble", 20e6), ("host", 0.0)]


@pytest.mark.parametrize(
    ("lost_ms", "who"),
    [
        ((9, 5, 8), "every rank spends 50 % to 90 %"),
        ((9, 4, 8), "each of ranks 0, 2 spends 80 % to 90 %"),
        ((9, 4, 1), "rank 0 spends 90 %"),
    ],
)
def test_a_single_rank_is_named_only_where_no_other_loses_about_as_much(
    lost_ms: tuple[float, ...], who: str
) -> None:
    ranks = tuple(RankTime(rank, 10e6, {"host": ms * 1e6}) for rank, ms in enumerate(lost_ms))
    (cause,) = (each for each in causes(MeasuredRanks(ranks, 0)) if each.part == "host")
    assert cause.text.startswith(f"{who} of its step")


def test_the_cause_of_a_late_rank_says_what_the_others_wait() -> None:
    late = RankTime(0, 50e6, {"host": 30e6})
    others = [RankTime(rank, 50e6, {"host": 1e6}, 20e6 + rank * 1e6, 20e6 + rank * 1e6) for rank in (1, 2)]
    found = causes(MeasuredRanks((late, *others), 0, by_collectives=True))
    (cause,) = (each for each in found if each.part == "host")
    assert cause.text.endswith("waiting for the CPU to launch work; the other ranks wait 21.0 to 22.0 ms")
    assert advice_for(cause) == "host-late"
    inside = replace(cause, figures={**cause.figures, "inside": "req"})
    assert advice_for(inside) == "host-inside"
    assert "(`profile: {stacks: true}` records" in advice_finding(inside, "host-inside", "ddp").text


def test_of_two_ranks_the_other_one_is_not_called_other_ranks() -> None:
    ranks = (RankTime(0, 50.0, {}), RankTime(1, 50.0, {}, comm_ns=30.0, wait_ns=30.0))
    measured = MeasuredRanks(ranks, 0, by_collectives=True, last=StragglerReport(0, 10, 5, 1.0))
    assert " for rank 0, which takes" in causes(measured)[0].text


def test_every_part_of_a_step_is_a_kind_with_advice() -> None:
    assert set(PARTS.values()) <= KINDS.keys()
    assert {code for code, kind in KINDS.items() if kind.level == "cause"} > set(PARTS.values())
    assert PARTS.keys() == SPENT.keys()
    for part in PARTS:
        cause = Cause(part, (0,), 1.0, 2.0, {})
        assert {advice_for(cause, *of) for of in ((), (True,), (True, True))} <= ADVICE.keys()
