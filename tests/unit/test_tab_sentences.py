"""What the tab says in words."""

from dataclasses import replace
from pathlib import Path

import msgspec

from gpurun.launcher.compare.model import Comparison, Difference, RankFigures, StepTime, VariantResult
from gpurun.launcher.tensorboard_plugin.answers.sentences import explanation, headline, system_line, unsaid
from tests.known import known

COMPARISON = msgspec.json.decode(
    (Path(__file__).resolve().parents[1] / "data" / "comparison.json").read_bytes(), type=Comparison
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


def test_the_headline_is_about_the_fastest() -> None:
    base = COMPARISON.variants[0]
    best = replace(COMPARISON.variants[1], vs_baseline=Difference(-4.9, (-5.7, -4.1), "faster"))
    found = replace(COMPARISON, variants=(base, best), fastest=best.id, baseline=base.id)
    assert headline(found) == "ddp 48/16 is 4.9 % faster than ddp 32/32."
    assert headline(replace(found, variants=(base,), fastest=base.id)) == "ddp 32/32 takes 42.1 ms a step."
    unmeasured = replace(found, variants=(replace(base, step_ms=None),), fastest=None, complete=False)
    assert headline(unmeasured) == "No variant has been measured yet."
    assert headline(None) is None


def test_measured_variants_that_cannot_be_ranked_are_not_called_unmeasured() -> None:
    reason = "These splits can't be ranked: rank 1 of ddp 32/32 waited for a free core; 2 more like those."
    advice = "Stop what else runs here, or use fewer devices, then run it again."
    found = replace(COMPARISON, fastest=None, summary=f"{reason} {advice}")
    assert (headline(found), unsaid(found)) == (reason, advice)
    failed = tuple(replace(each, step_ms=None) for each in COMPARISON.variants)
    assert headline(replace(found, variants=failed, complete=True)) == "No variant could be measured."


def test_the_headline_says_what_even_the_fastest_loses() -> None:
    base = COMPARISON.variants[0]
    ranks = tuple(replace(rank, idle_ms=40.0, input_ms=40.0) for rank in with_ranks(base, (0.0, 0.0)).ranks)
    best = replace(base, ranks=ranks, step_ms=replace(known(base.step_ms), median=100.0))
    loss = "every rank waits 40.0 of 100 ms for its data: raise num_workers, or do less work per sample."
    summary = f"No split is clearly fastest: a and b can't be told apart. Even in ddp 32/32 {loss}"
    other = replace(COMPARISON.variants[1], vs_baseline=Difference(1.8, (-3.0, 4.6), "inconclusive"))
    found = replace(COMPARISON, variants=(best, other), fastest=best.id, summary=summary)
    assert headline(found) == summary
    alone = headline(replace(found, variants=(best,)))
    assert alone == f"ddp 32/32 takes 100 ms a step. In ddp 32/32 {loss}"


def test_a_baseline_that_is_fastest_is_set_against_the_next() -> None:
    base, other, last = COMPARISON.variants[:3]
    slower = replace(other, vs_baseline=Difference(13.8, (13.0, 14.6), "slower"))
    slowest = replace(last, vs_baseline=Difference(40.0, (39.0, 41.0), "slower"))
    found = replace(COMPARISON, variants=(base, slowest, slower), fastest=base.id, baseline=base.id)
    assert headline(found) == "ddp 32/32 is the fastest; the next, ddp 48/16, is 13.8 % slower."
    unclear = replace(other, vs_baseline=Difference(1.8, (-3.0, 4.6), "inconclusive"))
    text = headline(replace(found, variants=(base, slowest, unclear), summary="Fastest by median: a; b."))
    assert text == "Fastest by median: a."


def test_what_the_headline_takes_from_the_summary_is_not_said_twice() -> None:
    base, other = COMPARISON.variants[:2]
    unclear = replace(other, vs_baseline=Difference(1.8, (-3.0, 4.6), "inconclusive"))
    found = replace(COMPARISON, variants=(base, unclear), fastest=base.id, baseline=base.id)
    found = replace(found, summary="Fastest by median: a; b can't be told apart.")
    assert (headline(found), unsaid(found)) == ("Fastest by median: a.", "b can't be told apart.")
    clear = replace(found, variants=(base, replace(other, vs_baseline=Difference(9.0, (8.0, 9.9), "slower"))))
    assert unsaid(clear) is None
    assert unsaid(None) is None


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
    assert alone.endswith("worth mentioning (in traced steps; timed ones take 50.0 ms).")


def test_without_traces_nothing_is_explained() -> None:
    assert explanation(COMPARISON.variants[0], COMPARISON) is None


def test_the_system_line_says_what_ran_where() -> None:
    host = {"gpus": [{"name": "NVIDIA H200"}, {"name": "NVIDIA H200"}], "versions": {"torch": "2.13.0"}}
    assert system_line(host, COMPARISON) == "2 × NVIDIA H200 · bf16 · torch 2.13.0"
    assert system_line({"cpu_cores": 2, "cpu_model": "EPYC"}, None) == "2 × EPYC"
    assert system_line({"gpus": "none", "versions": 3}, None) == ""
