"""The terminal report: the layout at a pinned width, and what a pipe gets."""

import io
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from gpurun.launcher.cli.output import print_comparison
from gpurun.launcher.compare.figures.ranks import ExposedComm, RankFigures, slowest_rank
from gpurun.launcher.compare.label import variant_label
from gpurun.launcher.compare.model import Comparison, Difference, Noise, StepTime, VariantResult
from gpurun.launcher.compare.notes import named_once
from gpurun.launcher.findings.finding import Finding, finding
from gpurun.launcher.report.footnotes import detail_lines, noise_lines, with_next_step
from gpurun.launcher.report.markdown import summary_markdown
from gpurun.launcher.report.metrics import figures_of
from gpurun.launcher.report.terminal.table import (
    BarPart,
    draw_bar,
    phase_parts,
    render_table,
)
from gpurun.launcher.rundir.files import RunDir
from gpurun.launcher.rundir.records import Status
from tests.sample import COMPARISON
from tests.wording import Wording

RUN = "runs/gpt-splits/latest"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("environ", "is_coloured"),
    [({"TERM": "xterm"}, True), ({"TERM": "xterm", "NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False)],
)
def test_no_escape_reaches_a_terminal_without_colour(
    environ: dict[str, str], is_coloured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    print_comparison(COMPARISON, RunDir(Path(RUN)), as_json=False)
    assert ("\x1b" in terminal.getvalue()) is is_coloured


def test_nothing_is_to_be_viewed_where_nothing_was_measured() -> None:
    assert "gpurun view" in whole(COMPARISON)
    failed = with_variants(variant("dp-2-48-16"))
    assert "gpurun view" not in whole(failed)
    assert f"logs: gpurun logs {RUN}" in whole(failed, 120)


def test_a_failure_that_was_just_read_is_not_said_again(wording: Wording) -> None:
    failed = variant("dp-2-48-16")
    failed = replace(
        failed, status="failed", reason="rank 1 raised ValueError: no", log="launches/01/log/rank1.log"
    )
    above = (f"rank 1 raised ValueError: no\nlog: {RUN}/launches/01/log/rank1.log",)
    for comparison in (with_variants(failed), with_variants(variant("ddp-2-even"), failed)):
        wording(render_table(comparison, 80, plain=True, run_path=RUN, above=above))
    assert "log: " in render_table(with_variants(failed), 80, plain=True, run_path=RUN, above=("other",))


@pytest.mark.parametrize("is_one", [True, False])
def test_a_report_in_another_place_than_messages_repeats_them(
    is_one: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = replace(
        variant("dp-2-48-16"), status="failed", reason="it broke", log="launches/01/log/rank1.log"
    )
    with (tmp_path / "out").open("w") as out, (tmp_path / ("out" if is_one else "err")).open("a") as err:
        monkeypatch.setattr(sys, "stdout", out)
        monkeypatch.setattr(sys, "stderr", err)
        print_comparison(
            with_variants(failed), RunDir(Path(RUN)), as_json=False, reported=(f"log: {failed.log}",)
        )
    assert ("it broke" in (tmp_path / "out").read_text()) is not is_one


def variant(variant_id: str) -> VariantResult:
    return next(found for found in COMPARISON.variants if found.id == variant_id)


def with_variants(*variants: VariantResult) -> Comparison:
    return replace(COMPARISON, variants=variants)


def shown(comparison: Comparison, width: int = 80, plain: bool = False) -> str:
    """The table and all details, without colours."""
    return whole(comparison, width, plain, details=True).partition("\n\n")[2]


def whole(comparison: Comparison, width: int = 80, plain: bool = False, details: bool = False) -> str:
    """The report without its colours."""
    text = render_table(comparison, width, plain, RUN, details=details)
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def noticed(code: str, text: str, *variants: VariantResult, others: bool = True) -> Finding:
    """What was noticed about variants; with `others`, there are more."""
    names = f"{', '.join(map(variant_label, variants))}: " if others else ""
    about = variants[0].id if len(variants) == 1 else None
    case = "recorded" if code == "noticed" else None
    return finding(code, about, of=names, case=case, found=text, variants=tuple(each.id for each in variants))


def lines_of(text: str) -> list[str]:
    return [line.rstrip() for line in text.splitlines()]


EVEN, UNEVEN, FULL = variant("ddp-2-even"), variant("ddp-2-40-24"), variant("dp-2-48-16")
ALONE = replace(with_variants(EVEN), noise=Noise(None, None, None, 1.5))
NO_FILE = replace(FULL, status="failed", reason="no such file", log="launches/1/log/rank0.log")
OFF = replace(EVEN, gradient_error=0.58)
AS_THE_MODEL = replace(EVEN, gradient_error=0.03)
"""Of dropout or BatchNorm, whose gradients no two ways to run the model share."""
NOT_EXACT = noticed(
    "gradient-not-exact",
    "the gradient differs from that of one device by 0.03 (relative), more than fp32 explains",
    AS_THE_MODEL,
)
SINGLE = replace(variant("single-1--"), scaling_efficiency=1.0)
LOSSY = [
    replace(EVEN, id=f"ddp-{number}", compression="fp16", gradient_error=number / 1000)
    for number in range(1, 5)
]
ALLOCATORS = {
    "the CPU's": "rank 0 ran out of memory: [enforce fail at alloc_cpu.cpp:127] err == 0. "
    "DefaultCPUAllocator: can't allocate memory: you tried to allocate 4503599627370496 bytes. Error code 12",
    "CUDA's": "rank 1 ran out of memory: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total "
    "capacity of 79.1 GiB of which 1.1 GiB is free. Process 1 has 78 GiB memory in use.",
    "a GPU's": "cuda:0 had 139.8 of 140.0 GiB in use",
}
ENDS: tuple[Status, ...] = ("failed", "hung", "skipped")
Render = Callable[[Comparison], str]


def at(width: int) -> Render:
    return partial(shown, width=width)


TABLES: dict[str, tuple[Comparison, tuple[Render, ...]]] = {
    "a fast variant has its factor": (
        with_variants(EVEN, replace(UNEVEN, vs_baseline=Difference(-45.3, (-46.0, -44.0), "faster"))),
        (at(120),),
    ),
    "an interval without 0 is no half width, with which it would have it": (
        with_variants(EVEN, replace(UNEVEN, vs_baseline=Difference(18.9, (1.2, 40.1), "slower"))),
        (at(160), summary_markdown),
    ),
    "a few samples per second keep their digits": (
        with_variants(replace(EVEN, samples_per_s=1.1577)),
        (at(120), summary_markdown),
    ),
    "the fastest is first and failures are last": (
        with_variants(
            *(replace(FULL, id=end, status=end, split=(n, 64 - n)) for n, end in enumerate(ENDS, 1)),
            *COMPARISON.variants,
        ),
        (at(80),),
    ),
    "the leader is first, though another time is shorter": (
        replace(COMPARISON, fastest="ddp-2-33-31", leader="ddp-2-33-31"),
        (at(80),),
    ),
    "an unsteady variant keeps its figures": (
        with_variants(EVEN, replace(UNEVEN, status="unsteady", reason="its medians drift by 9 %")),
        (at(80),),
    ),
    "without a measured variant there is no header and no bar": (with_variants(FULL), (at(80),)),
    "one reason of several is shown once": (
        with_variants(*(replace(NO_FILE, id=str(number)) for number in range(3))),
        (at(120),),
    ),
    "the same reason with logs of their own": (
        with_variants(NO_FILE, replace(NO_FILE, id="2", log="launches/2/log/rank0.log")),
        (at(120),),
    ),
    "a long reason is wrapped and cut on a terminal": (
        with_variants(EVEN, replace(FULL, reason="word " * 40)),
        (at(80), partial(shown, plain=True)),
    ),
    **{
        f"how much an allocator lacked: {name}": (with_variants(replace(FULL, reason=message)), (at(200),))
        for name, message in ALLOCATORS.items()
    },
    "keys that vary have columns": (
        with_variants(replace(EVEN, varied={"precision": "bf16", "params": {"width": 256}})),
        (at(80),),
    ),
    "a long value keeps its beginning": (
        with_variants(
            replace(EVEN, varied={"params": {"heads": 2, "layers": 1, "preset": "tiny", "width": 64}})
        ),
        (at(160),),
    ),
    "a gradient that differs": (with_variants(OFF), (at(120),)),
    "a gradient that is exactly the baseline's": (
        with_variants(replace(OFF, gradient_error=0.0, gradient_reference="ddp-2-even")),
        (at(80),),
    ),
    "a gradient that differs as the model is": (
        replace(with_variants(AS_THE_MODEL), findings=(*COMPARISON.findings, NOT_EXACT)),
        (at(120),),
    ),
    "its gradient, next to one that agrees": (
        replace(
            with_variants(
                AS_THE_MODEL, replace(AS_THE_MODEL, id="one", strategy="single", gradient_error=0.0)
            ),
            findings=(*COMPARISON.findings, NOT_EXACT),
        ),
        (at(120),),
    ),
    "three compressed variants": (with_variants(*LOSSY[:3]), (at(200),)),
    "many compressed variants have one sentence": (with_variants(*LOSSY), (at(200),)),
    "a variant alone has no baseline": (ALONE, (at(200), summary_markdown)),
    "what is unknown is left out": (
        replace(
            with_variants(
                replace(EVEN, scaling_efficiency=None, gradient_error=None, vs_baseline=None, ranks=())
            ),
            noise=Noise(None, None, None),
            ci_level=None,
            findings=(),
        ),
        (at(80),),
    ),
    "one device has no efficiency": (with_variants(SINGLE, replace(SINGLE, id="other")), (at(160),)),
    "efficiency": (with_variants(SINGLE, replace(EVEN, scaling_efficiency=0.93)), (at(160),)),
}


@pytest.mark.parametrize("name", TABLES)
def test_the_table_and_its_details(name: str, wording: Wording) -> None:
    comparison, renders = TABLES[name]
    wording(*(render(comparison) for render in renders))


@pytest.mark.parametrize("width", [60, 72, *range(80, 121), 200])
def test_the_table_never_wraps(width: int) -> None:
    lines = lines_of(shown(COMPARISON, width))
    assert max(cell_len(line) for line in lines) <= width
    assert [line.split()[0] for line in lines[:8]] == ["variant", *["ddp"] * 4, "dp", "single", "dp"]


def test_a_terminal_gets_colours_and_the_fastest_in_bold() -> None:
    text = render_table(COMPARISON, 80, plain=False)
    assert re.search(r"\x1b\[1mddp +32/32", text)
    assert "\x1b[31moom" in text


@pytest.mark.parametrize("width", [80, 100, 120, 160])
def test_a_width_has_the_same_columns_whatever_the_cells_hold(width: int) -> None:
    """Those of settings apart, which a job chooses."""

    def columns(ci: tuple[float, float], split: tuple[int, int]) -> list[str]:
        against = Difference(5.0, ci, "slower")
        other = replace(variant("ddp-2-40-24"), vs_baseline=against, split=split, split_name=str(split))
        return re.split("  +", lines_of(shown(with_variants(variant("ddp-2-even"), other), width))[0].strip())

    assert columns((4.9, 5.1), (8, 8)) == columns((0.3, 17.2), (40, 24)) != []


def test_warnings_are_shown_once_and_name_their_variants(wording: Wording) -> None:
    warned, other = variant("ddp-2-even"), variant("ddp-2-40-24")
    said = [(warned, noticed("noticed", "BatchNorm sees 32 samples per rank", others=False))]
    found = named_once(
        [*said, *((variant, noticed("noticed", "dropout", others=False)) for variant in (warned, other))], 2
    )
    comparison = replace(with_variants(warned, other), findings=(*COMPARISON.findings, *found))
    text = shown(comparison, 120)
    wording(text)
    assert text.lower().count("dropout") == 1


@pytest.mark.parametrize(
    ("launch", "round_"), [(0.0, 12.0), (0.0, None), (15.4, 19.4), (0.04, 0.3), (None, 6.7), (0.0, 0.0)]
)
def test_scatter_of_launches_is_not_said_to_be_0_where_rounds_hide_it(
    launch: float | None, round_: float | None, wording: Wording
) -> None:
    """The estimate of what launches add is 0 wherever their rounds alone scatter by more."""
    wording(*noise_lines(Noise(None, None, launch, round_), "The baseline"))


def test_details_keep_findings_about_variants_that_a_report_leaves_out() -> None:
    left_out = replace(COMPARISON.findings[-1], variant="left-out", text="of another variant")
    found = replace(COMPARISON, findings=(*COMPARISON.findings, left_out))
    assert any("of another variant" in line for line in detail_lines(found))


@given(st.floats(1e-17, 0.05))
def test_the_agreement_that_is_claimed_holds(error: float) -> None:
    text = shown(with_variants(replace(variant("ddp-2-even"), gradient_error=error)), 120)
    claimed = re.search(r"one device to (\S+)\.", text)
    assert claimed is not None
    assert error <= float(claimed.group(1)) * (1 + 1e-9) <= 10 * error


def test_an_interrupted_run_says_how_to_go_on() -> None:
    on_nodes = replace(here := replace(COMPARISON, complete=False), job={**here.job, "nodes": "2..4"})
    alone, several = (" ".join(whole(with_next_step(each, "x"), 200).split()) for each in (here, on_nodes))
    assert f"`gpurun --resume {RUN}` measures" in alone
    assert f"is missing, start all nodes as before, node 0 with `--resume {RUN}`" in several
    requeued = with_next_step(on_nodes, "slurm-42_1").findings
    assert any("use `scontrol requeue 42_1` while" in each.text for each in requeued)
    assert "--resume" not in whole(COMPARISON)


def test_bars_show_the_trace_where_every_variant_has_one(wording: Wording) -> None:
    def traced(found: VariantResult) -> VariantResult:
        """Of a step of 20 ms: 10 compute, 4 transfer, 2 wait, 4 idle."""
        figures = (
            "span_ms",
            "compute_ms",
            "exposed_transfer_ms",
            "exposed_wait_ms",
            "exposed_memcpy_ms",
            "idle_ms",
        )
        parts: dict[str, Any] = dict(zip(figures, (20.0, 10.0, 4.0, 2.0, 0.0, 4.0), strict=True))
        exposed = ExposedComm(trace=6.0)
        return replace(found, ranks=tuple(replace(r, **parts, exposed_comm_ms=exposed) for r in found.ranks))

    even, uneven = variant("ddp-2-even"), variant("ddp-2-40-24")
    lines = lines_of(shown(with_variants(traced(even), traced(uneven)), 200))
    bar = lines[2].split()[-1]  # the longest step has the whole width
    assert bar == "▇" * 20 + "▒" * 8 + "░" * 4 + "·" * 8
    assert lines[1].split()[-1].count("▇") == round(20 * 42.1 / 47.9)
    wording(lines)
    wording(shown(with_variants(traced(even), uneven), 200))


def test_slowest_rank_is_the_one_that_the_others_wait_for() -> None:
    """Both ranks show the same step; the one that waits spends the difference in `backward`."""

    def rank(number: int, forward_ms: float, exposed_ms: float | None = None) -> RankFigures:
        phases = {"forward": forward_ms, "backward": 50 - forward_ms}
        figures = RankFigures(number, "cpu", 1, 50.0 + number, phases, None, None)
        return replace(figures, exposed_comm_ms=ExposedComm(ablation=exposed_ms))

    def slowest(*ranks: RankFigures) -> int | None:
        found = slowest_rank(ranks)
        return None if found is None else found.rank

    assert slowest(rank(0, 20.0), rank(1, 10.0)) == 0
    assert slowest(rank(0, 20.0, exposed_ms=9.0), rank(1, 10.0, exposed_ms=1.0)) == 1
    assert slowest() is None


@pytest.mark.parametrize(
    ("phases_ms", "shown_ms"),
    [
        ((4.0, 7.0), (4.0, 7.0)),
        ((36.0, 68.0), (110 * 36 / 104, 110 * 68 / 104)),
        ((60.0, 60.0), (55.0, 55.0)),
    ],
)
def test_bars_without_traces_are_as_long_as_the_steps_next_to_them(
    phases_ms: tuple[float, ...], shown_ms: tuple[float, ...]
) -> None:
    """Phases that are a small part of the step are as long as they are; the rest is in none."""
    phases = dict(zip(("forward", "backward"), phases_ms, strict=True))
    slowest = replace(variant("ddp-2-even").ranks[0], phases_ms=phases)
    timed = replace(variant("ddp-2-even"), ranks=(slowest,), step_ms=StepTime(110.0))
    parts = phase_parts(timed)
    assert sum(part.ms for part in parts) == pytest.approx(110.0)
    assert [part.ms for part in parts[:2]] == pytest.approx(shown_ms)
    assert [part.label for part in parts[2:]] == (["between phases"] if sum(phases_ms) < 50 else [])


@given(st.lists(st.floats(0, 1e4), max_size=6), st.integers(1, 100))
def test_a_bar_is_as_long_as_its_parts_together(times: list[float], cells: int) -> None:
    parts = [BarPart(str(i), ms, str(i), str(i), "") for i, ms in enumerate(times)]
    bar = draw_bar(parts, cells, full_ms=1e5, plain=False).plain
    assert abs(len(bar) - cells * sum(times) / 1e5) <= 0.5 + 1e-9
    assert "".join(sorted(bar)) == bar


def test_json_is_the_whole_comparison() -> None:
    assert msgspec.json.decode(msgspec.json.encode(COMPARISON), type=Comparison) == COMPARISON


def test_figures_of_tiny_models_are_not_zero() -> None:
    (rank,) = variant("ddp-2-even").ranks[:1]
    tiny = replace(
        variant("ddp-2-even"),
        flop_per_s=6e3,
        mfu=3e-7,
        joules_per_sample=2e-5,
        ranks=(replace(rank, peak_gib=0.0004),),
    )
    texts = {metric.short: str(column[0]) for metric, column in figures_of([tiny]).items()}
    shown = {name: texts[name] for name in ("kFLOP/s", "MFU %", "J/sample", "peak MiB")}
    assert shown == {
        "kFLOP/s": "6.00",
        "MFU %": "0.000030",
        "J/sample": "0.000020",
        "peak MiB": "0.410",
    }
