"""Values of a job file that say how a program runs: its file or module, arguments and environment."""

import re
from typing import Any

from gpurun.launcher.jobfile.field_types import InvalidValue, ValueKind, expected
from gpurun.launcher.jobfile.program_line import OFF, ON
from gpurun.launcher.jobfile.yaml.describe import correction, describe, did_you_mean, flow_text, shorten
from gpurun.launcher.machine.accelerators import gpu_kinds
from gpurun.launcher.masking import is_secret, masked
from gpurun.launcher.units import format_count
from gpurun.workloads.registry import BUILTINS

SCRIPT_PATH = "the path of a Python file"
MODULE_NAME = "the name of a module"
MAX_ARGS = 1000
"""Linux takes more, a person writes fewer."""

OWN_VARIABLES = frozenset(
    {
        *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"),
        *("ROLE_RANK", "ROLE_NAME", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GPURUN_LAUNCH_DIR"),
        *(kind.visible_variable for kind in gpu_kinds() if kind.visible_variable is not None),
    }
)
"""Variables that a launcher gives its ranks, and that a job therefore can't."""

OPTION_NAME = re.compile(r"[^\W\d_][\w.-]*|\+[^\s=+][^\s=]*")
"""A name such as `workers`, or with `+` a key of Hydra's."""
_MODULE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")


def parse_script(value: Any) -> str:
    """The path of a Python file, relative to the job file's directory or absolute."""
    if isinstance(value, str) and value.strip() and "\x00" not in value:
        return value
    raise expected(SCRIPT_PATH, value, "such as train.py")


def parse_module(value: Any) -> str:
    """A module's full name, as `python -m` takes it."""
    if isinstance(value, str) and _MODULE.fullmatch(value) and not value.endswith(".py"):
        return value
    hint = "such as package.train"
    if isinstance(value, str) and (value.endswith(".py") or "/" in value):
        hint = f"`script: {shorten(value)}` runs a file"
    raise expected(MODULE_NAME, value, hint)


def parse_args(value: Any) -> tuple[str, ...]:
    """Arguments as a program gets them; numbers need no quotes."""
    if isinstance(value, str):
        items = ", ".join(value.split())
        raise expected("a list of arguments", value, f"write [{items}]"[:120])
    if isinstance(value, dict):
        words = flow_text([word for pair in value.items() for word in pair if word is not None])
        raise expected("a list of arguments", value, f"write {words}"[:120])
    if not isinstance(value, list):
        raise expected("a list of arguments", value, 'such as [--epochs, "1"]')
    if len(value) > MAX_ARGS:
        raise InvalidValue(
            f"expected at most {format_count(MAX_ARGS)} arguments, got {format_count(len(value))}"
        )
    return tuple(_argument(item, position) for position, item in enumerate(value))


def _argument(item: Any, position: int) -> str:
    text = _text(item)
    if text is None:
        raise expected("an argument", item, correction(item, str), position)
    return text


def check_args_list(items: list[Any]) -> None:
    """Refuses the value of `compare: args` if it is one list of arguments, not several."""
    if items and not any(isinstance(item, list | dict) for item in items):
        lists = [", ".join(str(item).split()) for item in items]
        are_lists = len(items) > 1 and all("," in text for text in lists)
        hint = "write " if are_lists else "for one list, write "
        hint += f"[[{'], ['.join(lists)}]]" if are_lists else f"[[{', '.join(lists)}]]"
        if len(items) > 1 and not are_lists and not lists[0].startswith("-"):
            hint += f"; to compare them, [[{'], ['.join(lists)}]]"
        raise InvalidValue("an argument alone is not a list of arguments", hint[:120])


def parse_options(value: Any) -> dict[str, str]:
    """Options by name; numbers need no quotes, and a flag may be a truth value."""
    if not isinstance(value, dict):
        raise expected("options by name", value, "such as {workers: 2}")
    return {name: _option(name, item) for name, item in value.items()}


def _option(name: str, item: Any) -> str:
    if not OPTION_NAME.fullmatch(name):
        bare = name.lstrip("-")
        hint = f"write {bare}" if OPTION_NAME.fullmatch(bare) else "such as workers, or Hydra's +model.width"
        raise InvalidValue(f"expected the name of an option, got {describe(name)}", hint)
    text = (ON if item else OFF) if isinstance(item, bool) else _text(item)
    if text is None:
        raise expected(f"a text or a number for the option {shorten(name)}", item)
    return text


def parse_env(value: Any) -> dict[str, str]:
    """Environment variables by name, those with secrets masked; numbers need no quotes."""
    if isinstance(value, str):  # not shown: it may hold a secret
        raise InvalidValue("expected variables by name, got a text", "such as {NCCL_DEBUG: INFO}")
    if not isinstance(value, dict):
        raise expected("variables by name", value, "such as {NCCL_DEBUG: INFO}")
    return {name: _variable(name, item) for name, item in value.items()}


def for_message(name: str, value: Any) -> Any:
    """A value as advice may show it: of `env`, with masks in place of secrets."""
    return parse_env(value) if name == "env" else value


def _variable(name: str, item: Any) -> str:
    if not name or "=" in name or "\x00" in name:
        variable, equals, _ = name.partition("=")  # the value may be a secret
        hint = f"write its name and its value apart: {shorten(variable)}: …" if variable and equals else None
        shown = describe(f"{variable}=…" if equals else name)
        raise InvalidValue(f"expected the name of an environment variable, got {shown}", hint)
    if name in OWN_VARIABLES:
        raise InvalidValue(
            f"{name} can't be set: gpurun sets it for every rank", "remove it; `devices` chooses the devices"
        )
    text = _text(item)
    if text is None and is_secret(name):
        raise InvalidValue(f"expected text for the variable {shorten(name)}")
    if text is None:
        quoted = "" if item is None else str(item).lower()
        hint = f'write it as text: {name}: "{quoted}"' if item is None or isinstance(item, bool) else None
        raise expected(f"text for the variable {shorten(name)}", item, hint)
    return masked(name, text)


def _text(item: Any) -> str | None:
    """Text or a number as text; a truth value has more than one spelling, so that none is guessed."""
    if isinstance(item, str):
        return None if "\x00" in item else item
    return str(item) if isinstance(item, int | float) and not isinstance(item, bool) else None


SCRIPT, MODULE = ValueKind(parse_script, {"type": "string"}), ValueKind(parse_module, {"type": "string"})
ARGS = ValueKind(parse_args, {"type": "array", "items": {"type": ["string", "number"]}})
OPTIONS = ValueKind(
    parse_options,
    {"type": "object", "additionalProperties": {"type": ["string", "number", "boolean"]}},
)
ENV = ValueKind(parse_env, {"type": "object", "additionalProperties": {"type": ["string", "number"]}})


WORKLOAD_NAME = "the name of a workload"
_WORKLOAD = re.compile(r"[A-Za-z_]\w*|[^:\x00]+\.py:[^\W\d]\w*|[^\W\d][\w.]*:[^\W\d]\w*")
_NEARLY = re.compile(r"(?P<source>[\w./-]+):(?P<owner>(?:\w+\.)+)?(?P<name>[^\W\d]\w*)(?P<args>\(.+\))?")
"""A text that is no workload yet, but shows which is meant."""


def parse_workload(value: Any) -> str:
    """`gpt`, `train.py:build` or `package.module:build`."""
    if isinstance(value, str) and _WORKLOAD.fullmatch(value):
        return value
    if isinstance(value, str) and _WORKLOAD.fullmatch(plain := _called(value)):
        hint = f"write {plain}"
    elif isinstance(value, str) and value.endswith(".py"):
        hint = f"name the function that builds it, such as {value}:build"
    elif isinstance(value, str) and (found := _NEARLY.fullmatch(value)):
        hint = _function_meant(**found.groupdict())
    else:
        hint = "use a built-in such as gpt, a file train.py:build, or a module package.module:build"
        if isinstance(value, str):
            hint = did_you_mean(value, BUILTINS) or hint
    raise expected(WORKLOAD_NAME, value, hint)


def _called(text: str) -> str:
    """`train.py:build` for `train.py::build` and `train.py:build()`."""
    return text.removesuffix("()").replace("::", ":")


def _function_meant(source: str, owner: str | None, name: str, args: str | None) -> str:
    """How to name the function of `train.py:Net.build`, `train.py:build(256)` or `pkg/train:build`."""
    if owner:
        return f"a method can't be named: write {source}:{name}, a function there that calls {owner}{name}"
    if args:
        return f"write {source}:{name}; arguments go into `params`, by name"
    return f"write {source}.py:{name} for a file, {source.strip('./').replace('/', '.')}:{name} for a module"
