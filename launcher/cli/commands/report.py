"""`gpurun report`, `view` and `metrics`: what runs show; they run nothing."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import click

from gpurun.launcher.cli.options import (
    WholeNumber,
    json_option,
    run_argument,
)
from gpurun.launcher.cli.output import (
    print_comparison,
    say_if_large,
    show_improvement,
    show_json,
    warn,
)
from gpurun.launcher.errors import MachineError, Problem, SpecError, no_directory


def print_table(comparison: Any, run: Any, details: bool = False) -> None:
    """The table; in detail with the lines that put the fastest uneven split into a training script."""
    from gpurun.launcher.report.snippet import lines_to_paste

    print_comparison(comparison, run, as_json=False, details=details)
    if details and (text := lines_to_paste(comparison)):
        click.echo(f"\n{text}")


def write_for_tensorboard(comparison: Any, run: Any) -> None:
    """TensorBoard's files in the run directory."""
    from gpurun.launcher.report.tensorboard import write_tensorboard
    from gpurun.launcher.rundir.store import source_of

    write_tensorboard(comparison, run)
    source = source_of(run.path)
    click.echo(f"TensorBoard files are in {run.path}; to view them: gpurun view {source}", err=True)


def write_page(comparison: Any, run: Any, with_host: bool = False, output: Path | None = None) -> None:
    """One HTML file with everything in it."""
    from gpurun.launcher.tensorboard_plugin.html import write_html

    click.echo(f"wrote {write_html(comparison, run, with_host, output)}; open it in a browser", err=True)


def log_to(name: str, comparison: Any, run: Any, with_host: bool = False) -> None:
    """A run of an experiment tracker, and one per variant."""
    from gpurun.launcher.report.tensorboard import run_name
    from gpurun.launcher.report.trackers import TRACKERS, Logged, log_comparison
    from gpurun.launcher.tensorboard_plugin.html import comparison_without_host, render_html

    def logged() -> Logged:
        shown = comparison if with_host else comparison_without_host(comparison, run)
        return Logged(shown, run_name(run), render_html(comparison, run, with_host))

    # Said before: MLflow tries for minutes to reach a server that doesn't answer.
    click.echo(f"logging to {TRACKERS[name].title} …", err=True)
    click.echo(log_comparison(name, logged), err=True)


FORMATS: dict[str, Callable[..., None]] = {
    "table": print_table,
    "json": partial(print_comparison, as_json=True),
    "tensorboard": write_for_tensorboard,
    "html": write_page,
    "mlflow": partial(log_to, "mlflow"),
    "wandb": partial(log_to, "wandb"),
}
"""Values of `--format`."""
FOR_OTHERS = ("html", "mlflow", "wandb")
"""Formats without host names, unless `--with-host` is given."""


@dataclass(frozen=True)
class Concluded:
    """The part of a stored comparison that shows which version of gpurun made it."""

    conclusions: int = 0


def keep_if_other(comparison: Any, run: Any) -> None:
    """Writes `comparison.json` of an own run again where another gpurun wrote it, as the tab shows it."""
    from gpurun.launcher.rundir.control import write_in
    from gpurun.launcher.rundir.files import as_json

    with suppress(MachineError):  # there is none yet, or it can't be written: what is shown needs none
        if run.read(run.comparison, Concluded).conclusions != comparison.conclusions:
            write_in(run, run.comparison, as_json(comparison).encode(), is_asked=False)


@click.command()
@run_argument
@click.option(
    "--format",
    "formats",
    default="table",
    metavar="LIST",
    help=f"{', '.join(FORMATS)}: one or several, separated by commas.",
)
@json_option
@click.option(
    "--details", is_flag=True, help="Show all that was found, and the code to train with an uneven split."
)
@click.option(
    "--with-host",
    is_flag=True,
    help="Keep host names, addresses, GPU UUIDs and other processes in html, mlflow and wandb.",
)
@click.option(
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE.html",
    help="The file that html writes instead of RUN/report.html.",
)
def report(
    run: Path, formats: str, as_json: bool, details: bool, with_host: bool, output: Path | None
) -> None:
    """Show the results of a run or a search again, without running anything.

    With --details, show all that was found, by variant; if an uneven split is ahead, also the code to use it
    in a training script.

    The format html writes RUN/report.html, a single file that opens offline in any browser. It has no host
    names, GPU UUIDs or other users' processes unless --with-host is given.

    The formats mlflow and wandb log the comparison to MLflow or Weights & Biases, if that is installed: a run
    with the report, and one per variant. Their own variables say where to: MLFLOW_TRACKING_URI, WANDB_PROJECT
    and so on. W&B is offline unless WANDB_MODE=online.

    Example: gpurun report runs/gpt-splits/latest --format table,html
    """
    from gpurun.launcher.compare.build import compare_run
    from gpurun.launcher.jobfile.yaml.describe import near_or_all
    from gpurun.launcher.run.find import find_run, search_directory

    names = [name.strip() for name in formats.split(",")]
    if as_json:  # stdout has nothing else then
        names = ["json", *(name for name in names if name not in ("json", "table"))]
    for name in names:
        if name not in FORMATS:
            raise SpecError(f"--format {name}: {near_or_all(name, FORMATS, 'formats')}")
    if output is not None:
        check_output(output, names)
    if names in (["table"], ["json"]) and (search := search_directory(run)) is not None:
        show_search(search, as_json=names == ["json"])
        return
    found = find_run(run)
    say_if_large(found)
    comparison = compare_run(found)
    keep_if_other(comparison, found)
    problems: list[Problem | str] = []
    for name in names:
        keep: dict[str, Any] = {"with_host": with_host} if name in FOR_OTHERS else {}
        keep |= {"details": details} if name == "table" else {}
        try:
            FORMATS[name](comparison, found, **keep, **({"output": output} if name == "html" else {}))
        except MachineError as error:  # the other formats are made all the same
            problems += error.problems
    if problems:
        raise MachineError(*problems)


def show_search(search: Path, as_json: bool) -> None:
    """What a search of `gpurun improve` has found, as that command shows it."""
    from gpurun.launcher.rundir.files import read_json
    from gpurun.launcher.rundir.improvement import Improvement
    from gpurun.launcher.rundir.paths import IMPROVEMENT, places_of
    from gpurun.launcher.rundir.store import source_of

    found = read_json(search / IMPROVEMENT, Improvement, places_of((search,)))
    show_improvement(found, str(source_of(search)), as_json)


def check_output(output: Path, formats: Sequence[str]) -> None:
    """Returns if the page can be in that file.

    Raises:
        click.UsageError: its directory is missing, or there is no page.
    """
    if "html" not in formats:
        raise click.UsageError("--output is for html; write: --format html --output FILE.html")
    if not output.parent.is_dir():
        raise click.UsageError(no_directory(output.parent))


port_option = click.option(
    "--port", type=WholeNumber(0, 65535), default=0, help="Port on 127.0.0.1; default: a free one."
)


@click.command()
@run_argument
@port_option
def view(run: Path, port: int) -> None:
    """Open TensorBoard for a run, or a directory of runs or Kineto traces, on 127.0.0.1 until Ctrl-C.

    Example: gpurun view runs/gpt-splits/latest
    """
    from gpurun.launcher.rundir.store import refreshed, source_of
    from gpurun.launcher.tensorboard_plugin.view import is_empty, open_view

    with refreshed(run, warn), open_view(run, port=port) as server:
        click.echo(f"TensorBoard: {server.tab}  (Ctrl-C ends it)")
        if is_empty(run):
            place = source_of(run)
            warn(
                f"{place} has no run, trace or event file yet; the page fills in when one is written:"
                f" gpurun JOB.yaml --out {place}/NAME"
            )
        server.wait()


@click.command()
@run_argument
@port_option
def metrics(run: Path, port: int) -> None:
    """Serve the live figures of a run as OpenMetrics, for Prometheus, on 127.0.0.1 until Ctrl-C.

    Of runs/NAME/latest, each scrape gets the newest run.

    Example: gpurun metrics runs/gpt-splits/latest --port 9400
    """
    from gpurun.launcher.rundir.store import refreshed
    from gpurun.launcher.tensorboard_plugin.openmetrics import PATH, metrics_server

    with refreshed(run, warn), metrics_server(run, port) as server:
        click.echo(f"OpenMetrics: http://127.0.0.1:{server.port}{PATH}  (Ctrl-C ends it)")
        server.serve_forever()


@click.command()
@click.argument("code", required=False)
@json_option
def explain(code: str | None, as_json: bool) -> None:
    """Explain a finding: what it means, how it is decided, and what to do. Without a CODE, list all.

    CODE may be a case of a kind of finding, as in `figures` of the JSON: `steps-grow`.

    `gpurun report RUN --json` has the code of each finding.

    Example: gpurun explain waits-for-larger-batch
    """
    from difflib import get_close_matches

    from gpurun.launcher.cli.output import line_width
    from gpurun.launcher.findings.finding_kinds import KINDS, LABELS, cases_of, explained
    from gpurun.launcher.report.terminal.grid import wrap

    code, case = code.lower() if code else None, None
    if code is not None and code not in KINDS:
        code, case = next((name for name, kind in KINDS.items() if code in kind.cases), code), code
    if code is not None and code not in KINDS:
        near = get_close_matches(code, [*KINDS, *(case for kind in KINDS.values() for case in kind.cases)], 1)
        meant = f"did you mean {near[0]}? " if near else ""
        raise SpecError(f"{code} is no finding: {meant}`gpurun explain` lists all")
    found = explained([code] if code else KINDS)
    if as_json:
        show_json({"schema": 1, "findings": found})
    elif code is None:
        longest = max(map(len, KINDS))
        for each in found:
            click.echo(f"{each['code']:<{longest}}  {each['level']:<6}  {each['means']}")
    else:
        (entry,) = found
        click.echo(f"{entry['code']} ({entry['level']})")
        for name, label in LABELS.items():
            click.echo("\n".join(["", *wrap(f"{label}: {entry[name]}", line_width())]))
        cases = (entry["cases"] if case is None else {case: entry["cases"][case]}).items()
        click.echo("\n".join(line for each in cases_of(dict(cases)) for line in wrap(each, line_width())))
