"""Benchmarks, as ratios within one run since machines are noisy. `python -m benchmarks` prints the tables."""
