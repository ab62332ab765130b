"""Programs: what counts of steps that no plan has arranged."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import accumulate, product
from typing import Any

import pytest
from msgspec.structs import replace as changed

from gpurun.launcher.compare.build import compare_run
from gpurun.launcher.compare.figures.recorded import step_numbers, trend_of_steps
from gpurun.launcher.compare.model import Comparison, Noise
from gpurun.launcher.plan.model import Launch, Variant
from gpurun.launcher.rundir.files import append_lines, write_json
from gpurun.launcher.rundir.records import Event, StepRecord
from tests.known import known
from tests.said import notes_of, warnings_of
from tests.unit.compare import hand_made
from tests.unit.compare.hand_made import (
    Files,
    launch,
    plan,
)
from tests.unit.trace.trace_files import rank_info, span, write
from tests.unit.trace.trace_files import step as traced_step
from tests.wording import Wording

files = hand_made.files

PROGRAM = Variant(
    id="script-2", strategy="script", devices=("cpu:0", "cpu:1"), split=(), split_name="-", varied={}
)
ALONE = replace(PROGRAM, id="script-1", devices=("cpu:0",))


def steps_of(times_ms: Iterable[float], warm: int = 0, name: str = "01") -> list[StepRecord]:
    """Steps of a launch of a program; those from number `warm` on are timed, in rounds of five."""
    steps = [
        StepRecord(name, 0, 0, number, "warmup", round(ms * 1e6), {}, None)
        for number, ms in enumerate(times_ms)
    ]
    return [
        changed(step, kind="timed", round=step.step // 5 + 1) if step.step >= warm else step for step in steps
    ]


def compared(
    files: Files,
    program: Variant,
    *ranks: Sequence[StepRecord],
    launches: Sequence[str] = ("01",),
    ended: bool = True,
    **status: Any,
) -> Comparison:
    """What a run of one program comes to, whose ranks made these steps."""
    for rank, steps in enumerate(ranks):
        append_lines(files.run.steps(program.id, rank), steps)
    planned = [launch(name, program.id, place, [program]) for place, name in enumerate(launches)]
    write_json(files.run.plan, plan([program], planned, program.id))
    if ended:
        files.close(program, **status)
    return compare_run(files.run)


@pytest.mark.parametrize(("ended", "timed"), [(True, 0), (False, 0), (True, 7)])
def test_a_program_that_never_got_steady_shows_its_last_half(
    files: Files, ended: bool, timed: int, wording: Wording
) -> None:
    """Not while it runs: then the rest is still to come. If one rank got steady, no round is of all."""
    ranks = [steps_of([100] * 6 + [50] * (num - 6), num - rank * timed) for rank, num in enumerate((12, 13))]
    (found,) = compared(files, PROGRAM, *ranks, ended=ended).variants
    if not ended:
        assert found.step_ms is None
        return
    assert (found.status, known(found.step_ms).estimate) == ("unsteady", pytest.approx(50))
    wording(found.reason)
    assert [rank.step_ms for rank in found.ranks] == [50, 50]


def test_programs_without_steps_leave_nothing_to_resume(files: Files) -> None:
    programs = [PROGRAM, replace(PROGRAM, id="script-2-b", varied={"args": ("--b",)})]
    launches = [launch(f"0{at}-{each.id}", each.id, 0, [each]) for at, each in enumerate(programs, 1)]
    write_json(files.run.plan, replace(plan(programs, launches, PROGRAM.id), budget_s=60.0))
    files.close(programs[0])
    assert not compare_run(files.run).complete
    files.close(programs[1])
    assert compare_run(files.run).complete


def test_a_program_that_ended_soon_after_its_warm_up_shows_its_last_half(
    files: Files, wording: Wording
) -> None:
    comparison = compared(files, ALONE, steps_of([50, 51] * 6, 10))
    (found,) = comparison.variants
    assert known(found.step_ms).ci == pytest.approx((49.9, 51.1), abs=0.05)  # of six steps of 50 or 51 ms
    wording(warnings_of(comparison, found))
    wording(notes_of(comparison)[0])


@pytest.mark.parametrize(("timed", "shown"), [(3, None), (8, None), (13, 4.0)])
def test_rounds_that_are_not_whole_show_no_scatter_between_rounds(
    files: Files, timed: int, shown: float | None
) -> None:
    """Steps 13 to 15 are the end of a round of five, those that the program ended in the beginning of one."""
    steps = steps_of((50 + 2 * (number // 5) % 4 for number in range(12 + timed)), 12)
    found = compared(files, ALONE, steps).noise.round_scatter_percent
    assert found == (shown and pytest.approx(100 * math.log(52 / 50) / math.sqrt(2)))


def test_the_last_half_is_the_same_on_a_rank_that_got_steady_earlier(files: Files) -> None:
    comparison = compared(files, PROGRAM, *(steps_of([50] * 12, steady) for steady in (10, 4)))
    assert "(6 steps)" in notes_of(comparison)[0]
    assert "from 6 steps of" in warnings_of(comparison, comparison.variants[0])[0]


@pytest.mark.parametrize(
    ("ms_per_step", "queue_ms", "warns"),
    [(3, 0, True), (-2, 0, True), (0.1, 0, False), (0, 0, False), (3, 40, False)],
)
def test_a_program_whose_steps_grow_or_shrink_all_the_time_has_a_warning(
    files: Files, ms_per_step: float, queue_ms: int, warns: bool
) -> None:
    """A pattern of 7 steps hides the growth from the windows of the warm-up; other load explains it."""
    steps = steps_of((60 + 10 * (number % 7) + ms_per_step * number for number in range(35)), 10)
    waiting = [changed(step, queue_ns=queue_ms * 10**6, others_ns=queue_ms * 10**6) for step in steps]
    comparison = compared(files, ALONE, waiting)
    (found,) = comparison.variants
    assert any("during a launch" in text for text in warnings_of(comparison, found)) == warns


def test_of_a_program_that_failed_only_the_failure_is_said(files: Files) -> None:
    steps = [step for name in ("01", "02") for step in steps_of(range(60, 165, 3), 10, name)]
    reason, log = "rank 0 raised ValueError: no", "launches/02/log/rank0.log"
    comparison = compared(files, ALONE, steps, launches=("01", "02"), status="failed", reason=reason, log=log)
    assert (warnings_of(comparison, comparison.variants[0]), notes_of(comparison), comparison.noise) == (
        (),
        (),
        Noise(),
    )
    assert comparison.headline == "gpt on 1 device failed: rank 0 raised ValueError: no."


@pytest.mark.parametrize("args", [("--lr", "0.1"), ("20",), ()])
def test_a_program_that_is_compared_and_alone_so_far_is_named_so(
    files: Files, args: tuple[str, ...], wording: Wording
) -> None:
    varied = replace(ALONE, id="script-1-a", varied={"args": args})
    other = replace(varied, id="script-1-b", varied={"args": ("--other",)})
    append_lines(files.run.steps(varied.id, 0), steps_of([50, 51] * 20, 10))
    launches = [launch("01", varied.id, 0, [varied]), launch("02", other.id, 0, [other])]
    write_json(files.run.plan, plan([varied, other], launches, varied.id))
    wording(compare_run(files.run).headline)


@pytest.mark.parametrize(
    ("nums", "warm", "launches"),
    [((19, 19), (19, 10), 2), ((40, 2), (10, 10), None)],
    ids=["steady late", "too few steps"],
)
def test_a_launch_without_timed_steps_is_no_launch_that_is_missing(
    files: Files, nums: tuple[int, int], warm: tuple[int, int], launches: int | None, wording: Wording
) -> None:
    steps: list[StepRecord] = []
    for name, num, timed in zip(("01", "02"), nums, warm, strict=True):
        steps += steps_of((50 + number % 2 for number in range(num)), timed, name)
        append_lines(files.run.events(name), [Event(1, "run", ALONE.id), Event(2, "done", ALONE.id)])
    comparison = compared(files, ALONE, steps, launches=("01", "02"))
    assert comparison.complete
    if launches:
        assert comparison.variants[0].launches == launches
        wording(*warnings_of(comparison, comparison.variants[0]))


@pytest.mark.parametrize(
    ("every", "mean_ms", "is_said"), [(25, 42, True), (10_000, 30, False), (5, 90, True)]
)
def test_long_steps_count_and_that_most_are_shorter_is_said(
    files: Files, every: int, mean_ms: float, is_said: bool, wording: Wording
) -> None:
    """A validation of 300 ms after every 25th step of 30 ms; after every 5th it is in all rounds."""
    steps = steps_of(330 if number % every == every - 1 else 30 for number in range(200))
    comparison = compared(files, ALONE, steps)
    (found,) = comparison.variants
    assert known(found.step_ms).estimate == pytest.approx(mean_ms)
    said = [text for text in warnings_of(comparison, found) if "raise the mean" in text]
    assert bool(said) == is_said
    wording(*said)


@pytest.mark.parametrize(("nums", "is_said"), [((60, 40), True), ((40, 41), False), ((12, 12), False)])
def test_that_ranks_made_different_numbers_of_steps_is_said(
    files: Files, nums: tuple[int, int], is_said: bool, wording: Wording
) -> None:
    comparison = compared(files, PROGRAM, *(steps_of([30] * num) for num in nums))
    (found,) = comparison.variants
    assert known(found.step_ms).estimate == pytest.approx(30)
    said = [text for text in warnings_of(comparison, found) if " made " in text]
    assert bool(said) == is_said
    wording(*said)


@pytest.mark.parametrize("late_every", range(1, 8))
def test_a_rank_that_is_late_in_some_steps_counts_once(files: Files, late_every: int) -> None:
    """Rank 1 makes 60 ms more of each such step. Rank 0 waits for it within its own next one."""
    lengths = [10 + (60 if number % late_every == late_every - 1 else 0) for number in range(101)]
    (found,) = compared(files, PROGRAM, steps_of(lengths[:-1]), steps_of(lengths[1:])).variants
    assert known(found.step_ms).estimate == pytest.approx(sum(lengths) / 101, rel=0.02)


@pytest.mark.parametrize(("nums", "batch"), [((120, 60), None), ((120, 119), None), ((120, 60), 64)])
def test_programs_are_compared_by_their_steps_which_may_do_different_work(
    files: Files, nums: tuple[int, int], batch: int | None, wording: Wording
) -> None:
    """Unless the job says how many samples each has."""
    sized = replace(ALONE, global_batch=batch)
    programs = [replace(sized, id=f"script-1-{args}", varied={"args": (args,)}) for args in ("16", "32")]
    launches = []
    for repetition in range(6):
        for program, num, ms in zip(programs, nums, (20, 28), strict=True):
            name = f"{repetition}-{program.id}"
            launches.append(launch(name, program.id, repetition, [program]))
            times_ms = (ms + 0.1 * (number % 3) + 0.1 * repetition for number in range(num))
            append_lines(files.run.steps(program.id, 0), steps_of(times_ms, 0, name))
            run = Event(0, "run", program.id, monotonic_ns=1)
            end = replace(run, stage="done", monotonic_ns=num * ms * 10**6)
            append_lines(files.run.events(name), [run, end])
    write_json(files.run.plan, plan(programs, launches, programs[0].id))
    files.close(*programs)
    comparison = compare_run(files.run)
    wording(comparison.headline, *(note for note in notes_of(comparison) if "other work" in note))


@pytest.mark.parametrize(("num_launches", "is_compared"), [(1, False), (2, True)])
def test_the_first_launch_of_a_run_says_little_about_length_and_memory(
    files: Files, num_launches: int, is_compared: bool
) -> None:
    """It runs for 9 s and takes 3 GiB, all others 4 s and 1 or 2 GiB; the second program is slower."""
    programs = [replace(ALONE, id=name, varied={"args": (name,)}) for name in "ab"]
    launches: list[Launch] = []
    for repetition, program in product(range(num_launches), programs):
        name = f"0{len(launches)}"
        launches.append(launch(name, program.id, repetition, [program]))
        is_first, is_a = name == "00", program.id == "a"
        gib = 3 if is_first else 1 + is_a
        steps = steps_of([20] * 60 if is_a else [30] * 30, 0, name)
        append_lines(files.run.steps(program.id, 0), [changed(step, peak_bytes=gib << 30) for step in steps])
        run = Event(0, "run", program.id, monotonic_ns=1)
        end = replace(run, stage="done", monotonic_ns=1 + (9 if is_first else 4) * 10**9)
        append_lines(files.run.events(name), [run, end])
    write_json(files.run.plan, plan(programs, launches, "a"))
    files.close(*programs)
    comparison = compare_run(files.run)
    expected = [(4, 2), (4, 1)] if is_compared else [(9, 3), (4, 1)]
    assert [(variant.wall_s, variant.peak_gib) for variant in comparison.variants] == expected
    notes = "\n".join(notes_of(comparison))
    assert ("their whole runs took 4.0 s and 4.0 s." in notes) == is_compared
    assert ("y time and memory (estimates) choose" in notes) == is_compared


@pytest.mark.parametrize(
    ("launches_s", "said"),
    [
        ([(4.6, 3, 2.2)], True),  # seconds before its first step, to the end of the last, and after it
        ([(4.6, 3, 2.2), (9, 4, 3), (0, 1, 0)], True),
        ([(0.4, 9, 0.4)], False),
        ([None], False),  # an older run
    ],
)
def test_the_report_says_where_the_time_outside_of_steps_went(
    files: Files, launches_s: Sequence[tuple[float, float, float] | None], said: bool, wording: Wording
) -> None:
    names = [f"0{number}" for number in range(1, len(launches_s) + 1)]
    for name, parts in zip(names, launches_s, strict=True):
        begun, first, last, end = (round(1e9 * s) for s in accumulate((5, *(parts or (1, 1, 1)))))
        run = Event(0, "run", ALONE.id, monotonic_ns=begun)
        steps = replace(run, round=20, monotonic_ns=end, steps_ns=(first, last) if parts else None)
        append_lines(files.run.events(name), [run, steps, Event(0, "done", ALONE.id, monotonic_ns=end)])
    found = [note for note in notes_of(compared(files, ALONE, launches=names)) if " ran for " in note]
    assert len(found) == said
    wording(*found)


def test_figures_of_a_long_program_are_those_of_a_sample(files: Files, wording: Wording) -> None:
    numbers = (*range(10), *range(50_000, 50_010), 123_456)
    steps = zip(steps_of([50] * len(numbers)), numbers, strict=True)
    lines = [changed(step, step=number, round=number // 5 + 1) for step, number in steps]
    comparison = compared(files, ALONE, lines)
    (found,) = comparison.variants
    wording(warnings_of(comparison, found))
    again = [changed(line, launch="02") for line in lines]
    assert [*step_numbers(lines), *numbers] == [*numbers, *numbers]
    assert [*step_numbers(lines + again)][21:] == [123_457 + number for number in numbers]
    assert [*step_numbers(lines[10:12])] == [50_000, 50_001]
    assert [*step_numbers([changed(line, step=line.step + 7) for line in lines[:3]])] == [0, 1, 2]


@pytest.mark.parametrize(
    ("steps", "replaced", "said"),
    [
        ({"01": 40, "02": 40}, (), None),
        ({"01": 40, "02": 19}, (), "its launches made 19 to 40 steps"),
        ({"01": 40, "02": 0}, (), "its launches made 0 to 40 steps"),
        ({"01": 40, "02!": 30, "02~2": 10}, (), None),  # a restart goes on from what was saved
        ({"01": 5, "01~2": 40, "02": 40}, ("01",), None),
        ({"01": 40, "01~2": 40, "02": 5}, ("01",), "its launches made 5 to 40 steps"),
    ],
)
def test_launches_that_go_on_from_another_are_a_finding(
    files: Files, steps: dict[str, int], replaced: tuple[str, ...], said: str | None
) -> None:
    """By attempts, of which those with `!` failed."""
    records: list[StepRecord] = []
    for attempt, num in steps.items():
        name = attempt.removesuffix("!")
        records += [changed(step, round=1) for step in steps_of([50] * num, 0, name)]
        events = [Event(1, "run", ALONE.id), Event(2, "done", ALONE.id)]
        append_lines(files.run.events(name), events[: 1 if attempt.endswith("!") else 2])
    write_json(files.run.replaced, replaced)
    comparison = compared(files, ALONE, records, launches=("01", "02"))
    (found,) = comparison.variants
    made = [text.partition(":")[0] for text in warnings_of(comparison, found) if "its launches made" in text]
    assert made == ([said] if said else [])


@pytest.mark.parametrize(("waited_ms", "is_used"), [(0, False), (50, True)])
def test_traced_steps_are_compared_with_timed_ones_without_what_other_load_explains(
    files: Files, waited_ms: int, is_used: bool
) -> None:
    """Traced steps of 45 ms, timed ones of 100: the load may have ended in between."""
    waited_ns = waited_ms * 10**6
    steps = [changed(step, queue_ns=waited_ns, others_ns=waited_ns) for step in steps_of([100] * 60)]
    events = [traced_step(number, 1e5 * number, 4.5e4) for number in (1, 2, 3)]
    trace = files.run.trace(ALONE.id, 0)
    trace.parent.mkdir(parents=True, exist_ok=True)
    write(trace, [span("cpu_op", "aten::mm", 1e5, 1e4), *events], **rank_info(0, 1))
    comparison = compared(files, ALONE, steps)
    (found,) = comparison.variants
    assert (found.ranks[0].span_ms is not None, found.traced_steps is not None) == (is_used, is_used)
    assert any("where the rest goes" in text for text in warnings_of(comparison, found)) != is_used


@pytest.mark.parametrize(
    ("slopes", "case"),
    [((1, 1, -1), "steps-grow"), ((-1, -1, 1), "steps-shrink"), ((1, -1), None), ((1, 0, -1), None)],
)
def test_a_trend_is_that_of_most_launches(slopes: tuple[int, ...], case: str | None) -> None:
    """Launches that go in two directions show nothing about the number of steps."""
    steps = [
        StepRecord(
            f"0{launch}-script-1", 0, 0, number, "timed", 10_000_000 + slope * 100_000 * number, {}, None
        )
        for launch, slope in enumerate(slopes)
        for number in range(60)
    ]
    found = trend_of_steps({0: steps})
    assert [each.figures["case"] for each in found] == ([case] if case else [])
