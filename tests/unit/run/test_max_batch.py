"""Doubling and halving find the largest batch; what it comes to; and where throughput bends."""

import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gpurun.launcher.compare.figures.size_curves import BatchCurve, BatchPoint
from gpurun.launcher.compare.figures.variant import knee
from gpurun.launcher.errors import Interrupted
from gpurun.launcher.jobfile.load import check_source
from gpurun.launcher.jobfile.model import JobSpec
from gpurun.launcher.jobfile.yaml.tree import parse_source
from gpurun.launcher.plan.combination import max_batch
from gpurun.launcher.plan.expand import assume_batch
from gpurun.launcher.processes.incoming_signals import interruptible
from gpurun.launcher.report.terminal.table import KNEE, batch_curve_lines
from gpurun.launcher.run.max_batch import (
    ENDLESS,
    MaxBatchSearch,
    NodeDevices,
    _kinds,
    _ways,
    bounds,
    combined,
    in_micro_batches,
    largest_step_s,
    most_step_s,
    with_margin,
)
from gpurun.launcher.rundir.files import append_lines, read_lines
from gpurun.launcher.rundir.records import MAX_STEP_S, Attempt, NodeRooms, Room
from gpurun.launcher.worker.training import max_batch_attempts
from gpurun.launcher.worker.training.max_batch_attempts import (
    MAX_SAMPLES,
    RESOLUTION,
    next_attempt,
    too_long,
)
from tests.launches import SETTINGS, max_batch_config
from tests.unit.plan.machines import FakeMachine
from tests.wording import Wording


@given(room=st.integers(0, 2 * MAX_SAMPLES), most=st.just(MAX_SAMPLES) | st.integers(1, 1000))
def test_the_search_ends_within_3_percent_below_what_fits(room: int, most: int) -> None:
    fits, fails, attempts = 0, None, 0
    while (batch := next_attempt(fits, fails, most)) is not None:
        attempts += 1
        assert batch <= most
        if batch <= room:
            fits = batch
        else:
            fails = batch
    assert attempts <= 30
    assert fits <= room
    assert fits == most or room - fits <= max(0, fits // RESOLUTION)
    assert 0 <= with_margin(fits) <= fits


def test_an_attempt_that_never_ended_failed() -> None:
    attempts = [
        ("begins", 1),
        ("fits", 1),
        ("begins", 2),
        ("fits", 2),
        ("begins", 4),
        ("fails", 4),
        ("begins", 3),
    ]
    assert bounds([Attempt(*attempt) for attempt in attempts]) == (2, 3)
    assert bounds([]) == (0, None)


def test_a_step_of_the_largest_batch_that_fits_is_known() -> None:
    fits = [Attempt("fits", batch, step_s=batch / 10) for batch in (1, 2, 4)]
    assert largest_step_s([*fits, Attempt("fails", 8), Attempt("fits", 6, step_s=0.7)]) == 0.7
    assert largest_step_s([Attempt("begins", 1)]) == 0.0


def job(text: str) -> JobSpec:
    return check_source(parse_source(f"workload: gpt\nglobal_batch: 1\n{text}".encode(), "job.yaml"), Path())


@pytest.mark.parametrize(
    ("text", "batch"),
    [
        ("split: even\ndevices: cpu:2\n", 40),
        ("split: balanced\ndevices: cpu:2\n", 120),
        ('split: "3:1"\ndevices: cpu:2\n', 80),
        ("strategy: single\ndevices: cpu:2\n", 100),
        ("compare: {split: [even, balanced]}\ndevices: cpu:2\n", 40),
    ],
)
def test_every_split_of_the_job_must_hold_the_batch(text: str, batch: int) -> None:
    caps = (100, 20)
    assert max_batch(job(text), caps if '"3:1"' not in text else (60, 24)) == batch


@pytest.mark.parametrize(
    ("text", "accumulate", "said"),
    [
        ("", 1, ""),
        ("accumulate: 4\n", 4, ", in 4 micro-batches"),
        (
            "accumulate: 4\ncompare: {accumulate: [8, 2]}\n",
            2,
            ", in 2 micro-batches, the fewest of those compared",
        ),
        ("compare: {accumulate: [1, 2]}\n", 1, ", in 1 micro-batch, the fewest of those compared"),
    ],
)
def test_devices_try_batches_in_the_fewest_micro_batches_of_the_job(
    text: str, accumulate: int, said: str, tmp_path: Path
) -> None:
    spec = job(f"devices: cpu:2\n{text}")
    machine: Any = SimpleNamespace(memory_available_gib=8, cpu_cores=4, free_cores=None)
    search = MaxBatchSearch(
        spec, machine, machine, tmp_path, tmp_path, ("cpu:0", "cpu:1"), SETTINGS, NodeDevices(0, 0, 2)
    )
    assert search.config(1, 0, None).accumulate == accumulate
    assert in_micro_batches(spec) == said


def test_batches_are_tried_with_every_combination_of_settings_that_change_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = "optimizer: foreach\ncompare: {checkpointing: [none, full], channels_last: [true]}\n"
    kinds = list(_kinds(job(text)))
    same = {"precision": "fp32", "params": {}, "optimizer": "foreach", "channels_last": True}
    assert kinds == [same | {"checkpointing": "none"}, same | {"checkpointing": "full"}]
    monkeypatch.setattr(max_batch_attempts, "Trainer", lambda workload, launch, index: launch)
    launch = max_batch_attempts.trainer_of(max_batch_config(settings=kinds[1]))
    assert {name: getattr(launch, name) for name in kinds[1]} == kinds[1]


@pytest.mark.parametrize(
    ("text", "keeps", "views"),
    [
        ("", True, False),
        ("strategy: dp\n", False, False),
        ("compare: {strategy: [single, ddp]}\n", True, False),
        ("gradient_as_bucket_view: true\n", True, True),
        ("compare: {gradient_as_bucket_view: [true, false]}\n", True, False),
    ],
)
def test_batches_are_tried_next_to_the_memory_of_ddps_buckets(
    text: str, keeps: bool, views: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = job(f"devices: cpu:2\n{text}")
    machine: Any = SimpleNamespace(memory_available_gib=8, cpu_cores=4, free_cores=None)
    config = MaxBatchSearch(
        spec, machine, machine, tmp_path, tmp_path, ("cpu:0",), SETTINGS, NodeDevices(0, 0, 1)
    ).config(0, 0, None)
    model, filled, held = torch.nn.Linear(4, 4), [], list[int]()
    original = max_batch_attempts.buckets_like

    def buckets_like(model: torch.nn.Module) -> list[torch.Tensor]:
        held.append(1)
        return original(model)

    monkeypatch.setattr(max_batch_attempts, "buckets_like", buckets_like)
    trainer: Any = SimpleNamespace(
        model=model,
        device=torch.device("cpu"),
        prepare=lambda *_: None,
        step=lambda *_: filled.append(all(p.grad is not None for p in model.parameters())),
    )
    assert max_batch_attempts.attempt(trainer, config, 1)
    assert filled == [views] * max_batch_attempts.NUM_STEPS
    assert len(held) == keeps


def points(*figures: tuple[int, float]) -> tuple[BatchPoint, ...]:
    return tuple(BatchPoint(f"v{batch}", batch, per_s) for batch, per_s in figures)


def test_the_knee_is_the_first_batch_within_a_tenth_of_the_best() -> None:
    assert knee(points((8, 50.0), (16, 91.0), (32, 99.0), (64, 100.0))) == 16
    assert knee(points((8, 50.0), (16, 70.0), (32, 100.0))) is None
    assert knee(points((8, 100.0), (16, 100.0), (32, 60.0))) == 8


def test_the_picture_marks_the_knee(wording: Wording) -> None:
    found = points((8, 50.0), (16, 91.0), (32, 100.0))
    lines = batch_curve_lines([BatchCurve("ddp even on 2", found, 16)])
    wording(lines[0])
    assert lines[2].split()[:2] == ["8", "50.0"]
    assert [line.count("#") for line in lines[2:5]] == [20, 36, 40]
    assert ["knee" in line for line in lines[2:5]] == [False, True, False]
    assert lines[5:] == [f"  {KNEE}"]
    assert "No knee" in batch_curve_lines([BatchCurve("dp even", found, None)])[-1]


def search_in(directory: Path, *devices: list[Attempt]) -> MaxBatchSearch:
    """A search whose processes have left these attempts."""
    spec = job("devices: cpu:2\ntimeout: 2m\n")
    nothing: Any = None
    search = MaxBatchSearch(
        spec, nothing, nothing, directory, directory, ("cpu:0", "cpu:1"), SETTINGS, NodeDevices(0, 0, 2)
    )
    for index, attempts in enumerate(devices):
        append_lines(search.path(index), attempts)
    return search


def test_a_search_that_memory_did_not_end_found_at_least_so_much(tmp_path: Path, wording: Wording) -> None:
    slow = [Attempt("fits", 4096), Attempt("done", 0, "a step of 4,096 takes more than 10 s")]
    full = [Attempt("fits", 100), Attempt("fails", 102), Attempt("done", 0)]
    search = search_in(tmp_path, slow, full)
    wording(str(search.found(0)))
    assert str(search.found(1)) == "95"
    assert min(search.found(0), search.found(1)).samples == 95


def test_where_the_dataset_ends_no_margin_is_due(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wording: Wording
) -> None:
    """Two devices share the dataset; the second one is refused memory for its share."""
    data = SimpleNamespace(workload=SimpleNamespace(dataset=range(512)))
    monkeypatch.setattr(max_batch_attempts, "trainer_of", lambda config: data)
    monkeypatch.setattr(
        max_batch_attempts, "attempt", lambda _, config, batch: batch < 200 or not config.index
    )
    for index in range(2):
        config = max_batch_config(index=index, num_devices=2, attempts=str(tmp_path / f"{index}.jsonl"))
        max_batch_attempts.search(config)
    search = search_in(tmp_path)
    assert [search.found(index).samples for index in range(2)] == [256, 186]
    lines: list[str] = []
    found = [search.found(0)] * 2
    spec = job("devices: cpu:2\n")
    assert combined(spec, [NodeRooms(search.devices, tuple(found), 0.1)], lines.append).global_batch == 512
    wording(*lines)


def test_a_search_without_time_reports_what_it_knows_and_what_to_do(tmp_path: Path, wording: Wording) -> None:
    wording(search_in(tmp_path, [Attempt("fits", 256), Attempt("begins", 512)], []).timeout_text())


def test_what_is_interrupted_before_a_run_began_claims_to_keep_nothing() -> None:
    with pytest.raises(Interrupted, match=r"^interrupted by Ctrl-C$"), interruptible(lambda: None):
        signal.raise_signal(signal.SIGINT)


def test_where_nothing_fails_the_searchs_own_limit_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wording: Wording
) -> None:
    """No memory runs out in steps that take none."""
    config = max_batch_config(workload="sleep", attempts=str(tmp_path / "0.jsonl"), fits=MAX_SAMPLES // 2)
    monkeypatch.setattr(max_batch_attempts, "attempt", lambda *_: True)
    max_batch_attempts.search(config)
    last = list(read_lines(tmp_path / "0.jsonl", Attempt))[-1]
    wording(last.message)
    assert last.outcome == "done"


@pytest.mark.parametrize(
    ("strategy", "batch", "said"),
    [
        ("ddp", 9, "10 on cpu:0@0, 3 on cpu:0@1, 4 on cpu:1@1"),
        ("dp", 10, "10 on cpu:0@0"),
    ],
)
def test_all_nodes_hold_the_batch_unless_one_process_is_all(strategy: str, batch: int, said: str) -> None:
    spec = job(f"devices: [cpu:0@0, cpu:0@1, cpu:1@1]\nnodes: 2\nstrategy: {strategy}\n")
    rooms = (Room(3), Room(4)) if strategy == "ddp" else (ENDLESS, ENDLESS)
    found = [
        NodeRooms(("cpu:0@0",), (Room(10),), 0.1),
        NodeRooms(("cpu:0@1", "cpu:1@1"), rooms, 0.3),
    ]
    lines: list[str] = []
    most = combined(spec, found, lines.append)
    assert (most.global_batch, most.step_s) == (batch, 0.3)
    assert lines == [f"global_batch: max is {batch}: there is room for {said}"]


def test_a_node_without_ranks_tries_nothing() -> None:
    assert _ways(job("devices: cpu:1\nnodes: 2\nstrategy: dp\n"), ("cpu:0",), 1) == []
    assert _ways(job("devices: cpu:1\nnodes: 2\nstrategy: ddp\n"), ("cpu:0",), 1) == [False]


def test_before_the_batch_is_found_all_figures_are_said_to_assume_one() -> None:
    text = b"workload: gpt\nglobal_batch: max\ndevices: cpu:2\n"
    spec, notes = assume_batch(check_source(parse_source(text, "job.yaml"), Path()), FakeMachine())
    figures = f"all figures here, such as how long it takes, assume {spec.global_batch} samples"
    assert notes == (f"`global_batch: max` is found when the run begins; {figures}",)


def test_the_reference_says_from_which_step_on_no_larger_batch_is_tried() -> None:
    reference = Path(__file__).parents[3] / "docs/job-file.md"
    (row,) = (
        line for line in reference.read_text().splitlines() if line.startswith("| `global_batch` | `max`")
    )
    assert f"the first batch whose step takes more than {MAX_STEP_S:g} s" in row


@pytest.mark.parametrize(
    ("more", "step_s"),
    [
        ("compare: {split: [even, '3:1']}\nbudget: 36s\n", 0.1),
        ("compare: {split: [even, '3:1']}\nbudget: 10h\n", MAX_STEP_S),
        ("compare: {split: [even, '3:1']}\nsteps: {rounds: 4}\n", MAX_STEP_S),
        ("budget: 36s\n", MAX_STEP_S),  # nothing is compared
    ],
)
def test_on_cpus_steps_are_short_enough_to_be_compared_within_the_budget(more: str, step_s: float) -> None:
    assert most_step_s(job(f"devices: cpu:2\n{more}")) == pytest.approx(step_s)


def test_a_batch_that_is_too_slow_for_the_budget_says_so(wording: Wording) -> None:
    wording(too_long(4096, MAX_STEP_S), too_long(64, 1 / 6))
