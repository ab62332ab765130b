"""Combinations as variants: what cannot be is left out with its reason, what is the same work is merged."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from gpurun.launcher.errors import MachineError, Problem, SpecError
from gpurun.launcher.jobfile.checks.device_checks import find_misfits
from gpurun.launcher.jobfile.load import in_order
from gpurun.launcher.jobfile.model import JobSpec
from gpurun.launcher.jobfile.read import Draft
from gpurun.launcher.jobfile.settings import ADDED_TO_THE_TOP, SETTINGS, Settings, settings_for, settings_of
from gpurun.launcher.jobfile.yaml.describe import flow_text
from gpurun.launcher.jobfile.yaml.tree import Path
from gpurun.launcher.plan.combination import (
    Candidate,
    Combination,
    choose_baseline,
    combinations,
    make_unique,
    variant_id,
)
from gpurun.launcher.plan.devices import MachineLike, cores_per_device, notes_on
from gpurun.launcher.plan.impossible import (
    JUDGED_KEYS,
    NUMBER,
    JudgedCombination,
    Refusal,
    place_of,
    refusals,
    wished_devices,
)
from gpurun.launcher.plan.model import SkippedCombination, Variant
from gpurun.launcher.plan.nodes import Node, node_of_device
from gpurun.launcher.plan.program_processes import part_notes
from gpurun.launcher.units import plural

ASSUMED_SAMPLES = 64
"""Samples on each device, in a plan that is made before the largest batch is known."""
MOST_REASONS = 8
"""Shown of why no combination can run."""


@dataclass(frozen=True)
class Expansion:
    """The variants of `compare` on a machine."""

    variants: tuple[Variant, ...]
    left_out: tuple[SkippedCombination, ...]
    baseline: str
    notes: tuple[str, ...]


def expand(
    spec: JobSpec, machine: MachineLike, nodes: Sequence[Node] = (), with_own: bool = False
) -> Expansion:
    """The variants of a job on this machine, which of them is the baseline, and what a person should know.

    With `with_own` the job's own setting is one of them, and the baseline unless the job names another one.

    Raises:
        SpecError: no combination can be, there are too many, or the baseline is not one variant.
        MachineError: the machine has fewer devices than the job asks for.
    """
    judged = judge(Draft(spec), machine, nodes, with_own)
    if judged.problems:
        raise SpecError(*in_order([*judged.lacking, *judged.problems], file_of(spec)))
    if judged.lacking:
        raise MachineError(*judged.lacking)
    built, devices = judged.built, judged.devices
    candidates = _named(_merge(built))
    return Expansion(
        variants=tuple(candidate.variant for candidate in candidates),
        left_out=_left_out(judged.refused),
        baseline=choose_baseline(spec, candidates, with_own),
        notes=(
            *notes_on(spec.devices, devices, machine, nodes),
            *(part_notes(devices, nodes or (machine,)) if spec.program else ()),
            *_unused(spec, built),
            *(() if with_own else _overridden(spec)),
            *_chunk_notes(candidates),
            *_repeat_notes(spec),
            *_merge_notes(built, candidates),
        ),
    )


Built = list[tuple[Combination, Variant]]
Refused = list[tuple[Combination, tuple[Refusal, ...]]]


@dataclass
class Judged:
    """The variants of a job on the devices of this machine, and the problems that exclude others."""

    devices: tuple[str, ...]
    lacking: list[Problem]
    """Problems of what the machine lacks; what is judged is then judged as if it had that."""
    problems: list[Problem]
    """Problems of the job."""
    built: Built = field(default_factory=list)
    is_open: bool = False
    """Whether others may be possible, for all that is known of them."""
    refused: Refused = field(default_factory=list)


def judge(draft: Draft, machine: MachineLike, nodes: Sequence[Node] = (), with_own: bool = False) -> Judged:
    """Everything that is wrong with a job on this machine, as far as its values are known.

    Raises:
        SpecError: there are too many combinations, or no such devices together.
    """
    wished = wished_devices(draft, machine, nodes)
    judged = Judged(wished.names, list(wished.lacking), [])
    if NUMBER not in wished.unknown:
        judged.problems += find_misfits(draft, judged.devices)
    unknown = draft.without(judged.problems).unknown.union((name,) for name in wished.unknown)
    _judge_all(judged, draft.spec, machine, nodes, with_own, unknown | _following(draft.spec, unknown))
    if not (judged.built or judged.is_open):
        judged.problems += _nothing_left(draft.spec, judged.refused)
    return judged


def assume_batch(
    spec: JobSpec, machine: MachineLike, nodes: Sequence[Node] = ()
) -> tuple[JobSpec, tuple[str, ...]]:
    """The job with a batch to plan with where the largest one isn't found yet, and a note of it."""
    if spec.global_batch != "max" or spec.compare.global_batch:
        return spec, ()
    batch = ASSUMED_SAMPLES * len(wished_devices(Draft(spec), machine, nodes).names)
    figures = f"all figures here, such as how long it takes, assume {batch} samples"
    note = f"`global_batch: max` is found when the run begins; {figures}"
    return replace(spec, global_batch=batch), (note,)


def _following(spec: JobSpec, unknown: frozenset[Path]) -> set[Path]:
    """Keys that the job leaves open, and whose values follow from what isn't known."""
    sources = {"device_count": NUMBER, "global_batch": "workload"}
    return {
        (key,)
        for key, source in sources.items()
        if (source,) in unknown and key not in spec.stated | spec.compare.stated
    }


def file_of(spec: JobSpec) -> str:
    return spec.source.file if spec.source else ""


def _judge_all(
    judged: Judged,
    spec: JobSpec,
    machine: MachineLike,
    nodes: Sequence[Node],
    with_own: bool,
    unknown: frozenset[Path],
) -> None:
    devices, machines = judged.devices, nodes or (machine,)
    share = cores_per_device(devices, machine, nodes)
    num_local = sum(node_of_device(device) == 0 for device in devices)
    for wanted in combinations(spec, len(devices), num_local, with_own, unknown):
        case = JudgedCombination(wanted, devices, machines, spec.min_local_batch)
        if refused := tuple(refusals(case)):
            judged.refused.append((wanted, refused))
        elif wanted.unknown & JUDGED_KEYS:
            judged.is_open = True
        else:
            judged.built.append((wanted, _variant(case, share)))


def _left_out(refused: Refused) -> tuple[SkippedCombination, ...]:
    """Each once: params and seeds decide nothing."""
    left_out = [
        SkippedCombination(_essence(wanted), "; ".join(reason for _, reason in reasons))
        for wanted, reasons in refused
    ]
    return tuple(item for position, item in enumerate(left_out) if item not in left_out[:position])


def _essence(wanted: Combination) -> dict[str, Any]:
    """The values that decide whether a combination is possible: no params or seed, nothing unused."""
    return {key: value for key, value in wanted.stated.items() if SETTINGS[key].decides and wanted.has(key)}


def _variant(case: JudgedCombination, share: int) -> Variant:
    """The variant of a combination that can be, still without an id.

    Args:
        case: the combination on its devices.
        share: of the cores, a device's own.
    """
    wanted, samples = case.wanted, case.samples
    values = settings_of(wanted) | {
        "device_count": len(case.devices),
        "split": samples,
        "global_batch": sum(samples) or wanted.global_batch,
        "threads": share if wanted.threads == "auto" else wanted.threads,
        "first_bucket_mb": _first_bucket_mb(wanted),
        "sync_every": wanted.sync_every or (wanted.accumulate if wanted.has("sync_every") else None),
    }
    return Variant(id="", devices=case.devices, split_name=case.split_name, varied=_varied(wanted), **values)


def _first_bucket_mb(wanted: Combination) -> int | None:
    """torch's value where the job says nothing."""
    if not wanted.has("first_bucket_mb"):
        return None
    by_default = 1 if wanted.bucket_mb == Settings.bucket_mb else wanted.bucket_mb
    return wanted.first_bucket_mb or by_default


def _varied(wanted: Combination) -> dict[str, Any]:
    """The words about `compare` that the variant's name needs, besides what each begins with."""
    is_named = wanted.runs_as.in_jobs
    return {
        key: value
        for key, value in wanted.stated.items()
        if wanted.has(key) and not (is_named and SETTINGS[key].names_variant)
    }


def _merge(built: list[tuple[Combination, Variant]]) -> list[Candidate]:
    """Combinations that come to the same work make one candidate, in the order of the first ones."""
    merged: dict[str, Candidate] = {}
    for wanted, variant in built:
        known = merged.setdefault(_work(variant), Candidate(variant, ()))
        merged[_work(variant)] = replace(known, origins=(*known.origins, wanted))
    return list(merged.values())


def processes_of(variant: Variant) -> str:
    """A key that is equal for variants that share processes: equal texts for equal settings and devices."""
    common = {
        name: getattr(variant, name) for name, setting in SETTINGS.items() if not setting.shares_processes
    }
    return json.dumps((common, variant.devices), sort_keys=True)


def processes_in_turns(variant: Variant) -> str:
    """A key that is equal for variants that take turns in the same processes, each with its own model.

    Their strategies and what these take may differ, and other settings of a model.
    """
    common = {
        name: getattr(variant, name)
        for name, setting in SETTINGS.items()
        if not (setting.shares_processes or setting.option or setting.takes_turns)
    }
    return json.dumps(common, sort_keys=True)


def _work(variant: Variant) -> str:
    """The work of a variant, whatever it is called."""
    split = variant.split or variant.split_name
    return json.dumps((settings_of(variant), variant.devices, split), sort_keys=True)


def _named(candidates: list[Candidate]) -> list[Candidate]:
    variants = [candidate.variant for candidate in candidates]
    names = make_unique([_name(variant) for variant in variants])
    return [
        replace(candidate, variant=replace(candidate.variant, id=name))
        for candidate, name in zip(candidates, names, strict=True)
    ]


def _name(variant: Variant) -> str:
    return variant_id(variant.strategy, len(variant.devices), variant.split_name, variant.varied)


def _chunk_notes(candidates: list[Candidate]) -> list[str]:
    """Batches that run out before every device has a chunk."""
    notes: dict[str, None] = {}  # each once, in order
    for candidate in candidates:
        chunks = len(candidate.variant.devices)
        for wanted in candidate.origins:
            if chunks < wanted.device_count:
                cut = f"{wanted.global_batch} over {wanted.device_count} devices"
                notes[f"{cut} gives {plural(chunks, 'chunk')}: runs on {chunks}"] = None
    return list(notes)


def _repeat_notes(spec: JobSpec) -> list[str]:
    """Values that are listed more than once."""
    notes: dict[str, None] = {}  # each once, in order
    for key, values in spec.compare.lists().items():
        for at, value in enumerate(values):
            if value in values[:at]:
                notes[f"`compare: {key}` lists {flow_text(value)} more than once: measured once"] = None
    return list(notes)


def _merge_notes(built: list[tuple[Combination, Variant]], candidates: list[Candidate]) -> list[str]:
    """Splits that are called differently and come to the same samples."""
    kept = {_work(candidate.variant): candidate.variant for candidate in candidates}
    notes: dict[str, None] = {}
    for _, variant in built:
        first = kept[_work(variant)]
        if variant.split_name != first.split_name:
            samples = "/".join(map(str, first.split))
            notes[f"{first.split_name} and {variant.split_name} are both {samples}: measured once"] = None
    return list(notes)


def _unused(spec: JobSpec, built: list[tuple[Combination, Variant]]) -> list[str]:
    """Values that the job gives a setting that none of its strategies has, or that need another one."""
    names, defaults = " and ".join(dict.fromkeys(variant.strategy for _, variant in built)), Settings()
    notes = (
        f"{_why_unused(key, names, built)}: {_shown(value)} is not used"
        for key, setting in SETTINGS.items()
        if spec.kind in setting.kinds and not any(wanted.has(key) for wanted, _ in built)
        for value in spec.compare.lists().get(key, (getattr(spec, key),))
        if value != getattr(defaults, key)
    )
    return list(dict.fromkeys(notes))


def _overridden(spec: JobSpec) -> list[str]:
    """Values at the top of the job that `compare` doesn't list, though it varies their keys.

    `gpurun tune` compares with them.
    """
    defaults = Settings()
    return [
        f"`{key}: {_shown(value)}` is not used: `compare.{key}` overrides it"
        for key, values in spec.compare.lists().items()
        if key in SETTINGS.keys() - ADDED_TO_THE_TOP
        and (value := getattr(spec, key)) not in values
        and value != getattr(defaults, key)
    ]


def _why_unused(key: str, names: str, built: list[tuple[Combination, Variant]]) -> str:
    setting = SETTINGS[key]
    is_held = any(key in settings_for(wanted.kind, wanted.strategy) for wanted, _ in built)
    return f"`{key}` needs {setting.needs}" if is_held else f"{names} has no `{key}`"


def _shown(value: Any) -> str:
    return "/".join(map(str, value)) if isinstance(value, tuple) else flow_text(value)


def _nothing_left(spec: JobSpec, refused: Refused) -> list[Problem]:
    """Why no combination can run: what none of them can do, each at its key; else what rules out each."""
    reasons = [set(found) for _, found in refused]
    everywhere = set.intersection(*reasons)
    listed = dict.fromkeys(refusal for _, found in refused for refusal in found)
    problems = [_no_combination(spec, [refusal]) for refusal in listed if refusal in everywhere]
    if all(found > everywhere for found in reasons):
        problems.append(_no_combination(spec, [refusal for refusal in listed if refusal not in everywhere]))
    return problems


def _no_combination(spec: JobSpec, refused: Sequence[Refusal]) -> Problem:
    """The problem, at the key that all refusals share; a key not in the job comes from its strategy."""
    shown = [refusal.reason for refusal in refused[:MOST_REASONS]]
    if more := len(refused) - len(shown):
        shown.append(f"and {plural(more, 'more reason')}")
    keys = {refusal.key for refusal in refused}
    place = ("compare",) if len(keys) > 1 else place_of(spec, *keys)
    if spec.problem(place, "") == spec.problem((), ""):
        place = place_of(spec, "strategy")
    text = f" {shown[0]}" if len(shown) == 1 else "".join(f"\n    {reason}" for reason in shown)
    key = next(iter(keys)) if len(keys) == 1 else ""
    hint = f"use ddp, or remove `{key}`" if key in ("compile", "checkpointing") else None
    return spec.problem(place, f"no combination can run:{text}", hint)
