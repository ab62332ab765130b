"""The body of a rank of a search: it tries one combination after the other, building all again each time."""

import itertools
import math
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from gpurun.launcher.rundir.control import ControlBlock
from gpurun.launcher.rundir.files import read_json, write_json
from gpurun.launcher.rundir.records import TrialConfig, TrialTimes
from gpurun.launcher.worker.accelerators.runtime import runtime_of
from gpurun.launcher.worker.base.exit import finish
from gpurun.launcher.worker.base.journal import Journal
from gpurun.launcher.worker.base.process_group import Alone, GroupPeers, Peers, init_group
from gpurun.launcher.worker.entry.workload_rank import release, report_failure
from gpurun.launcher.worker.meters.gpu_load import LoadMeter
from gpurun.launcher.worker.profiling import open_block
from gpurun.launcher.worker.training.balanced_split import resolve_balanced
from gpurun.launcher.worker.training.load_workload import load_workload
from gpurun.launcher.worker.training.timed_rounds import TimedRounds, load_of
from gpurun.launcher.worker.training.traces import TraceRequests
from gpurun.launcher.worker.training.trainer import Trainer
from gpurun.workloads.base import Workload

WARMUP_STEPS = 3
"""The first allocates memory, and DDP orders its buckets by it; the last says how long a step is."""
MOST_STEPS = 1000
POLL_S = 0.002


def main(argv: Sequence[str]) -> None:
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
    peers: Peers = Alone()
    if config.backend is not None:
        init_group(config, journal.rank)
        peers = GroupPeers()
    block, load = open_block(journal.run, config.launch, journal.rank), load_of(config, journal.rank)
    for number in itertools.count(int(first.stem)):
        trial = await_trial(first.with_name(f"{number}.json"))
        journal.config = trial.launch
        times = measure(trial, journal, peers, block, load)
        release(trial.launch, journal.rank)
        if journal.rank == 0:
            write_json(journal.run.trial_times(config.launch, number), times)


def await_trial(path: Path) -> TrialConfig:
    """The request in a file, which appears complete or not at all; waits until it is there."""
    while not path.exists():
        time.sleep(POLL_S)
    return read_json(path, TrialConfig)


def measure(
    trial: TrialConfig, journal: Journal, peers: Peers, block: ControlBlock | None, load: LoadMeter
) -> TrialTimes:
    """The times of some steps of one variant; nothing of it is left afterwards."""
    config, rank = trial.launch, journal.rank
    device, variant = torch.device(config.devices[rank]), config.variants[0].id
    journal.enter("build", variant)
    torch.manual_seed(config.seed)
    workload = load_workload(config.workload, dict(config.params), Path(config.job_dir))
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
