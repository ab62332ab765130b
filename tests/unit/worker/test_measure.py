"""Scheduling with a clock and a trainer whose every time is known."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest
import torch

from gpurun.launcher.compare.figures.recorded import round_times
from gpurun.launcher.errors import SpecError
from gpurun.launcher.machine.accelerators import accelerator_of
from gpurun.launcher.plan.rank_config import LaunchConfig
from gpurun.launcher.rundir.files import RunDir
from gpurun.launcher.rundir.records import BalanceConfig, Kind, ProfileConfig, StepRecord, VariantConfig
from gpurun.launcher.worker.accelerators.clock import HostClock, StepTiming
from gpurun.launcher.worker.base import journal as journal_module
from gpurun.launcher.worker.base.journal import Journal
from gpurun.launcher.worker.base.process_group import Peers
from gpurun.launcher.worker.entry.workload_rank import measure
from gpurun.launcher.worker.meters.gpu_load import LoadMeter
from gpurun.launcher.worker.training import timed_rounds
from gpurun.launcher.worker.training import trainer as trainer_module
from gpurun.launcher.worker.training.balanced_split import resolve_balanced
from gpurun.launcher.worker.training.gradient_check import weight_errors
from gpurun.launcher.worker.training.timed_rounds import TimedRounds, TraceRequests, Turn, run_in_turns
from gpurun.launcher.worker.training.trainer import Trainer
from tests.wording import Wording

MS = 1_000_000


@dataclass
class FakeInput:
    variant: VariantConfig
    step: int
    nbytes: int = 100 << 20


@dataclass
class FakeTrainer:
    """Takes a given time for each variant; `drawn` is what it was asked for, `ran` what it did."""

    step_ms: dict[str, float | Iterator[float]]
    now_ns: int = 0
    drawn: list[tuple[str, int]] = field(default_factory=list)
    ran: list[str] = field(default_factory=list)
    unsynced: list[str] = field(default_factory=list)
    restored: list[int] = field(default_factory=list)
    """How many steps without communication had been made at each `restore_state`."""
    warm_up_ms: list[float] = field(default_factory=list)
    state_bytes: int = 1 << 20
    model: Any = field(default_factory=lambda: torch.nn.Linear(1 << 9, 1 << 9, bias=False))  # as many bytes
    lacks_room = Trainer.lacks_room

    def prepare(self, variant: VariantConfig, step: int) -> FakeInput:
        self.now_ns += 500 * MS  # drawing a batch is slow, and must not be seen in any step
        self.drawn.append((variant.id, step))
        return FakeInput(variant, step)

    def set_process_state(self) -> None:
        pass

    def save_state(self) -> int:
        return len(self.ran)

    def restore_state(self, steps: int) -> None:
        assert self.ran[steps:] == self.unsynced[-len(self.ran[steps:]) :]  # no timed step is undone
        self.restored.append(len(self.unsynced))

    def step(self, step_input: FakeInput, clock: HostClock, sync: bool = True) -> None:
        if not sync:
            self.unsynced.append(step_input.variant.id)
            self.now_ns -= 10 * MS  # what communication takes
        extra_ms = self.warm_up_ms.pop(0) if self.warm_up_ms else 0.0
        step_ms = self.step_ms[step_input.variant.id.removesuffix("~control")]
        self.now_ns += round((extra_ms + (step_ms if isinstance(step_ms, float) else next(step_ms))) * MS)
        clock.mark("forward")
        self.ran.append(step_input.variant.id)


@dataclass
class SlowPeer(Peers):
    """Another rank that takes longer by `extra_ns`."""

    extra_ns: float = 0.0

    def maximum(self, values: Sequence[float]) -> list[float]:
        *steps_ns, bell = values
        return [*(step_ns + self.extra_ns for step_ns in steps_ns), bell]


def bench(
    tmp_path: Path,
    step_ms: dict[str, float | Iterator[float]],
    rounds: int = 28,
    **changes: Any,
) -> tuple[TimedRounds, FakeTrainer]:
    variants = tuple(VariantConfig(name, (4, 4), 1) for name in step_ms)
    fields: dict[str, Any] = {
        "launch": "01-ddp-2",
        "run_dir": str(tmp_path),
        "workload": "mlp",
        "job_dir": str(tmp_path),
        "params": {},
        "strategy": "ddp",
        "devices": ("cpu", "cpu"),
        "backend": "gloo",
        "precision": "fp32",
        "seed": 0,
        "threads": 1,
        "variants": variants,
        "baseline": next(iter(step_ms)),
        "warmup": 0,
        "rounds": rounds,
    }
    config = LaunchConfig(**{**fields, **changes})
    trainer = FakeTrainer(step_ms)
    clock = HostClock(now_ns=lambda: trainer.now_ns)
    journal = Journal(config, 0)
    device, requests = torch.device("cpu"), TraceRequests(config, 0, None)
    load = LoadMeter(device)
    measured = TimedRounds(config, cast(Trainer, trainer), clock, Peers(), journal, device, requests, load)
    return measured, trainer


def run_alone(measured: TimedRounds) -> None:
    """All rounds of a launch with one strategy."""
    run_in_turns([Turn(measured.config, measured)], measured.peers)


def records(tmp_path: Path, variant: str) -> list[StepRecord]:
    return RunDir(tmp_path).read_steps(variant)[0]


def test_a_block_lasts_200_ms_and_times_only_steps(tmp_path: Path) -> None:
    made, _ = bench(tmp_path, {"a": 30.0, "b": 450.0}, rounds=3)
    run_alone(made)
    timed = [record for record in records(tmp_path, "a") if record.kind == "timed"]
    assert [record.round for record in timed] == [1] * 7 + [2] * 7 + [3] * 7
    assert {record.step_ns for record in timed} == {30 * MS}
    assert len([record for record in records(tmp_path, "b") if record.kind == "timed"]) == 3


def test_every_round_has_every_variant_once_and_the_baseline_twice_in_changing_order(tmp_path: Path) -> None:
    made, trainer = bench(tmp_path, {"a": 200.0, "b": 200.0, "c": 200.0}, rounds=12)
    run_alone(made)
    rounds = [tuple(trainer.ran[28 + 4 * i : 32 + 4 * i]) for i in range(12)]
    assert all(sorted(order) == ["a", "a~control", "b", "c"] for order in rounds)
    assert len(set(rounds)) > 3
    blocks = {(r.round, r.order) for kind in ("a", "b", "c") for r in records(tmp_path, kind) if r.round}
    assert blocks == {(round_, order) for round_ in range(1, 13) for order in range(4)}
    assert len([record for record in records(tmp_path, "a") if record.kind == "aa"]) == 12


def test_no_sample_is_drawn_twice_and_memory_for_inputs_is_bounded(tmp_path: Path) -> None:
    made, trainer = bench(tmp_path, {"a": 10.0}, rounds=2)
    run_alone(made)
    steps = [step for name, step in trainer.drawn if name == "a"][
        1:
    ]  # the first draw only asked for the size
    assert steps == list(range(len(steps)))
    assert made.prefetch["a"] == 2


def test_a_variant_may_have_fewer_rounds_than_the_others(tmp_path: Path) -> None:
    variants = (VariantConfig("a", (4, 4), 1), VariantConfig("b", (4, 4), 1, rounds=2))
    made, _ = bench(tmp_path, {"a": 200.0, "b": 200.0}, rounds=5, variants=variants)
    run_alone(made)
    rounds = {
        name: [record.round for record in records(tmp_path, name) if record.kind == "timed"] for name in "ab"
    }
    assert rounds == {"a": [1, 2, 3, 4, 5], "b": [1, 2]}


@pytest.mark.parametrize(("device", "asked_in", "timed"), [("cpu", 1, 3), ("cuda", 1, 1), ("cuda", 0, 3)])
def test_on_a_gpu_no_round_is_timed_after_a_trace_on_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str, asked_in: int, timed: int
) -> None:
    """The profiler stays attached, which slows steps down; after one in the warm-up all are alike."""
    made, _ = bench(tmp_path, {"a": 200.0}, rounds=3)
    kind = replace(accelerator_of("cpu"), is_slow_after_trace=accelerator_of(device).is_slow_after_trace)
    monkeypatch.setattr(timed_rounds, "accelerator_of", Mock(return_value=kind))
    made.requests.block = block = Mock(bell=int(asked_in == 0))
    taken = Mock()
    monkeypatch.setattr(TraceRequests, "take", taken)
    run_block = made.run_block

    def ask(variant: VariantConfig, round_: int, *args: Any) -> None:
        block.bell = int(round_ >= asked_in)
        run_block(variant, round_, *args)

    monkeypatch.setattr(made, "run_block", ask)
    run_alone(made)
    assert taken.call_count == 1
    kinds = {record.round: record.kind for record in records(tmp_path, "a") if record.kind != "warmup"}
    assert [round_ for round_, kind in kinds.items() if kind in ("timed", "aa")] == [*range(1, timed + 1)]
    assert all(kind == "profile" for round_, kind in kinds.items() if round_ > timed)


def test_of_a_long_launch_all_ranks_keep_the_same_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All steps at first, then one of each block; the times of the rounds that are kept are exact."""
    monkeypatch.setattr(journal_module, "MAX_KEPT_STEPS", 20)
    monkeypatch.setattr(journal_module, "MAX_LATE_EVENTS", 50)
    config = bench(tmp_path, {"a": 200.0, "b": 200.0})[0].config
    run, times = RunDir(tmp_path), {}
    journals = [Journal(config, rank) for rank in (0, 1)]
    for journal in journals:
        journal.sample.most = 16
        journal.add_steps("a", "warmup", [StepTiming(7, {})] * 3)
        for number in range(1, 401):
            for order, name in enumerate(("a", "b", "a")):
                kind: Kind = "aa" if order == 2 else "timed"
                timings = [StepTiming(1000 * number + step * (journal.rank + 1), {}) for step in range(5)]
                journal.enter("round", name, number)
                journal.add_steps(name, kind, timings, number, order)
            times[number] = 1000 * number + 4
    found = {name: run.read_steps(name) for name in "ab"}
    kept = {record.round for record in found["b"][1]}
    assert 8 <= len(kept) <= 16
    for steps in found.values():
        keys = [[(step.round, step.order, step.step) for step in of_rank] for of_rank in steps.values()]
        assert keys[0] == keys[1]
        rounds = round_times(steps, 2, "timed")
        assert {each.round: each.step_ns for each in rounds} == {number: times[number] for number in kept}
    assert {round_.round for round_ in round_times(found["a"], 2, "aa")} == kept
    assert [step.kind for step in found["a"][0]].count("warmup") == 3
    for rank in (0, 1):
        events = run.read_events(config.launch, rank)
        assert (events[-1].variant, events[-1].round) == ("a", 400)
        assert len(events) <= 50 + 3 * 16


def test_the_control_has_a_warm_up_and_inputs_of_its_own(tmp_path: Path) -> None:
    """Otherwise it would begin where the baseline's block has left the allocator."""
    made, trainer = bench(tmp_path, {"a": 200.0, "b": 200.0}, rounds=1)
    run_alone(made)
    assert [record.kind for record in records(tmp_path, "a")].count("warmup") == 10 + 6
    assert [step for name, step in trainer.drawn if name == "a~control"] == [0, *range(7)]
    assert not RunDir(tmp_path).variant("a~control").exists()


def test_warm_up_goes_on_until_steady_and_says_when_it_never_is(tmp_path: Path) -> None:
    made, trainer = bench(tmp_path, {"a": 100.0}, rounds=1)
    trainer.warm_up_ms = [300.0] * 5 + [150.0] * 5 + [0.0] * 100
    run_alone(made)
    of_control = 6
    assert [r.kind for r in records(tmp_path, "a")].count("warmup") == 20 + of_control
    assert made.journal.facts == {}

    made, trainer = bench(tmp_path / "other", {"a": 100.0}, rounds=1)
    trainer.warm_up_ms = [1e5 * 0.9**i for i in range(30)]
    run_alone(made)
    facts = made.journal.facts["a"]
    assert facts.unsteady is not None
    assert "30 warm-up steps" in facts.unsteady
    assert [r.kind for r in records(tmp_path / "other", "a")].count("warmup") == 30 + of_control


def test_steps_without_communication_follow_the_timed_ones_of_the_first_rounds(tmp_path: Path) -> None:
    made, trainer = bench(tmp_path, {"a": 30.0, "b": 450.0}, rounds=3, ablation_rounds=2)
    run_alone(made)
    found = {name: [r for r in records(tmp_path, name) if r.kind == "ablation"] for name in "ab"}
    assert [record.round for record in found["a"]] == [1] * 5 + [2] * 5
    assert [record.round for record in found["b"]] == [1, 2]  # never more steps than a timed block
    assert {record.step_ns for record in found["a"]} == {20 * MS}
    timed = [r for name in "ab" for r in records(tmp_path, name) if r.kind in ("timed", "aa")]
    assert min(r.order for r in found["a"]) > max(r.order for r in timed)
    assert trainer.restored == [6, 12]


def test_where_the_host_has_no_room_for_a_copy_no_step_is_made_without_communication(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wording: Wording
) -> None:
    """Two ranks share its memory."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    for available, has_room in ((3 << 20, True), (2 << 20, False)):
        monkeypatch.setattr(trainer_module, "memory_bytes", Mock(return_value=(1 << 40, available)))
        made, trainer = bench(tmp_path, {"a": 200.0}, rounds=3, ablation_rounds=2)
        made.journal.add_facts("a", warnings=("known before",))
        run_alone(made)
        assert bool(trainer.unsynced) == has_room
    known, said = made.journal.facts["a"].warnings
    assert known == "known before"
    wording(said)


@pytest.mark.parametrize(("available_mib", "has_room"), [(10, True), (5, True), (4, False)])
def test_copies_of_the_check_and_of_a_balanced_split_are_made_only_where_the_host_has_room(
    available_mib: int, has_room: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ranks share its memory; the check has two copies of the whole model besides."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr(trainer_module, "memory_bytes", Mock(return_value=(1 << 40, available_mib << 20)))
    trainer: Any = FakeTrainer({"a": 1.0})
    assert not trainer.lacks_room()
    assert trainer.lacks_room(num_whole=2) != has_room
    trainer.strategy = SimpleNamespace(unwrapped=lambda: trainer.model, share=list, total=int)
    trainer.one_device_weights_after = Mock(return_value={})
    trainer.weights_after = Mock(return_value={})
    variant = VariantConfig("a", (4, 4), 1)
    (error,) = weight_errors(trainer, 8, [variant], 0).values()
    assert (error is not None) == has_room == trainer.weights_after.called
    monkeypatch.setattr(trainer_module, "memory_bytes", Mock(return_value=(1 << 40, 2 << 20)))
    config: Any = SimpleNamespace(variants=(replace(variant, balance=BalanceConfig(1, (9, 9))),))
    with pytest.raises(SpecError, match="the host lacks memory"):
        resolve_balanced(config, trainer, Mock(), Peers(), Mock())


def test_the_slowest_rank_decides(tmp_path: Path) -> None:
    made, _ = bench(tmp_path, {"a": 100.0}, rounds=1)
    made.peers = SlowPeer(extra_ns=100.0 * MS)
    run_alone(made)
    assert made.block_steps["a"] == 1


@dataclass
class CountingPeers(Peers):
    """All ranks of a launch."""

    barriers: int = 0

    def barrier(self) -> None:
        self.barriers += 1


def test_strategies_take_turns_in_every_round_and_ranks_wait_for_those_that_do_not_need_them(
    tmp_path: Path,
) -> None:
    """As often as the others: a rank that waits once more would wait forever."""
    ddp, of_ddp = bench(tmp_path / "ddp", {"ddp": 200.0}, rounds=8)
    dp, of_dp = bench(tmp_path / "dp", {"dp": 200.0}, rounds=8, strategy="dp", baseline=None, backend=None)
    of_dp.ran = of_ddp.ran
    first, second = CountingPeers(), CountingPeers()
    run_in_turns([Turn(ddp.config, ddp), Turn(dp.config, dp)], first)
    rounds = [tuple(of_ddp.ran[i : i + 3]) for i in range(len(of_ddp.ran) - 3 * 8, len(of_ddp.ran), 3)]
    assert all(sorted(round_) == ["ddp", "ddp~control", "dp"] for round_ in rounds)
    assert len(set(rounds)) > 1
    alone, _ = bench(tmp_path / "rank1", {"ddp": 200.0}, rounds=8)
    run_in_turns([Turn(alone.config, alone), Turn(dp.config)], second)
    assert first.barriers == second.barriers > 3 * 8


def test_each_turn_has_its_own_threads_in_all_of_its_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, _ = bench(tmp_path, {"one": 1.0}, rounds=3)
    single = replace(
        made.config, strategy="single", devices=("cpu",), backend=None, block_ms=1.0, memory=True,
        variants=(VariantConfig("one", (2,), 1),), profile=ProfileConfig(steps=2), ablation_rounds=1,
    )  # fmt: skip
    two = replace(single, threads=2, variants=(VariantConfig("two", (2,), 1),), baseline=None)
    seen: set[tuple[str, int]] = set()
    step = Trainer.step

    def noted(trainer: Trainer, step_input: Any, clock: Any, sync: bool = True) -> None:
        stage = journal.stage if journal.stage in ("profile", "memory") else "round"
        seen.add((f"{stage} {journal.variant}", torch.get_num_threads()))
        step(trainer, step_input, clock, sync)

    monkeypatch.setattr(Trainer, "step", noted)
    journal = Journal(replace(single, guests=(two,), takes_turns=True), 0)
    threads = torch.get_num_threads()
    measure(journal, Peers())
    torch.set_num_threads(threads)
    stages = ("round", "profile", "memory")
    assert seen == {(f"{stage} {name}", n) for n, name in enumerate(("one", "two"), 1) for stage in stages}


@pytest.mark.parametrize("takes_turns", [True, False])
def test_strategies_of_one_process_are_measured_in_the_same_rounds_or_one_after_the_other(
    tmp_path: Path, takes_turns: bool
) -> None:
    made, _ = bench(tmp_path, {"single": 1.0}, rounds=2)
    config = replace(
        made.config, workload="sleep", params={"alpha_ms": 0.1}, strategy="single", devices=("cpu",),
        backend=None, variants=(VariantConfig("single", (2,), 1),), baseline=None, block_ms=1.0,
        gradient_check=False,
    )  # fmt: skip
    dp = replace(config, strategy="dp", devices=("cpu", "cpu"), variants=(VariantConfig("dp", (1, 1), 1),))
    measure(Journal(replace(config, guests=(dp,), takes_turns=takes_turns), 0), Peers())
    events = [(event.stage, event.variant) for event in RunDir(tmp_path).read_events(config.launch)]
    assert events[-1] == ("done", None)
    rounds = [str(variant) for stage, variant in events if stage == "round"]
    assert sorted(rounds) == ["dp", "dp", "single", "single"]
    is_in_sequence = events.index(("warmup", "dp")) > len(events) - 1 - events[::-1].index(
        ("round", "single")
    )
    assert is_in_sequence != takes_turns
    for name in ("single", "dp"):
        assert {record.round for record in records(tmp_path, name) if record.kind == "timed"} == {1, 2}
        assert {record.peak_bytes for record in records(tmp_path, name)} == {None}
