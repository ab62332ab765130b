"""The training of a workload: batches, steps, checks, timed rounds."""
