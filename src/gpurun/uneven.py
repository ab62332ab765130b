"""Trains with an uneven split in a DDP loop of your own, with the gradients of the whole batch.

    from gpurun.uneven import UnevenBatches

    batches = UnevenBatches(dataset, split=(46, 18), rank=rank)       # samples of each rank
    loader = DataLoader(dataset, batch_sampler=batches)
    for epoch in range(epochs):
        batches.set_epoch(epoch)
        for (inputs, targets), weight in zip(loader, batches.weights()):
            loss = weight * loss_function(model(inputs), targets)     # a mean over samples
            loss.backward()

For an iterable dataset, `UnevenStream` gives batches and weights together. Only training scripts import this
module: it needs torch, which the command never imports.
"""

from gpurun.launcher.worker.training.uneven import UnevenBatches, UnevenStream, loss_weight

__all__ = ["UnevenBatches", "UnevenStream", "loss_weight"]
