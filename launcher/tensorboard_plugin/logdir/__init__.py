"""Reads a log directory. All of it is untrusted."""
