"""The table of findings: for each kind its code, sentence, meaning, how it is decided, and what to do."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from gpurun.launcher.findings import check_cases, run_cases, trace_cases
from gpurun.launcher.units import plural

Level = Literal["answer", "danger", "cause", "remedy", "detail"]


@dataclass(frozen=True)
class Kind:
    """One kind of finding.

    The sentence has slots for figures and names. A group in brackets is left out where a figure in it isn't
    known.
    """

    level: Level
    sentence: str
    means: str
    """What it says about a run."""
    decided: str
    """From which figures, by which rule."""
    todo: str
    """What to do about it."""
    title: str = ""
    """The word before an answer."""
    cases: Mapping[str, str] = field(default_factory=dict)
    """The sentences that replace its slot `{case}`, by the figure `case`; with slots of their own."""

    def has_case(self, figures: Mapping[str, Any]) -> bool:
        """Whether the figures name one of its cases, or it has none."""
        return figures.get("case") in (self.cases or (None,))

    def sentence_of(self, figures: Mapping[str, Any]) -> str:
        """The sentence with its slots, of the case that the figures name."""
        case = figures.get("case")
        return self.sentence if case is None else self.sentence.replace("{case}", self.cases[case])


_WITHIN = "[ within {within}]"
_PAIRS = "[; {wins} of {of} pairs]"
_LOAD = "[, at this load ({queue_percent} of a step waits for cores)][, {num_shared:rank} on one GPU]"
_RANGE = f"[ ({{ci}}{_PAIRS})][ ({{ratio_ci}}{_PAIRS})]"
_CHANGE = "[ ({change_percent}[, {ci}])]"
_BETWEEN = "[ (the {which}'s time {change_percent}[, {ci}])]"
_NONE = "no {choice} is clearly fastest: {leader} and {other}"
_SURE = (
    "The interval over paired launches (or over paired rounds, where variants share launches) excludes 0; "
    "each rival is tested at 5 %, since the fastest must be faster than every one of them."
)
_LONGER = "Give the run more time (`budget`), or more launches (`steps: {launches: …}`)."
_OTHER_FIGURE = "Choose by another figure, such as memory."
_SIX = "An interval takes at least six paired launches or rounds; more, where several are compared."
_POWER = "The number of launches that has an 80 % chance to decide a difference of this size."
_QUEUE = "Run-queue time of the ranks, less the waiting for threads of the same run."
_NVML = "NVML reported a reason for throttling during timed steps."
_COOL = "Let the GPUs cool down, or lower their power limit."
_GRADIENT = "The gradient of one batch is compared with that of one device in the same precision."
_NUM_LAUNCHES = "The number of launches."
_TRACED = "From traced steps, of a run the quietest half; a loss of less than 5 % of the step isn't named."
_AVERAGE = "The geometric mean over launches of a robust mean over rounds."

ANSWERS: Mapping[str, Kind] = {
    "fastest": Kind(
        "answer",
        f"{{leader}}, {{by}} {{how}} the baseline {{other}}{_RANGE}{_WITHIN}{_LOAD}",
        "One variant is faster than all others, and that is sure.",
        _SURE,
        "Use it; `gpurun report RUN --details` prints the code for an uneven split.",
        "Fastest",
    ),
    "baseline-fastest": Kind(
        "answer",
        f"the baseline {{leader}}; {{other}} {{how}}{_RANGE}{_WITHIN}{_LOAD}",
        "The baseline is faster than all others, and that is sure; the closest is named.",
        _SURE,
        "Keep the baseline.",
        "Fastest",
    ),
    "not-distinguished": Kind(
        "answer",
        f"{_NONE} can't be distinguished{_BETWEEN}[, nor can {{num_more:other}}]{_WITHIN}{_LOAD}",
        "The fastest on average isn't surely faster than the next.",
        "The interval of their difference includes 0.",
        _LONGER,
        "Answer",
    ),
    "differ-too-little": Kind(
        "answer",
        f"{_NONE} differ by too little to be ranked{_BETWEEN}[, as {{num_more:other}}]{_WITHIN}{_LOAD}",
        "The difference is sure, and so small that it counts for nothing.",
        "The interval excludes 0, and the difference may be below 1 %.",
        _OTHER_FIGURE,
        "Answer",
    ),
    "equally-fast": Kind(
        "answer",
        f"{_NONE} are equally fast{_BETWEEN}[, as {{num_more:other}}]{_WITHIN}{_LOAD}",
        "The fastest variants differ by less than 1 %, and that is sure.",
        "The whole interval of their difference lies within ±1 %.",
        _OTHER_FIGURE,
        "Answer",
    ),
    "fastest-on-average": Kind(
        "answer",
        "undecided: on average, {leader} leads {other}[ by {percent}[ per {per}]]"
        "[ and {num_more:other} by more]"
        f"{_LOAD}",
        "There are too few launches or rounds for an interval.",
        _SIX,
        _LONGER,
        "Answer",
    ),
    "only-variant": Kind(
        "answer",
        "{leader}[: {step_ms}[ ± {half_ms}] ms per step[ ({range_ms})]]",
        "Only one variant has times, so there is nothing to compare.",
        _AVERAGE,
        "Name several values in the job: `compare: {split: [even, [3, 1]]}`; of a program: "
        "`gpurun run --compare workers=0,4 train.py`.",
        "Step",
    ),
    "not-measured": Kind(
        "answer",
        "{case}",
        "No variant has times yet, or all have ended without.",
        "The status of each variant.",
        "Read the reason next to each variant, and its log: `gpurun logs RUN`; then `gpurun --resume RUN`. "
        "Of two runs, compare those of the same work.",
        "Answer",
        run_cases.NOT_MEASURED,
    ),
    "other-work": Kind(
        "answer",
        "{num_workloads} workloads, each measured by itself: they do different work, so none is fastest",
        "Variants train different models, so their times aren't compared.",
        "Variants differ in `workload` or in what changes the model.",
        "Compare settings of one workload.",
        "Answer",
    ),
    "probe": Kind(
        "answer",
        "{found}",
        "The result of a micro-benchmark, which trains no model.",
        "Medians over rounds.",
        "Read the curve below it.",
        "Answer",
    ),
    "without-steps": Kind(
        "answer",
        "{leader} ran[ for {run_s}]; no steps were timed[: {reason}]",
        "Programs ended well, and no step was seen.",
        "No optimizer stepped at least twice, and no step was marked.",
        "Mark each step: `with gpurun.step():`.",
        "Answer",
    ),
    "not-ranked": Kind(
        "answer",
        "these variants can't be ranked: {case}[; {num_more} more like that]",
        "The clock of a GPU was throttled; by how much longer steps took isn't known.",
        _NVML,
        _COOL,
        "Answer",
        {"throttled-of": run_cases.LOADED["throttled-of"]},
    ),
    "traced": Kind(
        "answer",
        "{num_ranks:rank} on {devices}[, {num_steps:step}][, {num_few:step}, which may be unlike others]"
        "[, {num_unmarked:optimizer step}, which may be unlike others]"
        "[; compute takes {percent} of the time[ of {whose}]"
        "[, no other cause more than {most_percent}[ of {of_each}]]]"
        "[; {num_cut:file} cut off, so no cause is named]"
        "[; {num_lost:damaged event} left out, so no cause is named][; causes by their shares, as {basis}]"
        "[; longer than the others and left out of causes: {outlying_ms}]"
        "[; {num_captures:other capture} left out][; {num_left_out:other trace} left out]"
        "[; that {num_assumed:file} are of one job is assumed][; {slowed}]",
        "What the traces hold.",
        "A loss of less than 5 % of the time isn't named. Causes are ordered by what a replay of the steps "
        "without them saves; by their shares where ranks are missing or steps can't be replayed. A step that "
        "takes 25 % longer than the median, for a reason that no other such step has, is left out.",
        "`gpurun trace --show operators` shows more.",
        "Traces",
    ),
    "changed": Kind(
        "answer",
        "in B {where} takes [{change}][about as long, within {within_percent}]"
        "[ ({ci})][ ({ratio_ci})][ ({b_ms} instead of {a_ms} ms)][ ({both_ms} ms)]"
        "[, and {num_more:other} changed][; {doubt}]",
        "Something takes longer, or less time, in the second of two runs or captures.",
        "Of runs, the interval over their launches excludes 0; of captures, the mean of their traced steps.",
        "`gpurun gate` shows whether the code is the reason: it launches both versions in turns.",
        "Answer",
    ),
    "unchanged": Kind(
        "answer",
        "nothing has surely changed from A to B[; the largest difference is in {where}: {change_percent}"
        "[ ({ci})]]",
        "No variant of two runs differs by more than its launches do.",
        "The interval of every variant's difference over launches includes 0, or there is none.",
        _LONGER,
        "Answer",
    ),
    "checked": Kind(
        "answer",
        "[{num_failed:check} failed, ]{num_ok:check} ok[, {num_skipped} skipped]",
        "How the checks of a self-test ended.",
        "Each check by itself; `selftest.json` has what each found.",
        "Mend what failed, then run it again.",
        "Answer",
    ),
    "gate": Kind(
        "answer",
        "[failed: {who} {more} {before}[ ({ci})][ ({ratio_ci})], more than {threshold_percent}"
        "[; {num_more:other} as well]]"
        "[passed: {who} {no_more} than {before} by more than {threshold_percent}[; closest is {where}]"
        f"{_CHANGE}]"
        "[undecided whether {who}[ (and {num_more:other})] {is_more} than {before} by more than "
        f"{{threshold_percent}}[: {{why}}]{_CHANGE}]",
        "Whether the code is slower than before by more than the threshold.",
        "Two one-sided bounds over paired launches, each wrong with at most 5 % over all looks.",
        "Exit code 5: find out what made it slower. Exit code 6: give it a larger `--budget`.",
        "Gate",
    ),
}

DANGERS: Mapping[str, Kind] = {
    "gradient-differs": Kind(
        "danger",
        "{of}gradients are off[ by up to {error}]; another model is trained",
        "The variant trains another model than one device would; its speed is no gain.",
        _GRADIENT,
        "Weigh the ranks' losses by their samples; see docs/your-model.md.",
    ),
    "variant-failed": Kind(
        "danger",
        "{where} {ended}[: {reason}]",
        "The variant has no times that count.",
        "A rank failed, ran out of memory or was stopped.",
        "Read its reason in the table and its log, mend it, then `gpurun --resume RUN`.",
    ),
    "check-failed": Kind(
        "danger",
        "[on {where} ]{check}: {case}",
        "A check of a self-test failed, so figures of this machine may be wrong.",
        "By the rule of that check; see docs/selftest.md.",
        "Follow the advice next to it.",
        cases={name: case.sentence for name, case in check_cases.FAILED.items()},
    ),
    "baseline-lost": Kind(
        "danger",
        "the baseline {where} has the status {status}, so nothing is compared with it; choose another one",
        "The variant that all others are compared with has no times.",
        "The status of the baseline.",
        "Choose another baseline (`baseline: {strategy: ddp}`), or mend what made it fail.",
    ),
    "never-communicates": Kind(
        "danger",
        "{of}ranks don't communicate in the traced steps; wrap the model in DistributedDataParallel",
        "Each rank trains a model of its own.",
        "No trace of any rank has a collective.",
        "Wrap the model in `DistributedDataParallel`.",
    ),
    "memory-nearly-full": Kind(
        "danger",
        "{of}the memory of {device} is nearly full: timed steps waited {num_retries:time} while torch "
        "released cached memory; try a smaller batch",
        "Timed steps waited while torch released cached memory.",
        "torch counted retries of allocations during timed steps.",
        "Use a smaller batch, or checkpointing (`checkpointing: full`).",
    ),
}

_OF_STEP = (
    "{percent}[ to {most_percent}] of {of} ({lost_ms}[ of {least_whole_ms}][ to {most_ms}][ of {whole_ms}] ms"
    "[; {more_ms} ms more than in {than}][; a traced step takes {traced_ms} ms]"
    "[; timed steps take {timed_ms} ms]"
    "[; without {without}, {shortened} would be {saved_ms} ms shorter])"
)
_SPENDS = f"[in {{where}} ]{{who}} spends {_OF_STEP}"
_IN_FUNCTION = (
    "[, for most of it in {function}][; {last} came last to {last_arrivals} of {num_collectives:collective}]"
    "[; {waiting} {waits_ms} ms]"
)
_AWAITS = f"[in {{where}} ]{{who}} waits {_OF_STEP}"
_CAUSES: Mapping[str, tuple[str, str, str, str]] = {
    "input-stall": (
        f"{_SPENDS} waiting for data{_IN_FUNCTION}",
        "The device waits for the input pipeline.",
        "Time in which nothing computes while the loop fetches or preprocesses the next batch.",
        "More loader processes (`workers`, `num_workers`), or less work per sample; see `gpurun improve`.",
    ),
    "exposed-copies": (
        f"{_SPENDS} on copies[ of {{memory}}] that nothing overlaps",
        "Copies take time that nothing hides.",
        "Copies in the trace that no kernel overlaps; their names say which memory is pinned.",
        "Pin the memory and copy with `non_blocking=True`; else copy less, or on a stream of its own.",
    ),
    "host-bound": (
        f"{_SPENDS} waiting for the CPU to launch work[, {{latency_ms}} ms of it from launch to start]"
        "[, mostly while that computes itself, as in {operator}][, mostly in {inside}]"
        "[, mostly while launching calls run, as "
        f"in {{call}}]{_IN_FUNCTION}",
        "The device waits for Python to launch work.",
        "Gaps before the end of the call that launches the next kernel, and up to 20 µs from there.",
        "Larger batches, `torch.compile`, or CUDA graphs.",
    ),
    "one-off-work": (
        f"{_SPENDS} in what is done once[ ({{call}}: {{call_ms}} ms)][, in {{alone}} that was traced]",
        "The device waits while modules are loaded, memory is allocated or code is compiled.",
        "Gaps in calls that a program makes once, in launches of 1 ms or more, and in torch.compile.",
        "Trace later steps: `schedule(wait=…, warmup=…)`.",
    ),
    "python-bound": (
        f"{_SPENDS} in Python between operators",
        "Python works while no operator runs; the CPU is the device.",
        "Time between operators, as far as CPU time shows that the thread worked.",
        "Larger batches, fewer operators, or `torch.compile`.",
    ),
    "not-recorded": (
        f"{_SPENDS} {{case}}[ but that it is in {{inside}}]{_IN_FUNCTION}",
        "Time is lost for a reason that these traces don't have.",
        "What the traces would have to record: Python's stacks, launches, the device, other ranks.",
        "Record that: `with_stack=True`, `ProfilerActivity.CPU`, every rank.",
    ),
    "gaps": (
        f"{_SPENDS} {{case}}[ in {{call}}[ (a single call of {{call_ms}} ms)]]{_IN_FUNCTION}",
        "The device has nothing to do, or works for other steps only, for no reason that the trace names.",
        "Gaps after the launch of what ends them, after the last launch, or in a call; work of other steps.",
        "Look at the timeline: `gpurun view`.",
    ),
    "exposed-transfer": (
        f"{_SPENDS} on transfers that nothing overlaps[, mostly in {{groups}}]",
        "Gradients or parameters are transferred while nothing computes.",
        "Collectives in the trace that no kernel overlaps, less the waiting for other ranks.",
        "Larger or smaller buckets, a compressed gradient (`comm_hook`), fewer synchronised micro-batches.",
    ),
    "waits-for-larger-batch": (
        f"{_AWAITS} for {{other}}'s larger batch[; {{other}} is also slower per sample ({{slow_ms}} ms)]",
        "A rank waits in a collective for one that has more samples.",
        "The wait as far as the other's samples explain it, at the time that a sample takes here.",
        "`split: balanced`, or a split by what each device measures.",
    ),
    "waits-for-slower-rank": (
        f"{_AWAITS}[ in {{groups}}] for {{other}}[, which takes {{other_work_ms}} ms"
        "[ for {num_samples:sample}] ({who}: {work_ms} ms[ for {own_samples:sample}])]"
        "[; {last} came last to {last_arrivals} of {num_collectives:collective}]",
        "A rank waits in a collective for one that takes longer with the same work.",
        "The wait as far as the other's samples don't explain it.",
        "Find out what slows that rank down, or give it less work.",
    ),
    "pipeline-bubble": (
        f"{_AWAITS} for {{other}} (pipeline bubble)",
        "A stage of the pipeline waits for another.",
        "Waiting in sends and receives between stages.",
        "More micro-batches per step, or an interleaved schedule.",
    ),
    "blocked": (
        f"{_SPENDS} blocked: asleep, or waiting for a lock, a file or a network",
        "Ranks sleep, or wait for a lock, a file or the network.",
        "Time in which neither the device nor the threads of the rank work.",
        "`gpurun stacks RUN` shows what they wait for.",
    ),
    "computes-longer": (
        "[in {where} ]{who} computes for {percent} of {of} ({lost_ms} of {whole_ms} ms"
        "[; timed steps take {timed_ms} ms]), {more_ms} ms more than in {than}[; what grew most: {grown_ms}]"
        "[, at {sm_clock_mhz} instead of {other_sm_clock_mhz}]"
        "[, while torch released its cache {num_retries:time}]"
        "[, for {num_samples:sample} instead of {other_samples}]",
        "Compute itself takes longer than in the fastest variant.",
        "Compute of the slowest ranks' traced steps, and which operators grew.",
        "`gpurun diff` compares the operators of both.",
    ),
}


_LATE_RANK = "look at what {who} does before it comes (`gpurun view DIR` draws the timeline)"
_SLOW_RANK = "find out what slows {who} down (`gpurun stacks` during the next run)"
_LESS_WORK = ", or give it less work"
_TAKEN = ": {num_devices:device} × {threads:thread} need {num_cores:core} (free: {num_free})"
SPENT: Mapping[str, str] = {
    "input": "waiting for data",
    "copies": "on copies",
    "pinned_copies": "on copies",
    "host": "waiting for the CPU",
    "one_off": "in what is done once",
    "python": "in Python",
    "outside": "outside of operators",
    "unseen": "outside of operators",
    "communication": "in communication",
    "unknown": "in gaps",
    "gaps": "in gaps",
    "other_steps": "in work of other steps",
    "unread": "outside of operators",
    "unrecorded": "waiting for the CPU",
    "transfer": "on transfers",
    "model_transfer": "on transfers",
    "blocked": "blocked",
    "compute": "on compute",
    "split": "waiting for a larger batch",
    "straggler": "waiting for a slower rank",
    "bubble": "waiting for other stages",
}
"""How the time of a part of a step is spent, where only its share is named."""
_STACKS = {
    "": "record the profiler's with_stack=True",
    "-in-job": "`profile: {stacks: true}` shows what runs there",
}
_ON_PARTS: Mapping[str, Mapping[str, str]] = {
    "input": {
        "": "let more processes prepare batches (a DataLoader's num_workers), or do less work per sample",
        "-in-job": "raise `workers`, as `gpurun improve` tries it, or do less work per sample",
    },
    "copies": {"": "pin the memory and copy with non_blocking=True"},
    "pinned_copies": {"": "copy less, or on another stream while the device computes"},
    "host": {
        "": "try larger batches, torch.compile or CUDA graphs",
        "-computing": "let the device compute that, or another thread",
        "-copying": "pin the memory and copy with non_blocking=True",
        "-inside": "find out what {inside} does on {who}[ ({stacks} records Python's functions)]",
        "-function": "look into {function}: nothing is launched meanwhile",
        "-late": _LATE_RANK,
        "-with-compile": "try larger batches or CUDA graphs",
        "-with-graphs": "try larger batches or torch.compile",
        "-with-both": "try larger batches",
    },
    "one_off": {
        "": "trace later steps, after a warm-up: torch.profiler.schedule(wait=5, warmup=3, active=3)",
        "-in-job": "trace later steps: raise `steps.warmup`",
    },
    "python": {
        "": "try larger batches, fewer operators, or torch.compile",
        "-with-compile": "try larger batches, or fewer operators",
        "-with-both": "try larger batches, or fewer operators",
    },
    "outside": _STACKS,
    "unseen": {"": "record the device's work as well"},
    "communication": {"": "record the traces of all ranks"},
    "unknown": {
        "": "record the CPU as well (ProfilerActivity.CPU)",
        "-recorded": "take the file as the profiler wrote it, before events were sampled or filtered",
        "-lost": "take the file as the profiler wrote it, or record with a newer version of torch",
    },
    "gaps": {
        "": "look for synchronisation and dependencies in the timeline",
        "-allocating": "use less memory, avoid empty_cache(), or set "
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
        "-loading": "find out which code is loaded anew each time, such as kernels compiled for new shapes",
        "-once": "trace more steps, which show whether this call is made in each",
    },
    "other_steps": {"": "look at the other streams in the timeline"},
    "unrecorded": _STACKS,
    "unread": _STACKS,
    "transfer": {
        "": "try larger batches or gradient accumulation",
        "-in-job": "raise `global_batch` or `accumulate`",
        "-buckets": "raise `global_batch` or `accumulate`, or change `bucket_mb`",
        "-sharded": "try larger batches; if the memory suffices, `reshard: false` or `ddp`",
        "-shard-size": "try larger batches, or another `shard_size`",
        "-zero": "try larger batches, gradient accumulation or, if the memory suffices, `ddp`",
    },
    "model_transfer": {"": "overlap it with compute, or place its ranks where links are fastest"},
    "blocked": {"": "`gpurun stacks` during the next run shows what its ranks wait for"},
    "compute": {"": "compare the operators of both traces: `gpurun diff`"},
    "split": {
        "": "try split: even or balanced",
        "-balanced": "find out why the ranks' times differ from those that were measured to find this split",
    },
    "straggler": {
        "": _LATE_RANK + _LESS_WORK,
        "-alike": _LATE_RANK,
        "-several": "find out what {who} have in common, such as their node, or give them less work",
        "-changing": "give ranks equally much to do in each step, as by bucketing samples by length "
        "(`gpurun view DIR` shows what differs)",
        "-in-job": f"{_SLOW_RANK}{_LESS_WORK} (split: balanced)",
        "-balanced": _SLOW_RANK,
    },
    "bubble": {"": "try more micro-batches per step, or an interleaved schedule"},
}
"""By the part of a step, what is in use (`-with-…`), and to whom it is given: `-in-job` may set the keys of a
job, `-balanced` may choose no other split, `-alike` is about a rank that has no more to do than others,
`-several` about ranks that have more, `-changing` about another one in each step; of transfers also by
strategy."""
ADVICE: Mapping[str, str] = {
    **{
        part.replace("_", "-") + form: f"[{{where}} spends {{percent}} of its step {SPENT[part]}: ]"
        f"[{{about}}: ]{words}"
        for part, forms in _ON_PARTS.items()
        for form, words in forms.items()
    },
    "settings": "set {settings} in the job",
    "fewer-threads": "set `threads: {fewer}`" + _TAKEN,
    "fewer-devices": "set `devices: cpu:{fewer}`" + _TAKEN,
    "stop-others": "stop other programs on this machine, then run again",
    "fewer-or-stop": "use fewer devices, or stop other programs on this machine, then run again",
    "gradient": "mend the gradients first: weigh losses by samples (docs/your-model.md)",
    "gradient-even": "mend the gradients first: with an even split they are off, too "
    "(`gpurun report RUN --details` has the likely reason)",
    "far": "run again with `--set profile.steps=16`: the traced steps are unlike the timed ones",
    "untraced": "run again with `--set profile.steps=4`: traces show where the time of a step goes",
    "why-untraced": "`gpurun report RUN --details` says why there is no trace",
    "few-steps": "run more steps of the program: none of those that it made is timed",
    "unmarked": "mark each step of the program: `with gpurun.step():`",
    "own-processes": "train in the process that gpurun starts for each device, without mp.spawn: RANK, "
    "LOCAL_RANK and WORLD_SIZE are set",
    "uneven": "`gpurun report RUN --details` prints the code that trains with this split",
    "other-figure": "choose by another figure, such as memory",
    "unlike": "for two versions of the code, run one job file with each; for two settings, list both under "
    "`compare` of one job; `--allow params` compares variants that differ in `params` alone",
    "parts": "`gpurun diff A B --show operators` shows the modules and operators that changed",
    "past-runs": "two past runs can't show whether the code or the machine changed; `gpurun gate JOB.yaml "
    "--against REF` launches both versions in turns",
    "ended": "mend what the reason in the table names (`gpurun logs RUN` has more), then "
    "`gpurun --resume RUN`",
    "oom-program": "take a smaller batch, or store fewer activations (torch.utils.checkpoint)",
    "oom": "take a smaller batch, accumulate gradients (`accumulate`), or store fewer activations "
    "(`checkpointing: full`)",
    "throttled": "let the GPUs cool down, or lower their power limit, then run again",
    "versions": "`gpurun diff RUN/variants/{a} RUN/variants/{b} --show operators` shows what grew",
    "no-versions": "set `profile: {steps: 4}` in the job: traces of both versions show what grew",
    "environments": "give each version an environment of its own (`--python-a`, `--python-b`): a package is "
    "installed from the working copy (editable)",
    "committed": "if the version before lacks files that aren't committed, name them by `--with`",
    "same-code": "both versions loaded the same code, file by file: see what `--against` names",
    "cpu-time": "compare the CPU time, which has no waiting for cores in it: `--metric cpu`",
    "scatter": "use a machine that does nothing else, or a job whose launches are shorter",
    "threshold": "choose another threshold (`--fail-slower`)",
    "in-progress": "this run is still in progress: process {pid} on {place} measures what is missing",
    "may-be-in-progress": "unless it was killed, process {pid} on {place} still measures what is missing of "
    "this run",
    "resume": "this run is not complete: `{command} --resume RUN` measures what is missing",
    "resume-nodes": "this run is not complete: to measure what is missing, [use `{requeue}` while "
    "{scheduler} knows the job, or ]start all nodes as before, node 0 with `--resume RUN`",
    "gate-again": "this gate is not complete: start it again",
    "check": "{todo}",
}
"""What to do, by its case."""
_CASES: Mapping[str, run_cases.Cases] = {
    "not-recorded": trace_cases.NOT_RECORDED,
    "gaps": trace_cases.GAPS,
    "without-load": run_cases.WITHOUT_LOAD,
    "affected-by-load": run_cases.AFFECTED,
    "plan-note": run_cases.PLAN,
    "within-launches": run_cases.WITHIN,
    "time-spent": run_cases.TIME_SPENT,
    "noticed": {**run_cases.NOTICED, **trace_cases.NOTICED},
}
CAUSES: Mapping[str, Kind] = {
    **{
        code: Kind("cause", sentence, means, f"{decided} {_TRACED}", todo, cases=_CASES.get(code) or {})
        for code, (sentence, means, decided, todo) in _CAUSES.items()
    },
    "part-changed": Kind(
        "cause",
        "{part} takes {b_ms} instead of {a_ms} ms of it[, {partly}offset by {offset}]",
        "The part of a traced step that changed most from one capture to another.",
        "The mean of the usual traced steps and all ranks of each capture.",
        "`gpurun diff --show operators` shows the modules and operators that changed.",
    ),
    "value-costs": Kind(
        "cause",
        "{key}={value} instead of {against} takes {change}[ ({ci})][ ({ratio_ci})]",
        "The value of the job's own setting that costs most, with the other values of the best combination.",
        "By the comparison at the end of a search where it has both, else by the trials.",
        "Use the best combination.",
    ),
    "too-few": Kind(
        "cause",
        "{why}",
        "There is no interval yet, so chance isn't ruled out.",
        _SIX,
        _LONGER,
    ),
    "scatter-hides-it": Kind(
        "cause",
        "{case}",
        "The difference isn't larger than chance explains.",
        "The interval over launches or rounds includes 0, or what a gate allows.",
        _LONGER,
        cases=run_cases.SCATTER,
    ),
    "near-threshold": Kind(
        "cause",
        "the difference is too close to {threshold_percent}: deciding it would take {long}",
        "A gate's difference is about as large as what it allows.",
        _POWER,
        "Choose another threshold.",
    ),
}

REMEDIES: Mapping[str, Kind] = {
    "fits-in-memory": Kind(
        "remedy",
        "{case}",
        "Which variants fit in the memory that the job states.",
        "Their peaks, against `memory`; on CPU devices a peak is that of live tensors.",
        "Take it where memory is short; else the fastest.",
        cases=run_cases.FITS,
    ),
    "act-on-cause": Kind(
        "remedy",
        "{case}",
        "The next step: what would shorten the fastest variant's step most, or what the answer lacks.",
        "By failures, wrong gradients and other load; then the largest loss in traced steps, of 5 % or more.",
        "As it says: change the job or the program so, and run again.",
        cases=ADVICE,
    ),
    "measure-longer": Kind(
        "remedy",
        "[{num_minutes:minute} may separate {what} from {leader} (`budget: {num_minutes}m` in a new "
        "run)]"
        "[a `--budget` of about {decides_minutes:minute} may decide it]",
        "The budget ended before every difference was decided.",
        _POWER,
        "Start a new run with that budget.",
    ),
    "cannot-be-decided": Kind(
        "remedy",
        "separating {what} from {leader} would take {long}; choose by another figure",
        "The difference is too small for what launches differ by.",
        _POWER,
        "Treat the variants as equally fast.",
    ),
    "more-launches": Kind(
        "remedy",
        "[{num_pairs} pairs of launches may decide it: set {setting}]"
        "[more {units} may decide it: set {setting}[; first mend or leave out {num_failed:variant} that "
        "failed]]"
        "[{num_needed:launch} of each take about {num_minutes:minute} (`budget: {num_minutes}m` in a new "
        "run); from one of each it isn't known how launches vary]",
        "Identical launches vary; from few of them nothing follows.",
        "An interval over launches takes at least six pairs.",
        "Set `steps: {launches: 6}`, or a `budget`.",
    ),
    "nothing-left": Kind(
        "remedy",
        "no loss in {where} is larger than {most} % of its step; `gpurun tune` tries other settings",
        "Traces show nothing else that takes much time.",
        "The largest loss in traced steps of the fastest variant.",
        "Try other settings: `gpurun tune job.yaml`.",
    ),
}

_DETAILS: Mapping[str, tuple[str, str, str, str]] = {
    "slower": (
        f"{{other}} {{how}}{_RANGE}",
        "How far another variant is behind the fastest.",
        "The interval of their difference.",
        "Nothing.",
    ),
    "without-load": (
        "{case}",
        "Whether the verdict would be the same on a quiet machine.",
        "Times less the waiting for cores that other load had, over every share of it.",
        "Run again on a quiet machine.",
    ),
    "affected-by-load": (
        "{case}",
        "Other programs used the cores of the ranks, or the clock of a GPU was throttled.",
        f"{_QUEUE} {_NVML}",
        "Use fewer threads or devices, or stop other programs.",
    ),
    "plan-note": (
        "{case}",
        "What gpurun decided when it planned the run, or what the run's figures show beside the verdicts.",
        "The plan of the run; effects and the smallest difference seen are from its measurements.",
        "Nothing, or set the key that it names.",
    ),
    "within-launches": (
        "{case}",
        "Verdicts or intervals don't cover how other launches would differ.",
        _NUM_LAUNCHES,
        _LONGER,
    ),
    "no-verdict": (
        "{who} against the baseline: no verdict, since {why}",
        "A row of the table is inconclusive.",
        "There are too few rounds or launches, or one round contradicts all others.",
        _LONGER,
    ),
    "time-spent": (
        "{case}",
        "The time that launches took, and for what; or where a program's time outside of its steps went.",
        "The events of the run, and the marks of first and last steps.",
        "Nothing; or shorten what comes before and after the steps.",
    ),
    "memory-trade-off": (
        f"by time and memory (estimates) choose among {{choices}}{run_cases.OF_REPLICAS}",
        "Slower variants that take less memory.",
        "Peaks and step times; every other is slower than one of these without clearly saving memory.",
        "Choose among them by the memory that there is.",
    ),
    "restarted": (
        "{what}: {reasons}",
        "Launches failed and were started again, or made no progress for a while.",
        "What the run has recorded.",
        "Read where each rank waited: `gpurun logs RUN`.",
    ),
    "waited-for-quiet": (
        "launches waited {waited_s} in all for a quiet machine; {in_vain} of {num_launches:launch} began "
        "under other load",
        "`wait_for_quiet` delayed launches.",
        "The waits that the run has recorded.",
        "Nothing.",
    ),
    "unsteady": (
        "{of}unsteady: {reason}",
        "Steps didn't settle before they were timed.",
        "Windows of the warm-up still differed at its end.",
        "Give it a longer warm-up: `steps: {warmup: 200}`.",
    ),
    "gradient-not-exact": (
        "{of}{found}",
        "The gradient differs by more than rounding explains, with or without a split.",
        _GRADIENT,
        "Look for what depends on the size of a batch: BatchNorm, losses over a batch.",
    ),
    "noticed": (
        "{of}{case}",
        "Something odd about a model, a program, its steps or a trace.",
        "In the ranks, or when their records were read.",
        "Each sentence names the key, the option or the file that matters, where one does.",
    ),
}
KINDS: Mapping[str, Kind] = {
    **ANSWERS,
    **DANGERS,
    **CAUSES,
    **REMEDIES,
    **{code: Kind("detail", *parts, cases=_CASES.get(code) or {}) for code, parts in _DETAILS.items()},
}
"""All kinds by their code. A test limits their number: a new finding is a case of one, or replaces one."""


def explained(codes: Iterable[str] = KINDS) -> list[dict[str, Any]]:
    """The kinds with these codes, as `gpurun explain --json` prints them."""
    return [{"code": code, **asdict(KINDS[code])} for code in codes]


LABELS = {"means": "What it means", "decided": "How it is decided", "todo": "What to do"}


def cases_of(sentences: Mapping[str, str]) -> list[str]:
    """A list of the sentences of cases, after an empty line; nothing where there are none."""
    cases = {name: outline(sentence) for name, sentence in sentences.items()}
    told = [f"- {name}: {sentence}" for name, sentence in cases.items() if sentence != "…"]
    return ["", *told] if told else []


def outline(sentence: str) -> str:
    """The longest form of a sentence, with `…` in its slots: `… of … ranks are present`."""
    whole = re.sub(r"[][]", "", re.sub(r"^(\[\{(file|where|about)\}[^]]*\])+", "", sentence))
    whole = re.sub(r"\{\w+:(\w[\w ]*)\}", lambda slot: f"… {plural(2, slot[1])[2:]}", whole)
    return re.sub(r"\{\w+\}", "…", whole)


def findings_page() -> str:
    """docs/findings.md: a section for each level, an entry for each kind."""
    lines = [
        "# Findings",
        "",
        "Made by `make docs` from the table that reports use. `gpurun explain CODE` prints an entry.",
        "",
        "A report begins with one *answer*, a reason, a next step and *dangers*. `--details` shows all.",
        "In `--json`, every finding has its `code`, `level`, `variant`, `ranks`, `figures` and `text`.",
    ]
    for level in dict.fromkeys(kind.level for kind in KINDS.values()):
        lines += ["", f"## {level.capitalize()}"]
        for entry in (each for each in explained() if each["level"] == level):
            parts = [f"{label}: {entry[name]}" for name, label in LABELS.items()]
            lines += ["", f"### `{entry['code']}`", "", *"  \n".join(parts).splitlines()]
            lines += cases_of(entry["cases"])
    return "\n".join(lines) + "\n"
