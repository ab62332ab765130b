"""When ranks that complete no step are reported, and when they are ended: with made-up clocks."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpurun.launcher.inspect.hang_diagnosis import Hang, RankUsage
from gpurun.launcher.inspect.snapshot import CalledCollective
from gpurun.launcher.jobfile.model import JobSpec
from gpurun.launcher.run.watch import (
    IDLE_S,
    IDLE_SHARE,
    OBSERVE_EVERY_S,
    REPORT_S,
    REPORT_STEPS,
    Late,
    Observation,
    Tick,
    Watch,
    were_idle,
)
from gpurun.launcher.rundir.records import Event

WORKLOAD, PROGRAM = JobSpec(workload="gpt", timeout_s=1e9), JobSpec(script="train.py")
REDUCES = (CalledCollective("0", 68, "all_reduce"),)
NEXT = (CalledCollective("0", 69, "all_reduce"),)
WAITS = RankUsage(REDUCES, 0.0, 100)
"""In NCCL's way: with all of a core and of the GPU."""
IDLE = RankUsage(None, 7.0, 0)
BUSY = RankUsage(None, 0.0, 0)
"""One whose CPU time `passing` adds."""


@dataclass
class Ranks:
    """Two ranks: what a watch learns of them every second, and what it then says."""

    spec: JobSpec
    steps: tuple[int, ...] = (3, 3)
    usage: Mapping[int, RankUsage] = field(default_factory=lambda: {0: WAITS, 1: IDLE})
    now_s: float = 0.0
    late: list[tuple[float, Late]] = field(default_factory=list)
    observed_s: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.watch = Watch.begin(len(self.usage), 0.0)
        self.passing(1)

    def passing(self, seconds: float, every_s: float = 1.0) -> "Ranks":
        """Time passes in which no step is completed; nothing is looked at after the end."""
        end_s = self.now_s + seconds
        while self.now_s < end_s and not self.ended:
            self.now_s += every_s
            self._tick()
        return self

    def _tick(self, *events: Event) -> None:
        due_s = self.watch.due(self.spec).usage_s
        usage = None
        if due_s is not None and self.now_s >= due_s:
            self.observed_s.append(self.now_s)
            usage = {
                rank: replace(used, cpu_s=self.now_s) if used is BUSY or used is WAITS else used
                for rank, used in self.usage.items()
            }
        self.watch = self.watch.after(Tick(self.now_s, (), events, self.steps, usage), self.spec)
        if (late := self.watch.late(self.spec)) is not None:
            self.late.append((self.now_s, late))
            self.watch = replace(self.watch, hang_reported=True)

    def step(self) -> "Ranks":
        """A step is completed, a second later."""
        self.steps = tuple(number + 1 for number in self.steps)
        return self.passing(1)

    def enter(self, variant: str) -> "Ranks":
        self.now_s += 1
        self._tick(Event(0, "round", variant, monotonic_ns=round(self.now_s * 1e9)))
        return self

    @property
    def ended(self) -> bool:
        return any(late.stops for _, late in self.late)

    @property
    def reported_s(self) -> list[float]:
        return [at_s for at_s, late in self.late if not late.stops]


@pytest.mark.parametrize("spec", [WORKLOAD, PROGRAM])
def test_a_stall_is_reported_once_until_a_step_is_completed(spec: JobSpec) -> None:
    ranks = Ranks(spec).passing(REPORT_S - 1)
    assert ranks.reported_s == []
    ranks.passing(200)
    assert ranks.reported_s == [1 + REPORT_S]
    ranks.step()
    again_s = ranks.now_s
    assert ranks.passing(REPORT_STEPS * (again_s - 1) - 1).reported_s == [1 + REPORT_S]
    assert ranks.passing(5).reported_s == [1 + REPORT_S, again_s + REPORT_STEPS * (again_s - 1)]


@given(st.lists(st.integers(1, 50), min_size=1, max_size=8), st.booleans())
def test_no_time_of_less_than_ten_of_the_longest_step_is_reported(steps: list[int], is_program: bool) -> None:
    ranks = Ranks(PROGRAM if is_program else WORKLOAD)
    for seconds in steps:
        ranks.passing(seconds - 1).step()
    assert ranks.reported_s == []
    due_s = max(REPORT_S, REPORT_STEPS * max(steps))
    since_s = ranks.now_s
    ranks.usage = {0: WAITS, 1: BUSY}
    assert ranks.passing(due_s + 5).reported_s == [since_s + due_s]


def test_the_longest_step_of_earlier_launches_counts_too() -> None:
    before = Ranks(WORKLOAD).passing(19).step().watch
    assert Watch.begin(2, 1e4, before.longest_step_s).report_after_s(WORKLOAD) == 200


def test_what_a_program_loads_before_its_first_step_is_no_step() -> None:
    for spec, longest_s in ((PROGRAM, 0), (WORKLOAD, 50)):
        ranks = Ranks(spec, steps=(0, 0)).passing(49).step()
        assert ranks.watch.longest_step_s == longest_s


def test_a_stage_that_begins_is_a_sign_of_life() -> None:
    ranks = Ranks(WORKLOAD).passing(40).enter("a").passing(40).enter("b").passing(40)
    assert ranks.reported_s == []


def test_a_workload_whose_ranks_are_all_idle_is_ended() -> None:
    ranks = Ranks(WORKLOAD).passing(2000)
    assert ranks.now_s == pytest.approx(1 + REPORT_S + IDLE_S, abs=OBSERVE_EVERY_S)
    (_, reported), (_, ended) = ranks.late
    assert (reported.stops, reported.limit) == (False, "no step completed for 60 s")
    assert ended.is_hang
    assert ended.text(Hang(None, "", ())) == (
        "no step completed for 661 s, and every rank waited, or used neither CPU nor GPU, for 10 min"
    )


@pytest.mark.parametrize(
    "spec", [PROGRAM, replace(PROGRAM, on_hang="continue"), replace(WORKLOAD, on_hang="continue")]
)
def test_no_program_and_no_job_that_only_reports_is_ended(spec: JobSpec) -> None:
    ranks = Ranks(spec).passing(3 * IDLE_S)
    assert not ranks.ended
    assert ranks.reported_s == [1 + REPORT_S]
    assert ranks.observed_s == []  # it would have no use


@pytest.mark.parametrize("spec", [WORKLOAD, PROGRAM])
@pytest.mark.parametrize("hang_s", [5.0, 300.0, 2 * IDLE_S])
def test_a_stated_limit_ends_both_kinds_at_that_time(spec: JobSpec, hang_s: float) -> None:
    ranks = Ranks(replace(spec, hang_timeout_s=hang_s)).passing(3 * IDLE_S)
    assert ranks.now_s == 1 + hang_s
    assert ranks.late[-1][1].limit == f"no step completed for {hang_s:g} s"
    assert ranks.reported_s == ([1 + REPORT_S] if hang_s > REPORT_S else [])
    assert ranks.observed_s == []


def test_a_stated_limit_that_ends_nothing_is_when_it_is_reported() -> None:
    ranks = Ranks(replace(WORKLOAD, hang_timeout_s=150.0, on_hang="continue")).passing(3 * IDLE_S)
    assert ranks.reported_s == [1 + 150]


WORKING = {
    "on its CPU": BUSY,
    "on its GPU": replace(IDLE, gpu_percent=3),
    "perhaps on its GPU": replace(IDLE, gpu_percent=None),
}


@pytest.mark.parametrize("work", WORKING.values(), ids=WORKING)
def test_one_rank_that_works_keeps_the_launch_running(work: RankUsage) -> None:
    assert not Ranks(WORKLOAD, usage={0: WAITS, 1: work}).passing(3 * IDLE_S).ended


@given(st.lists(st.sampled_from(["busy", "idle", "step"]), min_size=1, max_size=25))
def test_a_launch_is_ended_only_after_ten_minutes_in_which_nothing_happens(minutes: Sequence[str]) -> None:
    ranks, quiet_since_s = Ranks(WORKLOAD), 1.0
    for minute in minutes:
        if minute == "step":
            ranks.step()
        ranks.usage = {0: WAITS, 1: BUSY if minute == "busy" else IDLE}
        ranks.passing(OBSERVE_EVERY_S)
        if ranks.ended:
            assert ranks.now_s - quiet_since_s >= IDLE_S
            return
        if minute != "idle":
            quiet_since_s = ranks.now_s
    ranks.usage = {0: WAITS, 1: IDLE}
    assert ranks.passing(REPORT_STEPS * ranks.now_s + 2 * IDLE_S).ended


def test_ranks_that_go_from_collective_to_collective_are_not_idle() -> None:
    seen = Observation(0.0, {0: WAITS, 1: WAITS})
    later = Observation(60.0, {0: WAITS, 1: replace(WAITS, cpu_s=60.0)})
    assert were_idle(seen, later, 2)
    moved = replace(later, ranks={0: WAITS, 1: replace(WAITS, waits_in=NEXT, cpu_s=60.0)})
    assert not were_idle(seen, moved, 2)


def around(value: float) -> Iterator[float]:
    yield from (0.99 * value, 1.01 * value)


def test_what_watching_a_rank_takes_is_no_work() -> None:
    seen = Observation(0.0, {0: IDLE})
    for used_s, rests in zip(around(IDLE_SHARE * 60.0), (True, False), strict=True):
        for cpu_s in (IDLE.cpu_s + used_s, IDLE.cpu_s - used_s):  # less: a process of it has ended
            assert were_idle(seen, Observation(60.0, {0: replace(IDLE, cpu_s=cpu_s)}), 1) is rests


def test_what_was_not_seen_is_not_known_to_be_idle() -> None:
    """A rank whose node didn't answer; or a batch system had suspended the command, with all ranks."""
    both = Observation(0.0, {0: IDLE, 1: IDLE})
    assert not were_idle(both, Observation(60.0, {0: IDLE}), 2)
    assert not were_idle(both, replace(both, at_s=7200.0), 2)
    assert not Ranks(WORKLOAD).passing(3 * IDLE_S, every_s=3 * OBSERVE_EVERY_S).ended
