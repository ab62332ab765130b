"""The command line: the only part that prints and exits. A file per command is in `commands/`."""
