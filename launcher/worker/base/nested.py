"""Nested inputs and outputs: cut along the samples, moved, and put together again.

A tree is a tensor, or a tuple, list, mapping, named tuple or dataclass of trees; anything else in it is
passed on unchanged. The samples lie along dimension 0 of every tensor; one without dimensions belongs to all.
"""

import copy
import dataclasses
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor

Tree = Any


def map_tensors(function: Callable[[Tensor], Any], tree: Tree) -> Tree:
    """`tree` with `function` applied to every tensor; containers are new and keep their types."""
    if isinstance(tree, Tensor):
        return function(tree)
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(map_tensors(function, item) for item in tree))
    if isinstance(tree, tuple | list):
        return type(tree)(map_tensors(function, item) for item in tree)
    if isinstance(tree, MutableMapping):
        mapped = copy.copy(tree)  # keeps a subclass's own state, such as a default factory
        for key, item in tree.items():
            mapped[key] = map_tensors(function, item)
        return mapped
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        fields = [field.name for field in dataclasses.fields(tree) if field.init]
        return dataclasses.replace(
            tree, **{name: map_tensors(function, getattr(tree, name)) for name in fields}
        )
    return tree


def tensors_of(tree: Tree) -> list[Tensor]:
    """All tensors of a tree, in the order in which `map_tensors` meets them."""
    found: list[Tensor] = []
    map_tensors(found.append, tree)
    return found


def with_tensors(tree: Tree, tensors: Sequence[Tensor] | Iterator[Tensor]) -> Tree:
    """`tree` with its tensors replaced, in the order of `tensors_of`."""
    replacements = iter(tensors)
    return map_tensors(lambda _: next(replacements), tree)


def row_counts(tree: Tree, dim: int = 0) -> set[int]:
    """The different numbers of samples that the tensors of a tree hold along `dim`; one, if all is well."""
    return {tensor.shape[dim] for tensor in tensors_of(tree) if tensor.dim() > dim}


def take_rows(tree: Tree, start: int, stop: int) -> Tree:
    """Samples `start` to `stop` (exclusive) of every tensor, as views."""
    return map_tensors(lambda tensor: tensor[start:stop] if tensor.dim() else tensor, tree)


def split_rows(tree: Tree, sizes: Sequence[int]) -> list[Tree]:
    """One tree per size, with that many samples each.

    The stock scatter cuts every tensor by its own length and then drops what has no partner: of inputs with
    9 and 8 rows on 4 devices it silently loses 2 rows. Here that is an error.

    Raises:
        ValueError: a tensor holds another number of samples than the sizes add up to.
    """
    counts = row_counts(tree) | {sum(sizes)}
    if len(counts) > 1:
        rows = ", ".join(str(count) for count in sorted(counts - {sum(sizes)}))
        raise ValueError(f"the batch has {sum(sizes)} samples, but it holds a tensor with {rows} rows")
    stops = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    return [take_rows(tree, stop - size, stop) for stop, size in zip(stops, sizes, strict=True)]


def join_rows(trees: Sequence[Tree], device: torch.device | None = None) -> Tree:
    """The samples of all trees in one, on `device`; tensors without dimensions become a vector.

    What is no tensor is taken from the first tree.
    """
    if len(trees) == 1:
        return trees[0] if device is None else map_tensors(lambda tensor: tensor.to(device), trees[0])
    return join_columns(trees, lambda tensors: join(tensors, device))


def join_columns(trees: Sequence[Tree], function: Callable[[Sequence[Tensor]], Tensor]) -> Tree:
    """The first tree, each of its tensors replaced by `function` of those in its place in all trees."""
    columns = zip(*(tensors_of(tree) for tree in trees), strict=True)
    return with_tensors(trees[0], map(function, columns))


def join(tensors: Sequence[Tensor], device: torch.device | None) -> Tensor:
    """Concatenates along dimension 0, scalars to a vector."""
    moved = [tensor if device is None else tensor.to(device) for tensor in tensors]
    return torch.cat([at_least_vector(tensor) for tensor in moved])


def at_least_vector(tensor: Tensor) -> Tensor:
    return tensor if tensor.dim() else tensor.unsqueeze(0)
