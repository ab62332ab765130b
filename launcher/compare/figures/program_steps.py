"""The steps of programs, which no plan has arranged: those that count, and what to say of them."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean

import msgspec

from gpurun.launcher.findings.finding import Finding, finding, noticed, reason
from gpurun.launcher.rundir.records import Event, StepRecord
from gpurun.launcher.stats.estimates import trend
from gpurun.launcher.stats.schedule import MAX_KEPT_STEPS, USUALLY_ENOUGH, WINDOW_STEPS

LEAST_AROUND = 0.1
"""The share of a program's time outside of its steps from which the report says where it went."""
LEAST_OTHER_WORK = 0.1
"""The share by which the numbers of steps must differ: of a program, a batch that isn't whole may be one."""
LEAST_LONGER = 0.1
"""The share by which the mean step exceeds the median one from which on the report says so."""
LEAST_STEPS = 4
"""Half of fewer steps says nothing."""
LEAST_TIMED = 6
"""So many values give an interval of their median."""
LEAST_TREND = 0.1
"""Share by which steps must grow or shrink during a launch to be worth a warning."""
MOST_FOR_TREND = 200
"""Values that are looked at for a trend: their pairs are counted."""


def last_half(
    steps: Mapping[int, Sequence[StepRecord]],
) -> tuple[Mapping[int, Sequence[StepRecord]], str | None]:
    """Takes the last half of a launch as timed steps, if the program ended in its warm-up or soon after.

    Most of the warm-up is over by then, but without timed steps nothing shows that all of it is. Also returns
    what to say of it; `None` of a program that had enough timed steps on all ranks in every launch.
    """
    nums = steps_of_launches(steps)
    fewest = {launch: min(num_timed(of_rank, launch) for of_rank in steps.values()) for launch in nums}
    enough = {planned_launch(launch) for launch, num in fewest.items() if num >= LEAST_TIMED}
    short = {launch: num for launch, num in nums.items() if planned_launch(launch) not in enough}
    halves = {launch: range(num // 2, num) for launch, num in short.items() if num >= LEAST_STEPS}
    found = {rank: [_timed_from(step, halves) for step in of_rank] for rank, of_rank in steps.items()}
    of_short = [[step for step in of_rank if step.launch in halves] for of_rank in found.values()]
    timed = [{step.step for step in of_rank if step.kind == "timed"} for of_rank in of_short]
    shown = set.intersection(*timed) if timed else set()
    if not shown:
        return steps, None
    num = max(step.step + 1 for of_rank in of_short for step in of_rank)
    said = reason(
        "short",
        num_short=len(short) if enough else None,
        num_launches=len(short) + len(enough),
        num_steps=num,
        num_shown=len(shown),
        enough=USUALLY_ENOUGH if num < USUALLY_ENOUGH else None,
    )
    return found, said


def num_timed(steps: Iterable[StepRecord], launch: str) -> int:
    """How many steps of one rank were timed in a launch."""
    return sum(step.launch == launch and step.kind == "timed" for step in steps)


def whole_rounds(steps: Iterable[StepRecord]) -> set[tuple[str, int]]:
    """Launch and number of the rounds of which all steps were timed; one may be recorded with their mean."""
    nums: Counter[tuple[str, int]] = Counter()
    for step in steps:
        if step.kind == "timed":
            nums[step.launch, step.round] += WINDOW_STEPS if step.block_ns is not None else 1
    return {key for key, num in nums.items() if num >= WINDOW_STEPS}


def sample_of_steps(steps: Mapping[int, Sequence[StepRecord]]) -> tuple[str, ...]:
    """The warning for a variant of which only a sample of steps was kept; nothing where all were."""
    of_rank = next(iter(steps.values()), ())
    total = sum({step.launch: step.step + 1 for step in of_rank}.values())
    if not _may_be_sample(of_rank) or len(of_rank) >= total:
        return ()
    return (reason("sample", num_kept=len(of_rank), num_steps=total),)


def uneven_ranks(steps: Mapping[int, Sequence[StepRecord]]) -> tuple[str, ...]:
    """The warning for a program of which one rank made a tenth more steps than another in a launch."""
    made: dict[str, dict[int, int]] = {}
    for rank, of_rank in steps.items():
        for step in of_rank:
            made.setdefault(step.launch, {})[rank] = step.step + 1
    whole = [nums for nums in made.values() if len(nums) == len(steps)]
    nums = max(whole, key=lambda nums: max(nums.values()) - min(nums.values()), default={})
    if not nums or max(nums.values()) < (1 + LEAST_OTHER_WORK) * min(nums.values()):
        return ()
    most, fewest = max(nums, key=nums.__getitem__), min(nums, key=nums.__getitem__)
    said = reason("uneven-ranks", rank=most, num_steps=nums[most], other=fewest, other_steps=nums[fewest])
    return (said,)


def trend_of_steps(steps: Mapping[int, Sequence[StepRecord]]) -> tuple[Finding, ...]:
    """The finding about a program whose steps grow or shrink by a tenth or more in most of its launches.

    Short windows of the warm-up can't show that. The first steps don't count, nor those that were skipped.
    """
    launches: dict[str, list[float]] = {}
    for step in next(iter(steps.values()), ()):
        if step.step >= WINDOW_STEPS and step.kind in ("warmup", "timed"):
            launches.setdefault(step.launch, []).append((step.block_ns or step.step_ns) / 1e6)
    found = [trend(_thinned(steps_ms)) for steps_ms in launches.values()]
    large = [ends for ends in found if ends and abs(ends[1] - ends[0]) >= LEAST_TREND * min(ends)]
    if 2 * len(large) <= len(found):
        return ()
    first_ms, last_ms = large[-1]
    case = "steps-grow" if last_ms > first_ms else "steps-shrink"
    return (noticed(case, first_ms=first_ms, last_ms=last_ms),)


def _thinned(values: Sequence[float]) -> list[float]:
    """Means of neighbours, at most `MOST_FOR_TREND`."""
    size = -(-len(values) // MOST_FOR_TREND)
    return [fmean(values[i : i + size]) for i in range(0, len(values), size)]


def step_numbers(steps: Sequence[StepRecord]) -> Sequence[int]:
    """Positions of one rank's timed steps on an axis; in a sample the number of steps before each."""
    if not _may_be_sample(steps):
        return range(len(steps))
    numbers, before = [], 0
    for last, step in zip([*steps[:1], *steps], steps, strict=False):
        before += last.step + 1 if last.launch != step.launch else 0
        numbers.append(before + step.step)
    return numbers


def _may_be_sample(steps: Sequence[StepRecord]) -> bool:
    return any(step.step >= MAX_KEPT_STEPS or step.block_ns is not None for step in steps)


def steps_of_launches(steps: Mapping[int, Sequence[StepRecord]]) -> dict[str, int]:
    """How many steps all ranks have of each launch."""
    found: dict[str, int] = {}
    for of_rank in steps.values():
        for launch, num in {step.launch: step.step + 1 for step in of_rank}.items():
            found[launch] = min(num, found.get(launch, num))
    return found


@dataclass(frozen=True)
class Around:
    """The parts of the time of a program's attempt, in seconds."""

    before: float
    """The time from the start of the program on rank 0 to its first step."""
    steps: float
    """The time from the first step to the end of the last one, with all that is between steps."""
    after: float
    """The time from the end of the last step to the end of the last rank."""
    num_steps: int

    @property
    def total(self) -> float:
        """The time that the program ran."""
        return self.before + self.steps + self.after

    @property
    def outside(self) -> float:
        """The time before and after its steps."""
        return self.before + self.after


def around_steps(events: Sequence[Event]) -> Around | None:
    """The parts of an attempt that ended, by rank 0's clock; `None` without steps, and in older runs."""
    last = next((event for event in reversed(events) if event.steps_ns is not None), None)
    if last is None or last.steps_ns is None:
        return None
    marks = (events[0].monotonic_ns, *last.steps_ns, events[-1].monotonic_ns)
    before, steps, after = ((end - start) / 1e9 for start, end in pairwise(marks))
    return Around(before, steps, after, last.round) if min(before, steps, after) >= 0 else None


def median_attempt(attempts: Sequence[Around]) -> Around | None:
    """The attempt of median length, whose parts add up."""
    ordered = sorted(attempts, key=lambda each: each.total)
    return ordered[(len(ordered) - 1) // 2] if ordered else None


def around_note(name: str, found: Around, num_attempts: int, num_programs: int) -> Finding:
    """The note on where a program's time went: of several, the one with most time outside of its steps."""
    return finding(
        "time-spent",
        case="program",
        where=name,
        num_programs=num_programs if num_programs > 1 else None,
        num_attempts=num_attempts if num_attempts > 1 else None,
        run_s=found.total,
        before_s=found.before,
        steps_s=found.steps,
        num_steps=found.num_steps,
        after_s=found.after,
    )


def with_longest(median_ms: float | None, step_ms: float) -> tuple[Finding, ...]:
    """The finding about a program whose mean step is longer than most steps of its slowest rank."""
    if not median_ms or step_ms < (1 + LEAST_LONGER) * median_ms:
        return ()
    return (noticed("longest-steps", median_ms=median_ms, step_ms=step_ms),)


def other_work(made: Mapping[str, int], run_s: Mapping[str, float]) -> tuple[Finding, ...]:
    """The note that a step of one variant may do more than one of another, since it makes fewer of them.

    Args:
        made: steps of a launch, by the name of the variant.
        run_s: how long each ran.
    """
    most, fewest = max(made, key=made.__getitem__, default=""), min(made, key=made.__getitem__, default="")
    if not made or made[most] < (1 + LEAST_OTHER_WORK) * made[fewest]:
        return ()
    found = noticed(
        "other-work",
        one=most,
        num_steps=made[most],
        other=fewest,
        other_steps=made[fewest],
        run_s=run_s.get(most),
        other_s=run_s.get(fewest),
    )
    return (found,)


def _timed_from(step: StepRecord, halves: Mapping[str, range]) -> StepRecord:
    """The step; timed in the second half of its launch, else warm-up, also where its rank got steady earlier.

    So rounds have the same steps on all ranks. Traced and skipped steps stay what they are.
    """
    if step.kind not in ("warmup", "timed") or step.launch not in halves:
        return step
    if step.step not in halves[step.launch]:
        return msgspec.structs.replace(step, kind="warmup", round=0)
    return msgspec.structs.replace(step, kind="timed", round=step.step // WINDOW_STEPS + 1)


def planned_launch(launch: str) -> str:
    """The planned launch that `launch` is an attempt at: `03-ddp-2~2` is the second at `03-ddp-2`."""
    return launch.partition("~")[0]
