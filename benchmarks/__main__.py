"""`python -m benchmarks [NAME …]`: all of them, or the named ones; `fuzz [TARGET …]`: input of strangers;
`launcher_tests FILE …`: torch's tests of its launcher; `corpus DIR`: public traces; `improve [DIR]`: searches
of `gpurun improve`, which take hours."""

import argparse
import importlib
import sys

MODULES = (
    "cost.startup",
    "cost.launch",
    "cost.overhead",
    "cost.sweep",
    "verdicts.statistics",
    "verdicts.truth",
    "verdicts.tuning",
    "faults.engines",
    "traces.trace",
    "traces.timeline",
    "traces.sleeping",
    "shi2016",
)
NAMES = {module.rpartition(".")[2]: f"benchmarks.{module}" for module in MODULES}
"""Modules by the names that the command line has for them."""

OWN = {
    "fuzz": "benchmarks.fuzz",
    "launcher_tests": "benchmarks.faults.launcher_tests",
    "improve": "benchmarks.verdicts.improve",
    "corpus": "benchmarks.traces.corpus",
}
"""Those that take arguments of their own, and aren't among all."""


def main() -> None:
    """Runs the benchmarks one after the other; each writes its own section of RESULTS.md."""
    if sys.argv[1:2] and sys.argv[1] in OWN:
        importlib.import_module(OWN[sys.argv[1]]).main(sys.argv[2:])
        return
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(NAMES)}; without one, all")
    parser.add_argument("--times", type=int, help="how often `engines` runs each of its jobs")
    parser.add_argument(
        "--only", action="append", metavar="ENGINE", help="that `engines` runs; may be repeated; without, all"
    )
    parser.add_argument(
        "--since",
        metavar="COMMIT",
        help="`engines` counts jobs at this commit and later ones; without, since the last change of gpurun",
    )
    options = parser.parse_args()
    names = options.names
    given = {key: value for key, value in vars(options).items() if key != "names" and value is not None}
    if given and names != ["engines"]:
        parser.error("--times, --only and --since are for `engines` alone")
    unknown = [name for name in names if name not in NAMES]
    if unknown:
        parser.error(f"there is no benchmark {', '.join(unknown)}; there are {', '.join(NAMES)}")
    for name in names or NAMES:
        importlib.import_module(NAMES[name]).main(**given)


if __name__ == "__main__":
    main()
