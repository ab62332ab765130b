"""Remedies alone, in few launches: which keep the losses as they are, and are worth comparing."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from statistics import median
from typing import Literal

from gpurun.launcher.compare.model import VariantResult
from gpurun.launcher.errors import Interrupted, SpecError
from gpurun.launcher.improve.remedies import DDP, LOADER, OPTIMIZER, Candidate, Part
from gpurun.launcher.improve.stages import LEAST_HANG_S, RemedySearch, Set, Stage
from gpurun.launcher.rundir.improvement import (
    BEGINS_OTHERWISE,
    LOADED_BEFORE,
    NEVER_COMPARED,
    NO_GAIN,
    NO_TIME,
    RemedyResult,
    RemedyVerdict,
)
from gpurun.launcher.rundir.records import FIRST_STEPS, MEASURED, CallSite
from gpurun.launcher.units import format_count

Losses = Sequence[float | None]
"""Losses of a run, in the order of its steps; `None` is no finite number."""
Sameness = Literal["bitwise", "rounding", "different", "unknown"]
FIRST = {"bfloat16": 1e-2, "float16": 1e-2}
FIRST_IN_FP32 = 1e-5
"""The largest relative difference of the first loss that rounding explains, by the type of the loss."""
NEXT, NUM_NEXT, LARGEST = 1e-3, 5, 0.1
"""The largest difference of the next losses in fp32, how many these are, and the largest in any type; another
optimizer shows there."""
GROWTH = 30.0
"""The largest difference of a later loss, as a multiple of the largest one before: with a large learning rate
rounding grows threefold from step to step, and single steps are 15 times as far apart as any before."""
LEAST_SCALE = 1e-3
"""Share of the first loss: the smallest loss that differences are relative to, since rounding is a large part
of smaller ones."""
SHARE_OF_TRIALS, SHARE_OF_AGAIN = 0.4, 0.2
"""The share of the budget, at the most, in which remedies are tried alone, and the best of them again."""
MOST_TRIALS = 4
"""Launches of each remedy in a stage, at most."""
LIKELY_PERCENT, LIKELY_SHARE = -10.0, 1 / 3
"""A remedy that gains so much in its trials, and this share of the largest gain, is rarely one that doesn't
help."""
MOST_TOGETHER, LAUNCHES_TO_DECIDE = 4, 6
"""Remedies that are compared in the end, at most, each of which takes launches of its own; and launches of
each set of them, at least."""
COSTLY = 4
"""Launches that a trial of what costs something at each start, such as compiling, is expected to take."""
SHARE_OF_LENGTH = 0.2
"""The share of the time that is left, at most, in which the program's steps are counted."""
MOST_LOADED = 0.2
"""The share of the steps, at most, that may take what was loaded in the steps before, which don't count."""
SAME: tuple[Sameness, ...] = ("bitwise", "rounding")
TRIED_PERCENT = -1.5
"""A remedy whose trials are less than this much faster is not tried further."""


def sameness(
    originals: Sequence[Losses], changed: Sequence[Losses], dtype: str = "float32", rounds: bool = True
) -> Sameness:
    """How the losses of changed runs compare with those of runs as the program is, in all steps of both.

    What rounding changes grows from step to step, as training goes on from it: a difference is one of
    rounding where earlier steps lead to it. Where runs of the original differ from each other, bits say
    nothing, and a difference counts only beyond theirs. Losses that mostly are no finite numbers say nothing.

    Args:
        originals: the losses of each run, in the order of its steps.
        changed: likewise.
        dtype: of the losses.
        rounds: whether the change may round otherwise.
    """
    originals, changed = [run for run in originals if run], [run for run in changed if run]
    if not originals or not changed:
        return "unknown"
    if any(run[0] is None for run in (*originals, *changed)):
        return "unknown"
    steps = min(max(map(len, originals)), max(map(len, changed)))
    pairs = [(_at(originals, step), _at(changed, step)) for step in range(steps)]
    if 2 * sum(None in known for known, _ in pairs) > steps:
        return "unknown"
    if all(loss == known[0] for known, others in pairs for loss in (*known, *others)):
        return "bitwise"
    if not rounds and not differ(originals):
        return "different"
    scale = LEAST_SCALE * max(abs(loss or 0.0) for loss in pairs[0][0])
    most = 0.0
    for step, (known, others) in enumerate(pairs):
        spread = 2 * max(_apart(loss, known[0], scale) for loss in known)
        apart = max((_apart(loss, known[0], scale) for loss in others), default=0.0)
        if apart > max(_limit(step, most, FIRST.get(dtype, FIRST_IN_FP32)), spread):
            return "different"
        most = max(most, apart)
    return "rounding"


def _limit(step: int, most: float, first: float) -> float:
    """The largest difference of the losses of a step that rounding explains.

    Args:
        most: the largest difference of a step before.
        first: the limit of the first step.
    """
    if step == 0:
        return first
    limit = min(LARGEST, first * NEXT / FIRST_IN_FP32)
    return limit if step < NUM_NEXT else max(limit, GROWTH * most)


def _at(runs: Sequence[Losses], step: int) -> list[float | None]:
    return [run[step] for run in runs if step < len(run)]


def check_beginning(first: Stage, later: Sequence[Losses], name: str) -> None:
    """Returns if runs of the program as it is begin in a later stage as they did in the first one.

    Where its first launches differ from each other, that isn't known.

    Args:
        later: the losses of the later runs.

    Raises:
        SpecError: its launches depend on earlier ones.
    """
    began = {run[0] for run in first.losses(0) if run}
    if len(began) != 1 or None in began:
        return
    (known,) = began
    limit = FIRST.get(dtype_of(first, 0), FIRST_IN_FP32)
    if (run := next((run for run in later if run and _apart(run[0], known, 0.0) > limit), None)) is not None:
        now = "no finite number" if run[0] is None else f"{run[0]:.5g}"
        raise SpecError(
            f"{name} as it is began with a loss of {known:.5g} at first, and later with {now}: a launch "
            "goes on from what an earlier one has left, such as a checkpoint, which belongs into "
            "$GPURUN_LAUNCH_DIR"
        )


def differ(originals: Sequence[Losses]) -> bool:
    """Whether runs of the program as it is have other losses each time."""
    return any(len({*_at(originals, step)}) > 1 for step in range(max(map(len, originals), default=0)))


def begin_otherwise(originals: Sequence[Losses]) -> bool:
    """Whether runs of the program as it is have another first loss each time."""
    return differ([run[:1] for run in originals])


def _apart(loss: float | None, other: float | None, scale: float) -> float:
    """The difference relative to the larger one, or to `scale`; infinite where either is no finite number."""
    if loss == other:
        return 0.0
    if loss is None or other is None:
        return math.inf
    return abs(loss - other) / max(abs(loss), abs(other), scale)


@dataclass(frozen=True)
class RemedyTrials:
    """The remedies alone, in few launches: they say what is worth comparing, and nothing else."""

    search: RemedySearch
    first: Stage
    shares: Mapping[Part, float]
    steps: int
    launch_s: float
    known: dict[str, RemedyResult] = field(default_factory=dict)
    """What trials have shown by now, also those of a stage that Ctrl-C has ended."""

    def run(self, to_try: Sequence[Candidate]) -> dict[str, RemedyResult]:
        """Each once or, of few, several times; then the best again, by what all their launches show.

        Raises:
            SpecError: the budget has no time for it.
        """
        found, late, number = dict[str, RemedyResult](), list(to_try), 0
        began_s = self.search.spent_s
        while late and (affordable := self.affordable(began_s, is_first=not number)) > 1:
            tried, hang_s = self.next_of(late, affordable - 1, found)
            if not tried:
                break
            late = late[len(tried) :]
            self.search.say(f"2 of 3: each remedy alone, {len(tried)} of {len(to_try)}")
            few = len(to_try) <= MOST_TOGETHER and not late
            launches = affordable // (len(tried) + 1) if few else 1
            found |= self.stage(f"2-alone{f'-{number}' if number else ''}", tried, launches, hang_s)
            number += 1
        if not found:
            raise SpecError(
                f"the budget is too short to try anything: a launch takes {self.launch_s:.0f} s; "
                f"{self.needed(to_try[0])}"
            )
        known = [row for row in to_try if row.code in found]
        best = promising(known, found) if len(to_try) > MOST_TOGETHER else []
        best, again = self.again(best, [found[row.code] for row in best])
        if best:
            self.search.say(f"2 of 3: the best {len(best)} of them again")
            later = self.stage("2-best", best, again)
            found |= {row.code: both(row, found[row.code], later[row.code], again) for row in best}
        found |= self.with_seeded_steps(known, found)
        of_late = {
            row.code: replace(result_of(row, self.search), verdict="not tried", why=NO_TIME) for row in late
        }
        return found | of_late

    def needed(self, row: Candidate) -> str:
        """The option for the budget in which a remedy is tried, and then proven."""
        launch_s = self.search.launch_s or self.launch_s
        trial_s = (1 + COSTLY) * launch_s + LEAST_HANG_S if row.remedy.cost else 3 * launch_s
        needs_s = self.search.spent_s + trial_s + seconds_to_compare(1, launch_s)
        return budget_text(max(trial_s / SHARE_OF_TRIALS, needs_s, 2 * self.search.budget_s))

    def next_of(
        self, late: Sequence[Candidate], launches: int, found: Mapping[str, RemedyResult]
    ) -> tuple[Sequence[Candidate], float]:
        """The remedies that are tried next, and how long one of their launches may make no step.

        What compiles may take as long as it leaves time to prove what others gain, so these come first.

        Args:
            late: what isn't tried yet, last what costs something at each start.
            launches: how many there is time for.
            found: what trials have shown.
        """
        tried = fitting(late, launches)
        if plain := [row for row in tried if not row.remedy.cost]:
            return plain, math.inf
        launch_s = self.search.launch_s or self.launch_s
        gains = sorted(each.percent or 0.0 for each in found.values() if each.verdict == "undecided")
        # The program as it is comes first, and each launch takes time besides that of compiling.
        spare_s = self.search.left_s - seconds_to_compare(max(1, num_likely(gains)), launch_s) - 2 * launch_s
        num = min(len(tried), math.floor(spare_s / (LEAST_HANG_S + launch_s)))
        return (tried[:num], spare_s / num - launch_s) if num > 0 else ([], 0.0)

    def affordable(self, began_s: float, is_first: bool) -> int:
        """How many launches of trials there is time for, and then for a proof; at first a few in any case.

        Args:
            began_s: the time that had been spent when the trials began.
        """
        launch_s = self.search.launch_s or self.launch_s
        most_s = SHARE_OF_TRIALS * self.search.budget_s - (self.search.spent_s - began_s)
        spare_s = self.search.left_s - seconds_to_compare(1, launch_s)
        return math.floor(min(most_s, max(spare_s, 3 * launch_s if is_first else 0.0)) / launch_s)

    def again(self, best: Sequence[Candidate], known: Sequence[RemedyResult]) -> tuple[list[Candidate], int]:
        """The best remedies that can be tried again, and how often, so that the likely gains can be proven.

        Args:
            known: what trials have shown of each.
        """
        launch_s = self.search.launch_s or self.launch_s
        percents = [each.percent or 0.0 for each in known]
        for num in range(len(best), 1, -1):
            spare_s = self.search.left_s - seconds_to_compare(max(1, num_likely(percents[:num])), launch_s)
            once_s = (num + 1) * launch_s + sum(each.start_s or 0.0 for each in known[:num])
            launches = math.floor(min(spare_s, max(once_s, SHARE_OF_AGAIN * self.search.budget_s)) / once_s)
            if launches > 0:
                return list(best[:num]), launches
        return [], 0

    def stage(
        self, name: str, tried: Sequence[Candidate], launches: int, hang_s: float = math.inf
    ) -> dict[str, RemedyResult]:
        sets: list[Set] = [(), *((row,) for row in tried)]
        launches = max(1, min(MOST_TRIALS, launches))
        spec = self.search.spec
        hung_s = min(spec.hang_timeout_s or self.search.hang_s, hang_s, spec.limit_s)
        try:
            size = self.search.size(launches, self.steps)
            most_s = hang_s + (self.search.launch_s or self.launch_s)  # also where it makes steps in between
            stage = self.search.stage(name, sets, *size, hang_s=hang_s, most_s=most_s)
        except Interrupted:
            if self.search.interrupted is not None:
                self.known.update(self.measured(tried, self.search.interrupted))
            raise
        self.check_beginning(stage, tried)
        found = {row.code: self.judged(row, stage, at, hung_s) for at, row in enumerate(tried, 1)}
        self.known.update(found)
        return found

    def check_beginning(self, stage: Stage, tried: Sequence[Candidate]) -> None:
        """Returns if launches of the program as it is begin as before, as they do with most remedies.

        The first launch after the program's first end is that of the program as it is. Other arguments of a
        DataLoader, of DDP or of an optimizer don't change the first loss, unless data is drawn otherwise.

        Raises:
            SpecError: launches depend on earlier ones.
        """
        check_beginning(self.first, stage.losses(0), self.search.name)
        changed = [
            stage.losses(position)
            for position, row in enumerate(tried, 1)
            if row.remedy.call in (LOADER, DDP, OPTIMIZER) and not row.remedy.draws_otherwise
        ]
        runs = [run for each in changed for run in each if run]
        if not any(run[0] == own[0] for own in stage.losses(0) if own for run in runs):
            check_beginning(self.first, runs, self.search.name)

    def measured(self, tried: Sequence[Candidate], stage: Stage) -> dict[str, RemedyResult]:
        """The remedies that were measured before Ctrl-C; what they change isn't compared yet."""
        return {
            row.code: replace(result_of(row, self.search), verdict="undecided", why="interrupted")
            for position, row in enumerate(tried, 1)
            if row.code not in self.known and stage.of(position).status in MEASURED
        }

    def with_seeded_steps(
        self, tried: Sequence[Candidate], found: Mapping[str, RemedyResult]
    ) -> dict[str, RemedyResult]:
        """Remedies that have other losses only because random numbers are drawn in another order.

        The same steps then have the same losses where every step and sample has its own seed.
        """
        whys = (_LOSSES["different"], BEGINS_OTHERWISE)
        rows = [row for row in tried if found[row.code].why in whys and row.remedy.draws_otherwise]
        if not rows:
            return {}
        sets: list[Set] = [(), *((row,) for row in rows)]
        size = self.search.size(1, self.steps)
        stage = self.search.stage("2-seeded", sets, *size, seeds_steps=True)
        results = {}
        for position, row in enumerate(rows, 1):
            now = found[row.code]
            dtype, rounds = dtype_of(stage, position), row.remedy.rounds or differ(self.first.losses(0))
            if sameness(stage.losses(0), stage.losses(position), dtype, rounds) in SAME:
                helps = (now.percent or 0.0) <= TRIED_PERCENT
                is_open = self.search.allows_other_random_numbers or not helps
                verdict: RemedyVerdict = "undecided" if is_open else "other random numbers"
                why = "; ".join(filter(None, (OTHER_NUMBERS, cost_text(row, now)))) if helps else NO_GAIN
                now = replace(now, verdict=verdict, why=why)
            results[row.code] = now
        return results

    def judged(self, row: Candidate, stage: Stage, position: int, hung_s: float) -> RemedyResult:
        """The verdict of the trials on a remedy.

        Args:
            hung_s: how long a launch had at least, before it was ended.
        """
        result, base = stage.of(position), result_of(row, self.search)
        if result.status in ("hung", "timeout") and row.remedy.cost:
            why = f"{row.remedy.cost} took longer than {hung_s:.0f} s"
            return replace(base, verdict="undecided", why=why)
        if result.status not in MEASURED or result.step_ms is None:
            return replace(base, verdict="failed", why=(result.reason or result.status).splitlines()[0])
        changed = sites_changed(row, stage, position)
        if row.sites and not changed:
            is_compiled = row.remedy.call == "compile"
            why = "the model is compiled" if is_compiled else f"{row.sites[0].name} doesn't take it"
            return replace(base, verdict="not tried", why=why)
        if "num_workers" in row.arguments and (name := repeated(row, stage, position)):
            why = f"workers of {name} weren't seen to ask which they are: each may yield all samples"
            return replace(base, verdict="not tried", why=why)
        if changed:
            base = replace(base, place=places_of(changed, self.search.given.directory))
        if row.remedy.call == LOADER and takes_what_was_loaded(stage, position):
            return replace(base, verdict="undecided", why=LOADED_BEFORE)
        percent = 100 * (result.step_ms.estimate / reference_ms(stage) - 1)
        percent = max(percent, -self.shares.get(row.remedy.part, 100.0))
        originals = [*self.first.losses(0), *stage.losses(0)]
        dtype = "bfloat16" if row.remedy.changes_numerics else dtype_of(stage, position)
        trains = sameness(originals, stage.losses(position), dtype, row.remedy.rounds)
        base = replace(base, verdict="undecided")
        if result.gradient_warning and not stage.of(0).gradient_warning:
            return replace(base, verdict="changes numerics", percent=percent, why=result.gradient_warning)
        if trains in ("bitwise", "rounding") and percent > TRIED_PERCENT:
            return replace(base, percent=percent, why=NO_GAIN)
        if trains == "unknown":
            return replace(base, why=_LOSSES[trains])
        found = self.with_cost(row, replace(base, percent=percent), stage, position)
        if trains == "different" and begin_otherwise(self.first.losses(0)):
            return replace(found, why=BEGINS_OTHERWISE)
        if trains == "different":
            return replace(found, verdict="changes numerics", why=_LOSSES[trains])
        return replace(found, why=cost_text(row, found))

    def with_cost(self, row: Candidate, found: RemedyResult, stage: Stage, position: int) -> RemedyResult:
        """With what the remedy costs at each start and, of a program, from how many steps on it pays."""
        original, result = stage.of(0), stage.of(position)
        if row.keys and row.remedy.cost:
            longer_s = (stage.length_s(position) or 0.0) - (stage.length_s(0) or 0.0)
            return replace(found, start_s=round(max(0.0, longer_s), 1))
        saved_ms = _step_ms(original) - _step_ms(result)
        start_s = (result.wall_s or 0.0) - (original.wall_s or 0.0) + self.steps * saved_ms / 1000
        if not row.remedy.cost or result.wall_s is None or start_s < 1 or saved_ms <= 0:
            return found
        steps = math.ceil(1000 * start_s / saved_ms)
        return replace(found, start_s=round(start_s, 1), pays_from_steps=steps)

    def not_paying(
        self, rows: Sequence[Candidate], tried: Mapping[str, RemedyResult]
    ) -> dict[str, RemedyResult]:
        """Remedies with a cost at each start that the program's own steps don't pay for.

        How many steps it makes is looked for where that takes little of the time that is left.
        """
        costly = {row.code: steps for row in rows if (steps := tried[row.code].pays_from_steps)}
        step_s = _step_ms(self.first.of(0)) / 1000
        launch_s = self.search.launch_s or self.launch_s
        most_s = min(
            SHARE_OF_LENGTH * self.search.left_s, self.search.left_s - seconds_to_compare(1, launch_s)
        )
        affordable = math.floor(most_s / step_s) if step_s else 0
        limit = min(max(costly.values(), default=0), affordable)
        if limit <= self.steps:
            return {}
        self.search.say(f"2 of 3: whether {self.search.spec.program} makes {format_count(limit)} steps")
        size = (f"steps={{launches: 1, limit: {limit}}}", *self.search.fixed)
        stage = self.search.stage("2-length", [()], *size, most_s=most_s)
        check_beginning(self.first, stage.losses(0), self.search.name)
        made = stage.num_steps(0)
        if made >= limit - 1 or stage.of(0).status not in MEASURED:  # the first one isn't timed
            return {}
        why = f"more than {self.search.spec.program} makes"
        return {
            code: replace(tried[code], verdict="slower", percent=None, why=f"{tried[code].why}, {why}")
            for code, steps in costly.items()
            if steps > made
        }


def num_likely(percents: Sequence[float]) -> int:
    """How many of these changes in trials, the largest gain first, are hardly the noise of launches."""
    limit = min(LIKELY_PERCENT, LIKELY_SHARE * min(percents, default=0.0))
    return sum(percent <= limit for percent in percents)


def fitting(rows: Sequence[Candidate], launches: int) -> list[Candidate]:
    """The first rows for whose trials so many launches are enough."""
    takes = accumulate(COSTLY if row.remedy.cost else 1 for row in rows)
    return [row for row, total in zip(rows, takes, strict=True) if total <= launches]


def seconds_to_compare(num: int, launch_s: float) -> float:
    """The least time in which so many remedies are proven: together, each left out, and none."""
    return (2 if num == 1 else num + 2) * LAUNCHES_TO_DECIDE * launch_s


def _step_ms(result: VariantResult) -> float:
    return result.step_ms.estimate if result.step_ms is not None else 0.0


def budget_text(seconds: float) -> str:
    """The option for so much time, in whole minutes."""
    return f"`--budget {math.ceil(seconds / 60)}m`"


def reference_ms(stage: Stage) -> float:
    """The step of the program as it is: where many are tried the median of all, as most change little.

    A single launch of it may be unlike others, which would move all differences alike.
    """
    known = [each.step_ms.estimate for each in stage.comparison.variants if each.step_ms is not None]
    own = stage.of(0).step_ms
    return median(known) if len(known) > MOST_TOGETHER + 1 or own is None else own.estimate


OTHER_NUMBERS = "it draws other random numbers"
_LOSSES: Mapping[Sameness, str] = {
    "different": "its losses are not those of the program as it is",
    "unknown": "too few finite losses were seen to know whether it trains the same",
}


def sites_changed(row: Candidate, stage: Stage, position: int) -> list[CallSite]:
    """The calls that the remedy has changed in the launches of a set."""
    return [site for site in stage.calls(position) if site.is_users and row.change_at(site)]


def repeated(row: Candidate, stage: Stage, position: int) -> str:
    """The class of an iterable dataset whose samples each worker may yield in the launches of a set."""
    return next(
        (site.repeats for site in stage.calls(position) if row.remedy.is_of(site) and site.repeats), ""
    )


def takes_what_was_loaded(stage: Stage, position: int) -> bool:
    """Whether many of a set's steps took batches that had been loaded before; later steps have none."""
    drained, nums = list[int](), list[int]()
    for each in stage.observed(position):
        drained.append(max((site.drained for site in each.calls), default=0))
        nums.append(each.steps - FIRST_STEPS)
    return bool(drained) and median(drained) > MOST_LOADED * max(0, median(nums))


def dtype_of(stage: Stage, position: int) -> str:
    return next((each.loss_dtype for each in stage.observed(position) if each.loss_dtype), "float32")


def both(row: Candidate, first: RemedyResult, later: RemedyResult, launches: int) -> RemedyResult:
    """What a launch and so many later ones show together."""
    if first.percent is None or later.percent is None or later.verdict != "undecided":
        return later
    logs = math.log1p(first.percent / 100), math.log1p(later.percent / 100)
    percent = 100 * math.expm1((logs[0] + launches * logs[1]) / (1 + launches))
    why = NO_GAIN if percent > TRIED_PERCENT else cost_text(row, later) if later.why == NO_GAIN else later.why
    return replace(later, percent=percent, why=why)


def promising(to_try: Sequence[Candidate], tried: Mapping[str, RemedyResult]) -> list[Candidate]:
    """The remedies that are worth trying again, in their order.

    Also what doesn't seem to help: a single launch may take a third longer than others.
    """
    known = [
        row
        for row in to_try
        if (found := tried[row.code]).verdict == "undecided"
        and found.percent is not None
        and found.why != BEGINS_OTHERWISE
        and not (row.remedy.cost and found.why == NO_GAIN)
    ]
    return in_order(known, tried)


def in_order(rows: Sequence[Candidate], tried: Mapping[str, RemedyResult]) -> list[Candidate]:
    """The remedies with the largest gain first.

    What costs something at each start takes longest to prove: it goes last unless the others hardly gain.
    """
    percents = {row.code: tried[row.code].percent or 0.0 for row in rows}
    plain = min((percents[row.code] for row in rows if not row.remedy.cost), default=0.0)

    def place(row: Candidate) -> tuple[bool, float]:
        percent = percents[row.code]
        is_alone = percent <= LIKELY_PERCENT and LIKELY_SHARE * percent < plain
        return bool(row.remedy.cost) and not is_alone, percent

    return sorted(rows, key=place)


def best_of(to_try: Sequence[Candidate], tried: Mapping[str, RemedyResult]) -> list[Candidate]:
    """The remedies that helped, in their order; of those that exclude each other the best."""
    helped = [
        row
        for row in to_try
        if tried[row.code].verdict == "undecided" and tried[row.code].why != BEGINS_OTHERWISE
        if (tried[row.code].percent or 0.0) <= TRIED_PERCENT
    ]
    helped = in_order(helped, tried)
    firsts = {row.remedy.group or row.code: row for row in reversed(helped)}
    return [row for row in helped if firsts[row.remedy.group or row.code] is row]


def open_for(
    rows: Iterable[Candidate], tried: Mapping[str, RemedyResult], why: str
) -> dict[str, RemedyResult]:
    """Results of the undecided remedies in `rows` that may gain something, with `why` added to the reason."""
    known = ((row.code, tried[row.code]) for row in rows)
    return {
        code: replace(each, why="; ".join(filter(None, (each.why, why))))
        for code, each in known
        if each.verdict == "undecided" and each.why not in NEVER_COMPARED
    }


def of_same_kind(to_try: Sequence[Candidate], tried: Mapping[str, RemedyResult]) -> dict[str, RemedyResult]:
    """The remedies that helped less than another one that excludes them, with that as the reason."""
    best = {row.remedy.group: row.code for row in best_of(to_try, tried) if row.remedy.group}
    found = dict[str, RemedyResult]()
    for row in to_try:
        code = best.get(row.remedy.group, row.code)
        if code != row.code:
            found |= open_for([row], tried, f"{code} gained more in its trials")
    return found


def cost_text(row: Candidate, found: RemedyResult) -> str:
    """What a remedy costs at each start; empty: nothing."""
    if found.start_s is None or found.pays_from_steps is None:
        return f"{row.remedy.cost} takes time at each start" if row.remedy.cost else ""
    pays = f"pays from {format_count(found.pays_from_steps)} steps on"
    return f"costs {found.start_s:.0f} s at each start: {pays}"


def places_of(sites: Sequence[CallSite], directory: Path) -> str:
    """`train.py:41, 44, data.py:7`."""
    found = dict[str, list[str]]()
    for file, line in dict.fromkeys(tuple(place_of(site, directory).rsplit(":", 1)) for site in sites):
        found.setdefault(file, []).append(line)
    return ", ".join(f"{file}:{', '.join(lines)}" for file, lines in found.items())


def place_of(site: CallSite, directory: Path) -> str:
    """`train.py:41`, relative to the directory of the job or to that of installed packages it is in."""
    return f"{_shown_file(Path(site.file), directory)}:{site.line}"


def _shown_file(file: Path, directory: Path) -> Path:
    packages = next((each for each in file.parents if each.name in ("site-packages", "dist-packages")), None)
    known = next((each for each in (packages, directory) if each and file.is_relative_to(each)), None)
    return file if known is None else file.relative_to(known)


def result_of(row: Candidate, search: RemedySearch) -> RemedyResult:
    """The row of the table before anything is known."""
    if row.keys:
        return RemedyResult(row.code, ", ".join(row.keys), search.place_of(row), "not tried", why=row.refusal)
    place = places_of(row.sites, search.given.directory)
    return RemedyResult(row.code, row.remedy.call, place, "not tried", why=row.refusal)
