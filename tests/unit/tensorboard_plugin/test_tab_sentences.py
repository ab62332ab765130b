"""What the tab says in words."""

from dataclasses import replace
from pathlib import Path

import msgspec

from gpurun.launcher.compare.model import Comparison, RankFigures, StepTime, VariantResult
from gpurun.launcher.tensorboard_plugin.answers.sentences import explanation, system_line

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
    for step_ms, note in ((95.0, ""), (325.0, " (in traced steps; timed ones take 325 ms)")):
        variant = replace(slow, step_ms=StepTime(step_ms, None))
        found = replace(COMPARISON, variants=(base, variant), fastest=base.id)
        assert explanation(variant, found) == f"Rank 1 waits 40.0 of 100 ms for rank 0's larger batch{note}."
    fast = replace(base, step_ms=StepTime(50.0, None))
    alone = explanation(fast, replace(COMPARISON, variants=(fast,), fastest=fast.id))
    assert alone is not None
    assert alone.startswith("90.0 of 100 ms are compute")
    assert alone.endswith("is significant (in traced steps; timed ones take 50.0 ms).")


def test_without_traces_nothing_is_explained() -> None:
    assert explanation(COMPARISON.variants[0], COMPARISON) is None


def test_the_system_line_says_what_ran_where() -> None:
    host = {"gpus": [{"name": "NVIDIA H200"}, {"name": "NVIDIA H200"}], "versions": {"torch": "2.13.0"}}
    assert system_line(host, COMPARISON) == "2 × NVIDIA H200 · bf16 · torch 2.13.0"
    assert system_line({"cpu_cores": 2, "cpu_model": "EPYC"}, None) == "2 × EPYC"
    assert system_line({"gpus": "none", "versions": 3}, None) == ""
