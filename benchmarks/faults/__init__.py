"""Whether failures are found, and nothing is left behind."""
