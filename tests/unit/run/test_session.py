"""A session with ranks that follow a script and a clock that never waits: what it starts, stops and keeps."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from gpurun.launcher.compare.model import Comparison
from gpurun.launcher.errors import GpurunError, Interrupted, MachineError, NodesError, ParamsError
from gpurun.launcher.failures.reporter import Reporter
from gpurun.launcher.jobfile.load import load_text
from gpurun.launcher.logs.relay import Relay
from gpurun.launcher.plan.build import build_plan
from gpurun.launcher.plan.model import Plan
from gpurun.launcher.processes.protocol import Exit
from gpurun.launcher.run import decisions
from gpurun.launcher.run import effects as do
from gpurun.launcher.run.attempts import replace_other_software
from gpurun.launcher.run.job import finish
from gpurun.launcher.run.open import plan_difference, resume_run
from gpurun.launcher.run.running_attempt import RunningAttempt
from gpurun.launcher.run.session import Session
from gpurun.launcher.run.start_requests import Starter
from gpurun.launcher.run.watch import Limits
from gpurun.launcher.rundir.files import RunDir, append_lines, read_json, write_json
from gpurun.launcher.rundir.records import Event, FailureRecord, LaunchConfig, Look, StepRecord, VariantStatus
from tests.unit.run.fake_ranks import FakeClock, FakeRanks, OfRank, Removed, Script

EVEN, SPLIT = "ddp-2-even", "ddp-2-6-2"
SPLITS = "compare: {split: [even, [6, 2]]}\n"
STRATEGIES = "compare: {strategy: [ddp, dp]}\n"


@dataclass(frozen=True)
class FakeMachine:
    cpu_cores: int = 8
    gpus: tuple[Any, ...] = ()


@dataclass
class Case:
    """A run of a job with fake ranks."""

    directory: Path
    job: str
    scripts: Sequence[Script] | Callable[[LaunchConfig], Script]
    said: list[str] = field(default_factory=list)
    clock: FakeClock = field(default_factory=FakeClock)
    broken: dict[str, BaseException] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.directory.mkdir(exist_ok=True)
        size = "" if "budget:" in self.job or "steps:" in self.job else "steps: {rounds: 6, launches: 1}\n"
        text = f"workload: gpt\nglobal_batch: 8\ndevices: cpu:2\n{size}{self.job}"
        if "script:" in self.job:
            (self.directory / "train.py").write_text("")
            text = f"devices: cpu:2\n{self.job}"
        spec = load_text(text, "job.yaml", (), self.directory)
        machine: Any = FakeMachine()
        self.plan = build_plan(spec, machine)
        self.run = RunDir(self.directory / "run")
        write_json(self.run.plan, self.plan)
        scripts = self.scripts if callable(self.scripts) else list(self.scripts)
        self.ranks = FakeRanks(self.run, self.clock, scripts, **self.broken)  # type: ignore[arg-type]
        self.session = Session(
            starter=Starter(self.plan, spec, self.run, self.directory, machine),
            pools=self.ranks,
            on_event=lambda *_: None,
            reporter=Reporter(self.run, self.said.append),
            relay=Relay(self.said.append),
            clock=self.clock,
        )

    def fails(self) -> GpurunError:
        with pytest.raises(GpurunError) as caught:
            self.session.execute()
        return caught.value

    def done(self) -> "Case":
        self.session.execute()
        return self

    def status(self, variant: str) -> VariantStatus:
        status = self.run.read_status(variant)
        assert status is not None
        return status

    def statuses(self) -> list[str | None]:
        found = [self.run.read_status(variant.id) for variant in self.plan.variants]
        return [status.status if status else None for status in found]


def stage(name: Any, variant: str | None = None) -> Event:
    return Event(0, name, variant)


def exits(*codes: int) -> list[tuple[float, Exit]]:
    return [(3.0, Exit(rank, 100 + rank, code, 0)) for rank, code in enumerate(codes)]


def record(rank: int, error: str, at: str, variant: str | None = None) -> FailureRecord:
    kind: Any = "user" if error == ParamsError.__name__ else "exception"
    return FailureRecord(0, rank, variant, at, kind, error, "no luck", "", False)


WELL: Script = [(1.0, stage("build")), (2.0, stage("round", EVEN)), (3.0, stage("done")), *exits(0, 0)]
KILLED: Script = [(2.0, stage("round", SPLIT)), *exits(0, -9)[1:]]


def test_a_launch_that_ends_well_leaves_its_variants_measured(tmp_path: Path) -> None:
    case = Case(tmp_path, SPLITS, [WELL]).done()
    assert case.ranks.log == ["start 01-ddp-2", "stop 01-ddp-2"]
    assert case.statuses() == ["ok", "ok"]
    assert case.run.comparison.exists()
    assert not case.run.control("01-ddp-2").exists()


@pytest.mark.parametrize("code", [-9, -6, 9])
def test_a_rank_that_dies_silently_costs_the_variant_that_it_ran(tmp_path: Path, code: int) -> None:
    """Without communication rank 0 is in the next variant's block by then."""
    script: Script = [
        (1.0, OfRank(1, stage("round", EVEN))),
        (1.0, stage("round", EVEN)),
        (2.0, stage("round", SPLIT)),
        *exits(0, code)[1:],
    ]
    case = Case(tmp_path, SPLITS, [script, WELL]).done()
    assert case.statuses() == ["failed", "ok"]
    assert f"during round of {EVEN}" in "\n".join(case.said)


def test_other_load_is_reported_once_while_the_run_goes_on(tmp_path: Path) -> None:
    """At the end it is too late to stop what else runs."""
    case = Case(tmp_path, SPLITS, [])

    def blocks() -> None:
        records = [
            StepRecord("01-ddp-2", number, 0, number, "timed", 10**8, {}, None, 28_100_000, others_ns=10**8)
            for number in (1, 2, 3)
        ]
        append_lines(case.run.steps(EVEN, 1), records)

    def ended() -> None:
        assert case.said[-1].startswith(
            "So far rank 1 of ddp 4/4 waited for a free core in 28.1 % of its step. "
        )

    round_ = replace(stage("round", EVEN), round=3)
    events: Script = [(1.0, round_), (2.0, blocks), (5.0, round_), (9.0, ended), (9.0, round_)]
    case.ranks.scripts = [[*events, (9.5, stage("done")), *exits(0, 0)]]
    case.done()
    assert sum("free core" in text for text in case.said) == 1


def test_a_run_whose_directory_is_removed_ends_with_a_sentence(tmp_path: Path) -> None:
    removed: Script = [(1.0, Removed(tmp_path / "run")), (2.0, stage("round", SPLIT))]
    case = Case(tmp_path, SPLITS, [removed])
    assert "was removed while the run was in progress" in str(case.fails())
    assert case.ranks.log == ["start 01-ddp-2", "stop 01-ddp-2"]


def test_events_that_someone_removes_and_damaged_lines_end_no_run(tmp_path: Path) -> None:
    case = Case(tmp_path, SPLITS, [])
    attempt = RunningAttempt(case.session.starter, case.plan.launches[0], 1, case.ranks, case.session.relay)
    path = case.run.events(attempt.name)
    append_lines(path, [stage("build"), stage("round", EVEN)])
    assert len(attempt.new_events()) == 2
    path.unlink()
    assert attempt.new_events() == ()
    path.write_bytes(b'{"time_ns": 1, "sta')
    append_lines(path, [stage("round", EVEN), stage("round", SPLIT)])
    assert [event.variant for event in attempt.new_events()] == [EVEN, SPLIT]


@pytest.mark.parametrize(
    "job",
    [
        SPLITS,
        "script: train.py\ncompare: {args: [[--width, 64], [--width, 128]]}\n",
        "script: train.py\ncompare: {env: [{A: 1}, {A: 2}]}\n",
        "compare: {split: [even, [6, 2]], params: [{layers: 1}, {layers: 2}]}\n",
    ],
)
def test_a_run_is_resumed_by_the_job_that_it_was_made_from(tmp_path: Path, job: str) -> None:
    case = Case(tmp_path, job, [])
    assert resume_run(case.run.path, case.plan, case.said.append).path == case.run.path
    assert case.said == []


TORCH = ({"torch": "2.7.0", "Python": "3.11.9"}, {"torch": "2.8.0", "Python": "3.11.9"})


def with_step(launch: LaunchConfig, run: RunDir) -> Script:
    """The launch ends well, with a step of each of its variants."""

    def steps() -> None:
        for variant in launch.variants:
            record = StepRecord(launch.launch, 1, 0, 1, "timed", 10**8, {}, None, 0)
            append_lines(run.steps(variant.id, 0), [record])

    return [(1.0, steps), (3.0, stage("done")), *exits(*[0] * launch.world_size)]


def test_an_incomplete_pair_of_launches_is_measured_anew_with_other_software(tmp_path: Path) -> None:
    """The second pair, `03-dp-2` and `04-ddp-2`, which was interrupted in its second half."""
    cases = [Case(tmp_path, f"{STRATEGIES}steps: {{rounds: 3, launches: 2}}\n", []) for _ in TORCH]
    ended = iter((True, True, True, False))
    first, second = cases
    first.ranks.scripts = lambda one: with_step(one, first.run) if next(ended) else [(1.0, CTRL_C)]
    second.ranks.scripts = lambda one: with_step(one, second.run)
    for case, software in zip(cases, TORCH, strict=True):
        case.session.starter = replace(case.session.starter, software=software)
    with pytest.raises(Interrupted):
        first.session.execute()
    replaced = [replace_other_software(first.run, first.plan, one) for one in (*TORCH, TORCH[1])]
    assert replaced == [(), ("03-dp-2", "04-ddp-2"), ()]
    comparison = second.session.execute()
    assert [step.launch for step in second.run.read_steps("dp-2-even")[0]] == ["02-dp-2", "03-dp-2~2"]
    said = (
        "The software has changed during this run: 2 launches with torch 2.7.0, 2 launches with torch 2.8.0"
    )
    assert f"{said}." in comparison.notes


def test_of_what_ran_out_of_memory_only_what_the_kernel_killed_is_tried_again(tmp_path: Path) -> None:
    killed = replace(exits(0, -9)[1][1], oom_killed=True)
    script: Script = [(1.0, stage("round", SPLIT)), (1.0, OfRank(1, stage("round", SPLIT))), (2.0, killed)]
    too_large = replace(record(0, "OutOfMemoryError", "round", EVEN), kind="oom")
    case = Case(tmp_path, SPLITS, [script, [(1.0, too_large), *exits(1, 1)]]).done()
    assert case.statuses() == ["oom", "oom"]
    resume_run(case.run.path, case.plan, case.said.append)
    assert case.statuses() == ["oom", None]
    assert case.said[-1] == f"not tried again, since out of memory: {EVEN}"


def test_what_only_later_ranks_need_is_imported_for_them(tmp_path: Path) -> None:
    """While the first ones build, which are not kept waiting; a single launch needs nothing more."""
    assert Case(tmp_path / "one", SPLITS, [WELL]).done().ranks.preloads == []
    assert Case(tmp_path / "two", STRATEGIES, [WELL, WELL[:-1]]).done().ranks.preloads == ["after 01-ddp-2"]
    assert Case(tmp_path / "again", SPLITS, [KILLED, WELL]).done().ranks.preloads == ["after 01-ddp-2"]


def test_an_error_before_the_first_launch_has_nothing_to_stop() -> None:
    state, action = decisions.begin((0,), Limits(60.0, None, False, 0, False))
    assert action == do.ReadRemaining(0)
    assert decisions.fail(state, CTRL_C)[1] == do.Finish(CTRL_C)


def test_a_failure_costs_only_the_variant_that_caused_it(tmp_path: Path) -> None:
    case = Case(tmp_path, SPLITS, [KILLED, WELL]).done()
    assert case.ranks.log == ["start 01-ddp-2", "stop 01-ddp-2", "start 01-ddp-2~2", "stop 01-ddp-2~2"]
    assert case.statuses() == ["ok", "failed"]
    assert case.status(SPLIT).reason == "rank 1 was killed by SIGKILL"
    assert case.status(SPLIT).log == "launches/01-ddp-2/log/rank1.log"
    assert case.clock.passed_s == pytest.approx(3 + 0.6 + 3, abs=0.5)


def test_a_rank_that_lost_its_peer_is_not_the_cause(tmp_path: Path) -> None:
    script: Script = [
        (2.0, stage("round", SPLIT)),
        (2.9, record(1, "ValueError", "round", SPLIT)),
        *exits(1, 1),
    ]
    lost = replace(record(0, "RuntimeError", "round", SPLIT), secondary=True)
    case = Case(tmp_path, SPLITS, [[*script[:1], (2.8, lost), *script[1:]], WELL]).done()
    assert case.status(SPLIT).reason == "rank 1 raised ValueError: no luck"


def test_a_rank_that_is_killed_while_devices_are_measured_ended_there(tmp_path: Path) -> None:
    """All ranks measure at once; in other stages the killed one may have been elsewhere."""
    for at, shown in (("balance", True), ("round", False)):
        case = Case(tmp_path / at, SPLITS, [[(1.0, stage(at, SPLIT)), *exits(0, -9)[1:]], WELL]).done()
        assert (f"during balance of {SPLIT}" in case.said[0]) is shown
        assert case.statuses() == ["ok", "failed"]


def test_a_variant_that_takes_too_long_is_stopped(tmp_path: Path) -> None:
    case = Case(tmp_path, f"{SPLITS}timeout: 5\n", [[(1.0, stage("round", SPLIT))], WELL]).done()
    assert case.statuses() == ["ok", "timeout"]
    assert case.status(SPLIT).reason == "took longer than 5 s"
    assert case.said == [
        f"{SPLIT}: took longer than 5 s\nstacks of all ranks: {case.run.hang('01-ddp-2')}\n"
        f"log: {case.run.log('01-ddp-2', 0)}"
    ]
    assert case.clock.passed_s == pytest.approx(1 + 5 + 3, abs=0.5)


def test_a_variants_time_is_that_of_all_its_rounds(tmp_path: Path) -> None:
    rounds = [(float(at), stage("round", (EVEN, SPLIT)[at % 2])) for at in range(20)]
    case = Case(tmp_path, f"{SPLITS}timeout: 5\n", [rounds, WELL, WELL]).done()
    assert "timeout" in case.statuses()
    assert case.clock.passed_s < 9.5 + 6.5


def test_a_start_has_a_minute_whatever_a_variant_may_take(tmp_path: Path) -> None:
    case = Case(tmp_path, f"{SPLITS}timeout: 5\n", [[(1.0, stage("build"))]]).done()
    assert case.statuses() == ["timeout", "timeout"]
    assert case.status(EVEN).reason == "took longer than 60 s"


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ([(1.0, stage("round", SPLIT)), (2.0, (4, 4))], "no step completed for 30 s"),
        ([(1.0, stage("balance", SPLIT)), (2.0, (0, 0))],
         "no step completed for 30 s while its split was being found"),
    ],
)  # fmt: skip
def test_ranks_that_complete_no_step_are_stopped(tmp_path: Path, script: Script, reason: str) -> None:
    case = Case(tmp_path, f"{SPLITS}hang_timeout: 30\n", [script, WELL]).done()
    assert case.status(SPLIT).status == "timeout"
    assert case.status(SPLIT).reason == reason
    assert case.clock.passed_s == pytest.approx(2 + 30 + 3, abs=1.5)


def test_a_hang_that_is_only_reported_is_reported_once_until_a_step_is_completed(tmp_path: Path) -> None:
    steps = [(2.0, (4, 4)), (50.0, (5, 5))]
    script: Script = [(1.0, stage("round", SPLIT)), *steps, (100.0, stage("done")), (100.0, Exit(0, 1, 0, 0)),
              (100.0, Exit(1, 2, 0, 0))]  # fmt: skip
    case = Case(tmp_path, f"{SPLITS}hang_timeout: 20\non_hang: continue\n", [script]).done()
    assert case.statuses() == ["ok", "ok"]
    assert [text.partition("\n")[0] for text in case.said] == [f"{SPLIT}: no step completed for 20 s"] * 2


def test_nothing_hangs_before_the_ranks_exist(tmp_path: Path) -> None:
    late: Script = [(at_s + 50.0, what) for at_s, what in WELL]
    assert Case(tmp_path, f"{SPLITS}hang_timeout: 10\n", [late]).done().statuses() == ["ok", "ok"]


def test_transient_failures_are_tried_again_after_pauses_that_double(tmp_path: Path) -> None:
    case = Case(tmp_path, f"{SPLITS}restarts: 3\n", [KILLED, KILLED, KILLED, WELL]).done()
    assert case.clock.slept_s == [1, 2, 4]
    assert case.statuses() == ["ok", "ok"]
    assert [restart.launch for restart in case.run.read_restarts()] == [
        "01-ddp-2", "01-ddp-2~2", "01-ddp-2~3",
    ]  # fmt: skip
    assert "restart 2 of 3 of 01-ddp-2 in 2 s" in case.said


def test_after_the_last_restart_the_variant_is_given_up(tmp_path: Path) -> None:
    case = Case(tmp_path, f"{SPLITS}restarts: 1\n", [KILLED, KILLED, WELL]).done()
    assert case.clock.slept_s == [1]
    assert case.statuses() == ["ok", "failed"]


def test_a_timeout_is_tried_again_and_a_mistake_in_the_program_is_not(tmp_path: Path) -> None:
    late: Script = [(1.0, stage("round", SPLIT))]
    wrong: Script = [(2.0, record(1, "NameError", "round", SPLIT)), *exits(1, 1)]
    case = Case(tmp_path, f"{SPLITS}restarts: 9\ntimeout: 5\n", [late, wrong, WELL]).done()
    assert case.clock.slept_s == [1]
    assert case.statuses() == ["ok", "failed"]


def test_the_same_failure_in_building_the_model_is_not_tried_by_other_launches(tmp_path: Path) -> None:
    wrong: Script = [(1.0, stage("build")), (2.0, record(0, "NameError", "build")), *exits(1, 1)]
    case = Case(tmp_path, STRATEGIES, [wrong]).done()
    assert case.ranks.log == ["start 01-ddp-2", "stop 01-ddp-2"]
    assert case.statuses() == ["failed", "failed"]
    assert case.said[-1].startswith("1 other variant would build the same model")
    assert case.session.mistake is None


def test_other_failures_are_no_reason_to_skip_other_launches(tmp_path: Path) -> None:
    wrong: Script = [(1.0, stage("build")), (2.0, record(0, "RuntimeError", "build")), *exits(1, 1)]
    well = [*WELL[:-1]]  # one process: `dp`
    case = Case(tmp_path, STRATEGIES, [wrong, well]).done()
    assert case.statuses() == ["failed", "ok"]


def test_a_mistake_in_the_job_that_only_building_shows_is_the_outcome(tmp_path: Path) -> None:
    wrong: Script = [(1.0, stage("build")), (2.0, record(0, ParamsError.__name__, "build")), *exits(1, 1)]
    case = Case(tmp_path, STRATEGIES, [wrong])
    error = finish(case.session).error
    assert isinstance(error, ParamsError)
    assert str(error) == "no luck"


def test_a_rank_that_leaves_early_is_waited_for_no_longer_than_seconds(tmp_path: Path) -> None:
    case = Case(tmp_path, SPLITS, [[(1.0, stage("round", SPLIT)), *exits(0)], WELL]).done()
    assert case.status(SPLIT).reason == "rank 0 ended with exit code 0: rank 1 still waited for it"
    assert case.clock.passed_s == pytest.approx(3 + 8 + 3, abs=0.5)


def test_the_last_rank_of_a_program_may_take_its_time(tmp_path: Path) -> None:
    script: Script = [*exits(0), (500.0, Exit(1, 2, 0, 0))]
    case = Case(tmp_path, "script: train.py\n", [script]).done()
    assert case.statuses() == ["ok"]


def test_a_program_that_saves_and_leaves_when_it_is_late_is_not_done(tmp_path: Path) -> None:
    case = Case(tmp_path, "script: train.py\ntimeout: 20\n", [[]])
    case.ranks.stop = lambda grace_s: case.ranks._exits.extend(e for _, e in exits(0, 0))  # type: ignore[method-assign]
    assert case.done().statuses() == ["timeout"]
    assert [event.stage for event in case.run.read_events("01-script-2")] == ["start"]


def test_a_full_disk_ends_the_run(tmp_path: Path) -> None:
    case = Case(tmp_path, STRATEGIES, [[(1.0, stage("round", EVEN)), *exits(0, 74)[1:]]])
    error = case.fails()
    assert isinstance(error, MachineError)
    assert f"can't write to {case.run.path}: the disk is full" in str(error)
    assert f"log: {case.run.log('01-ddp-2', 1)}" in str(error)


CTRL_C = Interrupted("Ctrl-C")


@pytest.mark.parametrize("at", ["build", "round", "done"])
def test_ctrl_c_stops_the_ranks_and_keeps_what_was_measured(tmp_path: Path, at: str) -> None:
    before = [line for line in WELL if isinstance(line[1], Event) and line[1].stage != at]
    case = Case(tmp_path, STRATEGIES, [[*before, (3.0, CTRL_C)]])
    finished = finish(case.session)
    assert case.ranks.log == ["start 01-ddp-2", "stop 01-ddp-2"]
    assert str(finished.error) == "interrupted by Ctrl-C; what was measured before is kept"
    assert case.said[0].startswith("Ctrl-C: the ranks are asked to end, and killed after ")
    assert case.run.comparison.exists()
    assert not case.run.control("01-ddp-2").exists()


def test_ctrl_c_while_ranks_are_started_stops_them(tmp_path: Path) -> None:
    case = Case(tmp_path, SPLITS, [], broken={"breaks_start": CTRL_C})
    assert case.fails() is CTRL_C
    assert case.ranks.log == ["start 01-ddp-2", "stop 01-ddp-2"]


def test_ctrl_c_in_the_pause_before_a_restart_has_nothing_to_stop(tmp_path: Path) -> None:
    clock = FakeClock(breaks_sleep=CTRL_C)
    case = Case(tmp_path, f"{SPLITS}restarts: 3\n", [KILLED], clock=clock)
    assert case.fails() is CTRL_C
    assert case.ranks.log == ["start 01-ddp-2", "stop 01-ddp-2"]
    assert case.said[-1].startswith("restart 1 of 3")


def test_ctrl_c_while_ranks_are_stopped_is_not_lost(tmp_path: Path) -> None:
    case = Case(tmp_path, SPLITS, [WELL], broken={"breaks_stop": CTRL_C})
    assert case.fails() is CTRL_C
    assert not case.run.control("01-ddp-2").exists()


def test_the_loss_of_a_node_that_shows_while_ranks_are_stopped_is_the_error(tmp_path: Path) -> None:
    lost = NodesError("node 1 is gone")
    case = Case(tmp_path, SPLITS, [[(1.0, MachineError("odd"))]], broken={"breaks_stop": lost})
    assert case.fails() is lost


def test_a_bug_of_ours_stops_the_ranks_too(tmp_path: Path) -> None:
    case = Case(tmp_path, SPLITS, [[(1.0, ZeroDivisionError())]])
    with pytest.raises(ZeroDivisionError):
        case.session.execute()
    assert case.ranks.log == ["start 01-ddp-2", "stop 01-ddp-2"]


def test_a_resumed_run_does_only_what_is_missing(tmp_path: Path) -> None:
    first = Case(tmp_path, STRATEGIES, [WELL, [(1.0, CTRL_C)]])
    assert first.fails() is CTRL_C
    second = Case(tmp_path, STRATEGIES, [[*WELL[:-1]]]).done()
    assert second.ranks.log == ["start 02-dp-2~2", "stop 02-dp-2~2"]
    assert second.statuses() == ["ok", "ok"]
    assert Case(tmp_path, STRATEGIES, []).done().ranks.log == []


FOUR = "profile: {steps: 0}\ncompare: {strategy: [ddp, dp], split: [even, [6, 2]]}\n"
MS = 1_000_000


def ranks_that_take(run: RunDir, step_ms: Mapping[str, float]) -> Callable[[LaunchConfig], Script]:
    """Ranks that measure each variant with about this step, in blocks of 0.2 s, after 1 s of building.

    Launches scatter by 1 %, rounds by 1 %.
    """
    noise = random.Random(1)
    shifts: dict[tuple[str, str], float] = {}

    def measure(config: LaunchConfig, variant: str, round_: int, world: int) -> Callable[[], None]:
        def write() -> None:
            drift = shifts[config.launch, variant] + noise.gauss(0, 0.01)
            kinds: list[Any] = ["timed", *(["aa"] if variant == config.baseline else [])]
            for kind, rank in product(kinds, range(world)):
                ns = round(step_ms[variant] * MS * (1 + drift + noise.gauss(0, 0.01)))
                record = StepRecord(config.launch, round_, 0, round_, kind, ns, {}, None)
                append_lines(run.steps(variant, rank), [record])

        return write

    def script(config: LaunchConfig) -> Script:
        world = config.world_size
        shifts.update({(config.launch, variant.id): noise.gauss(0, 0.01) for variant in config.variants})
        lines: list[Any] = [(0.0, stage("build"))]
        at_s = 1.0
        for round_ in range(1, config.rounds + 1):
            for variant in config.variants:
                if round_ <= (variant.rounds or config.rounds):
                    lines += [
                        (at_s, stage("round", variant.id)),
                        (at_s, measure(config, variant.id, round_, world)),
                    ]
                    at_s += 0.2
        ends = [(at_s, Exit(rank, 100 + rank, 0, 0)) for rank in range(world)]
        return [*lines, (at_s, stage("done")), *ends]

    return script


def with_budget(directory: Path, step_ms: Mapping[str, float], budget_s: int = 100) -> Case:
    return Case(
        directory, f"budget: {budget_s}s\n{FOUR}", ranks_that_take(RunDir(directory / "run"), step_ms)
    )


CLEAR = {"ddp-2-even": 100.0, "ddp-2-6-2": 110.0, "dp-2-even": 200.0, "dp-2-6-2": 300.0}
CLOSE = {**CLEAR, "ddp-2-6-2": 100.2}


def configs(case: Case) -> list[LaunchConfig]:
    paths = sorted(case.run.path.glob("launches/*/launch.json"))
    return [read_json(path, LaunchConfig) for path in paths]


def test_a_run_ends_when_all_is_decided(tmp_path: Path) -> None:
    case = with_budget(tmp_path, CLEAR).done()
    assert [look.launches for look in case.run.read_looks()] == [6]
    assert len(configs(case)) == 2 * 6
    comparison = read_json(case.run.comparison, Comparison)
    assert comparison.fastest == EVEN
    assert comparison.complete
    assert case.clock.passed_s < 60


def test_clear_losers_get_fewer_rounds_and_leave_when_that_is_established(tmp_path: Path) -> None:
    case = with_budget(tmp_path, CLOSE).done()
    first, *_, last = configs(case)
    assert [variant.rounds for variant in first.variants] == [None, None]
    dp = [config for config in configs(case) if config.strategy == "dp"]
    assert [(dp[0].rounds, len(dp[0].variants)), (dp[-1].rounds, len(dp))] == [(3, 2), (1, 6)]
    assert last.strategy == "ddp"
    assert len(configs(case)) > 2 * 6


def test_a_spent_budget_leaves_open_what_it_can_not_decide(tmp_path: Path) -> None:
    case = with_budget(tmp_path, CLOSE, budget_s=45).done()
    assert case.run.read_looks()[-1].fraction == 1.0
    assert 35 < case.clock.passed_s <= 45
    comparison = read_json(case.run.comparison, Comparison)
    assert comparison.complete
    assert comparison.fastest is None
    (open_,) = comparison.open
    assert {open_.variant, comparison.leader} == {EVEN, SPLIT}
    assert " is slower than the fastest is still open" in comparison.notes[-1]


@pytest.mark.parametrize(
    ("late_s", "launches"),
    [
        ({}, 22),
        ({"01-ddp-2": 10.0}, 18),  # what the first launch takes is a part of the budget
        ({"01-ddp-2": 20.0}, 2),  # another one may take as long
        ({"04-ddp-2": 5.0}, 21),
        ({"07-dp-2": 30.0}, 7),  # the other launch of its repetition isn't begun
    ],
)
def test_no_launch_begins_that_does_not_fit_in_the_budget(
    tmp_path: Path, late_s: dict[str, float], launches: int
) -> None:
    case = with_budget(tmp_path, CLOSE, budget_s=45)
    play = case.ranks.scripts
    assert callable(play)

    def late(config: LaunchConfig) -> Script:
        (at_s, first), *rest = play(config)
        extra_s = late_s.get(config.launch, 0.0)
        return [(at_s, first), *((at_s + extra_s, what) for at_s, what in rest)]

    case.ranks.scripts = late
    comparison = read_json(case.done().run.comparison, Comparison)
    assert (len(configs(case)), case.clock.passed_s <= 45) == (launches, True)
    assert comparison.complete
    (spent,) = (note for note in comparison.notes if "of the budget" in note)
    assert spent.startswith(f"{launches} launches took ")
    assert spent.endswith("rounds 49 %, start-up 49 %.") or late_s


def test_a_budget_for_less_than_two_launches_measures_every_variant_once(tmp_path: Path) -> None:
    case = with_budget(tmp_path, CLEAR, budget_s=2).done()
    assert len(configs(case)) == 2
    assert case.run.read_looks() == (Look(1, 1.0),)
    assert case.statuses() == ["ok"] * 4


def test_an_interrupted_run_with_a_budget_goes_on_where_it_was(tmp_path: Path) -> None:
    first = with_budget(tmp_path, CLEAR)
    play = first.ranks.scripts
    assert callable(play)

    def until_third(config: LaunchConfig) -> Script:
        return [(1.0, CTRL_C)] if config.launch == "03-dp-2" else play(config)

    first.ranks.scripts = until_third
    assert first.fails() is CTRL_C
    assert read_json(first.run.comparison, Comparison).complete is False
    second = with_budget(tmp_path, CLEAR).done()
    assert second.ranks.log[0] == "start 03-dp-2~2"
    assert [look.launches for look in second.run.read_looks()] == [6]
    assert read_json(second.run.comparison, Comparison).fastest == EVEN
    assert with_budget(tmp_path, CLEAR).done().ranks.log == []


def test_a_run_of_another_job_is_refused_with_what_differs() -> None:
    def plan_of(text: str) -> Plan:
        machine: Any = FakeMachine()
        text = f"workload: gpt\nglobal_batch: 8\ndevices: cpu:2\n{text}"
        return build_plan(load_text(text, "job.yaml", (), Path()), machine)

    before = plan_of("seed: 1\n")
    assert plan_difference(before, plan_of("seed: 2\n")) == "seed of ddp-2-even was 1, and is 2 now"
    other = "the job no longer has ddp-2-even"
    assert plan_difference(before, plan_of("seed: 1\nsplit: [6, 2]\n")) == other
    assert plan_difference(before, replace(before, notes=("new",))) == "its plan has other notes"
