"""`torch.compile` for the models of a launch."""

from torch import nn

SHAPES_PER_VARIANT = 4
"""Its own batch, a smaller last micro-batch, the whole batch of the gradient check, and one to spare."""


def compile_in_place(model: nn.Module, num_variants: int) -> None:
    """Has `model` compiled when it is first called with inputs of some shape.

    Every shape gets a graph of its own: one for all shapes would be worse for some splits than for others.
    Threads compile nothing in this process's name: worker processes of the compiler would take cores from
    the ranks that are measured.
    """
    import torch._dynamo.config as dynamo
    import torch._inductor.config as inductor

    dynamo.recompile_limit = max(dynamo.recompile_limit, SHAPES_PER_VARIANT * num_variants)
    inductor.compile_threads = 1
    model.compile(dynamic=False)
