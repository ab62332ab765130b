"""Measurements of a rank next to time: CPU time, other load, the load of GPUs, memory."""
