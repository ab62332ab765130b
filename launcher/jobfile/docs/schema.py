"""The JSON Schema of a job file, for editors; its descriptions are the docstrings of the model's fields."""

import ast
import inspect
import itertools
from typing import Any

from gpurun.launcher.jobfile import model, settings
from gpurun.launcher.jobfile.kinds import KIND_KEYS
from gpurun.launcher.jobfile.model import SECTIONS, JobSpec
from gpurun.launcher.jobfile.section import Key, Section
from gpurun.launcher.jobfile.settings import SETTINGS

DIALECT = "https://json-schema.org/draft/2020-12/schema"


def job_schema() -> dict[str, Any]:
    """JSON Schema (draft 2020-12) of a job file, with a description for every key."""
    docs = field_docs()
    parts = {part.__name__: _section(part, docs[part.__name__]) for part in SECTIONS.values()}
    one_of = {"oneOf": [{"required": [key]} for key in KIND_KEYS]}
    return {"$schema": DIALECT, "$defs": parts, **_section(JobSpec, docs["JobSpec"]), **one_of}


def _section(part: type[Section], docs: dict[str, str]) -> dict[str, Any]:
    defaults = part()
    properties = {
        name: {
            **_kind(key),
            **_default(name, getattr(defaults, key.field)),
            "description": docs[key.field],
        }
        for name, key in part.keys.items()
    }
    return {
        "title": part.__name__,
        "description": part.__doc__,
        "type": "object",
        "properties": properties,
        "additionalProperties": False,
    }


def _kind(key: Key) -> dict[str, Any]:
    """A key that may be empty is one that can be left out as well: `null` isn't offered."""
    if isinstance(key.kind, type):
        return {"$ref": f"#/$defs/{key.kind.__name__}"}
    return dict(key.kind.schema)


def _default(name: str, value: Any) -> dict[str, Any]:
    """The value of a key that is left out; nothing where that is "none", or the file's name."""
    if name == "name" or not isinstance(value, str | int | float):
        return {}
    return {"default": _duration(value) if isinstance(value, float) else value}


def _duration(seconds: float) -> str:
    return f"{seconds:g}s" if seconds % 60 else f"{seconds / 60:g}m"


def field_docs() -> dict[str, dict[str, str]]:
    """What every field means, by class and field, each in one line.

    It is the docstring beneath the field; of settings their metadata says it for the other sections.
    """
    sources = (inspect.getsource(module) for module in (settings, model))
    classes = [
        node for source in sources for node in ast.parse(source).body if isinstance(node, ast.ClassDef)
    ]
    docs = {item.name: _docs_of(item) for item in classes}
    docs["JobSpec"] |= docs["Settings"] | {name: one.about for name, one in SETTINGS.items() if one.about}
    docs["Compare"] = {name: one.compare for name, one in SETTINGS.items()}
    docs["Baseline"] = {name: one.baseline for name, one in SETTINGS.items()}
    return docs


def _docs_of(item: ast.ClassDef) -> dict[str, str]:
    docs: dict[str, str] = {}
    for field, below in itertools.pairwise(item.body):
        if not (isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)):
            continue
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
            docs[field.target.id] = " ".join(str(below.value.value).split())
    return docs
