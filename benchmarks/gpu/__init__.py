"""Ordered checks for a machine with one GPU, the most valuable first."""
