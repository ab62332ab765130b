"""Batch systems that gpurun runs under or submits to: one module and one line of the table each."""

from gpurun.launcher.schedulers.base import Scheduler
from gpurun.launcher.schedulers.slurm import SLURM
from gpurun.launcher.schedulers.torchelastic import TORCHELASTIC

SCHEDULERS: dict[str, Scheduler] = {
    "torchelastic": TORCHELASTIC,
    "slurm": SLURM,
}
"""By name: `gpurun submit --NAME`. Where several say which node this is, the first one counts."""
