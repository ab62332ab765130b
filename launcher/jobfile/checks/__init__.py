"""Mistakes in a job file that need more than one key, the machine or the source of the workload."""
