"""Damaged trace files: where the damage is, and what a slip of a writer costs."""

import gzip
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpurun.launcher.errors import TraceError
from gpurun.launcher.trace.analysis.analyse import analyse_paths
from gpurun.launcher.trace.kineto import trace_file
from gpurun.launcher.trace.kineto.read_trace import read_trace
from tests.unit.trace.trace_files import kernel, launch, step, write
from tests.wording import Wording


def message(path: Path) -> str:
    with pytest.raises(TraceError) as caught:
        analyse_paths([path])
    return str(caught.value)


@pytest.mark.parametrize("block_bytes", [100, trace_file.BLOCK_BYTES])
@pytest.mark.parametrize("header_last", [False, True])
def test_damage_is_reported_where_it_is_and_not_where_the_file_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block_bytes: int, header_last: bool
) -> None:
    """Every bracket, quote, colon and comma of the third of ten events in turn is lost, or doubled."""
    monkeypatch.setattr(trace_file, "BLOCK_BYTES", block_bytes)
    events = [json.dumps(kernel("k", 10 * i, 1)).encode() for i in range(10)]
    header = b'"device": {"name": "x"}'
    head, tail = (b"{", b"," + header + b"}") if header_last else (b"{" + header + b",", b"}")
    text = head + b'"traceEvents": [' + b", ".join(events) + b"]" + tail
    begin = text.index(events[2])
    path = tmp_path / "t.json"
    for at in range(begin, begin + len(events[2])):
        for wrong in (b"", text[at : at + 1] * 2):
            if text[at : at + 1] in b'{}":,':
                path.write_bytes(text[:at] + wrong + text[at + 1 :])
                found = re.search(r"damaged at byte (\d+)", message(path))
                assert found is not None, text[at - 9 : at + 9]
                assert begin - 2 <= int(found[1]) <= begin + len(events[2]) + len(wrong) + 4


def test_damage_around_the_events_is_reported_where_it_is(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    for text, place in (
        ('{"a" 1, "traceEvents": []}', 5),
        ('{"traceEvents": [] , "b": x}', 26),
        ('{"a: 1, "b": 2, "c": [3]}', 9),
        ('\ufeff{"a" 1, "traceEvents": []}', 8),
    ):
        path.write_text(text)
        assert f"damaged at byte {place}" in message(path)


def test_half_a_surrogate_pair_costs_only_its_letter(tmp_path: Path) -> None:
    events = json.dumps([kernel(name, 10 * i, 1) for i, name in enumerate(("a1b", "a2b", "a3b", "a4b", "c"))])
    for mark, escape in (("a1", r"\ud800"), ("a2", r"\uDC00"), ("a3", r"\ud83d\ude00"), ("a4", r"\\ud800")):
        events = events.replace(mark, escape)
    path = tmp_path / "t.json"
    path.write_text(f'{{"by": "\\udbff", "traceEvents": {events}}}')
    trace = read_trace(path)
    assert trace.gpu_names == ("\ufffdb", "\U0001f600b", "\\ud800b", "c")
    assert not trace.skipped


def test_numbers_in_quotes_are_numbers(tmp_path: Path) -> None:
    def analysed(name: str, spell: Callable[[int], Any]) -> tuple[Any, ...]:
        sizes = {"dtype": "Float", **{key: spell(4) for key in ("In msg nelems", "Group size", "Seq")}}
        ring = kernel("ncclDevKernel_AllReduce_RING", 30, 9, spell(3), **sizes)
        events = [step(1, 0, 9), launch(1, 1, spell(2)), kernel("k", 20, 5, spell(2)), ring]
        report = analyse_paths([write(tmp_path / name, events)])
        return report.ranks[0].steps, report.collectives, report.ranks[0].total

    assert analysed("text.json", str) == analysed("numbers.json", int)
    assert analysed("text.json", str)[0][0].num_kernels == 1
    nonsense = [launch(1, 1, "²"), kernel("k", 20, 5, "9" * 5000), kernel("k", 30, 5, "x")]
    assert analyse_paths([write(tmp_path / "x.json", nonsense)]).ranks[0].total.num_kernels == 2


def test_gigabytes_of_zeros_after_a_trace_are_not_read(tmp_path: Path) -> None:
    """`gzip` would look at each of them; a file without blocks on the disk is that long at no cost."""
    path = write(tmp_path / "rank0.json.gz", [step(1, 0, 10), launch(1, 2, 1), kernel("k", 2, 5, 1)])
    packed = path.read_bytes()
    whole = analyse_paths([path])
    path.write_bytes(packed + b"\0" * 1000)
    assert analyse_paths([path]) == whole
    os.truncate(path, 20 << 30)
    assert analyse_paths([path]).ranks == whole.ranks


def test_a_gzip_file_may_have_several_members(tmp_path: Path, wording: Wording) -> None:
    path = write(tmp_path / "rank0.json", [step(1, 0, 10), launch(1, 2, 1), kernel("k", 2, 5, 1)])
    whole, text = analyse_paths([path]).ranks, path.read_bytes()
    path.write_bytes(gzip.compress(text[:70]) + b"\0" * 9 + gzip.compress(text[70:]))
    assert analyse_paths([path]).ranks == whole
    path.write_bytes(gzip.compress(text[:70]) + b"no member")
    wording(message(path))
