"""Analyses the columns of one rank, and of all ranks together."""
