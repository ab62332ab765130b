"""YAML in, a checked `JobSpec` out; every mistake of a file with its line and column."""

DEVICES_HELP = "auto, cpu:2, cuda for all GPUs, or some by commas: cuda:0,cuda:2."
"""Here, where the command line has it without reading how jobs are read."""
