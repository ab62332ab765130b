"""A rank: with `workloads`, the only part that imports torch.

It runs in child processes and answers through the run directory.

Its directories import each other in one order, from the bottom: `accelerators` (what depends on the kind of
device), `meters`, `base` (what all ranks need), `strategies`, `profiling`, `training` (workloads),
`micro_benchmark`, `program` (unchanged programs), `selftest`, `entry` (how the processes start).
"""

ORDER = (
    "accelerators",
    "meters",
    "base",
    "strategies",
    "profiling",
    "training",
    "micro_benchmark",
    "program",
    "selftest",
    "entry",
)
"""Packages from the bottom; a test reads every import."""
