"""What a change that `gpurun improve` has written gains: in runs that have nothing to do with its search."""

import json
import math
import re
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.timing import output
from gpurun.launcher.stats.estimates import percent_from_log, t_quantile

LEAST_TURNS, MOST_TURNS = 3, 10
"""Turns in which both sides are run; their number depends on the time alone."""
LEAST_STEPS, MOST_STEPS, TIMED_MS = 15, 400, 1500.0
"""Steps of a launch of a program, as many as take so long."""
CLOCK = "milliseconds per step:"
"""What a program with its own clock prints before them."""


@dataclass(frozen=True)
class Side:
    """A program or workload, as it is or changed."""

    directory: Path
    env: Mapping[str, str]
    within: Callable[[Sequence[str]], list[str]]
    """The command line in the network of the program."""

    def output(self, *line: str) -> str:
        """What a command prints in this directory.

        Raises:
            RuntimeError: it failed.
        """
        return output(self.within(line), self.directory, self.env)

    def by_gpurun_ms(self, what: Sequence[str], size: str, *settings: str) -> float:
        """Milliseconds per step of one run, of which `size` says how long it is."""
        given = (f"steps={{{size}}}", "profile.steps=0", "until=fixed", *settings)
        options = [word for each in given for word in ("--set", each)]
        found = self.output(sys.executable, "-m", "gpurun", *what, "--json", "--quiet", *options)
        step_ms = json.loads(found)["variants"][0]["step_ms"]
        return float(step_ms["estimate"])

    def by_its_clock_ms(self, ranks: int) -> float:
        """Milliseconds per step as the program prints them, started by torchrun."""
        torchrun = (sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}")
        where = ("--master-addr=127.0.0.1", "--master-port=29517")
        try:
            text = self.output(*torchrun, *where, "train.py")
        except RuntimeError as failure:  # torch's own threads abort now and then when the program has ended
            text = str(failure)
        found = re.search(f"{CLOCK} ([0-9.]+)", text)
        assert found is not None, "the program printed no time of its steps"
        return float(found[1])


@dataclass(frozen=True)
class TrueGain:
    """Percent of the time of a step: negative is faster."""

    percent: float
    error: float
    """Its standard error."""
    turns: int

    def contradicts(self, ci: Sequence[float]) -> bool:
        """Whether it is outside of an interval, widened by its own error of 95 %."""
        more = t_quantile(0.975, self.turns - 1) * self.error
        return not ci[0] - more <= self.percent <= ci[1] + more


def gain_of(original_ms: Sequence[float], changed_ms: Sequence[float]) -> TrueGain:
    """The gain by both sides' steps of each turn: the mean of the logarithms of their ratios."""
    logs = [math.log(new / old) for old, new in zip(original_ms, changed_ms, strict=True)]
    percent = percent_from_log(statistics.mean(logs))
    error = (100 + percent) * statistics.stdev(logs) / math.sqrt(len(logs))
    return TrueGain(percent, error, len(logs))


def in_turns(
    original: Callable[[], float],
    changed: Callable[[], float],
    seconds: float,
    clock: Callable[[], float] = time.monotonic,
) -> TrueGain:
    """The gain by runs in turns (A B, B A, …), as many as the time has room for."""
    began_s, old, new = clock(), list[float](), list[float]()
    while len(old) < MOST_TURNS:
        spent_s = clock() - began_s
        if len(old) >= LEAST_TURNS and spent_s * (1 + 1 / len(old)) > seconds:
            break
        sides = [(old, original), (new, changed)]
        for found, measure in sides if len(old) % 2 == 0 else sides[::-1]:
            found.append(measure())
    return gain_of(old, new)


def of_program(original: Side, changed: Side, devices: str, seconds: float) -> TrueGain:
    """By launches of `gpurun run`; those of the first two runs aren't counted."""
    what = ("run", "train.py", "--devices", devices)
    first_ms = original.by_gpurun_ms(what, "launches: 1, limit: 40")
    limit = min(MOST_STEPS, max(LEAST_STEPS, 5 + math.ceil(TIMED_MS / first_ms)))
    size = f"launches: 1, limit: {limit}"
    changed.by_gpurun_ms(what, size)
    return in_turns(
        lambda: original.by_gpurun_ms(what, size), lambda: changed.by_gpurun_ms(what, size), seconds
    )


def of_workload(original: Side, changed: Side, seconds: float) -> TrueGain:
    """By launches of the job; the gradient isn't checked again."""
    what, size, settings = ("job.yaml",), "launches: 1, rounds: 8", ("gradient_check=false",)
    changed.by_gpurun_ms(what, size, *settings)
    return in_turns(
        lambda: original.by_gpurun_ms(what, size, *settings),
        lambda: changed.by_gpurun_ms(what, size, *settings),
        seconds,
    )


def of_starts(original: Side, changed: Side, ranks: int) -> TrueGain:
    """By ten starts of each by torchrun, with the program's own clock."""
    return in_turns(lambda: original.by_its_clock_ms(ranks), lambda: changed.by_its_clock_ms(ranks), math.inf)
