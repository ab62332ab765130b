"""Building the index of a variant's traces, in a process of its own."""
