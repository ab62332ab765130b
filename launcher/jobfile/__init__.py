"""YAML in, a checked `JobSpec` out; every mistake of a file with its line and column."""
