"""Why a variant is slower: only what the figures of its ranks show."""

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gpurun.launcher.compare.build import compare_run
from gpurun.launcher.compare.figures.ranks import ExposedComm, RankFigures, disagreement, remedies_of
from gpurun.launcher.compare.model import Difference, StepTime, VariantResult
from gpurun.launcher.compare.notes import never_communicate
from gpurun.launcher.compare.variant_causes import cause as said_of
from gpurun.launcher.compare.variant_causes import largest_loss, losses, main_cause, remaining, why_slower
from gpurun.launcher.jobfile.kinds import JOB_KINDS
from gpurun.launcher.plan.model import Variant
from gpurun.launcher.rundir.files import RunDir
from gpurun.launcher.trace.model import CpuFacts, Remedy
from gpurun.launcher.units import more_speed
from tests.known import known
from tests.unit.compare.test_compare_summary import result, sentence
from tests.wording import Wording


def rank(number: int, batch: int, work_ms: float, wait_ms: float = 0.0, **parts: float) -> RankFigures:
    """A rank that computes for `work_ms`, less what `parts` take of it, and waits for `wait_ms`."""
    transfer_ms = parts.get("transfer", 0.0)
    own = {name: parts.get(name, 0.0) for name in ("memcpy", "input", "host", "one_off")}
    return RankFigures(
        rank=number,
        device=f"cpu:{number}",
        local_batch=batch,
        step_ms=None,
        phases_ms={},
        peak_gib=None,
        trace=None,
        span_ms=work_ms + wait_ms + transfer_ms,
        compute_ms=work_ms - sum(own.values()),
        exposed_transfer_ms=transfer_ms,
        exposed_wait_ms=wait_ms,
        exposed_memcpy_ms=own["memcpy"],
        idle_ms=own["input"] + own["host"] + own["one_off"],
        cpu_ms=work_ms,
        thread_cpu_ms=work_ms,
        input_ms=own["input"],
        host_ms=own["host"],
        one_off_ms=own["one_off"],
        wait_ms=wait_ms,
        transfer_ms=transfer_ms,
        exposed_comm_ms=ExposedComm(trace=wait_ms + transfer_ms),
    )


def variant(name: str, split: tuple[int, ...], step_ms: float, *ranks: RankFigures) -> VariantResult:
    return replace(result(name, split, step_ms), ranks=ranks, step_ms=StepTime(step_ms, None))


EVEN = variant("ddp-even", (32, 32), 50.9, rank(0, 32, 50.0, 0.5), rank(1, 32, 50.5))
UNEVEN = variant("ddp-48-16", (48, 16), 60.2, rank(0, 48, 60.0), rank(1, 16, 48.8, 11.2))


def why_text(slower: VariantResult, faster: VariantResult) -> str:
    loss = known(why_slower(slower, faster))
    return said_of(loss, slower).text


WRONG = {"gradient_warning": "the gradient differs"}


@pytest.mark.parametrize(
    "changes",
    [{}, {**WRONG, "gradient_error": 1.0}, {**WRONG, "gradient_error": None}],
    ids=["right", "wrong", "not compared"],
)
def test_the_sentence_says_why_and_whose_gradients_are_wrong(
    changes: dict[str, Any], wording: Wording
) -> None:
    slower = Difference(18.3, (17.2, 19.4), "slower")
    base = replace(EVEN, vs_baseline=Difference(None, None, "baseline"), **changes)
    wording(sentence([replace(UNEVEN, vs_baseline=slower), base], {("ddp-48-16", "ddp-even"): slower}))


def test_a_baseline_that_loses_says_why_too(wording: Wording) -> None:
    """Device 1 is slower: with an even split rank 0 waits for it."""
    slow = variant("ddp-even", (32, 32), 60.0, rank(0, 32, 40.0, 20.0), rank(1, 32, 60.0))
    fit = variant("ddp-40-24", (40, 24), 50.0, rank(0, 40, 50.0), rank(1, 24, 49.0, 1.0))
    faster = Difference(-16.7, (-17.0, -16.0), "faster")
    results = [
        replace(slow, vs_baseline=Difference(None, None, "baseline")),
        replace(fit, vs_baseline=faster),
    ]
    wording(sentence(results, {("ddp-40-24", "ddp-even"): faster}))


@pytest.mark.parametrize("traced_ms", [9.0, 13.4])
def test_a_gpu_waits_for_the_host_as_long_as_timed_steps_do(traced_ms: float, wording: Wording) -> None:
    """As on an H100: a trace makes the host slower, and so only the GPU's wait for it longer."""
    on_gpu = replace(
        rank(0, 16, traced_ms, host=traced_ms - 4.83), device="cuda:0", step_ms=8.52, cpu_ms=None
    )
    wording(*(each.text for each in remaining(variant("single", (16,), 8.52, on_gpu))))


@pytest.mark.parametrize(
    ("device", "remedies", "advice"),
    [
        ("cuda", (), "larger batches, torch.compile or CUDA graphs."),
        ("cuda", ("torch.compile",), "larger batches or CUDA graphs."),
        ("cuda", ("CUDA graphs",), "larger batches or torch.compile."),
        ("cuda", ("CUDA graphs", "torch.compile"), "larger batches."),
        ("cpu", (), "larger batches, fewer operators, or torch.compile."),
        ("cpu", ("torch.compile",), "larger batches, or fewer operators."),
    ],
)
def test_what_is_in_use_is_not_advised(device: str, remedies: tuple[Remedy, ...], advice: str) -> None:
    on_device = replace(rank(0, 16, 65.0, host=30.0), device=f"{device}:0", cpu=CpuFacts(remedies=remedies))
    *_, said = remaining(variant("single", (16,), 65.0, on_device))
    assert said.text == f"try {advice}".removesuffix(".")


@pytest.mark.parametrize(
    ("changes", "in_use"),
    [
        ({}, ()),
        ({"compile": True}, ("torch.compile",)),
        ({"calls": {"compile": {}}}, ("torch.compile",)),
        ({"calls": {"compile": {"disable": True}}}, ()),
        ({"calls": {"autocast": {}}}, ()),
    ],
)
def test_a_job_says_itself_whether_it_compiles(changes: dict[str, Any], in_use: tuple[Remedy, ...]) -> None:
    planned = Variant(id="v", devices=("cpu:0",), split=(8,), split_name="even", varied={}, **changes)
    assert remedies_of(planned) == in_use


@pytest.mark.parametrize("has_stacks", [False, True])
def test_stacks_are_asked_for_where_the_trace_has_none(has_stacks: bool) -> None:
    """Of a CPU whose thread isn't known to be in Python, only they say what runs."""
    facts = CpuFacts({"host": "read_all (io.py:7)"} if has_stacks else {}, has_stacks=has_stacks)
    figures = replace(rank(0, 16, 65.0, host=30.0), cpu_ms=None, thread_cpu_ms=None, cpu=facts)
    found = [each.text for each in remaining(variant("single", (16,), 65.0, figures))]
    assert ("lack Python's stacks" in found[0], len(found)) == (not has_stacks, 1 if has_stacks else 2)
    assert found[0].endswith("outside of operators, for most of it in read_all (io.py:7)") == has_stacks
    assert ("profile: {stacks: true}" in found[-1]) != has_stacks


@pytest.mark.parametrize(
    ("part", "said"),
    [
        ("gaps", "in gaps between work already launched"),
        ("unknown", "in gaps; the traces lack launches, which would show why"),
        ("other_steps", "in work of other steps alone"),
    ],
)
def test_what_isn_t_the_hosts_is_named_apart(part: str, said: str) -> None:
    """Of a GPU that also waits for the CPU, for far less."""
    times: dict[str, Any] = {f"{part}_ms": 30.0, "host_ms": 5.0}
    on_gpu = replace(rank(0, 16, 65.0), device="cuda:0", compute_ms=30.0, **times)
    found, *advice = [each.text for each in remaining(variant("single", (16,), 65.0, on_gpu))]
    assert said in found
    assert advice
    assert "larger batches" not in "".join(advice)


@pytest.mark.parametrize("part", ["input", "host"])
def test_what_all_splits_lose_is_said_of_the_fastest(part: str, wording: Wording) -> None:
    """No split is slower for it, so no difference shows it."""
    alike = [rank(i, 32, 65.0, **{part: 30.0}) for i in (0, 1)]
    fast = replace(variant("ddp-even", (32, 32), 65.0, *alike), vs_baseline=EVEN.vs_baseline)
    slow = replace(
        variant("ddp-40-24", (40, 24), 66.0, *alike), vs_baseline=Difference(1.5, (1.1, 1.9), "slower")
    )
    wording(sentence([fast, slow], {("ddp-40-24", "ddp-even"): known(slow.vs_baseline)}))
    wording(sentence([fast], {}))


@pytest.mark.parametrize(
    ("traced_ms", "timed_ms", "lost_ms"),
    [(65.0, 65.0, {"input": 12.0}), (23.6, 6.69, {"transfer": 9.5}), (23.6, 6.69, {"input": 9.5})],
)
def test_what_is_small_or_lost_by_traced_steps_alone_brings_no_advice(
    traced_ms: float, timed_ms: float, lost_ms: dict[str, float], wording: Wording
) -> None:
    """Recording makes short steps several times longer."""
    alike = [rank(i, 32, traced_ms, **lost_ms) for i in (0, 1)]
    wording(sentence([variant("ddp-even", (32, 32), timed_ms, *alike)], {}))


@pytest.mark.parametrize("part", ["transfer", "memcpy", "input", "host"])
def test_other_causes(part: str, wording: Wording) -> None:
    work_ms = 50.0 if part == "transfer" else 65.0
    slow = variant("slow", (32, 32), 65.0, *(rank(i, 32, work_ms, **{part: 15.0}) for i in (0, 1)))
    wording(why_text(slow, EVEN))


@pytest.mark.parametrize("part", ["transfer", "memcpy", "input", "host"])
def test_what_a_healthy_step_loses_too_is_distinguished(part: str, wording: Wording) -> None:
    work_ms = 50.0 if part == "transfer" else 65.0
    fast = variant("fast", (32, 32), 54.0, *(rank(i, 32, work_ms - 11.0, **{part: 4.0}) for i in (0, 1)))
    slow = variant("slow", (32, 32), 65.0, *(rank(i, 32, work_ms, **{part: 15.0}) for i in (0, 1)))
    cause = known(main_cause(slow, fast))
    assert (cause.saved_ns, cause.more_ns) == (15e6, 11e6)
    wording(known(cause).text)


@pytest.mark.parametrize("part", ["memcpy", "input", "host", "one_off"])
def test_a_rank_that_is_late_for_a_reason_of_its_own_is_no_slower_device(part: str) -> None:
    late = variant("late", (32, 32), 65.0, rank(0, 32, 50.0, 15.0), rank(1, 32, 65.0, **{part: 15.0}))
    cause = known(main_cause(late, EVEN))
    kind = {"memcpy": "copies", "host": "python"}.get(part, part)
    assert (cause.part, cause.ranks, cause.saved_ns) == (kind, (1,), 15e6)
    assert cause.text.startswith("rank 1 ")


def test_data_that_takes_longer_for_more_samples_is_the_split() -> None:
    more = rank(0, 48, 75.0, input=30.0)
    slow = variant("slow", (48, 16), 75.0, more, rank(1, 16, 25.0, 50.0, input=10.0))
    cause = known(main_cause(slow, EVEN))
    assert (cause.part, cause.ranks, cause.saved_ns) == ("split", (0,), 50e6)


def test_with_one_ranks_trace_waiting_is_not_called_transfer() -> None:
    slow = variant("slow", (32, 32), 65.0, *(rank(i, 32, 50.0, transfer=15.0) for i in (0, 1)))
    alone = replace(slow.ranks[0], wait_ms=None, transfer_ms=None)
    untraced = replace(slow.ranks[1], span_ms=None, exposed_comm_ms=ExposedComm())
    said = why_text(replace(slow, ranks=(alone, untraced)), EVEN)
    assert "in communication or waiting for it; the traces lack other ranks" in said
    two_of_three = replace(slow, ranks=(*slow.ranks, replace(untraced, rank=2)))
    assert "the traces lack other ranks" in why_text(two_of_three, EVEN)


@pytest.mark.parametrize(
    "slower",
    [
        pytest.param(replace(UNEVEN, ranks=()), id="no trace"),
        pytest.param(replace(UNEVEN, step_ms=None), id="no times"),
        pytest.param(replace(UNEVEN, global_batch=128), id="other work"),
        pytest.param(replace(UNEVEN, step_ms=StepTime(50.0, None)), id="not slower by its step time"),
        pytest.param(replace(UNEVEN, step_ms=StepTime(90.0, None)), id="the wait is a small part of it"),
        pytest.param(
            variant("x", (48, 16), 52.0, rank(0, 48, 52.0), rank(1, 16, 50.0, 2.0)),
            id="a small part of the step",
        ),
        pytest.param(
            variant("x", (48, 16), 60.0, rank(0, 48, 50.0), rank(1, 16, 49.0, 11.0)),
            id="no rank has more to do",
        ),
        pytest.param(
            replace(UNEVEN, ranks=(UNEVEN.ranks[0], replace(UNEVEN.ranks[1], span_ms=None))), id="part"
        ),
    ],
)
def test_nothing_is_said_that_the_figures_do_not_show(slower: VariantResult) -> None:
    assert why_slower(slower, EVEN) is None
    assert why_slower(EVEN, slower) is None


def test_what_both_lose_is_no_reason() -> None:
    fast, slow = (
        variant(
            name, (32, 32), ms, rank(0, 32, ms - 15.0, transfer=15.0), rank(1, 32, ms - 15.0, transfer=15.0)
        )
        for name, ms in (("fast", 50.0), ("slow", 60.0))
    )
    assert main_cause(slow, fast) is None


@pytest.mark.parametrize(
    ("trace", "ablation", "interval", "said"),
    [
        (10.0, 12.0, None, None),  # 17 % of the ablation
        (0.5, 1.5, None, None),  # 1.7 % of the step
        (
            5.0,
            9.0,
            None,
            "5.00 ms in the trace, but 9.00 ms when measured by disabling it; communication may",
        ),
        (
            9.0,
            5.0,
            (4.0, 6.0),
            "5.00 ms when measured by disabling it; ranks that don't communicate may compete",
        ),
        (9.0, 5.0, (1.0, 9.5), None),  # chance
        (4.0, -1.0, None, "−1.0 ms when measured by disabling it"),
        (2.0, -0.9, None, None),  # less than 5 % of the step
        (2.0, 61.0, None, "61.0 ms when measured by disabling it; that is more than a step"),
        (None, 5.0, None, None),
        (5.0, None, None, None),
    ],
)
def test_trace_against_ablation(
    trace: float | None, ablation: float | None, interval: tuple[float, float] | None, said: str | None
) -> None:
    found = disagreement(ExposedComm(trace, ablation), interval, step_ms=60.0)
    assert found == () if said is None else said in found[0].text


def asleep(number: int, batch: int, work_ms: float, wait_ms: float = 0.0) -> RankFigures:
    """A rank that runs hardly any operator."""
    return rank(number, batch, work_ms, wait_ms, host=work_ms - 0.8)


FIT = variant("ddp-52-12", (52, 12), 58.6, asleep(0, 52, 57.5), asleep(1, 12, 57.4, 1.1))
RATIO = variant("ddp-46-18", (46, 18), 73.2, asleep(0, 46, 52.0, 21.2), asleep(1, 18, 73.2))


@pytest.mark.parametrize(
    ("slower", "faster"),
    [
        (UNEVEN, EVEN),
        (replace(UNEVEN, step_ms=StepTime(50.0)), replace(EVEN, step_ms=StepTime(41.0))),
        (RATIO, FIT),
    ],
    ids=["it has less to do", "traced steps are unlike the timed ones", "the CPU is the work"],
)
def test_a_rank_that_waits_is_named(slower: VariantResult, faster: VariantResult, wording: Wording) -> None:
    wording(why_text(slower, faster))


def test_what_is_said_of_every_rank_holds_of_every_rank(wording: Wording) -> None:
    """A figure that only one of them has is said of that one."""
    uneven = rank(0, 46, 65.0, 8.0, host=8.0), rank(1, 18, 73.0, host=24.0)
    said = sentence([variant("ddp-46-18", (46, 18), 73.0, *uneven)], {})
    wording(said)
    assert "every rank" not in said


@pytest.mark.parametrize(
    ("host_ms", "said"),
    [
        ((24.0, 24.0), "every rank spends 37 % of its step (24.0 of 65.0 ms)"),
        ((22.0, 24.0), "every rank spends 34 % to 37 % of its step (22.0 to 24.0 of 65.0 ms)"),
        ((24.0, 40.0), "every rank spends 37 % to 62 % of its step (24.0 to 40.0 of 65.0 ms)"),
        ((20.0, 24.0), "every rank spends 31 % to 37 % of its step (20.0 to 24.0 of 65.0 ms)"),
        ((11.0, 24.0), "rank 1 spends 37 % of its step (24.0 of 65.0 ms)"),
    ],
)
def test_the_figure_of_every_rank_is_that_of_the_one_that_loses_least(
    host_ms: tuple[float, float], said: str
) -> None:
    """Rank 1 works longest, by a hair's breadth of communication that rank 0 has."""
    first = replace(rank(0, 32, 65.0, input=host_ms[0]), exposed_comm_ms=ExposedComm(trace=0.1))
    ranks = (first, rank(1, 32, 65.0, input=host_ms[1]))
    if host_ms[1] > 30:
        ranks = (
            replace(ranks[1], rank=0, exposed_comm_ms=ExposedComm(trace=0.1)),
            rank(1, 32, 65.0, input=24.0),
        )
    assert known(largest_loss(ranks)).text.startswith(said)


def test_without_cpu_time_nothing_is_said_to_be_python() -> None:
    unknown = tuple(
        replace(rank(number, 32, 65.0, host=30.0), cpu_ms=None, thread_cpu_ms=None) for number in (0, 1)
    )
    assert "outside of operators; the traces lack Python's stacks" in known(largest_loss(unknown)).text


@pytest.mark.parametrize(("ms_per_sample", "kind"), [((3.0, 1.0), "straggler"), ((1.0, 1.0), "split")])
def test_two_samples_more_are_not_why_a_slow_device_takes_three_times_as_long(
    ms_per_sample: tuple[float, float], kind: str, wording: Wording
) -> None:
    """Of the wait, 15 × (17 / 15 − 1) samples are the split; the rest is the device."""
    work = [samples * ms for samples, ms in zip((17, 15), ms_per_sample, strict=True)]
    wait_ms = work[0] - work[1]
    slow = variant("ddp-17-15", (17, 15), work[0], rank(0, 17, work[0]), rank(1, 15, work[1], wait_ms))
    found = known(largest_loss(slow.ranks))
    assert (found.part, found.saved_ns) == (kind, 1e6 * wait_ms)
    wording(known(found).text)


def test_a_larger_batch_and_a_slower_device_are_both_named_by_their_size(wording: Wording) -> None:
    ranks = (rank(0, 24, 48.0), rank(1, 8, 8.0, 40.0))
    wording(known(largest_loss(ranks)).text)
    ranks = (rank(0, 24, 30.0), rank(1, 8, 8.0, 22.0))
    wording(known(largest_loss(ranks)).text)


def test_a_rank_that_sleeps_is_not_in_python_between_operators(wording: Wording) -> None:
    """CPU time shows it: 20 ms asleep on rank 0, 40 on rank 1."""
    asleep_ = (rank(0, 1, 21.0, 20.6, host=20.2), rank(1, 1, 42.1, host=41.2))
    worked: Any = {"step_ms": 42.0, "cpu_ms": 1.1, "thread_cpu_ms": 1.1}
    seen = tuple(replace(figures, **worked) for figures in asleep_)
    wording(known(largest_loss(asleep_)).text)
    wording(known(largest_loss(seen)).text)
    alike = tuple(replace(figures, **worked) for figures in (asleep_[1], replace(asleep_[1], rank=0)))
    wording(known(largest_loss(alike)).text)
    partly = tuple(
        replace(figures, cpu_ms=4.0, thread_cpu_ms=4.0) for figures in alike
    )  # Python's 4 ms aren't what takes long
    assert "blocked" in known(largest_loss(partly)).text
    busy = tuple(replace(figures, cpu_ms=41.0, thread_cpu_ms=41.0) for figures in alike)
    assert "in Python between operators" in known(largest_loss(busy)).text


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"sm_clock_mhz": 1200.0},
        {"alloc_retries": 3},
        {"operators_ms": {"aten::mm": 38.0, "aten::add": 2.0}},
        {"operators_ms": {"gemm": 30.0, "aten::mm": 34.0, "aten::add": 2.0}},
    ],
)
def test_compute_that_grew_on_all_ranks_is_named_with_its_reason(
    more: dict[str, float], wording: Wording
) -> None:
    known = {"aten::mm": 30.0, "aten::add": 1.0}
    ranks = tuple(
        replace(rank(number, 32, 50.0), sm_clock_mhz=1500.0, operators_ms=known) for number in (0, 1)
    )
    fast = variant("ddp-fast", (32, 32), 50.0, *ranks)
    more = {"operators_ms": dict[str, float](), **more}  # type: ignore[dict-item]
    longer = tuple(replace(rank, span_ms=60.0, compute_ms=60.0, **more) for rank in ranks)  # type: ignore[arg-type]
    slow = variant("ddp-slow", (32, 32), 60.0, *longer)
    wording(why_text(slow, fast))
    assert why_slower(fast, slow) is None


@pytest.mark.parametrize(("timed_ms", "fast_ms"), [(66.0, 50.0), (25.0, 20.0)])
def test_compute_that_grew_is_in_ms_of_the_timed_step_unless_that_is_far_from_it(
    timed_ms: float, fast_ms: float, wording: Wording
) -> None:
    """Traced steps took 60 ms."""
    alike = [rank(number, 32, 50.0) for number in (0, 1)]
    fast = variant(
        "ddp-fast", (32, 32), fast_ms, *(replace(figures, operators_ms={"gemm": 30.0}) for figures in alike)
    )
    more = {"span_ms": 60.0, "compute_ms": 60.0}
    longer = (replace(each, operators_ms={"gemm": 40.0}, **more) for each in alike)  # type: ignore[arg-type]
    wording(why_text(variant("ddp-slow", (32, 32), timed_ms, *longer), fast))


def test_a_rank_without_samples_waits_for_no_ones_larger_batch(wording: Wording) -> None:
    idle = rank(1, 0, 0.7, 24.1)
    alone = variant("ddp-13-0-8", (13, 0, 8), 25.0, rank(0, 13, 24.8), idle, rank(2, 8, 24.7))
    wording(sentence([alone], {}))


@pytest.mark.parametrize("slow", [rank(0, 40, 60.0), rank(0, 24, 60.0)])
def test_no_advice_to_balance_a_balanced_split(slow: RankFigures, wording: Wording) -> None:
    quick = rank(1, 64 - (slow.local_batch or 0), 30.0, 30.0)
    uneven = variant("ddp-a", (slow.local_batch or 0, quick.local_batch or 0), 60.0, slow, quick)
    assert "balanced" in sentence([uneven], {})
    said = sentence([replace(uneven, split_name="balanced")], {})
    wording(said)
    assert "split: balanced" not in said


@pytest.mark.parametrize(
    ("kind", "comm_ms", "num", "said"),
    [
        ("program", (0.0, 0.0, 0.0), 2, True),
        ("program", (0.0, 0.5, 0.0), 2, False),  # compute hides all of it
        ("program", (None, None, 0.0), 2, False),
        ("program", (0.0, 0.0, 0.0), 1, False),
        ("training", (0.0, 0.0, 0.0), 2, False),
    ],
)
def test_ranks_of_a_program_that_never_communicate_are_named(
    kind: str, comm_ms: tuple[float | None, float | None, float], num: int, said: bool
) -> None:
    wait, transfer, exposed = comm_ms
    comm = ExposedComm(trace=exposed)
    ranks = [
        replace(rank(i, 1, 9.0), wait_ms=wait, transfer_ms=transfer, exposed_comm_ms=comm) for i in range(num)
    ]
    measured: Any = SimpleNamespace(variant=SimpleNamespace(kind=JOB_KINDS[kind]))
    assert never_communicate(measured, ranks) is said


def test_a_rank_that_waits_for_cores_is_not_blamed_for_its_step() -> None:
    """Both do the same, and other programs had the cores of one of them."""
    slow, quick = rank(0, 32, 31.0), rank(1, 32, 24.6, 6.4)
    late = variant("late", (32, 32), 31.5, slow, quick)
    assert known(largest_loss(late.ranks)).text.startswith(
        "rank 1 waits 21 % of its step (6.40 of 31.0 ms) for rank 0"
    )
    loaded = (replace(slow, queue_percent=20.0), quick)
    assert all(not loss.is_wait or loss.saved_ns == 0 for loss in losses(loaded))


def test_where_python_is_known_of_one_rank_only_the_other_is_not_late_for_it() -> None:
    """Both sleep between their operators, rank 0 for three times the samples."""
    late = replace(rank(0, 6, 184.0, host=150.0), cpu_ms=None, thread_cpu_ms=None)
    waiting = rank(1, 2, 62.0, 122.0, host=50.0)
    (wait,) = (loss for loss in losses((late, waiting)) if loss.is_wait)
    assert (wait.part, wait.ranks, wait.saved_ns) == ("split", (0,), 122e6)


def test_without_traces_communication_is_a_cause_as_far_as_it_is_known_of_both() -> None:
    found = compare_run(RunDir(Path("docs/runs/tune")))
    ddp, single, *_ = found.variants
    assert known(why_slower(ddp, single)).part == "communication"
    unknown = replace(single, ranks=ddp.ranks)
    assert why_slower(ddp, unknown) is None  # its ranks communicate; how long, nothing says
    small = replace(ddp, exposed_comm_ms=ExposedComm(ablation=10.0))
    assert why_slower(small, single) is None  # that isn't most of the difference


def test_nothing_is_infinitely_fast_without_being_shown_so() -> None:
    assert more_speed((50.0, 75.0)) == (100.0, 300.0)
    assert more_speed((0.0, 100.0)) == (0.0, math.inf)
