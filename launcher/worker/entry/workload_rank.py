"""The body of a rank that trains a workload or runs a micro-benchmark: launch file in, records out."""

import os
from collections.abc import Sequence
from pathlib import Path

import torch

from gpurun.launcher.errors import MachineError
from gpurun.launcher.inspect.stacks import code_hashes
from gpurun.launcher.rundir.files import read_json
from gpurun.launcher.rundir.records import LaunchConfig, LossOver
from gpurun.launcher.worker.accelerators.runtime import runtime_of
from gpurun.launcher.worker.base.exit import exit_code, finish, print_to_log
from gpurun.launcher.worker.base.failure import record_failure
from gpurun.launcher.worker.base.journal import Journal
from gpurun.launcher.worker.base.process_group import Alone, Group, Peers, close_group, init_group
from gpurun.launcher.worker.meters.cpu_time import NoiseMeter
from gpurun.launcher.worker.meters.gpu_load import load_meter
from gpurun.launcher.worker.micro_benchmark import ProbeRounds, site_of
from gpurun.launcher.worker.profiling.step_traces import open_block
from gpurun.launcher.worker.training.balanced_split import resolve_balanced
from gpurun.launcher.worker.training.gradient_check import check_gradients, model_warnings
from gpurun.launcher.worker.training.load_workload import load_workload
from gpurun.launcher.worker.training.timed_rounds import TimedRounds, load_of
from gpurun.launcher.worker.training.traces import TraceRequests, profile
from gpurun.launcher.worker.training.trainer import Trainer
from gpurun.workloads.base import Workload
from gpurun.workloads.micro_benchmarks import Probe


def main(argv: Sequence[str]) -> None:
    """Runs rank `argv[1]` of the launch described in the file `argv[0]`; never returns."""
    rank = int(argv[1])
    config = read_json(Path(argv[0]), LaunchConfig)
    journal = Journal(config, rank)
    try:
        run_launch(journal)
    except BaseException as error:
        finish(report_failure(error, journal))
    finish(0)


def report_failure(error: BaseException, journal: Journal) -> int:
    """Writes why this rank fails, as a record and to the log; returns the exit code.

    `os.EX_IOERR` means that the run directory can't be written, not even that record; a rank uses it for
    nothing else.
    """
    try:
        if isinstance(error, MachineError):
            raise error
        config, rank = journal.config, journal.rank
        record = record_failure(journal.run, config.launch, rank, journal.variant, journal.stage, error)
    except MachineError as unwritable:
        print_to_log(str(unwritable))
        return os.EX_IOERR
    if isinstance(error, SystemExit):
        return exit_code(error)
    # A rank that only lost its peer isn't the cause: its traceback is in its record, not in its log.
    print_to_log(record.message if record.secondary else record.traceback or record.message)
    return 1


def run_launch(journal: Journal) -> None:
    """Builds the model once, checks the gradients, times all variants, then takes their traces."""
    config, rank = journal.config, journal.rank
    journal.enter("start")
    torch.set_num_threads(config.threads)
    peers: Peers = Alone()
    if config.backend is not None:  # with one rank too: DDP needs a group, and a program would have one
        init_group(config, rank)
        peers = Group()
    measure(journal, peers)
    if config.backend is not None:
        close_group()


def measure(journal: Journal, peers: Peers) -> None:
    """All that needs the model, which is freed when this returns: before the process group is closed."""
    config, rank = journal.config, journal.rank
    journal.enter("build")
    torch.manual_seed(config.seed)
    workload = load_workload(config.workload, dict(config.params), Path(config.job_dir))
    if isinstance(workload, Probe):
        site = site_of(config, rank)
        ProbeRounds(workload, site, journal, peers, noise=NoiseMeter(), load=load_meter(site.devices)).run()
        journal.enter("done")
        return
    device = torch.device(config.devices[rank])
    trainer = Trainer(workload, config, rank)
    clock = runtime_of(device).clock(device)
    journal.config = resolve_balanced(config, trainer, clock, peers, journal)
    check(trainer, journal)
    requests = TraceRequests(config, rank, open_block(journal.run, config.launch, rank))
    TimedRounds(journal.config, trainer, clock, peers, journal, device, requests, load_of(config, rank)).run()
    profile(trainer, journal, peers)
    measure_memory(trainer, journal, peers)
    add_code(journal)
    journal.enter("done")
    trainer.close()


def measure_memory(trainer: Trainer, journal: Journal, peers: Peers) -> None:
    """What memory holds in a step of each variant, after all timing: the step is slowed down many times."""
    if not journal.config.memory:
        return
    for variant in journal.config.variants:
        journal.enter("memory", variant.id)
        journal.add_memory(variant.id, trainer.memory_peak(variant))
        peers.barrier()


def add_code(journal: Journal) -> None:
    """Keeps which of the user's files the launch has loaded, by then all of them."""
    if journal.rank == 0:
        code = code_hashes(journal.config.job_dir)
        for variant in journal.config.variants:
            journal.add_facts(variant.id, code=code)


def check(trainer: Trainer, journal: Journal) -> None:
    """Whether every variant computes the one-device gradient; nothing is timed before that is known."""
    config = journal.config
    journal.enter("check")
    for variant in config.variants:
        journal.add_facts(
            variant.id,
            warnings=tuple(model_warnings(trainer)),
            flops_per_sample=trainer.trial.flops_per_sample,
            bytes_per_sample=trainer.trial.bytes_per_sample,
            loss=loss_over(trainer.workload),
        )
    if not config.gradient_check:
        return
    found = check_gradients(trainer, config, journal.rank, lambda variant: journal.enter("check", variant))
    for variant_id, facts in found.items():
        journal.add_facts(variant_id, **facts)


def loss_over(workload: Workload) -> LossOver:
    """What the loss is over its samples: the user's own training loop must weight it by that."""
    if workload.reduction == "sum":
        return "sum"
    return "mean" if workload.count is None else "counted"
