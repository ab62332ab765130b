"""The body of a rank that trains a workload or runs a micro-benchmark: launch file in, records out.

A rank of a search tries one combination after the other, building all again each time.
"""

import gc
import itertools
import math
import os
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from gpurun.launcher.errors import MachineError
from gpurun.launcher.inspect.stacks import code_hashes
from gpurun.launcher.jobfile.kinds import workload_kind
from gpurun.launcher.plan.rank_config import LaunchConfig, TrialConfig
from gpurun.launcher.rundir.control import ControlBlock
from gpurun.launcher.rundir.files import RunDir, read_json, write_json
from gpurun.launcher.rundir.records import LossOver, TrialTimes
from gpurun.launcher.worker.accelerators.runtime import runtime_of
from gpurun.launcher.worker.base.exit import exit_code, finish, print_to_log
from gpurun.launcher.worker.base.failure import record_failure
from gpurun.launcher.worker.base.journal import Journal
from gpurun.launcher.worker.base.process_group import GroupPeers, Peers, close_group, init_group
from gpurun.launcher.worker.base.seeding import StepSeeds
from gpurun.launcher.worker.meters.cpu_time import NoiseMeter
from gpurun.launcher.worker.meters.gpu_load import LoadMeter, load_meter
from gpurun.launcher.worker.micro_benchmark import ProbeRounds, site_of
from gpurun.launcher.worker.profiling import open_block
from gpurun.launcher.worker.program.run_program import keep_to_own_places
from gpurun.launcher.worker.training.balanced_split import resolve_balanced
from gpurun.launcher.worker.training.gradient_check import check_gradients, model_warnings
from gpurun.launcher.worker.training.load_workload import load_workload
from gpurun.launcher.worker.training.observed import observe
from gpurun.launcher.worker.training.timed_rounds import (
    TimedRounds,
    TraceRequests,
    Turn,
    load_of,
    profile,
    run_in_turns,
)
from gpurun.launcher.worker.training.trainer import Trainer
from gpurun.workloads.base import Workload
from gpurun.workloads.micro_benchmarks import Probe


def main(argv: Sequence[str]) -> None:
    """Runs rank `argv[1]` of the launch described in the file `argv[0]`; never returns."""
    rank = int(argv[1])
    config = read_json(Path(argv[0]), LaunchConfig)
    if config.observe:
        keep_to_own_places(config.job_dir, RunDir(Path(config.run_dir)), config.launch)
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
    if config.seeds_steps:
        StepSeeds(rank, config.world_size).watch()  # for as long as the rank lives
    if rank >= config.world_size:  # the variants that needed this rank aren't measured any more
        journal.enter("done")
        return
    measure(journal, joined(config, rank))
    if config.backend is not None:
        close_group()


def joined(config: LaunchConfig, rank: int) -> Peers:
    """The other ranks, once all are there."""
    if config.backend is None:
        return Peers()
    init_group(config, rank)  # with one rank too: DDP needs a group, and a program would have one
    return GroupPeers()


def measure(journal: Journal, peers: Peers) -> None:
    """All that needs the models, which are freed when this returns: before the process group is closed."""
    config = journal.config
    journal.enter("build")
    if not workload_kind(config.workload).trains:
        probe = build(config)
        assert isinstance(probe, Probe)
        site = site_of(config, journal.rank)
        ProbeRounds(probe, site, journal, peers, NoiseMeter(), load_meter(site.devices)).run()
    elif config.takes_turns:
        measure_in_turns(config.parts, journal, peers)
    else:
        for part in config.parts:
            measure_in_turns((part,), journal, peers)
            release(part, journal.rank)
    journal.enter("done")


def measure_in_turns(configs: Sequence[LaunchConfig], journal: Journal, peers: Peers) -> None:
    """Measures strategies that hold their models at the same time; nothing of them is left afterwards."""
    block = open_block(journal.run, journal.config.launch, journal.rank)
    turns = [turn_of(config, journal, peers, block) for config in configs]
    run_in_turns(turns, peers)
    for timed in (turn.timed for turn in turns if turn.timed is not None):
        profile(timed.trainer, timed.config, journal, timed.peers)
        measure_memory(timed.trainer, timed.config, journal, timed.peers)
        add_code(timed.config, journal)
        timed.trainer.close()


def build(config: LaunchConfig) -> Workload | Probe:
    """The workload, the same on all ranks."""
    torch.manual_seed(config.seed)
    return load_workload(config.workload, dict(config.params), Path(config.job_dir))


def turn_of(config: LaunchConfig, journal: Journal, peers: Peers, block: ControlBlock | None) -> Turn:
    """One strategy of the launch, ready to be timed, with a model of its own.

    Args:
        config: of the strategy.
        journal: of this rank.
        peers: all ranks of the launch, which build one strategy after the other.
        block: of this rank.
    """
    rank = journal.rank
    peers.barrier()
    if rank >= config.world_size:
        return Turn(config)
    is_of_all = config.world_size == journal.config.world_size
    own_peers = peers if is_of_all else Peers()
    workload = build(config)
    assert isinstance(workload, Workload)
    device = torch.device(config.devices[rank])
    trainer = Trainer(workload, config, rank)
    clock = runtime_of(device).clock(device)
    is_first = config is journal.config or not journal.config.takes_turns
    config = resolve_balanced(config, trainer, clock, own_peers, journal)
    check(trainer, config, journal)
    if config.observe:
        observe(trainer, config, journal, own_peers)
    requests = TraceRequests(config, rank, block, answers=is_of_all and is_first)
    load = load_of(config, rank)
    return Turn(config, TimedRounds(config, trainer, clock, own_peers, journal, device, requests, load))


def measure_memory(trainer: Trainer, config: LaunchConfig, journal: Journal, peers: Peers) -> None:
    """Measures the memory in a step of each variant, after all timing: it slows the step down many times."""
    if not config.memory:
        return
    for variant in config.variants:
        journal.enter("memory", variant.id)
        journal.add_memory(variant.id, trainer.memory_peak(variant))
        peers.barrier()


def add_code(config: LaunchConfig, journal: Journal) -> None:
    """Keeps which of the user's files the launch has loaded, by then all of them."""
    if journal.rank == 0:
        code = code_hashes(config.job_dir)
        for variant in config.variants:
            journal.add_facts(variant.id, code=code)


def check(trainer: Trainer, config: LaunchConfig, journal: Journal) -> None:
    """Whether every variant computes the one-device gradient; nothing is timed before that is known."""
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


def release(config: LaunchConfig, rank: int) -> None:
    """Frees what a strategy has left, so that the next one finds a device as empty as the first."""
    if config.compile:
        torch._dynamo.reset()
    gc.collect()
    runtime_of(torch.device(config.devices[min(rank, config.world_size - 1)])).release_memory()


def loss_over(workload: Workload) -> LossOver:
    """The kind of the loss over its samples: the user's own training loop must weight it by that."""
    if workload.reduction == "sum":
        return "sum"
    return "mean" if workload.count is None else "counted"


WARMUP_STEPS = 3
"""The first allocates memory, and DDP orders its buckets by it; the last says how long a step is."""
MOST_STEPS = 1000
POLL_S = 0.002


def try_combinations(argv: Sequence[str]) -> None:
    """Runs rank `argv[1]` of the launch whose first trial is in the file `argv[0]`; never returns.

    The command ends it when there is nothing left to try.
    """
    first, rank = Path(argv[0]), int(argv[1])
    journal = Journal(await_trial(first).launch, rank)
    try:
        run_trials(journal, first)
    except BaseException as error:
        finish(report_failure(error, journal))


def run_trials(journal: Journal, first: Path) -> None:
    """Joins the other ranks, and answers one request after the other."""
    config = journal.config
    journal.enter("start")
    torch.set_num_threads(config.threads)
    peers = joined(config, journal.rank)
    block, load = open_block(journal.run, config.launch, journal.rank), load_of(config, journal.rank)
    for number in itertools.count(int(first.stem)):
        trial = await_trial(first.with_name(f"{number}.json"))
        journal.config = trial.launch
        times = measure_trial(trial, journal, peers, block, load)
        release(trial.launch, journal.rank)
        if journal.rank == 0:
            write_json(journal.run.trial_times(config.launch, number), times)


def await_trial(path: Path) -> TrialConfig:
    """The request in a file, which appears complete or not at all; waits until it is there."""
    while not path.exists():
        time.sleep(POLL_S)
    return read_json(path, TrialConfig)


def measure_trial(
    trial: TrialConfig, journal: Journal, peers: Peers, block: ControlBlock | None, load: LoadMeter
) -> TrialTimes:
    """The times of some steps of one variant; nothing of it is left afterwards."""
    config, rank = trial.launch, journal.rank
    device, variant = torch.device(config.devices[rank]), config.variants[0].id
    journal.enter("build", variant)
    workload = build(config)
    assert isinstance(workload, Workload), "a micro-benchmark is never searched"
    trainer = Trainer(workload, config, rank)
    clock = runtime_of(device).clock(device)
    journal.config = resolve_balanced(config, trainer, clock, peers, journal)
    requests = TraceRequests(config, rank, block)
    timed = TimedRounds(journal.config, trainer, clock, peers, journal, device, requests, load)
    (tried,) = journal.config.variants
    journal.enter("warmup", variant)
    *_, last_ns = timed.slowest([float(step.step_ns) for step in timed.run_steps(tried, WARMUP_STEPS)], tried)
    journal.enter("round", variant, 1)
    fewest = max(trial.steps, math.ceil(trial.least_ms * 1e6 / max(last_ns, 1.0)))
    timings = timed.run_steps(tried, min(fewest, MOST_STEPS))
    step_ns = timed.slowest([float(step.step_ns) for step in timings], tried)
    peak_bytes = None
    if config.memory:
        journal.enter("memory", variant)
        peak_bytes = int(max(peers.gather(float(trainer.memory_peak(tried).total))))
    trainer.close()
    return TrialTimes(tuple(step_ns), peak_bytes)
