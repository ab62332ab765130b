"""The command `gpurun`: plans, launches, measures and compares. Imported as `gpurun.launcher`."""

__version__ = "0.1.0"

FLOORS = (
    "errors units grouping splits stepping strategies masking syntax",
    "findings",
    "workloads",
    "machine",
    "rundir",
    "stats balance",
    "jobfile",
    "trace",
    "plan",
    "compare",
    "logs inspect",
    "processes",
    "failures",
    "schedulers",
    "nodes",
    "worker",
    "report",
    "run",
    "tensorboard_plugin",
    "start_on_nodes",
    "start_gate",
    "search",
    "improve",
    "selftest",
    "start",
    "cli",
)
"""The order of the packages, from the bottom: modules import from their own floor and from those below it."""
