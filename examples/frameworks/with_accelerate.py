"""A loop with Accelerate, as it is:  gpurun run with_accelerate.py --devices cpu:2

It needs: pip install accelerate

Two micro-batches are accumulated, so that there are half as many steps as batches.
"""

import torch
from accelerate import Accelerator

STEPS = 40


def main() -> None:
    accelerator = Accelerator(cpu=not torch.cuda.is_available(), gradient_accumulation_steps=2)
    torch.manual_seed(0)
    inputs = torch.randn(2 * STEPS * 4 * accelerator.num_processes, 8)
    dataset = torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True))
    model = torch.nn.Linear(8, 1)
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.AdamW(model.parameters()), torch.utils.data.DataLoader(dataset, batch_size=4)
    )
    steps = 0
    for x, target in loader:
        with accelerator.accumulate(model):
            accelerator.backward((model(x) - target).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            steps += accelerator.sync_gradients
    accelerator.print("world size", accelerator.num_processes, "steps", steps)
    accelerator.end_training()


if __name__ == "__main__":
    main()
