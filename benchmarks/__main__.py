"""`python -m benchmarks [NAME …]`: all of them, or those that are named."""

import importlib
import sys

NAMES = (
    "startup",
    "launch",
    "hooks",
    "overhead",
    "sweep",
    "accuracy",
    "statistics",
    "reliability",
    "supervision",
    "truth",
    "trace",
    "profiler",
    "balanced",
    "timeline",
    "nodes",
)

if __name__ == "__main__":
    for name in sys.argv[1:] or NAMES:
        importlib.import_module(f"benchmarks.{name}").main()
