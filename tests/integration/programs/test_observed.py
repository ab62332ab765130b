"""What a program does is seen from outside: its calls, its losses, and the files that it writes."""

import json
import math
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from gpurun.launcher.rundir.files import RunDir, read_json, write_json
from gpurun.launcher.rundir.records import Observed, ProgramConfig, VariantRef
from tests.integration.command import TIMEOUT_S, free_port, write

LAUNCH = "01-script-2"
PROGRAM = """
    import os, random, sys
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, Dataset
    from torch.utils.data.distributed import DistributedSampler

    class Noisy(Dataset):
        def __len__(self):
            return 64

        def __getitem__(self, index):
            return torch.full((4,), float(index)) + torch.randn(4) + random.random()

    class Network(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused = torch.nn.Linear(4, 4), torch.nn.Linear(4, 2)

        def forward(self, batch):
            return torch.nn.functional.dropout(self.used(batch), 0.5, self.training)

    def prevented(write, *args):
        try:
            write(*args)
        except PermissionError:
            return
        raise AssertionError(args)

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    data = Noisy()
    loaders = [
        DataLoader(data, 4, sampler=DistributedSampler(data)),
        DataLoader(data, batch_size=4, shuffle=True),
    ]
    model = DistributedDataParallel(Network(), find_unused_parameters=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for loader in (*loaders, *loaders):
        for batch in loader:
            optimizer.zero_grad()
            loss = model(batch).square().mean()
            loss.backward()
            losses.append(loss.item())
            optimizer.step()
    rank = dist.get_rank()
    own = os.environ["GPURUN_LAUNCH_DIR"]
    torch.save(losses, os.path.join(own, f"losses{rank}.pt"))
    if "write" in sys.argv:
        if rank == 0:
            prevented(torch.save, model.state_dict(), "last.pt")
            prevented(os.makedirs, "out/1")
            prevented(os.replace, "old.txt", "best.pt")
            prevented(os.remove, "old.txt")
        prevented(open, f"log{rank}.txt", "w")
        open("train.py").close()
    if "killed" in sys.argv:
        dist.barrier()
        while True:
            batch = torch.zeros(2, 4)
            model(batch).sum().backward()
            optimizer.step()
    dist.destroy_process_group()
"""


SERVER = """
    import json, os, sys
    import torch._dynamo, torch._inductor.config  # else every rank does so at its first optimizer
    from gpurun.launcher.worker.program import program_rank

    for line in sys.stdin:
        env, config = json.loads(line)
        ranks = []
        for rank in range(2):
            if (pid := os.fork()) == 0:
                os.environ.update(env, RANK=str(rank), LOCAL_RANK=str(rank))
                program_rank.main([config, str(rank)])
            ranks.append(pid)
        print(*ranks, flush=True)
        print(*(os.waitpid(pid, 0)[1] for pid in ranks), flush=True)
"""
"""Starts ranks as the launcher's own server does, without what watches over them."""


@dataclass
class Ranks:
    """Launches of two ranks in one directory."""

    directory: Path
    server: "subprocess.Popen[str]"
    num_runs: int = 0

    def run(self, *args: str, calls: Mapping[str, Any] | None = None, **fields: Any) -> RunDir:
        """The directory of a run, once its ranks have ended; with `killed` once they wrote enough."""
        self.num_runs += 1
        run = RunDir(self.directory / f"run{self.num_runs}")
        config = ProgramConfig(
            launch=LAUNCH,
            run_dir=str(run.path),
            job_dir=str(self.directory),
            script="train.py",
            module=None,
            args=args,
            seed=None,
            world_size=2,
            warmup=10,
            variants=(VariantRef("script-2"),),
            calls=calls or {},
            observe=True,
        )
        write_json(run.launch_config(LAUNCH), replace(config, **fields))
        run.rendezvous(LAUNCH).write_text(str(free_port()))
        env = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}
        assert self.server.stdin is not None
        assert self.server.stdout is not None
        print(json.dumps([env, str(run.launch_config(LAUNCH))]), file=self.server.stdin, flush=True)
        pids = [int(pid) for pid in self.server.stdout.readline().split()]
        if "killed" in args:
            await_losses(run)
            for pid in pids:
                os.kill(pid, signal.SIGTERM)
        codes = self.server.stdout.readline().split()
        assert codes == (["15", "15"] if "killed" in args else ["0", "0"])
        return run


def await_losses(run: RunDir) -> None:
    """Returns once rank 0 has written the losses of a program that goes on."""
    deadline = time.monotonic() + TIMEOUT_S
    while not run.observed(LAUNCH).exists() or len(observed(run).losses) <= 60:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def observed(run: RunDir, rank: int = 0) -> Observed:
    return read_json(run.observed(LAUNCH, rank), Observed)


def own_losses(run: RunDir, rank: int = 0) -> list[float]:
    """The losses by the program itself."""
    found: list[float] = torch.load(run.program_files(LAUNCH) / f"losses{rank}.pt")
    return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    directory = tmp_path_factory.mktemp("observed")
    write(directory, "train.py", PROGRAM)
    (directory / "old.txt").touch()
    command = [sys.executable, "-P", "-c", textwrap.dedent(SERVER)]
    with subprocess.Popen(
        command, cwd=directory, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as server:
        yield Ranks(directory, server)
        assert server.stdin is not None
        server.stdin.close()


@pytest.fixture(scope="module")
def written(ranks: Ranks) -> RunDir:
    return ranks.run("write")


@pytest.fixture(scope="module")
def seeded(ranks: Ranks) -> RunDir:
    return ranks.run(seeds_steps=True)


def test_calls_are_noted_with_their_places_and_arguments(written: RunDir, ranks: Ranks) -> None:
    first, second, ddp, adamw = observed(written).calls
    lines = (ranks.directory / "train.py").read_text().splitlines()
    for site, text in ((first, "DataLoader(data, 4"), (ddp, "DistributedData"), (adamw, "AdamW(")):
        assert text in lines[site.line - 1]
        assert (site.file, site.is_users, site.count) == (str(ranks.directory / "train.py"), True, 1)
    assert (first.given["batch_size"], first.parameters) == ("4", ("dataset", "batch_size"))
    assert (second.given["shuffle"], second.parameters) == ("True", ("dataset",))
    assert (ddp.given["find_unused_parameters"], ddp.unused_bytes) == ("True", 40)
    assert adamw.name == "AdamW"


def test_losses_are_those_of_the_program(written: RunDir) -> None:
    for rank in range(2):
        found = observed(written, rank)
        assert found.loss_dtype == "float32"
        assert list(found.losses) == own_losses(written, rank)
    assert observed(written, 0).losses != observed(written, 1).losses


def test_files_that_ranks_want_to_write_are_noted_and_stay_as_they_are(written: RunDir, ranks: Ranks) -> None:
    def names(rank: int) -> list[str]:
        return [os.path.relpath(path, ranks.directory) for path in observed(written, rank).writes]

    assert names(0) == ["last.pt", "log0.txt", "old.txt", "out"]
    assert names(1) == ["log1.txt"]
    there = {path.name for path in ranks.directory.iterdir() if not path.name.startswith("run")}
    assert there == {"train.py", "old.txt"}


def test_what_is_known_is_written_while_the_program_runs(ranks: Ranks) -> None:
    found = observed(ranks.run("killed"))
    assert len(found.calls) == 4
    assert all(loss is not None and math.isfinite(loss) for loss in found.losses)


WORKERS = {"DataLoader": {"num_workers": 2, "persistent_workers": True, "prefetch_factor": 3}}


@pytest.mark.parametrize(
    "calls",
    [WORKERS, {"compile": {"backend": "aot_eager"}, "Optimizer": {"foreach": True}}],
    ids=["workers", "compile"],
)
def test_seeded_steps_have_the_same_losses_in_whichever_order_numbers_are_drawn(
    ranks: Ranks, seeded: RunDir, calls: dict[str, Any]
) -> None:
    changed = ranks.run(calls=calls, seeds_steps=True)
    applied = {key: value for site in observed(changed).calls for key, value in site.applied.items()}
    assert applied.keys() == ({"compile", "foreach"} if "compile" in calls else calls["DataLoader"].keys())
    for rank in range(2):
        assert own_losses(changed, rank) == own_losses(seeded, rank)


def test_without_seeds_workers_draw_other_numbers(ranks: Ranks, written: RunDir) -> None:
    changed = ranks.run(calls=WORKERS)
    assert own_losses(changed) != own_losses(written)


def test_without_being_asked_nothing_is_written(ranks: Ranks) -> None:
    run = ranks.run(observe=False)
    assert own_losses(run)
    assert not run.observed(LAUNCH).exists()
