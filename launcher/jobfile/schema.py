"""A job file's keys: their JSON Schema for editors, the file that `gpurun init` writes, and their reference.

The descriptions in the schema are the docstrings of the model's fields.
"""

import ast
import inspect
import itertools
import json
import re
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any

from gpurun.launcher.jobfile import model, settings
from gpurun.launcher.jobfile.kinds import KIND_KEYS
from gpurun.launcher.jobfile.model import SECTIONS, JobSpec
from gpurun.launcher.jobfile.section import Key, Section
from gpurun.launcher.jobfile.settings import SETTINGS
from gpurun.launcher.jobfile.values import DEVICE_PATTERN, NODES_PATTERN, RATIO_PATTERN
from gpurun.launcher.rundir import improvement
from gpurun.launcher.strategies import IN_JOBS
from gpurun.launcher.units import GIB, format_count

DIALECT = "https://json-schema.org/draft/2020-12/schema"
SCHEMA_FILE = "gpurun.schema.json"
"""The file that the first line names, next to the job file."""


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
            **_default(name, key.field, getattr(defaults, key.field)),
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


def _default(name: str, field: str, value: Any) -> dict[str, Any]:
    """The value of a key that is left out; nothing where that is "none", or the file's name."""
    if name == "name" or not isinstance(value, str | int | float):
        return {}
    if isinstance(value, int) and field.endswith("_bytes"):
        return {"default": f"{value / GIB:g} GiB"}
    return {"default": _duration(value) if isinstance(value, float) else value}


def _duration(seconds: float) -> str:
    return f"{seconds:g}s" if seconds % 60 else f"{seconds / 60:g}m"


def field_docs() -> dict[str, dict[str, str]]:
    """The meaning of every field, by class and field, each in one line.

    It is the docstring beneath the field; of settings their metadata says it for the other sections.
    """
    docs = docs_of(settings, model)
    docs["JobSpec"] |= docs["Settings"] | {
        name: setting.about for name, setting in SETTINGS.items() if setting.about
    }
    docs["Compare"] = {name: setting.compare for name, setting in SETTINGS.items()}
    docs["Baseline"] = {name: setting.baseline for name, setting in SETTINGS.items()}
    return docs


def docs_of(*modules: ModuleType) -> dict[str, dict[str, str]]:
    """The docstrings beneath the fields of the modules' classes, by class and field, each in one line."""
    nodes = (node for module in modules for node in ast.parse(inspect.getsource(module)).body)
    return {item.name: _docs_of(item) for item in nodes if isinstance(item, ast.ClassDef)}


def improvement_schema() -> dict[str, Any]:
    """JSON Schema of what `gpurun improve --json` prints, with a description where a name doesn't say it."""
    import msgspec

    (whole,), parts = msgspec.json.schema_components([improvement.Improvement], ref_template="#/$defs/{name}")
    docs = docs_of(improvement)
    for name, part in parts.items():
        for field, value in part["properties"].items():
            if text := docs[name].get(field):
                part["properties"][field] = {**value, "description": text.replace("`None`", "`null`")}
    return {
        "$schema": DIALECT,
        "$defs": parts,
        "type": "object",
        "properties": {"improve": whole},
        "required": ["improve"],
    }


def _docs_of(item: ast.ClassDef) -> dict[str, str]:
    docs: dict[str, str] = {}
    for field, below in itertools.pairwise(item.body):
        if not (isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)):
            continue
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
            docs[field.target.id] = " ".join(str(below.value.value).split())
    return docs


def job_template(workload: str | None = None, params: Sequence[str] = ()) -> str:
    """A job that runs anywhere, with the other keys as comments.

    Args:
        workload: that it trains; by default a small built-in.
        params: the parameters that this one takes.
    """
    text = _TEMPLATE.replace("STRATEGIES", " | ".join(IN_JOBS)).replace("SCHEMA", SCHEMA_FILE)
    if workload is None:
        return text
    taken = f"; it takes {', '.join(params)}" if params else ""
    name = workload if re.fullmatch(r"[\w./:-]+", workload) else json.dumps(workload, ensure_ascii=False)
    own = f"workload: {name}\nparams: {{}}                 # arguments of its function, by name{taken}\n"
    return f"{text[: text.index('workload:')]}{own}{text[text.index('devices:') :]}"


_TEMPLATE = """\
# yaml-language-server: $schema=SCHEMA
# A job for gpurun. `gpurun check FILE` prints its plan, `gpurun FILE` runs it.
# An editor with support for YAML completes and explains all keys, by the schema in the first line.

workload: gpt              # `gpurun workloads` lists more; your own: train.py:build or package.module:build
params: {layers: 2, width: 128}  # arguments of the workload's function, by name; {preset: 124M}: GPT-2 small
devices: auto              # all GPUs, or two CPU devices; cpu:4 | cuda | [cuda:0, cuda:1]
global_batch: 64           # samples per optimizer step, over all devices
precision: fp32            # fp64 | fp32 | tf32 | bf16 | fp16

compare:                   # every combination of these is measured
  strategy: [ddp, dp]      # STRATEGIES
  split:                   # samples per device
    - even                 # as torch.chunk cuts the batch
    # - [48, 16]           # one number per device; must add up to global_batch
    # - "3:1"              # in this ratio
    # - balanced           # the best split for these devices, found by measuring
  # device_count: [1, 2]   # the first ones of `devices`
  # params: [{}, {}]       # merged into the params above

# baseline: {split: even}  # what the others are compared with; by default the first variant

until: decided             # launches are repeated until the fastest variant is known …
budget: 3m                 # … at most for this long
# wait_for_quiet: 30s      # the most that each launch waits for other programs to leave the cores
# steps: {rounds: 28, launches: 6}  # or instead a fixed size: 200 ms a round and variant, on GPUs 1 s
profile: {steps: 3}        # a trace per variant and rank, after the timed steps; 0 takes none
timeout: 10m               # per variant
# hang_timeout: 2m         # end a launch that completes no step for this long
# restarts: 2              # after transient failures: signals, lost connections, hangs
"""


_HEAD = """\
# The job file

A job file is YAML 1.2: `3:1` and `no` are text, `1e-3` is a number. Unknown and duplicate keys are mistakes,
and all mistakes of a file are reported at once, each with its line and column. `gpurun schema` prints the
JSON Schema that this page is made from; `--set key.path=value` overrides any key on the command line.

`gpurun init` writes this one:
"""

_COMBINATIONS = """\
A combination that can't be run (a split for two devices on one, `single` on two) is left out, and
`gpurun check` lists it with the reason; a split that fits none of the job's device counts is a mistake.
Splits that come to the same samples are measured once. `even` may give fewer parts than there are devices, as
`torch.chunk` does: 9 over 4 devices is 3, 3, 3, and runs on three.
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
    rows = [_row(key, value) for key, value in section["properties"].items()]
    return "\n".join(["| key | value | default | meaning |", "|---|---|---|---|", *rows, ""])


def _row(key: str, value: dict[str, Any]) -> str:
    return f"| `{key}` | {_kind_text(value)} | {_default_text(value)} | {value['description']} |"


def _default_text(value: dict[str, Any]) -> str:
    if "default" not in value:
        return ""
    default = value["default"]
    return f"`{default}`" if isinstance(default, str) else f"`{json.dumps(default)}`"


def _kind_text(value: dict[str, Any]) -> str:
    """The type of a value in words: `ddp` or `dp`, a whole number from 1, a list of these."""
    if "$ref" in value:
        return f"[mapping](#{value['$ref'].rpartition('/')[2].lower()})"
    if "anyOf" in value:
        return ", or ".join(_kind_text(choice) for choice in value["anyOf"])
    if "enum" in value:
        return ", ".join(f"`{word}`" for word in value["enum"])
    if "const" in value:
        return f"`{value['const']}`"
    if value["type"] == "array":
        return f"list of: {_kind_text(value['items'])}"
    if value["type"] == "integer":
        return _whole_number(value)
    if isinstance(value["type"], list):
        return " or ".join("text" if kind == "string" else kind for kind in value["type"])
    return _EXAMPLES.get(value.get("pattern", ""), _WORDS[value["type"]])


def _whole_number(value: dict[str, Any]) -> str:
    highest = value.get("maximum", 2**31)
    return f"whole number from {format_count(value['minimum'])}" + (
        f" to {format_count(highest)}" if highest <= 1_000_000 else ""
    )


_WORDS = {"number": "seconds", "boolean": "`true`, `false`", "object": "mapping", "string": "text"}

_EXAMPLES = {
    "^cpu:[0-9]+$": "`cpu:N`",
    DEVICE_PATTERN: "`cuda:i`, `GPU-…`, `MIG-…`, `cpu:i`, `cpu`",
    NODES_PATTERN: "a range (`2..4`)",
    RATIO_PATTERN: 'a ratio (`"3:1"`)',
    r"^[0-9]+(\.[0-9]+)? ?(s|m|h)$": "`90s`, `10m`, `1h`",
    r"^[0-9]+(\.[0-9]+)? ?(MiB|GiB)$": "`500 MiB`, `4 GiB`",
}
"""How the schema's patterns look in practice."""
