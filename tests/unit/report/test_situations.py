"""What people read first, in every situation: the answer, why, and what next, in few lines of 80 columns."""

import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from gpurun.launcher.compare.build import compare_run
from gpurun.launcher.compare.diff import diff_runs, gated
from gpurun.launcher.compare.model import Comparison, VariantResult
from gpurun.launcher.compare.notes import dangers
from gpurun.launcher.findings.finding import Finding, finding, of_level, ranked, screen_of
from gpurun.launcher.findings.finding_kinds import KINDS
from gpurun.launcher.report.terminal.changes import render_diff, render_trace_diff
from gpurun.launcher.report.terminal.layout import screen_lines
from gpurun.launcher.report.terminal.table import render_table
from gpurun.launcher.report.terminal.trace import render_trace
from gpurun.launcher.rundir.files import RunDir
from gpurun.launcher.selftest.check_table import findings as checks_of
from gpurun.launcher.selftest.evidence import PARTS
from gpurun.launcher.selftest.self_test import findings_of
from gpurun.launcher.trace.analysis.analyse import analyse_paths
from gpurun.launcher.trace.diff import diff_traces
from tests.browser.samples import odd_runs, sample_runs
from tests.said import said_outside_the_table
from tests.unit.compare.test_compare_summary import ENDS, conclusion
from tests.unit.compare.test_diff import A, B, result, run
from tests.unit.selftest.healthy import evidence
from tests.unit.trace.several_ranks.generated_job import Job
from tests.unit.trace.trace_files import kernel, launch, span, step, write
from tests.wording import Wording

MOST_LINES = {80: 9, 120: 6}
"""Apart from the table with its header and legend, by columns."""
MOST_DANGER_LINES = 3
Situation = tuple[Sequence[Finding], Callable[[int], str]]
"""The findings, and the report by the terminal's width."""


def of_comparison(comparison: Comparison) -> Situation:
    return comparison.findings, lambda width: render_table(comparison, width, False, "runs/job/latest")


def written(write_run: Callable[[Path], RunDir]) -> Callable[[Path], Situation]:
    """A run that the tab's tests show, too."""

    def made(directory: Path) -> Situation:
        path = write_run(directory / "run").comparison
        return of_comparison(msgspec.json.decode(path.read_bytes(), type=Comparison))

    return made


Change = Callable[[Comparison], Comparison]


def recorded(name: str, change: Change = lambda comparison: comparison) -> Callable[[Path], Situation]:
    def made(directory: Path) -> Situation:
        copied = shutil.copytree(Path("docs/runs") / name, directory / "run")
        return of_comparison(change(compare_run(RunDir(copied))))

    return made


def ended(name: str) -> Callable[[Path], Situation]:
    """Variants with these differences from each other."""

    def made(directory: Path) -> Situation:
        variants, differences = ENDS[name]
        sample = msgspec.json.decode(Path("tests/data/comparison.json").read_bytes(), type=Comparison)
        found = ranked(conclusion(variants, differences))
        return of_comparison(
            replace(sample, variants=tuple(variants), baseline=variants[0].id, findings=found, fitting=None)
        )

    return made


def lost(**changes: object) -> Callable[[Comparison], Comparison]:
    """The same in which the last variant has ended so, or trains another model."""

    def changed(comparison: Comparison) -> Comparison:
        *others, last = comparison.variants
        variants: tuple[VariantResult, ...] = (*others, replace(last, **changes))  # type: ignore[arg-type]
        found = ranked((*comparison.findings, *dangers(variants)))
        return replace(comparison, variants=variants, findings=found)

    return changed


def of_load(comparison: Comparison) -> Comparison:
    load = finding("affected-by-load", case="queued", rank=0, where="ddp 24/8", queued="20 %")
    return replace(comparison, findings=ranked((*comparison.findings, load)))


def traced(directory: Path) -> Situation:
    report = analyse_paths([directory])
    return report.findings, lambda width: render_trace(report, width, details=False)


def one_gpu(directory: Path) -> Situation:
    events = [step(1, 0, 100), launch(70, 1, 1), kernel("k", 75, 25, 1)]
    write(directory / "rank0.json", events)
    return traced(directory)


def one_cpu(directory: Path) -> Situation:
    write(
        directory / "cpu.json",
        [step(1, 0, 100), span("cpu_op", "aten::mm", 0, 20), span("cpu_op", "aten::mm", 80, 20)],
    )
    return traced(directory)


def busy_gpu(directory: Path) -> Situation:
    write(directory / "rank0.json", [step(1, 0, 100), launch(0, 1, 1), kernel("k", 1, 99, 1)])
    return traced(directory)


def job_of_ranks(*ends_us: float) -> Job:
    job = Job(len(ends_us))
    for rank, end_us in enumerate(ends_us):
        job.kernel(rank, "gemm", 0, end_us, False)
    job.all_reduce("0", [*range(len(ends_us))], [*ends_us], max(ends_us) + 300)
    return job


def several_gpus(directory: Path) -> Situation:
    job_of_ranks(24_000, 8_000, 9_000).report(directory)
    return traced(directory)


def cut_off(directory: Path) -> Situation:
    path = write(directory / "rank0.json", [step(1, 0, 100), launch(0, 1, 1), kernel("k", 1, 99, 1)])
    path.write_text(path.read_text()[:-20])
    return traced(directory)


def two_captures(*lengths_us: float) -> Callable[[Path], Situation]:
    def made(directory: Path) -> Situation:
        reports = []
        for number, us in enumerate(lengths_us):
            (directory / str(number)).mkdir()
            events = [step(1, 0, us), launch(0, 1, 1), kernel("k", 1, us - 1, 1)]
            reports.append(analyse_paths([write(directory / str(number) / "rank0.json", events)]))
        found = diff_traces(*reports)
        return found.findings, lambda width: render_trace_diff(found, width, details=False)

    return made


def two_runs(a: list[float], b: list[float], percent: float | None = None) -> Callable[[Path], Situation]:
    """Two runs, with a gate at so many percent."""

    def made(directory: Path) -> Situation:
        runs = run(result("v", a)), run(result("v", b))
        found = diff_runs(*runs)
        found = found if percent is None else gated(found, *runs, percent)
        return found.findings, lambda width: render_diff(found, width, details=False)

    return made


def self_test(is_healthy: bool) -> Callable[[Path], Situation]:
    def made(directory: Path) -> Situation:
        seen = evidence()
        seen = seen if is_healthy else replace(seen, free_gib=0.01)
        found = findings_of(tuple(checks_of(seen, PARTS)))
        return found, lambda width: "\n".join(line.plain for line in screen_lines(screen_of(found), width))

    return made


SITUATIONS: Mapping[str, Callable[[Path], Situation]] = {
    **{name: ended(name) for name in ENDS},
    "splits of which one is out of memory": written(sample_runs.write_gpt_splits),
    "balanced": written(sample_runs.write_balanced),
    "several batches": written(sample_runs.write_batches),
    "500 variants": written(sample_runs.write_many),
    "64 ranks": written(sample_runs.write_ranks),
    "a search": written(sample_runs.write_search),
    "all failed": written(odd_runs.write_all_failed),
    "one variant": written(odd_runs.write_one),
    "without traces": written(odd_runs.write_timed),
    "a micro-benchmark": written(odd_runs.write_curves),
    "recorded": recorded("gpt-splits"),
    "recorded, balanced": recorded("balanced"),
    "recorded, a search": recorded("tune"),
    "a wrong gradient": recorded("gpt-splits", lost(gradient_error=0.3, gradient_warning="wrong")),
    "a wrong gradient of an even split": recorded(
        "gpt-splits", lost(gradient_error=0.5, gradient_warning="wrong", split=(32, 32))
    ),
    "out of memory": recorded("gpt-splits", lost(status="oom", step_ms=None, reason="no memory")),
    "a hang": recorded("gpt-splits", lost(status="hung", step_ms=None, reason="no step for 60 s")),
    "other load": recorded("gpt-splits", of_load),
    "interrupted": recorded("gpt-splits", lambda comparison: replace(comparison, complete=False)),
    "a trace of a GPU": one_gpu,
    "a trace of a busy GPU": busy_gpu,
    "a trace of a CPU": one_cpu,
    "traces of several GPUs": several_gpus,
    "a trace that is cut off": cut_off,
    "two captures": two_captures(100, 150),
    "two captures alike": two_captures(100, 100),
    "a slower run": two_runs(A, B),
    "a run like the one before": two_runs(A, A),
    "a gate that fails": two_runs(A, B, 3.0),
    "a gate that passes": two_runs(A, A, 3.0),
    "a gate that is undecided": two_runs(A, B, 9.8),
    "a self-test without faults": self_test(True),
    "a self-test that fails": self_test(False),
}


@pytest.mark.parametrize("name", SITUATIONS)
def test_the_answer_is_first_and_short(name: str, tmp_path: Path, wording: Wording) -> None:
    found, render = SITUATIONS[name](tmp_path)
    assert list(found) == list(ranked(found))
    assert {each.code for each in found} <= KINDS.keys()
    assert len(of_level(found, "answer")) == 1
    assert said_outside_the_table(found) == set()
    screen = screen_of(found)
    for width, most in MOST_LINES.items():
        text = re.sub(r"\x1b\[[0-9;]*m", "", render(width))
        first, *others = text.strip("\n").split("\n\n")
        lines = first.splitlines()
        titles = [line.split()[0] for line in lines if not line.startswith(" ")]
        assert titles[: len(screen.lines)] == [title for title, _ in screen.lines][: len(titles)]
        num_dangers = sum(title in ("!", "and") for title in titles)
        assert num_dangers <= MOST_DANGER_LINES
        assert all(len(line) <= width for line in lines)
        assert len(lines) - num_dangers <= most
        if others and re.search(": (gpurun |add --details)", others[-1]):
            assert len(lines) - num_dangers + len(others[-1].splitlines()) <= most
        if width == 80:
            wording(", ".join(each.code for each in found), first)
