"""Where a program's own files wait for a GPU, copy to it, and send gradients."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gpurun.launcher.rundir.records import Place
from gpurun.launcher.worker.program import observed
from gpurun.launcher.worker.program.observed import CostlyCalls


def counted(found: CostlyCalls) -> dict[tuple[str, str], int]:
    assert all(each.file == __file__ for each in found.found)
    return {(each.kind, each.name): each.count for each in found.found}


def test_reads_of_what_a_gpu_computes_are_counted_by_line(monkeypatch: pytest.MonkeyPatch) -> None:
    found, loss = CostlyCalls(list), torch.tensor(1.0)
    with found.watch():
        assert loss.item() == 1.0  # on the host
    assert found.found == ()
    monkeypatch.setattr(observed, "is_on_gpu", lambda tensor: True)
    with found.watch():
        for _ in range(3):
            total = loss.item() + float(loss)
        assert loss > 0
        assert total == 2.0
    assert counted(found) == {("wait", "item"): 3, ("wait", "__float__"): 3, ("wait", "__bool__"): 1}
    line = test_reads_of_what_a_gpu_computes_are_counted_by_line.__code__.co_firstlineno + 8
    assert Place("wait", "item", __file__, line, 3) in found.found


@pytest.mark.parametrize(
    ("options", "is_pinned", "waits"),
    [({}, True, True), ({"non_blocking": True}, False, True), ({"non_blocking": True}, True, False)],
)
def test_copies_that_wait_are_counted(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], is_pinned: bool, waits: bool
) -> None:
    found, batch = CostlyCalls(list), torch.ones(2)
    monkeypatch.setattr(observed, "is_on_gpu", lambda tensor: tensor is not batch)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: is_pinned)
    with found.watch():
        batch.to(torch.float64, **options)
    assert counted(found) == ({("copy", "to"): 1} if waits else {})


@pytest.mark.parametrize("sends", [True, False])
def test_backward_passes_that_send_gradients_are_counted(sends: bool) -> None:
    model: Any = SimpleNamespace(require_backward_grad_sync=sends)
    found, weight = CostlyCalls(lambda: [model]), torch.ones(2, requires_grad=True)
    before = torch.Tensor.backward
    with found.watch():
        for _ in range(4):
            weight.sum().backward()
    assert torch.Tensor.backward is before
    assert counted(found) == ({("gradients", "backward"): 4} if sends else {})


def test_what_is_compiled_is_left_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    found = CostlyCalls(list)
    monkeypatch.setattr(observed, "is_on_gpu", lambda tensor: True)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)  # as while it is traced
    with found.watch():
        assert torch.ones(2).to(torch.float64).sum().item() == 2.0
    assert found.found == ()
