"""Finds the first failure, reports it, and decides whether a launch should restart."""
