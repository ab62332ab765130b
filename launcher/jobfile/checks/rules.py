"""Mistakes that lie between the keys of a job, in its kind, or between it and the devices that it gets."""

import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from gpurun.launcher.errors import Problem
from gpurun.launcher.jobfile.checks.code import find_program_mistakes, find_workload_mistakes, given_params
from gpurun.launcher.jobfile.kinds import (
    KIND_KEYS,
    PROGRAM_KEYS,
    JobKind,
    default_batch,
    is_workload,
)
from gpurun.launcher.jobfile.model import SIZES, Baseline, JobSpec, Steps, key_settings
from gpurun.launcher.jobfile.params import signature_of_builtin
from gpurun.launcher.jobfile.read import Draft
from gpurun.launcher.jobfile.section import ITEMS, NESTED, Section, Setting
from gpurun.launcher.jobfile.settings import SETTINGS
from gpurun.launcher.jobfile.values import (
    MODULE_NAME,
    SCRIPT_PATH,
    WORKLOAD_NAME,
    Devices,
    Nodes,
    node_bounds,
    nodes_named,
)
from gpurun.launcher.jobfile.yaml.tree import REMOVE_ONE
from gpurun.launcher.machine.accelerators import Accelerator, accelerator_of, precision_problem
from gpurun.launcher.splits import is_same_split, parts_of
from gpurun.launcher.strategies import strategy_named
from gpurun.launcher.units import plural
from gpurun.workloads.registry import BUILTINS


def _named_devices(devices: Devices, nodes: Nodes) -> tuple[str, ...] | None:
    """The devices of all nodes where the job names them; `None` if the machines decide."""
    num_nodes, most = node_bounds(nodes)
    if num_nodes < most:
        return None
    if isinstance(devices, tuple):
        return devices if nodes_named(devices) else devices * num_nodes
    kind, _, count = devices.partition(":")
    return (kind,) * int(count) * num_nodes if count else None


def _find_misplaced(draft: Draft) -> Iterator[Problem]:
    """Devices that name their node: all of them do, and every node has one."""
    devices, (num_nodes, most) = draft.spec.devices, node_bounds(draft.spec.nodes)
    if not (named := nodes_named(devices)):
        return
    if len(named) < len(devices):
        message = "some of `devices` name their node, as `cuda:1@0` does, and some do not"
    elif num_nodes < most:
        message = f"`devices` names its nodes, but the job has {draft.spec.nodes} of them"
    elif set(named) != set(range(num_nodes)):
        message = (
            f"`devices` has devices of node {_listed(named)}, but the job has {plural(num_nodes, 'node')}"
        )
    else:
        return
    hint = "one GPU of node 0 and two of node 1 are [cuda:0@0, cuda:0@1, cuda:1@1]"
    yield draft.spec.problem(("devices",), message, hint)


def _listed(numbers: Iterable[int]) -> str:
    found = sorted(set(numbers))
    return ", ".join(map(str, found[:8])) + (", …" if len(found) > 8 else "")


def find_misfits(draft: Draft, devices: Sequence[str]) -> list[Problem]:
    """The problems of settings that can't run on these devices, whatever they are combined with."""
    return [
        *_too_many(draft, len(devices)),
        *_foreign_precision(draft, accelerator_of(devices[0])),
        *_foreign_splits(draft, len(devices)),
        *_foreign_lists(draft, len(devices)),
    ]


def _too_many(draft: Draft, num_devices: int) -> Iterator[Problem]:
    counts = draft.values("device_count")
    if counts is None or None in counts or min(counts) <= num_devices:
        return
    message = f"the job needs {min(counts)} devices, but `devices` has only {num_devices}"
    hint = "add devices, or lower `device_count`"
    yield draft.spec.problem(draft.spec.place_of("device_count"), message, hint)


def _foreign_precision(draft: Draft, kind: Accelerator) -> Iterator[Problem]:
    """A precision that this kind of device lacks, if the job varies no other."""
    precisions = set(draft.values("precision") or ())
    message = precision_problem(precisions.pop(), kind) if len(precisions) == 1 else None
    if message is not None:
        hint = f"use fp32 on {kind.title} devices"
        yield draft.spec.problem(draft.spec.place_of("precision"), message, hint)


def _foreign_splits(draft: Draft, num_devices: int) -> Iterator[Problem]:
    """Splits for a number of devices that no variant has. Strategies without a split use none of them."""
    strategies, stated = draft.values("strategy"), draft.values("device_count")
    if strategies is None or stated is None or not any(strategy_named(name).has_split for name in strategies):
        return
    counts = [num_devices if count is None else count for count in stated]
    for path, split in draft.placed("split"):
        parts = parts_of(split)
        if parts is not None and parts not in counts:
            text = split if isinstance(split, str) else str(list(split))[:80]
            used = " or ".join(str(count) for count in dict.fromkeys(counts))
            message = f"the split {text} is for {plural(parts, 'device')}, but the job uses {used}"
            yield draft.spec.problem(path, message, "a split needs one number per device")


def _foreign_lists(draft: Draft, num_devices: int) -> Iterator[Problem]:
    """Parameters of built-in workloads with a value for each device, but for another number of devices."""
    counts = draft.values("device_count")
    if counts is None:
        return
    used = max(num_devices if count is None else count for count in counts)
    strategies = [strategy_named(name) for name in draft.values("strategy") or ()]
    used = max((strategy.most_devices(used, used) for strategy in strategies), default=used)
    per_device = {name for _, workload in draft.placed("workload") for name in _per_device_params(workload)}
    for place, given in given_params(draft):
        for name in sorted(per_device & given.keys()):
            values = given[name]
            if isinstance(values, list | tuple) and not used <= len(values) <= num_devices:
                message = (
                    f"`{name}` has {plural(len(values), 'value')}, but the job uses {plural(used, 'device')}"
                )
                hint = "give one value per device, in the job's order, or a single number for all"
                yield draft.spec.problem((*place, name), message, hint)


def _per_device_params(workload: str | None) -> Iterator[str]:
    if workload is None or workload not in BUILTINS:
        return
    signature = signature_of_builtin(workload)
    yield from (param.name for param in signature.params if param.is_per_device) if signature else ()


def find_conflicts(draft: Draft, job_dir: Path) -> list[Problem]:
    """Mistakes between values that are right by themselves; what the draft doesn't know is left alone."""
    knows_devices = draft.knows(("devices",)) and draft.knows(("nodes",))
    devices = _named_devices(draft.spec.devices, draft.spec.nodes) if knows_devices else None
    return [
        *find_kind_mistakes(draft),
        *_no_effect(draft),
        *_missing_batch(draft),
        *_max_of_shards(draft),
        *_wrong_sums(draft),
        *_foreign_baseline(draft),
        *(_find_misplaced(draft) if knows_devices else ()),
        *(find_misfits(draft, devices) if devices else ()),
        *find_workload_mistakes(draft, job_dir),
        *find_program_mistakes(draft, job_dir),
    ]


def _no_effect(draft: Draft) -> Iterator[Problem]:
    """A budget, or an end when all is decided, in a run of fixed size."""
    spec = draft.spec
    if not spec.has_fixed_size:
        return
    sizes = sorted(SIZES & spec.steps.stated)
    by = f"`steps.{sizes[0]}`" if sizes else "`until: fixed`" if spec.kind.is_ranked else "a micro-benchmark"
    wrong = {"until": spec.until == "decided" and (sizes or not spec.kind.is_ranked), "budget": True}
    for key in (key for key, is_wrong in wrong.items() if is_wrong and key in spec.stated):
        hint = f"only a run that ends when all is decided has a budget; {REMOVE_ONE}"
        yield spec.key_problem(
            (key,), f"`{key}` has no effect with {by}, which fixes the length of the run", hint
        )


def _missing_batch(draft: Draft) -> Iterator[Problem]:
    """No batch, neither in the job nor as a built-in's own."""
    is_stated = "global_batch" in draft.spec.stated or not draft.spec.kind.trains
    if is_stated or draft.values("global_batch") != (None,):
        return
    if not all(draft.knows((key,)) for key in KIND_KEYS):  # maybe a program, which needs none
        return
    # One that there is not says nothing of a batch: that is a mistake of its own.
    named = [name for name in draft.values("workload") or (None,) if name is None or is_workload(name)]
    if named and all(map(default_batch, named)):
        return
    hint = "add the number of samples per optimizer step over all devices: `global_batch: 64`"
    lacking = [name for name in named if name is not None and not default_batch(name)]
    have = "has no default batch size" if len(lacking) == 1 else "have no default batch size"
    why = f": {', '.join(lacking)} {have}" if len(named) > len(lacking) > 0 else ""
    yield draft.spec.problem(("global_batch",), f"missing key `global_batch`{why}", hint)


def _max_of_shards(draft: Draft) -> Iterator[Problem]:
    """The largest batch is looked for on one device at a time."""
    why = "devices are tried one at a time, and a single one would have to hold the whole training state"
    for path, name in draft.placed("strategy"):
        if strategy_named(name).shards_optimizer and "max" in (draft.values("global_batch") or ()):
            message = f"`global_batch: max` doesn't work with `{name}`: {why}"
            yield draft.spec.problem(path, message, "give a number, or leave out this strategy")


def _wrong_sums(draft: Draft) -> Iterator[Problem]:
    if "max" in (draft.values("global_batch") or ()):
        yield from _numbers_of_max(draft)
    batches = batches_of(draft)
    if not batches:
        return
    for path, split in draft.placed("split"):
        if isinstance(split, tuple) and sum(split) not in batches:
            wanted = " or ".join(str(batch) for batch in batches)
            message = f"the split {list(split)} adds up to {sum(split)}, not to the global batch of {wanted}"
            yield draft.spec.problem(path, message, _sum_hint(split, batches[0]))


def _numbers_of_max(draft: Draft) -> Iterator[Problem]:
    """Splits that name samples of a batch that is still to be found."""
    for path, split in draft.placed("split"):
        if isinstance(split, tuple):
            message = f"the split {list(split)} lists samples, but `global_batch: max` isn't known in advance"
            divisor = math.gcd(*split)
            ratio = ":".join(str(size // divisor) for size in split)
            hint = f'state `global_batch: {sum(split)}`, or give a ratio: `split: "{ratio}"`'
            yield draft.spec.problem(path, message, hint)


def batches_of(draft: Draft) -> tuple[int, ...]:
    """Every global batch that a variant may have; none where one of them isn't known, as with `max`."""
    stated, workloads = draft.values("global_batch"), draft.values("workload")
    if stated != (None,) or workloads is None:
        return stated if stated and None not in stated and "max" not in stated else ()
    own = tuple(default_batch(name) for name in workloads)
    return tuple(batch for batch in own if batch is not None) if None not in own else ()


def _sum_hint(split: tuple[int, ...], batch: int) -> str | None:
    last = batch - sum(split[:-1])
    return f"did you mean {[*split[:-1], last]}?" if last >= 1 else None


def _foreign_baseline(draft: Draft) -> Iterator[Problem]:
    """Values of `baseline` that no variant can have. The variants show what `params` and `env` may be."""
    for key in Baseline.keys:
        value, choices = getattr(draft.spec.baseline, key, None), draft.values(key)
        if value is None or SETTINGS[key].shape in (ITEMS, NESTED) or choices is None or None in choices:
            continue
        if value in choices or (key == "split" and _is_same_work(draft, value, choices)):
            continue
        listed = ", ".join(_text(choice) for choice in choices)
        message = f"no variant has `{key}: {_text(value)}`, so it can't be the baseline"
        yield draft.spec.problem(("baseline", key), message, f"the variants have {listed}")


def _is_same_work(
    draft: Draft, split: str | tuple[int, ...], choices: tuple[str | tuple[int, ...], ...]
) -> bool:
    """Whether a choice may come to the same samples; it may wherever the batch isn't known."""
    batches = batches_of(draft)
    return not batches or any(is_same_split(split, choice, batches) for choice in choices)


def _text(value: object) -> str:
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_text, value))}]"
    return str(value).lower() if isinstance(value, bool) else str(value)


def find_kind_mistakes(draft: Draft) -> Iterator[Problem]:
    """None or several of `workload`, `script` and `module`, and keys that belong to another kind of job."""
    spec = draft.spec
    yield from _empty(draft)
    stated = [key for key in KIND_KEYS if getattr(spec, key) is not None]
    if not stated:
        if all(draft.knows((key,)) and key not in spec.stated for key in KIND_KEYS):
            hint = "add `workload: gpt` (built in), `workload: train.py:build` (a function of yours) or "
            hint += "`script: train.py` (a program)"
            yield spec.problem(("workload",), "missing key `workload`", hint)
    elif len(stated) > 1:
        message = f"`{stated[1]}` and `{stated[0]}` are mutually exclusive: a job runs only one of them"
        yield spec.key_problem((stated[1],), message, REMOVE_ONE)
    if len({key in PROGRAM_KEYS for key in stated}) == 1:
        yield from _foreign(spec, spec.kind)
        if spec.kind.runs_program:
            yield from _max_of_program(spec)
            yield from _shared_gpu(draft)


def _empty(draft: Draft) -> Iterator[Problem]:
    """Keys without a value, which isn't the same as no key."""
    expected = {
        "workload": WORKLOAD_NAME,
        "script": SCRIPT_PATH,
        "module": MODULE_NAME,
        "global_batch": "a whole number",
    }
    for key, what in expected.items():
        if key in draft.spec.stated and getattr(draft.spec, key) is None and draft.knows((key,)):
            yield draft.spec.problem((key,), f"`{key}`: expected {what}, got null")


def _foreign(spec: JobSpec, kind: JobKind) -> Iterator[Problem]:
    """Keys that the job states and that its kind doesn't have."""
    for path, setting in _stated(spec):
        is_compared = path[0] in ("compare", "baseline")
        if kind not in setting.kinds or (is_compared and kind not in setting.varies_for):
            yield spec.key_problem(path, f"`{'.'.join(path)}` {kind.refusal}", setting.instead or None)


def _stated(spec: JobSpec) -> Iterator[tuple[tuple[str, ...], Setting]]:
    """The places of keys that the job states and that not every kind of job has."""
    sections: tuple[tuple[tuple[str, ...], Section | None, dict[str, Setting]], ...] = (
        ((), spec, {key: setting for key, setting in key_settings(JobSpec).items() if key not in KIND_KEYS}),
        (("compare",), spec.compare, dict(SETTINGS)),
        (("baseline",), spec.baseline, dict(SETTINGS)),
        (("steps",), spec.steps, key_settings(Steps)),
    )
    for place, section, settings in sections:
        stated = section.stated if section else frozenset()
        yield from (((*place, key), setting) for key, setting in settings.items() if key in stated)


def _max_of_program(spec: JobSpec) -> Iterator[Problem]:
    if spec.global_batch == "max":
        message = "`global_batch: max` needs a workload: gpurun can't change a program's batch"
        yield spec.problem(("global_batch",), message, "set a number, or remove the key")


def _shared_gpu(draft: Draft) -> Iterator[Problem]:
    """Rank r of a program takes the GPU `cuda:r` of those that it sees: there must be one of its own."""
    devices = draft.spec.devices
    if not isinstance(devices, tuple) or not draft.knows(("devices",)) or accelerator_of(devices[0]).is_host:
        return
    if twice := [name for name in dict.fromkeys(devices) if devices.count(name) > 1]:
        message = f"{twice[0]} is listed twice, but each rank of a program needs its own GPU"
        yield draft.spec.problem(("devices",), message, "list each GPU once")
