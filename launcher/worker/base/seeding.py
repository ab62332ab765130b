"""Seeds for what a program draws at random, so that the order in which it draws changes nothing."""

import functools
import importlib
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary
from zlib import crc32

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader
from torch.utils.data._utils.fetch import _MapDatasetFetcher
from torch.utils.data.dataloader import _BaseDataLoaderIter


def seed(value: int | None) -> None:
    """Seeds all random number generators; `None`: leaves them as they are."""
    if value is None:
        return
    random.seed(value)
    torch.manual_seed(value)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(value % 2**32)


@contextmanager
def own_numbers(*of: object) -> Iterator[None]:
    """Within it, numbers on the host are drawn from a seed that `of` makes; afterwards all is as before."""
    numpy = sys.modules.get("numpy")
    states = random.getstate(), torch.get_rng_state(), numpy.random.get_state() if numpy else None
    seed_host(*of)
    try:
        yield
    finally:
        random.setstate(states[0])
        torch.set_rng_state(states[1])
        if numpy is not None and states[2] is not None:
            numpy.random.set_state(states[2])


def seed_host(*of: object) -> None:
    """Seeds all but the generators of GPUs."""
    value = crc32(repr(of).encode())
    random.seed(value)
    torch.default_generator.manual_seed(value)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(value)


class SeededSamples:
    """A dataset whose samples each draw from their own seed, in whichever process, order and batch."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __getitem__(self, index: Any) -> Any:
        seed_host(index)
        return self.dataset[index]


@dataclass
class _Pass:
    """An iterator's way over its sampler."""

    number: int
    sampler: Any
    num_batches: int = 0


@dataclass
class StepSeeds:
    """Seeds every step by its number, every sample by its index, and every batch's indices by their position.

    What reads data ahead, or in other processes, and what compiles, draws in another order than the program
    as it is. Spawned processes and datasets that are iterated have their own numbers all the same.
    """

    rank: int
    world_size: int
    num_steps: int = 0
    num_passes: int = 0
    """How often a DataLoader was iterated."""
    _passes: "WeakKeyDictionary[Any, _Pass]" = field(default_factory=WeakKeyDictionary)

    def watch(self) -> ExitStack:
        """Seeds from now on; closing the returned stack ends it."""
        hooks = ExitStack()
        hooks.callback(register_optimizer_step_post_hook(lambda *_: self._next_step()).remove)
        hooks.callback(replaced(_MapDatasetFetcher, "fetch", self._fetch))
        hooks.callback(replaced(DataLoader, "__iter__", self._iterate))
        hooks.callback(replaced(_BaseDataLoaderIter, "_next_index", self._next_index))
        inductor: Any = importlib.import_module("torch._inductor.config")
        hooks.callback(setattr, inductor, "fallback_random", inductor.fallback_random)
        inductor.fallback_random = True  # compiled dropout then draws what torch itself draws
        return hooks

    def _next_step(self) -> None:
        self.num_steps += 1
        seed(self.num_steps * self.world_size + self.rank)

    def _fetch(self, original: Callable[..., Any], fetcher: Any, index: Any) -> Any:
        dataset, fetcher.dataset = fetcher.dataset, SeededSamples(fetcher.dataset)
        try:
            with own_numbers(index):
                return original(fetcher, index)
        finally:
            fetcher.dataset = dataset

    def _iterate(self, original: Callable[..., Any], loader: Any) -> Any:
        """With workers, the first batches are chosen in here, else later."""
        self.num_passes += 1
        number = self.num_passes
        with own_numbers(number):
            iterator = original(loader)
        if isinstance(iterator, _BaseDataLoaderIter):
            self._pass_of(iterator, number)
        return iterator

    def _next_index(self, original: Callable[..., Any], iterator: Any) -> Any:
        current = self._pass_of(iterator, self.num_passes)
        current.num_batches += 1
        with own_numbers(current.number, current.num_batches):
            return original(iterator)

    def _pass_of(self, iterator: Any, number: int) -> _Pass:
        """Persistent workers have one iterator for all passes, with another sampler each time."""
        found = self._passes.get(iterator)
        if found is None or found.sampler is not iterator._sampler_iter:
            found = self._passes[iterator] = _Pass(number, iterator._sampler_iter)
        return found


def replaced(owner: Any, name: str, method: Callable[..., Any]) -> Callable[[], None]:
    """Has `method` called with the original before the arguments; returns what undoes that."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return method(original, *args, **kwargs)

    setattr(owner, name, wrapper)
    return lambda: setattr(owner, name, original)
