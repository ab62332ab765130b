"""How the command line prints what several of its commands have to say."""

import sys
from pathlib import Path
from typing import Any

import click


def width() -> int:
    """Columns of the terminal; 80 where there is none, so that piped output is the same everywhere."""
    import shutil

    return shutil.get_terminal_size((80, 24)).columns if sys.stdout.isatty() else 80


def show_json(value: Any) -> None:
    """Prints the value for a program; NaN and infinity become `null`."""
    import msgspec

    click.echo(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())


def print_comparison(comparison: Any, path: Path, as_json: bool) -> None:
    """The table for a person, or the whole comparison for a program."""
    if as_json:
        from gpurun.launcher.report.metrics import with_figures

        show_json(with_figures(comparison))
        return
    from gpurun.launcher.report.terminal.table import render_table

    click.echo(render_table(comparison, width(), plain=not sys.stdout.isatty(), run_path=str(path)))
