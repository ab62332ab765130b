"""Who is missing in which collective, by torch's own counts."""

import json
import sysconfig
from typing import Any

import msgspec
import pytest

from gpurun.launcher.inspect.hang_diagnosis import RankUsage, diagnose, find_hang, usage_of
from gpurun.launcher.inspect.snapshot import (
    CalledCollective,
    Gap,
    RankSnapshot,
    find_gap,
    find_mismatch,
    last_ones,
    parse_history,
)
from gpurun.launcher.inspect.stacks import BACKWARD, COLLECTIVE, Activity, Frame, Thread
from tests.known import known
from tests.wording import Wording


def history(*called: tuple[str, int, str]) -> tuple[CalledCollective, ...]:
    return tuple(CalledCollective(group, seq, name) for group, seq, name in called)


REDUCED_TWICE = history(("0", 117, "all_reduce"), ("0", 118, "all_reduce"))
REDUCED_ONCE = history(("0", 117, "all_reduce"))


def entry(seq: int, name: str, **changes: Any) -> dict[str, Any]:
    """As torch 2.13 has it."""
    fields = {
        "collective_seq_id": seq,
        "process_group": ["0", "default_pg"],
        "profiling_name": f"gloo:{name}",
        "is_p2p": False,
        "state": "scheduled",
    }
    return {**fields, **changes}


def test_a_dump_is_read_without_sends_and_receives() -> None:
    entries = [entry(1, "broadcast"), entry(1, "send 0->1", is_p2p=True), entry(2, "all_reduce")]
    found = parse_history(json.dumps({"comm_lib_version": "", "entries": entries}).encode())
    assert found == history(("0", 1, "broadcast"), ("0", 2, "all_reduce"))
    assert parse_history(b'{"comm_lib_version": ""}') == ()
    with pytest.raises(msgspec.MsgspecError):
        parse_history(b"<html>")


def test_the_rank_that_has_not_called_it_is_missing() -> None:
    gap = find_gap({0: REDUCED_TWICE, 1: REDUCED_TWICE, 2: REDUCED_ONCE, 3: REDUCED_TWICE})
    assert gap == Gap(CalledCollective("0", 118, "all_reduce"), (0, 1, 3), (2,))
    assert find_gap({0: REDUCED_TWICE, 1: REDUCED_TWICE}) is None
    assert find_gap({}) is None


def test_the_collective_is_the_first_one_that_is_missing_not_the_newest() -> None:
    ahead = (*REDUCED_TWICE, CalledCollective("0", 119, "broadcast"))
    gap = known(find_gap({0: ahead, 1: REDUCED_ONCE}))
    assert str(gap.collective) == "all_reduce #118"


@pytest.mark.parametrize(
    ("of_1", "words"),
    [
        (entry(4, "broadcast"), "ranks 0, 2 called all_reduce #4, rank 1 called broadcast #4"),
        (
            entry(4, "all_reduce", input_sizes=[[1]]),
            "with 12 elements, rank 1 called all_reduce #4 with 1 element",
        ),
        (entry(4, "all_reduce", input_sizes=[[2, 5], [2]]), None),
    ],
)
def test_ranks_that_called_different_collectives_are_named(
    of_1: dict[str, Any], words: str | None, wording: Wording
) -> None:
    """Also where one of them went on: who waits then only follows from it."""
    usual = [entry(3, "barrier"), entry(4, "all_reduce", input_sizes=[[4, 3]])]
    calls = {
        0: usual,
        1: [entry(4, "all_gather", process_group=["1", ""]), of_1, entry(5, "barrier")],
        2: usual,
    }
    found = diagnose(
        [
            RankSnapshot(rank, 7, 0, IN_BARRIER, parse_history(json.dumps({"entries": entries}).encode()))
            for rank, entries in calls.items()
        ]
    )
    wording(found.headline)
    assert ("mismatched collectives: " in found.headline) == (found.rank is None) == (words is not None)


def test_calls_that_nccl_ran_as_one_are_no_mismatch() -> None:
    alone, as_one = history(("0", 4, "all_reduce")), history(("0", 4, "all_reduce"), ("0", 4, "coalesced"))
    assert find_mismatch({0: alone, 1: as_one}) is None


SLEEPS = (Thread(True, (Frame("/home/me/train.py", "5", "nap"),)),)
IN_TORCH = Frame(f"{sysconfig.get_path('purelib')}/torch/distributed/c10d_logger.py", "83", "wrapper")
IN_BARRIER = (Thread(True, (IN_TORCH,)),)


@pytest.mark.parametrize(("history_of_1", "words"), [((), "waits in barrier #1"), (None, "rank 0 waits")])
def test_a_rank_that_has_called_none_yet_is_missing_in_the_first(
    history_of_1: Any, words: str, wording: Wording
) -> None:
    """Unlike one that doesn't answer, of which nothing is known."""
    barrier = history(("0", 1, "barrier"))
    found = diagnose(
        [RankSnapshot(0, 7, 0, IN_BARRIER, barrier), RankSnapshot(1, 8, 0, SLEEPS, history_of_1)]
    )
    wording(found.headline)
    assert found.headline.endswith(words)


def test_a_group_concerns_its_members_only(wording: Wording) -> None:
    both = history(("0", 5, "barrier"), ("1", 1, "all_gather"))
    only_first = history(("0", 5, "barrier"))
    assert find_gap({0: both, 1: both, 2: only_first}) is None
    ahead = (*both, CalledCollective("1", 2, "all_gather"))
    gap = known(find_gap({0: ahead, 1: both, 2: only_first}))
    wording(str(gap.collective))
    assert gap.missing == (1,)


def test_the_newest_collective_of_every_group() -> None:
    assert last_ones(REDUCED_TWICE) == [CalledCollective("0", 118, "all_reduce")]


def test_numbers_go_before_stacks_and_name_the_line(wording: Wording) -> None:
    loading = Activity(None, Frame("/home/me/train.py", "41", "main"), "DataLoader.__next__")
    waits = Activity(COLLECTIVE, None)
    in_backward = Activity(BACKWARD, None)
    gap = find_gap({0: REDUCED_TWICE, 1: REDUCED_TWICE, 2: REDUCED_ONCE, 3: REDUCED_TWICE})
    found = find_hang({0: waits, 1: in_backward, 2: loading, 3: waits}, gap)
    wording(found.headline)
    assert (found.rank, found.missing) == (2, (2,))
    wording(found.details[1])


def usage(histories: list[Any], threads: list[tuple[Thread, ...]]) -> list[RankUsage]:
    seen = [
        RankSnapshot(rank, 7 + rank, 3, *pair, cpu_s=rank)
        for rank, pair in enumerate(zip(threads, histories, strict=True))
    ]
    return list(usage_of(seen).values())


def test_a_rank_waits_as_long_as_its_newest_collective_stays_the_same() -> None:
    waiting, missing = usage([REDUCED_TWICE, REDUCED_ONCE], [IN_BARRIER, SLEEPS])
    assert waiting == RankUsage(REDUCED_TWICE[-1:], 0.0, 0)
    assert missing == RankUsage(None, 1.0, 0)


def test_what_a_rank_waits_for_is_not_known_without_its_history() -> None:
    """It may go from one collective to the next."""
    assert [rank.waits_in for rank in usage([None, ()], [IN_BARRIER, IN_BARRIER])] == [None, ()]
    assert [rank.waits_in for rank in usage([REDUCED_ONCE] * 2, [SLEEPS, ()])] == [None, None]
