"""The only part that imports torch. It runs in child processes and answers through the run directory."""
