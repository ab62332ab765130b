"""`--compare` of `gpurun run`, as what a job file has under `compare`."""

import json
import re
import shlex
from collections.abc import Sequence
from itertools import product
from typing import Any

from gpurun.launcher.errors import Problem, SpecError
from gpurun.launcher.jobfile.field_types import InvalidValue
from gpurun.launcher.jobfile.program_line import OFF, ON, with_options
from gpurun.launcher.jobfile.program_values import OPTION_NAME, parse_env, parse_options
from gpurun.launcher.jobfile.yaml.describe import flow_text, shorten

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
