"""gpurun: launch, measure and compare every way of splitting a training batch over your devices."""

from launcher.stepping import step

__all__ = ["step"]
__version__ = "0.1.0"
