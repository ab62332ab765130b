"""Trains a small model on all ranks, and goes on from its last checkpoint when it is started again.

    gpurun examples/checkpoint.yaml, or
    torchrun --nproc-per-node 2 --max-restarts 3 examples/checkpoint.py --directory /tmp/checkpoints

Weights at the end are the same to the last bit, however often it was killed on the way: a step depends on its
number, on the weights and on the optimizer's state only.
"""

import argparse
import gc
import hashlib
import os
import signal
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.parallel import DistributedDataParallel

COMPLETE = ".metadata"
"""torch writes this file of a checkpoint last, so that one without it is known to be half of one."""


def main() -> None:
    options = parse_arguments()
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    train(options)
    # The model goes before the group: freed after it, torch 2.13 may wait for a thread of gloo for ever.
    gc.collect()
    dist.barrier()
    dist.destroy_process_group()


def train(options: argparse.Namespace) -> None:
    """From the newest checkpoint, if there is one, to the last step."""
    use_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if use_gpu else torch.device("cpu")
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 1)).to(device)
    model = DistributedDataParallel(network)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    done = load(options.directory, model, optimizer)
    for step in range(done, options.steps):
        train_step(model, optimizer, step, device)
        if (step + 1) % options.every == 0:
            save(options.directory, step + 1, model, optimizer)
        if step == options.die_at and done == 0 and dist.get_rank() == dist.get_world_size() - 1:
            os.kill(os.getpid(), signal.SIGKILL)  # what a test of the restart does
    if dist.get_rank() == 0:
        print(f"began at step {done}, weights {digest(model)}", flush=True)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--directory", type=Path, default=Path("checkpoints"))
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--every", type=int, default=5, help="steps between two checkpoints")
    parser.add_argument("--die-at", type=int, default=-1, help="the last rank kills itself then, once")
    return parser.parse_args()


def train_step(
    model: DistributedDataParallel, optimizer: torch.optim.Optimizer, step: int, device: torch.device
) -> None:
    """One step on this rank's part of the step's data."""
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    x = torch.randn(16, 32, generator=generator).to(device)
    loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def save(directory: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """All ranks write their part; the checkpoint counts once it is complete."""
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=directory / f"step{step}")


def load(directory: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Steps that were done before the newest complete checkpoint, which is loaded; 0 where there is none."""
    complete = [path.parent for path in directory.glob(f"step*/{COMPLETE}")]
    steps = sorted(int(path.name.removeprefix("step")) for path in complete)
    if not steps:
        return 0
    weights, state = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optimizer": state}, checkpoint_id=directory / f"step{steps[-1]}")
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
    return steps[-1]


def digest(model: nn.Module) -> str:
    """A hash of all weights, to the last bit."""
    weights = [parameter.detach().cpu().numpy().tobytes() for parameter in model.parameters()]
    return hashlib.sha256(b"".join(weights)).hexdigest()[:16]


if __name__ == "__main__":
    main()
