"""Public traces beside an independent reference: `corpus DIR`.

They are brought by hand, as DIR/OWNER/REPOSITORY/COMMIT/PATH, and no part of this repository. `reference` was
written from a description of the format alone. Figures have to be equal to the nanosecond, or `EXPLAINED`
says why not.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from benchmarks.timing import machine_facts, record, table
from benchmarks.traces.reference import Totals, totals
from gpurun.launcher.errors import TraceError
from gpurun.launcher.trace.analysis.digest import Digest, digest_file
from gpurun.launcher.trace.analysis.tables import MAX_NAMES
from gpurun.launcher.trace.kineto.demangle import demangled
from gpurun.launcher.trace.kineto.trace_file import ReadLimits

SUFFIXES = (".json", ".json.gz")
EXPLAINED: Mapping[str, str] = {
    "b200/eager_trace.json.gz": "torch's `multimem_all_reduce_kernel` is communication to gpurun; the "
    "description for the reference names NCCL's, RCCL's and MSCCL's kernels only",
}
"""Why a figure differs, by the end of the path of its trace."""
Figures = dict[str, int]


@dataclass(frozen=True)
class TraceOrigin:
    """Where a trace is from."""

    repository: str
    commit: str
    path: str


def main(words: Sequence[str]) -> None:
    """Reads all traces of a directory, and writes the section "Public traces"."""
    if len(words) != 1:
        raise SystemExit("name the directory of the traces: python -m benchmarks corpus DIR")
    directory, rows, facts = Path(words[0]), [], machine_facts()
    for path in sorted(each for each in directory.rglob("*") if each.name.endswith(SUFFIXES)):
        source = _source(path.relative_to(directory))
        outcome = _outcome(path)
        print(source.path, outcome, flush=True)
        checksum = sha256(path.read_bytes()).hexdigest()
        rows.append([source.repository, source.commit[:10], source.path, checksum, outcome])
    exact = sum(row[-1].startswith("exact") for row in rows)
    text = (
        f"{len(rows)} traces of {len({row[0] for row in rows})} repositories: {exact} are exact to the "
        "nanosecond in what is compared, the others have a reason. Compared are, of the busiest device, the "
        "number of kernels, span, compute, communication, copies, what of both is exposed, and idle time; "
        "time and count by kernel, and the own time on the CPU of `aten::` operators, where there are up to "
        f"{MAX_NAMES} names.\n\n"
    )
    record("Public traces", text + table(["repository", "commit", "path", "SHA-256", "outcome"], rows), facts)


def _source(path: Path) -> TraceOrigin:
    if len(path.parts) < 4:
        raise SystemExit(f"{path}: not below OWNER/REPOSITORY/COMMIT/")
    owner, name, commit, *rest = path.parts
    return TraceOrigin(f"{owner}/{name}", commit, "/".join(rest))


def _outcome(path: Path) -> str:
    """`exact`, or which figures differ."""
    try:
        expected = totals(path)
    except ValueError as error:
        return _refused(path, str(error))
    try:
        found = digest_file(path, None, frozenset(), ReadLimits())
    except TraceError as error:
        nothing = not expected.kernels and not expected.operators
        return f"exact: neither finds work ({expected.num_events} events)" if nothing else f"differs: {error}"
    differing = list(_differences(found, expected))
    if not differing:
        return f"exact: {expected.num_events:,} events on {', '.join(expected.device_names) or 'the CPU'}"
    why = next((why for end, why in EXPLAINED.items() if path.as_posix().endswith(end)), None)
    return f"explained: {why}" if why else "differs: " + "; ".join(differing)


def _refused(path: Path, reason: str) -> str:
    try:
        digest_file(path, None, frozenset(), ReadLimits())
    except TraceError:
        return f"exact: both refuse it ({reason})"
    return f"differs: the reference refuses it ({reason})"


def _differences(found: Digest, expected: Totals) -> Iterator[str]:
    """What is unequal."""
    if expected.kernels:
        ours, theirs = _of_device(found), _of_reference(expected)
        yield from (f"{name} {ours[name]} != {theirs[name]}" for name in theirs if ours[name] != theirs[name])
        kernels = {row.name: (row.count, row.device_ns) for row in found.names.kernels}
        named = _by_readable_name(expected)
        if kernels != named and len(named) <= MAX_NAMES:
            yield f"{len(kernels.items() ^ named.items())} kernels"
    operators = {row.name: row.host_ns for row in found.names.ops if row.name.startswith("aten::")}
    wanted = {name: ns for name, (_, ns) in expected.operators.items() if name.startswith("aten::")}
    if operators != wanted and len(wanted) <= MAX_NAMES:
        yield f"{len(operators.items() ^ wanted.items())} operators"


def _by_readable_name(expected: Totals) -> dict[str, tuple[int, int]]:
    counts: Counter[str] = Counter()
    times: Counter[str] = Counter()
    for name, (count, ns) in expected.kernels.items():
        counts[demangled(name)] += count
        times[demangled(name)] += ns
    return {name: (counts[name], times[name]) for name in counts}


def _of_device(found: Digest) -> Figures:
    measure = found.total.measure
    return {
        "kernels": found.total.num_kernels,
        "span": measure.span,
        "compute": measure.compute,
        "communication": measure.comm,
        "copies": measure.copy,
        "exposed communication": measure.exposed_comm.length_ns,
        "exposed copies": measure.exposed_copy,
        "idle": measure.idle,
    }


def _of_reference(expected: Totals) -> Figures:
    return {
        "kernels": expected.num_kernels,
        "span": expected.span_ns,
        "compute": expected.compute_ns,
        "communication": expected.comm_ns,
        "copies": expected.copy_ns,
        "exposed communication": expected.exposed_comm_ns,
        "exposed copies": expected.exposed_copy_ns,
        "idle": expected.idle_ns,
    }
