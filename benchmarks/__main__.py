"""`python -m benchmarks [NAME …]`: all of them, or the named ones; `fuzz [TARGET …]`: input of strangers."""

import argparse
import importlib
import sys

MODULES = (
    "cost.startup",
    "cost.launch",
    "cost.engine_start",
    "cost.hooks",
    "cost.overhead",
    "cost.sweep",
    "cost.profiler",
    "cost.memory",
    "verdicts.accuracy",
    "verdicts.statistics",
    "verdicts.alike",
    "verdicts.sharing",
    "verdicts.truth",
    "verdicts.tuning",
    "faults.reliability",
    "faults.jobs",
    "faults.supervision",
    "faults.nodes",
    "faults.agents",
    "faults.engines",
    "faults.long",
    "traces.trace",
    "traces.timeline",
    "traces.bubble",
    "splitting.balanced",
    "shi2016",
)
NAMES = {module.rpartition(".")[2]: f"benchmarks.{module}" for module in MODULES}
"""Modules by the names that the command line has for them."""


def main() -> None:
    """Runs the benchmarks one after the other; each writes its own section of RESULTS.md."""
    if sys.argv[1:2] == ["fuzz"]:
        importlib.import_module("benchmarks.fuzz").main(sys.argv[2:])
        return
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(NAMES)}; without one, all")
    parser.add_argument("--times", type=int, help="how often `jobs` or `engines` runs each of its jobs")
    options = parser.parse_args()
    names = options.names
    if options.times is not None and names not in (["jobs"], ["engines"]):
        parser.error("--times is for `jobs` or `engines` alone")
    unknown = [name for name in names if name not in NAMES]
    if unknown:
        parser.error(f"there is no benchmark {', '.join(unknown)}; there are {', '.join(NAMES)}")
    for name in names or NAMES:
        importlib.import_module(NAMES[name]).main(*([] if options.times is None else [options.times]))


if __name__ == "__main__":
    main()
