"""The arguments of a program with options set in them."""

import re
from collections.abc import Mapping, Sequence

END_OF_OPTIONS = "--"
"""The argument after which nothing is an option."""
ON, OFF = "on", "off"
"""Values of an option that is a flag."""

_OPTION_LIKE = re.compile(r"-[^\d.]")
"""The beginning of an option; a negative number is a value."""


def with_options(args: Sequence[str], options: Mapping[str, str]) -> tuple[str, ...]:
    """The arguments with these options, each in the form that it has there; all others stay as they are.

    `workers` is `--workers 2` or `--workers=2`, with one dash or two, and with `-` or `_` in a longer name;
    `+model.width` is Hydra's `model.width=64`, also after `+` or `++`. Of several equal options the last one
    counts, as it does for programs. An option that isn't there is added.
    """
    end = args.index(END_OF_OPTIONS) if END_OF_OPTIONS in args else len(args)
    line = list(args[:end])
    for name, value in options.items():
        _set(line, name, value)
    return (*line, *args[end:])


def _set(line: list[str], name: str, value: str) -> None:
    key = name.removeprefix("+")
    spelled = "[-_]".join(map(re.escape, re.split("[-_]", key)))
    options = _places(line, rf"--?{spelled}(=|\Z)") if key == name else []
    if not options and (overrides := _places(line, rf"\+{{0,2}}{re.escape(key)}=")):
        line[overrides[-1]] = _assigned(line[overrides[-1]], value)
    elif options and not (value in (ON, OFF) and _is_flag(line, options[-1])):
        _replace(line, options[-1], value)
    elif value == OFF and key == name:
        for at in reversed(options):
            del line[at]
    elif not options:
        line += _added(name, value)


def _places(line: Sequence[str], pattern: str) -> list[int]:
    return [at for at, word in enumerate(line) if re.match(pattern, word)]


def _assigned(word: str, value: str) -> str:
    return f"{word.partition('=')[0]}={value}"


def _is_flag(line: Sequence[str], at: int) -> bool:
    """Whether an option has no value; what follows it is one only if it is `on` or `off`."""
    return "=" not in line[at] and line[at + 1 : at + 2] not in ([ON], [OFF])


def _replace(line: list[str], at: int, value: str) -> None:
    if "=" in line[at]:
        line[at] = _assigned(line[at], value)
    else:
        has_value = at + 1 < len(line) and not _OPTION_LIKE.match(line[at + 1])
        line[at + 1 : at + 1 + has_value] = [value]


def _added(name: str, value: str) -> list[str]:
    if name.startswith("+"):
        return [f"{name[1:]}={value}"]
    option = f"-{name}" if len(name) == 1 else f"--{name}"
    return [option] if value == ON else [option, value]
