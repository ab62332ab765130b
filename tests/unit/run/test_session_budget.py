"""A run with a budget: when it ends, what it measures next, and what it leaves open."""

import random
from collections.abc import Callable, Mapping
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from gpurun.launcher.compare.model import Comparison
from gpurun.launcher.plan.rank_config import LaunchConfig
from gpurun.launcher.processes.protocol import Exit
from gpurun.launcher.run.attempts import has_ended
from gpurun.launcher.rundir.files import RunDir, append_lines, read_json, write_json
from gpurun.launcher.rundir.records import Look, MemoryPeak, StepRecord
from tests.said import notes_of
from tests.unit.run.fake_ranks import Script
from tests.unit.run.session_case import (
    CTRL_C,
    EVEN,
    SPLIT,
    Case,
    stage,
)
from tests.whole import first
from tests.wording import Wording

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
        variants = [(part, variant) for part in config.parts for variant in part.variants]
        shifts.update({(config.launch, variant.id): noise.gauss(0, 0.01) for _, variant in variants})
        lines: list[Any] = [(0.0, stage("build"))]
        at_s = 1.0
        for round_ in range(1, config.rounds + 1):
            for part, variant in variants:
                if round_ <= (variant.rounds or config.rounds):
                    lines += [
                        (at_s, stage("round", variant.id)),
                        (at_s, measure(part, variant.id, round_, part.world_size)),
                    ]
                    at_s += 0.2
        ends = [(at_s, Exit(rank, 100 + rank, 0, 0)) for rank in range(world)]
        return [*lines, (at_s, stage("done")), *ends]

    return script


def with_budget(
    directory: Path, step_ms: Mapping[str, float], budget_s: int = 100, together: str = "never"
) -> Case:
    job = f"budget: {budget_s}s\n{FOUR}steps: {{together: {together}}}\n"
    return Case(directory, job, ranks_that_take(RunDir(directory / "run"), step_ms))


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


@pytest.mark.slow
def test_strategies_that_take_turns_are_dropped_from_their_launches_too(tmp_path: Path) -> None:
    """The last ones have the ranks that they need, the first ones don't count."""
    case = with_budget(tmp_path, CLOSE, budget_s=70, together="auto")
    host = {"memory_available_gib": 8.0, "gpus": []}
    write_json(case.run.host, host)
    for variant in case.plan.variants:
        write_json(case.run.memory(variant.id, 0), MemoryPeak(parameters=1 << 20))
    case.done()
    found = configs(case)
    assert [[part.strategy for part in config.parts] for config in found[:3]] == [
        ["ddp"],
        ["dp"],
        ["ddp", "dp"],
    ]
    assert found[2].takes_turns
    assert [part.strategy for part in found[-1].parts] == ["ddp"]
    assert 55 < case.clock.passed_s <= 70
    comparison = read_json(case.run.comparison, Comparison)
    verdicts = {one.id: one.vs_baseline.verdict for one in comparison.variants if one.vs_baseline}
    assert verdicts["dp-2-even"] == verdicts["dp-2-6-2"] == "slower"
    assert {one.launches for one in comparison.variants if one.strategy == "ddp"} == {len(found) - 2}


@pytest.mark.slow
def test_clear_losers_get_fewer_rounds_and_leave_when_that_is_established(tmp_path: Path) -> None:
    case = with_budget(tmp_path, CLOSE, budget_s=70).done()
    first, *_, last = configs(case)
    assert [variant.rounds for variant in first.variants] == [None, None]
    dp = [config for config in configs(case) if config.strategy == "dp"]
    assert [(dp[0].rounds, len(dp[0].variants)), (dp[-1].rounds, len(dp))] == [(3, 2), (1, 6)]
    assert last.strategy == "ddp"
    assert len(configs(case)) > 2 * 6


def test_a_spent_budget_leaves_open_what_it_can_not_decide(tmp_path: Path, wording: Wording) -> None:
    case = with_budget(tmp_path, CLOSE, budget_s=45).done()
    assert case.run.read_looks()[-1].fraction == 1.0
    assert 35 < case.clock.passed_s <= 45
    comparison = read_json(case.run.comparison, Comparison)
    assert comparison.complete
    assert comparison.fastest is None
    (open_,) = comparison.open
    assert {open_.variant, comparison.leader} == {EVEN, SPLIT}
    (spent,) = (note for note in notes_of(comparison) if "of the budget" in note)
    wording(spent, notes_of(comparison)[-1])
    assert len(configs(case)) == 22


@pytest.mark.parametrize(
    ("late_s", "launches"),
    first(
        2,
        [
            ({"01-ddp-2": 20.0}, 2),  # another one may take as long
            ({"07-ddp-2": 30.0}, 7),  # the other launch of its repetition isn't begun
            ({"01-ddp-2": 10.0}, 18),  # what the first launch takes is a part of the budget
            ({"04-ddp-2": 5.0}, 21),
        ],
    ),
)
def test_no_launch_begins_that_does_not_fit_in_the_budget(
    tmp_path: Path, late_s: dict[str, float], launches: int
) -> None:
    case = with_budget(tmp_path, CLOSE, budget_s=45)
    play = case.ranks.scripts
    assert callable(play)

    def late(config: LaunchConfig) -> Script:
        (at_s, first), *rest = play(config)
        return [(at_s, first), *((at_s + late_s.get(config.launch, 0.0), what) for at_s, what in rest)]

    case.ranks.scripts = late
    comparison = read_json(case.done().run.comparison, Comparison)
    assert (len(configs(case)), case.clock.passed_s <= 45) == (launches, True)
    assert comparison.complete
    (spent,) = (note for note in notes_of(comparison) if "of the budget" in note)
    assert spent.startswith(f"{launches} launches took ")


def test_a_budget_for_less_than_two_launches_measures_every_variant_once(
    tmp_path: Path, wording: Wording
) -> None:
    case = with_budget(tmp_path, CLOSE, budget_s=2).done()
    wording("\n".join(notes_of(read_json(case.run.comparison, Comparison))))
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


def test_a_run_whose_budget_is_spent_begins_no_launch(tmp_path: Path) -> None:
    """The last look has spent the error, so what is measured after it would only widen the intervals."""
    case = with_budget(tmp_path, CLEAR)
    append_lines(case.run.looks, [Look(1, 1.0)])
    case.done()
    assert case.ranks.log[::2] == ["start 01-ddp-2", "start 02-dp-2"]
    assert len(configs(case)) == 2
    assert has_ended(case.run, case.plan)
