"""`gpurun view`: TensorBoard for a run."""

from pathlib import Path

import click

from gpurun.launcher.cli.options import run_argument


@click.command()
@run_argument
@click.option("--port", default=0, help="Port on 127.0.0.1; default: a free one.")
def view(run: Path, port: int) -> None:
    """Open TensorBoard for a run, or a directory of runs or Kineto traces, on 127.0.0.1 until Ctrl-C.

    Example: gpurun view runs/gpt-splits/latest
    """
    from gpurun.launcher.tensorboard_plugin.view import open_view

    with open_view(run, port=port) as server:
        click.echo(f"TensorBoard: {server.tab}  (Ctrl-C ends it)")
        server.wait()
