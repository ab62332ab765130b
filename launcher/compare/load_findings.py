"""Other load on the machine: ranks that queue for a core, or GPUs whose clocks were throttled.

A verdict is about the machine as it was: rounds and launches take turns, so that load affects all variants.
Next to it is what is known of the same machine without load, from the times less the waiting. How much low
clocks change isn't known. Threads of one run that wait for each other are part of its step.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from gpurun.launcher.compare.figures.recorded import other_cores, queue_percent, sharing
from gpurun.launcher.compare.label import variant_label
from gpurun.launcher.compare.model import VariantResult, WithoutLoad
from gpurun.launcher.compare.ranking import Rival, is_ranked
from gpurun.launcher.findings.finding import Finding, finding, reason
from gpurun.launcher.machine.accelerators import CPU
from gpurun.launcher.plan.model import Launch, Plan
from gpurun.launcher.rundir.files import RunDir
from gpurun.launcher.rundir.records import StepRecord
from gpurun.launcher.stats.core_waiting import QUEUE_PERCENT, queued_text, waiting_of_ranks
from gpurun.launcher.trace.causes import to_do

BLOCKS_TO_WARN = 3
TIME_TO_WARN_S = 2.0
"""Fewer blocks of a rank, or less time, may be a short burst."""


def interference_in(results: Sequence[VariantResult]) -> tuple[Finding, ...]:
    """Other load during each variant that has times, for its worst rank; the worst variant first."""
    ranked = sorted(filter(is_ranked, results), key=_queue_percent, reverse=True)
    return tuple(found[0] for result in ranked if (found := (*_queued_in(result), *throttled_in([result]))))


def _queue_percent(result: VariantResult) -> float:
    """The share of a step for which its worst rank waited for cores."""
    return max((rank.queue_percent or 0.0 for rank in result.ranks), default=0.0)


def cool_down() -> Finding:
    """The next step where clocks were throttled."""
    return to_do("not-ranked", "throttled")


def load_percent(results: Sequence[VariantResult]) -> float | None:
    """The largest share of a step for which a rank waited for cores under other load; `None` without any."""
    worst = max((_queue_percent(result) for result in results if is_ranked(result)), default=0.0)
    return worst if worst > QUEUE_PERCENT else None


FIRST, LATER = 1.1, 0.8
"""Weights: fewer threads change least, and go before more launches."""


def _less(case: str = "stop-others", weight: float = LATER, **figures: Any) -> Finding:
    return to_do("affected-by-load", case, weight, **figures)


def less_load(results: Sequence[VariantResult], cores: int | None) -> Finding:
    """The next step where ranks waited for cores: fewer threads or devices, by how many cores were free.

    Args:
        results: of all variants.
        cores: of the machine, as far as the run may use them; `None`: it isn't known.
    """
    ranked = [result for result in results if is_ranked(result) and result.devices[0].startswith(CPU.name)]
    others = [rank.other_cores for result in ranked for rank in result.ranks if rank.other_cores is not None]
    widest = max(ranked, key=lambda result: len(result.devices) * max(1, result.threads), default=None)
    if widest is None or len(widest.devices) * max(1, widest.threads) == 1:
        return _less()
    if any(len(set(result.split or ())) > 1 for result in results) and all(
        result.threads <= 1 for result in ranked
    ):
        return _less()  # fewer devices don't have these splits
    fewer = None
    if cores is not None and others:
        fewer = less_at_once(len(widest.devices), widest.threads, _free(cores, max(others)))
        if fewer is not None and suits_alone(len(widest.devices), widest.threads, cores):
            return _less()
    return fewer or _less("fewer-or-stop")


def suits_alone(num_devices: int, threads: int, cores: int) -> bool:
    """Whether the ranks of a program have a core each without other load: their number is then no mistake."""
    return threads == 0 and num_devices <= cores


def _free(cores: int, others: float) -> int:
    """The cores that other programs leave, at least 1."""
    return max(1, round(cores - others))


def waiting_findings(
    results: Sequence[VariantResult], cores: int | None, rival: Rival | None = None
) -> tuple[Finding, ...]:
    """Other load: whether the verdict holds without it, and the next step; nothing where there was none.

    Args:
        results: of all variants.
        cores: of the machine, as for `less_load`.
        rival: the variant whose difference the answer names.
    """
    found = interference_in(results)
    if not found:
        return ()
    is_hot = bool(throttled_in(results))
    step = cool_down() if is_hot else less_load(results, cores)
    load = finding("affected-by-load", num_more=len(found) - 1 or None, **found[0].figures)
    if is_hot or rival is None or rival.behind.verdict not in ("slower", "faster"):
        return (load, step)
    quiet = rival.behind.without_load or WithoutLoad()
    if quiet.holds == "no":
        return (load, _without_load(rival, quiet), step)
    # What is left to gain is the time of a step.
    share = replace(step, weight=(load_percent(results) or 0.0) / 100)
    return (load, _without_load(rival, quiet), *((share,) if "fewer" in step.figures else ()))


def _without_load(rival: Rival, quiet: WithoutLoad) -> Finding:
    """Whether a difference would be there without other load: `+12 % (6 to 18)`, as far as it is known."""
    return finding(
        "without-load",
        rival.result.id,
        case=quiet.holds,
        other=variant_label(rival.result),
        change_percent=quiet.percent if quiet.ci else None,
        ci=quiet.ci if quiet.percent is not None else None,
    )


def _queued_in(result: VariantResult) -> tuple[Finding, ...]:
    """The rank that waited longest for cores, if any did."""
    percent = _queue_percent(result)
    if percent <= QUEUE_PERCENT:
        return ()
    rank = next(rank.rank for rank in result.ranks if rank.queue_percent == percent)
    where, queued = variant_label(result), queued_text(percent)
    return (finding("affected-by-load", case="queued", rank=rank, where=where, queued=queued),)


def throttled_in(results: Sequence[VariantResult]) -> tuple[Finding, ...]:
    """Which GPUs of variants that have times had low clocks, and why."""
    return tuple(
        finding(
            "affected-by-load",
            case="throttled-of",
            device=rank.device,
            where=variant_label(result),
            reason=rank.throttled,
        )
        for result in results
        if is_ranked(result)
        for rank in result.ranks
        if rank.throttled
    )


def load_so_far(run: RunDir, plan: Plan, launch: Launch, cores: int) -> str | None:
    """The message while a run goes on whose ranks wait for cores; `None` while nothing shows that.

    A GPU may work meanwhile: what its rank waits for a core may cost nothing. `cores`: of the machine.
    """
    on_host = (v for v in launch.variants if plan.variant(v).devices[0].startswith(CPU.name))
    for variant_id in on_host:
        steps = run.read_steps(variant_id)
        timed = {rank: [step for step in its if step.kind == "timed"] for rank, its in steps.items()}
        for rank, waited in waiting_of_ranks(timed, sharing(launch.processes)).items():
            percent = queue_percent(waited) or 0.0
            if percent > QUEUE_PERCENT and is_long_enough(timed[rank]):
                variant = plan.variant(variant_id)
                found = reason("queued", rank=rank, where=variant_label(variant), queued=queued_text(percent))
                less = None
                suits = suits_alone(len(variant.devices), variant.threads, cores)
                if (others := other_cores(waited)) is not None and not suits:
                    less = less_at_once(len(variant.devices), variant.threads, _free(cores, others))
                in_next = f" In a new run, {less.text}." if less else ""
                return f"So far {found}.{in_next} Other programs can still be stopped."
    return None


def is_long_enough(timed: Sequence[StepRecord]) -> bool:
    """Whether steps say more than what a short burst did to them."""
    num_blocks = len({(step.launch, step.round) for step in timed})
    return num_blocks >= BLOCKS_TO_WARN or sum(step.step_ns for step in timed) / 1e9 >= TIME_TO_WARN_S


def less_at_once(num_devices: int, threads: int, free: int) -> Finding | None:
    """The next step where CPU devices take more cores than were free: fewer threads, else fewer devices.

    `None` where they don't, or where nothing is left to reduce.

    Args:
        num_devices: CPU devices of one machine that compute at the same time.
        threads: of each of them; 0 of a program, which may have started any number: counts as 1.
        free: cores that other processes left, at least 1.
    """
    threads = max(1, threads)
    if num_devices * threads <= free or num_devices == threads == 1:
        return None
    case, weight, fewer = "fewer-devices", LATER, free
    if threads > 1:
        case, weight, fewer = "fewer-threads", FIRST, max(1, free // num_devices)
    taken = {"num_devices": num_devices, "threads": threads, "num_cores": num_devices * threads}
    return _less(case, weight, fewer=fewer, num_free=free, **taken)
