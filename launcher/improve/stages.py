"""The runs of a search for improvements: each measures sets of remedies."""

import math
import os
import re
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

from gpurun.launcher.compare.build import compare_run, read_differences
from gpurun.launcher.compare.figures.recorded import steps_of_launches
from gpurun.launcher.compare.model import Comparison, Difference, VariantResult
from gpurun.launcher.errors import GpurunError, Interrupted, MachineError, SpecError, VariantError
from gpurun.launcher.improve.job_files import changed_files, files_of, is_temporary, reachable_places
from gpurun.launcher.improve.remedies import (
    Candidate,
    merged,
)
from gpurun.launcher.jobfile.model import JobSpec
from gpurun.launcher.machine.host import Machine, software_of
from gpurun.launcher.machine.landlock import can_restrict_writes
from gpurun.launcher.masking import hidden
from gpurun.launcher.plan.build import build_plan
from gpurun.launcher.plan.expand import expand, work_of
from gpurun.launcher.plan.model import Plan
from gpurun.launcher.processes.pool import WorkerPools
from gpurun.launcher.run.attempts import attempts, let_run_again
from gpurun.launcher.run.job import Output, Prepared, carry_out
from gpurun.launcher.run.open import (
    Invocation,
    as_planned_for,
    load_invocation,
    open_run,
    run_to_resume,
)
from gpurun.launcher.rundir.files import RunDir, read_json
from gpurun.launcher.rundir.improvement import Improvement
from gpurun.launcher.rundir.launch_writes import is_below, writable_places
from gpurun.launcher.rundir.paths import CACHES, LAUNCHES, PLAN
from gpurun.launcher.rundir.records import MEASURED, CallSite, Observed, elapsed_s, stages_s

Set = tuple[Candidate, ...]
BETWEEN_S = 0.2
"""From the end of a launch to the beginning of the next."""
LONGER = 1.1
"""How much longer later launches may take: those of several sets take more than one after the other."""
LEAST_BUDGET_S, LAUNCHES_TO_TRY = 10.0, 8
"""No search ends in less; and how many launches take the least budget in which something is tried."""
_REFUSED, _BY_SQLITE = "Permission denied", "attempt to write a readonly database"
"""What a program's error says where the kernel lets it write nothing; SQLite names no file."""
_PATHS = re.compile(r"""'([^'\n]+)'|"([^"\n]+)"|(?<!\S)(/[^\s'",;]+)""")
"""The paths in an error's text: in quotes, or those that begin with a slash."""
_KEPT = "\n    a launch of a search can't write where others would meet it"
_OWN_DIRECTORY = "write to $GPURUN_LAUNCH_DIR, each launch's own; `{launch_dir}` in arguments stands for it"
LEAST_HANG_S = 30.0
"""What compiles makes no step for so long, and more."""
ROUNDS = 4
"""Rounds in a launch of a workload."""


def pairs_of(num_sets: int) -> list[tuple[int, int]]:
    """The sets of a last stage that are compared: each with the first one, which has all remedies.

    Of two remedies each is alone in the set without the other one, and compared with the program as it is.
    """
    alone = [(1, 2), (1, 3)] if num_sets == 4 else []
    return [*((position, 0) for position in range(1, num_sets)), *alone]


@dataclass(frozen=True)
class Stage:
    """One run of the search."""

    run: RunDir
    plan: Plan
    comparison: Comparison
    ids: Mapping[int, str]
    """The variant of each set, by its position."""

    def of(self, position: int) -> VariantResult:
        """The result of a set."""
        return next(each for each in self.comparison.variants if each.id == self.ids[position])

    @cached_property
    def differences(self) -> Mapping[tuple[int, int], Difference]:
        """How sets differ from each other, by `pairs_of`; all intervals together at 95 %."""
        pairs = pairs_of(len(self.ids))
        found = read_differences(self.run).together([(self.ids[a], self.ids[b]) for a, b in pairs])
        return dict(zip(pairs, found, strict=True))

    @property
    def launches_s(self) -> list[float]:
        """The length of each launch."""
        return [elapsed_s(each) for each in self.run.read_all_events().values() if each]

    def length_s(self, position: int) -> float | None:
        """The median time of a set's launches, without that of other sets in them; `None`: none has begun."""
        own, others = self.ids[position], {launch.id: launch.variants for launch in self.plan.launches}
        found = [
            sum(
                seconds / (1 if event.variant else len(others[launch]))
                for event, seconds in stages_s(events)
                if event.variant in (own, None)
            )
            for name, events in self.run.read_all_events().items()
            if events and own in others[launch := name.partition("~")[0]]
        ]
        return median(found) if found else None

    def num_steps(self, position: int) -> int:
        """The steps of a set's longest launch that all ranks have."""
        return max(steps_of_launches(self.run.read_steps(self.ids[position])).values(), default=0)

    def step_s(self, position: int) -> float:
        """The median time of a set's steps, of the rank with the longest; 0: none was timed."""
        by_rank = self.run.read_steps(self.ids[position]).values()
        return max((median(each.step_ns for each in steps) / 1e9 for steps in by_rank if steps), default=0.0)

    def losses(self, position: int) -> list[tuple[float | None, ...]]:
        """The losses of the first steps, per launch of a set."""
        return [each.losses for each in self.observed(position)]

    def calls(self, position: int) -> list[CallSite]:
        """The calls of a set's ranks in all launches, each place once, with what any of them was given."""
        id, found = self.ids[position], dict[tuple[str, str, int, int | None], CallSite]()
        seen = (each for (name, _), known in self.seen_by_rank.items() if name == id for each in known)
        for site in (site for each in seen for site in each.calls):
            place = place_in_source(site)
            found[place] = found[place].with_later(site) if place in found else site
        return list(found.values())

    def observed(self, position: int, rank: int = 0) -> list[Observed]:
        """A rank's record of its calls, per launch of a set."""
        return self.seen_by_rank.get((self.ids[position], rank), [])

    @cached_property
    def seen_by_rank(self) -> dict[tuple[str, int], list[Observed]]:
        """By variant and rank, as far as it was written: each file is read once.

        Of several attempts at a launch, the last one that wrote it counts.
        """
        found: dict[tuple[str, int], dict[str, Observed]] = {}
        for launch in self.plan.launches:
            for attempt in attempts(self.run, launch):
                for variant, facts in self.run.read_launch_facts(attempt).items():
                    if facts.observed is not None:  # of a workload, whose ranks have one loss
                        found.setdefault((variant, 0), {})[launch.id] = facts.observed
                for variant in launch.variants:
                    for rank in range(self.plan.variant(variant).world_size):
                        with suppress(MachineError):
                            seen = read_json(self.run.observed(attempt, rank), Observed)
                            found.setdefault((variant, rank), {})[launch.id] = seen
        return {key: list(by_launch.values()) for key, by_launch in found.items()}


@dataclass
class RemedySearch:
    """The search on one program, in a directory that holds its runs."""

    given: Invocation
    spec: JobSpec
    machine: Machine
    path: Path
    budget_s: float
    pools: WorkerPools
    output: Output
    say: Callable[[str], None]
    allows_other_random_numbers: bool = False
    numerics: bool = False
    began_s: float = field(default_factory=time.monotonic)
    """When the search began, as the monotonic clock has it; of one that is resumed, as if it had never been
    interrupted."""
    ends_s: dict[str, float] = field(default_factory=dict)
    """Seconds that were spent by the end of each stage, by its name."""
    spent_s: float = 0.0
    """Seconds that were spent by the end of the last stage."""
    lengths_s: list[float] = field(default_factory=list)
    """The seconds that launches of later stages took which cost nothing at their start."""
    launch_s: float | None = None
    """The seconds that most launches of a later stage take, at most."""
    saved_s: dict[str, float] = field(default_factory=dict)
    """By how much a launch with a remedy alone was shorter than as it is, by the remedy's code."""
    changed: tuple[str, ...] = ()
    """Files of the job's directory that launches have changed, though no rank was seen to."""
    first_s: float = 0.0
    """The seconds that the longest launch of the first stage took."""
    interrupted: Stage | None = None
    """The stage that Ctrl-C has ended, with what is known of it."""

    def resume(self, known: Improvement) -> None:
        """Goes on where a search with its options has come to, whose time has stood still since."""
        self.began_s -= max(known.spent_s, *known.ends_s.values(), 0.0)
        self.ends_s, self.changed = dict(known.ends_s), known.changed
        self.numerics, self.allows_other_random_numbers = known.numerics, known.other_random_numbers

    def stage(
        self,
        name: str,
        sets: Sequence[Set],
        *overrides: str,
        seeds_steps: bool = False,
        hang_s: float = math.inf,
        most_s: float = math.inf,
    ) -> Stage:
        """Measures these sets of remedies, or what is missing of that; the first one is the baseline.

        A launch that makes no step for `hang_s` is given up, or for less where there is less time; one that
        takes longer than `most_s` is ended, which then is no failure.

        Raises:
            Interrupted: by Ctrl-C.
            VariantError: the program as it is failed.
            SpecError: a launch wanted to write where launches meet, or the budget is too short for one.
        """
        settings = [merged(chosen) for chosen in sets]
        # A changed call may make ranks wait for each other for ever.
        hang_s = min(hang_s, self.hang_s)
        hang = () if self.spec.hang_timeout_s or not any(settings) else (f"hang_timeout={hang_s:.0f}s",)
        limit = f"timeout={max(1.0, min(self.spec.limit_s, self.limit_s, most_s)):.0f}s"
        given = replace(self.given, overrides=(*self.given.overrides, *overrides, limit, *hang))
        spec, path = load_invocation(given), self.path / name
        before = path if (path / PLAN).exists() else None
        if before is None and path.is_dir():  # interrupted before it was planned
            shutil.rmtree(path)
        machine = as_planned_for(spec, self.machine, before)
        plan = build_plan(spec, machine, sets=settings)
        ids = _ids(spec, machine, settings, plan)
        plan = replace(plan, baseline=ids[0], observe=True, seeds_steps=seeds_steps)
        run = run_to_resume(before, plan) if before else open_run(given, spec, plan, machine, path)
        if before and (earlier := compare_run(run)).complete:
            self.spent_s = self.ends_s.setdefault(name, self.clock_s)
            self.note(found := Stage(run, plan, earlier, ids), sets)
            self.refuse_writes(found, found.of(0).status in MEASURED)
            return found
        resumed = let_run_again(run, plan, software_of(machine), given.directory) if before else None
        ready = Prepared(plan, spec, run, given.directory, machine, resumed=resumed)
        files, reachable = files_of(given.directory, self.path), reachable_places(given.directory, self.path)
        finished = carry_out(ready, self.pools, self.output)
        for copies in run.path.glob(f"{LAUNCHES}/*/{CACHES}"):
            shutil.rmtree(copies, ignore_errors=True)
        changed = changed_files(files, files_of(given.directory, self.path), reachable)
        self.changed = tuple(dict.fromkeys((*self.changed, *changed)))
        found = Stage(run, plan, finished.comparison, ids)
        if isinstance(finished.error, Interrupted):
            self.interrupted = found
            raise finished.error
        self.spent_s = self.ends_s[name] = self.clock_s
        self.note(found, sets)
        fails = not sets[0] and found.of(0).status not in MEASURED
        self.refuse_writes(found, not fails)
        if finished.error is not None and fails and (most_s == math.inf or found.of(0).status != "timeout"):
            raise self.failure(found, finished.error, spec)
        return found

    def failure(self, found: Stage, error: GpurunError, spec: JobSpec) -> GpurunError:
        """Why the program as it is has no result.

        Args:
            spec: the job of its launches, with their limits.
        """
        original = found.of(0)
        if not isinstance(error, VariantError):
            return error
        if original.status == "timeout" and spec.limit_s < self.spec.limit_s:
            return self.too_long(found.num_steps(0), found.step_s(0), spec.limit_s, spec.steps.limit or 1)
        reason = (original.reason or original.status).partition("\n")[0]
        places = writable_places(str(self.given.directory), str(self.path))
        was_kept = can_restrict_writes() and is_prevented(reason, self.given.directory, places)
        kept = _KEPT if was_kept else ""
        remedy = f": {_OWN_DIRECTORY}" if kept and self.spec.program else ""
        return VariantError(f"{self.name} fails as it is: {reason}{kept}{remedy}")

    def too_long(self, num_steps: int, step_s: float, limit_s: float, wanted: int) -> GpurunError:
        """The message about a program with so many steps in as long as a launch may take.

        Args:
            step_s: the time of a step; the rest of the launch is its start.
            wanted: the steps of a launch.
        """
        if not num_steps:
            return VariantError(
                f"no step of {self.name} ended in {limit_s:.0f} s, the most for a launch with a budget of "
                f"{self.budget_s:.0f} s: it makes none, or needs a longer `--budget`"
            )
        launch_s = limit_s + max(0, wanted - num_steps) * step_s
        return SpecError(
            f"the budget is too short to try anything: {num_steps} of {self.name}'s first {wanted} steps "
            f"ended in {limit_s:.0f} s; try `--budget {math.ceil(LAUNCHES_TO_TRY * launch_s / 60)}m`"
        )

    def refusal(self, chosen: Set) -> str:
        """Why the job can't have these remedies; empty: it can."""
        try:
            left_out = expand(self.spec, self.machine, sets=({}, merged(chosen))).left_out
        except SpecError as error:
            return error.problems[0].message
        return left_out[0].reason if left_out else ""

    def note(self, stage: Stage, sets: Sequence[Set]) -> None:
        """Learns how long launches take that cost nothing at their start.

        All launches of the first stage take longer, as they are traced.
        """
        if not any(sets):
            self.first_s = self.first_s or max(stage.launches_s, default=0.0)
        elif not stage.plan.seeds_steps:
            known = {at: length for at in range(len(sets)) if (length := stage.length_s(at)) is not None}
            self.lengths_s += [
                length for at, length in known.items() if not any(row.remedy.cost for row in sets[at])
            ]
            if not sets[0] and 0 in known:
                alone = ((sets[at], length) for at, length in known.items() if len(sets[at]) == 1)
                self.saved_s |= {chosen[0].code: known[0] - length for chosen, length in alone}
            if self.lengths_s:
                self.launch_s = LONGER * median(self.lengths_s) + BETWEEN_S

    def refuse_writes(self, stage: Stage, is_measured: bool) -> None:
        """Returns if the program writes only where each launch has its own directory.

        Args:
            is_measured: a program that fails by itself is told that, not what changed meanwhile.
        """
        seen = (each for launches in stage.seen_by_rank.values() for each in launches)
        written, lines = sorted({path for each in seen for path in each.writes}), list[str]()
        if kept := [path for path in written if not self.is_left(path)]:
            lines.append(
                f"{self.name} writes to {_first(kept)}, which was prevented, as its launches would meet there"
            )
        if left := [path for path in written if self.is_left(path)]:
            lines.append(
                f"{self.name} writes to {_first(left)}, which an earlier launch of it has left there"
            )
        if self.changed and (lines or is_measured):
            lines.append(
                f"{_first(self.changed)} changed while {self.name} ran: if a process that it starts does "
                "that, its launches meet there; if not, begin again"
            )
        if lines:
            known = (*os.environ.items(), *self.spec.stated_secrets)
            raise SpecError(hidden("\n    ".join((*lines, _OWN_DIRECTORY)), known))

    def is_left(self, path: str) -> bool:
        """Whether a temporary file was made since the search began: its first launch may write it."""
        began = time.time() - self.clock_s
        with suppress(OSError):
            return is_temporary(path, self.given.directory) and os.lstat(path).st_ctime >= began
        return False

    @property
    def name(self) -> str:
        """The program, or the job file of a workload."""
        return str(self.spec.program or self.given.job_file.name)

    def place_of(self, row: Candidate) -> str:
        """The line of the job file that has the first of a remedy's keys, or the file that has none."""
        source, file = self.spec.source, self.given.job_file.name
        mark = source.root.key_marks.get(next(iter(row.keys))) if source is not None else None
        return f"{file}:{mark.line}" if mark is not None and mark.line else file

    def size(self, launches: int, steps: int) -> tuple[str, ...]:
        """The overrides for so many launches of each set: of a program, with so many steps.

        A workload's launch has rounds, of steps for a time.
        """
        is_program = self.spec.kind.runs_program
        length = f"limit: {steps}" if is_program else f"rounds: {launches * ROUNDS}"
        return (f"steps={{launches: {launches}, {length}}}", *self.fixed)

    @property
    def fixed(self) -> tuple[str, ...]:
        """The overrides by which launches end after their steps, and not by a budget of the job's own."""
        budget = ("budget=null",) if "budget" in self.spec.stated else ()
        return ("profile.steps=0", "until=fixed", *budget)

    @property
    def limit_s(self) -> float:
        """How long a launch may take: of the first two half of what is left, of later ones all of it."""
        left_s = self.budget_s - self.clock_s
        return max(1.0, left_s / 2) if not self.ends_s else max(left_s, self.hang_s)

    @property
    def hang_s(self) -> float:
        """How long a launch may make no step, as when it compiles, so that time is left for others."""
        return min(600.0, max(LEAST_HANG_S, 3 * self.first_s, self.left_s / 4))

    @property
    def clock_s(self) -> float:
        """Seconds that are spent now: of launches, and of what is done before, between and after them."""
        return time.monotonic() - self.began_s

    @property
    def left_s(self) -> float:
        return self.budget_s - self.spent_s


def is_prevented(reason: str, directory: Path, places: Sequence[str]) -> bool:
    """Whether an error is about a file that its user could write, and launches can't.

    Args:
        reason: the text of the error.
        directory: in which the program runs.
        places: where launches may write.
    """
    if _REFUSED not in reason:
        return _BY_SQLITE in reason
    named = (next(filter(None, groups)) for groups in _PATHS.findall(reason))
    return any(_may_be_written(directory / name, places) for name in named if name != _REFUSED)


def _may_be_written(path: Path, places: Sequence[str]) -> bool:
    """Whether this process may write or make a file, which is in none of these places."""
    if is_below(os.path.realpath(path), places):
        return False
    exists = os.path.lexists(path)
    nearest = path if exists else next(each for each in path.parents if os.path.lexists(each))
    return os.access(nearest, os.W_OK if exists else os.W_OK | os.X_OK)


def place_in_source(site: CallSite) -> tuple[str, str, int, int | None]:
    """Where a call is: its file, name, line, and where it ends in its last line."""
    return site.file, site.name, site.line, site.end_column


def _first(paths: Sequence[str]) -> str:
    more = f" and {len(paths) - 3} more" if len(paths) > 3 else ""
    return f"{', '.join(paths[:3])}{more}"


def _ids(
    spec: JobSpec, machine: Machine, settings: Sequence[Mapping[str, Any]], plan: Plan
) -> dict[int, str]:
    """The variant of each set of settings; sets that come to the same work have the same."""
    known = {work_of(variant): variant.id for variant in plan.variants}
    alone = (expand(spec, machine, sets=(each,)).variants for each in settings)
    return {position: known[work_of(variant)] for position, (variant,) in enumerate(alone)}
