"""Which files are traces, which rank each is of, and which of them are one job."""

import io
import pickle
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gpurun.launcher.errors import SpecError, TraceError
from gpurun.launcher.trace import parallel
from gpurun.launcher.trace.analysis.analyse import analyse_paths
from gpurun.launcher.trace.model import TraceReport
from tests.said import trace_notes
from tests.unit.trace.several_ranks.generated_job import RING
from tests.unit.trace.trace_files import kernel, launch, rank_info, span, step, write
from tests.wording import Wording


def test_ranks_by_name_then_by_place(tmp_path: Path, wording: Wording) -> None:
    """Of files that are assumed alike one sentence speaks."""
    for length_us, name in enumerate(("b.json", "rank_1.pt.trace.json", "a.json", "num_workers_7.json"), 1):
        write(tmp_path / name, [kernel("k", 0, length_us)])
    report = analyse_paths([tmp_path])
    ranks = {rank.rank: rank.files[0].rpartition("/")[2] for rank in report.ranks}
    assert ranks == {0: "a.json", 1: "rank_1.pt.trace.json", 2: "b.json", 3: "num_workers_7.json"}
    wording([each.replace(str(tmp_path), "TMP") for each in trace_notes(report) if "assumed" in each])


def files_of(report: TraceReport, root: Path) -> dict[int, str]:
    return {rank.rank: str(Path(rank.files[0]).relative_to(root)) for rank in report.ranks}


def test_traces_of_subdirectories_are_of_other_jobs(tmp_path: Path) -> None:
    """A program's own trace, and next to it what another one left for TensorBoard."""
    (tmp_path / "tb").mkdir()
    write(tmp_path / "plain.json", [kernel("k", 0, 1)])
    write(tmp_path / "tb" / "host_1.json", [kernel("k", 0, 2)])
    report = analyse_paths([tmp_path])
    assert files_of(report, tmp_path) == {0: "plain.json"}
    assert any(f"left out: {tmp_path / 'tb'}" in text for text in trace_notes(report))
    assert files_of(analyse_paths([tmp_path / "tb"]), tmp_path) == {0: "tb/host_1.json"}
    # Named one by one, they are the ranks of one job.
    named = analyse_paths([tmp_path / "plain.json", tmp_path / "tb" / "host_1.json"])
    assert [rank.rank for rank in named.ranks] == [0, 1]


def test_many_jobs_are_not_all_listed(tmp_path: Path) -> None:
    for number in range(14):
        (tmp_path / str(number)).mkdir()
        write(tmp_path / str(number) / "trace.json", [kernel("k", 0, 1)])
    with pytest.raises(TraceError, match="… and 4 more"):
        analyse_paths([tmp_path])


def test_steps_that_exist_nowhere_are_an_error(tmp_path: Path, wording: Wording) -> None:
    write(tmp_path / "rank0.json", [step(3, 0, 9), step(4, 9, 9), kernel("k", 0, 1)], **rank_info(0, 2))
    write(tmp_path / "rank1.json", [kernel("k", 0, 1)], **rank_info(1, 2))
    with pytest.raises(SpecError) as caught:
        analyse_paths([tmp_path], slice(10, 20))
    wording(str(caught.value).splitlines())


def test_a_directory_of_jobs_asks_for_one_of_them(tmp_path: Path, wording: Wording) -> None:
    for name in ("before", "after"):
        (tmp_path / name).mkdir()
        write(tmp_path / name / "rank0.json", [kernel("k", 0, 1)], **rank_info(0, 1))
    with wording.raises(TraceError) as caught:
        analyse_paths([tmp_path])
    assert f"\n    gpurun trace {tmp_path / 'after'}" in str(caught.value)


@pytest.mark.parametrize("is_stated", [True, False])
def test_ranks_in_directories_of_their_own_are_one_job(tmp_path: Path, is_stated: bool) -> None:
    for rank in range(3):
        (tmp_path / f"rank{rank}").mkdir()
        info = rank_info(rank, 3) if is_stated else {}
        write(tmp_path / f"rank{rank}" / "trace.json", [kernel("k", 0, 1)], **info)
    found = files_of(analyse_paths([tmp_path]), tmp_path)
    assert found == {rank: f"rank{rank}/trace.json" for rank in range(3)}


def test_ranks_may_be_strings_of_digits(tmp_path: Path) -> None:
    for rank in ("3", "5"):
        info = {"rank": rank, "world_size": "2"}
        write(tmp_path / f"{rank}.json", [kernel("k", 0, 1)], distributedInfo=info)
    report = analyse_paths([tmp_path])
    assert ([rank.rank for rank in report.ranks], trace_notes(report)) == ([3, 5], ())


@pytest.mark.parametrize("rank", [None, "", "three", "-1", "²", "9" * 5000])
def test_a_single_file_without_a_rank_is_reported(tmp_path: Path, rank: str | None, wording: Wording) -> None:
    path = write(tmp_path / "t.json", [kernel("k", 0, 1)], distributedInfo={"rank": rank})
    report = analyse_paths([path])
    assert [rank.rank for rank in report.ranks] == [0]
    wording(trace_notes(report))


def test_a_trace_without_events_is_no_rank(tmp_path: Path, wording: Wording) -> None:
    empty = write(tmp_path / "a.json", [], **rank_info(0, 1))
    with wording.raises(TraceError):
        analyse_paths([empty])
    write(tmp_path / "b.json", [kernel("k", 0, 1)], **rank_info(1, 1))
    report = analyse_paths([tmp_path])
    assert [rank.rank for rank in report.ranks] == [1]
    assert [warning for warning in trace_notes(report) if "left out" in warning and "a.json" in warning]


def test_of_two_traces_of_a_rank_the_later_is_taken(tmp_path: Path, wording: Wording) -> None:
    write(tmp_path / "old.json", [kernel("k", 100, 1)], **rank_info(0, 1))
    write(tmp_path / "new.json", [kernel("k", 200, 2)], **rank_info(0, 1))
    report = analyse_paths([tmp_path])
    assert [rank.total.compute_us for rank in report.ranks] == [2]
    wording(trace_notes(report))


BEGIN_US = 1_700_000_000_000_000
DAY_US = 86_400_000_000


def write_capture(path: Path, start_us: float, process: int, length_us: float = 100, **header: Any) -> None:
    """A trace of a process, at a time since `BEGIN_US`."""
    at = BEGIN_US + start_us
    calls = [span("cpu_op", "aten::mm", at, 10), launch(at, 5, 1)]
    write(path, [*(each | {"pid": process} for each in calls), kernel("k", at + 6, length_us, 1)], **header)


@pytest.mark.parametrize("is_named", [True, False])
def test_captures_one_after_the_other_are_of_one_rank(
    tmp_path: Path, is_named: bool, wording: Wording
) -> None:
    """As `tensorboard_trace_handler` leaves them; what was recorded at the same time are ranks."""
    for i in range(3):
        name = f"host_77.170000000000000000{i}.pt.trace.json" if is_named else f"{i}.json"
        write_capture(tmp_path / name, 1_000 * i, 77)
    report = analyse_paths([tmp_path])
    assert [rank.files[0] for rank in report.ranks] == [str(tmp_path / name)]
    wording([each.replace(str(tmp_path), "TMP") for each in trace_notes(report)])
    for i in range(3):
        write_capture(tmp_path / f"{i}.json", 50 * i, 78)
    assert len(analyse_paths([tmp_path / f"{i}.json" for i in range(3)]).ranks) == 3


def test_the_captures_of_two_processes_are_paired(tmp_path: Path) -> None:
    """Their clocks differ by most of a capture."""
    for i in range(3):
        for process in (500, 501):
            name = f"host_{process}.170000000000000000{i}.pt.trace.json"
            write_capture(tmp_path / name, 1_000 * i + 700 * (process - 500), process, 900)
    report = analyse_paths([tmp_path])
    assert [Path(rank.files[0]).name[:28] for rank in report.ranks] == [
        f"host_{process}.1700000000000000002"[:28] for process in (500, 501)
    ]


@pytest.mark.parametrize(
    ("others", "shown"),
    [
        (["b0"], ["a0", "a1"]),
        (["b0", "b1"], ["b0", "b1"]),
        (["b1", "c0"], ["a0", "a1"]),
    ],
)
def test_the_newest_job_that_has_all_ranks_is_shown(
    tmp_path: Path, others: list[str], shown: list[str], wording: Wording
) -> None:
    """Ranks of two jobs, days apart, are no job."""
    for name in ("a0", "a1", *others):
        job, rank = "abc".index(name[0]), int(name[1])
        write_capture(tmp_path / f"{name}.json", 21 * DAY_US * job, 10 * job + rank, **rank_info(rank, 2))
    report = analyse_paths([tmp_path])
    assert [Path(rank.files[0]).stem for rank in report.ranks] == shown
    wording([each.replace(str(tmp_path), "TMP") for each in trace_notes(report)])


def test_captures_that_never_overlapped_are_no_capture(tmp_path: Path) -> None:
    """The last ones of the ranks are ten minutes apart, and a pair lies beside them."""
    for rank, minutes in ((0, (0, 10)), (1, (0, 20))):
        for minute in minutes:
            write_capture(tmp_path / f"{rank}_{minute}.json", minute * 60e6, 70 + rank, **rank_info(rank, 2))
    found = [Path(rank.files[0]).stem for rank in analyse_paths([tmp_path]).ranks]
    assert found == ["0_0", "1_0"]


def stepping(path: Path, start_us: float, step_us: int, first_step: int, rank: int, **header: Any) -> None:
    """A trace of three steps on the CPU, at a time since `BEGIN_US`."""
    events = []
    for number in range(3):
        begin = BEGIN_US + start_us + number * step_us
        events += [step(first_step + number, begin, step_us), span("cpu_op", "aten::mm", begin, 9)]
        events.append(span("user_annotation", "gloo:all_reduce", begin + step_us - 20, 10, 2))
    write(path, [each | {"pid": 70 + rank} for each in events], **rank_info(rank, 2), **header)


@pytest.mark.parametrize(
    ("step_us", "first_step", "clock", "num_ranks"),
    [
        (100, 4, {}, 2),
        (100, 4, {"gpurunClock": "same"}, 1),
        (100, 14, {}, 1),
        (180, 4, {}, 1),
    ],
    ids=["clocks differ", "one clock", "other steps", "another pace"],
)
def test_what_never_overlapped_is_of_one_capture_if_clocks_may_differ(
    tmp_path: Path, step_us: int, first_step: int, clock: dict[str, str], num_ranks: int
) -> None:
    """Rank 1 ten seconds after rank 0."""
    stepping(tmp_path / "rank0.json", 0, 100, 4, 0, **clock)
    stepping(tmp_path / "rank1.json", 10e6, step_us, first_step, 1, **clock)
    report = analyse_paths([tmp_path])
    assert [rank.rank for rank in report.ranks] == [0, 1][-num_ranks:]
    assert report.findings[0].figures.get("num_left_out") == (1 if num_ranks == 1 else None)


def test_of_several_captures_those_with_the_chosen_steps_are_shown(tmp_path: Path, wording: Wording) -> None:
    """Though later ones have as many ranks."""
    for capture, first_step in enumerate((2, 12)):
        for rank in (0, 1):
            path = tmp_path / f"{capture}_{rank}.json"
            stepping(path, 1_000 * capture, 100, first_step, rank, gpurunClock="same")
    report = analyse_paths([tmp_path], slice(2, 5), frozenset({"critical-path"}))
    assert [Path(rank.files[0]).stem for rank in report.ranks] == ["0_0", "0_1"]
    assert [[each.step for each in rank.steps] for rank in report.ranks] == [[2, 3, 4]] * 2
    assert report.critical_path is not None
    assert report.critical_path.num_steps == 3
    wording(trace_notes(report))


def test_a_rank_without_the_chosen_steps_is_left_out(tmp_path: Path, wording: Wording) -> None:
    """By one clock, at the same time."""
    for rank, first_step in ((0, 4), (1, 5)):
        stepping(tmp_path / f"rank{rank}.json", 0, 100, first_step, rank, gpurunClock="same")
    report = analyse_paths([tmp_path], slice(4, 5))
    assert [rank.rank for rank in report.ranks] == [0]
    wording(trace_notes(report))


def test_a_rank_that_is_steps_behind_is_of_the_same_capture(tmp_path: Path) -> None:
    """By one clock, its chosen step is over before the other's begins."""
    for rank in (0, 1):
        stepping(tmp_path / f"rank{rank}.json", 150 * rank, 100, 4, rank, gpurunClock="same")
    report = analyse_paths([tmp_path], slice(4, 5))
    assert [rank.rank for rank in report.ranks] == [0, 1]


def stepping_by_place(path: Path, start_us: float, first_step: int, process: int) -> None:
    """A trace of three steps that states no rank, and communicates in the first of them alone."""
    events = [span("user_annotation", "gloo:all_reduce", BEGIN_US + start_us + 80, 10, 2)]
    for number in range(3):
        begin = BEGIN_US + start_us + 100 * number
        events += [step(first_step + number, begin, 100), span("cpu_op", "aten::mm", begin, 9)]
    write(path, [each | {"pid": process} for each in events])


def test_ranks_by_place_are_the_same_whichever_steps_are_chosen(tmp_path: Path, wording: Wording) -> None:
    for place, (name, first_step) in enumerate((("a", 1), ("b", 3), ("c", 3))):
        stepping_by_place(tmp_path / f"{name}.json", 0, first_step, 70 + place)
    for steps, shown in ((None, "abc"), (slice(4, 5), "bc")):
        report = analyse_paths([tmp_path], steps)
        assert {rank.rank: Path(rank.files[0]).stem for rank in report.ranks} == {
            "abc".index(name): name for name in shown
        }
    wording(trace_notes(report))


def test_of_a_job_that_alone_has_the_chosen_steps_ranks_are_counted_from_0(tmp_path: Path) -> None:
    for job, first_step in enumerate((11, 1)):
        for place in range(2):
            path = tmp_path / f"{job}_{place}.json"
            stepping_by_place(path, DAY_US * (1 - job), first_step, 70 + 10 * job + place)
    report = analyse_paths([tmp_path], slice(2, 3))
    assert {rank.rank: Path(rank.files[0]).stem for rank in report.ranks} == {0: "1_0", 1: "1_1"}


def test_ranks_that_communicate_in_other_steps_are_of_one_capture(tmp_path: Path) -> None:
    """By clocks that are ten seconds apart."""
    for place in range(2):
        stepping_by_place(tmp_path / f"{place}.json", 10e6 * place, 4, 70 + place)
    for steps in (None, slice(5, 6)):
        assert [rank.rank for rank in analyse_paths([tmp_path], steps).ranks] == [0, 1]


def test_a_copy_and_another_trace_of_the_same_rank_are_called_so(tmp_path: Path, wording: Wording) -> None:
    """The second job writes the ranks of the first one while that runs."""
    write_capture(tmp_path / "a.json", 0, 70, **rank_info(0, 2))
    write_capture(tmp_path / "b.json", 10, 71, **rank_info(1, 2))
    write_capture(tmp_path / "copy of a.json", 0, 70, **rank_info(0, 2))
    write_capture(tmp_path / "c.json", 20, 80, **rank_info(1, 2))
    report = analyse_paths([tmp_path])
    assert len(report.ranks) == 2
    wording([each.replace(str(tmp_path), "TMP") for each in [report.findings[0].text, *trace_notes(report)]])


@pytest.mark.parametrize(
    ("original", "copy"),
    [
        ("a.json", "b.json"),
        ("host_77.1700000000000000000.pt.trace.json", "host_77.1700000000000000000.pt.trace (1).json"),
        ("trace.json", "trace.json.gz"),
        ("rank3.json", "the one that was slow.json"),
        ("rank3.json", "rank3 copy.json"),
    ],
)
@pytest.mark.parametrize("num_others", [0, 1])
def test_one_of_two_copies_counts(
    tmp_path: Path, original: str, copy: str, num_others: int, wording: Wording
) -> None:
    """Whether or not there are other ranks, which the copy has in common with the original."""
    for name in (original, copy):
        write_capture(tmp_path / name, 0, 77)
    for other in range(num_others):
        write_capture(tmp_path / f"other {other}.json", 3, 78 + other)
    report = analyse_paths([tmp_path])
    shown = [Path(rank.files[0]).name for rank in report.ranks]
    assert sorted(shown) == sorted([original, *(f"other {other}.json" for other in range(num_others))])
    wording([each.replace(str(tmp_path), "TMP") for each in trace_notes(report) if "same content" in each])


def test_processes_of_two_hosts_are_ranks_however_alike(tmp_path: Path) -> None:
    """Each is process 1 of its container."""
    for host in "ab":
        write_capture(tmp_path / f"{host}_1.1700000000000000000.pt.trace.json", 0, 1)
    assert [rank.rank for rank in analyse_paths([tmp_path]).ranks] == [0, 1]


def test_copies_of_an_older_capture_are_left_out_with_it(tmp_path: Path, wording: Wording) -> None:
    for begin_us in (0, 1_000):
        for name in (f"{begin_us}.json", f"copy of {begin_us}.json"):
            write_capture(tmp_path / name, begin_us, 77)
    report = analyse_paths([tmp_path])
    assert [Path(rank.files[0]).name for rank in report.ranks] == ["1000.json"]
    wording([each.replace(str(tmp_path), "TMP") for each in trace_notes(report)])


def test_an_older_capture_of_many_ranks_is_found(tmp_path: Path) -> None:
    for rank in range(40):
        for begin_us in (0, 1_000):
            if (rank, begin_us) != (7, 1_000):
                path = tmp_path / f"{rank}_{begin_us}.json"
                write_capture(path, begin_us, 100 + rank, **rank_info(rank, 40))
    found = {Path(rank.files[0]).stem.partition("_")[2] for rank in analyse_paths([tmp_path]).ranks}
    assert found == {"0"}


def test_times_that_no_clock_shows_make_no_replay(tmp_path: Path) -> None:
    for rank, base_ns in enumerate((0, 10**30)):
        info = {**rank_info(rank, 2), "baseTimeNanoseconds": base_ns}
        write(tmp_path / f"{rank}.json", [launch(0, 1, 1), kernel("k", 2, 9, 1)], **info)
    assert analyse_paths([tmp_path], None, frozenset({"critical-path"})).savings == ()


def communicating(path: Path, rank: int, later_us: float, lags_us: list[float], first: int = 0) -> None:
    """A trace of all-reduces every 10 ms by a clock that is fast."""
    group = {"Process Group Name": "0", "Process Group Ranks": "[0, 1]", "Group size": 2}
    sizes = {"Collective name": "allreduce", "In msg nelems": 100, "Out msg nelems": 100, "dtype": "Float"}
    events = []
    for number, lag_us in enumerate(lags_us, 1):
        at = BEGIN_US + later_us + 10_000 * number + lag_us
        work = kernel(RING, at - 500, 500, number, **group, **sizes, Seq=first + number)
        events += [launch(at - 900, 5, number), work]
    write(path, events, **rank_info(rank, 2))


@pytest.mark.parametrize(
    ("hours", "lags_us", "first", "num_ranks"),
    [
        (2, [40, -60, 0, 90], 0, 2),
        (2, [900, -700, 0, 400], 0, 1),
        (2, [0, 0, 0, 0], 4, 1),
        (2, [0, 0], 0, 1),
        (42 * 24, [0, 0, 0, 0], 0, 1),
    ],
    ids=["one run", "another pace", "other collectives", "too few", "another day"],
)
def test_clocks_that_are_hours_apart_are_those_of_one_job_if_its_collectives_agree(
    tmp_path: Path, hours: int, lags_us: list[float], first: int, num_ranks: int
) -> None:
    communicating(tmp_path / "a.json", 0, 0, [0.0] * len(lags_us))
    communicating(tmp_path / "b.json", 1, hours * 3_600e6, lags_us, first)
    report = analyse_paths([tmp_path])
    assert [rank.rank for rank in report.ranks] == [0, 1][-num_ranks:]
    assert len([each for each in report.collectives if len(each.ranks) == 2]) == (
        len(lags_us) if num_ranks == 2 else 0
    )


def test_programs_that_ran_one_after_the_other_are_no_ranks(tmp_path: Path, wording: Wording) -> None:
    """Neither states a rank nor communicates; minutes apart they are two jobs, at the same time ranks."""
    for name, minute in (("bert.json", 0), ("vit.json", 2)):
        write_capture(tmp_path / name, minute * 60e6, 70 + minute)
    report = analyse_paths([tmp_path])
    assert [Path(rank.files[0]).name for rank in report.ranks] == ["vit.json"]
    wording(report.findings[0].text)
    write_capture(tmp_path / "bert.json", 120e6, 70)
    assert len(analyse_paths([tmp_path]).ranks) == 2


def test_files_that_say_nothing_of_each_other_are_assumed_to_be_of_one_job(
    tmp_path: Path, wording: Wording
) -> None:
    """At the same time, by clocks that don't show it; on different devices they are of different jobs."""
    for name, device, length_us in (("a", "A100", 90), ("b", "A100", 91), ("c", "H100", 90)):
        header = {"deviceProperties": [{"name": device}]}
        write(tmp_path / f"{name}.json", [launch(0, 5, 1), kernel("k", 6, length_us, 1)], **header)
    report = analyse_paths([tmp_path])
    assert [Path(rank.files[0]).name for rank in report.ranks] == ["a.json", "b.json"]
    wording(report.findings[0].text)


def test_the_ranks_of_the_job_that_is_shown_are_counted_from_0(tmp_path: Path) -> None:
    for name, day in (("a.json", 0), ("b.json", 30)):
        write_capture(tmp_path / name, day * DAY_US, 70 + day)
    (rank,) = analyse_paths([tmp_path]).ranks
    assert (rank.rank, Path(rank.files[0]).name) == (0, "b.json")


@pytest.mark.parametrize("newest", [["b"], ["b", "c"], ["b", "a2"]])
def test_a_job_that_states_no_number_of_ranks_may_be_the_newest(tmp_path: Path, newest: list[str]) -> None:
    """An older one has all of its ranks. Programs of their own follow each other by an hour."""
    write_capture(tmp_path / "a.json", 0, 70, **rank_info(0, 1))
    for i, name in enumerate(newest):
        write_capture(tmp_path / f"{name}.json", DAY_US + i * 3_600e6, 71 + i)
    (rank,) = analyse_paths([tmp_path]).ranks
    assert (rank.rank, Path(rank.files[0]).stem) == (0, newest[-1])


@pytest.mark.parametrize("at_once", [True, False])
def test_a_number_that_processes_share_is_no_rank(tmp_path: Path, at_once: bool, wording: Wording) -> None:
    """A pod that is called worker-0 runs three ranks; or a job runs there after the other."""
    for process in (101, 102, 103):
        for capture in range(2):
            name = f"job-worker-0_{process}.170000000000000000{capture}.pt.trace.json"
            begin_us = 1_000 * capture + (process - 101) * (10 if at_once else DAY_US)
            write_capture(tmp_path / name, begin_us, process)
    report = analyse_paths([tmp_path])
    found = [(rank.rank, Path(rank.files[0]).name.split(".")[:2]) for rank in report.ranks]
    shown = enumerate((101, 102, 103)) if at_once else [(0, 103)]
    assert found == [(rank, [f"job-worker-0_{process}", "1700000000000000001"]) for rank, process in shown]
    wording([each.replace(str(tmp_path), "TMP") for each in trace_notes(report)])


def test_what_is_left_out_is_of_a_rank_as_it_is_shown(tmp_path: Path, wording: Wording) -> None:
    """The newest program was traced twice, and another one before it."""
    for name, minute, process in (("bert", 0, 70), ("vit_1", 60, 71), ("vit_2", 120, 71)):
        write_capture(tmp_path / f"{name}.json", minute * 60e6, process)
    report = analyse_paths([tmp_path])
    assert [(rank.rank, Path(rank.files[0]).stem) for rank in report.ranks] == [(0, "vit_2")]
    ranks = {each.figures.get("case"): each.ranks for each in report.findings}
    assert (ranks["captures"], ranks["jobs-apart"]) == ((0,), ())
    wording([each.replace(str(tmp_path), "TMP") for each in trace_notes(report)])


def test_such_a_process_gets_what_others_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    order = io.BytesIO(pickle.dumps(parallel.FileShare((), None, frozenset(), 0)))
    answer, yielded = io.BytesIO(), []
    monkeypatch.setattr(parallel, "yield_to_others", lambda: yielded.append(order.tell()))
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=order))
    monkeypatch.setattr(sys, "stdout", SimpleNamespace(buffer=answer))
    parallel.serve()
    assert yielded == [0]
    assert pickle.loads(answer.getvalue()) == []


def test_a_process_that_ends_before_it_reads_its_order_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its order is longer than what a pipe holds."""
    monkeypatch.setattr(parallel, "helper_argv", lambda _: ["false"])
    share = parallel.FileShare(tuple(Path(f"{i:0100}") for i in range(10_000)), None, frozenset(), 0)
    with pytest.raises(TraceError, match="ended with 1"):
        list(parallel._run([share]))
