"""DataParallel on the CPU, and what its GPU version changes about torch's."""

import threading
from collections import OrderedDict, defaultdict, namedtuple
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from gpurun import device_index
from gpurun.launcher.worker.base.nested import join_rows, map_tensors, split_rows, tensors_of
from gpurun.launcher.worker.strategies import dp as data_parallel
from gpurun.launcher.worker.strategies.dp import CpuDataParallel, StockDataParallel
from gpurun.launcher.worker.training import batches
from tests.wording import Wording

Pair = namedtuple("Pair", "left right")


@dataclass
class Record:
    tokens: Tensor
    name: str


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    torch.set_num_threads(1)
    before = threading.active_count()
    yield
    assert threading.active_count() == before


class Recorder(nn.Module):
    """Notes what each replica sees."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.calls: Tensor
        self.register_buffer("calls", torch.zeros(1))
        self.seen: dict[int, Any] = {}

    def forward(self, x: Tensor) -> Tensor:
        self.seen[device_index()] = (len(x), torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"))
        self.calls += 1
        result: Tensor = self.linear(x)
        return result


@pytest.fixture
def model() -> Recorder:
    return Recorder()


def test_textbook_a_batch_of_50_on_two_devices_is_25_and_25(model: Recorder) -> None:
    outputs = CpuDataParallel(model)(torch.randn(50, 3), (25, 25))
    assert {index: seen[0] for index, seen in model.seen.items()} == {0: 25, 1: 25}
    assert outputs.shape == (50, 2)


def test_outputs_are_in_the_order_of_the_inputs(model: Recorder) -> None:
    x = torch.randn(9, 3)
    torch.testing.assert_close(CpuDataParallel(model)(x, (1, 6, 2)), model.linear(x))


def test_only_replica_0_updates_buffers(model: Recorder) -> None:
    CpuDataParallel(model)(torch.randn(6, 3), (2, 2, 2))
    assert model.calls.item() == 1


def test_a_device_without_samples_does_not_run(model: Recorder) -> None:
    CpuDataParallel(model)(torch.randn(4, 3), (0, 4))
    assert set(model.seen) == {1}
    assert model.calls.item() == 0


@pytest.mark.parametrize("grad", [True, False])
def test_grad_mode_and_autocast_reach_the_threads(model: Recorder, grad: bool) -> None:
    with torch.set_grad_enabled(grad), torch.autocast("cpu", dtype=torch.bfloat16):
        outputs = CpuDataParallel(model)(torch.randn(4, 3), (2, 2))
    assert outputs.dtype == torch.bfloat16
    assert outputs.requires_grad == grad
    assert [seen[1:] for seen in model.seen.values()] == [(grad, True)] * 2


def test_an_exception_keeps_type_and_traceback_and_names_the_replica() -> None:
    class Broken(Recorder):
        def forward(self, x: Tensor) -> Tensor:
            if device_index() == 1:
                raise KeyError("lost")
            return super().forward(x)

    with pytest.raises(KeyError, match="lost") as caught:
        CpuDataParallel(Broken())(torch.randn(4, 3), (2, 2))
    assert caught.value.__notes__ == ["in replica 1"]
    assert caught.traceback[-1].name == "forward"


def test_an_exception_in_backward_names_the_replica() -> None:
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.index = device_index()
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            if ctx.index == 1:
                raise ArithmeticError("diverged")
            return grad

    class Model(Recorder):
        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = Fails.apply(self.linear(x))
            return result

    loss = CpuDataParallel(Model())(torch.randn(4, 3), (2, 2)).sum()
    with pytest.raises(ArithmeticError, match="diverged") as caught:
        loss.backward()
    assert caught.value.__notes__ == ["in replica 1"]


def test_backward_of_replicas_runs_at_the_same_time() -> None:
    """One after the other, the first would wait for the second for ever; the barrier breaks instead."""
    barrier = threading.Barrier(2, timeout=20)

    class Meets(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            barrier.wait()
            return grad

    class Model(Recorder):
        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = Meets.apply(self.linear(x))
            return result

    CpuDataParallel(Model())(torch.randn(4, 3), (2, 2)).sum().backward()


class Nested(nn.Module):
    """Takes and gives nested values; shares a weight, and has a recurrent layer that lists its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 4, batch_first=True)
        self.encode = nn.Linear(4, 4)
        self.decode = nn.Linear(4, 4)
        self.decode.weight = self.encode.weight
        self.frozen = nn.Linear(4, 4).requires_grad_(False)

    def forward(self, inputs: dict[str, Any]) -> dict[str, Any]:
        hidden, _ = self.lstm(inputs["sequence"])
        x = self.decode(self.frozen(self.encode(hidden[:, -1]))) * inputs["pair"].left
        return {"x": x, "best": x.argmax(1), "more": [(x.sum(1), inputs["label"])], "none": None}


def test_nested_inputs_and_outputs_shared_frozen_and_recurrent_weights() -> None:
    torch.manual_seed(0)
    model = Nested().double()
    pair = Pair(torch.randn(7, 4).double(), [torch.randn(7)])
    inputs = {"sequence": torch.randn(7, 3, 4).double(), "pair": pair, "label": "as it is"}

    def gradients(outputs: dict[str, Any]) -> list[Tensor | None]:
        (outputs["x"].square().sum() + outputs["more"][0][0].prod()).backward()
        found = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
        model.zero_grad()
        return found

    outputs, expected = CpuDataParallel(model)(inputs, (4, 1, 2)), model(inputs)
    assert outputs["more"][0][1] == "as it is"
    assert outputs["none"] is None
    assert torch.equal(outputs["best"], expected["best"])
    for mine, stock in zip(gradients(outputs), gradients(expected), strict=True):
        assert (mine is None) == (stock is None)
        if mine is not None:
            torch.testing.assert_close(mine, stock, rtol=1e-12, atol=1e-14)


sizes = st.lists(st.integers(0, 5), min_size=1, max_size=5).filter(any)


@given(sizes)
def test_split_then_join_gives_the_tree_back(chunks: list[int]) -> None:
    rows = sum(chunks)
    tree = {
        "a": torch.arange(rows),
        "b": [Pair(torch.randn(rows, 2), 3), (torch.randn(rows), "x")],
        "c": OrderedDict(z=torch.randn(rows)),
        "d": defaultdict[str, Any](list, y=torch.randn(rows)),
        "e": Record(torch.arange(rows), "r"),
    }
    joined = join_rows(split_rows(tree, chunks))
    assert all(torch.equal(a, b) for a, b in zip(tensors_of(joined), tensors_of(tree), strict=True))
    kinds = [type(joined["b"][0]), type(joined["c"]), type(joined["d"]), type(joined["e"])]
    assert kinds == [Pair, OrderedDict, defaultdict, Record]
    assert joined["d"].default_factory is list


def test_inputs_of_different_lengths_are_refused_not_cut_short(wording: Wording) -> None:
    inputs = (torch.zeros(9, 1), torch.zeros(8, 1))
    with wording.raises(ValueError):
        split_rows(inputs, (3, 3, 3))


def test_tensors_without_dimensions_go_to_all() -> None:
    parts = split_rows((torch.zeros(3), torch.tensor(2.0)), (1, 2))
    assert [part[1].item() for part in parts] == [2.0, 2.0]


def test_cuda_scatter_hands_the_chunk_sizes_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """No GPU here: what torch's scatter would copy is cut on the CPU by the sizes that it is given."""
    calls: list[tuple[Any, ...]] = []

    class FakeScatter:
        @staticmethod
        def apply(devices: Any, chunks: list[int], dim: int, tensor: Tensor) -> tuple[Tensor, ...]:
            calls.append((devices, chunks, dim))
            parts: tuple[Tensor, ...] = tensor.split(chunks, dim)
            return parts

    monkeypatch.setattr(data_parallel, "Scatter", FakeScatter)
    model = StockDataParallel(nn.Identity())
    model.chunks = (5, 1)
    inputs, kwargs = model.scatter(({"x": torch.arange(6), "y": (torch.zeros(6), "s")},), None, [0, 1])
    assert calls == [([0, 1], [5, 1], 0)] * 2
    assert [part[0]["x"].tolist() for part in inputs] == [[0, 1, 2, 3, 4], [5]]
    assert [part[0]["y"][1] for part in inputs] == ["s", "s"]
    assert kwargs == [{}, {}]


def test_cuda_apply_runs_the_replicas_that_have_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    def fake_apply(modules: Any, inputs: Any, kwargs: Any, devices: Any) -> list[Any]:
        return [
            (module(*given), device) for module, given, device in zip(modules, inputs, devices, strict=True)
        ]

    monkeypatch.setattr(data_parallel, "parallel_apply", fake_apply)
    model = StockDataParallel(nn.Identity())
    model.chunks, model.device_ids = (0, 2, 1), [4, 5, 6]
    replicas: list[Any] = [lambda given, name=name: (name, given, device_index()) for name in "abc"]
    results = model.parallel_apply(replicas, [("p",), ("q",), ("r",)], None)
    assert results == [(("b", "q", 1), 5), (("c", "r", 2), 6)]


@given(st.integers(1, 60), st.integers(1, 9))
def test_micro_batches_differ_by_one_at_most_and_none_is_empty(samples: int, accumulate: int) -> None:
    found = batches.micro_sizes(samples, accumulate)
    assert sum(found) == samples
    assert len(found) == min(samples, accumulate)
    assert max(found) - min(found) <= 1


@given(st.lists(st.integers(1, 9), min_size=1, max_size=4), st.integers(1, 5))
def test_every_row_is_computed_once_by_dp_and_by_ddp(split: list[int], accumulate: int) -> None:
    together = batches.micro_rows(split, accumulate, range(len(split)))
    apart = [micro for rank in range(len(split)) for micro in batches.micro_rows(split, accumulate, (rank,))]
    for micros in (together, apart):
        rows = sorted(row for micro in micros for start, stop in micro for row in range(start, stop))
        assert rows == list(range(sum(split)))
    assert all(any(stop > start for start, stop in micro) for micro in [*together, *apart])


def test_neighbouring_steps_draw_different_numbers() -> None:
    draws = {
        torch.rand((), generator=batches.step_generator(s, t)).item() for s in range(3) for t in range(50)
    }
    assert len(draws) == 150


def test_map_tensors_leaves_its_argument_alone() -> None:
    tree = {"x": torch.ones(2)}
    assert map_tensors(lambda tensor: tensor * 2, tree)["x"].tolist() == [2.0, 2.0]
    assert tree["x"].tolist() == [1.0, 1.0]
