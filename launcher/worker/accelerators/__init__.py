"""Clocks, events and memory of the devices that a rank computes on."""
