"""`python -m benchmarks fuzz [TARGET …] [--minutes M]`: what strangers send brings no traceback."""

import argparse
from collections.abc import Sequence
from importlib import import_module

from benchmarks.fuzz.guard import run_all
from benchmarks.timing import machine_facts, record

TARGETS = ("job", "trace", "rundir", "messages", "http")


def main(argv: Sequence[str] = ()) -> None:
    """Fuzzes the named targets, or all; each has its own section in RESULTS.md, unless --count is given."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks fuzz", description=__doc__)
    parser.add_argument(
        "targets", nargs="*", metavar="TARGET", help=f"of {', '.join(TARGETS)}; without one, all"
    )
    parser.add_argument("--count", type=int, help="how many inputs of each; the results are only printed")
    parser.add_argument(
        "--first", type=int, default=0, help="number of the first input: to go on where another call ended"
    )
    parser.add_argument(
        "--minutes", type=float, default=0, help="go on with further inputs until so much time has passed"
    )
    options = parser.parse_args(argv)
    if options.first and (not options.targets or "messages" in options.targets):
        parser.error("--first is for named targets other than messages")
    if unknown := [name for name in options.targets if name not in TARGETS]:
        parser.error(f"nothing to fuzz called {', '.join(unknown)}; there is {', '.join(TARGETS)}")
    for name in options.targets or TARGETS:
        facts = machine_facts()
        result = fuzz(name, options.count, options.first, 60 * options.minutes)
        if options.count is None:
            record(f"Fuzz: {name}", result, facts)
        else:
            print(f"Fuzz: {name}\n\n{result}")


def fuzz(name: str, count: int | None = None, first: int = 0, least_s: float = 0) -> str:
    """What came of one target, in a sentence; see `run_all`."""
    target = import_module(f"benchmarks.fuzz.{name}")
    if name == "messages":  # a server and its connections, not a function of its input
        sizes = () if count is None else (count, count // 10)
        result: str = target.fuzz_messages(*sizes, least_s=least_s)
        return result
    prepare = getattr(target, "prepare", None)
    return run_all(name, target.case, target.COUNT if count is None else count, prepare, first, least_s)
