"""`python -m benchmarks [NAME …]`: all of them, or the named ones; `fuzz [TARGET …]`: input of strangers."""

import argparse
import importlib

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
    "shi2016",
    "timeline",
    "nodes",
    "agents",
    "sharing",
)


def main() -> None:
    """Runs the benchmarks one after the other; each writes its own section of RESULTS.md."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(NAMES)}; without one, all")
    names = parser.parse_args().names
    if names[:1] == ["fuzz"]:
        importlib.import_module("benchmarks.fuzz").main(names[1:])
        return
    unknown = [name for name in names if name not in NAMES]
    if unknown:
        parser.error(f"there is no benchmark {', '.join(unknown)}; there are {', '.join(NAMES)}")
    for name in names or NAMES:
        importlib.import_module(f"benchmarks.{name}").main()


if __name__ == "__main__":
    main()
