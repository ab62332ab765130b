"""Values of a job that runs a program unchanged: its file or module, its arguments, its environment."""

import re
from typing import Any

from launcher.spec.describe import describe, shorten
from launcher.spec.values import wrong

MAX_ARGS = 1000
"""Linux takes more, a person writes fewer."""

OWN_VARIABLES = frozenset(
    {
        *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"),
        *("ROLE_RANK", "ROLE_NAME", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "CUDA_VISIBLE_DEVICES"),
    }
)
"""Variables that a launcher gives its ranks, and that a job therefore can't."""

_MODULE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")


def parse_script(value: Any) -> str:
    """The path of a Python file, relative to the job file's folder or absolute."""
    if isinstance(value, str) and value.strip() and "\x00" not in value:
        return value
    raise wrong(f"expected the path of a Python file, got {describe(value)}", "such as train.py")


def parse_module(value: Any) -> str:
    """A module's full name, as `python -m` takes it."""
    if isinstance(value, str) and _MODULE.fullmatch(value) and not value.endswith(".py"):
        return value
    hint = "such as package.train"
    if isinstance(value, str) and (value.endswith(".py") or "/" in value):
        hint = f"`script: {shorten(value)}` runs a file"
    raise wrong(f"expected the name of a module, got {describe(value)}", hint)


def parse_args(value: Any) -> tuple[str, ...]:
    """Arguments as a program gets them; numbers may stand without quotes."""
    if isinstance(value, str):
        items = ", ".join(value.split())
        raise wrong(f"expected a list of arguments, got {describe(value)}", f"write [{items}]"[:120])
    if not isinstance(value, list):
        raise wrong(f"expected a list of arguments, got {describe(value)}", 'such as [--epochs, "1"]')
    if len(value) > MAX_ARGS:
        raise wrong(f"expected at most {MAX_ARGS:,} arguments, got {len(value):,}")
    return tuple(_argument(item, position) for position, item in enumerate(value))


def _argument(item: Any, position: int) -> str:
    text = _text(item)
    if text is None:
        raise wrong(f"expected an argument, got {describe(item)}", "put it in quotes", position)
    return text


def check_args_list(value: Any) -> Any:
    """`compare: args` as it stands; a list of words is one list of arguments, not several.

    Raises:
        PydanticCustomError: it is such a list.
    """
    if isinstance(value, list) and value and not any(isinstance(item, list | dict) for item in value):
        words = ", ".join(str(item) for item in value)
        raise wrong("an argument alone is no list of arguments", f"for one list, write [[{words}]]"[:120])
    return value


def parse_env(value: Any) -> dict[str, str]:
    """Environment variables by name; numbers may stand without quotes."""
    if not isinstance(value, dict):
        raise wrong(f"expected variables by name, got {describe(value)}", "such as {NCCL_DEBUG: INFO}")
    return {name: _variable(name, item) for name, item in value.items()}


def _variable(name: str, item: Any) -> str:
    if not name or "=" in name or "\x00" in name:
        raise wrong(f"a variable can't be called {describe(name)}")
    if name in OWN_VARIABLES:
        raise wrong(f"gpurun gives every rank its {name}; it can't be set", "`devices` says what it will be")
    text = _text(item)
    if text is None:
        hint = f'as text: {name}: "1"' if item is None or isinstance(item, bool) else None
        raise wrong(f"expected text for the variable {shorten(name)}, got {describe(item)}", hint)
    return text


def _text(item: Any) -> str | None:
    """Text or a number as text; a truth value has more than one spelling, so that none is guessed."""
    if isinstance(item, str):
        return None if "\x00" in item else item
    return str(item) if isinstance(item, int | float) and not isinstance(item, bool) else None
