"""Effects: processes, signals, logs, progress. Everything that a plan sets in motion."""
