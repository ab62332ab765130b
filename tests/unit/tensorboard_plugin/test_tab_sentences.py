"""What the tab says in words."""

from dataclasses import replace
from pathlib import Path

import msgspec

from gpurun.launcher.compare.model import Comparison, ExposedComm, RankFigures, StepTime, VariantResult
from gpurun.launcher.tensorboard_plugin.answers.sentences import (
    Shown,
    explanation,
    far_note,
    operators_said,
    step_sentence,
    system_line,
    timed_parts,
)

COMPARISON = msgspec.json.decode(
    (Path(__file__).resolve().parents[2] / "data" / "comparison.json").read_bytes(), type=Comparison
)


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


def test_the_explanation_speaks_of_traced_steps_and_says_where_timed_ones_are_others() -> None:
    base, slow = COMPARISON.variants[:2]
    base, slow = with_ranks(base, (0.0, 0.0)), with_ranks(slow, (0.0, 40.0))
    for step_ms, note in ((95.0, ""), (325.0, "; timed ones take 325 ms")):
        variant = replace(slow, step_ms=StepTime(step_ms, None))
        found = replace(COMPARISON, variants=(base, variant), fastest=base.id)
        assert (
            explanation(variant, found)
            == f"Rank 1 waits 40.0 of 100 ms for rank 0's larger batch (in traced steps{note})."
        )
    fast = replace(base, step_ms=StepTime(50.0, None))
    alone = explanation(fast, replace(COMPARISON, variants=(fast,), fastest=fast.id))
    assert alone is not None
    assert alone.startswith("90.0 of 100 ms are compute")
    assert alone.endswith("is significant (in traced steps; timed ones take 50.0 ms).")


def test_a_step_is_divided_as_the_bars_are() -> None:
    base = with_ranks(COMPARISON.variants[0], (0.0, 40.0))
    traced = replace(base, step_ms=StepTime(95.0, None))
    assert step_sentence(traced) == (
        "ddp 32/32 computes for 90 % of its step; the largest other part is idle, 10.0 of 100 ms "
        "(in traced steps)."
    )
    assert far_note(traced) is None
    far = replace(base, step_ms=StepTime(50.0, None))
    assert (step_sentence(far) or "").endswith("of 100 ms (in traced steps; timed ones take 50.0 ms).")
    assert (far_note(far) or "").startswith("The traced steps of ddp 32/32 are far from the timed ones")
    phases = {"data": 10.0, "forward": 20.0, "backward": 60.0}
    timed = [
        replace(one, span_ms=None, phases_ms=phases, exposed_comm_ms=ExposedComm()) for one in base.ranks
    ]
    untraced = replace(base, ranks=tuple(timed), step_ms=StepTime(100.0, None))
    assert step_sentence(untraced) == (
        "ddp 32/32 computes for 80 % of its step; the largest other part is input, 10.0 of 100 ms."
    )
    parts = timed_parts(untraced.ranks[0], 100.0)
    assert parts == {"compute": 80.0, "transfer": 0.0, "copy": 0.0, "input": 10.0, "idle": 10.0}
    assert sum(timed_parts(untraced.ranks[0], None).values()) == 90.0
    assert step_sentence(replace(untraced, ranks=())) == "ddp 32/32 takes 100 ms a step."
    assert step_sentence(replace(untraced, step_ms=None)) is None


def row(name: str, self_ms: float, against_ms: float = 0.0, named: bool = True) -> dict[str, object]:
    return {
        "name": name,
        "named": named,
        "self_ms": self_ms,
        "wait_ms": 0.0 if named else self_ms / 2,
        "share_percent": 100 * self_ms / 64.3,
        "difference_ms": self_ms - against_ms,
    }


def test_operators_are_summed_up_in_a_sentence() -> None:
    rows = [row("void at::native::add<float>(int)", 18.5, 14.0), row("collectives", 9.0, 9.0, named=False)]
    table: dict[str, object] = {
        "kind": "kernels",
        "ranks": [0, 1],
        "slowest_rank": 1,
        "is_straggler": False,
        "steps": 3,
        "step_ms": 64.3,
        "against_step_ms": None,
        "rows": rows,
    }
    one, other = Shown("ddp 34/30", 60.0), Shown("ddp 32/32", 50.0)
    assert operators_said(table, one, None) == {
        "sentence": "ddp 34/30: native::add takes 18.5 of 64.3 ms, 29 % of the step.",
        "details": "Self time counts on the slowest rank, rank 1, mean of 3 traced steps; "
        "collectives count only their exposed part. Columns add up to the step. "
        "As timed, a step takes 60.0 ms.",
    }
    compared = operators_said(table | {"against_step_ms": 59.8}, one, other)
    assert compared["sentence"] == (
        "ddp 34/30 takes 4.50 ms more than ddp 32/32 in traced steps; native::add alone 4.50 ms."
    )
    assert compared["details"].endswith(" a step takes 60.0 ms against 50.0 ms.")
    waits = operators_said(table | {"rows": [row("a", 1.0), rows[1]]}, one, None)["sentence"]
    assert waits == "ddp 34/30: collectives take 9.00 of 64.3 ms, 14 % of the step, 4.50 ms of it waiting."
    unnamed = operators_said(table | {"rows": rows[1:]}, one, None)["sentence"]
    assert unnamed == "ddp 34/30: the trace names no kernels."
    idle = operators_said(table | {"rows": [row("a", 0.0)]}, one, None)["sentence"]
    assert idle == "ddp 34/30: no kernel takes any time in the trace."
    whole = operators_said(table | {"steps": 0}, one, None)
    assert whole["sentence"].endswith(" 29 % of the trace.")
    assert "over the whole trace, which has no steps; " in whole["details"]


def test_without_traces_nothing_is_explained() -> None:
    assert explanation(COMPARISON.variants[0], COMPARISON) is None


def test_the_system_line_says_what_ran_where() -> None:
    host = {"gpus": [{"name": "NVIDIA H200"}, {"name": "NVIDIA H200"}], "versions": {"torch": "2.13.0"}}
    assert system_line(host, COMPARISON) == "2 × NVIDIA H200 · bf16 · torch 2.13.0"
    assert system_line({"cpu_cores": 2, "cpu_model": "EPYC"}, None) == "2 × EPYC"
    assert system_line({"gpus": "none", "versions": 3}, None) == ""
