"""What the tab says in words."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from gpurun.launcher.compare.build import compare_run
from gpurun.launcher.compare.figures.ranks import ExposedComm, RankFigures, slowest_rank
from gpurun.launcher.compare.model import Comparison, StepTime, VariantResult
from gpurun.launcher.findings.finding import below_its_name, finding
from gpurun.launcher.findings.run_cases import NOTICED
from gpurun.launcher.report.metrics import timed_parts
from gpurun.launcher.report.terminal.table import phase_parts
from gpurun.launcher.rundir.files import RunDir
from gpurun.launcher.tensorboard_plugin.answers.requested import RequestedTables, TableRequest
from gpurun.launcher.tensorboard_plugin.answers.sentences import (
    ShownVariant,
    explanation,
    far_note,
    operators_said,
    step_sentence,
    system_line,
    untraced,
)
from tests.known import known
from tests.said import warnings_of
from tests.sample import COMPARISON
from tests.wording import Wording

RECORDED = Path(__file__).resolve().parents[3] / "docs/runs/gpt-splits"


def with_ranks(variant: VariantResult, waits_ms: tuple[float, float]) -> VariantResult:
    """Two ranks with traces of 100 ms, of which they wait so long."""
    ranks = tuple(
        RankFigures(
            rank=rank,
            device=f"cuda:{rank}",
            local_batch=32 + 16 * (wait_ms == 0) - 8,
            step_ms=100.0,
            phases_ms={},
            peak_gib=None,
            trace=None,
            span_ms=100.0,
            compute_ms=90.0 - wait_ms,
            exposed_transfer_ms=0.0,
            exposed_wait_ms=wait_ms,
            exposed_memcpy_ms=0.0,
            idle_ms=10.0,
            input_ms=0.0,
            host_ms=0.0,
            exposed_comm_ms=replace(variant.exposed_comm_ms, trace=wait_ms),
        )
        for rank, wait_ms in enumerate(waits_ms)
    )
    return replace(variant, ranks=ranks)


def row(name: str, self_ms: float, against_ms: float = 0.0, named: bool = True) -> dict[str, object]:
    return {
        "name": name,
        "named": named,
        "self_ms": self_ms,
        "wait_ms": 0.0 if named else self_ms / 2,
        "share_percent": 100 * self_ms / 64.3,
        "difference_ms": self_ms - against_ms,
    }


EVEN, UNEVEN = (
    replace(with_ranks(COMPARISON.variants[0], (0.0, 0.0)), step_ms=StepTime(95.0, None)),
    replace(with_ranks(COMPARISON.variants[1], (0.0, 40.0)), step_ms=StepTime(95.0, None)),
)
PHASES = {"data": 10.0, "forward": 20.0, "backward": 60.0}
UNTRACED = replace(
    EVEN,
    ranks=tuple(
        replace(rank, span_ms=None, phases_ms=PHASES, exposed_comm_ms=ExposedComm()) for rank in EVEN.ranks
    ),
    step_ms=StepTime(100.0, None),
)


SHORT = "no trace: the program ended before step 34, and steps 31 to 33 are traced"


def timed(variant: VariantResult, step_ms: float) -> VariantResult:
    return replace(variant, step_ms=StepTime(step_ms, None))


def explained(*variants: VariantResult) -> str | None:
    """Of the last one; the first is the fastest."""
    return explanation(variants[-1], replace(COMPARISON, variants=variants, leader=variants[0].id))


ROWS = [row("void at::native::add<float>(int)", 18.5, 14.0), row("collectives", 9.0, 9.0, named=False)]
OURS, OTHER = ShownVariant("ddp 34/30", 60.0), ShownVariant("ddp 32/32", 50.0)


def operators(other: ShownVariant | None = None, **changed: object) -> str:
    table = {
        "kind": "kernels",
        "ranks": [0, 1],
        "slowest_rank": 1,
        "is_straggler": False,
        "steps": 3,
        "step_ms": 64.3,
        "against_step_ms": None,
        "rest_ms": 3.0,
        "rows": ROWS,
    }
    return "\n> ".join(operators_said(table | changed, OURS, other).values())


def noticed(case: str, text: str = "") -> Comparison:
    """A comparison in which this was noticed about `EVEN`."""
    found = finding("noticed", EVEN.id, of="", case=case, found=text, variants=(EVEN.id,))
    return replace(COMPARISON, findings=(found,))


def test_sentences(snapshot: Callable[[str, str], None]) -> None:
    said = {
        "a slower variant": explained(EVEN, UNEVEN),
        "a slower variant whose timed steps are others": explained(EVEN, timed(UNEVEN, 325.0)),
        "the fastest, whose timed steps are others": explained(timed(EVEN, 50.0)),
        "a step": step_sentence(EVEN),
        "a step whose timed ones are others": step_sentence(timed(EVEN, 50.0)),
        "the same, in a note": far_note(EVEN, noticed("traced-far")),
        "a step as traced": far_note(EVEN, COMPARISON),
        "a step without a trace": step_sentence(UNTRACED),
        "a step without ranks": step_sentence(replace(UNTRACED, ranks=())),
        "no step": step_sentence(replace(UNTRACED, step_ms=None)),
        "a program that ended before its trace": untraced(EVEN, noticed("recorded", SHORT)),
        "a variant without such a warning": untraced(EVEN, COMPARISON),
        "operators": operators(),
        "operators, compared": operators(OTHER, against_step_ms=59.8),
        "operators side by side": operators(step_ms=9.0),
        "operators of an idle device": operators(rest_ms=40.0),
        "operators that wait": operators(rows=[row("a", 1.0), ROWS[1]]),
        "operators without names": operators(rows=ROWS[1:]),
        "operators without times": operators(rows=[row("a", 0.0)]),
        "operators of a trace without steps": operators(steps=0),
        "operators of traces without steps, compared": operators(OTHER, steps=0, against_step_ms=59.8),
    }
    snapshot("tab-sentences.txt", "\n".join(f"{name}\n> {text}\n" for name, text in said.items()))


def test_a_timed_step_is_divided_alike_in_terminal_and_tab() -> None:
    """A rank that waits does so within a phase: nothing of it is idle."""
    parts = timed_parts(UNTRACED.ranks[0], 95.0)
    assert {name: round(ms, 6) for name, ms in parts.items() if ms} == {
        "input": round(950 / 90, 6),
        "forward": round(1900 / 90, 6),
        "backward": round(5700 / 90, 6),
    }
    assert sum(timed_parts(UNTRACED.ranks[0], None).values()) == 90.0
    for step_ms in (100.0, 95.0, 200.0):
        timed_variant = replace(UNTRACED, step_ms=StepTime(step_ms))
        slowest = known(slowest_rank(UNTRACED.ranks))
        drawn = {part.label.replace(" ", "_"): part.ms for part in phase_parts(timed_variant)}
        assert drawn == {name: ms for name, ms in timed_parts(slowest, step_ms).items() if ms}
        assert sum(drawn.values()) == pytest.approx(step_ms)


def test_without_traces_nothing_is_explained() -> None:
    assert explanation(COMPARISON.variants[0], COMPARISON) is None


def test_the_system_line_says_what_ran_where(wording: Wording) -> None:
    host = {"gpus": [{"name": "NVIDIA H200"}, {"name": "NVIDIA H200"}], "versions": {"torch": "2.13.0"}}
    wording(system_line(host, COMPARISON))
    assert system_line({"cpu_cores": 2, "cpu_model": "EPYC"}, None) == "2 × EPYC"
    assert system_line({"gpus": "none", "versions": 3}, None) == ""


def test_a_rank_that_is_left_out_has_no_table_of_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables, nothing = RequestedTables(), cast(Any, None)
    monkeypatch.setattr(tables._made, "get", lambda *_: tmp_path / "tables-4.json")
    said = tables.get(nothing, nothing, TableRequest("kernels", 1, 4))
    assert said == "of the traces with step 4, those of rank 1 are left out"


def test_the_tab_and_the_report_warn_of_the_same_traced_steps(tmp_path: Path) -> None:
    run = RunDir(shutil.copytree(RECORDED, tmp_path / RECORDED.name))
    comparison = compare_run(run)
    noted = [variant.id for variant in comparison.variants if far_note(variant, comparison)]
    said = [each.id for each in comparison.variants if NOTICED["traced-far"] in warnings_of(comparison, each)]
    assert noted == said != []


def test_the_tab_has_the_cause_of_the_report(tmp_path: Path) -> None:
    run = RunDir(shutil.copytree(RECORDED, tmp_path / RECORDED.name))
    comparison = compare_run(run)
    for variant in comparison.variants:
        about = (each for each in comparison.findings if each.variant == variant.id)
        causes = [below_its_name(each).sentence for each in about if each.level == "cause"]
        assert not causes or explanation(variant, comparison) in causes
