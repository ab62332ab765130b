"""Sentences of findings about runs that have one for each case, and reasons that rows and files hold."""

from collections.abc import Mapping

Cases = Mapping[str, str]
"""A sentence by the name of its case."""

NOT_MEASURED: Cases = {
    "none": "no variant could be measured, so none is fastest",
    "none-yet": "no variant has been measured yet, so none is fastest",
    "one": "{leader} couldn't be measured",
    "one-yet": "{leader} hasn't been measured yet[: {reason}]",
    "ended": "{leader} {ended}[: {reason}]",
    "other-work": "no variant does the same work in both runs",
    "unmarked": "a step can't be compared: no steps are marked in {where}[; {doubt}]",
    "no-device-work": "a step can't be compared: {where} lacks the device's work",
    "no-times": "no variant has times in both runs",
}
ENDED: Mapping[str, str] = {
    "failed": "failed",
    "oom": "didn't fit in memory",
    "timeout": "took too long",
    "hung": "hung",
}
"""By the status of a variant that has no times."""
FASTER: Mapping[str, str] = {
    "step": "faster than",
    "sample": "less time per sample than",
    "program": "shorter steps than",
}
"""By what variants are compared: a step of the same samples, a sample, or a step of any work."""
AS_FAST: Mapping[str, str] = {
    "step": "as fast as",
    "sample": "as fast per sample as",
    "program": "as fast per step as",
}
"""From twice on."""
SLOWER: Mapping[str, str] = {
    "step": "is[ {by}] slower",
    "sample": "takes[ {by}] more time per sample",
    "program": "takes[ {by}] longer per step",
}
TIMES: Mapping[str, str] = {
    "step": "takes {by} as long",
    "sample": "takes {by} as long per sample",
    "program": "takes {by} as long per step",
}
GATED: Mapping[str, tuple[str, str, str]] = {
    "wall": ("is {by} slower than", "is not slower", "is slower"),
    "cpu": (
        "takes {by} more CPU time per step than",
        "doesn't take more CPU time per step",
        "takes more CPU time per step",
    ),
}
"""By metric: a version takes more; it doesn't; and the question whether it does."""
LONGER_BY: Mapping[str, str] = {
    "wall": "takes {by} as long as",
    "cpu": "takes {by} as much CPU time per step as",
}
"""By a metric, from twice on."""
SCATTER: Cases = {
    "launches": "that difference is within the scatter of their launches",
    "rounds": "that difference is within the scatter of the rounds of {num_launches:launch}",
    "gate": "launches differ by {scatter_percent} (standard deviation): even equal versions would take "
    "{long}",
}
OF_REPLICAS = "[; on CPU devices, the peak of {replicas} is that of all devices together]"
FITS: Cases = {
    "none": "no variant fits in {memory_gib}: even {leader} takes {peak_gib}",
    "fastest": "fastest[ {on_average}] that fits in {memory_gib}: {leader} ({step_ms} ms, {peak_gib})"
    "[; the peak of {num_unknown:other} isn't known]"
    f"{OF_REPLICAS}",
}
WITHOUT_LOAD: Cases = {
    "yes": "without other load {other} would take longer, too[: {change_percent} ({ci})]",
    "no": "without other load {other} would not take longer[: {change_percent} ({ci})]",
    "unknown": "without other load {other} may or may not take longer[: {change_percent} ({ci})]",
}
PLAN: Cases = {
    "planned": "{note}",
    "left-out": "left out: {what}: {reason}",
    "other-batches": "global batches differ, so variants are compared by their time per sample",
    "cpu-time": "CPU time isn't the time of a step: what ranks wait for, as for each other, isn't in it",
    "smallest-seen": "the smallest difference it would have seen, with {chance_percent} chance, is {seen}",
    "effects": "effects on {quantity}, with one value of the best combination changed (on average: over all "
    "combinations, by the model of the search): {effects}",
}
WITHIN: Cases = {
    "verdicts": "verdicts rest on {num_launches:launch}; another run may differ by more"
    "[: for verdicts that hold in any run, set {setting}]",
    "intervals": "intervals of step times have 95 % confidence within one launch ({parts}); other launches "
    "may differ by more",
}
TIME_SPENT: Cases = {
    "budget": "[{num_trials:trial} and ]{num_launches:launch} took {spent_percent} of the budget"
    "[: {parts_percent}][; each variant was launched once, though {budget_s} are too short for it]",
    "program": "{where} ran for {run_s}[ in the launch of median length, of {num_attempts}]: {before_s} "
    "before its first step, {steps_s} in and between its {num_steps:step}, {after_s} after the last one"
    "[ (of {num_programs} programs it has the most time outside of steps)]",
}
_TREND = (
    "on average {first_ms} ms in its first third and {last_ms} ms in its last: the step time depends on how "
    "many steps are made"
)
_ABLATION = (
    "exposed communication is {traced_ms} ms in the trace, but {ablation_ms} ms when measured by disabling it"
)
STOPPED = "stopped"
_BY_A_SIGNAL = {STOPPED: "{cause} stopped {launch}[; its ranks ended with {ended}]"}
NOTICED: Cases = {
    "recorded": "{found}",
    **_BY_A_SIGNAL,
    "killed-early": "{killed} of {launch} {were} killed before the time to end was "
    "over: what was being saved may be incomplete",
    "killed": "{killed} of {launch} {were} killed, since {grace_s} were not enough to end (`grace`, or "
    "`--shutdown-timeout` for torchrun): what was being saved may be incomplete",
    "no-peak": "no MFU: the peak of {gpus} in {precision} isn't known; `peak_tflops` in the job states it",
    "software": "the software has changed during this run: {parts}",
    "fewer-steps": "its launches made {least} to {most} steps: if a later one goes on from what the first "
    "has saved, give each its own directory: `{placeholder}` in `args`, or $GPURUN_LAUNCH_DIR in the program",
    "far-from-median": "the step is a mean, {step_ms} ms; the median of the slowest rank is only "
    "{median_ms} ms: a few steps take much longer than most",
    "longest-steps": "half of the slowest rank's steps take {median_ms} ms or less; longer ones "
    "(validation, checkpoints or waiting for data may be in them) raise the mean to {step_ms} ms",
    "other-work": "{one} made {num_steps:step} and {other} {other_steps}: a step of the one may do other "
    "work than a step of the other, and only steps are compared"
    "[; their whole runs took {run_s} and {other_s}]",
    "steps-grow": f"steps take longer and longer during a launch, {_TREND}",
    "steps-shrink": f"steps take less and less time during a launch, {_TREND}",
    "ablation-contention": f"{_ABLATION}; communication may also slow down compute",
    "ablation-varies": f"{_ABLATION}; that is more than a step, and steps vary too much to measure it so",
    "ablation-hardware": f"{_ABLATION}; ranks that don't communicate may compete for the hardware instead",
    "traced-far": "traced steps differ a lot from the timed steps",
}
LOADED: Cases = {
    "queued": "rank {rank} of {where} waited for a free core in {queued} of its step",
    "throttled-of": "the clock of {device} was throttled in {where}: {reason}",
}
_LIKEWISE = "[; {num_more:other variant} likewise]"
AFFECTED: Cases = {
    "queued": f"{LOADED['queued']}{_LIKEWISE}: these times depend on other load",
    "throttled-of": f"{LOADED['throttled-of']}{_LIKEWISE}: these times depend on that clock",
}
OWN_PROCESSES = "own-processes"
REASONS: Cases = {
    "unused-budget": "`budget` is not used, since no variant is compared with another; {setting} says how "
    "much is measured",
    "few": "{seen} {are} too few to rule out chance[ in {num} comparisons]",
    "outlying": "one of {num_rounds:round} of {where} took {step_ms} ms per step, the others {others}",
    "few-of-each": "{num_launches:launch} of each version, and a verdict takes {least}",
    "few-launches": "{have}, and a verdict takes {least} of each run: set {setting}",
    "run-has": "run {run} has {num_launches:launch}",
    "loaded": "run {run} ran with other load on the machine: {reason}",
    "scattered": "its launches differ too much from each other",
    "other-work": "none does the same work in both",
    "throttled": "the clock of a GPU was throttled",
    **LOADED,
    "not-yet": "not measured yet[ at {where}]",
    **_BY_A_SIGNAL,
    "no-steps": "no steps at {where}",
    "strayed": "at {where} it loaded {file}[ and {num_more:other file}] of {other}",
    "hour": "more than an hour",
    "launches": "more than {most} launches of each",
    "unsteady": "the step time did not settle within {num_steps} warm-up steps",
    OWN_PROCESSES: "the program starts processes of its own (mp.spawn), which aren't seen",
    "only-warmup": "{num_steps:step}, all warm-up[ or slowed by the program's own profiler ({num_slowed})]; "
    "run more than {least}[ that it {how} slow]",
    "short": "[in {num_short} of {num_launches:launch} ]only {num_steps:step} were recorded, each from one "
    "optimizer step to the next; times are from {num_shown:step} of the second half; run more steps"
    "[: usually {enough} are enough]",
    "uneven-ranks": "rank {rank} made {num_steps:step} and rank {other} {other_steps}: only those that all "
    "ranks made count",
    "sample": "figures are based on a sample: {num_kept} of {num_steps:step} are recorded one by one, others "
    "by their mean or not at all",
    "probe-nothing": "{workload} has measured nothing.",
    "gpu-slower": "The GPU is slower at every size up to {num_rows} rows, transfer included",
    "gpu-faster": "The GPU is faster from {num_rows} rows on, transfer included",
    "gpu-faster-at": "The GPU is faster at {sizes} rows, but not at {num_rows}, transfer included",
    "probe-rate": "{series}: up to {rate} GFLOP/s",
    "probe-line": "{series}: {latency} + size / {rate} GB/s",
    "probe-point": "{series}: {last}",
    "probe-bent": "{series}: {first} and {last}; no straight line fits all sizes (the best one is off by up "
    "to {ratio}×)",
    "effect": "{key}={value} instead of {against}[ {at_best}][, on average {average}]",
    "tried": "The search tried {num_tried} of {num_distinct} different combinations[, of which {num_failed} "
    "failed]",
    "searching": "The search is not over: {num_tried} of {num_distinct} different combinations have been "
    "tried[, of which {num_failed} failed][; the fastest is {leader}]",
    "searched": "{tried}, and compared {num_compared} of them[; by a model of their times no other is more "
    "than {missed_percent} faster than the best of these (95 % confidence)]",
    "searched-few": "{tried}, and compared {num_compared} of them, too few to say how much faster others "
    "may be: give it a larger budget",
}
"""Reasons in rows of a table, and in records of ranks."""
