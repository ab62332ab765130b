"""Calls of torch in a program's own files, changed from outside."""

import copy
import inspect
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, Sampler, TensorDataset, get_worker_info

from gpurun.launcher.worker.program.calls import (
    AskingWorkers,
    Changed,
    ProgramCalls,
    change,
    changed_module,
    library_of,
    num_ready,
    optimizers,
    shown,
)

LOADER, ADAMW = inspect.signature(DataLoader.__init__), inspect.signature(torch.optim.AdamW.__init__)
DATA, SHORT = TensorDataset(torch.arange(8.0)), TensorDataset(torch.arange(2.0))


@pytest.mark.parametrize(
    ("args", "kwargs", "wanted", "expected"),
    [
        ((DATA,), {}, {"num_workers": 2}, ((DATA,), {"num_workers": 2})),
        ((DATA,), {"num_workers": 1}, {"num_workers": 2}, ((DATA,), {"num_workers": 2})),
        ((DATA, 4, True), {}, {"batch_size": 8}, ((DATA, 8, True), {})),
        (
            (DATA,),
            {"num_workers": 1, "prefetch_factor": 4, "persistent_workers": True},
            {"num_workers": 0},
            ((DATA,), {"num_workers": 0, "prefetch_factor": None, "persistent_workers": False}),
        ),
        (
            (DATA,),
            {"num_workers": 1},
            {"prefetch_factor": 4},
            ((DATA,), {"num_workers": 1, "prefetch_factor": 4}),
        ),
    ],
)
def test_a_wanted_argument_replaces_what_is_passed(
    args: Any, kwargs: Any, wanted: Any, expected: Any
) -> None:
    changed = change(LOADER, args, kwargs, wanted)
    assert (changed.args, changed.kwargs) == expected
    assert changed.applied == wanted
    assert not changed.skipped


def test_what_means_nothing_to_a_call_is_skipped() -> None:
    alone = {"persistent_workers": True, "prefetch_factor": 4, "pages": 1, "pin_memory": True}
    changed = change(LOADER, (DATA,), {}, alone)
    assert changed.kwargs == {"pin_memory": True}
    assert changed.skipped == ("persistent_workers", "prefetch_factor", "pages")
    assert change(LOADER, (DATA,), {}, {}) == Changed((DATA,), {})


def test_only_one_implementation_of_an_optimizer_is_chosen() -> None:
    changed = change(ADAMW, ([],), {"foreach": True}, {"fused": True})
    assert changed.kwargs == {"foreach": None, "fused": True}
    assert changed.applied == {"fused": True}


def test_every_optimizer_is_called_by_its_own_constructor() -> None:
    names = {each.__name__ for each in optimizers()}
    assert {"SGD", "Adam", "AdamW", "Adagrad", "RMSprop"} <= names
    assert "Optimizer" not in names


class Loader(DataLoader[Any]):
    """A program's own."""

    def __init__(self, data: Any, **kwargs: Any) -> None:
        super().__init__(data, 4, **kwargs)


def weights() -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.zeros(2))]


def test_calls_of_own_files_are_changed_and_noted() -> None:
    original = DataLoader.__init__
    calls = ProgramCalls({"DataLoader": {"batch_size": 2}, "Optimizer": {"fused": True}}, notes=True)
    with calls.watch():
        loaders = [DataLoader(DATA, 4), DataLoader[Any](dataset=DATA, batch_size=4), Loader(DATA)]
        for _ in range(2):
            optimizers = [torch.optim.AdamW(weights(), 0.5), torch.optim.Adamax(weights())]
        copied = copy.copy(loaders[0])
    assert DataLoader.__init__ is original
    assert [each.batch_size for each in [*loaders, copied]] == [2, 2, 2, 2]
    assert DataLoader(DATA, 4).batch_size == 4
    assert [each.defaults.get("fused") for each in optimizers] == [True, None]
    first, second, third, adamw, adamax = calls.sites.values()
    assert {each.name for each in (first, second, third)} == {"DataLoader"}
    assert all(each.is_users and not each.library and each.file == __file__ for each in calls.sites.values())
    assert (first.given, first.parameters) == (
        {"dataset": "TensorDataset", "batch_size": "4"},
        ("dataset", "batch_size"),
    )
    assert second.line == first.line
    line = Path(__file__).read_text().splitlines()[first.line - 1]
    assert line[: first.end_column].endswith(" [DataLoader(DATA, 4)")
    assert line[: second.end_column].endswith(" DataLoader[Any](dataset=DATA, batch_size=4)")
    assert (second.parameters, second.applied) == (("dataset",), {"batch_size": 2})
    assert (adamw.name, adamw.count) == ("AdamW", 2)
    assert (adamax.applied, adamax.skipped) == ({}, ("fused",))


def test_a_place_has_what_any_of_its_calls_was_given() -> None:
    calls = ProgramCalls({"DataLoader": {"persistent_workers": True}}, notes=True)
    with calls.watch():
        loaders = [DataLoader(DATA, num_workers=workers) for workers in (0, 1, 0)]
    assert [each.persistent_workers for each in loaders] == [False, True, False]
    (site,) = calls.sites.values()
    assert (site.applied, site.count) == ({"persistent_workers": True}, 3)
    first, second = ({"dataset": "TensorDataset", "num_workers": str(workers)} for workers in (0, 1))
    assert (site.given, site.others) == (first, (second,))


class Repeating(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(8))


class Sharing(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        worker = get_worker_info()
        return iter(range(8)) if worker is None else iter(range(worker.id, 8, worker.num_workers))


@pytest.mark.parametrize(
    ("dataset", "num_workers", "repeats"),
    [(Repeating(), 2, "Repeating"), (Repeating(), 1, ""), (Sharing(), 2, ""), (DATA, 2, "")],
)
def test_workers_that_dont_ask_which_they_are_may_repeat_samples(
    tmp_path: Path, dataset: Any, num_workers: int, repeats: str
) -> None:
    calls, workers = ProgramCalls({}, notes=True), AskingWorkers(str(tmp_path / "workers"))
    with calls.watch(), ExitStack() as hooks:
        hooks.callback(workers.watch())
        loader = DataLoader(dataset, num_workers=num_workers)
        num = len(list(loader))
    assert num == len(DATA if dataset is DATA else range(8)) * (2 if repeats else 1)
    (site,) = calls.noted(workers.found)
    assert site.repeats == repeats


class OwnSampler(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(8))

    def __len__(self) -> int:
        raise AssertionError("it may draw here")


@pytest.mark.parametrize(
    ("options", "batches"),
    [
        ({"batch_size": 3}, 3),
        ({"shuffle": True}, 8),
        ({"batch_size": None}, 8),
        ({"sampler": OwnSampler()}, None),
    ],
)
def test_epochs_are_counted_for_the_longest_loader_of_a_place(
    options: dict[str, Any], batches: int | None
) -> None:
    """Of two epochs, with a shorter one for validation in between."""
    calls = ProgramCalls({}, notes=True)
    with calls.watch():
        train, val = (DataLoader(data, **more) for data, more in ((DATA, options), (SHORT, {})))
        for loader in (train, val, val, val, train):
            assert sum(1 for _ in loader)
    (site,) = calls.noted(())
    assert (site.epochs, site.batches) == (2, batches)


@pytest.mark.parametrize(("num_epochs", "drained"), [(1, 5), (2, 0)])
def test_batches_that_were_loaded_in_the_first_steps_are_counted(num_epochs: int, drained: int) -> None:
    """A worker loads all 8 batches while the first step is made; 2 are left in the end."""
    calls = ProgramCalls({}, notes=True)
    with calls.watch():
        loader = DataLoader(DATA, num_workers=1, prefetch_factor=8, persistent_workers=True)
        reading = iter(loader)
        next(reading)
        while num_ready(reading) != 7:
            time.sleep(0.001)
        calls.note_ready(is_first=True)
        for _ in range(num_epochs - 1):
            reading = iter(loader)
        for _ in range(5):
            next(reading)
        calls.note_ready(is_first=False)
    (site,) = calls.noted(())
    assert site.drained == drained
    assert num_ready(iter(DataLoader(DATA))) is None


def test_calls_of_libraries_stay_as_they_are(tmp_path: Path) -> None:
    package = tmp_path / "site-packages" / "trainers"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("def make(cls, *args, **kwargs): return cls(*args, **kwargs)\n")
    calls = ProgramCalls({"DataLoader": {"batch_size": 2}, "Optimizer": {"fused": True}}, notes=True)
    with pytest.MonkeyPatch.context() as patch, calls.watch():
        patch.syspath_prepend(package.parent)
        import trainers  # type: ignore[import-not-found]

        assert trainers.make(DataLoader, DATA, 4).batch_size == 4
        assert trainers.make(torch.optim.AdamW, weights()).defaults["fused"] is None
    assert [(each.is_users, each.library, each.applied) for each in calls.sites.values()] == [
        (False, "trainers", {})
    ] * 2


@pytest.mark.parametrize(
    ("module", "library"),
    [
        ("lightning.fabric.strategies.ddp", "lightning.fabric"),
        ("lightning.pytorch.strategies.ddp", "lightning.pytorch"),
        ("lightning_fabric.strategies.ddp", "lightning_fabric"),
        ("accelerate.accelerator", "accelerate"),
    ],
)
def test_libraries_of_one_package_are_told_apart(module: str, library: str, tmp_path: Path) -> None:
    code = compile("frame = sys._getframe()", str(tmp_path / "site-packages" / "ddp.py"), "exec")
    names: dict[str, Any] = {"__name__": module, "sys": sys}
    exec(code, names)
    assert library_of(names["frame"]) == library


def test_cudnn_has_its_flag_until_the_end() -> None:
    before = torch.backends.cudnn.benchmark
    with ProgramCalls({"cudnn": {"benchmark": not before}}).watch():
        assert torch.backends.cudnn.benchmark is not before
    assert torch.backends.cudnn.benchmark is before


def test_a_module_computes_in_bf16_and_returns_fp32() -> None:
    module = torch.nn.Linear(4, 4)
    assert changed_module(module, {"autocast": {}, "comm_hook": {}}) == {
        "autocast": "bfloat16",
        "comm_hook": "bf16",
    }
    found = module(torch.randn(2, 4))
    assert found.dtype == torch.float32
    assert torch.equal(found, found.bfloat16().float())  # it was rounded


def test_nothing_is_wrapped_that_isnt_wanted() -> None:
    before = DataLoader.__init__, torch.optim.SGD.__init__
    with ProgramCalls({"compile": {}}).watch():
        assert (DataLoader.__init__, torch.optim.SGD.__init__) == before


def test_arguments_are_shown_short() -> None:
    assert [shown(each) for each in (1, "a", [1, 2], len, DATA)] == [
        "1",
        "'a'",
        "[1, 2]",
        "len",
        "TensorDataset",
    ]
    assert len(shown("x" * 1000)) < 100
    assert shown(list(range(100))) == "list"
