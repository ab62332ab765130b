"""The rule by which a workload's `params` are checked: names, required ones, and types against a signature.

A job is checked by it before anything runs, as far as the source shows (`signature.signature_of`), and in the
worker for what only running the code shows (`signature.signature_of_function`).
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from gpurun.launcher.jobfile.yaml.describe import any_of, correction, describe, did_you_mean, shorten

TYPES: Mapping[str, tuple[str, tuple[type, ...]]] = {
    "int": ("a whole number", (int,)),
    "float": ("a number", (int, float)),
    "str": ("text", (str,)),
    "bool": ("true or false", (bool,)),
    "None": ("null", (type(None),)),
}
"""What a simple annotation allows, in words and as the types of a job's values."""


@dataclass(frozen=True)
class Param:
    """A parameter that a job may give by name."""

    name: str
    is_required: bool
    types: frozenset[str]
    """Of `TYPES`; empty if the annotation is missing or says more than these."""
    default: str | None = None
    """As the source has it, `...` where it was read from the function; `None` where there is none."""
    choices: tuple[str, ...] = ()
    """The texts that may be given, by `Literal["a", "b"]`; empty where any may."""
    is_per_device: bool = False
    """Whether a list has one value for each device; built-in workloads annotate that as `PerDevice`."""


@dataclass(frozen=True)
class Signature:
    """The parameters of a function."""

    params: tuple[Param, ...]
    is_open: bool
    """Whether it takes any other name as well (`**kwargs`)."""

    @property
    def names(self) -> list[str]:
        return [param.name for param in self.params]

    @property
    def required(self) -> set[str]:
        return {param.name for param in self.params if param.is_required}


@dataclass(frozen=True)
class WrongParam:
    """A mistake at one of the params that a job gives."""

    name: str
    message: str
    hint: str | None
    is_unknown: bool
    """Whether the name itself is wrong, and not its value."""


def wrong_params(
    workload: str, signature: Signature, given: Mapping[str, Any], place: str = "params"
) -> Iterator[WrongParam]:
    """Names that the function doesn't take, and values of a type that it doesn't.

    Args:
        place: key of the job that holds them, such as `compare.params`.
    """
    names = signature.names
    for name in given:
        if name not in names and not signature.is_open:
            hint = _near_or_all(name, signature)
            yield WrongParam(name, f"{shorten(workload)} has no parameter `{shorten(name)}`", hint, True)
    for param in signature.params:
        if param.name in given and not _is_allowed(given[param.name], param):
            value = given[param.name]
            message = f"`{place}.{param.name}`: expected {_expected(param)}, got {describe(value)}"
            yield WrongParam(param.name, message, _correction(value, param), False)


def needs(workload: str, signature: Signature, missing: Iterable[str]) -> str:
    """The message for required params that are not given."""
    wanted = set(missing)
    listed = ", ".join(f"`{name}`" for name in signature.names if name in wanted)
    return f"{shorten(workload)} needs {listed} under `params`"


def takes(signature: Signature) -> str:
    """The hint for a name that is unknown or missing."""
    return f"its parameters are {', '.join(signature.names)}" if signature.params else "it has no parameters"


def _near_or_all(name: str, signature: Signature) -> str:
    """The hint for a name that is unknown: the one that may be meant, then all, if there are more."""
    near = did_you_mean(name, signature.names)
    if near is None:
        return takes(signature)
    return f"{near} The parameters are {', '.join(signature.names)}" if len(signature.names) > 1 else near


def refused(workload: str, reason: object) -> str:
    """The message for values that a built-in workload refuses, though each is of the right type."""
    return f"params of {workload}: {reason}"


def _correction(value: Any, param: Param) -> str | None:
    """How to write a value that a parameter doesn't take, where that can be guessed."""
    if param.choices:
        return did_you_mean(str(value), param.choices)
    return correction(value, *(each for name in param.types for each in TYPES[name][1]))


def _expected(param: Param) -> str:
    """What a parameter takes, in words."""
    if param.choices:
        return any_of(param.choices)
    return " or ".join(words for name, (words, _) in TYPES.items() if name in param.types)


def _is_allowed(value: Any, param: Param) -> bool:
    """A whole number is allowed for any number, but `true` for none, though Python counts it as one."""
    if not param.types:
        return True
    if param.choices and isinstance(value, str):
        return value in param.choices
    return any(type(value) in TYPES[name][1] for name in param.types)
