"""Sentences of findings about traces that have one for each case."""

from collections.abc import Mapping

NOT_RECORDED: Mapping[str, str] = {
    "outside": "outside of operators; the traces lack Python's stacks, which would show why",
    "in-stacks": "outside of operators",
    "unseen": "outside of operators or in calls for a device, whose work the traces lack",
    "unread": "outside of operators or in calls for a device whose work isn't read",
    "unread-npu": "outside of operators; neither the device's work nor the calls for it are read",
    "communication": "in communication or waiting for it; the traces lack other ranks, which would show why",
    "unmatched": "in communication or waiting for it; who waited isn't known",
    "unknown": "in gaps; the traces lack launches, which would show why",
    "lost": "in gaps; the traces lack the launches of the work that ends them, which would show why",
    "left-out": "in gaps, which may hold work: events were left out of the traces",
    "unrecorded": "waiting for the CPU, of which mostly nothing is recorded",
    "untraced": "in communication or waiting for it",
}
"""By the part of a step: where the time is lost, and what would show why."""
GAPS: Mapping[str, str] = {
    "gaps": "in gaps between work already launched",
    "waiting": "in gaps in which the CPU is mostly",
    "other-steps": "in work of other steps alone",
}
"""By the part of a step: where its time goes without a reason that the trace names."""
IN_STEP: Mapping[str, str] = {
    "data": "waiting for data",
    "host": "waiting for the CPU to launch work",
    "unrecorded": "waiting for the CPU, of which nothing is recorded",
    "launching": "waiting for launching calls to end",
    "one_off": "in what is done once",
    "allocating": "in gaps in which memory is allocated",
    "loading": "in gaps in which code is loaded",
    "blocked": "in gaps in which the CPU waits in a call",
    "other": "in gaps in which work was launched",
    "compute": "on compute",
    "transfer": "on transfers",
    "copies": "on copies",
    "other_steps": "in work of other steps alone",
}
"""What a step does in its parts."""
OF_STEP = ("its step", "its usual step")
"""Whose share a cause is; the second where steps stand apart."""
OTHERS_WAIT = "the other ranks wait"
CHANGING = "the slowest rank, which changes from step to step"
WITHOUT: Mapping[str, str] = {
    "": "that",
    "all": "that on all ranks",
    "rank": "rank {}'s extra work",
    "any": "any rank's extra work",
}
"""Without what a step would be shorter."""
BY_SHARES: Mapping[str, str] = {
    "ranks": "ranks are missing",
    "steps": "ranks recorded different steps",
    "launches": "launches are missing",
    "cut": "a trace is cut off",
    "damaged": "events of a trace are damaged",
    "times": "times are out of range",
    "devices": "device work is missing",
    "long": "there is too much to replay",
    "length": "the traces don't show what all work waited for",
}
"""Why it isn't known what a step would be shorter by."""
SLOWED: Mapping[str, str] = {
    "stacks": "recorded with Python's stacks, which slow the CPU",
    "queued": "rank {rank} waited for a free core in {queue_percent} of its step",
}
"""What has made causes larger than they would be."""
UNCERTAIN_PATH = "The path and its gains are uncertain: {}."
PATH_OF_ALL = "The path and its gains are of all steps; causes are without {}."
ONCE_FIRST = (
    "What is done once is the first cause, though not the largest gain here: later steps are without it."
)
EVENLY = (
    "If all ranks computed and copied equally long, the job would be {} shorter.",
    "If all ranks computed and copied equally long in each step, the job would be {} shorter.",
)
"""The second of several steps."""
ISSUING = "the CPU: Python, calls that issue collectives"
ALL_OF_CPU = (
    "all of the CPU's time that isn't compute",
    "all of the CPU's time, even where nothing waits for it, but with the time from launch to start,",
)
"""What a replay leaves out of the critical path; the second where work is launched."""
NO_PATH: Mapping[str, str] = {
    "launches": "no critical path: the traces have no work whose launch is known",
    "left-out": "no critical path: events were left out of the traces",
    "times": "no critical path: times are out of range",
}
"""By what the traces lack."""
NO_TABLE = "of the traces with step {step}, those of rank {rank} are left out"
DIFFERS: Mapping[str, str] = {
    "common-ranks": "compared by {ranks}, which both have, without shapes and callers of operators",
    "ranks": "A has {num_a:rank}, B {num_b}",
    "devices": "A ran on {a}, B on {b}",
    "cpu": "{side} has no operators, so they aren't compared",
    "launches": "{side} lacks launches, so idle time isn't compared by cause",
    "operators": "{side} lacks launches, so operators are compared by their time on the CPU, without shapes "
    "and callers",
    "uneven-calls": "not compared, as A and B call them unequally often: {operators}",
    "calls": "{part}A calls {num_a:operator}, {part}B {num_b}",
    "steps": "without {steps} of {side}, far longer than the others",
}
"""Why times of two captures may differ, whatever changed."""
PARTS_OF_STEP = "parts of a step"
"""From which a comparison leaves out steps that are far longer than the others."""
OF_ALL_STEPS = "; of kernels and operators, of all steps"
_AS_TRANSFER = "their waiting is counted as transfer"
_UNKNOWN_WAIT = "their waiting is unknown and counts as transfer"
_NO_RANK = "doesn't state its rank[, like {num_more:other}]; assumed to be {who}"
_PRESENT = "{num_present} of {num_ranks} ranks are present: waiting for the others counts as transfer"

_OF_A_FILE: Mapping[str, str] = {
    "link-not-followed": "symbolic link out of the directory, not followed",
    "merged": "a merged trace of all ranks, written by gpurun[ from {files}]; left out, as those of "
    "the ranks count",
    "rank-by-name": _NO_RANK + " by name",
    "rank-by-place": _NO_RANK + "[ by place among {num_files:file}]",
    "cut-off": "cut off at byte {cut_byte}: what was to follow is missing, so times are too short",
    "malformed": "{num_events:malformed event}, first at byte {first_byte} ({reason}) left out",
    "timeless": "{num_events:event} whose time is not a number left out",
    "out-of-range": "{num_events:event} of negative length or with times out of range left out",
    "device-not-read": "work on the {device} isn't read",
    "from-torch-npu": "written by torch_npu: operators on the CPU are read, work on the NPU isn't",
    "old-autograd": "written by torch.autograd.profiler of an old torch, which has no kernels: work on the "
    "GPU is that of operators, each less those that it calls",
    "unknown-categories": "events of unknown categories left out: {categories}",
    "other-steps": "steps {recorded_step} (all of them: --steps {first_step}:{end_step}), none of those "
    "asked for",
    "no-steps": "no steps, which profiler.step() would mark",
    "steps-overlap": "steps overlap; the later one is counted from where the earlier one ends",
    "steps-inside-others": "entirely inside another step, so without time or work of its own: step {steps}",
    "steps-of-one-number": "several steps have the same number; each is listed separately",
    "cpu-alone": "a device was given work, but none is recorded: the figures are those of the CPU alone",
    "several-devices": "GPU work of several devices ({devices}), each reported separately; the rank's own "
    "figures are those of the busiest, device {busiest}",
    "stray-work": "a little work on another device ({devices}) left out of the breakdown",
    "no-launches": "no launch of GPU work is recorded; work belongs to the step during which it began",
    "calls-left-out": "{num_calls:call} of the CPU recorded, far fewer than their numbers say: events were "
    "left out, so gaps may hold work",
    "lost-launches": "{num_lost:GPU event} without a recorded launch can't be assigned to a step",
    "mostly-lost-launches": "{num_lost:GPU event} without a recorded launch counted for the step during "
    "which each began",
    "idle-last-step": "step {last_step}, the last, launched no GPU work and is left out; "
    "--steps {last_step}:{end_step} shows it",
    "graphs-not-captured": "no capture in the trace is certain to be that of the CUDA graphs that launched "
    "{num_pieces:piece} of GPU work: counted for the operator, if any, that launched the graph",
}
_OF_ALL: Mapping[str, str] = {
    "not-read": "{why}",
    "other-jobs": "{num_captures:trace} in other directories left out: {directories}",
    "captures": "of the captures with most ranks, the newest is shown; {num_captures:other} of {who} "
    "left out (`gpurun diff A B` compares two): {files}",
    "copies": "{num_captures:trace} with the same content as one of {who} left out: {files}",
    "same-rank": "{num_captures:other trace} of {who}, recorded at the same time, left out: {files}",
    "jobs-apart": "of the jobs with most ranks, the newest is shown; {num_captures:trace} of other jobs or "
    "another time left out: {files}",
    "one-rank-present": _PRESENT,
    "ranks-missing": _PRESENT + ", so bandwidths are at least those shown",
    "ranks-cut-off": "means, bubbles and causes are without {who}: what their files lack isn't known",
    "world-sizes": "the traces disagree about the number of ranks: {sizes}",
    "different-steps": "the ranks recorded different steps: {recorded}",
    "unknown-groups": "between which ranks {num_collectives:collective} ran isn't recorded: "
    + _UNKNOWN_WAIT
    + ", and they don't align clocks",
    "unknown-peers": "{num_messages} sends and receives don't name the other rank: " + _UNKNOWN_WAIT,
    "on-one-rank": "{num_alone} of {num_collectives} collectives are seen on one rank only: " + _AS_TRANSFER,
    "unknown-waits": "who waited in {num_exchanges:exchange} of several ranks isn't known, as their clocks "
    "aren't known well enough: " + _AS_TRANSFER,
    "clocks-not-linked": "no collective or message links {who} to the lowest rank: their clocks can't be "
    "aligned, and their times are as recorded",
    "clocks-linked-one-way": "messages run only one way between {who} and the lowest rank: the clocks are "
    "aligned as if the fastest of them took no time, and how far they are off to one side is unknown",
    "clocks-linked-by-messages": "only messages link the clocks of {who} with that of the lowest rank: known "
    "to ±{slack_us} µs",
    "shapes-on-one-side": "only {side} has shapes (record_shapes=True): operators aren't compared by shape",
    "other-device": "a GPU worked in {side} only: operators are compared by their time on the CPU, kernels, "
    "shapes and callers aren't",
    "no-common-moment": "by their clocks the traces have no moment in common; each is shown from its own "
    "start (traces of different jobs belong in separate directories)",
    "outlying-step": "step {outlying_step} takes {step_ms} instead of {usual_ms} ms"
    "[, {more_ms} ms more {spent}[, mostly in {call}][ on {who}]][; {left_out} are without it]",
    "nested-too-deeply": "{num_ranges} ranges are nested too deeply to be shown",
    "no-gpu-work": "no GPU work is in the traces of {who}, so it isn't known where their time goes: another "
    "profiler (Nsight, DCGM) may be in use, or the program uses no GPU",
    "traced-short": "traced steps of {who} take {traced_ms} ms, timed ones {timed_ms} ms on average: the "
    "traces don't show where the rest goes; run again with `--set profile.steps=16`",
}
OF_TRACED_STEP = "its traced step"
"""The whole of a share where traced steps are far from timed ones."""
SHORTENED: Mapping[str, str] = {
    "its time": "the capture",
    **{of: of.replace("its", "a") for of in (*OF_STEP, OF_TRACED_STEP)},
}
"""What would be shorter without a cause, by the whole of its share."""
NOTICED: Mapping[str, str] = {
    **{case: f"[{{file}}: ]{sentence}" for case, sentence in _OF_A_FILE.items()},
    **_OF_ALL,
}
