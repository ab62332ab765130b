"""Finds the root cause of a failed launch, and reports failures, hangs and restarts."""
