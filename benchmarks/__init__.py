"""Speed, as ratios within one run: machines are noisy. `python -m benchmarks` prints the tables."""
