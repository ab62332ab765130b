"""The figures of one variant, from what a run directory holds about it."""
