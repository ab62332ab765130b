"""gpurun: launch, measure and compare every way of splitting a training batch over your devices."""

__version__ = "0.1.0"
