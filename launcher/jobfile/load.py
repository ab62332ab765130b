"""A job file in, a `JobSpec` out, or all of its mistakes at once; and what a command line adds to a job."""

import json
import re
import shlex
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import MappingProxyType
from typing import Any

from gpurun.launcher.errors import Problem, SpecError
from gpurun.launcher.jobfile.checks.code import find_missing_files, params_taken
from gpurun.launcher.jobfile.checks.rules import find_conflicts
from gpurun.launcher.jobfile.kinds import default_strategy
from gpurun.launcher.jobfile.model import SECTIONS, SIZES, JobSpec, secrets_in
from gpurun.launcher.jobfile.read import Draft, Mistake, UnknownKey, draft_of, key_elsewhere, read_spec
from gpurun.launcher.jobfile.section import InvalidValue, Section
from gpurun.launcher.jobfile.settings import ADDED_TO_THE_TOP
from gpurun.launcher.jobfile.values import (
    BECOMES_COMMAND,
    OFF,
    ON,
    OPTION_NAME,
    parse_env,
    parse_options,
    safe_name,
    with_options,
)
from gpurun.launcher.jobfile.yaml.describe import describe, did_you_mean, flow_text, shorten
from gpurun.launcher.jobfile.yaml.tree import (
    MAX_PROBLEMS,
    Mark,
    Source,
    YamlNode,
    compose,
    override_source,
    read_source,
)
from gpurun.launcher.jobfile.yaml.tree import Path as KeyPath
from gpurun.launcher.units import format_count


def load_job(
    path: Path, overrides: Sequence[str] = (), job_dir: Path | None = None, *, runs_here: bool = False
) -> JobSpec:
    """The job in `path` with each override (`key.path=value`, the value in YAML) in its place.

    Args:
        job_dir: where relative file names start, if not in the file's own directory.
        runs_here: whether files that params name must be on this machine.

    Raises:
        SpecError: every mistake that was found, with its place, in the order of the file.
    """
    source = _overridden(_read(path, overrides), overrides)
    source = replace(source, problems=(*source.problems, *_without_effect(source, overrides)))
    return check_source(_with_name(source, path), job_dir or path.parent, runs_here=runs_here)


def load_text(text: str, name: str, overrides: Sequence[str], job_dir: Path) -> JobSpec:
    """Like `load_job`, for a job that is in no file: mistakes name `name`, if there is one, without lines."""
    root, problems = compose(text, name, has_lines=False)
    return check_source(_overridden(Source(name, text, root, tuple(problems)), overrides), job_dir)


_UNTIL_DECIDED: tuple[KeyPath, ...] = (("budget",), ("until",))
_FIXED: tuple[KeyPath, ...] = tuple(("steps", size) for size in sorted(SIZES))


def _overridden(source: Source, overrides: Sequence[str]) -> Source:
    """The file with the overrides; a size of the run in one replaces the file's, of either kind."""
    paths = {tuple(override.partition("=")[0].strip().split(".")) for override in overrides}
    is_fixed, is_decided = not paths.isdisjoint(_FIXED), not paths.isdisjoint(_UNTIL_DECIDED)
    if is_fixed != is_decided:
        for path in _UNTIL_DECIDED if is_fixed else _FIXED:
            source = replace(source, root=source.root.without(path))
    return override_source(source, tuple(overrides))


def _without_effect(source: Source, overrides: Sequence[str]) -> Iterator[Problem]:
    """Overrides of keys that vary: the values under `compare` take their place."""
    root = source.root.plain()
    varied = root.get("compare") if isinstance(root, dict) else None
    for override in overrides:
        key = override.partition("=")[0].strip()
        if isinstance(varied, dict) and varied.get(key) and key not in ADDED_TO_THE_TOP:
            message = f"this value has no effect: `compare.{key}` overrides it"
            yield Problem(message, f"use --set compare.{key}=[…]", f"--set {key}")


def _read(path: Path, overrides: Sequence[str]) -> Source:
    """The file; one that is no YAML doesn't hide the mistakes of the overrides."""
    if path.suffix == ".py" and path.is_file():
        program = shlex.quote(str(path))
        raise SpecError(Problem(f"{path} is a program, not a job file", f"to run it: gpurun run {program}"))
    try:
        return read_source(path)
    except SpecError as error:
        nothing = Source(str(path), "", YamlNode({}, Mark(str(path))))
        raise SpecError(*error.problems, *override_source(nothing, tuple(overrides)).problems) from None


def check_source(source: Source, job_dir: Path, *, runs_here: bool = False) -> JobSpec:
    """Like `load_job`, for a file that has been read; its files are looked for in `job_dir`."""
    if not isinstance(source.root.value, dict):
        message = f"expected keys and values (`workload: gpt`), got {describe(source.root.plain())}"
        hint = _without_dashes(source.root.plain())
        raise JobError(in_order([*source.problems, source.problem((), message, hint)], source.file))
    source = _with_strategy(source)
    spec, mistakes = read_spec(source)
    has_unknown = any(isinstance(mistake, UnknownKey) for mistake in mistakes)
    params = params_taken(spec.workload, job_dir) if has_unknown else ()
    found, more = explain(mistakes, source, params)
    draft = draft_of(spec, mistakes)
    conflicts = [] if more else find_conflicts(draft, job_dir)
    missing = find_missing_files(draft, job_dir) if runs_here and not more else ()
    problems = [*source.problems, *found, *conflicts, *missing]
    if problems:
        known = draft.without(problems)
        raise JobError(
            in_order(problems, source.file, more), known if known.is_plannable and not more else None
        )
    return spec


def _without_dashes(items: Any) -> str | None:
    """How to write a list of keys: `- workload: gpt`."""
    if not isinstance(items, list) or not all(isinstance(item, dict) and item for item in items):
        return None
    return f"remove the dashes: write `{shorten(flow_text(items[0])[1:-1])}`"


def _with_name(source: Source, path: Path) -> Source:
    if not isinstance(source.root.value, dict) or "name" in source.root.value:
        return source
    name = YamlNode(safe_name(path.stem), source.root.mark)
    return replace(source, root=source.root.with_child("name", name))


def _with_strategy(source: Source) -> Source:
    """The job with the strategy of its micro-benchmark, where it names none."""
    keys = source.root.value
    if not isinstance(keys, dict) or "strategy" in keys or "workload" not in keys:
        return source
    workload = keys["workload"].value
    strategy = default_strategy(workload) if isinstance(workload, str) else None
    compare = keys["compare"].value if "compare" in keys else {}
    if strategy is None or (isinstance(compare, dict) and "strategy" in compare):
        return source
    return replace(source, root=source.root.with_child("strategy", YamlNode(strategy, source.root.mark)))


class JobError(SpecError):
    """A job with mistakes, and what is known of it in spite of them."""

    def __init__(self, problems: Sequence[Problem], draft: Draft | None = None) -> None:
        super().__init__(*problems)
        self.draft = draft
        """`None` where it isn't enough for a plan, or there are too many mistakes."""


def in_order(problems: Sequence[Problem], file: str, more: int = 0) -> list[Problem]:
    """In the order of the file, command-line options last; a flood is cut.

    Args:
        more: mistakes that are not among `problems`.
    """
    ordered = sorted(problems, key=lambda found: (found.file != file, found.line or 0, found.column or 0))
    more += max(0, len(ordered) - MAX_PROBLEMS)
    rest = [Problem(f"and {format_count(more)} more mistakes", file=file)] if more else []
    return [*ordered[:MAX_PROBLEMS], *rest]


def explain(mistakes: Sequence[Mistake], source: Source, params: Sequence[str]) -> tuple[list[Problem], int]:
    """Messages for the mistakes, for `MAX_PROBLEMS` of them at most, and how many more there are.

    Those that `source` has reported already are left out. Explaining takes a while (near misses are looked
    for), so that a file of thousands of wrong keys must not be explained in full.

    Args:
        params: what the workload takes.
    """
    unreported = [mistake for mistake in mistakes if isinstance(mistake, UnknownKey) or mistake.message]
    listed: set[KeyPath] = set()
    found = [_explain(mistake, source, listed, params) for mistake in unreported[:MAX_PROBLEMS]]
    return found, max(0, len(unreported) - MAX_PROBLEMS)


def _explain(mistake: Mistake, source: Source, listed: set[KeyPath], params: Sequence[str]) -> Problem:
    """A message for the mistake.

    Args:
        listed: sections whose keys were listed in a message before; the list says the same again. Grows.
        params: what the workload takes.
    """
    if isinstance(mistake, UnknownKey):
        message, hint = _unknown_key(mistake.path, listed)
        in_params = _as_param(mistake.path, source, params) or _as_argument(mistake.path, source)
        return source.key_problem(mistake.path, message, in_params or hint)
    key = ".".join(step for step in mistake.path if isinstance(step, str))
    return source.problem(mistake.path, f"`{key}`: {mistake.message}", mistake.hint)


def _unknown_key(path: KeyPath, listed: set[KeyPath]) -> tuple[str, str | None]:
    key = str(path[-1])
    known = (SECTIONS[str(path[0])] if len(path) > 1 else JobSpec).keys
    hint = _INSTEAD.get(key) or _meant(key, known) or _elsewhere(key)
    if hint is None and path[:-1] not in listed:
        listed.add(path[:-1])
        hint = "\n    ".join(textwrap.wrap(f"valid keys: {', '.join(known)}", 76))
    inside = f" under `{path[0]}`" if len(path) > 1 else ""
    return f"unknown key `{shorten(key)}`{inside}", hint


_OF_ALL_DEVICES = "`global_batch` counts the samples of all devices together"
_SIZE_OF_RUN = "`budget: 3m` or `steps: {rounds: 28}` says how much is measured"
_ARGUMENTS = "arguments of a workload go into `params`, those of a program into `args`"
_INSTEAD = {
    **dict.fromkeys(("micro_batch", "micro_batch_size", "local_batch"), _OF_ALL_DEVICES),
    **dict.fromkeys(("batch_size_per_device", "per_device_train_batch_size"), _OF_ALL_DEVICES),
    **dict.fromkeys(("epochs", "max_steps", "num_steps", "iterations"), _SIZE_OF_RUN),
    **dict.fromkeys(("data", "dataset", "lr", "learning_rate"), _ARGUMENTS),
    **dict.fromkeys(("out", "output", "output_dir"), "set it on the command line: gpurun JOB.yaml --out DIR"),
    "resume": "an option of the command: gpurun --resume JOB.yaml",
    "workdir": "programs start in the job file's directory; `args` may have {launch_dir}",
}
"""The advice about keys that a job doesn't have, and that nothing near replaces."""


def _meant(key: str, known: Iterable[str]) -> str | None:
    names = list(known)
    meant = key_elsewhere(key, names)
    return f"did you mean `{meant}`?" if meant else did_you_mean(key, names)


def _as_param(path: KeyPath, source: Source, params: Sequence[str]) -> str | None:
    """How to write a key that is an argument of the workload: `params: {layers: 4}`, also where it varies."""
    section, name = path[:-1], str(path[-1]).removeprefix("params.")
    if name not in params or section not in ((), ("compare",)):
        return None
    value = source.root.plain()
    for step in path:
        value = value[step]
    if section and isinstance(value, list):
        items: Any = [{name: item} for item in value]
        return f"write `params: {shorten(flow_text(items))}`"
    return f"write `params: {shorten(flow_text({name: value}))}`"


def _as_argument(path: KeyPath, source: Source) -> str | None:
    """How to write a key that is an option of a program: `args: ["--width", 64]`, also where it varies."""
    section, name = path[:-1], str(path[-1])
    if not name.startswith("-") or section not in ((), ("compare",)):
        return None
    value = source.root.child(section[0]) if section else source.root
    given = value.plain()[name] if value else None
    if not section:
        return f"write `args: {shorten(flow_text([name, *([] if given is None else [given])]))}`"
    values = given if isinstance(given, list) else [given]
    return f"write `args: {shorten(flow_text([[name, item] for item in values]))}`"


def _elsewhere(key: str) -> str | None:
    homes: list[tuple[str, type[Section]]] = [("at the top", JobSpec)]
    homes += [(f"under `{name}`", SECTIONS[name]) for name in ("steps", "profile", "logs")]
    home = next((place for place, model in homes if key in model.keys), None)
    return f"`{key}` belongs {home}" if home else None


def split_devices(text: str) -> str | list[str]:
    """The value of `--devices`: a word, or names by commas, with a job file's brackets or without."""
    bare = text.strip()
    is_list = bare.startswith("[") and bare.endswith("]")
    names = [name.strip() for name in (bare[1:-1] if is_list else bare).split(",")]
    return names if is_list or len(names) > 1 else bare


def program_job(
    script: str | None,
    module: str | None,
    args: Sequence[str],
    devices: str,
    compare: Mapping[str, object] = MappingProxyType({}),
) -> str:
    """YAML of a job that runs this program; it is kept in the run directory, and can be run again.

    Args:
        script: path of a Python file; `None` if `module` is one's name.
        devices: see `split_devices`.
        compare: the lists of what varies.

    Raises:
        SpecError: the command line isn't UTF-8.
    """
    name = Path(script).stem if script is not None else str(module)
    name = Path(args[0]).name if module == BECOMES_COMMAND else name
    job: dict[str, object] = {"name": safe_name(name)}
    job |= {"script": script} if script is not None else {"module": module}
    job |= {"args": list(args)} if args else {}
    job |= {"devices": split_devices(devices)}
    job |= {"compare": compare} if compare else {}
    text = job_text(job)
    if found := re.search("[\udc80-\udcff]", text):
        message = f"the command line isn't UTF-8: a stray byte 0x{ord(found[0]) & 0xFF:02x}"
        raise SpecError(Problem(message, "give the file another name, or have the program read it elsewhere"))
    return text


def masked_overrides(overrides: Sequence[str], spec: JobSpec) -> tuple[str, ...]:
    """The overrides with masks in place of secrets, however YAML lets them be spelled."""
    resolved = spec.resolved()
    return tuple(_masked_override(override, resolved) for override in overrides)


def _masked_override(override: str, resolved: Any) -> str:
    if not secrets_in(overrides_alone((override,))):
        return override
    section, *steps = override.partition("=")[0].strip().split(".")
    value, key = resolved[section], section
    for step in steps:
        if not isinstance(value, dict) or step not in value:
            break
        value, key = value[step], f"{key}.{step}"
    return f"{key}={json.dumps(value, ensure_ascii=False)}"


def overrides_alone(overrides: Sequence[str]) -> Any:
    """The overrides as a job that has nothing else, in plain data."""
    nothing = Source("", "", YamlNode({}, Mark("")))
    return override_source(nothing, tuple(overrides)).root.plain()


def job_text(job: Mapping[str, object]) -> str:
    """A job as YAML. JSON is YAML, and spells a text in one way, that YAML takes for nothing else.

    But for an emoji: JSON's escape for it is none of YAML's.
    """
    return "".join(f"{key}: {json.dumps(value, ensure_ascii=False)}\n" for key, value in job.items())


FORMS = (
    "write workers=0,2 for `--workers`, amp=on,off for a flag, +model.width=64,128 for Hydra, "
    "or env:OMP_NUM_THREADS=1,2"
)
_ENV = "env:"
_VARIABLE = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_PARSE = {"options": parse_options, "env": parse_env}

Values = dict[tuple[str, str], list[Any]]
"""The values of each item of a setting: `("options", "workers")`."""


def compared(texts: Sequence[str]) -> dict[str, list[dict[str, Any]]]:
    """The lists of `options` and `env` under `compare`: every combination of their values, the last fastest.

    Args:
        texts: of the command line: `workers=0,2`, `amp=on,off`, `+model.width=64,128`, `env:A=1,2`; values
            that have commas as a list in JSON: `sizes=["1,2","3,4"]`.

    Raises:
        SpecError: all that is wrong with them, without the values of variables.
    """
    values: Values = {}
    problems: list[Problem] = []
    for text in texts:
        key, _, listed = text.partition("=")
        key = key.strip().lstrip("-")
        try:
            _add(values, key, listed.strip())
        except InvalidValue as wrong:
            message = f"--compare {shorten(key) or '=…'}: {wrong.message}"
            problems.append(Problem(message, wrong.hint or f"write {key}=A,B"))
    if problems:
        raise SpecError(*problems)
    found: dict[str, list[dict[str, Any]]] = {}
    for setting in dict.fromkeys(setting for setting, _ in values):
        own = {name: several for (where, name), several in values.items() if where == setting}
        found[setting] = [dict(zip(own, each, strict=True)) for each in product(*own.values())]
    return found


def _add(values: Values, key: str, listed: str) -> None:
    """Adds the values that a text lists for a key."""
    setting, name = ("env", key.removeprefix(_ENV)) if key.startswith(_ENV) else ("options", key)
    if not (_VARIABLE if setting == "env" else OPTION_NAME).fullmatch(name):
        meant = f"write {key[1:]}=A,B; it keeps the `++` that the key has after `--`"
        raise InvalidValue(
            "expected the name of an option or a variable", meant if key.startswith("++") else FORMS
        )
    variable, equals, _ = listed.partition("=")
    if name == "env" and equals and _VARIABLE.fullmatch(variable):
        raise InvalidValue("expected a colon before a variable", f"write {_ENV}{variable}=A,B")
    if _plain(setting, name) in [_plain(*known) for known in values]:
        raise InvalidValue("its values are given twice", f"write them in one: {key}=A,B,C")
    values[setting, name] = found = _listed(key, listed)
    for value in found:
        _PARSE[setting]({name: value})
    if len(set(map(flow_text, found))) < 2:
        raise InvalidValue("there is one value, and nothing to compare it with", _second(key, name, found[0]))


def _plain(setting: str, name: str) -> tuple[str, str]:
    """The setting and the name of an option, which is equal for all spellings of the name."""
    return setting, name if setting == "env" else name.removeprefix("+").replace("_", "-")


def _listed(key: str, text: str) -> list[Any]:
    if not text.startswith("["):
        found = [value.strip() for value in text.split(",")] if text else []
        if "" in found:
            hint = """for an empty text, write a list: '["","B"]'"""
            raise InvalidValue("one of its values is empty", hint)
    else:
        try:
            found = list(json.loads(text))
        except (ValueError, RecursionError):
            hint = """put each value in double quotes, and all in single ones: '["A","B"]'"""
            raise InvalidValue("expected a list in JSON", hint) from None
    if not found:
        is_flag = text == "" and not key.startswith(("+", _ENV))
        flag = f", or {key}={ON},{OFF} for a flag" if is_flag else ""
        raise InvalidValue("expected values, got none", f"write {key}=A,B{flag}")
    return found


def _second(key: str, name: str, value: Any) -> str:
    """How to write a second value, or one value for all."""
    if key.startswith(_ENV):  # the value may be a secret
        return f"write {key}=A,B; for all launches alike: --set env.{name}=A"
    (text,) = parse_options({name: value}).values()
    if text in (ON, OFF):
        return f"write {key}={ON},{OFF}"
    values = f"""'{key}=["{text}","B"]'""" if "," in text else f"{key}={text},B"
    words = shlex.join(with_options((), {name: text}))
    return f"write {values}; for all launches alike, put `{words}` after `--`"
