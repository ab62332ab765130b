"""The JSON Schema of a job file, for editors; its descriptions are the docstrings of the model's fields."""

import ast
import inspect
import itertools
from typing import Any

from pydantic import BaseModel

from launcher.spec import model
from launcher.spec.model import SECTIONS, JobSpec

DIALECT = "https://json-schema.org/draft/2020-12/schema"


def job_schema() -> dict[str, Any]:
    """JSON Schema (draft 2020-12) of a job file, with a description for every key."""
    schema = _without_null(JobSpec.model_json_schema(by_alias=True))
    docs = field_docs()
    _describe(JobSpec, schema, docs["JobSpec"])
    for section in SECTIONS.values():
        _describe(section, schema["$defs"][section.__name__], docs[section.__name__])
    return {"$schema": DIALECT, **schema}


def field_docs() -> dict[str, dict[str, str]]:
    """The docstring beneath every field, by class and field, each in one line."""
    tree = ast.parse(inspect.getsource(model))
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    return {item.name: _docs_of(item) for item in classes}


def _docs_of(item: ast.ClassDef) -> dict[str, str]:
    docs: dict[str, str] = {}
    for field, below in itertools.pairwise(item.body):
        if not (isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)):
            continue
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
            docs[field.target.id] = " ".join(str(below.value.value).split())
    return docs


def _describe(section: type[BaseModel], part: dict[str, Any], docs: dict[str, str]) -> None:
    for name, field in section.model_fields.items():
        key = field.alias or name
        part["properties"][key]["description"] = docs[name]
        if part["properties"][key].get("default") in ([], "job"):
            del part["properties"][key]["default"]  # stands for "nothing varies" and for the file's name


def _without_null(schema: Any) -> Any:
    """The schema without `null` as a choice: a key that is not meant is left out."""
    if isinstance(schema, list):
        return [_without_null(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    cleaned = {key: _without_null(value) for key, value in schema.items() if value is not None}
    choices = [choice for choice in cleaned.get("anyOf", []) if choice != {"type": "null"}]
    if len(choices) == 1:
        return {**{key: value for key, value in cleaned.items() if key != "anyOf"}, **choices[0]}
    return {**cleaned, "anyOf": choices} if choices else cleaned
