"""Micro-benchmarks, which have cases instead of steps."""
