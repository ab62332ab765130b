"""The layers of a model that repeat: they are sharded one by one, and may compute activations again."""

from collections import Counter
from collections.abc import Sequence
from functools import wraps
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


def checkpoint_blocks(blocks: Sequence[nn.Module], which: int | str) -> None:
    """Has some of the blocks drop their activations, and compute them again in the backward pass.

    By a class of their own, as FSDP does it: names of parameters stay, and so do copies of the model.

    Args:
        blocks: of a model, in its order.
        which: `none`, `full`, or a number n for every n-th one, the first one included.
    """
    if which == "none":
        return
    classes = {kind: checkpointed(kind) for kind in {type(block) for block in blocks}}
    for block in blocks[:: which if isinstance(which, int) else 1]:
        block.__class__ = classes[type(block)]


def checkpointed(kind: type[nn.Module]) -> type[nn.Module]:
    """The class of modules, with a forward pass that keeps nothing but its inputs."""

    @wraps(kind.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(kind.forward, self, *args, use_reentrant=False, **kwargs)

    return type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})


def blocks_of(model: nn.Module, named: Sequence[type[nn.Module]] = ()) -> list[nn.Module]:
    """The modules that are sharded one by one: those of the classes `named`, else the layers that repeat.

    Among modules next to each other, nearest to the top, those of one class count that have most parameters.
    None where parameters of a block are used elsewhere, too.
    """
    if named:
        blocks = [module for module in model.modules() if isinstance(module, tuple(named))]
    else:
        level, blocks = [model], []
        while level and not blocks:
            groups = [layers_of(module) for module in level]
            blocks = max((repeated(layers) for layers in groups), key=num_parameters, default=[])
            level = [layer for layers in groups for layer in layers]
    uses = Counter(id(p) for module in model.modules() for p in module._parameters.values() if p is not None)
    own = Counter(id(p) for b in blocks for m in b.modules() for p in m._parameters.values() if p is not None)
    seen = Counter(id(p) for block in blocks for p in block.parameters())
    is_shared = any(uses[p] != count for p, count in own.items()) or any(n > 1 for n in seen.values())
    return [] if is_shared else blocks


def layers_of(module: nn.Module) -> list[nn.Module]:
    """Its modules, in place of lists and sequences those in them."""
    return [
        layer
        for child in module.children()
        for layer in (layers_of(child) if type(child) in CONTAINERS else [child])
    ]


def repeated(layers: Sequence[nn.Module]) -> list[nn.Module]:
    """Those of the class with most parameters among those that there are several of."""
    by_class: dict[type, list[nn.Module]] = {}
    for layer in layers:
        by_class.setdefault(type(layer), []).append(layer)
    several = (found for found in by_class.values() if len(found) > 1 and num_parameters(found))
    return max(several, key=num_parameters, default=[])


def num_parameters(modules: Sequence[nn.Module]) -> int:
    return sum(p.numel() for module in modules for p in module.parameters())
