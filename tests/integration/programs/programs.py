"""Programs that `torchrun` can run, chosen by their first argument; they know nothing of gpurun."""

import argparse
import atexit
import gzip
import multiprocessing
import os
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterable
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

IMPORTED_AS = __name__


class Squares(torch.utils.data.Dataset[torch.Tensor]):
    """Pickled by name, so that a spawned worker must find this file again."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((4,), float(index))


def network() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))


def train(model: torch.nn.Module, batches: Iterable[torch.Tensor]) -> None:
    optimizer = torch.optim.Adam(model.parameters())
    for batch in batches:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()


def ddp(args: argparse.Namespace) -> None:
    train(DistributedDataParallel(network()), [torch.randn(args.batch, 4) for _ in range(40)])
    dist.destroy_process_group()


def no_destroy(args: argparse.Namespace) -> None:
    train(DistributedDataParallel(network()), [torch.randn(8, 4) for _ in range(15)])
    dist.barrier()


def loader(args: argparse.Namespace) -> None:
    other = "spawn" if "GPURUN_SLOW_TESTS" in os.environ else "fork"  # seconds of imports
    for context in ("fork", other):
        data = torch.utils.data.DataLoader(
            Squares(), batch_size=8, num_workers=1, multiprocessing_context=context
        )
        train(network(), data)


def child_of(number: int) -> None:
    assert IMPORTED_AS == "__mp_main__", IMPORTED_AS
    sys.exit(number)


def children(args: argparse.Namespace) -> None:
    said = subprocess.run([sys.executable, "-c", "print(6 * 7)"], capture_output=True, text=True, check=True)
    assert said.stdout == "42\n"
    process = multiprocessing.get_context("spawn").Process(target=child_of, args=(7,))
    process.start()
    process.join()
    assert process.exitcode == 7


class Destroyed:
    """Writes a file in its destructor."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __del__(self) -> None:
        self.path.write_text("called")


def ending(args: argparse.Namespace) -> None:
    directory, rank = Path(os.environ["DIRECTORY"]), dist.get_rank()
    assert sys.stdin.read() == ""
    assert sys.argv[0] == "programs.py"
    assert Path(__file__).is_absolute()
    assert sys.path[0] == str(Path(__file__).parent)
    assert sys.modules["__main__"].ddp is ddp
    assert sys.modules["__main__"].__spec__ is None
    left_open = open(directory / f"open{rank}", "w")  # noqa: SIM115 - left open for good
    left_open.write("kept")
    vars(sys)["left_open"] = left_open
    vars(sys)["gone"] = weakref.proxy(Squares())  # of an object that is gone, as torch.compile leaves some
    zipped = gzip.open(directory / f"zipped{rank}", "wt")  # noqa: SIM115 - likewise
    zipped.write("kept")
    vars(sys)["zipped"] = zipped
    vars(sys)["destroyed"] = Destroyed(directory / f"destroyed{rank}")
    atexit.register(lambda: (directory / f"atexit{rank}").write_text("called"))
    threading.Timer(0.2, lambda: (directory / f"thread{rank}").write_text("waited for")).start()
    sys.exit()


def seeds(args: argparse.Namespace) -> None:
    print("first number", torch.rand(1).item())


def threads(args: argparse.Namespace) -> None:
    print("threads", torch.get_num_threads(), os.environ["OMP_NUM_THREADS"], os.environ["GIVEN"])


def chatty(args: argparse.Namespace) -> None:
    for burst in range(3):
        print(*(f"{burst}: line {number}" for number in range(40_000)), sep="\n", flush=True)
        while os.fstat(1).st_size > 100_000:  # until gpurun has moved it away
            time.sleep(0.01)


def wrong_exit(args: argparse.Namespace) -> None:
    if dist.get_rank() == 1:
        sys.exit(3)
    dist.barrier()


def early(args: argparse.Namespace) -> None:
    if dist.get_rank() == 0:
        os._exit(0)
    dist.barrier()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("name")
    parser.add_argument("--batch", type=int, default=8)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    globals()[args.name](args)


if __name__ == "__main__":
    main()
