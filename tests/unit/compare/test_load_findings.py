"""Ranks that wait for a core: what is known without other load. Throttled clocks leave nothing ranked."""

import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from gpurun.launcher.compare.build import compare_run
from gpurun.launcher.compare.figures.recorded import queue_percent, shares_of_rounds, sharing, throttled
from gpurun.launcher.compare.load_findings import interference_in, is_long_enough, less_load
from gpurun.launcher.compare.ranking import by_rank
from gpurun.launcher.machine.process_tree import TICK_NS, cores_ns
from gpurun.launcher.plan.model import Process, Variant
from gpurun.launcher.report.snippet import lines_to_paste
from gpurun.launcher.rundir.files import write_json
from gpurun.launcher.rundir.records import StepRecord
from gpurun.launcher.stats.core_waiting import Waiting, waiting_of_ranks
from gpurun.launcher.worker.meters import cpu_time
from gpurun.launcher.worker.meters.cpu_time import NoiseMeter, children_ns, note_end, waited_ns
from tests.known import known
from tests.unit.compare import hand_made
from tests.wording import Wording

MS = 1_000_000


def step(
    round_: int, queue_ms: float | None, reason: str | None = None, others_ms: float | None = None
) -> StepRecord:
    """One of 100 ms."""
    queue, others = (None if ms is None else round(ms * MS) for ms in (queue_ms, others_ms))
    return StepRecord("01", round_, 0, 0, "timed", 100 * MS, {}, None, queue, reason, others_ns=others)


def percent(steps: list[StepRecord]) -> float | None:
    """Of a rank without others of its run."""
    return queue_percent(waiting_of_ranks({0: steps}, {})[0])


def test_the_share_is_the_median_of_blocks() -> None:
    assert percent([step(1, 2.0), step(1, 2.0), step(2, 4.0), step(3, 90.0)]) == 4
    assert percent([step(1, None)]) is None
    assert percent([]) is None
    assert percent([step(1, 107.0)]) == 100  # what lies between its steps was counted too


def test_only_what_others_ran_can_have_been_waited_for() -> None:
    own = [step(i, 6.0, others_ms=others) for i, others in enumerate((-7.0, 1.0, 9.0))]
    assert percent(own) == 1
    assert percent([*own, step(4, 9.0, others_ms=90.0), step(5, 6.0, others_ms=-7.0)]) == 1  # a burst
    assert percent([step(1, 6.0, others_ms=-7.0)]) == 0
    assert percent([step(1, 30.0, others_ms=70.0)]) == 30
    assert percent([step(1, 6.0)]) == 6  # where the load of others is not counted, the wait counts


def rank_step(queue_ms: float, cpu_ms: float, others_ms: float, children_ms: float = 0.0) -> StepRecord:
    """One of 100 ms, with a thread that works in 60 ms of it."""
    cpu, children, thread = (round(ms * MS) for ms in (cpu_ms, children_ms, 60.0))
    found = step(1, queue_ms, others_ms=others_ms)
    return msgspec.structs.replace(found, cpu_ns=cpu, children_ns=children, thread_cpu_ns=thread)


@pytest.mark.parametrize(
    ("load_ms", "least", "most"),
    [(0.0, 0.0, 0.0), (10.0, 1.2, 10.0), (100.0, 7.5, 15.0)],
)
def test_ranks_that_wait_for_each_other_are_no_other_load(load_ms: float, least: float, most: float) -> None:
    """Two ranks on the same cores, each with a data loader: of 160 ms of CPU a thread has 60."""
    others = {0: frozenset({1}), 1: frozenset({0})}
    steps = {rank: [rank_step(15.0, 70.0, load_ms + 90.0, 10.0)] for rank in others}
    for waited in waiting_of_ranks(steps, others).values():
        (found,) = waited.values()
        assert (100 * found.least, 100 * found.most) == pytest.approx((least, most), abs=0.5)
    apart = waiting_of_ranks(steps, {})  # on cores of their own the other's time isn't in what was counted
    assert all(queue_percent(load) == 15 for load in apart.values())


@pytest.mark.parametrize(
    ("cpus", "shares"), [(((), ()), True), (((0,), (1,)), False), (((0, 1), (1,)), True)]
)
def test_ranks_share_cores_unless_they_are_bound_or_on_other_nodes(cpus: Any, shares: bool) -> None:
    first, two = (Process(rank, {}, (), cpus[rank]) for rank in range(2))
    assert sharing([first, two])[0] == ({1} if shares else set())
    assert not sharing([first, replace(two, node=1)])[0]


def test_without_load_no_step_is_shorter_than_what_a_thread_computes() -> None:
    """Ranks may wait at once or one after the other."""
    key = ("01", 1)
    waited = {0: {key: Waiting(0.1, 0.2, 0.7)}, 1: {key: Waiting(0.05, 0.3, 0.65)}}
    assert shares_of_rounds(waited, [key], "least") == {key: 0.1}
    assert shares_of_rounds(waited, [key], "most") == {key: pytest.approx(0.3)}
    free = {rank: {key: replace(its[key], worked=0.0)} for rank, its in waited.items()}
    assert shares_of_rounds(free, [key], "most") == {key: 0.5}
    assert shares_of_rounds(waited, [key, ("01", 2)], "most") is None


def test_processes_that_a_rank_has_started_are_its_own() -> None:
    before = children_ns()
    child = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        while children_ns() - before < 3 * TICK_NS:
            assert child.poll() is None
        live = children_ns()
    finally:
        child.kill()
        child.wait()
    assert children_ns() >= live - TICK_NS


STAT = """cpu  100 20 3 900 5 6 7 8 0 0
cpu0 60 20 0 400 5 6 7 8 0 0
cpu1 40 0 3 500 0 0 0 0 0 0
intr 5
"""


def test_programs_time_on_the_cores_that_may_be_used() -> None:
    assert cores_ns(STAT, {0, 1}) == 123 * TICK_NS
    assert cores_ns(STAT, {0}) == 80 * TICK_NS
    assert cores_ns(STAT, {1, 7}) == 43 * TICK_NS
    with pytest.raises(ValueError, match="none of the cores"):
        cores_ns(STAT, {7})


@pytest.mark.parametrize(
    ("waited", "others_ns", "expected"),
    [
        (({},) * 4, (100, 150, 200, 190), (0, 10)),
        (
            (
                {"main": 5, "other": 0},
                {"main": 25, "other": 8},
                {"main": 25, "new": 3},
                {"main": 45, "new": 4},
            ),
            (0,) * 4,
            (10, 0),
        ),
    ],
    ids=["what others ran", "the thread that waited longest"],
)
def test_the_meter_adds_up(
    waited: tuple[dict[str, int], ...], others_ns: tuple[int, ...], expected: tuple[int, int]
) -> None:
    threads, others = iter(waited), iter(others_ns)
    meter = NoiseMeter(lambda: next(threads), lambda: next(others))
    meter.clear()
    for _ in range(2):
        with meter.counting():
            pass
    found = meter.per_step(4)
    assert (found.queue_ns, found.others_ns) == expected
    meter.clear()
    found = meter.per_step(4)
    assert (found.queue_ns, found.others_ns) == (0, 0)


def test_a_reason_counts_if_most_blocks_end_with_it() -> None:
    assert throttled([step(1, 0, "hot"), step(2, 0, "hot"), step(3, 0)]) == "hot"
    assert throttled([step(1, 0, "hot"), step(2, 0), step(3, 0)]) is None


def test_without_counters_nothing_is_known() -> None:
    meter = NoiseMeter(lambda: None, lambda: None)
    with meter.counting():
        pass
    assert meter.per_step(1).queue_ns is None
    assert meter.per_step(1).others_ns is None


def spin(ms: float) -> None:
    """Takes CPU time of the calling thread."""
    until_ns = time.thread_time_ns() + round(ms * 1e6)
    while time.thread_time_ns() < until_ns:
        pass


def test_the_meter_knows_the_cpu_time_of_the_thread_that_steps() -> None:
    """It sleeps, spins, or does both, while another thread spins."""

    def counted_ms(spins_ms: float, sleeps_ms: float) -> float:
        meter, other = NoiseMeter(dict, lambda: 0), threading.Thread(target=spin, args=(20,))
        with meter.counting():
            other.start()
            spin(spins_ms)
            time.sleep(sleeps_ms / 1000)
            other.join()
        noise = meter.per_step(1)
        assert (noise.cpu_ns or 0) >= 20e6
        return (noise.thread_cpu_ns or 0) / 1e6

    assert counted_ms(0, 20) < 10
    assert 20 <= counted_ms(20, 0) < 30
    assert 10 <= counted_ms(10, 10) < 20


def test_two_threads_have_no_cpu_time_in_common() -> None:
    meter, found = NoiseMeter(dict, lambda: 0), []
    thread = threading.Thread(target=lambda: found.append(meter.read()))
    thread.start()
    thread.join()
    meter.add(found[0], meter.read())
    assert meter.per_step(1).thread_cpu_ns is None
    meter.clear()
    with meter.counting():
        pass
    assert meter.per_step(1).thread_cpu_ns is not None


def test_threads_that_ended_still_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each block of `dp` has new threads of the same names."""
    monkeypatch.setattr(cpu_time, "_ended_ns", Counter())
    monkeypatch.setattr(cpu_time, "thread_waited_ns", lambda: 7)
    for _ in range(2):
        thread = threading.Thread(target=note_end, name="gone-by-now")
        thread.start()
        thread.join()
    assert known(waited_ns())["gone-by-now"] == 14


files = hand_made.files


def noisy(files: Any, queue_ms: float, reason: str | None = None) -> Any:
    """Two splits that differ by 20 %, the even one with `queue_ms` in the run queue of each 100 ms step."""
    hand_made.write_splits(files, rounds=8)
    hand_made.add_load(files, hand_made.EVEN, queue_ms, reason)
    return compare_run(files.run)


def test_quiet_splits_are_ranked(files: Any) -> None:
    comparison = noisy(files, 2.0)
    assert interference_in(comparison.variants) == ()
    assert comparison.fastest == "ddp-2-even"
    assert comparison.variants[0].ranks[1].queue_percent < 5


def test_other_load_changes_no_verdict_and_is_said_next_to_it(files: Any, wording: Wording) -> None:
    """Waiting took 7.5 % of the even split's step; the splits differ by 20 %."""
    hand_made.write_splits(files, rounds=8)
    quiet = compare_run(files.run)
    hand_made.add_load(files, hand_made.EVEN, 7.5)
    comparison = compare_run(files.run)
    loaded, other = (known(found.variants[1].vs_baseline) for found in (comparison, quiet))
    assert (loaded.ci, loaded.verdict, loaded.wins, loaded.of) == (other.ci, "slower", 8, 8)
    assert (known(loaded.without_load).holds, known(other.without_load).holds) == ("yes", "unknown")
    assert known(known(loaded.without_load).ci)[1] > 25
    wording(comparison.summary)


@pytest.mark.parametrize(
    ("loaded", "queue_ms", "others_ms", "rounds", "holds"),
    [
        (hand_made.EVEN, 2.0, None, 8, "yes"),
        (hand_made.EVEN, 30.0, None, 8, "yes"),
        (hand_made.UNEVEN, 40.0, 40.0, 8, "no"),
        (hand_made.UNEVEN, 40.0, None, 8, "unknown"),
        (hand_made.EVEN, 30.0, None, 1, "unknown"),
    ],
    ids=["a little", "the faster waits", "load has made it", "may have made it", "no interval"],
)
def test_what_holds_without_load(
    files: Any,
    loaded: Variant,
    queue_ms: float,
    others_ms: float | None,
    rounds: int,
    holds: str,
    wording: Wording,
) -> None:
    """Of a faster variant that waited more the lead would be larger; one round of each has no verdict."""
    hand_made.write_splits(files, rounds=rounds)
    hand_made.add_load(files, loaded, queue_ms, others_ms=others_ms)
    comparison = compare_run(files.run)
    found = known(comparison.variants[1].vs_baseline)
    assert (found.ci is None, found.verdict) == ((False, "slower") if rounds > 1 else (True, "inconclusive"))
    assert known(found.without_load).holds == holds
    wording(comparison.summary)


def test_a_share_just_above_the_limit_is_not_shown_as_the_limit(files: Any, wording: Wording) -> None:
    result = noisy(files, 30.0).variants[0]
    ranks = tuple(replace(rank, queue_percent=5.02) for rank in result.ranks)
    (load, _) = interference_in([replace(result, ranks=ranks)] * 2)
    wording(load.figures["queued"])


def test_a_hot_gpu_leaves_nothing_ranked_and_says_what_to_do(files: Any, wording: Wording) -> None:
    """How much a low clock changes isn't known."""
    comparison = noisy(files, 0.0, "power brake")
    wording(comparison.headline)
    assert "cool down" in comparison.summary
    assert (comparison.leader, comparison.fastest) == (None, None)
    assert [each.id for each in by_rank(comparison)[0]] == [variant.id for variant in comparison.variants]
    pasted = known(lines_to_paste(comparison))
    wording(pasted)


def test_fewer_threads_are_tried_before_more_launches(files: Any) -> None:
    """They change least, and waiting for cores is most of what is left to gain."""
    results = noisy(files, 30.0).variants
    ranks = tuple(replace(rank, other_cores=1.0) for rank in results[0].ranks)
    many = [replace(result, split=(32, 32), threads=2, ranks=ranks) for result in results]
    found = [less_load(many, cores) for cores in (4, None)]
    assert [each.text for each in found] == [
        "set `threads: 1`: 2 devices × 2 threads need 4 cores (free: 3)",
        "use fewer devices, or stop other programs on this machine, then run again",
    ]
    assert found[0].weight > 1 > found[1].weight  # of more launches: 1
    alone = [replace(result, devices=("cpu:0",), split=None, threads=1) for result in results[:1]]
    assert less_load(alone, 4).text == "stop other programs on this machine, then run again"
    program = [replace(result, devices=("cpu:0", "cpu:1"), split=None, threads=0) for result in many]
    assert [less_load(program, cores).text for cores in (2, 1)] == [
        "stop other programs on this machine, then run again",
        "set `devices: cpu:1`: 2 devices × 1 thread need 2 cores (free: 1)",
    ]


def test_what_wasnt_ranked_for_a_low_clock_names_only_clocks(files: Any) -> None:
    """Other load is no reason to rank nothing."""
    found = noisy(files, 30.0, "power brake").findings[0]
    assert (found.code, found.figures["reason"]) == ("not-ranked", "power brake")


def test_a_variant_alone_is_looked_at_too(files: Any, wording: Wording) -> None:
    files.rounds(hand_made.EVEN, "01-ddp-2", [100.0] * 8)
    files.close(hand_made.EVEN)
    launch = hand_made.launch("01-ddp-2", "ddp-2", 0, (hand_made.EVEN,))
    write_json(files.run.plan, hand_made.plan((hand_made.EVEN,), [launch]))
    hand_made.add_load(files, hand_made.EVEN)
    comparison = compare_run(files.run)
    wording(comparison.summary)


def test_a_short_burst_is_no_reason_to_warn_of_load() -> None:
    """Steps of 100 ms: a program's count as one block."""
    assert not is_long_enough([step(1, 2.0)] * 19)
    assert is_long_enough([step(1, 2.0)] * 20)
    assert is_long_enough([step(1, 2.0), step(2, 2.0), step(3, 2.0)])
