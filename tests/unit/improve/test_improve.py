"""How a search goes on from what its runs say; the runs are stand-ins with known times."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from gpurun.launcher.compare.model import Difference, StepTime
from gpurun.launcher.errors import SpecError
from gpurun.launcher.improve.improve import gain_of, improved, shares_of
from gpurun.launcher.improve.stages import Search, Set
from gpurun.launcher.inspect.stacks import file_hash
from gpurun.launcher.rundir.improvement import Improvement, RemedyVerdict
from gpurun.launcher.rundir.records import CallSite, Observed

FILE = """\
loader = DataLoader(data)
model = DistributedDataParallel(net, find_unused_parameters=True)
optimizer = AdamW(model.parameters())
"""
LOSSES = (2.0, 1.5, 1.25, 1.0, 0.9, 0.8)
OTHERS = (2.1, 1.6, 1.3, 1.1, 1.0, 0.9)
WORKERS, UNUSED, FUSED = (
    "DataLoader(num_workers=2, persistent_workers=True)",
    "DistributedDataParallel(find_unused_parameters=False)",
    "AdamW(fused=True)",
)


@dataclass
class StandIn:
    """The program: what each remedy changes, by its code."""

    times: Mapping[str, float] = field(default_factory=dict)
    """The time of a step with it, as a factor."""
    losses: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    seeded: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """Where every step has its own seed."""
    fails: Callable[[tuple[str, ...]], bool] = lambda codes: False
    writes: tuple[str, ...] = ()
    verdicts: Mapping[str, str] = field(default_factory=dict)
    """In comparisons without this remedy, where times don't decide."""
    stages: list[tuple[str, list[tuple[str, ...]]]] = field(default_factory=list)

    def ms(self, codes: tuple[str, ...]) -> float:
        found = 100.0
        for code in codes:
            found *= self.times.get(code, 1.0)
        return found


class StandInStage:
    """A run of these sets."""

    def __init__(self, program: StandIn, sets: Sequence[Set], directory: Path, is_seeded: bool) -> None:
        self.program, self.directory, self.is_seeded = program, directory, is_seeded
        self.sets = [tuple(row.code for row in chosen) for chosen in sets]
        self.rows = sets
        self.code = {"train.py": file_hash(directory / "train.py")}
        self.plan = SimpleNamespace(variants=[])
        self.comparison = SimpleNamespace(findings=(), variants=[self.of(i) for i in range(len(sets))])

    def of(self, position: int) -> Any:
        codes, base = self.sets[position], self.sets[0]
        if self.program.fails(codes):
            return SimpleNamespace(status="failed", reason="it hung", step_ms=None, vs_baseline=None)
        ms, base_ms = self.program.ms(codes), self.program.ms(base)
        percent = 100 * (ms / base_ms - 1)
        verdict = "slower" if percent >= 1 else "faster" if percent <= -1 else "same"
        left = [code for code in base if code not in codes]
        if len(left) == 1:
            verdict = self.program.verdicts.get(left[0], verdict)
        ranks = [SimpleNamespace(span_ms=100.0, input_ms=40.0, exposed_transfer_ms=5.0, exposed_wait_ms=0.0)]
        return SimpleNamespace(
            status="ok", code=self.code, reason=None, step_ms=StepTime(ms), wall_s=2.0, ranks=ranks,
            vs_baseline=Difference(percent, (percent - 1, percent + 1), cast(Any, verdict)),
        )  # fmt: skip

    def losses(self, position: int) -> list[tuple[float, ...]]:
        known = self.program.seeded if self.is_seeded else self.program.losses
        return [next((known[code] for code in self.sets[position] if code in known), LOSSES)]

    def observed(self, position: int, rank: int = 0) -> list[Observed]:
        file = str(self.directory / "train.py")
        calls = [
            CallSite("DataLoader", file, 1, True, given={"dataset": "Data"}),
            CallSite("DistributedDataParallel", file, 2, True, given={"find_unused_parameters": "True"}),
            CallSite("AdamW", file, 3, True, given={"params": "parameters"}),
        ]
        applied = {key: 1 for row in self.rows[position] for key in (*row.arguments, row.remedy.call)}
        return [
            Observed(
                tuple(replace(each, applied=applied) for each in calls),
                LOSSES,
                "float32",
                self.program.writes,
            )
        ]


class StandInSearch(Search):
    """Its stages take no time but that of their launches."""

    program: StandIn
    directory: Path

    def stage(self, name: str, sets: Sequence[Set], *overrides: str, seeds_steps: bool = False) -> Any:
        found = StandInStage(self.program, sets, self.directory, seeds_steps)
        self.program.stages.append((name, found.sets))
        self.spent_s += 2.5 * len(sets) * (6 if name.startswith("3") else 1)
        return found


def searched(program: StandIn, directory: Path, budget_s: float = 600.0, allows: bool = False) -> Improvement:
    (directory / "train.py").write_text(FILE)
    spec = SimpleNamespace(
        program="train.py", stated=(), env={}, devices=("cpu:0", "cpu:1"), hang_timeout_s=None
    )
    given = SimpleNamespace(directory=directory, overrides=())
    search = StandInSearch.__new__(StandInSearch)
    vars(search).update(
        program=program, directory=directory, given=given, spec=spec, path=directory / "found",
        machine=SimpleNamespace(cpu_cores=2, free_cores=None, gpus=()), budget_s=budget_s, spent_s=0.0,
        say=lambda text: None, launch_s=None, allows_other_random_numbers=allows,
    )  # fmt: skip
    return improved(search, Improvement(1, "train.py", budget_s), lambda now: now)


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    module = "gpurun.launcher.improve.improve"
    monkeypatch.setattr(f"{module}.replace", lambda each, **new: SimpleNamespace(**vars(each) | new)
                        if isinstance(each, SimpleNamespace) else replace(each, **new))  # fmt: skip
    monkeypatch.setattr(f"{module}.why_of", lambda first: "")
    monkeypatch.setattr(f"{module}.job_devices", lambda spec, machine: spec.devices)


def verdict(found: Improvement, code: str) -> RemedyVerdict:
    return next(each.verdict for each in found.remedies if each.code == code)


def test_what_helps_is_kept_with_what_it_gains_over_the_rest(tmp_path: Path) -> None:
    found = searched(StandIn(times={WORKERS: 0.7, FUSED: 0.9}), tmp_path)
    assert [each.code for each in found.kept] == [WORKERS, FUSED]
    assert found.gain is not None
    assert found.gain.percent == pytest.approx(-37.0)
    assert [each.percent for each in found.kept] == pytest.approx([-30.0, -10.0])
    assert "+loader = DataLoader(data, num_workers=2, persistent_workers=True)" in found.diff
    assert "+optimizer = AdamW(model.parameters(), fused=True)" in found.diff
    assert found.complete


def test_where_nothing_helps_nothing_is_compared(tmp_path: Path) -> None:
    program = StandIn()
    found = searched(program, tmp_path)
    assert (found.kept, found.gain, found.diff) == ([], None, "")
    assert not any(name.startswith("3") for name, _ in program.stages)


def test_a_remedy_without_which_the_rest_is_as_fast_is_dropped_and_the_rest_compared_anew(
    tmp_path: Path,
) -> None:
    program = StandIn(times={WORKERS: 0.7, FUSED: 0.97}, verdicts={FUSED: "same"})
    found = searched(program, tmp_path)
    assert [each.code for each in found.kept] == [WORKERS]
    assert verdict(found, FUSED) == "same"
    assert program.stages[-1] == ("3-together-2", [(WORKERS,), ()])
    assert "fused" not in found.diff


def test_a_conflict_is_a_failure_of_what_gains_least_alone(tmp_path: Path) -> None:
    program = StandIn(times={WORKERS: 0.7, FUSED: 0.9}, fails=lambda codes: {WORKERS, FUSED} <= {*codes})
    found = searched(program, tmp_path)
    assert [each.code for each in found.kept] == [WORKERS]
    assert verdict(found, FUSED) == "failed"


def test_a_file_that_is_edited_while_the_search_runs_is_left_to_its_editor(tmp_path: Path) -> None:
    """The lines of calls are those of the file that was measured."""

    def edits(codes: tuple[str, ...]) -> bool:
        if codes:
            (tmp_path / "train.py").write_text(f"import torch\n{FILE}")
        return False

    found = searched(StandIn(times={WORKERS: 0.7}, fails=edits), tmp_path)
    assert [each.code for each in found.kept] == [WORKERS]
    assert (found.diff, found.changes) == ("", ())
    assert "train.py has changed since it was measured" in found.notes


def test_what_isnt_decided_is_not_kept(tmp_path: Path) -> None:
    found = searched(StandIn(times={WORKERS: 0.9}, verdicts={WORKERS: "inconclusive"}), tmp_path)
    assert (verdict(found, WORKERS), found.gain) == ("undecided", None)


def test_a_remedy_that_trains_otherwise_is_never_kept(tmp_path: Path) -> None:
    found = searched(StandIn(times={FUSED: 0.5}, losses={FUSED: OTHERS}), tmp_path)
    assert (verdict(found, FUSED), found.kept) == ("changes numerics", [])


@pytest.mark.parametrize(
    ("seeded", "allows", "expected"),
    [(LOSSES, False, "other random numbers"), (LOSSES, True, "kept"), (OTHERS, True, "changes numerics")],
)
def test_other_random_numbers_are_shown_by_seeded_steps(
    tmp_path: Path, seeded: tuple[float, ...], allows: bool, expected: str
) -> None:
    program = StandIn(times={WORKERS: 0.7}, losses={WORKERS: OTHERS}, seeded={WORKERS: seeded})
    assert verdict(searched(program, tmp_path, allows=allows), WORKERS) == expected


def test_without_time_to_prove_anything_the_budget_that_would_do_is_named(tmp_path: Path) -> None:
    found = searched(StandIn(times={WORKERS: 0.7}), tmp_path, budget_s=40.0)
    assert (verdict(found, WORKERS), found.gain) == ("undecided", None)
    assert found.needs_s is not None
    assert found.needs_s > 40.0
    with pytest.raises(SpecError, match="too short to try anything"):
        searched(StandIn(), tmp_path, budget_s=2.0)


def test_a_gain_is_the_inverse_of_how_much_slower_the_program_is() -> None:
    gain = gain_of(Difference(100.0, (60.0, 150.0), "slower"))
    assert gain is not None
    assert gain.percent == pytest.approx(-50.0)
    assert gain.ci == pytest.approx((-60.0, -37.5))


def test_the_parts_of_a_step_are_those_of_the_rank_that_spends_most_on_each() -> None:
    ranks = [
        SimpleNamespace(span_ms=100.0, input_ms=50.0, exposed_transfer_ms=1.0, exposed_wait_ms=0.0),
        SimpleNamespace(span_ms=100.0, input_ms=0.0, exposed_transfer_ms=1.0, exposed_wait_ms=50.0),
        SimpleNamespace(span_ms=None),
    ]
    shares = shares_of(cast(Any, SimpleNamespace(ranks=ranks)))
    assert shares == {"input": 50.0, "transfer": 51.0, "work": 49.0}
