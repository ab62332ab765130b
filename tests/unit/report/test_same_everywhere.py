"""One run in every report: the same headline, and the same figures under the same titles."""

import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams import metadata
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

from gpurun.launcher.cli.main import cli
from gpurun.launcher.cli.output import print_comparison
from gpurun.launcher.compare.build import compare_run
from gpurun.launcher.compare.label import variant_label
from gpurun.launcher.compare.model import CONCLUSIONS, Comparison
from gpurun.launcher.compare.ranking import by_rank
from gpurun.launcher.findings.finding import finding, ranked
from gpurun.launcher.report import metrics
from gpurun.launcher.report.markdown import summary_markdown
from gpurun.launcher.report.metrics import METRICS, PARTS, Metric, figures_of, values_of
from gpurun.launcher.report.tensorboard import write_tensorboard
from gpurun.launcher.report.terminal.table import TRACED, render_table
from gpurun.launcher.rundir.files import RunDir, write_json
from gpurun.launcher.tensorboard_plugin.answers.runs import run_answer
from gpurun.launcher.tensorboard_plugin.html import STATIC, report_data
from gpurun.launcher.tensorboard_plugin.logdir import own, read_comparison
from tests.sample import COMPARISON as RECORDED
from tests.wording import Wording

MEASURED = [variant for variant in RECORDED.variants if variant.step_ms]
COMPARISON = replace(
    RECORDED,
    variants=tuple(
        replace(
            each, flop_per_s=3.1e13 / (1 + place), mfu=0.31 / (1 + place), joules_per_sample=0.1, wall_s=60.0
        )
        for place, each in enumerate(MEASURED)
    ),
)
Figures = dict[str, dict[str, float]]
Shown = tuple[str, Figures]
"""The headline, and the figures of each variant by the short titles of their metrics."""
Report = Callable[[Comparison, RunDir], Shown]


def number(text: str) -> float:
    """The first number of a cell."""
    found = re.match(r"[\d.]+", text.replace(",", ""))
    assert found, text
    return float(found.group())


def terminal(comparison: Comparison, run: RunDir) -> Shown:
    """A pipe has all columns; figures are flush right, so a cell ends where its title does."""
    screen, table, _ = render_table(comparison, 80, plain=True).split("\n\n")
    header, *lines = table.splitlines()
    ends = {m.short: header.index(m.short) + len(m.short) for m in figures_of(comparison.variants)}
    rows = lines[: len(comparison.variants)]
    ranked, others = by_rank(comparison)
    found = {}
    for row, variant in zip(rows, (*ranked, *others), strict=True):
        cells = {title: row[:end].split("  ")[-1].strip() for title, end in ends.items()}
        found[variant_label(variant)] = {title: number(cell) for title, cell in cells.items() if cell}
    title, answer = screen.splitlines()[0].split("  ", 1)
    return f"{title}: {answer.strip()}.", found


def markdown(comparison: Comparison, run: RunDir) -> Shown:
    text = summary_markdown(comparison)
    lines = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("|")]
    header, _, *rows = ([cell.strip() for cell in line] for line in lines)
    known = {metric.short for metric in figures_of(comparison.variants)}
    found = {
        row[0].replace("\\", ""): {  # Markdown escapes `_`
            title: number(cell) for title, cell in zip(header, row, strict=True) if title in known and cell
        }
        for row in rows
    }
    return text.split("**")[1].replace("\\", ""), found


def hparams(comparison: Comparison, run: RunDir) -> Shown:
    write_tensorboard(comparison, run)
    root = EventAccumulator(str(run.path)).Reload()
    content = root.summary_metadata[metadata.EXPERIMENT_TAG].plugin_data.content
    experiment = HParamsPluginData.FromString(content).experiment
    short = {metric.key: metric.short for metric in METRICS}
    titles = {info.name.tag: info.display_name for info in experiment.metric_infos}
    assert titles == {metric.key: metric.label for metric in METRICS if metric.key in titles}
    found = {}
    for variant in comparison.variants:
        events = EventAccumulator(str(run.variant(variant.id))).Reload()
        keys = [key for key in titles if key in events.Tags()["scalars"]]
        found[variant_label(variant)] = {short[key]: events.Scalars(key)[0].value for key in keys}
    return experiment.description[: len(comparison.headline)], found


def tab(comparison: Comparison, run: RunDir) -> Shown:
    return drawn(run_answer(own(run)))


def html(comparison: Comparison, run: RunDir) -> Shown:
    return drawn(report_data(comparison, run)["run"])


def drawn(answer: dict[str, Any]) -> Shown:
    """What the page draws from an answer."""
    titles = {each["key"]: each["short"] for each in answer["metrics"]}
    figures = {
        variant["label"]: {titles[key]: number(figure["text"]) for key, figure in variant["figures"].items()}
        for variant in answer["variants"]
    }
    return answer["headline"], figures


def printed_json(comparison: Comparison, run: RunDir) -> Shown:
    import click

    @click.command()
    def command() -> None:
        print_comparison(comparison, run, as_json=True)

    data = msgspec.json.decode(CliRunner().invoke(command).stdout)
    titles = {each["key"]: each["short"] for each in data["metrics"]}
    labels = map(variant_label, comparison.variants)
    found = {
        label: {titles[key]: value for key, value in variant["figures"].items()}
        for label, variant in zip(labels, data["variants"], strict=True)
    }
    return f"Fastest: {data['findings'][0]['text']}.", found


REPORTS = [terminal, markdown, hparams, tab, html, printed_json]
FOR_PEOPLE = [terminal, markdown, tab, html]
"""Reports whose units are the readable ones."""
SMALLER = {("GiB", "MiB"): 1024, ("GiB", "KiB"): 1024**2, ("GFLOP/s", "MFLOP/s"): 1e3}
PER_UNIT = {(metric.unit, metric.unit): 1.0 for metric in METRICS} | {("MB/s", "MB/s"): 1.0} | SMALLER


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    found = RunDir(tmp_path / "gpt")
    for variant in COMPARISON.variants:
        found.variant(variant.id).mkdir(parents=True)
    return found


def test_results_of_another_gpurun_are_made_again_or_not_shown(run: RunDir, wording: Wording) -> None:
    """It may have concluded otherwise: the tab must not say what the terminal doesn't."""
    write_json(run.comparison, replace(COMPARISON, conclusions=CONCLUSIONS - 1))
    assert_same(html, COMPARISON, run)
    answer = run_answer(own(run))
    wording(answer["headline"])
    wording(answer["details"])
    assert [each["label"] for each in answer["variants"]] == list(map(variant_label, COMPARISON.variants))
    assert not list(fractions(msgspec.to_builtins([answer["variants"], answer["comparison"].variants])))
    assert not answer["facts"]


def fractions(value: Any) -> Iterator[float]:
    """Every number in an answer that isn't whole: what was measured."""
    if isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from fractions(item)
    elif isinstance(value, float):
        yield value


RUNS = sorted((Path(__file__).resolve().parents[3] / "docs" / "runs").iterdir())


@pytest.fixture(params=RUNS, ids=lambda path: path.name)
def recorded(request: pytest.FixtureRequest, tmp_path: Path) -> RunDir:
    shutil.copytree(request.param, tmp_path / request.param.name)
    return RunDir(tmp_path / request.param.name)


def test_every_report_of_a_recorded_run_shows_the_same(recorded: RunDir) -> None:
    comparison = compare_run(recorded)
    assert read_comparison(own(recorded)) == msgspec.convert(msgspec.to_builtins(comparison), Comparison)
    for report in REPORTS:
        assert_same(report, comparison, recorded)


def test_report_compares_again_what_another_gpurun_compared(recorded: RunDir) -> None:
    stored = recorded.comparison.read_bytes()
    write_json(recorded.comparison, {**msgspec.json.decode(stored), "conclusions": 0, "findings": []})
    done = CliRunner().invoke(cli, ["report", str(recorded.path)])
    assert done.exit_code == 0, done.output
    assert recorded.comparison.read_bytes() == stored


def test_report_leaves_a_strangers_run_as_it_is(recorded: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = {**msgspec.json.decode(recorded.comparison.read_bytes()), "conclusions": 0}
    write_json(recorded.comparison, stored)
    monkeypatch.setattr(os, "geteuid", lambda: recorded.path.stat().st_uid + 1)
    before = {path: path.stat().st_mtime_ns for path in recorded.path.rglob("*")}
    done = CliRunner().invoke(cli, ["report", str(recorded.path)])
    assert done.exit_code == 0, done.output
    assert {path: path.stat().st_mtime_ns for path in recorded.path.rglob("*")} == before


@pytest.mark.parametrize("report", REPORTS)
def test_every_report_has_the_headline_and_the_figures(report: Report, run: RunDir) -> None:
    write_json(run.comparison, COMPARISON)
    assert_same(report, COMPARISON, run)


def assert_same(report: Report, comparison: Comparison, run: RunDir) -> None:
    headline, found = report(comparison, run)
    assert headline == comparison.headline
    base, shown = ({m.key: m for m in found} for found in (METRICS, figures_of(comparison.variants)))
    titles = {key: (shown if report in FOR_PEOPLE else base)[key] for key in shown}
    values = values_of(comparison.variants)
    for variant in comparison.variants:
        expected = {
            titles[key].short: value * PER_UNIT[base[key].unit, titles[key].unit]
            for key, value in values[variant.id].items()
        }
        assert found[variant_label(variant)] == pytest.approx(expected, rel=0.02, abs=0.006)


def test_a_wrong_gradient_is_read_before_any_figure_in_every_report(run: RunDir) -> None:
    """A split that trains another model must not be recommended for its speed."""
    wrong = finding("gradient-differs", "ddp-2-40-24", of="ddp 40/24: ", error="0.051")
    alert = wrong.text
    comparison = replace(COMPARISON, findings=ranked((*COMPARISON.findings, wrong)))
    write_json(run.comparison, comparison)
    lines = render_table(comparison, 80, plain=True).splitlines()
    assert f"! {alert}" in lines[: lines.index("")]
    assert f"**! {alert}**\n" in summary_markdown(comparison).partition("\n| variant")[0]
    write_tensorboard(comparison, run)
    content = EventAccumulator(str(run.path)).Reload().summary_metadata[metadata.EXPERIMENT_TAG].plugin_data
    description = HParamsPluginData.FromString(content.content).experiment.description
    assert description.startswith(comparison.headline)
    assert f"  \n! {alert}." in description
    for answer in (run_answer(own(run)), report_data(comparison, run)["run"]):
        assert alert in answer["alerts"]
    (page,) = (file.read_text() for file in (STATIC / "splits").glob("splits.js"))
    assert page.index("run.answer.alerts") < page.index("view.controls()")


@pytest.mark.parametrize("report", REPORTS)
def test_figures_of_a_tiny_model_have_a_readable_unit(report: Report, run: RunDir) -> None:
    """Programs get the unit that the name of the key says."""
    tiny = tuple(
        replace(
            variant,
            flop_per_s=3.36e5 * (1 + place),
            ranks=tuple(replace(rank, peak_gib=4.3e-6, memory_gib={}) for rank in variant.ranks),
        )
        for place, variant in enumerate(COMPARISON.variants)
    )
    comparison = replace(COMPARISON, variants=tiny)
    write_json(run.comparison, comparison)
    assert_same(report, comparison, run)
    titles = sorted(key for key in report(comparison, run)[1]["ddp 32/32"] if re.search("FLOP/s|peak", key))
    assert titles == (["MFLOP/s", "peak KiB"] if report in FOR_PEOPLE else ["GFLOP/s", "peak GiB"])


@pytest.mark.parametrize("report", REPORTS)
def test_a_new_figure_is_one_row(report: Report, run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it isn't computed yet, it costs a second file: a field of `Rates`, with its computation."""
    new = Metric(
        key="input_mb_per_s",
        title="input",
        short="MB/s in",
        unit="MB/s",
        value=lambda variant: None if variant.input_bytes_per_s is None else variant.input_bytes_per_s / 1e6,
        text=lambda value: f"{value:.1f}",
        better="higher",
        drop=8,
    )
    monkeypatch.setattr(metrics, "METRICS", (*METRICS, new))
    monkeypatch.setitem(globals(), "METRICS", (*METRICS, new))
    variants = tuple(replace(variant, input_bytes_per_s=42.5e6) for variant in COMPARISON.variants)
    comparison = replace(COMPARISON, variants=variants)
    write_json(run.comparison, comparison)
    assert_same(report, comparison, run)


def test_the_page_has_the_parts_of_a_step_that_the_terminal_has() -> None:
    source = (STATIC / "shared/phases.js").read_text(encoding="utf-8")
    listed = re.search(r"PHASES = \[(.*?)\]", source)
    assert listed
    assert re.findall(r"'(\w+)'", listed[1]) == list(PARTS) == list(TRACED)
