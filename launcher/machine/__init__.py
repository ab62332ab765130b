"""This machine without torch: host, kinds of device, GPUs, topology, limits, process tree."""

LOOPBACK = "127.0.0.1"
"""The address at which processes listen: no other machine can connect unless a job spans several nodes."""
