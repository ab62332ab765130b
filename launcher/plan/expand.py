"""Combinations as variants: what cannot be is left out with its reason, what is the same work is merged."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from gpurun.launcher.errors import MachineError, SpecError
from gpurun.launcher.jobfile.checks.device_checks import find_misfits
from gpurun.launcher.jobfile.kinds import builtin_named
from gpurun.launcher.jobfile.model import JobSpec
from gpurun.launcher.jobfile.read import Draft
from gpurun.launcher.jobfile.settings import SETTINGS, Settings, settings_of
from gpurun.launcher.jobfile.values import AUTO, GPU_KINDS
from gpurun.launcher.jobfile.yaml.describe import flow_text
from gpurun.launcher.plan.combination import (
    Candidate,
    Combination,
    ImpossibleError,
    choose_baseline,
    combinations,
    make_unique,
    variant_id,
)
from gpurun.launcher.plan.devices import (
    MachineLike,
    all_devices,
    cores_per_device,
    notes_on,
)
from gpurun.launcher.plan.impossible import check_count, check_room, refuse, refuse_backend, refuse_gpus
from gpurun.launcher.plan.model import SkippedCombination, Variant
from gpurun.launcher.plan.nodes import Node, node_of_device
from gpurun.launcher.plan.program_processes import part_notes
from gpurun.launcher.splits import Split, resolve_split
from gpurun.launcher.units import plural


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
    devices = all_devices(spec, machine, nodes)
    _check_machine(spec, len(devices))
    misfits = find_misfits(Draft(spec), devices)
    if misfits:
        raise SpecError(*misfits)
    built, refused = _build_all(spec, devices, machine, nodes, with_own)
    if not built:
        raise _nothing_left(spec, refused)
    candidates = _named(_merge(built))
    return Expansion(
        variants=tuple(candidate.variant for candidate in candidates),
        left_out=_left_out(refused),
        baseline=choose_baseline(spec, candidates, with_own),
        notes=(
            *notes_on(spec.devices, devices, machine, nodes),
            *(part_notes(devices, nodes or (machine,)) if spec.program else ()),
            *_unused(spec, built),
            *_chunk_notes(candidates),
            *_repeat_notes(spec),
            *_merge_notes(built, candidates),
        ),
    )


def _build_all(
    spec: JobSpec, devices: tuple[str, ...], machine: MachineLike, nodes: Sequence[Node], with_own: bool
) -> tuple[list[tuple[Combination, Variant]], list[tuple[Combination, ImpossibleError]]]:
    built: list[tuple[Combination, Variant]] = []
    refused: list[tuple[Combination, ImpossibleError]] = []
    share, machines = cores_per_device(devices, machine, nodes), nodes or (machine,)
    num_local = sum(node_of_device(device) == 0 for device in devices)
    for wanted in combinations(spec, len(devices), num_local, with_own):
        try:
            variant = _variant(wanted, devices, share, spec.min_local_batch)
            refuse_gpus(variant, machines)
            refuse_backend(variant, machines)
            built.append((wanted, variant))
        except ImpossibleError as error:
            refused.append((wanted, error))
    return built, refused


def _left_out(refused: list[tuple[Combination, ImpossibleError]]) -> tuple[SkippedCombination, ...]:
    """Each once: params and seeds decide nothing."""
    left_out = [SkippedCombination(_essence(wanted), str(error)) for wanted, error in refused]
    return tuple(item for position, item in enumerate(left_out) if item not in left_out[:position])


def _essence(wanted: Combination) -> dict[str, Any]:
    """The values that decide whether a combination is possible: no params or seed, nothing unused."""
    return {key: value for key, value in wanted.stated.items() if SETTINGS[key].decides and wanted.has(key)}


def _variant(wanted: Combination, devices: tuple[str, ...], share: int, least: int) -> Variant:
    """The variant, still without an id.

    Args:
        wanted: the values that the job states for it.
        devices: all that the job may use.
        share: of the cores, a device's own.
        least: the fewest samples that `balanced` may give a device.

    Raises:
        ImpossibleError: there can't be such a variant.
    """
    check_count(wanted, len(devices))
    split = _split(wanted, least)
    own = devices[: len(split.samples) or wanted.device_count]
    refuse(wanted, own, split)
    values = settings_of(wanted) | {
        "device_count": len(own),
        "split": split.samples,
        "global_batch": sum(split.samples) or wanted.global_batch,
        "threads": share if wanted.threads == "auto" else wanted.threads,
        "first_bucket_mb": _first_bucket_mb(wanted),
        "sync_every": wanted.sync_every or (wanted.accumulate if wanted.has("sync_every") else None),
    }
    return Variant(id="", devices=own, split_name=split.name, varied=_varied(wanted), **values)


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


def _split(wanted: Combination, least: int) -> Split:
    """Samples of each device; none for a program, which splits its batch itself, and for `balanced`."""
    if wanted.kind.runs_program:
        return Split("-", ())
    if not wanted.kind.trains:
        return Split("-", (1,) * wanted.device_count)
    if not wanted.has("split"):
        return Split("-", (wanted.samples,))
    try:
        split = resolve_split(wanted.split, wanted.samples, wanted.device_count)
    except SpecError as error:
        raise ImpossibleError("split", str(error)) from error
    if not split.samples:
        check_room(wanted, least)
    return split


def _merge(built: list[tuple[Combination, Variant]]) -> list[Candidate]:
    """Combinations that come to the same work make one candidate, in the order of the first ones."""
    merged: dict[str, Candidate] = {}
    for wanted, variant in built:
        known = merged.setdefault(_work(variant), Candidate(variant, ()))
        merged[_work(variant)] = replace(known, origins=(*known.origins, wanted))
    return list(merged.values())


def processes_of(variant: Variant) -> str:
    """A key that is equal for variants that share processes: equal texts for equal settings and devices."""
    common = {name: getattr(variant, name) for name, one in SETTINGS.items() if not one.shares_processes}
    return json.dumps((common, variant.devices), sort_keys=True)


def processes_in_turns(variant: Variant) -> str:
    """A key that is equal for variants that take turns in the same processes, each with its own model.

    Their strategies and what these take may differ; everything else may be a setting of the whole process.
    """
    own = {"strategy", "device_count"}
    common = {
        name: getattr(variant, name)
        for name, one in SETTINGS.items()
        if not (one.shares_processes or one.option or name in own)
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


def _why_unused(key: str, names: str, built: list[tuple[Combination, Variant]]) -> str:
    setting = SETTINGS[key]
    is_held = any(setting.holds(wanted.kind, wanted.strategy) for wanted, _ in built)
    return f"`{key}` needs {setting.needs}" if is_held else f"{names} has no `{key}`"


def _shown(value: Any) -> str:
    return "/".join(map(str, value)) if isinstance(value, tuple) else flow_text(value)


def _check_machine(spec: JobSpec, num_devices: int) -> None:
    """Where the job leaves it to the machine which devices there are, it is the machine that lacks some."""
    counts = spec.compare.device_count or ((spec.device_count,) if spec.device_count else ())
    if _machine_chooses(spec) and counts and min(counts) > num_devices:
        have = plural(num_devices, "device")
        message = f"the job needs {min(counts)} devices, but `devices: {spec.devices}` finds {have} here"
        raise MachineError(str(spec.problem(_place(spec, "device_count"), message)))
    builtin = builtin_named(spec.workload)
    if _machine_chooses(spec) and builtin and num_devices < builtin.min_devices:
        message = f"{builtin.why_devices}, but `devices: {spec.devices}` finds only one here"
        raise MachineError(str(spec.problem(("devices",), message)))


def _machine_chooses(spec: JobSpec) -> bool:
    """Whether the job leaves it to the machine which devices there are."""
    return spec.devices == AUTO or spec.devices in GPU_KINDS


def _nothing_left(spec: JobSpec, refused: list[tuple[Combination, ImpossibleError]]) -> SpecError:
    """The error that says why no combination can run: every reason once, at the key that they share.

    Where the job doesn't state that key, its strategy has brought it.
    """
    reasons = list(dict.fromkeys(str(error) for _, error in refused))
    shown = "; ".join(reasons[:5]) + ("; …" if len(reasons) > 5 else "")
    keys = {error.key for _, error in refused}
    place = ("compare",) if len(keys) > 1 else _place(spec, *keys)
    if spec.problem(place, "") == spec.problem((), ""):
        place = _place(spec, "strategy")
    return SpecError(spec.problem(place, f"no combination can run: {shown}"))


def _place(spec: JobSpec, key: str) -> tuple[str, ...]:
    return ("compare", key) if getattr(spec.compare, key, None) else (key,)
