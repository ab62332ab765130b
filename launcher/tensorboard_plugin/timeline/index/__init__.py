"""Builds the index of a variant's traces in a separate process."""
