"""The routes: a small function each from a query, which is checked first, to plain data.

README.md says what they answer.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from gpurun.launcher.tensorboard_plugin.answers.live import LiveDevices, progress_answer
from gpurun.launcher.tensorboard_plugin.answers.operators import KINDS, operators_answer
from gpurun.launcher.tensorboard_plugin.answers.requested import (
    RequestedTables,
    TableRequest,
    first_table,
    tables_answer,
)
from gpurun.launcher.tensorboard_plugin.answers.runs import (
    run_answer,
    runs_answer,
    steps_answer,
    unopened,
    variant_ids,
)
from gpurun.launcher.tensorboard_plugin.answers.sentences import operators_said, shown_as
from gpurun.launcher.tensorboard_plugin.logdir import Listed, Listing, version
from gpurun.launcher.tensorboard_plugin.timeline.answers import (
    Window,
    breakdown_answer,
    entry_of,
    event_answer,
    meta_answer,
    search_answer,
    selection_answer,
    window_answer,
)
from gpurun.launcher.tensorboard_plugin.timeline.format import Header, Index, UnreadableFile
from gpurun.launcher.tensorboard_plugin.timeline.index_store import Traces
from gpurun.launcher.tensorboard_plugin.timeline.indexing import Broken, Indexes, Indexing, State
from gpurun.launcher.trace.model import TABLES, Table, TraceReport

MAX_NS = 1 << 53
"""Larger numbers the page's numbers can't hold."""
MIN_WIDTH_PX, MAX_WIDTH_PX = 16, 8192
MAX_LANES = 128
MAX_TEXT = 200
MAX_VARIANTS = 50
MAX_NAME = 4096


class RequestRefused(Exception):
    """A request that gets no answer; `code` is its HTTP status, the text one sentence for a person."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code


class QueryArguments(Protocol):
    """The part of werkzeug's multi-dictionary that is used here."""

    def get(self, key: str) -> str | None: ...

    def getlist(self, key: str) -> list[str]: ...


@dataclass(frozen=True)
class Query:
    """The parameters of a request.

    Every method raises `RequestRefused` where one is missing or can't be what it should be.
    """

    arguments: QueryArguments

    def name(self, key: str) -> str:
        """A name, to be looked up in a listing."""
        value = self.arguments.get(key)
        if not value or len(value) > MAX_NAME or "\0" in value:
            raise RequestRefused(400, f"`{key}` is missing or no name")
        return value

    def names(self, key: str) -> list[str]:
        values = self.arguments.getlist(key)
        if not values:
            raise RequestRefused(400, f"`{key}` is missing")
        if len(values) > MAX_VARIANTS:
            raise RequestRefused(413, f"at most {MAX_VARIANTS} of `{key}` at once")
        return values

    def flag(self, key: str) -> bool:
        return self.arguments.get(key) == "1"

    def text(self, key: str) -> str:
        value = self.arguments.get(key) or ""
        if not value or len(value) > MAX_TEXT:
            raise RequestRefused(400, f"`{key}` must have 1 to {MAX_TEXT} characters")
        return value

    def has(self, key: str) -> bool:
        return self.arguments.get(key) is not None

    def choice(self, key: str, options: Sequence[str]) -> str:
        """One of the options, the first by default."""
        value = self.arguments.get(key) or options[0]
        if value not in options:
            raise RequestRefused(400, f"`{key}` must be one of {', '.join(options)}")
        return value

    def whole(self, key: str, least: int, most: int, default: int | None = None) -> int:
        value = self.arguments.get(key)
        if value is None and default is not None:
            return default
        digits = (value or "").removeprefix("-")
        if not (digits.isascii() and digits.isdecimal() and len(digits) <= 17):
            raise RequestRefused(400, f"`{key}` must be a whole number")
        number = int(value or "")
        if not least <= number <= most:
            raise RequestRefused(400, f"`{key}` must lie between {least} and {most}")
        return number

    def one_of(self, key: str, numbers: Collection[int]) -> int | None:
        """One of these numbers, or `None` if the request has none."""
        if not self.has(key):
            return None
        number = self.whole(key, 0, MAX_NS)
        if number not in numbers:
            raise RequestRefused(404, f"there is no {key} {number}; the traces may have changed")
        return number

    def stretch(self) -> tuple[int, int]:
        """`from_ns` and `to_ns`, the first below the second."""
        start = self.whole("from_ns", -MAX_NS, MAX_NS)
        end = self.whole("to_ns", -MAX_NS, MAX_NS)
        if end <= start:
            raise RequestRefused(400, "`to_ns` must be after `from_ns`")
        return start, end

    def lanes(self, num_lanes: int, default_all: bool = False) -> tuple[int, ...]:
        """The lanes asked for, each once."""
        value = self.arguments.get("lanes")
        if value is None and default_all:
            return tuple(range(num_lanes))
        texts = value.split(",") if value and len(value) <= MAX_LANES * 8 else [""]
        if not all(text.isascii() and text.isdecimal() for text in texts):
            raise RequestRefused(400, "`lanes` must be numbers of lanes with commas between them")
        lanes = tuple(dict.fromkeys(map(int, texts)))
        if len(lanes) > MAX_LANES:
            raise RequestRefused(413, f"at most {MAX_LANES} lanes at once")
        if max(lanes) >= num_lanes:
            raise RequestRefused(404, f"there are only {num_lanes} lanes")
        return lanes


Answer = dict[str, Any]


@dataclass(frozen=True)
class TabServer:
    """The state that all requests share."""

    listing: Listing
    indexes: Indexes = field(default_factory=Indexes)
    devices: LiveDevices = field(default_factory=LiveDevices)
    tables: RequestedTables = field(default_factory=RequestedTables)

    def run(self, query: Query) -> Listed:
        """The run that the request names."""
        listed = self.listing.get(query.name("run"))
        if listed is None:
            raise RequestRefused(404, "no such run in this log directory; it may have been removed")
        return listed

    def traces(self, query: Query, key: str = "variant") -> Traces | None:
        """The traces of the variant that the request names; `None` if it has none."""
        listed = self.run(query)
        return listed.indexed(known(listed, query.name(key)))

    def index(self, query: Query, key: str = "variant") -> State | None:
        traces = self.traces(query, key)
        return None if traces is None else self.indexes.get(traces, query.flag("again"))


def known(listed: Listed, variant: str) -> str:
    """The id, if the run has a variant of that id."""
    if variant not in variant_ids(listed):
        raise RequestRefused(404, "this run has no such variant")
    return variant


def runs(server: TabServer, query: Query) -> Answer:
    return runs_answer(server.listing)


def run(server: TabServer, query: Query) -> Answer:
    return run_answer(server.run(query))


def steps(server: TabServer, query: Query) -> Answer:
    listed = server.run(query)
    return steps_answer(listed, [known(listed, variant) for variant in query.names("variant")])


def progress(server: TabServer, query: Query) -> Answer:
    return progress_answer(server.run(query), server.devices)


def breakdown(server: TabServer, query: Query) -> Answer:
    ours = server.run(query).kind == "gpurun"
    return with_index(server, query, lambda index: breakdown_answer(index.header, ours))


def operators(server: TabServer, query: Query) -> Answer:
    kind = KINDS[KINDS.index(query.choice("kind", KINDS))]
    against: Header | None = None
    if query.has("against"):
        other = server.index(query, "against")
        if not isinstance(other, Index):
            return state_answer(other)
        against = other.header
    ours = server.run(query).kind == "gpurun"

    def answer(index: Index) -> Answer:
        late = None if ours else index.header.straggler
        listed = server.run(query)
        shown = shown_as(listed, query.name("variant"))
        other = shown_as(listed, query.name("against")) if against else None
        slowest = late.rank if late else shown.slowest_rank
        found = operators_answer(index.header, against, kind, slowest, other.slowest_rank if other else None)
        found["is_straggler"] = late is not None and found["slowest_rank"] == late.rank
        said = operators_said(found, shown, other)
        return {**found, **said, "version": version(index.version, said)}

    return with_index(server, query, answer)


def tables(server: TabServer, query: Query) -> Answer:
    wanted = TABLES[TABLES.index(query.choice("table", TABLES))] if query.has("table") else None
    return with_index(server, query, lambda index: table_of(server, query, index, wanted))


def table_of(server: TabServer, query: Query, index: Index, wanted: Table | None) -> Answer:
    """The table that is wanted, by default the one to begin with, or how far it is."""
    name = wanted or first_table(index.header)
    is_compared = name == "operators" and query.has("against")

    def report(key: str, index: Index) -> TraceReport | Answer:
        """A report with the table, or how far it is. Two variants are compared with all ranks and steps."""
        traces = server.traces(query, key)
        rank = query.one_of("rank", {each.rank for each in index.header.ranks})
        mine = (each for each in index.header.ranks if rank in (None, each.rank))
        steps = {step.step for each in mine for step in each.steps}
        chosen = TableRequest(name, rank, query.one_of("step", steps))
        return made(server, traces, index, TableRequest(name, None, None) if is_compared else chosen)

    against: tuple[str, TraceReport] | None = None
    if is_compared:
        state = server.index(query, "against")
        other = report("against", state) if isinstance(state, Index) else state_answer(state)
        if not isinstance(other, TraceReport):
            return other
        against = (shown_as(server.run(query), query.name("against")).label, other)
    found = report("variant", index)
    if not isinstance(found, TraceReport):
        return found
    label = shown_as(server.run(query), query.name("variant")).label
    return tables_answer(index.header, name, found, label, against)


def made(
    server: TabServer, traces: Traces | None, index: Index, wanted: TableRequest
) -> TraceReport | Answer:
    """A report with the table that is wanted, or how far it is."""
    if traces is None:
        return state_answer(None)
    found = server.tables.get(traces, index, wanted)
    if isinstance(found, str):
        return state_answer(Broken((UnreadableFile(traces.directory.name, None, found),)))
    return found or {"state": "building", "problems": []}


def meta(server: TabServer, query: Query) -> Answer:
    return with_index(server, query, meta_answer)


def window(server: TabServer, query: Query) -> Answer:
    from_ns, to_ns = query.stretch()
    width_px = query.whole("width_px", MIN_WIDTH_PX, MAX_WIDTH_PX)

    def answer(index: Index) -> Answer:
        lanes = query.lanes(len(index.header.lanes))
        return window_answer(index, Window(from_ns, to_ns, width_px, lanes))

    return with_index(server, query, answer)


def event(server: TabServer, query: Query) -> Answer:
    def answer(index: Index) -> Answer:
        last = index.header.num_entries - 1
        if query.has("collective"):
            number = query.whole("collective", 0, MAX_NS)
            entry = entry_of(index, number, query.whole("rank", 0, MAX_NS))
        else:
            number = query.whole("id", 0, MAX_NS)
            entry = number if number <= last else None
        if entry is None:
            raise RequestRefused(404, "no such event; the trace may have changed")
        return event_answer(index, entry)

    return with_index(server, query, answer)


def search(server: TabServer, query: Query) -> Answer:
    text, after_ns = query.text("q"), query.whole("after_ns", -MAX_NS, MAX_NS, -MAX_NS)
    return with_index(server, query, lambda index: search_answer(index, text, after_ns))


def selection(server: TabServer, query: Query) -> Answer:
    start, end = query.stretch()

    def answer(index: Index) -> Answer:
        lanes = query.lanes(len(index.header.lanes), default_all=True)
        return selection_answer(index, start, end, lanes)

    return with_index(server, query, answer)


def with_index(server: TabServer, query: Query, answer: Callable[[Index], Answer]) -> Answer:
    """The answer if the index is ready, else how far it is."""
    state = server.index(query)
    if not isinstance(state, Index):
        return state_answer(state)
    problems = [*state.header.problems, *unopened(server.run(query), query.name("variant"))]
    return {"state": "ready", "problems": problems, "version": state.version, **answer(state)}


def state_answer(state: State | None) -> Answer:
    """How far an index is that isn't ready."""
    if isinstance(state, Indexing):
        return {
            "state": "indexing",
            "problems": [],
            "done_bytes": state.done_bytes,
            "total_bytes": state.total_bytes,
            "seconds_left": state.seconds_left,
        }
    if isinstance(state, Broken):
        return {"state": "broken", "problems": state.problems}
    return {"state": "none", "problems": []}


ROUTES: Mapping[str, Callable[[TabServer, Query], Answer]] = {
    "/runs": runs,
    "/run": run,
    "/steps": steps,
    "/progress": progress,
    "/breakdown": breakdown,
    "/operators": operators,
    "/tables": tables,
    "/timeline/meta": meta,
    "/timeline/window": window,
    "/timeline/event": event,
    "/timeline/search": search,
    "/timeline/selection": selection,
}
