"""`gpurun` and `python -m launcher`."""

import sys

from launcher.interrupt import EXIT_CODE, quit_on_interrupt, raise_on_interrupt

quit_on_interrupt()  # here already: the imports below are most of a short command's time


def main() -> None:
    """The command line, with 130 and no traceback whenever Ctrl-C comes."""
    from launcher.cli import main as run_command

    try:
        raise_on_interrupt()
        run_command()
    except KeyboardInterrupt:
        sys.exit(EXIT_CODE)
    finally:
        quit_on_interrupt()


if __name__ == "__main__":
    main()
