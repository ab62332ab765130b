"""Calls in users' sources get other arguments; the diff is one that git takes; no other file is touched."""

import ast
import builtins
import errno
import io
import os
import re
import stat
import subprocess
import sys
import tokenize
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpurun.launcher.errors import MachineError, SpecError
from gpurun.launcher.improve.rewrite import diff_text, line_to_write, lost_options, rewritten, write_changes
from gpurun.launcher.rundir.improvement import CallChange

FILE = Path("/project/train.py")
DDP_PARAMETERS = ("module", "device_ids", "output_device", "dim", "broadcast_buffers")
LOADER_PARAMETERS = ("dataset", "batch_size", "shuffle", "sampler", "batch_sampler", "num_workers")


def edit(line: int, call: str = "DataLoader", before: str = "", **arguments: object) -> CallChange:
    parameters = {"DataLoader": LOADER_PARAMETERS, "DistributedDataParallel": DDP_PARAMETERS}
    return CallChange(FILE.name, line, call, arguments, parameters.get(call, ("params",)), before)


def changed(source: str, *edits: CallChange) -> str:
    new, left = rewritten(source.encode(), edits)
    assert left == ()
    return new.decode()


@dataclass(frozen=True)
class Case:
    source: str
    edit: CallChange
    expected: str
    is_run: bool = field(default=True, kw_only=True)
    """Whether the statements run with stubs for all names, so that the line can be compared."""


W4 = edit(1, num_workers=4)
COMPILED = edit(1, "DistributedDataParallel", before="{0}.compile()")
AFTER = replace(COMPILED, after="{0}.module.compile()")
HOOK = replace(COMPILED, before="", after="import hooks\n{0}.register(hooks)")
CASES = {
    "moved to its device within the call": Case(
        "m = DistributedDataParallel(net.to(rank), [rank])\n",
        AFTER,
        "net.compile()\nm = DistributedDataParallel(net.to(rank), [rank])\n",
    ),
    "moved twice": Case(
        "m = DistributedDataParallel(self.net.float().cuda(0))\n",
        AFTER,
        "self.net.compile()\nm = DistributedDataParallel(self.net.float().cuda(0))\n",
    ),
    "made within the call": Case(
        "if rank:\n    self.m = DistributedDataParallel(Net().to(rank))  # sync\n    run()\n",
        replace(AFTER, line=2),
        "if rank:\n    self.m = DistributedDataParallel(Net().to(rank))  # sync\n"
        "    self.m.module.compile()\n    run()\n",
    ),
    "made within the last line": Case(
        "m = DistributedDataParallel(\r\n    Net()\r\n)",
        AFTER,
        "m = DistributedDataParallel(\r\n    Net()\r\n)\r\nm.module.compile()",
    ),
    "two statements after it": Case(
        "m = DistributedDataParallel(net)\n",
        HOOK,
        "m = DistributedDataParallel(net)\nimport hooks\nm.register(hooks)\n",
        is_run=False,
    ),
    "one line": Case("x = DataLoader(ds)\n", W4, "x = DataLoader(ds, num_workers=4)\n"),
    "no final newline": Case("x = DataLoader(ds)", W4, "x = DataLoader(ds, num_workers=4)"),
    "no argument": Case("x = DataLoader()\n", W4, "x = DataLoader(num_workers=4)\n"),
    "no argument, a comment": Case(
        "x = DataLoader(  # later\n)\n", W4, "x = DataLoader(num_workers=4  # later\n)\n"
    ),
    "replaced": Case("x = DataLoader(ds, num_workers=0)\n", W4, "x = DataLoader(ds, num_workers=4)\n"),
    "replaced where it stands, spaces kept": Case(
        "x = DataLoader( ds, num_workers = (2 *\n    n), shuffle = True )\n",
        W4,
        "x = DataLoader( ds, num_workers = (4), shuffle = True )\n",
    ),
    "passed by position": Case(
        "x = DataLoader(ds, 8, True, None, None, 0)\n", W4, "x = DataLoader(ds, 8, True, None, None, 4)\n"
    ),
    "by position before stars": Case(
        "x = DataLoader(ds, 8, *[])\n", edit(1, batch_size=16), "x = DataLoader(ds, 16, *[])\n"
    ),
    "two keywords": Case(
        "x = DataLoader(ds, num_workers=0)\n",
        edit(1, persistent_workers=True, num_workers=4, prefetch_factor=4),
        "x = DataLoader(ds, num_workers=4, persistent_workers=True, prefetch_factor=4)\n",
    ),
    "below a tab, in a file that also has spaces": Case(
        f"def f():\n    pass\nif 1:\n\tx = DataLoader(ds, {'a' * 70}=True)\n",
        replace(W4, line=4),
        f"def f():\n    pass\nif 1:\n\tx = DataLoader(\n\t\tds, {'a' * 70}=True, num_workers=4\n\t)\n",
    ),
    "trailing comma": Case("x = DataLoader(ds,)\n", W4, "x = DataLoader(ds, num_workers=4,)\n"),
    "comment behind": Case(
        "x = DataLoader(ds)  # ) a, comment\n", W4, "x = DataLoader(ds, num_workers=4)  # ) a, comment\n"
    ),
    "parentheses around the last": Case(
        "x = DataLoader((ds))\n", W4, "x = DataLoader((ds), num_workers=4)\n"
    ),
    "parentheses around the name": Case(
        "x = (DataLoader)(ds)\n",
        edit(1, "DataLoader", num_workers=4),
        "x = (DataLoader)(ds, num_workers=4)\n",
    ),
    "one argument per line": Case(
        "x = DataLoader(\n    ds,\n    batch_size=8,\n)\n",
        W4,
        "x = DataLoader(\n    ds,\n    batch_size=8,\n    num_workers=4,\n)\n",
    ),
    "one argument per line, comments": Case(
        "x = DataLoader(  # (\n    ds,  # the data, all\n    shuffle=True,  # )\n    # pin_memory=True,\n)\n",
        edit(1, num_workers=4, persistent_workers=True),
        "x = DataLoader(  # (\n    ds,  # the data, all\n    shuffle=True,  # )\n    num_workers=4,\n"
        "    persistent_workers=True,\n    # pin_memory=True,\n)\n",
    ),
    "one argument per line, no comma": Case(
        "x = DataLoader(\n    ds,\n    shuffle=True  # often\n)\n",
        W4,
        "x = DataLoader(\n    ds,\n    shuffle=True,  # often\n    num_workers=4,\n)\n",
    ),
    "aligned with the parenthesis": Case(
        "x = DataLoader(ds,\n               shuffle=True)\n",
        W4,
        "x = DataLoader(ds,\n               shuffle=True,\n               num_workers=4)\n",
    ),
    "aligned, closed behind a comma": Case(
        "x = DataLoader(ds,\n               shuffle=True,)\n",
        W4,
        "x = DataLoader(ds,\n               shuffle=True,\n               num_workers=4,)\n",
    ),
    "several arguments per line": Case(
        "x = DataLoader(\n    ds, batch_size=8, shuffle=True\n)\n",
        W4,
        "x = DataLoader(\n    ds, batch_size=8, shuffle=True, num_workers=4\n)\n",
    ),
    "tabs": Case(
        "if True:\n\tx = DataLoader(\n\t\tds,\n\t)\n",
        edit(2, num_workers=4),
        "if True:\n\tx = DataLoader(\n\t\tds,\n\t\tnum_workers=4,\n\t)\n",
    ),
    "a last argument of several lines": Case(
        "x = DataLoader(\n    ds,\n    collate_fn=lambda b: [\n        c for c in b\n    ],\n)\n",
        W4,
        "x = DataLoader(\n    ds,\n    collate_fn=lambda b: [\n        c for c in b\n    ],\n"
        "    num_workers=4,\n)\n",
    ),
    "an argument that hugs": Case(
        "x = DataLoader(ds, sampler=Sampler(\n    ds, n\n))\n",
        W4,
        "x = DataLoader(ds, sampler=Sampler(\n    ds, n\n), num_workers=4)\n",
    ),
    "a long line is broken": Case(
        "if True:\n  loader = DataLoader(dataset, batch_size=batch_size, shuffle=True, "
        "collate_fn=collate)  # x\n",
        edit(2, num_workers=4),
        "if True:\n  loader = DataLoader(\n    dataset, batch_size=batch_size, shuffle=True, "
        "collate_fn=collate, num_workers=4\n  )  # x\n",
    ),
    "a very long line": Case(
        f"loader = DataLoader(dataset, {'a' * 40}={'b' * 40})\n",
        edit(1, num_workers=4, persistent_workers=True),
        f"loader = DataLoader(\n    dataset, {'a' * 40}={'b' * 40},\n"
        "    num_workers=4,\n    persistent_workers=True,\n)\n",
    ),
    "text that isn't ASCII": Case(
        "größe = {'größe ✓ 🎉': DataLoader(дані, batch_size=größe)}; ok = '→'\n",
        W4,
        "größe = {'größe ✓ 🎉': DataLoader(дані, batch_size=größe, num_workers=4)}; ok = '→'\n",
    ),
    "Windows": Case(
        "# Windows\r\nx = DataLoader(\r\n    ds,\r\n)\r\n",
        edit(2, num_workers=4),
        "# Windows\r\nx = DataLoader(\r\n    ds,\r\n    num_workers=4,\r\n)\r\n",
    ),
    "mixed line endings": Case(
        "# one\nx = DataLoader(\r\n    ds,\r\n)\nprint('é')\r\n",
        edit(2, num_workers=4),
        "# one\nx = DataLoader(\r\n    ds,\r\n    num_workers=4,\r\n)\nprint('é')\r\n",
    ),
    "a renamed import": Case(
        "from torch.nn.parallel import DistributedDataParallel as DDP\nm = DDP(m, device_ids=[0])\n",
        edit(2, "DistributedDataParallel", bucket_cap_mb=100),
        "from torch.nn.parallel import DistributedDataParallel as DDP\n"
        "m = DDP(m, device_ids=[0], bucket_cap_mb=100)\n",
    ),
    "a renamed module": Case(
        "import torch.utils.data as d\nx = d.DataLoader(ds)\n",
        edit(2, num_workers=4),
        "import torch.utils.data as d\nx = d.DataLoader(ds, num_workers=4)\n",
    ),
    "a dotted name over several lines": Case(
        "x = (torch\n     .utils\n     .data.DataLoader(ds))\n",
        edit(3, num_workers=4),
        "x = (torch\n     .utils\n     .data.DataLoader(ds, num_workers=4))\n",
    ),
    "only one of two names": Case(
        "x = TensorDataset(DataLoader(ds, 1), AdamW(p))\n",
        edit(1, "AdamW", fused=True),
        "x = TensorDataset(DataLoader(ds, 1), AdamW(p, fused=True))\n",
    ),
    "in the header of a loop": Case(
        "for b in tqdm(DataLoader(ds)): pass\n", W4, "for b in tqdm(DataLoader(ds, num_workers=4)): pass\n"
    ),
    "continued lines": Case(
        "x = \\\n  DataLoader(ds, \\\n  shuffle=True \\\n  )\n",
        edit(2, num_workers=4),
        "x = \\\n  DataLoader(ds, \\\n  shuffle=True,\n  num_workers=4 \\\n  )\n",
    ),
    "an optimizer with groups": Case(
        "opt = torch.optim.AdamW([\n    {'params': a},\n    {'params': b, 'lr': 0.1},\n], lr=1e-3)\n",
        edit(1, "AdamW", fused=True),
        "opt = torch.optim.AdamW([\n    {'params': a},\n    {'params': b, 'lr': 0.1},\n"
        "], lr=1e-3, fused=True)\n",
    ),
    "a generator without parentheses": Case(
        "opt = AdamW( p for p in m if p.requires_grad )  # )\n",
        edit(1, "AdamW", fused=True, foreach=False),
        "opt = AdamW(( p for p in m if p.requires_grad ), fused=True, foreach=False)  # )\n",
    ),
    "a keyword beside **": Case(
        "x = DataLoader(ds, num_workers=0, **{})\n", W4, "x = DataLoader(ds, num_workers=4, **{})\n"
    ),
    "what needs workers, of which there are some": Case(
        "x = DataLoader(ds, num_workers=2)\n",
        edit(1, persistent_workers=True),
        "x = DataLoader(ds, num_workers=2, persistent_workers=True)\n",
    ),
    "what needs workers, of which there may be none": Case(
        "x = DataLoader(ds, num_workers=n)\n",
        edit(1, persistent_workers=True),
        "x = DataLoader(ds, num_workers=n, persistent_workers=n > 0)\n",
    ),
    "what needs workers, whose number is passed by position": Case(
        "x = DataLoader(ds, 8, True, None, None, a.n)\n",
        edit(1, prefetch_factor=8),
        "x = DataLoader(ds, 8, True, None, None, a.n, prefetch_factor=8 if a.n > 0 else None)\n",
    ),
    "what needs workers is replaced": Case(
        "x = DataLoader(ds, num_workers=n if big else 0, persistent_workers=False)\n",
        edit(1, persistent_workers=True),
        "x = DataLoader(ds, num_workers=n if big else 0, persistent_workers=(n if big else 0) > 0)\n",
    ),
    "a keyword-only argument beside stars": Case(
        "x = DataLoader(*[ds])\n", edit(1, pin_memory=True), "x = DataLoader(*[ds], pin_memory=True)\n"
    ),
    "a call in a class": Case(
        "class Data(LightningDataModule):\n    def loader(self):\n        return DataLoader(self.ds)\n",
        edit(3, num_workers=4),
        "class Data(LightningDataModule):\n    def loader(self):\n"
        "        return DataLoader(self.ds, num_workers=4)\n",
        is_run=False,
    ),
    "a statement before": Case(
        "if True:\r\n    # all ranks\r\n    m = nn.parallel.DistributedDataParallel(\r\n        m\r\n"
        "    )\r\n",
        replace(COMPILED, line=3),
        "if True:\r\n    # all ranks\r\n    m.compile()\r\n    m = nn.parallel.DistributedDataParallel(\r\n"
        "        m\r\n    )\r\n",
    ),
    "a statement before, a dotted name": Case(
        "self.m = DistributedDataParallel(module=self.net)",
        replace(COMPILED, arguments={"static_graph": True}),
        "self.net.compile()\nself.m = DistributedDataParallel(module=self.net, static_graph=True)",
    ),
    "a statement before, no name in it": Case(
        "m = DistributedDataParallel(net(), device_ids=[0] if cuda else None)\n",
        replace(COMPILED, before="torch.backends.cudnn.benchmark = True"),
        "torch.backends.cudnn.benchmark = True\n"
        "m = DistributedDataParallel(net(), device_ids=[0] if cuda else None)\n",
    ),
    "a statement before the last line": Case(
        "m = Net()\r\nm = DistributedDataParallel(m)",
        replace(COMPILED, line=2),
        "m = Net()\r\nm.compile()\r\nm = DistributedDataParallel(m)",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_call_is_changed_as_a_person_would(name: str) -> None:
    case = CASES[name]
    assert changed(case.source, case.edit) == case.expected


class Stub:
    """Stands for any value of a program; notes where it is called under which name."""

    def __init__(self, name: str, calls: list[tuple[str, int]]) -> None:
        self.name, self.calls = name, calls

    def __getattr__(self, name: str) -> "Stub":
        return Stub(name, self.calls)

    def __call__(self, *_: object, **__: object) -> "Stub":
        caller: FrameType = sys._getframe(1)
        self.calls.append((self.name, caller.f_lineno))
        return Stub("", self.calls)

    def __iter__(self) -> Iterator["Stub"]:
        return iter([self])

    def __rmul__(self, _: object) -> "Stub":
        return self


class Names(dict[str, object]):
    def __init__(self, calls: list[tuple[str, int]]) -> None:
        super().__init__()
        self.calls = calls

    def __missing__(self, name: str) -> object:
        return Stub(name, self.calls)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.is_run])
def test_the_line_is_the_one_that_a_running_call_reports(name: str) -> None:
    case, calls = CASES[name], list[tuple[str, int]]()
    torch = Stub("torch", calls)
    everything = vars(builtins) | {"__import__": lambda *_: torch}
    exec(compile(case.source, "train.py", "exec"), {"__builtins__": everything}, Names(calls))
    assert (case.edit.call, case.edit.line) in calls


NO_PLACE = {
    "no call": ("x = loader(ds)\n", W4),
    "another line": ("\nx = DataLoader(ds)\n", W4),
    "a line that isn't there": ("x = DataLoader(ds)\n", replace(W4, line=7)),
    "two calls": ("x = DataLoader(a), DataLoader(b)\n", W4),
    "a name for something else": ("from mine import Fast as DataLoader; x = DataLoader(a)\n", W4),
    "in **": ("x = DataLoader(ds, **options)\n", W4),
    "in *": ("x = DataLoader(*arguments)\n", W4),
    "in * behind others": ("x = DataLoader(ds, *rest)\n", W4),
    "workers may be in *": (
        "x = DataLoader(*rest, persistent_workers=False)\n",
        replace(W4, arguments={"persistent_workers": True}),
    ),
    "a value that is taken away from **": ("x = DataLoader(ds, num_workers=o.pop('n'), **o)\n", W4),
    "the next value": ("x = DataLoader(ds, num_workers=next(numbers))\n", W4),
    "a value with a name": ("x = DataLoader(ds, num_workers=(n := 0))\n", W4),
    "workers that can't be written twice": (
        "x = DataLoader(ds, num_workers=o.pop('n'))\n",
        replace(W4, arguments={"prefetch_factor": 8}),
    ),
    "in *, no parameters known": ("x = DataLoader(*rest)\n", replace(W4, parameters=())),
    "no expression": ("x = DataLoader(ds)\n", replace(W4, arguments={"generator": object()})),
    "infinity": ("x = DataLoader(ds)\n", replace(W4, arguments={"timeout": [float("inf")]})),
    "no keyword": ("x = DataLoader(ds)\n", replace(W4, arguments={"a=1, b": 1})),
    "a syntax error": ("x = DataLoader(ds)\nprint 1\n", W4),
    "a NUL": ("x = DataLoader(ds)\n\0", W4),
    "too deep": (f"x = DataLoader(ds)\ny = {'-' * 5000}1\n", W4),
    "an unknown encoding": ("# coding: klingon\nx = DataLoader(ds)\n", replace(W4, line=2)),
    "no encoding of text": ("# coding: rot13\nk = QngnYbnqre(qf)\n", replace(W4, line=2)),
    "a value that the encoding lacks": (
        "# coding: ascii\nx = DataLoader(ds)\n",
        replace(W4, line=2, arguments={"multiprocessing_context": "→"}),
    ),
    "the first argument is a call": ("m = DistributedDataParallel(wrap(m))\n", COMPILED),
    "the first argument is bound here": ("m = DistributedDataParallel(m := Net())\n", COMPILED),
    "another binds it here": ("m = (n := Net(), DistributedDataParallel(n))\n", COMPILED),
    "there is no first argument": ("m = DistributedDataParallel(**both)\n", COMPILED),
    "behind a colon": ("if ddp: m = DistributedDataParallel(m)\n", COMPILED),
    "behind a semicolon": ("m = Net(); m = DistributedDataParallel(m)\n", COMPILED),
    "under a condition": ("m = DistributedDataParallel(m) if ddp else m\n", COMPILED),
    "behind `and`": ("m = ddp and DistributedDataParallel(m)\n", COMPILED),
    "later": ("wrap = lambda m: DistributedDataParallel(m)\n", COMPILED),
    "for each": ("m = [DistributedDataParallel(m) for m in ms]\n", COMPILED),
    "in a header": ("while DistributedDataParallel(m): pass\n", COMPILED),
    "the result has no name": ("fit(DistributedDataParallel(Net()))\n", AFTER),
    "the result has several names": ("a = b = DistributedDataParallel(Net())\n", AFTER),
    "more behind a semicolon": ("m = DistributedDataParallel(Net()); fit(m)\n", AFTER),
    "the body of a line": ("if ddp: m = DistributedDataParallel(Net())\n", AFTER),
    "a statement that isn't one": ("m = DistributedDataParallel(m)\n", replace(COMPILED, before="{0}.(")),
    "statements that hide the rest": ("m = DistributedDataParallel(m)\n", replace(COMPILED, before="x = [")),
}


@pytest.mark.parametrize("name", NO_PLACE)
def test_where_it_is_unsure_nothing_is_changed(name: str) -> None:
    source, unplaced = NO_PLACE[name]
    assert rewritten(source.encode(), [unplaced]) == (source.encode(), (unplaced,))


def test_what_finds_no_place_is_said() -> None:
    unplaced = edit(1, num_workers=4, persistent_workers=True)
    assert line_to_write(unplaced) == "DataLoader(…, num_workers=4, persistent_workers=True)"
    assert line_to_write(COMPILED) == "module.compile() before DistributedDataParallel(…)"
    assert line_to_write(replace(COMPILED, parameters=())) == "….compile() before DistributedDataParallel(…)"


PLACED = {
    "two calls": (
        "x = DataLoader(a), DataLoader(b)\n",
        32,
        "x = DataLoader(a), DataLoader(b, num_workers=4)\n",
    ),
    "within another call": (
        "x = wrap(DataLoader(a))\n",
        22,
        "x = wrap(DataLoader(a, num_workers=4))\n",
    ),
    "behind letters of two bytes": (
        "x = ['é', DataLoader(b)]\n",
        24,
        "x = ['é', DataLoader(b, num_workers=4)]\n",
    ),
    "of a base class": (
        "super().__init__(ds, batch_size=4)\n",
        34,
        "super().__init__(ds, batch_size=4, num_workers=4)\n",
    ),
    "with a type": ("x = DataLoader[int](ds)\n", 23, "x = DataLoader[int](ds, num_workers=4)\n"),
    "by another name": (
        "x = LOADER(ds); LOADER = data.DataLoader\n",
        14,
        "x = LOADER(ds, num_workers=4); LOADER = data.DataLoader\n",
    ),
}


@pytest.mark.parametrize("name", PLACED)
def test_a_call_is_found_by_where_it_ends(name: str) -> None:
    source, end_column, expected = PLACED[name]
    assert changed(source, replace(W4, end_column=end_column)) == expected


def test_a_call_that_ends_elsewhere_is_not_changed() -> None:
    """Nor what `map` calls."""
    for source in ("x = DataLoader(a)\n", "x = list(map(DataLoader, a))\n"):
        edit = replace(W4, end_column=28)
        assert rewritten(source.encode(), [edit]) == (source.encode(), (edit,))


def test_a_call_without_a_place_is_shown_as_it_is_written() -> None:
    source = b"x, y = DataLoader(a, **options), DataLoader(b)\n"
    assert line_to_write(replace(W4, end_column=31), source) == "num_workers=4 in DataLoader(a, **options)"
    compiled = replace(COMPILED, end_column=31)
    assert line_to_write(compiled, source) == "module.compile() before DataLoader(a, **options)"
    assert line_to_write(W4, source) == "DataLoader(…, num_workers=4)"


def test_edits_of_one_file_are_merged_at_the_lines_of_the_old_source() -> None:
    source = (
        "from torch.nn.parallel import DistributedDataParallel as DDP\n"
        "m = DDP(\n    m,\n    find_unused_parameters=True,\n)\n"
        "x = DataLoader(ConcatDataset([ds]), num_workers=0)\nopt = SGD(m.parameters())\n"
    )
    edits = [
        replace(COMPILED, line=2),
        edit(2, "DistributedDataParallel", static_graph=True),
        edit(6, num_workers=4),
        edit(2, "DistributedDataParallel", find_unused_parameters=False, bucket_cap_mb=100),
        edit(7, "SGD", foreach=True),
        edit(6, persistent_workers=True, num_workers=4),
        replace(COMPILED, line=2),
    ]
    assert changed(source, *edits) == (
        "from torch.nn.parallel import DistributedDataParallel as DDP\n"
        "m.compile()\n"
        "m = DDP(\n    m,\n    find_unused_parameters=False,\n    static_graph=True,\n"
        "    bucket_cap_mb=100,\n)\n"
        "x = DataLoader(ConcatDataset([ds]), num_workers=4, persistent_workers=True)\n"
        "opt = SGD(m.parameters(), foreach=True)\n"
    )


def test_what_needs_workers_has_those_that_another_edit_sets() -> None:
    source = "x = DataLoader(ds, num_workers=n)\n"
    expected = "x = DataLoader(ds, num_workers=4, persistent_workers=True)\n"
    assert changed(source, edit(1, persistent_workers=True), W4) == expected


def test_a_contradiction_and_a_change_of_changed_text_are_left() -> None:
    again, inner = edit(1, num_workers=8), edit(1, "AdamW", fused=True)
    replaced = edit(1, worker_init_fn=None)
    source = b"x = DataLoader(ds, worker_init_fn=AdamW(p))\n"
    new, left = rewritten(source, [W4, again, replaced, inner])
    assert new == b"x = DataLoader(ds, worker_init_fn=None, num_workers=4)\n"
    assert left == (again, inner)


def test_calls_within_a_call() -> None:
    source = "x = Prefetch(DataLoader(Cached(ds)))\n"
    edits = [edit(1, "Prefetch", depth=2), W4, edit(1, "Cached", size=1)]
    assert changed(source, *edits) == "x = Prefetch(DataLoader(Cached(ds, size=1), num_workers=4), depth=2)\n"


def test_no_warning_comes_of_what_users_write() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert "4" in changed("x = DataLoader('\\d', 1 is 1)\n", W4)


@pytest.mark.parametrize("encoding", ["latin-1", "cp1251", "utf-8", "shift_jis"])
def test_the_encoding_stays(encoding: str) -> None:
    text = {"latin-1": "größe", "cp1251": "дані", "shift_jis": "表データ"}.get(encoding, "é表🎉")
    source = f"# -*- coding: {encoding} -*-\nx = '{text}', DataLoader('{text}')  # {text}\n"
    new, left = rewritten(source.encode(encoding), [edit(2, num_workers=4)])
    assert left == ()
    assert new == source.replace("')  #", "', num_workers=4)  #").encode(encoding)


def test_the_byte_order_mark_stays() -> None:
    new, left = rewritten("m = DistributedDataParallel(m)".encode("utf-8-sig"), [COMPILED])
    assert (new, left) == ("m.compile()\nm = DistributedDataParallel(m)".encode("utf-8-sig"), ())


@pytest.mark.parametrize("separator", ["\x0c", "\x0b", "\x1c", "\x85", "\u2028"])
def test_only_pythons_own_line_ends_count(separator: str) -> None:
    source = f"# a{separator}b\nx = '{separator}', DataLoader(ds)\n"
    assert changed(source, edit(2, num_workers=4)) == source.replace("(ds)", "(ds, num_workers=4)")


# Any call in any surroundings: all tokens but the new ones stay

blanks = st.sampled_from(["", " ", "\n  ", "  # é, (→\n  ", " \\\n", "\t", "\r\n    "])
values = st.sampled_from(
    ["ds", "(ds)", "f(x, y)", "[1,\n 2]", "'),('", "'''a\n#'''", "lambda: 0", "(a for a in b)"]
)
keywords = st.sampled_from(["batch_size", "num_workers", "größe"])
others = st.sampled_from(["", "x = '🎉→'\n", "# ☃ DataLoader(\r\n", "def f():\n\treturn 'é'\n\n", "\x0c\n"])


@st.composite
def calls(draw: st.DrawFn) -> str:
    def spaced(text: str) -> str:
        return f"{draw(blanks)}{text}{draw(blanks)}"

    words = [spaced(value) for value in draw(st.lists(values, max_size=3))]
    names = draw(st.lists(keywords, max_size=3, unique=True))
    words += [f"{spaced(name)}={spaced(draw(values))}" for name in names]
    comma = draw(st.sampled_from(["", ","])) if words else ""
    return f"DataLoader({','.join(words)}{comma}{draw(blanks)})"


def without_blanks(text: str) -> str:
    return re.sub(r"\s|\\\n", "", text)


def keywords_of(call: str) -> dict[str | None, str]:
    body = ast.parse(call, mode="eval").body
    assert isinstance(body, ast.Call)
    return {keyword.arg: ast.unparse(keyword.value) for keyword in body.keywords}


def comments(source: str) -> list[str]:
    tokens = tokenize.generate_tokens(io.StringIO(source, newline="").readline)
    return [token.string for token in tokens if token.type == tokenize.COMMENT]


@given(others, others, st.sampled_from(["", "'é', ", "('🎉' + a), "]), calls(), st.booleans())
def test_all_else_stays_byte_for_byte(before: str, after: str, left: str, call: str, is_last: bool) -> None:
    source = f"{before}x = {left}{call}" + ("" if is_last else f"; z = 'ü'\n{after}")
    line = len(re.findall(r"\r\n|\r|\n", before)) + 1
    new = changed(source, edit(line, num_workers=4, pin_memory=True))
    head, tail = source.split(call)
    assert new.startswith(head)
    assert new.endswith(tail)
    old_call = without_blanks(call)
    new_call = without_blanks(new.removeprefix(head).removesuffix(tail))
    if "num_workers" not in call:
        for text in ("pin_memory=True", "num_workers=4"):
            assert new_call.count(text) == 1
            new_call = new_call.replace(text, "")
        assert new_call.replace(",", "") == old_call.replace(",", "")
    passed = keywords_of(call)
    assert keywords_of(new.removeprefix(head).removesuffix(tail)) == (
        passed | {"num_workers": "4", "pin_memory": "True"}
    )
    assert comments(new) == comments(source)
    newlines = set(re.findall(r"\r\n|\n", source))
    assert set(re.findall(r"\r\n|\n", new)) <= (newlines or {"\n"})


FRAGMENTS = [
    *"()[]:;,=#*\\'\n\r\t\f é",
    "'''",
    'f"{',
    '}"',
    "if 1:",
    "\\\n",
    "x",
    "lambda",
    "yield",
    "\r\n",
    "\ufeff",
]
surroundings = st.lists(st.sampled_from(FRAGMENTS), max_size=6).map("".join)


@given(surroundings, st.sampled_from(["DataLoader(ds)", "DataLoader(", "AdamW()", ""]), surroundings)
def test_any_text_is_changed_rightly_or_not_at_all(before: str, call: str, after: str) -> None:
    source = f"{before}{call}{after}".encode(errors="replace")
    new, left = rewritten(source, [W4])
    if left:
        assert new == source
    else:
        assert ast.dump(ast.parse(new)) != ast.dump(ast.parse(source))


@given(st.binary(max_size=60))
def test_any_bytes_are_no_trouble(source: bytes) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert rewritten(source + b"\n", [W4]) == (source + b"\n", (W4,))


# The diff


def run(directory: Path, *command: str, given: str = "") -> str:
    isolated = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1", "PATH": os.environ["PATH"]}
    done = subprocess.run(
        command,
        cwd=directory,
        env=isolated,
        input=given.encode(errors="surrogateescape"),
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode(errors="surrogateescape")


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    root = tmp_path / "project"
    root.mkdir()
    run(root, "git", "init", "--quiet")
    return root


CHANGES = {
    "train.py": (b"a\nb\nc\nd\ne\nf\ng\nh\n", b"a\nb\nc\nD\ne\nf\ng\nh\n"),
    "windows.py": (b"a\r\nb\r\n", b"a\r\nB\r\nc\r\n"),
    "mixed.py": (b"a\r\nb\nc\rd\r\n", b"a\r\nb\nx\nc\rd\r\n"),
    "no end.py": (b"a\nb", b"a\nB"),
    "sub/ends.py": (b"a\nb", b"a\nb\n"),
    "sub/latin.py": (b"# coding: latin-1\nx = '\xe9'\n", b"# coding: latin-1\ny = '\xe9'\n"),
    'größe "a"\\\t.py': (b"\xef\xbb\xbfa\n", b"\xef\xbb\xbfb\n"),
    "breaks.py": ("a\u2028b\x0cc\n".encode(), "a\u2028b\x0cc\nd\n".encode()),
    "same.py": (b"a\n", b"a\n"),
    "far.py": (b"x\n" * 500, b"y\n" + b"x\n" * 480 + b"z\n" + b"x\n" * 18),
}


def placed(root: Path, number: int = 0) -> dict[Path, tuple[bytes, bytes]]:
    """Files with the old or the new content."""
    for name, contents in CHANGES.items():
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_bytes(contents[number])
    if not number:
        run(root, "git", "add", ".")
    return {root / name: contents for name, contents in CHANGES.items()}


@pytest.mark.parametrize("command", [("git", "apply", "--check"), ("git", "apply"), ("patch", "-p1")])
def test_the_diff_is_taken(repository: Path, command: tuple[str, ...]) -> None:
    changes = placed(repository)
    run(repository, *command, given=diff_text(changes, repository))
    expected = 0 if "--check" in command else 1
    assert {path: path.read_bytes() for path in changes} == {
        path: contents[expected] for path, contents in changes.items()
    }
    assert not [*repository.rglob("*.orig"), *repository.rglob("*.rej")]


def test_the_diff_is_that_of_git(repository: Path) -> None:
    changes = placed(repository)
    run(repository, "git", "add", ".")
    placed(repository, 1)
    shown = run(repository, "git", "diff", "--unified=3")
    plain = re.sub(r"(?m)^(index .*\n|(?<=@@) .*$)", "", shown)
    ours = diff_text(changes, repository)
    for name in ("train.py", "windows.py", "no end.py", "sub/ends.py", "sub/latin.py"):
        part = f"diff --git a/{name} b/{name}\n"
        assert ours.split(part)[1].split("diff --git")[0] == plain.split(part)[1].split("diff --git")[0]
    headers = re.compile(r"(?m)^(?:diff --git|---|\+\+\+) .*$")
    assert sorted(headers.findall(ours)) == sorted(headers.findall(shown))


def test_no_change_is_no_diff(tmp_path: Path) -> None:
    assert diff_text({tmp_path / "a.py": (b"a", b"a")}, tmp_path) == ""


# The files


def names(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


def test_changes_are_written_and_modes_stay(repository: Path) -> None:
    changes = placed(repository)
    (repository / "train.py").chmod(0o751)
    (repository / "windows.py").chmod(0o600)
    before = names(repository)
    write_changes(changes, repository)
    assert {path: path.read_bytes() for path in changes} == {path: new for path, (_, new) in changes.items()}
    modes = [stat.S_IMODE((repository / name).stat().st_mode) for name in ("train.py", "windows.py")]
    assert modes == [0o751, 0o600]
    assert names(repository) == before


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
def test_the_owner_stays(repository: Path) -> None:
    path = repository / "train.py"
    path.write_bytes(b"a\n")
    run(repository, "git", "add", ".")
    os.chown(path, 4242, 4343)
    path.chmod(0o640)
    write_changes({path: (b"a\n", b"b\n")}, repository)
    status = path.stat()
    assert (status.st_uid, status.st_gid, stat.S_IMODE(status.st_mode)) == (4242, 4343, 0o640)


def test_attributes_stay(repository: Path) -> None:
    """Access control lists are among them."""
    path = repository / "train.py"
    path.write_bytes(b"a\n")
    os.setxattr(path, "user.note", b"ours")
    run(repository, "git", "add", ".")
    write_changes({path: (b"a\n", b"b\n")}, repository)
    assert (path.read_bytes(), os.getxattr(path, "user.note")) == (b"b\n", b"ours")


def test_the_group_stays_where_the_owner_cant(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, given = repository / "train.py", list[int]()
    path.write_bytes(b"a\n")
    run(repository, "git", "add", ".")

    def fchown(descriptor: int, owner: int, group: int) -> None:
        if owner != -1:
            raise PermissionError(1, "Operation not permitted")
        given.append(group)

    monkeypatch.setattr(os, "fchown", fchown)
    write_changes({path: (b"a\n", b"b\n")}, repository)
    assert given == [path.stat().st_gid]


def refused(changes: dict[Path, tuple[bytes, bytes]], root: Path, words: str, force: bool = False) -> None:
    with pytest.raises(SpecError, match=words):
        write_changes(changes, root, force)


def test_nothing_is_written_if_one_file_has_changed(repository: Path) -> None:
    changes = placed(repository)
    (repository / "far.py").write_bytes(b"newer\n")
    refused(changes, repository, "far.py has changed since it was measured; start")
    (repository / "far.py").unlink()
    refused(changes, repository, "can't read .*far.py: No such file", force=True)
    assert (repository / "train.py").read_bytes() == CHANGES["train.py"][0]


def test_what_git_has_no_version_of_must_be_forced(repository: Path) -> None:
    (repository / "train.py").write_bytes(b"a")
    refused({repository / "train.py": (b"a", b"b")}, repository, "git doesn't track .*--force")


def test_a_repository_of_another_user_is_named_as_such(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (repository / "train.py").write_bytes(b"a")
    run(repository, "git", "add", ".")
    for name, value in (
        ("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1"),
        ("GIT_CONFIG_GLOBAL", os.devnull),
        ("GIT_CONFIG_NOSYSTEM", "1"),
    ):
        monkeypatch.setenv(name, value)
    refused({repository / "train.py": (b"a", b"b")}, repository, "repository is another user's .*--force")


def test_a_files_name_is_no_pattern_for_git(repository: Path) -> None:
    (repository / "train1.py").write_bytes(b"a")
    run(repository, "git", "add", ".")
    paths = [repository / name for name in ("train[1].py", ":!train1.py")]
    for path in paths:
        path.write_bytes(b"a")
        refused({path: (b"a", b"b")}, repository, "git doesn't track .*--force")
    run(repository, "git", "add", ".")
    write_changes(dict.fromkeys(paths, (b"a", b"b")), repository)
    assert [path.read_bytes() for path in paths] == [b"b", b"b"]


def test_without_git_it_must_be_forced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    path = tmp_path / "plain" / "train.py"
    path.parent.mkdir()
    path.write_bytes(b"a")
    refused({path: (b"a", b"b")}, tmp_path, "git doesn't track .*--force")
    write_changes({path: (b"a", b"b")}, tmp_path, force=True)
    assert path.read_bytes() == b"b"


def test_no_way_leads_out_of_the_root(repository: Path, tmp_path: Path) -> None:
    outside = tmp_path / "other"
    outside.mkdir()
    secret = outside / "train.py"
    secret.write_bytes(b"a")
    (repository / "link").symlink_to(outside)
    beside = tmp_path / "project2"  # begins with the root's name
    beside.mkdir()
    (beside / "train.py").write_bytes(b"a")
    ways = (secret, repository / "../other/train.py", repository / "link/train.py", beside / "train.py")
    for path in (*ways, repository / ".."):
        refused({path: (b"a", b"b")}, repository, "is outside of", force=True)
        with pytest.raises(SpecError, match="is outside of"):
            diff_text({path: (b"a", b"b")}, repository)
    assert secret.read_bytes() == b"a"


def test_links_and_what_is_no_file_are_refused(repository: Path, tmp_path: Path) -> None:
    target = repository / "target.py"
    target.write_bytes(b"a")
    (repository / "link.py").symlink_to(target)
    (repository / "dead.py").symlink_to(tmp_path / "nowhere")
    (repository / "directory.py").mkdir()
    os.mkfifo(repository / "pipe.py")  # reading it would wait forever
    for name in ("link.py", "dead.py", "directory.py", "pipe.py"):
        refused({repository / name: (b"a", b"b")}, repository, "is a link or no file", force=True)
    assert target.read_bytes() == b"a"
    assert (repository / "link.py").is_symlink()


def test_a_link_inside_of_the_root_and_to_the_root_is_followed(repository: Path, tmp_path: Path) -> None:
    (repository / "src").mkdir()
    (repository / "src/train.py").write_bytes(b"a\n")
    (repository / "code").symlink_to("src")
    (tmp_path / "alias").symlink_to(repository)
    path = tmp_path / "alias/code/train.py"
    assert "+++ b/src/train.py\n" in diff_text({path: (b"a\n", b"b\n")}, repository)
    run(repository, "git", "add", ".")
    write_changes({path: (b"a\n", b"b\n")}, repository)
    assert (repository / "src/train.py").read_bytes() == b"b\n"


@pytest.mark.parametrize("kept", ["directory", "file"])
def test_what_may_not_be_written_is_refused(
    repository: Path, monkeypatch: pytest.MonkeyPatch, kept: str
) -> None:
    path = repository / "train.py"
    path.write_bytes(b"a")
    closed = {"directory": repository, "file": path}[kept]
    # root may write everything, whatever the mode
    monkeypatch.setattr(os, "access", lambda asked, mode: Path(asked) != closed)
    refused({path: (b"a", b"b")}, repository, "you may not write .*immutable")
    assert path.read_bytes() == b"a"


def test_a_read_only_file_is_refused_to_root_too(repository: Path) -> None:
    path = repository / "train.py"
    path.write_bytes(b"a")
    path.chmod(0o444)
    refused({path: (b"a", b"b")}, repository, "you may not write .*chmod u", force=True)
    assert path.read_bytes() == b"a"


def test_a_file_with_other_names_must_be_forced(repository: Path) -> None:
    path, other = repository / "train.py", repository / "other.py"
    path.write_bytes(b"a")
    other.hardlink_to(path)
    refused({path: (b"a", b"b")}, repository, "has other names .*--force")
    assert path.samefile(other)
    write_changes({path: (b"a", b"b")}, repository, force=True)
    assert (path.read_bytes(), other.read_bytes()) == (b"b", b"a")


def test_a_full_disk_leaves_all_files_as_they_were(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changes = placed(repository)
    before, synced = names(repository), list[int]()

    def fsync(descriptor: int) -> None:
        synced.append(descriptor)
        if len(synced) == 3:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(MachineError, match="No space left"):
        write_changes(changes, repository)
    assert {path: path.read_bytes() for path in changes} == {path: old for path, (old, _) in changes.items()}
    assert names(repository) == before


def test_a_mount_point_is_named_as_such(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = repository / "train.py"
    path.write_bytes(b"a")
    run(repository, "git", "add", ".")
    before = names(repository)

    def replace(draft: Path, target: Path, **directories: int | None) -> None:
        raise OSError(errno.EBUSY, "Device or resource busy", draft, None, target)

    monkeypatch.setattr(os, "replace", replace)
    with pytest.raises(MachineError, match=r"train\.py is a mount point.*apply change\.diff to the file"):
        write_changes({path: (b"a", b"b")}, repository)
    assert names(repository) == before


def test_a_rename_that_fails_leaves_no_drafts(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changes = placed(repository)
    before = names(repository)

    def fail(*_: object, **__: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(MachineError, match="Input/output error"):
        write_changes(changes, repository)
    assert names(repository) == before


def test_files_that_were_renamed_before_a_rename_fails_get_their_text_back(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = placed(repository)
    before, rename, renamed = names(repository), os.replace, list[Path]()

    def fail_once(source: Path, target: Path, **where: int | None) -> None:
        renamed.append(target)
        if len(renamed) == 3:
            raise OSError(5, "Input/output error", source, None, target)
        rename(source, target, **where)

    monkeypatch.setattr(os, "replace", fail_once)
    with pytest.raises(MachineError) as failed:
        write_changes(changes, repository)
    assert str(failed.value).startswith(f"can't write {renamed[2]}: Input/output error")
    assert {path: path.read_bytes() for path in changes} == {path: old for path, (old, _) in changes.items()}
    assert names(repository) == before


OPTIONS = """\
parser.add_argument("-j", "--workers", type=int, default=0)
parser.add_argument("--pin-memory", action="store_true")
parser.add_argument("--ahead", dest="prefetch", type=int)
args = parser.parse_args()
"""


WORKERS_LOST = (
    "train.py:5: num_workers=2 takes the place of args.workers, so that --workers has no effect there; "
    "--workers 2 instead may do as well"
)
PIN_LOST = (
    "train.py:5: pin_memory=True takes the place of args.pin_memory, so that --pin-memory has no effect there"
)
AHEAD_LOST = (
    "train.py:5: prefetch_factor=8 takes the place of args.prefetch, so that --ahead has no effect there; "
    "--ahead 8 instead may do as well"
)


@pytest.mark.parametrize(
    ("given", "arguments", "notes"),
    [
        ("num_workers=args.workers", {"num_workers": 2, "persistent_workers": True}, [WORKERS_LOST]),
        (
            "pin_memory=args.pin_memory, prefetch_factor=args.prefetch",
            {"pin_memory": True, "prefetch_factor": 8},
            [PIN_LOST, AHEAD_LOST],
        ),
        ("num_workers=0, pin_memory=config.pin", {"num_workers": 2, "pin_memory": True}, []),
        ("4, True, None, None, args.workers", {"persistent_workers": True}, []),
    ],
)
def test_an_option_whose_place_a_change_takes_is_noted(
    given: str, arguments: dict[str, Any], notes: list[str]
) -> None:
    source = f"{OPTIONS}loader = DataLoader(data, {given})\n".encode()
    edits = [edit(5, **arguments)]
    assert rewritten(source, edits)[1] == ()
    assert list(lost_options(source, edits)) == notes
