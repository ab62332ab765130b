"""This machine without torch: host, GPUs, topology, limits, process tree."""
