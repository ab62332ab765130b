"""`gpurun` and `python -m gpurun`."""

import gc

from gpurun.launcher.cli.interrupt import EXIT_CODE, quit_on_interrupt, raise_on_interrupt

quit_on_interrupt()  # before anything else is imported: that is most of a short command's time


def main() -> None:
    """The command line, with 130 and no traceback whenever Ctrl-C comes."""
    from gpurun.launcher.cli.streams import prepare_streams

    prepare_streams()
    from gpurun.launcher.cli.main import main as run_command

    try:
        raise_on_interrupt()
        run_command()
    except KeyboardInterrupt:
        raise SystemExit(EXIT_CODE) from None
    finally:
        quit_on_interrupt()
        gc.freeze()  # else the interpreter's end looks for garbage among all objects: 0.1 s


if __name__ == "__main__":
    main()
