"""`docs/job-file.md`, made from the schema, so that it can't disagree with the program."""

import json
from collections.abc import Iterator
from typing import Any

from gpurun.launcher.jobfile.docs.schema import job_schema, job_template
from gpurun.launcher.jobfile.values import DEVICE_PATTERN, RATIO_PATTERN

_HEAD = """\
# The job file

A job file is YAML 1.2: `3:1` and `no` are text, `1e-3` is a number. Unknown and duplicate keys are mistakes,
and all mistakes of a file are reported at once, each with its line and column. `gpurun schema` prints the
JSON Schema that this page is made from; `--set key.path=value` overrides any key on the command line.

`gpurun init` writes this one:
"""

_COMBINATIONS = """\
A combination that cannot be (a split for two devices on one, `single` on two) is left out, and `gpurun check`
lists it with the reason; a split that fits none of the job's device counts is a mistake. Splits that come to
the same samples are measured once. `even` may give fewer parts than there are devices, as `torch.chunk` does:
9 over 4 devices is 3, 3, 3, and runs on three.
"""

_NOTES = {"compare": _COMBINATIONS}


def job_reference() -> str:
    """Markdown: every key of a job file with its type, default and meaning."""
    schema = job_schema()
    parts = [_HEAD, f"```yaml\n{job_template()}```\n", "## Keys\n", _table(schema)]
    for key, section in _sections(schema):
        parts += [f"## `{key}`\n", section["description"] + "\n", _table(section)]
        parts += [_NOTES[key]] if key in _NOTES else []
    return "\n".join(parts)


def _sections(schema: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for key, value in schema["properties"].items():
        if "$ref" in value:
            yield key, schema["$defs"][value["$ref"].rpartition("/")[2]]


def _table(section: dict[str, Any]) -> str:
    required = section.get("required", [])
    rows = [_row(key, value, key in required) for key, value in section["properties"].items()]
    return "\n".join(["| key | value | default | meaning |", "|---|---|---|---|", *rows, ""])


def _row(key: str, value: dict[str, Any], is_required: bool) -> str:
    default = "**required**" if is_required else _default(value)
    return f"| `{key}` | {_kind(value)} | {default} | {value['description']} |"


def _default(value: dict[str, Any]) -> str:
    if "default" not in value:
        return ""
    default = value["default"]
    return f"`{default}`" if isinstance(default, str) else f"`{json.dumps(default)}`"


def _kind(value: dict[str, Any]) -> str:
    """The type of a value in words: `ddp` or `dp`, a whole number from 1, a list of these."""
    if "$ref" in value:
        return f"[mapping](#{value['$ref'].rpartition('/')[2].lower()})"
    if "anyOf" in value:
        return ", or ".join(_kind(choice) for choice in value["anyOf"])
    if "enum" in value:
        return ", ".join(f"`{word}`" for word in value["enum"])
    if "const" in value:
        return f"`{value['const']}`"
    if value["type"] == "array":
        return f"list of: {_kind(value['items'])}"
    if value["type"] == "integer":
        return _whole_number(value)
    if isinstance(value["type"], list):
        return " or ".join("text" if kind == "string" else kind for kind in value["type"])
    return _EXAMPLES.get(value.get("pattern", ""), _WORDS[value["type"]])


def _whole_number(value: dict[str, Any]) -> str:
    highest = value.get("maximum", 2**31)
    return f"whole number from {value['minimum']}" + (f" to {highest:,}" if highest <= 1_000_000 else "")


_WORDS = {"number": "seconds", "boolean": "`true`, `false`", "object": "mapping", "string": "text"}

_EXAMPLES = {
    "^cpu:[0-9]+$": "`cpu:N`",
    DEVICE_PATTERN: "`cuda:i`, `GPU-…`, `MIG-…`, `cpu:i`, `cpu`",
    RATIO_PATTERN: 'a ratio (`"3:1"`)',
    r"^[0-9]+(\.[0-9]+)? ?(s|m|h)$": "`90s`, `10m`, `1h`",
}
"""How the schema's patterns look in practice."""
