"""Splits, search, where time goes and timeline as one HTML file: the TensorBoard tab's own page and data.

The file asks for nothing: its one script, which holds all modules, is allowed by its hash, its data is
gzipped JSON, and its content-security policy forbids everything else. It opens from disk and can be mailed.
"""

import base64
import gzip
import hashlib
import json
import posixpath
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from graphlib import TopologicalSorter
from html import escape
from pathlib import Path
from typing import Any

import msgspec

from gpurun.launcher.compare.model import Comparison
from gpurun.launcher.compare.ranking import by_rank
from gpurun.launcher.errors import MachineError
from gpurun.launcher.rundir.control import write_in
from gpurun.launcher.rundir.files import RunDir, write_bytes
from gpurun.launcher.tensorboard_plugin.answers.runs import run_answer, steps_answer
from gpurun.launcher.tensorboard_plugin.logdir import Listed, own, read_host
from gpurun.launcher.tensorboard_plugin.timeline.answers import (
    Window,
    breakdown_answer,
    meta_answer,
    window_answer,
)
from gpurun.launcher.tensorboard_plugin.timeline.bands import ENTRY_LANES
from gpurun.launcher.tensorboard_plugin.timeline.format import Index
from gpurun.launcher.tensorboard_plugin.timeline.indexing import Indexes

STATIC = Path(__file__).parent / "static"
FILE_NAME = "report.html"
_OWN_IMPORT = re.compile(r"(?m)^(import .*?|\} )from '((?:\.\.?/)+[a-z_/]+\.js)';$")
_IMPORTED = re.compile(r"(?m)(?<=from ')gpurun[^']+(?=';$)")
_DOC_COMMENT = re.compile(r"(?ms)^ */\*\*(?:(?!\*/).)*\*/\n")
_START = """
const addresses = {};
for (const [name, text] of Object.entries(%s)) {
  const source = text.replace(/(?<=from ')gpurun[^']+(?=';$)/gm, (other) => addresses[other]);
  addresses[name] = URL.createObjectURL(new Blob([source], { type: 'text/javascript' }));
}
(await import(addresses['gpurun/report.js'])).renderReport();
"""
"""Gives each module an address, after those that it imports. Only a script that runs can make a `blob:`
address, so the policy may allow them: whatever gets into the page as markup has none."""


def write_html(
    comparison: Comparison, run: RunDir, with_host: bool = False, elsewhere: Path | None = None
) -> Path:
    """Writes `report.html` into the run directory, or a file that the user named, and returns its path.

    Args:
        with_host: also with what identifies the machine and its users.
        elsewhere: the file to write instead.

    Raises:
        MachineError: it can't be written.
    """
    page = render_html(comparison, run, with_host).encode()
    if elsewhere is not None:
        write_bytes(elsewhere, page)
        return elsewhere
    write_in(run, run.path / FILE_NAME, page)
    return run.path / FILE_NAME


def render_html(comparison: Comparison, run: RunDir, with_host: bool = False) -> str:
    """The whole file."""
    style = (STATIC / "style.css").read_text(encoding="utf-8")
    script = _START % json.dumps(module_sources(STATIC)).replace("<", "\\u003c")  # nothing in it ends it
    answers = report_data(comparison, run)
    shown = answers if with_host else without_host(answers, read_host(own(run)))
    data = gzip.compress(msgspec.json.encode(shown), compresslevel=9, mtime=0)
    return "\n".join(
        (
            "<!DOCTYPE html>",
            '<html lang="en">',
            '<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{_policy(style, script)}">',
            '<meta name="viewport" content="width=device-width">',
            f"<title>{escape(comparison.name)}</title>",
            f"<style>{style}</style>",
            f'<script type="text/plain" id="data">{base64.b64encode(data).decode()}</script>',
            f'<script type="module">{script}</script>',
            "</html>\n",
        )
    )


def module_sources(directory: Path) -> dict[str, str]:
    """Each module of the page by the name under which the others import it, after those that it imports.

    Types, which only `make lint` reads, are left out.
    """
    sources = {
        f"gpurun/{name}": _by_name(name, _DOC_COMMENT.sub("", path.read_text(encoding="utf-8")))
        for path in sorted(directory.rglob("*.js"))
        if (name := path.relative_to(directory).as_posix()) != "index.js"
    }
    imports = {name: _IMPORTED.findall(source) for name, source in sources.items()}
    return {name: sources[name] for name in TopologicalSorter(imports).static_order()}


def _by_name(module: str, source: str) -> str:
    """The source of `module` with its imports by the names of the map."""

    def named(found: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(posixpath.dirname(module), found[2]))
        return f"{found[1]}from 'gpurun/{path}';"

    return _OWN_IMPORT.sub(named, source)


def _policy(style: str, script: str) -> str:
    """Only what is in this file runs; nothing is loaded and nothing is sent."""
    return (
        f"default-src 'none'; script-src {_hash(script)} blob:; style-src {_hash(style)}; "
        "base-uri 'none'; form-action 'none'"
    )


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


WIDTH_PX = 4096
"""Finer than a screen, so that there is something to zoom into."""
MAX_LANES = 256
MAX_TIMELINE_BYTES = 24 << 20
"""Before compression, of all timelines together: about a tenth of it in the file."""

Answer = dict[str, Any]


def report_data(comparison: Comparison, run: RunDir) -> Answer:
    """Run, steps and timelines, as the page asks for them."""
    listed, ids = own(run), [variant.id for variant in comparison.variants]
    return {
        "run": {**run_answer(listed, comparison), "status": "done"},
        "steps": steps_answer(listed, ids)["variants"],
        "timelines": dict(_timelines(comparison, listed)),
    }


IDENTIFYING = frozenset(
    {"hostname", "host", "address", "interface", "uuid", "bus", "processes", "busy_with", "root"}
)
"""Keys in `host.json`, `code.json` and what is made from them: they identify the machine, or its users."""


def without_host(report: Answer, host: Mapping[str, Any]) -> Any:
    """The answers without the keys of `IDENTIFYING`, and without their values in any text.

    Raises:
        MachineError: a record of the run is nested too deeply.
    """
    try:
        return _without_host(msgspec.to_builtins(report), host)
    except RecursionError as error:
        raise MachineError("the run has a record that is nested more deeply than any of gpurun's") from error


def _without_host(answers: Any, host: Mapping[str, Any]) -> Any:
    known = {word for record in (host, answers) for word in _identities(record) if len(word) > 1}
    words = sorted(known, key=len, reverse=True)
    pattern = re.compile(r"(?<!\w)(" + "|".join(map(re.escape, words)) + r")(?!\w)") if words else None

    def cleaned(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: cleaned(_unless_identifying(key, item)) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [cleaned(item) for item in value]
        return pattern.sub("…", value) if pattern and isinstance(value, str) else value

    return cleaned(answers)


def comparison_without_host(comparison: Comparison, run: RunDir) -> Comparison:
    """The comparison without what identifies the machine or its users, as `without_host` does it."""
    known = {"comparison": replace(comparison, code=None), "identifying": comparison}
    cleaned = without_host(known, read_host(own(run)))
    return msgspec.convert(cleaned["comparison"], Comparison)


def _unless_identifying(key: str, value: Any) -> Any:
    """The value, or nothing in its place; the record of the host, a dictionary, identifies in parts only, and
    a number, such as the time that a replay without the `host` saves, doesn't."""
    if key not in IDENTIFYING or isinstance(value, dict | int | float):
        return value
    return [] if isinstance(value, (list, tuple)) else None


def _identities(value: Any, key: str = "") -> Iterator[str]:
    """Every text below a key of `IDENTIFYING`; of a process its name with its number, as notes show it."""
    if isinstance(value, dict) and key == "processes":
        yield f"{value.get('name') or 'process'} ({value.get('pid')})"
    elif isinstance(value, dict):
        for name, item in value.items():
            yield from _identities(item, name)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _identities(item, key)
    elif key in IDENTIFYING and isinstance(value, str):
        yield value
        short, dot, _ = value.partition(".")
        if dot and key in ("hostname", "host") and not short.isdecimal():
            yield short


def _timelines(comparison: Comparison, listed: Listed) -> Iterator[tuple[str, Answer]]:
    """The timelines of the variants in the order of the table, as many as there is room for."""
    ranked, others = by_rank(comparison)
    indexes, room = Indexes(), MAX_TIMELINE_BYTES
    for variant in (*ranked, *others):
        timeline = _timeline(indexes, listed, variant.id)
        if timeline is None:
            continue
        room -= len(msgspec.json.encode(timeline))
        if room < 0:
            return
        yield variant.id, timeline


def _timeline(indexes: Indexes, listed: Listed, variant: str) -> Answer | None:
    """A variant's timeline in one answer; `None` without a trace that can be read."""
    traces = listed.indexed(variant)
    if traces is None:
        return None
    indexes.get(traces)
    indexes.wait()
    index = indexes.get(traces)
    if not isinstance(index, Index):
        return None
    meta = meta_answer(index)
    found = [lane for rank in meta["ranks"] for lane in rank["lanes"]]
    # Where there are too many, what every rank's device did is worth more than all threads of some ranks.
    found.sort(key=lambda lane: lane["kind"] in ENTRY_LANES)
    lanes = tuple(lane["lane"] for lane in found)[:MAX_LANES]
    window = window_answer(index, Window(0, max(1, meta["end_ns"]), WIDTH_PX, lanes))
    return {
        "meta": _ready(_without(meta, lanes)),
        "window": _ready(window),
        "breakdown": _ready(breakdown_answer(index.header)),
    }


def _ready(answer: Mapping[str, Any]) -> Answer:
    return {"state": "ready", "problems": [], **answer}


def _without(meta: Mapping[str, Any], lanes: tuple[int, ...]) -> Answer:
    """Only the lanes that the file holds."""
    kept = set(lanes)
    ranks = [
        {**rank, "lanes": [lane for lane in rank["lanes"] if lane["lane"] in kept]} for rank in meta["ranks"]
    ]
    return {**meta, "ranks": [rank for rank in ranks if rank["lanes"]]}
