"""Makes `sim` a device of torch; torch calls `autoload` when it is imported, as it does for any backend."""

import torch
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from tests.sim.faults import injected
from tests.sim.machine import KIND


class Hook(torch._C._acc.PrivateUse1Hooks):
    """What torch's C++ asks about the device."""

    def is_available(self) -> bool:
        return True

    def has_primary_context(self, device: int) -> bool:
        return True

    def is_built(self) -> bool:
        return True


def autoload() -> None:
    """Entry point of the group `torch.backends`."""
    from tests.sim.backend import collectives, parallel, tensor
    from tests.sim.backend.module import SimModule

    _setup_privateuseone_for_python_backend(KIND, SimModule(), Hook())
    for part in (tensor, collectives, parallel):
        part.register()
    if injected():
        from tests.sim.backend import faulty

        faulty.register()
