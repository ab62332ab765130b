"""Lightning's Trainer, as it is:  gpurun run with_lightning.py --devices cpu:2

It needs: pip install lightning

gpurun starts the ranks, as torchrun would; `devices` has to be their number on one machine.
"""

import os

import lightning
import torch

STEPS = 40


class Regression(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 1)

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        x, target = batch
        return (self.layer(x) - target).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


def main() -> None:
    lightning.seed_everything(0)
    inputs = torch.randn(800, 8)
    dataset = torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True))
    trainer = lightning.Trainer(
        accelerator="auto",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        strategy="ddp",
        max_steps=STEPS,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Regression(), torch.utils.data.DataLoader(dataset, batch_size=4))
    if trainer.global_rank == 0:
        print("world size", trainer.world_size, "steps", trainer.global_step)


if __name__ == "__main__":
    main()
