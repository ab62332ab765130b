"""Training workloads: the interface that every model has to meet, and the built-in ones."""

from workloads.base import Workload, device_index, on_device

__all__ = ["Workload", "device_index", "on_device"]
