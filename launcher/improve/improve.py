"""`gpurun improve` from the program to the proven change, as ordinary runs one after the other.

The first shows the calls that the program makes, where the time of its steps goes, its losses and what it
writes. The second tries each remedy alone, in few launches; nothing is claimed of these. The last compares
all that helped with the program as it is, and with itself without each of them: what is said of the kept
changes comes from its launches, which took part in no choice.
"""

import hashlib
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from gpurun.launcher.compare.build import compare_run
from gpurun.launcher.compare.model import Comparison, Difference, VariantResult
from gpurun.launcher.errors import GpurunError, Interrupted, MachineError, SpecError, VariantError
from gpurun.launcher.findings.finding import of_level
from gpurun.launcher.improve.losses import Sameness, differ, sameness
from gpurun.launcher.improve.remedies import (
    Candidate,
    Part,
    Surroundings,
    candidates,
    merged,
)
from gpurun.launcher.improve.result import SCHEMA, CallChange, Gain, Improvement, RemedyResult, RemedyVerdict
from gpurun.launcher.improve.rewrite import Edit, diff_text, rewritten
from gpurun.launcher.jobfile.model import JobSpec
from gpurun.launcher.machine.accelerators import accelerator_of
from gpurun.launcher.machine.host import Machine, inspect_machine, software_of
from gpurun.launcher.plan.build import build_plan
from gpurun.launcher.plan.devices import job_devices, share_of_cores
from gpurun.launcher.plan.expand import expand
from gpurun.launcher.plan.model import Plan, Variant
from gpurun.launcher.processes.pool import WorkerPools
from gpurun.launcher.run.attempts import let_run_again
from gpurun.launcher.run.job import Output, Prepared, carry_out
from gpurun.launcher.run.open import (
    Invocation,
    as_planned_for,
    load_invocation,
    open_run,
    run_to_resume,
)
from gpurun.launcher.rundir.files import RunDir, read_json, write_json
from gpurun.launcher.rundir.records import MEASURED, Observed
from gpurun.launcher.units import format_duration, listed

BUDGET_S = 900.0
FIRST_STEPS = 50
"""Steps of the first launches, which show what the program does."""
LEAST_STEPS, MOST_STEPS, TIMED_S = 40, 400, 1.5
"""Steps of a later launch, as many as take so long."""
SHARE_OF_TRIALS = 0.4
"""The share of the budget, at the most, in which remedies are tried alone."""
MOST_TRIALS = 4
"""Launches of each remedy."""
MOST_TOGETHER = 4
"""Remedies that are compared in the end: each one more takes launches of its own."""
LAUNCHES_TO_DECIDE = 6
SHARE_OF_FIRST = 0.6
"""The share of the time that is left, where several are compared and one may drop out."""
BETWEEN_S = 0.5
"""From the end of a launch to the beginning of the next."""
TRIED_PERCENT, SLOWER_PERCENT = -1.5, 3.0
"""A remedy whose trials are less than this much faster is not tried further, and from when it is slower."""
Set = tuple[Candidate, ...]


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

    @property
    def seconds(self) -> float:
        return self.comparison.measured_s or 0.0

    def losses(self, position: int) -> list[tuple[float | None, ...]]:
        """Of each launch of a set, the losses of its first steps."""
        return [each.losses for each in self.observed(position)]

    def observed(self, position: int, rank: int = 0) -> list[Observed]:
        """What a rank has done in each launch of a set that has ended well."""
        found = []
        for path in sorted((self.run.path / "launches").glob("*")):
            if path.name.partition("~")[0] in self.launches(position):
                with suppress(MachineError):
                    found.append(read_json(self.run.observed(path.name, rank), Observed))
        return found

    def launches(self, position: int) -> set[str]:
        return {each.id for each in self.plan.launches if self.ids[position] in each.variants}


@dataclass
class Search:
    """The search on one program, in a directory that holds its runs."""

    given: Invocation
    spec: JobSpec
    machine: Machine
    path: Path
    budget_s: float
    pools: WorkerPools
    output: Output
    say: Callable[[str], None]
    spent_s: float = 0.0

    def stage(self, name: str, sets: Sequence[Set], *overrides: str, seeds_steps: bool = False) -> Stage:
        """Measures these sets of remedies, or what is missing of that; the first one is the baseline.

        Raises:
            Interrupted: by Ctrl-C.
            VariantError: the baseline failed.
        """
        lists: dict[str, list[Any]] = {}
        settings = [merged(chosen) for chosen in sets]
        for key in {key: None for each in settings for key in each}:
            lists[key] = [dict(text) for text in _distinct(each.get(key, {}) for each in settings)]
        compared = (f"compare={json.dumps(lists)}",) if lists else ()
        given = replace(self.given, overrides=(*self.given.overrides, *overrides, *compared))
        spec, path = load_invocation(given), self.path / name
        before = path if (path / "plan.json").exists() else None
        machine = as_planned_for(spec, self.machine, before)
        ids = _ids(spec, machine, settings)
        plan = build_plan(spec, machine, chosen=tuple(ids.values())) if lists else build_plan(spec, machine)
        plan = replace(plan, baseline=ids[0], observe=True, seeds_steps=seeds_steps)
        run = run_to_resume(before, plan) if before else open_run(given, spec, plan, machine, path)
        if before and (earlier := compare_run(run)).complete:
            self.spent_s += earlier.measured_s or 0.0
            return Stage(run, plan, earlier, ids)
        resumed = let_run_again(run, plan, software_of(machine), given.directory) if before else None
        ready = Prepared(plan, spec, run, given.directory, machine, resumed=resumed)
        self.pools.keep_only(ready.environments)
        finished = carry_out(ready, self.pools, self.output)
        found = Stage(run, plan, finished.comparison, ids)
        self.spent_s += found.seconds
        if isinstance(finished.error, Interrupted):
            raise finished.error
        if finished.error is not None and found.of(0).status not in MEASURED:
            raise finished.error
        return found

    @property
    def left_s(self) -> float:
        return self.budget_s - self.spent_s


def _distinct(values: Any) -> list[Any]:
    return list({json.dumps(value, sort_keys=True): value for value in values}.values())


def _ids(spec: JobSpec, machine: Machine, settings: Sequence[Mapping[str, Any]]) -> dict[int, str]:
    """The variant of each set of settings."""
    variants = expand(spec, machine, with_own=True).variants
    keys = {key for each in settings for key in each}

    def has(variant: Variant, wanted: Mapping[str, Any]) -> bool:
        return all(
            dict(getattr(variant, key)) == {**getattr(spec, key), **wanted.get(key, {})} for key in keys
        )

    return {
        position: next(variant.id for variant in variants if has(variant, wanted))
        for position, wanted in enumerate(settings)
    }


def run_improve(
    pools: WorkerPools,
    given: Invocation,
    budget_s: float | None,
    path: Path,
    output: Output,
    say: Callable[[str], None],
) -> tuple[Improvement, GpurunError | None]:
    """Finds what makes a program faster, and proves it; what is known so far after Ctrl-C.

    Args:
        pools: start the ranks.
        given: the command line of the program.
        budget_s: for all of it; `None`: 15 minutes, or what the search had that is resumed.
        path: the directory of the search, new or to be resumed.
        output: what to show of the ranks' output.
        say: shows a line.

    Raises:
        SpecError: the command line is wrong, or the program can't be improved from outside.
        MachineError: the machine lacks what the program needs.
        VariantError: the program fails as it is.
    """
    spec = load_invocation(given)
    if not spec.kind.runs_program:
        raise SpecError("`gpurun improve` runs a program; `gpurun tune` finds a workload's fastest settings")
    if lists := spec.compare.lists():
        raise SpecError(f"`gpurun improve` starts from one setting: remove `compare` ({', '.join(lists)})")
    if spec.is_on_nodes:
        raise SpecError("`gpurun improve` runs on one machine: set `nodes: 1`")
    record = path / "improve.json"
    known = read_json(record, Improvement) if record.exists() else None
    if known is not None and known.complete:
        return known, None
    name = str(spec.program)
    budget_s = known.budget_s if known else budget_s or BUDGET_S
    found = Improvement(SCHEMA, name, budget_s)
    search = Search(given, spec, inspect_machine(), path, budget_s, pools, output, say)

    def keep(now: Improvement) -> Improvement:
        nonlocal found
        found = now
        write_json(record, now)
        return now

    try:
        path.mkdir(parents=True, exist_ok=True)
        keep(found)
        return improved(search, found, keep), None
    except Interrupted as ended:
        return found, Interrupted(ended.cause, kept=True)


def improved(search: Search, start: Improvement, keep: Callable[[Improvement], Improvement]) -> Improvement:
    """All stages; each leaves what is known by then."""
    first = discovered(search)
    refuse_writes(first, search)
    around = surroundings(search)
    seen = first.observed(0)
    rows = list(candidates(seen[0].calls if seen else (), around, shares_of(first.of(0))))
    notes = list(notes_on(first))
    start = keep(
        replace(start, why=why_of(first.comparison), notes=tuple(notes), remedies=results(rows, search))
    )
    to_try = [row for row in rows if not row.refusal]
    if not to_try:
        return keep(replace(start, complete=True))
    shares, steps = shares_of(first.of(0)), steps_of_launch(first.of(0))
    launch_s = seconds_of_launch(first.of(0), steps)
    tried = Trials(search, first, shares, steps, launch_s).run(to_try)
    start = keep(replace(start, remedies=results(rows, search, tried)))
    chosen, number = best_of(to_try, tried), 1
    while chosen:
        size = search.left_s / (launch_s * LAUNCHES_TO_DECIDE)
        if size < 2:
            need = format_duration(search.spent_s + 2 * launch_s * LAUNCHES_TO_DECIDE)
            note = f"the budget leaves no time to prove anything: `--budget {need}` or more does"
            start = replace(start, notes=(*start.notes, note))
            break
        # All of them, the program as it is, and all without each.
        chosen = chosen[: min(MOST_TOGETHER, max(1, math.floor(SHARE_OF_FIRST * size) - 2))]
        last = compared(search, chosen, steps, number)
        verdicts = judged(chosen, last, first)
        kept = [row for row in chosen if verdicts[row.code].verdict == "kept"]
        if kept == chosen:
            return keep(concluded(search, start, rows, tried | verdicts, chosen, last))
        # What is kept so far is proven only by launches without the rest.
        tried |= {code: each for code, each in verdicts.items() if each.verdict != "kept"}
        start = keep(replace(start, remedies=results(rows, search, tried)))
        chosen, number = kept, number + 1
    return keep(replace(start, remedies=results(rows, search, tried), complete=True))


def discovered(search: Search) -> Stage:
    """The program as it is, twice: whether its losses are the same each time."""
    search.say(f"1 of 3: what {search.spec.program} does")
    seeded = () if "seed" in search.spec.stated else ("seed=0",)
    search.given = replace(search.given, overrides=(*search.given.overrides, *seeded))
    found = search.stage(
        "1-original", [()], f"steps={{launches: 2, limit: {FIRST_STEPS}}}", "profile.steps=4"
    )
    if found.of(0).step_ms is None:
        reason = found.of(0).reason or "it has made too few steps"
        raise VariantError(f"no step of {search.spec.program} could be timed: {reason}")
    return found


def refuse_writes(first: Stage, search: Search) -> None:
    """Returns if the program writes only where each launch has its own directory.

    Raises:
        SpecError: it writes elsewhere, where launches would meet.
    """
    ranks = range(first.plan.variants[0].world_size)
    written = sorted({path for rank in ranks for each in first.observed(0, rank) for path in each.writes})
    if written:
        more = f" and {len(written) - 3} more" if len(written) > 3 else ""
        raise SpecError(
            f"{search.spec.program} writes to {', '.join(written[:3])}{more}, where its launches would find "
            "each other's files\n    have it write to $GPURUN_LAUNCH_DIR, which each launch has of its own: "
            "`{launch_dir}` in its arguments stands for it"
        )


def surroundings(search: Search) -> Surroundings:
    """The device and its cores."""
    devices = job_devices(search.spec, search.machine)
    stated = search.spec.env.get("OMP_NUM_THREADS") or os.environ.get("OMP_NUM_THREADS", "")
    share = share_of_cores(len(devices), search.machine)
    return Surroundings(
        device=accelerator_of(devices[0]).name,
        spare_cores=max(1, share - 1),
        threads=int(stated) if stated.isdecimal() else None,
        share=share,
    )


def shares_of(original: VariantResult) -> dict[Part, float]:
    """The largest share of a traced step that a rank spends on each part, in percent; empty: no trace."""
    found: dict[Part, float] = {}
    for rank in original.ranks:
        if not rank.span_ms:
            continue
        waits = rank.input_ms or 0.0
        transfers = (rank.exposed_transfer_ms or 0.0) + (rank.exposed_wait_ms or 0.0)
        parts: dict[Part, float] = {
            # A rank that waits for another one in a collective may wait for its data.
            "input": waits + (rank.exposed_wait_ms or 0.0) if waits else 0.0,
            "transfer": transfers,
            "work": rank.span_ms - waits - transfers,
        }
        for part, ms in parts.items():
            found[part] = max(found.get(part, 0.0), 100 * ms / rank.span_ms)
    return found


def why_of(comparison: Comparison) -> str:
    """The largest cause, as the report of the first run has it."""
    return next((each.text for each in of_level(comparison.findings, "cause")), "")


def notes_on(first: Stage) -> list[str]:
    """What limits the search."""
    losses = first.losses(0)
    if not any(losses):
        return ["no loss was seen: whether a change trains the same isn't known, so that nothing is kept"]
    if differ(losses):
        return ["two runs of the program as it is have other losses: nothing is judged by bits"]
    return []


def steps_of_launch(original: VariantResult) -> int:
    """The steps of a later launch."""
    step_ms = original.step_ms.estimate if original.step_ms else 1.0
    return min(MOST_STEPS, max(LEAST_STEPS, 10 + math.ceil(1000 * TIMED_S / step_ms)))


def seconds_of_launch(original: VariantResult, steps: int) -> float:
    """How long a later launch is expected to take."""
    step_s = (original.step_ms.estimate if original.step_ms else 0.0) / 1000
    return max(1.0, (original.wall_s or 0.0) + BETWEEN_S + (steps - FIRST_STEPS) * step_s)


@dataclass(frozen=True)
class Trials:
    """The remedies alone, in few launches: they say what is worth comparing, and nothing else."""

    search: Search
    first: Stage
    shares: Mapping[Part, float]
    steps: int
    launch_s: float

    def run(self, to_try: Sequence[Candidate]) -> dict[str, RemedyResult]:
        """Each once or, of few, several times; then the best again.

        Raises:
            SpecError: the budget has no time for it.
        """
        affordable = math.floor(SHARE_OF_TRIALS * self.search.budget_s / self.launch_s)
        tried, late = list(to_try[: max(0, affordable - 1)]), to_try[max(0, affordable - 1) :]
        if not tried:
            need = format_duration(3 * self.launch_s / SHARE_OF_TRIALS)
            raise SpecError(f"the budget is too short to try anything: `--budget {need}` or more")
        self.search.say(f"2 of 3: each remedy alone, {len(tried)} in all")
        few = len(tried) <= MOST_TOGETHER
        launches = affordable // (len(tried) + 1) if few else 1
        found = self.stage("2-alone", tried, launches)
        best = best_of(tried, found)[:MOST_TOGETHER]
        left = affordable - launches * (len(tried) + 1)
        if best and not few and left > len(best):
            self.search.say(f"2 of 3: the best {len(best)} of them again")
            found |= self.stage("2-best", best, left // (len(best) + 1))
        why = "not tried: the budget has no time for it"
        of_late = {
            row.code: replace(result_of(row, self.search), verdict="not tried", why=why) for row in late
        }
        return found | of_late

    def stage(self, name: str, tried: Sequence[Candidate], launches: int) -> dict[str, RemedyResult]:
        sets: list[Set] = [(), *((row,) for row in tried)]
        launches = max(1, min(MOST_TRIALS, launches))
        size = (f"steps={{launches: {launches}, limit: {self.steps}}}", "profile.steps=0", "until=fixed")
        stage = self.search.stage(name, sets, *size)
        return {row.code: self.judged(row, stage, position) for position, row in enumerate(tried, 1)}

    def judged(self, row: Candidate, stage: Stage, position: int) -> RemedyResult:
        """What trials say of a remedy."""
        result, base = stage.of(position), result_of(row, self.search)
        if result.status not in MEASURED or result.step_ms is None:
            return replace(base, verdict="failed", why=(result.reason or result.status).splitlines()[0])
        if row.site is not None and not applied(row, stage.observed(position)):
            return replace(base, verdict="not tried", why=f"not tried: {row.site.name} doesn't take it")
        percent = 100 * (result.step_ms.estimate / reference_ms(stage) - 1)
        percent = max(percent, -self.shares.get(row.remedy.part, 100.0))
        base = replace(base, percent=percent, why=row.remedy.cost)
        originals = [*self.first.losses(0), *stage.losses(0)]
        trains = sameness(originals, stage.losses(position), dtype_of(stage, position))
        if trains in _LOSSES:
            return replace(
                base, verdict="different" if trains == "different" else "undecided", why=_LOSSES[trains]
            )
        is_slower = percent > SLOWER_PERCENT
        verdict: RemedyVerdict = "slower" if is_slower else "same" if percent > TRIED_PERCENT else "undecided"
        return replace(base, verdict=verdict)


def reference_ms(stage: Stage) -> float:
    """The step of the program as it is: where many are tried the median of all, as most change little.

    A single launch of it may be unlike others, which would move all differences alike.
    """
    known = [each.step_ms.estimate for each in stage.comparison.variants if each.step_ms is not None]
    own = stage.of(0).step_ms
    return median(known) if len(known) > MOST_TOGETHER or own is None else own.estimate


_LOSSES: Mapping[Sameness, str] = {
    "different": "its losses are not those of the program as it is",
    "unknown": "no loss was seen, so that it isn't known whether it trains the same",
}


def applied(row: Candidate, seen: Sequence[Observed]) -> bool:
    """Whether the call got an argument of the remedy."""
    wanted = {"compile"} if row.remedy.call == "compile" else set(row.arguments)
    return any(wanted & set(site.applied) for each in seen for site in each.calls)


def dtype_of(stage: Stage, position: int) -> str:
    return next((each.loss_dtype for each in stage.observed(position) if each.loss_dtype), "float32")


def best_of(to_try: Sequence[Candidate], tried: Mapping[str, RemedyResult]) -> list[Candidate]:
    """The remedies that helped, the largest gain first; of those that exclude each other the best."""
    helped = [
        row
        for row in to_try
        if tried[row.code].verdict == "undecided" and (tried[row.code].percent or 0.0) <= TRIED_PERCENT
    ]
    helped.sort(key=lambda row: tried[row.code].percent or 0.0)
    firsts = {row.remedy.group or row.code: row for row in reversed(helped)}
    return [row for row in helped if firsts[row.remedy.group or row.code] is row]


def compared(search: Search, chosen: Sequence[Candidate], steps: int, number: int) -> Stage:
    """All remedies together against the program as it is, and against themselves without each of them."""
    search.say(f"3 of 3: {listed([row.code for row in chosen])} against {search.spec.program} as it is")
    without: list[Set] = [tuple(row for row in chosen if row is not left) for left in chosen]
    sets = [tuple(chosen), (), *(without if len(chosen) > 1 else [])]
    # Where one of several drops out, the rest is compared again.
    share = SHARE_OF_FIRST if len(chosen) > 1 else 1.0
    name = f"3-together-{number}"
    begun = RunDir(search.path / name)
    before_s = begun.read(begun.plan, Plan).budget_s if begun.plan.exists() else None
    budget = f"budget={before_s or max(1, round(share * search.left_s))}s"
    return search.stage(name, sets, f"steps={{limit: {steps}}}", "profile.steps=0", "until=decided", budget)


def judged(chosen: Sequence[Candidate], last: Stage, first: Stage) -> dict[str, RemedyResult]:
    """What the last launches say of each remedy among all of them."""
    together = last.of(0)
    originals = [*first.losses(0), *last.losses(1)]
    trains = sameness(originals, last.losses(0), dtype_of(last, 0))
    found = {}
    for position, row in enumerate(chosen):
        base = RemedyResult(row.code, row.remedy.call, "", "undecided")
        without = last.of(1 if len(chosen) == 1 else 2 + position)
        if together.status not in MEASURED or trains not in ("bitwise", "rounding"):
            # A conflict: what gained least goes first.
            is_last = position == len(chosen) - 1
            why = together.reason or _LOSSES.get(trains, "")
            verdict: RemedyVerdict = "failed" if is_last else "kept"
            found[row.code] = replace(base, verdict=verdict, why=f"together with the others: {why}")
            continue
        change = without.vs_baseline or Difference(None, None, "inconclusive")
        verdict = {"slower": "kept", "same": "same", "faster": "slower"}.get(change.verdict, "undecided")  # type: ignore[assignment]
        gain = gain_of(change)
        found[row.code] = replace(
            base, verdict=verdict, percent=gain.percent if gain else None, ci=gain.ci if gain else None
        )
    return found


def gain_of(change: Difference) -> Gain | None:
    """How much less time the baseline takes than a variant that differs by this."""
    if change.percent is None:
        return None
    ci = None if change.ci is None else (_inverse(change.ci[1]), _inverse(change.ci[0]))
    return Gain(_inverse(change.percent), ci)


def _inverse(percent: float) -> float:
    return 100 * (1 / (1 + percent / 100) - 1)


def concluded(
    search: Search,
    start: Improvement,
    rows: Sequence[Candidate],
    tried: Mapping[str, RemedyResult],
    kept: Sequence[Candidate],
    last: Stage,
) -> Improvement:
    """The change, with what it gains."""
    original = last.of(1).vs_baseline or Difference(None, None, "inconclusive")
    changes = tuple(change for row in kept if (change := change_of(row, search)) is not None)
    files = {change.file: (search.given.directory / change.file).read_bytes() for change in changes}
    found, notes = rewritten_files(changes, files, search.given.directory)
    env = {name: str(value) for row in kept for name, value in row.settings.get("env", {}).items()}
    notes += [f"write it yourself: {row.code}" for row in kept if row.remedy.call == "cudnn"]
    return replace(
        start,
        gain=gain_of(original),
        remedies=results(rows, search, tried),
        changes=changes,
        env=env,
        sha256={name: hashlib.sha256(data).hexdigest() for name, data in files.items()},
        diff=diff_text(found, search.given.directory),
        notes=(*start.notes, *notes),
        complete=True,
    )


def change_of(row: Candidate, search: Search) -> CallChange | None:
    """The call that a remedy changes; `None` where it changes none, or one outside of the job's directory."""
    site = row.site
    if site is None:
        return None
    try:
        file = Path(site.file).relative_to(search.given.directory)
    except ValueError:
        return None
    if row.remedy.call == "compile":
        return CallChange(str(file), site.line, site.name, before="{0}.compile()")
    return CallChange(str(file), site.line, site.name, dict(row.arguments), site.parameters)


def rewritten_files(
    changes: Sequence[CallChange], files: Mapping[str, bytes], root: Path
) -> tuple[dict[Path, tuple[bytes, bytes]], list[str]]:
    """Each file before and after, and notes on changes that found no place."""
    found, notes = {}, []
    for name, before in files.items():
        edits = [
            Edit(root / name, each.line, each.call, each.arguments, each.parameters, each.before)
            for each in changes
            if each.file == name
        ]
        after, homeless = rewritten(before, edits)
        if after != before:
            found[root / name] = (before, after)
        notes += [f"write it yourself at {name}:{edit.line}: {edit.call}" for edit in homeless]
    return found, notes


def result_of(row: Candidate, search: Search) -> RemedyResult:
    """The row of the table before anything is known."""
    place = ""
    if row.site is not None:
        file = Path(row.site.file)
        inside = file.is_relative_to(search.given.directory)
        place = f"{file.relative_to(search.given.directory) if inside else file}:{row.site.line}"
    verdict: RemedyVerdict = "not tried" if row.refusal else "undecided"
    return RemedyResult(row.code, row.remedy.call, place, verdict, why=row.refusal)


def results(
    rows: Sequence[Candidate], search: Search, tried: Mapping[str, RemedyResult] | None = None
) -> tuple[RemedyResult, ...]:
    """The table: what is kept first, then by gain."""
    found = []
    for row in rows:
        base = result_of(row, search)
        known = (tried or {}).get(row.code)
        found.append(base if known is None else replace(known, applied_to=base.applied_to, place=base.place))
    order = {"kept": 0, "not tried": 2}
    return tuple(sorted(found, key=lambda each: (order.get(each.verdict, 1), each.percent or 0.0)))


def changes_to_write(found: Improvement, root: Path) -> dict[Path, tuple[bytes, bytes]]:
    """Each file before and after the change.

    Raises:
        SpecError: there is nothing to change, or a file isn't as it was measured.
    """
    if not found.changes:
        raise SpecError(
            "there is no change to write" + ("" if found.complete else ": the search hasn't ended")
        )
    files = {}
    for name, sha256 in found.sha256.items():
        data = (root / name).read_bytes() if (root / name).is_file() else b""
        if hashlib.sha256(data).hexdigest() != sha256:
            raise SpecError(
                f"{root / name} has changed since it was measured\n    run `gpurun improve` again"
            )
        files[name] = data
    return rewritten_files(found.changes, files, root)[0]
