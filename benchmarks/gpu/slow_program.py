"""A program that leaves to `gpurun improve` what only GPUs have: pinned memory, TF32, the fused optimizer.

Its samples are copied from memory that isn't pinned, its products are in fp32, and its optimizer takes one
parameter after the other.
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--batch", type=int, default=512, help="samples per rank and step")
    args = parser.parse_args()
    use_cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if use_cuda else "gloo")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if use_cuda else torch.device("cpu")
    torch.manual_seed(0)
    layers = (layer for _ in range(args.layers) for layer in (nn.Linear(args.width, args.width), nn.ReLU()))
    model = DistributedDataParallel(nn.Sequential(*layers).to(device))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, foreach=False)
    samples = TensorDataset(torch.randn(64 * args.batch, args.width))
    for _ in range(1000):
        for (inputs,) in DataLoader(samples, batch_size=args.batch):
            outputs = model(inputs.to(device, non_blocking=True))
            optimizer.zero_grad()
            outputs.pow(2).mean().backward()
            optimizer.step()


if __name__ == "__main__":
    main()
