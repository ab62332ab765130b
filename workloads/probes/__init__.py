"""Micro-benchmarks: they measure one property of the machine, as a curve over size, and train nothing."""
