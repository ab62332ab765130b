"""Python imports this when it starts: adds the simulated kind to the table of accelerators."""

from gpurun.launcher.machine.accelerators import ACCELERATORS
from tests.sim.machine import SIM

ACCELERATORS[SIM.name] = SIM

from tests.sim import faults  # noqa: E402

if found := faults.injected():
    faults.install(found)
