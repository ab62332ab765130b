"""The attempts at the launches of a run: what is missing, and how their variants ended.

What `--resume` keeps and measures again is decided here, and put into a sentence.
"""

import signal
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from gpurun.launcher.compare.figures.recorded import round_times
from gpurun.launcher.errors import ParamsError
from gpurun.launcher.failures.root_cause import Failure, fails_everywhere
from gpurun.launcher.findings.run_cases import ENDED
from gpurun.launcher.inspect.hang_diagnosis import Hang
from gpurun.launcher.inspect.stacks import file_hash
from gpurun.launcher.jobfile.settings import SETTINGS
from gpurun.launcher.plan.model import Launch, Plan, Variant
from gpurun.launcher.rundir.files import RunDir, write_json
from gpurun.launcher.rundir.records import (
    MEASURED,
    NO_STEPS,
    Resumption,
    VariantFacts,
    VariantStatus,
    before_s,
    between_s,
    elapsed_s,
)
from gpurun.launcher.stats.estimates import is_spent
from gpurun.launcher.units import first_of, listed, plural

_MOST_NAMED = 5
FIRST_KNOWN = ("gradient_warning", "inexact", "untimed", "flops_per_sample", "bytes_per_sample", "loss")
"""Facts that are those of the first launch that has them."""


@dataclass(frozen=True)
class Ended:
    """How an attempt of a launch ended; without failure and `late`, well."""

    failure: Failure | None = None
    late: str | None = None
    """Why the ranks were stopped: `took longer than 5 s`, `no step completed for 30 s`."""
    is_hung: bool = False
    """Whether that was a hang, not the time limit of a variant."""
    hang: Hang | None = None
    """The activity of the ranks then."""
    variant: str | None = None
    """The variant that was running when it failed; `None`: none had begun."""

    @property
    def is_well(self) -> bool:
        return self.failure is None and self.late is None

    @property
    def is_same_everywhere(self) -> bool:
        """Whether every launch that builds the same model would fail, too."""
        found = self.failure
        is_built = self.variant is None and found is not None and found.stage == "build"
        return is_built and found is not None and fails_everywhere(found)

    @property
    def mistake(self) -> ParamsError | None:
        """The mistake in the job itself, where only building its workload could show it."""
        found = self.failure if self.is_same_everywhere else None
        is_mistake = found is not None and found.error == ParamsError.__name__
        return ParamsError(found.message) if found is not None and is_mistake else None


@dataclass(frozen=True)
class Remaining:
    """How far a launch is, from the run directory."""

    missing: tuple[str, ...]
    """Variants that are still to be measured."""
    rounds: Mapping[str, int] = field(default_factory=dict)
    """Rounds to run next, by variant: the missing ones, and the baseline with them."""
    attempts: int = 0
    """Started so far, of this launch."""
    done: int = 0
    """Rounds that all of the missing variants have completed."""


def attempt_id(launch: Launch, attempt: int) -> str:
    """`03-ddp-2`, then `03-ddp-2~2`, …: a launch that ended early starts again under a new name."""
    return launch.id if attempt == 1 else f"{launch.id}~{attempt}"


def attempts(run: RunDir, launch: Launch) -> list[str]:
    """Ids of the attempts of a launch that were started, in order."""
    found: list[str] = []
    while run.launch_config(attempt := attempt_id(launch, len(found) + 1)).exists():
        found.append(attempt)
    return found


def counting_attempts(run: RunDir, launch: Launch) -> list[str]:
    """The attempts at a launch that weren't replaced."""
    replaced = run.read_replaced()
    return [attempt for attempt in attempts(run, launch) if attempt not in replaced]


def replace_other_software(
    run: RunDir, plan: Plan, software: Mapping[str, str], job_dir: Path
) -> dict[str, str]:
    """Attempts that don't count from now on, and what has changed: other software or code ran in them, and
    their repetition isn't complete.

    The launches of a repetition are compared with each other, so all of them have to run the same.
    """
    begun = {launch.repetition for launch in plan.launches if attempts(run, launch)}
    changed: dict[str, str | None] = {}
    for repetition in sorted(begun):
        launches = [launch for launch in plan.launches if launch.repetition == repetition]
        if any(is_incomplete(run, plan, launch, is_last=repetition == max(begun)) for launch in launches):
            names = [name for launch in launches for name in counting_attempts(run, launch)]
            changed |= {name: _changed(run, name, software, job_dir) for name in names}
    found = {name: what for name, what in changed.items() if what is not None}
    if found:
        write_json(run.replaced, [*sorted(run.read_replaced()), *found])
    return found


def _changed(run: RunDir, attempt: str, software: Mapping[str, str], job_dir: Path) -> str | None:
    """`the software`, or a file, that an attempt ran in another version than is there now; else `None`."""
    if run.read_software(attempt) not in ({}, software):
        return "the software"
    code = run.read_imported(attempt)
    other = [name for name, digest in code.items() if file_hash(job_dir / name) != digest]
    return min(other, default=None)


def is_incomplete(run: RunDir, plan: Plan, launch: Launch, is_last: bool) -> bool:
    """Whether something is missing of a launch. With a budget, earlier repetitions may have left it out."""
    was_left_out = plan.budget_s is not None and not is_last and not attempts(run, launch)
    return not was_left_out and bool(remaining(run, plan, launch, None).missing)


def has_ended(run: RunDir, plan: Plan) -> bool:
    """Whether a run's budget is spent, and no launch that it began is incomplete."""
    begun = [launch for launch in plan.launches if attempts(run, launch)]
    return is_spent(run.read_looks()) and not any(
        remaining(run, plan, launch, None).missing for launch in begun
    )


def num_restarts(run: RunDir, launch: Launch) -> int:
    """How often a launch has been started again after a failure."""
    return sum(restart.launch.partition("~")[0] == launch.id for restart in run.read_restarts())


def finished_variants(run: RunDir, launch: Launch) -> set[str]:
    """Variants that an attempt of this launch measured completely."""
    finished: set[str] = set()
    for attempt in counting_attempts(run, launch):
        events = run.read_events(attempt)
        if events and events[-1].stage == "done":
            finished |= run_variants(run, attempt)
    return finished


def remaining(run: RunDir, plan: Plan, launch: Launch, chosen: Mapping[str, int] | None) -> Remaining:
    """The part of a launch that is missing; the baseline runs next to it where it can: rounds are pairs.

    Args:
        chosen: rounds of each variant that is measured from now on; `None`: of all, as planned.
    """
    started = attempts(run, launch)
    rounds = planned_rounds(run, plan, launch, started, chosen)
    finished = finished_variants(run, launch)
    lost = {v for v in rounds if (s := run.read_status(v)) and s.status not in MEASURED}
    missing = [v for v in rounds if v not in finished | lost]
    status = run.read_status(plan.baseline)
    usable = status is None or status.status in MEASURED
    done = rounds_done(run, plan, launch, missing)
    next_ = {
        v: max(1, num - done) for v, num in rounds.items() if v in missing or (v == plan.baseline and usable)
    }
    return Remaining(tuple(missing), next_, len(started), done)


def planned_rounds(
    run: RunDir, plan: Plan, launch: Launch, started: Sequence[str], chosen: Mapping[str, int] | None
) -> dict[str, int]:
    """Rounds of each variant of a launch: with a budget, those with which it began, or those chosen."""
    if plan.budget_s is not None and started:
        head = run.read_launch_head(started[0])
        return {variant.id: variant.rounds or head.rounds for variant in head.all_variants}
    if chosen is not None:
        return {v: chosen[v] for v in launch.variants if v in chosen}
    return dict.fromkeys(launch.variants, launch.rounds)


def rounds_done(run: RunDir, plan: Plan, launch: Launch, variants: Sequence[str]) -> int:
    """Rounds of a launch, over all its attempts, that every rank has completed for all of `variants`."""
    names = set(attempts(run, launch))
    counts = []
    for variant in variants:
        newest = {
            time.launch: time.round
            for time in round_times(run.read_steps(variant), plan.variant(variant).world_size, "timed")
        }
        counts.append(sum(round_ for name, round_ in newest.items() if name in names))
    return min(counts, default=0)


def run_variants(run: RunDir, attempt: str) -> set[str]:
    """Variants that an attempt was to measure."""
    return {variant.id for variant in run.read_launch_head(attempt).all_variants}


def spent_s(run: RunDir) -> float:
    """Seconds that the launches of a run have taken so far, and those before and between them."""
    logs, commands = run.read_all_events().values(), run.read_commands()
    return sum(map(elapsed_s, logs)) + before_s(logs, commands) + sum(between_s(logs, commands))


def record_outcomes(
    run: RunDir, plan: Plan, launch: Launch, attempt: str, ended: Ended, missing: Sequence[str]
) -> tuple[str, ...]:
    """Writes how the variants of an attempt ended; variants of other launches that are skipped therefore.

    A failure costs the variant that caused it; if none had begun, all that were missing of the launch.
    """
    lost = () if ended.is_well else (ended.variant,) if ended.variant is not None else tuple(missing)
    for variant in finished_variants(run, launch):
        facts = merged_facts(run, plan, variant)
        write_json(run.facts(variant), facts)
        write_json(run.status(variant), status_of(facts))
    skipped = untried_with_same_model(run, plan, lost) if ended.is_same_everywhere else ()
    for variant in (*lost, *skipped):
        write_json(run.status(variant), lost_status(run, attempt, ended))
    return skipped


def untried_with_same_model(run: RunDir, plan: Plan, lost: Sequence[str]) -> tuple[str, ...]:
    """Other variants that have not been tried and build the model of one of `lost`, by the same code."""
    models = [(plan.side_of(variant), model_of(plan.variant(variant))) for variant in lost]
    untried = [v for v in plan.variants if run.read_status(v.id) is None and not run.read_steps(v.id)]
    return tuple(v.id for v in untried if (plan.side_of(v.id), model_of(v)) in models and v.id not in lost)


def model_of(variant: Variant) -> tuple[object, ...]:
    """Everything that a workload's `build` may depend on, except its processes."""
    return tuple(getattr(variant, name) for name, setting in SETTINGS.items() if setting.builds_model)


def merged_facts(run: RunDir, plan: Plan, variant_id: str) -> VariantFacts:
    """The facts about a variant from all launches; unsteady if it was in more than half of them."""
    found = []
    for launch in plan.launches:
        for attempt in counting_attempts(run, launch):
            facts = run.read_launch_facts(attempt)
            found += [facts.get(variant_id)] if variant_id in run_variants(run, attempt) else []
    known = [facts for facts in found if facts is not None]
    checked = next((facts for facts in known if facts.gradient_reference), VariantFacts())
    unsteady = [facts.unsteady for facts in known if facts.unsteady]
    warnings = dict.fromkeys(w for facts in known for w in facts.warnings)
    if NO_STEPS in warnings and run.read_steps(variant_id):
        del warnings[NO_STEPS]
    return VariantFacts(
        gradient_error=checked.gradient_error,
        gradient_reference=checked.gradient_reference,
        parameter_error=checked.parameter_error,
        warnings=tuple(warnings),
        unsteady=unsteady[0] if 2 * len(unsteady) > len(found) else None,
        code={name: hash_ for facts in known for name, hash_ in facts.code.items()},
        **{name: _first_known(known, name) for name in FIRST_KNOWN},
    )


def _first_known(facts: Sequence[VariantFacts], name: str) -> Any:
    return next((value for each in facts if (value := getattr(each, name)) is not None), None)


def status_of(facts: VariantFacts) -> VariantStatus:
    """The status of a variant that was measured completely."""
    if facts.unsteady:
        return VariantStatus("unsteady", facts.unsteady)
    return VariantStatus("ok")


def lost_status(run: RunDir, attempt: str, ended: Ended) -> VariantStatus:
    """The status of a variant that an attempt failed to measure."""
    failure, hang = ended.failure, ended.hang
    rank = failure.rank if failure else hang.rank if hang else None
    log = str(run.log(attempt, rank or 0).relative_to(run.path))
    if failure is None:
        where = f": {hang.headline}" if hang and hang.headline else ""
        late: Literal["hung", "timeout"] = "hung" if ended.is_hung else "timeout"
        return VariantStatus(late, f"{ended.late}{where}", attempt, rank, log)
    status: Literal["oom", "failed"] = "oom" if failure.kind == "oom" else "failed"
    return VariantStatus(status, failure.reason, attempt, rank, log)


@dataclass(frozen=True)
class Begun:
    """A launch that the run has begun."""

    launch: Launch
    finished: frozenset[str]
    """Variants that are measured completely."""
    remaining: Remaining


def let_run_again(run: RunDir, plan: Plan, software: Mapping[str, str], job_dir: Path = Path()) -> Resumption:
    """Lets variants run again that failed, and launches that ran with other software."""
    statuses = {variant.id: run.read_status(variant.id) for variant in plan.variants}
    lost = {name: status for name, status in statuses.items() if status and status.status not in MEASURED}
    again = {
        name: status for name, status in lost.items() if is_tried_again(status, _root_cause(run, status))
    }
    for variant in again:
        run.status(variant).unlink()  # its logs and failure records are kept
    replaced = replace_other_software(run, plan, software, job_dir)
    begun = [
        Begun(launch, frozenset(finished_variants(run, launch)), remaining(run, plan, launch, None))
        for launch in plan.launches
        if attempts(run, launch)
    ]
    return resumption(plan, lost, again.keys(), replaced, begun)


def _root_cause(run: RunDir, status: VariantStatus) -> Failure | None:
    path = run.root_cause(status.launch) if status.launch else None
    return run.read(path, Failure) if path is not None and path.exists() else None


def is_tried_again(status: VariantStatus, cause: Failure | None) -> bool:
    """Whether a lost variant is measured again: one that ran out of memory by itself would do so again.

    If the kernel's OOM killer ended it, others may have taken the memory.
    """
    return status.status != "oom" or (cause is not None and cause.code == -signal.SIGKILL)


def resumption(
    plan: Plan,
    lost: Mapping[str, VariantStatus],
    again: Collection[str],
    replaced: Mapping[str, str],
    begun: Sequence[Begun],
) -> Resumption:
    """The parts of a run that are kept and those that are measured again.

    Args:
        plan: of the run.
        lost: variants that weren't measured, with their status.
        again: those of them that are tried again.
        replaced: attempts that don't count any more, and what has changed since.
        begun: launches that the run has begun, without those attempts.
    """
    kept = [state for state in begun if state.finished]
    repeated = {state.launch.id for state in begun} & {name.partition("~")[0] for name in replaced}
    open_ = [state for state in begun if state.remaining.missing and state.launch.id not in repeated]
    paired = {name for state in open_ for name in state.remaining.rounds if name in state.finished}
    interrupted = {
        state.launch.id: (state.remaining.done, state.remaining.done + max(state.remaining.rounds.values()))
        for state in open_
        if not set(again).issuperset(state.remaining.missing)
    }
    left_out = lost.keys() - set(again)
    known = {state.launch.id for state in begun}
    unknown = [launch for launch in plan.launches if launch.id not in known]
    return Resumption(
        launches=len(kept),
        variants=len({name for state in kept for name in state.finished}),
        again={name: _how_it_ended(status) for name, status in lost.items() if name in again},
        with_baseline=min(paired, default=None),
        left_out=tuple(name for name in lost if name not in again),
        replaced=tuple(replaced),
        changed=tuple(dict.fromkeys(replaced.values())),
        interrupted=interrupted,
        not_begun=None
        if plan.budget_s
        else sum(not left_out.issuperset(launch.variants) for launch in unknown),
    )


def _how_it_ended(status: VariantStatus) -> str:
    how = ENDED.get(status.status, status.status)
    return f"{how} ({status.reason})" if status.reason else how


def resumption_text(found: Resumption) -> str:
    """`Resumed: keeps 12 launches of 3 variants; measures ddp-2-6-4 again: it failed (rank 1 …)`."""
    kept = f"{plural(found.launches, 'launch')} of {plural(found.variants, 'variant')}"
    parts = [f"keeps {kept}" if found.launches else "no launch is complete"]
    paired = f", next to the baseline {found.with_baseline}" if found.with_baseline else ""
    for how in dict.fromkeys(found.again.values()):
        lost = [name for name, its in found.again.items() if its == how]
        which = "they" if lost[1:] else "it"
        parts.append(f"measures {first_of(lost, _MOST_NAMED)} again{paired}: {which} {how}")
    if found.replaced:
        names, what = first_of(found.replaced, _MOST_NAMED), listed(found.changed or ("the software",))
        parts.append(f"measures {names} again: {what} {'have' if found.changed[1:] else 'has'} changed")
    if without := [name for name, (done, _) in found.interrupted.items() if not done]:
        parts.append(f"measures {first_of(without, _MOST_NAMED)} again: the run was interrupted")
    for name, (done, num) in found.interrupted.items():
        parts += [f"goes on with {name} after {done} of {plural(num, 'round')}"] if done else []
    if found.not_begun:
        parts.append(f"begins {plural(found.not_begun, 'further launch')}")
    if len(parts) == 1 and found.not_begun == 0:
        parts.append("nothing is left to measure")
    if found.left_out:
        names = first_of(found.left_out, _MOST_NAMED)
        parts.append(f"leaves {names} out: out of memory, as before")
    return f"Resumed: {'; '.join(parts)}"
