"""`gpurun improve` from a program or job to the proven change, as ordinary runs one after the other.

The first shows the calls that a program makes or the keys that act on a workload, where the time of its steps
goes, its losses and what it writes. The second tries each remedy alone, in few launches; nothing is claimed
of these. The last compares all that helped with the program as it is, and with itself without each of them:
what is said of the kept changes comes from its launches, which took part in no choice.
"""

import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from gpurun.launcher.compare.label import variant_label
from gpurun.launcher.compare.model import Difference, VariantResult
from gpurun.launcher.errors import GpurunError, Interrupted, SpecError, VariantError
from gpurun.launcher.findings.finding import of_level
from gpurun.launcher.improve.remedies import (
    DDP,
    LOADER,
    OF_TRAINERS,
    PARTS,
    Candidate,
    Part,
    Surroundings,
    candidates,
    merged,
)
from gpurun.launcher.improve.rewrite import (
    NoPlaceError,
    diff_text,
    line_to_write,
    lost_options,
    rewritten,
    with_keys,
)
from gpurun.launcher.improve.stages import BETWEEN_S, LEAST_BUDGET_S, RemedySearch, Set, Stage
from gpurun.launcher.improve.trials import (
    _LOSSES,
    LAUNCHES_TO_DECIDE,
    MOST_TOGETHER,
    OTHER_NUMBERS,
    SAME,
    RemedyTrials,
    begin_otherwise,
    best_of,
    budget_text,
    check_beginning,
    differ,
    dtype_of,
    num_likely,
    of_same_kind,
    open_for,
    place_of,
    result_of,
    sameness,
    seconds_to_compare,
    sites_changed,
    takes_what_was_loaded,
)
from gpurun.launcher.inspect.stacks import file_hash
from gpurun.launcher.jobfile.model import JobSpec
from gpurun.launcher.logs.lines import clean
from gpurun.launcher.machine.accelerators import accelerator_of
from gpurun.launcher.machine.git import top_directory
from gpurun.launcher.machine.host import inspect_machine
from gpurun.launcher.plan.devices import job_devices, share_of_cores
from gpurun.launcher.processes.pool import WorkerPools
from gpurun.launcher.run.job import Output
from gpurun.launcher.run.open import (
    Invocation,
    load_invocation,
)
from gpurun.launcher.rundir.files import read_json, write_bytes, write_json
from gpurun.launcher.rundir.improvement import (
    BEFORE_EPOCH_ENDS,
    BEGINS_OTHERWISE,
    LOADED_BEFORE,
    NO_TIME,
    SCHEMA,
    YOURS,
    Advice,
    CallChange,
    Gain,
    Improvement,
    RemedyResult,
    RemedyVerdict,
)
from gpurun.launcher.rundir.paths import CHANGE, IMPROVEMENT
from gpurun.launcher.rundir.records import AT_DDP, MEASURED, CallSite, Observed, Place
from gpurun.launcher.stats.schedule import first_traced_step
from gpurun.launcher.units import format_number, listed, plural

BUDGET_S = 900.0
TRACED, AFTER_TRACE = 3, 10
"""Steps of the first launches that are traced, and those after them."""
LEAST_STEPS, MOST_STEPS, TIMED_S = 20, 400, 1.5
"""Steps of a later launch, as many as take so long, in tens: rounds and turns are whole then."""
MOST_LAUNCHES = 20
"""Launches of each set that are compared in the end: their number isn't chosen by what they show."""
MOST_FIRST = 2
"""Comparisons of remedies that weren't compared before: where none helps, each keeps something in 2.5 %."""
SHARE_OF_FIRST = 0.6
"""The share of the time that is left, where what drops out may have to be left out or replaced."""
IN_MOST = 0.8
"""The least share of the steps: a call that is made in fewer belongs to something rare, as a log line."""
AT_LEAST_TWO = 1.8
"""Backward passes per step from which gradients are accumulated; a pass in validation adds little."""
CHANGED = "has changed since it was measured"
OPEN = "its launches don't decide"
NO_LOSS = "no loss was seen"
WITH_OTHERS = "together with the others"
LESS = "others were compared first"
VERDICTS: Mapping[str, RemedyVerdict] = MappingProxyType(
    {"slower": "kept", "same": "same", "faster": "slower"}
)
"""By how the set without a remedy compares with all of them."""
MARGIN = 1.25
"""How much longer than the shortest of the first launches a later one may take."""


def run_improve(
    pools: WorkerPools,
    given: Invocation,
    budget_s: float | None,
    path: Path,
    output: Output,
    say: Callable[[str], None],
    allows_other_random_numbers: bool = False,
    numerics: bool = False,
    began_s: float | None = None,
) -> tuple[Improvement, GpurunError | None]:
    """Finds what makes a program faster, and proves it; what is known so far after Ctrl-C.

    Args:
        pools: start the ranks.
        given: the command line of the program.
        budget_s: for all of it; `None`: 15 minutes, or what the search had that is resumed.
        path: the directory of the search, new or to be resumed.
        output: what to show of the ranks' output.
        say: shows a line.
        allows_other_random_numbers: keeps what trains the same but draws random numbers in another order.
        numerics: also tries what computes with less precision; of a search that is resumed, as it began.
        began_s: when the command began, as the monotonic clock has it; `None`: now.

    Raises:
        SpecError: the command line is wrong, or the program can't be improved from outside.
        MachineError: the machine lacks what the program needs.
        VariantError: the program fails as it is.
    """
    spec, record = job_to_improve(given), path / IMPROVEMENT
    known = read_json(record, Improvement) if record.exists() else None
    if known is not None:
        check_same_options(known, path, budget_s, numerics, allows_other_random_numbers)
        if known.complete:
            return known, None
        budget_s = known.budget_s
    search = RemedySearch(given, spec, inspect_machine(), path, budget_s or BUDGET_S, pools, output, say)
    search.began_s = time.monotonic() if began_s is None else began_s
    begun = Improvement(SCHEMA, search.name, search.budget_s, numerics=numerics)
    found = known or replace(begun, other_random_numbers=allows_other_random_numbers)
    search.resume(found)
    check_time(search, is_resumed=known is not None)
    pools.know(spec)

    def keep(now: Improvement) -> Improvement:
        nonlocal found
        found = replace(now, spent_s=search.clock_s, ends_s=dict(search.ends_s), changed=search.changed)
        write_json(record, found)
        return found

    try:
        path.mkdir(parents=True, exist_ok=True)
        keep(found)
        return improved(search, found, keep), None
    except Interrupted as ended:
        return keep(found), Interrupted(ended.cause, kept=True)
    except GpurunError:
        keep(found)
        raise


def check_time(search: RemedySearch, is_resumed: bool) -> None:
    """Raises SpecError where no time is left for the first launches."""
    if search.ends_s or search.budget_s - search.clock_s >= LEAST_BUDGET_S:
        return
    why = "is spent: begin anew with " if is_resumed else "is too short to try anything: "
    raise SpecError(f"the budget {why}{budget_text(max(60.0, 2 * search.budget_s))}")


def check_same_options(
    known: Improvement, path: Path, budget_s: float | None, numerics: bool, allows_other_random_numbers: bool
) -> None:
    """Raises SpecError where a search would have to begin anew for these options."""
    is_other = budget_s not in (None, known.budget_s) or numerics > known.numerics
    if is_other or allows_other_random_numbers > known.other_random_numbers:
        raise SpecError(f"the search in {path} goes on as it began: begin anew for other options")


def job_to_improve(given: Invocation) -> JobSpec:
    """The job of a command line.

    Raises:
        SpecError: it is wrong, or the job can't be improved from outside.
    """
    spec = load_invocation(given)
    lists = ", ".join(spec.compare.lists())
    is_max = spec.global_batch == "max"
    reasons = {
        f"`gpurun improve` starts from one setting: remove `compare` ({lists}), or take what the job says "
        "above it: --set compare=null": bool(lists),
        "`gpurun improve` runs on one machine: set `nodes: 1`": spec.is_on_nodes,
        "`gpurun improve` needs a number for `global_batch`: `max` may differ between launches": is_max,
        f"{spec.workload} is a micro-benchmark, which trains nothing": not spec.kind.is_ranked,
    }
    if wrong := [text for text, applies in reasons.items() if applies]:
        raise SpecError(*wrong)
    return spec


def improved(
    search: RemedySearch, start: Improvement, keep: Callable[[Improvement], Improvement]
) -> Improvement:
    """All stages; each leaves what is known by then."""
    start = replace(start, code=start.code or job_hash(search))
    first = discovered(search)
    if start.ends_s:  # an earlier command has measured a part of it
        check_code(first, search)
    seen = first.observed(0)
    around = surroundings(search, seen[0] if seen else Observed())
    shares = shares_of(first.of(0))
    rows = [
        row if row.refusal else replace(row, refusal=search.refusal((row,)))
        for row in candidates(seen[0].calls if seen else (), around, shares)
    ]
    notes = list(notes_on(first))
    start = keep(
        replace(
            start,
            why=why_of(first, shares),
            notes=tuple(notes),
            remedies=results(rows, search),
            advice=tuple(advice_on(seen[0], search.given.directory)) if seen else (),
        )
    )
    to_try = [row for row in rows if not row.refusal]
    # There may not be time for all.
    to_try.sort(
        key=lambda row: (bool(row.remedy.cost), not row.replaces, -shares.get(row.remedy.part, 100.0))
    )
    if not to_try or sameness(first.losses(0), first.losses(0)) == "unknown":
        why = _LOSSES["unknown"] if any(first.losses(0)) else NO_LOSS
        without = {row.code: replace(result_of(row, search), why=why) for row in to_try}
        return keep(replace(start, remedies=results(rows, search, without), complete=True))
    steps = steps_of_launch(first.of(0))
    launch_s = seconds_of_launch(first, steps - first_steps(search))
    trials = RemedyTrials(search, first, shares, steps, launch_s)
    try:
        tried = trials.run(to_try)
        trials.known.update(tried)
        tried |= trials.not_paying(best_of(to_try, tried), tried)
    except GpurunError:
        keep(replace(start, remedies=results(rows, search, trials.known)))
        raise
    tried |= of_same_kind(to_try, tried)
    start = keep(replace(start, remedies=results(rows, search, tried)))
    return proven(trials, start, rows, best_of(to_try, tried), tried, keep)


def proven(
    trials: RemedyTrials,
    start: Improvement,
    rows: Sequence[Candidate],
    waiting: Sequence[Candidate],
    tried: dict[str, RemedyResult],
    keep: Callable[[Improvement], Improvement],
) -> Improvement:
    """What is kept, by launches of its own.

    Args:
        rows: all remedies, for the table.
        waiting: those that helped in trials, the largest gain first.
        tried: what trials say.
    """
    search, first = trials.search, trials.first
    launch_s = search.launch_s or trials.launch_s
    chosen, number, why = list[Candidate](), 1, LESS
    while chosen or (waiting and number <= MOST_FIRST):
        known = [tried[row.code] for row in chosen or waiting]
        starts_s = [added_s(each, trials) for each in known]
        likely = len(chosen) or num_likely([each.percent or 0.0 for each in known])
        room = room_for(search.left_s, launch_s, starts_s, likely)
        if not room and not chosen and len(waiting) > 1:
            tried |= open_for(waiting[:1], tried, NO_TIME)
            waiting = waiting[1:]
            continue
        if not room:
            start = replace(start, needs_s=search.spent_s + seconds_to_compare(1, launch_s + starts_s[0]))
            why = NO_TIME
            break
        if chosen:
            tried |= open_for(chosen[room:], tried, NO_TIME)
            chosen = chosen[:room]
        else:
            why = NO_TIME if room < min(MOST_TOGETHER, len(waiting)) else LESS
            chosen, waiting = list(waiting[:room]), waiting[room:]
        while refusal := search.refusal(tuple(chosen)):
            row = chosen.pop()
            tried[row.code] = replace(tried[row.code], verdict="failed", why=f"{WITH_OTHERS}: {refusal}")
        has_more = len(chosen) > 1 or (bool(waiting) and number < MOST_FIRST)
        last = compared(search, chosen, trials.steps, launch_s + max(starts_s[:room]), number, has_more)
        number += 1
        check_beginning(first, last.losses(1), search.name)
        has_time = bool(room_for(search.left_s, launch_s, [max(starts_s[: len(chosen)])], 1))
        verdicts, kept, position = decided(chosen, last, first, tried, has_time)
        if kept and (position or kept == chosen):
            if is_proven(last, position):
                verdicts |= open_for(waiting, tried, why)
                start = keep(concluded(search, start, rows, tried | verdicts, kept, first, last, position))
                return keep(replace(start, then=then_most(search, kept, launch_s), complete=True))
            tried |= {row.code: replace(tried[row.code], why=OPEN) for row in kept}
            chosen = []
            break
        # What is kept so far is proven only by launches without the rest.
        tried |= {code: each for code, each in verdicts.items() if each.verdict != "kept"}
        start = keep(replace(start, remedies=results(rows, search, tried)))
        chosen = kept
    tried |= open_for([*chosen, *waiting], tried, why)
    return keep(replace(start, remedies=results(rows, search, tried), complete=True))


def discovered(search: RemedySearch) -> Stage:
    """The program as it is, twice: whether its losses are the same each time."""
    size = search.size(2, first_steps(search))  # first it is found out whether there are such devices
    search.say(f"1 of 3: what {search.name} does")
    seeded = () if "seed" in search.spec.stated else ("seed=0",)
    search.given = replace(search.given, overrides=(*search.given.overrides, *seeded))
    found = search.stage("1-original", [()], *size, f"profile.steps={TRACED}")
    if found.of(0).step_ms is None:
        raise VariantError(
            f"no step of {search.name} could be timed: {no_steps(found, search.given.directory)}"
        )
    return found


def check_code(first: Stage, search: RemedySearch) -> None:
    """Returns if the files of the program are as they were when the search began.

    Raises:
        SpecError: some aren't, which what is measured from now on wouldn't be comparable with.
    """
    root, measured = search.given.directory, first.of(0).code
    if changed := sorted(name for name, was in measured.items() if file_hash(root / name) != was):
        have = "has" if len(changed) == 1 else "have"
        raise SpecError(
            f"{listed(changed)} {have} changed since the search began: begin anew, without --resume"
        )


def no_steps(found: Stage, directory: Path) -> str:
    """Why no step was timed, which is from one `step()` of an optimizer to the next."""
    seen = found.observed(0)
    made = next((site for each in seen for site in each.calls if site.name not in (LOADER, DDP)), None)
    if reason := found.of(0).reason:
        return reason.partition("\n")[0]
    if num := max((each.steps for each in seen), default=0):
        return f"its optimizers make {plural(num, 'step')}, which is too few"
    if made is None:
        return "it makes no optimizer of torch.optim, whose step() ends a step"
    return f"step() of the {made.name} at {place_of(made, directory)} isn't called; is there any data?"


def first_steps(search: RemedySearch) -> int:
    """Steps of the first launches, which show what the program does."""
    kind = accelerator_of(job_devices(search.spec, search.machine)[0])
    return first_traced_step(search.spec.steps.warmup, kind.timed_before_trace) + TRACED + AFTER_TRACE


def surroundings(search: RemedySearch, seen: Observed) -> Surroundings:
    """The device and its cores, and the options of a Trainer.

    Args:
        seen: what a rank of the program was seen to do.
    """
    words = (word.partition("=")[0].lstrip("-").replace("-", "_") for word in search.spec.args)
    takes_options = any(word in OF_TRAINERS for word in words)
    devices = job_devices(search.spec, search.machine)
    share = share_of_cores(len(devices), search.machine)
    return Surroundings(
        device_type=accelerator_of(devices[0]).name,
        spare_cores=max(1, share - 1),
        threads=stated_threads(search.spec),
        share=share,
        numerics=search.numerics,
        stated=frozenset(search.spec.stated),
        trainer_options=frozenset(seen.trainer_options if takes_options else ()),
    )


def stated_threads(spec: JobSpec) -> int | None:
    """Threads of a rank, where the job or the shell states them."""
    if not spec.kind.runs_program:
        return None if spec.threads == "auto" else spec.threads
    stated = spec.env.get("OMP_NUM_THREADS") or os.environ.get("OMP_NUM_THREADS", "")
    return int(stated) if stated.isdecimal() else None


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


def why_of(first: Stage, shares: Mapping[Part, float]) -> str:
    """The largest cause, as the report of the first run has it; else what takes most of a traced step."""
    if causes := [each.text for each in of_level(first.comparison.findings, "cause")]:
        return causes[0].removeprefix(f"in {variant_label(first.plan.variants[0])} ")
    if not shares:
        return ""
    most = max(shares, key=lambda part: shares[part])
    return f"{PARTS[most]} takes {format_number(shares[most], 0)} % of a traced step"


def notes_on(first: Stage) -> list[str]:
    """Notes on limits of the search."""
    losses = first.losses(0)
    if not any(losses):
        return ["no loss was seen where `backward` is called: nothing is tried, as it may train otherwise"]
    if sameness(losses, losses) == "unknown":
        number = 1 + min(run.index(None) for run in losses if None in run)
        return [
            f"from loss {number} on, losses of the program as it is are NaN or infinite: nothing is tried, "
            "as it may train otherwise"
        ]
    if begin_otherwise(losses):
        return [
            f"{BEGINS_OTHERWISE}: it goes on from its own checkpoint, or draws without a seed; nothing is "
            "judged by bits"
        ]
    if differ(losses):
        return ["two runs of the program as it is have other losses: nothing is judged by bits"]
    return []


def steps_of_launch(original: VariantResult) -> int:
    """The steps of a later launch."""
    step_ms = original.step_ms.estimate if original.step_ms else 1.0
    return min(MOST_STEPS, max(LEAST_STEPS, 10 * math.ceil(0.5 + 100 * TIMED_S / step_ms)))


def longest_loader(stage: Stage, position: int) -> CallSite | None:
    """The call that made the DataLoader with the most batches, which is that of the training."""
    sites = [each for each in stage.calls(position) if each.epochs]
    return max(sites, key=lambda each: math.inf if each.batches is None else each.batches, default=None)


def is_before_epoch_ends(stage: Stage, position: int, steps: int) -> bool:
    """Whether the launches of a set, with so many steps, ended within their first epoch."""
    longest = longest_loader(stage, position)
    return longest is not None and longest.epochs == 1 and steps < (longest.batches or math.inf)


def seconds_of_launch(first: Stage, more_steps: int) -> float:
    """How long a later launch is expected to take, which makes so many more steps than the first ones.

    Of a workload, as long as the first ones, whatever their number of steps.
    """
    step_ms = first.of(0).step_ms if first.of(0).wall_s is not None else None
    step_s = step_ms.estimate / 1000 if step_ms else 0.0
    return max(1.0, MARGIN * (min(first.launches_s, default=0.0) + BETWEEN_S + more_steps * step_s))


def added_s(known: RemedyResult, trials: RemedyTrials) -> float:
    """The seconds that a remedy adds to launches, half of which have it; negative where it saves time.

    Of what its trials took less, only as much counts as its steps explain.
    """
    step_ms = trials.first.of(0).step_ms
    steps_s = trials.steps * (step_ms.estimate if step_ms else 0.0) / 1000
    explained_s = -(known.percent or 0.0) / 100 * steps_s
    saved_s = min(explained_s, trials.search.saved_s.get(known.code, 0.0))
    return known.start_s or -max(0.0, saved_s) / 2


def room_for(left_s: float, launch_s: float, starts_s: Sequence[float], likely: int) -> int:
    """How many remedies can be compared: all of them, the program as it is, and all without each.

    Args:
        left_s: the time that is left.
        launch_s: of a launch.
        starts_s: what each remedy adds to that on average, the first to be compared first.
        likely: remedies for which no time is left in case that they drop out.
    """
    for num in range(min(MOST_TOGETHER, len(starts_s)), 0, -1):
        share = 1.0 if num <= max(1, likely) else SHARE_OF_FIRST
        if seconds_to_compare(num, launch_s + max(starts_s[:num])) <= share * left_s:
            return num
    return 0


def compared(
    search: RemedySearch,
    chosen: Sequence[Candidate],
    steps: int,
    launch_s: float,
    number: int,
    has_more: bool,
) -> Stage:
    """All remedies together against the program as it is, and against themselves without each of them.

    Args:
        has_more: whether others may have to be compared after it, for which time is left if there is enough.
    """
    search.say(f"3 of 3: {listed([row.code for row in chosen])} against {search.name} as it is")
    without: list[Set] = [tuple(row for row in chosen if row is not left) for left in chosen]
    sets = [tuple(chosen), (), *(without if len(chosen) > 1 else [])]
    rest_s = (1 - SHARE_OF_FIRST) * search.left_s
    share = SHARE_OF_FIRST if has_more and rest_s >= seconds_to_compare(1, launch_s) else 1.0
    affordable = math.floor(share * search.left_s / (launch_s * len(sets)))
    launches = max(LAUNCHES_TO_DECIDE, min(MOST_LAUNCHES, affordable))
    return search.stage(f"3-together-{number}", sets, *search.size(launches, steps))


def decided(
    chosen: Sequence[Candidate],
    last: Stage,
    first: Stage,
    tried: Mapping[str, RemedyResult],
    has_time: bool,
) -> tuple[dict[str, RemedyResult], list[Candidate], int]:
    """The verdict of the last launches on each remedy, those that are kept, and their set in the launches.

    That is the first set unless one of two drops out and there is no time for other launches: these have
    shown the other one alone beside the program as it is.
    """
    verdicts, position = judged(chosen, last, first, tried), 0
    kept = [row for row in chosen if verdicts[row.code].verdict == "kept"]
    if (len(chosen), len(kept)) == (2, 1) and not has_time:
        position = 3 - chosen.index(kept[0])  # the set without the other one
        verdicts |= judged(kept, last, first, tried, position)
        kept = [row for row in kept if verdicts[row.code].verdict == "kept"]
    return verdicts, kept, position


def judged(
    chosen: Sequence[Candidate],
    last: Stage,
    first: Stage,
    tried: Mapping[str, RemedyResult],
    position: int = 0,
) -> dict[str, RemedyResult]:
    """The verdict of the last launches on each remedy.

    Args:
        tried: what trials say.
        position: the set of these remedies.
    """
    together, steps = last.of(position), last.num_steps(position) + 1  # the first one isn't timed
    originals = [*first.losses(0), *last.losses(1)]
    has_less_precision = any(row.remedy.changes_numerics for row in chosen)
    dtype = "bfloat16" if has_less_precision else dtype_of(last, position)
    rounds = any(row.remedy.rounds for row in chosen)
    trains = sameness(originals, last.losses(position), dtype, rounds)
    is_first = is_before_epoch_ends(last, position, steps)
    tried_in = BEFORE_EPOCH_ENDS.format(steps) if is_first else f"tried in {steps} steps"
    draws = {row.code for row in chosen if tried[row.code].why.startswith(OTHER_NUMBERS)}
    if draws:
        trains = "rounding"  # shown by steps with their own seeds
    found = {}
    for number, row in enumerate(chosen):
        base = replace(tried[row.code], verdict="undecided", percent=None, why=OPEN)
        without = 1 if len(chosen) == 1 else 2 + number
        if together.status not in MEASURED or trains not in SAME:
            # A conflict: the last goes first, which gained least or costs something at each start.
            is_last = number == len(chosen) - 1
            why = together.reason or _LOSSES.get(trains, "")
            why = f"{WITH_OTHERS}: {why}" if len(chosen) > 1 else why
            verdict: RemedyVerdict = "failed" if is_last else "kept"
            found[row.code] = replace(base, verdict=verdict, why=why)
            continue
        if row.remedy.call == LOADER and takes_what_was_loaded(last, position):
            found[row.code] = replace(base, why=LOADED_BEFORE)
            continue
        change = last.differences[without, position]
        verdict = VERDICTS.get(change.verdict, "undecided")
        gain = gain_of(change)
        known = tried[row.code].why
        known = known if row.remedy.cost or row.code in draws else ""
        kept = "; ".join(filter(None, (known, row.remedy.caveat.format(steps=steps, tried=tried_in))))
        found[row.code] = replace(
            base,
            verdict=verdict,
            percent=gain.percent if gain else None,
            ci=gain.ci if gain else None,
            why={"kept": kept, "undecided": OPEN}.get(verdict, ""),
        )
    return found


def is_proven(last: Stage, position: int) -> bool:
    """Whether the program as it is was slower than the remedies of this set."""
    return last.differences[1, position].verdict == "slower"


def gain_of(change: Difference) -> Gain | None:
    """How much less time the baseline takes than a variant that differs by this."""
    if change.percent is None:
        return None
    ci = None if change.ci is None else (_inverse(change.ci[1]), _inverse(change.ci[0]))
    return Gain(_inverse(change.percent), ci)


def _inverse(percent: float) -> float:
    return 100 * (1 / (1 + percent / 100) - 1)


def concluded(
    search: RemedySearch,
    start: Improvement,
    rows: Sequence[Candidate],
    tried: Mapping[str, RemedyResult],
    kept: Sequence[Candidate],
    first: Stage,
    last: Stage,
    position: int,
) -> Improvement:
    """The change, with what it gains.

    Args:
        position: the set of the kept remedies among the last ones.
    """
    spec, remedies = search.spec, results(rows, search, tried)
    gain, steps = gain_of(last.differences[1, position]), last.num_steps(position) + 1
    reads = any(row.remedy.part == "input" and not row.keys for row in kept)
    is_first = reads and is_before_epoch_ends(last, position, steps)
    start = replace(start, gain=gain, remedies=remedies, complete=True)
    start = replace(start, first_steps=steps if is_first else None)
    if not spec.kind.runs_program:
        return job_change(search, start, kept)
    root, measured = search.given.directory, {**last.of(0).code, **first.of(0).code}
    every = [change for row in kept for change in changes_of(row, sites_changed(row, last, 0), root)]
    wanted = [each for each in every if each.file in measured]
    changes = tuple(each for each in wanted if file_hash(root / each.file) == measured[each.file])
    notes = dict.fromkeys(f"{each.file} {CHANGED}" for each in wanted if each not in changes)
    found, homeless = rewritten_files(changes, root)
    for each in (each for each in every if each.file not in measured):
        file = root / each.file
        line = line_to_write(each, file.read_bytes() if file.is_file() else b"")  # it may be in an archive
        homeless.append(f"{YOURS} at {each.file}:{each.line}: {line}")
    env = {name: str(value) for row in kept for name, value in row.settings.get("env", {}).items()}
    stated = env.keys() & spec.env.keys()
    homeless += [f"{YOURS}: env.{name}={env.pop(name)}, which the job states" for name in stated]
    diff = diff_in_file(found, root, search.path)
    homeless += not_shown(diff, search)
    return replace(
        start,
        changes=changes,
        env=env,
        options={name: value for row in kept for name, value in row.options.items()},
        code={each.file: measured[each.file] for each in changes},
        diff=diff.decode(errors="replace"),
        notes=(
            *start.notes,
            *notes,
            *homeless,
            *caveats(start, kept),
            *(f"{YOURS}: {text}" for row in kept for text in not_written(row, last, root)),
        ),
    )


def diff_in_file(changes: Mapping[Path, tuple[bytes, bytes]], root: Path, path: Path) -> bytes:
    """The diff for `git apply`, which is also written into a file of the search, where there is a change."""
    diff = diff_text(changes, top_directory(root) or root).encode(errors="surrogateescape")
    if diff:
        write_bytes(path / CHANGE, diff)
    return diff


def not_shown(diff: bytes, search: RemedySearch) -> Iterator[str]:
    """A note where a report doesn't show the diff as it is."""
    text = diff.decode(errors="replace")
    if text != diff.decode(errors="ignore") or clean(text) != text:
        yield f"the diff has bytes that can't be shown: what `git apply` takes is {search.path / CHANGE}"


def caveats(found: Improvement, kept: Sequence[Candidate]) -> Iterator[str]:
    """What the launches can't show of later steps, for each kept remedy."""
    why = {each.code: each.why for each in found.remedies}
    yield from (f"{row.code}: {why[row.code]}" for row in kept if row.remedy.caveat)


def then_most(search: RemedySearch, kept: Sequence[Candidate], launch_s: float) -> str:
    """The largest parts of a step with the kept changes, in a traced launch; empty: there is no time."""
    if search.left_s < 2 * launch_s:
        return ""
    search.say("3 of 3: what then takes most of a step")
    size = search.size(1, first_steps(search))
    try:
        stage = search.stage("4-kept", [tuple(kept)], *size, f"profile.steps={TRACED}")
    except Interrupted:
        raise
    except GpurunError:  # what is proven stands without it
        return ""
    return why_of(stage, shares_of(stage.of(0)))


def not_written(row: Candidate, last: Stage, root: Path) -> Iterator[str]:
    """Lines for the reader to write, where a remedy changes neither a variable nor an option, nor calls in
    the directory of the job.
    """
    if row.options:
        return
    if row.remedy.call == "autocast":
        yield f"{row.code} around the forward pass and the loss"
    elif row.remedy.call in ("cudnn", "matmul"):
        yield row.code
    else:
        sites = sites_changed(row, last, 0)
        yield from (f"{row.code} at {place_of(each, root)}" for each in sites if not _inside(each, root))


def job_hash(search: RemedySearch) -> dict[str, str]:
    """The job file of a workload, with its hash; the copy in a run has no secrets. Empty for a program."""
    name = search.given.job_file.name
    digest = file_hash(search.given.directory / name)
    return {} if digest is None or search.spec.kind.runs_program else {name: digest}


def job_change(search: RemedySearch, start: Improvement, kept: Sequence[Candidate]) -> Improvement:
    """The keys of the job file to change, where it is as it was measured, and the diff."""
    stated = {override.partition("=")[0].strip() for override in search.given.overrides}
    keys = dict(merged(kept))
    yours = [f"{YOURS}: {row.code}, which --set states" for row in kept if stated & row.keys.keys()]
    keys = {key: value for key, value in keys.items() if key not in stated}
    root = search.given.directory
    path = root / search.given.job_file.name
    if {path.name: file_hash(path)} != start.code:
        return replace(start, code={}, notes=(*start.notes, *yours, f"{path.name} {CHANGED}"))
    measured = path.read_bytes()
    try:
        found = {path: (measured, with_keys(measured, keys))}
    except NoPlaceError:
        lines = ", ".join(row.code for row in kept if not stated & row.keys.keys())
        return replace(start, code={}, notes=(*start.notes, *yours, f"{YOURS} in {path.name}: {lines}"))
    diff = diff_in_file(found, root, search.path)
    return replace(
        start,
        keys=keys,
        code=start.code if keys else {},
        diff=diff.decode(),
        notes=(*start.notes, *yours, *not_shown(diff, search), *caveats(start, kept)),
    )


def changes_of(row: Candidate, sites: Iterable[CallSite], root: Path) -> Iterator[CallChange]:
    """How a remedy changes calls in the files of the job's directory.

    Args:
        sites: the calls that it has changed.
    """
    before, after = row.remedy.write
    for site in sites:
        place = (site.file.removeprefix(f"{root}{os.sep}"), site.line, site.name)
        if not _inside(site, root):
            continue
        if row.remedy.call not in AT_DDP:
            arguments = dict(row.change_at(site))
            yield CallChange(*place, arguments, site.parameters, end_column=site.end_column)
        elif after:
            yield CallChange(*place, before=before, after=after, end_column=site.end_column)


def _inside(site: CallSite, root: Path) -> bool:
    return Path(site.file).is_relative_to(root)


def rewritten_files(
    changes: Sequence[CallChange], root: Path
) -> tuple[dict[Path, tuple[bytes, bytes]], list[str]]:
    """Each file before and after, and notes on changes that found no place."""
    found, notes = dict[Path, tuple[bytes, bytes]](), list[str]()
    for name in {each.file: None for each in changes}:
        before, edits = (root / name).read_bytes(), [each for each in changes if each.file == name]
        after, homeless = rewritten(before, edits)
        if after != before:
            found[root / name] = (before, after)
            notes += lost_options(before, [edit for edit in edits if edit not in homeless])
        lines = (f"{name}:{edit.line}: {line_to_write(edit, before)}" for edit in homeless)
        notes += [f"{YOURS} at {line}" for line in lines]
    return found, notes


def results(
    rows: Sequence[Candidate], search: RemedySearch, tried: Mapping[str, RemedyResult] | None = None
) -> tuple[RemedyResult, ...]:
    """The table: what is kept first, then by gain."""
    found = []
    for row in rows:
        base = result_of(row, search)
        known = (tried or {}).get(row.code)
        found.append(base if known is None else known)
    order = {"kept": 0, "not tried": 2}
    return tuple(sorted(found, key=lambda each: (order.get(each.verdict, 1), each.percent or 0.0)))


def changes_to_write(found: Improvement, root: Path) -> dict[Path, tuple[bytes, bytes]]:
    """Each file before and after the change; empty: what is kept changes no file by itself.

    Raises:
        SpecError: a file isn't as it was measured.
    """
    if not (found.changes or found.keys):
        return {}
    for name, measured in found.code.items():
        if file_hash(root / name) != measured:
            raise SpecError(f"{root / name} {CHANGED}\n    run `gpurun improve` again")
    if found.keys:
        before = (root / found.name).read_bytes()
        return {root / found.name: (before, with_keys(before, found.keys))}
    return rewritten_files(found.changes, root)[0]


def advice_on(seen: Observed, directory: Path) -> Iterator[Advice]:
    """Advice on a program, by what a rank of it was seen to do.

    Args:
        directory: of the job, to which names of files are relative.
    """
    for place in sorted(seen.places, key=lambda each: (each.file, each.line)):
        if seen.steps and (text := _advice_text(place, place.count / seen.steps)):
            file = Path(place.file)
            inside = file.is_relative_to(directory)
            yield Advice(f"{file.relative_to(directory) if inside else file}:{place.line}", text)


def _advice_text(place: Place, per_step: float) -> str:
    if place.kind == "gradients":
        passes = format_number(per_step, 0)
        return (
            f"{passes} backward passes for each step send gradients: `with model.no_sync():` around all but "
            "the last of them, and their forward passes"
            if per_step >= AT_LEAST_TWO
            else ""
        )
    if per_step < IN_MOST:
        return ""
    if place.kind == "copy":
        return (
            f"{place.name}() waits for a copy in each step: `pin_memory=True` of the DataLoader and "
            "`non_blocking=True` here let it go on"
        )
    call = _SHOWN_CALLS.get(place.name, f"{place.name}()")
    return f"{call} waits for the GPU in each step: read the value in fewer steps, or keep it on the GPU"


_SHOWN_CALLS = {"__bool__": "a condition", "__float__": "float()", "__int__": "int()"}
