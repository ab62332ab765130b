"""Runs with more steps than fit into memory: all are read, and rounds keep their times."""

import re
import shutil
from collections.abc import Iterable
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpurun.launcher.compare.build import compare_run
from gpurun.launcher.compare.figures.recorded import round_times
from gpurun.launcher.rundir.files import LEAST_KEPT_ROUNDS, RoundSample, RunDir, StepsInMemory
from gpurun.launcher.rundir.records import GpuLoad, StepRecord
from tests.known import known
from tests.said import warnings_of
from tests.whole import first

RANKS, LAUNCHES, ROUNDS, OF_ROUND = (0, 1), ("01", "02"), 200, 5
HUGE = 1 << 40


def steps_of(rank: int, launch: str, rounds: int = ROUNDS) -> list[StepRecord]:
    """As a program's rank writes them; one of its last steps was skipped."""
    warm = [StepRecord(launch, 0, 0, number, "warmup", 9000, {}, None) for number in range(OF_ROUND)]
    timed = [
        StepRecord(
            launch, number // OF_ROUND + 1, 0, number, "timed", 1000 + number % 37 * (rank + 1), {}, number
        )
        for number in range(OF_ROUND, rounds * OF_ROUND)
    ]
    skipped = StepRecord(launch, 0, 0, timed[-2].step, "skipped", 1, {}, None)
    return [*warm, *timed[:-2], skipped, timed[-1]]


def in_memory(room: int, portions: Iterable[int] = (HUGE,)) -> StepsInMemory:
    """Every rank's steps, added in portions of these sizes."""
    memory, sizes = StepsInMemory(room), list(portions)
    for rank in RANKS:
        steps, size = [step for launch in LAUNCHES for step in steps_of(rank, launch)], iter(sizes)
        while steps:
            portion = next(size, HUGE)
            assert memory.add("a", rank, steps[:portion])
            steps = steps[portion:]
    return memory


def rounds_in(memory: StepsInMemory) -> dict[tuple[str, int], float]:
    found = round_times({rank: memory.of("a", rank) for rank in RANKS}, len(RANKS), "timed")
    return {(time.launch, time.round): time.step_ns for time in found}


WHOLE = in_memory(HUGE)
SMALLER = WHOLE.num_bytes // 2


@pytest.mark.slow
@given(st.lists(st.integers(1, 500), max_size=8))
def test_of_too_many_steps_every_round_keeps_its_time(portions: list[int]) -> None:
    memory = in_memory(SMALLER, portions)
    assert rounds_in(memory) == pytest.approx(rounds_in(WHOLE))
    assert memory.num_bytes <= SMALLER
    for rank in RANKS:
        assert len(memory.of("a", rank)) < len(WHOLE.of("a", rank)) / 2
        assert memory.of("a", rank)[-1] == WHOLE.of("a", rank)[-1]


@pytest.mark.parametrize("share", [8, 16, 32])
def test_of_far_too_many_all_ranks_keep_the_same_rounds(share: int) -> None:
    memory = in_memory(WHOLE.num_bytes // share, [300, 100, 1000])
    found, whole = rounds_in(memory), rounds_in(WHOLE)
    assert found == pytest.approx({key: whole[key] for key in found})
    assert memory.num_bytes <= WHOLE.num_bytes // share
    for launch in LAUNCHES:
        of_launch = [number for name, number in found if name == launch]
        assert len(of_launch) >= LEAST_KEPT_ROUNDS / 4
        assert max(of_launch) == ROUNDS, "by the last round it is known how many were done"


@pytest.mark.parametrize("is_thinned", [True, False])
@pytest.mark.parametrize("rounds", first(1, [10_000, 16_000]))
def test_a_round_is_kept_with_the_same_probability_early_or_late(rounds: int, is_thinned: bool) -> None:
    """Each is a step; a file is read in portions, and most lines need not be decoded."""
    memory, decoder, decoded = StepsInMemory(100_000), msgspec.json.Decoder(StepRecord), 0
    lines = [
        msgspec.json.encode(StepRecord("01", number, 0, number, "timed", 1000, {}, None)) + b"\n"
        for number in range(1, rounds + 1)
    ]
    for i in range(0, rounds, 700):
        portion = b"".join(lines[i : i + 700])
        steps = decoder.decode_lines(memory.thinned("a", 0, portion) if is_thinned else portion)
        decoded += len(steps)
        assert memory.add("a", 0, steps)
    kept, level = [step.round for step in memory.of("a", 0)], RoundSample("01").level_of
    least = min(level(number) for number in kept[:-1])
    assert kept == [*(number for number in range(1, rounds) if level(number) >= least), rounds]
    assert decoded < rounds / 4 or not is_thinned


def test_a_block_keeps_its_peak_and_its_load() -> None:
    load = GpuLoad(peak_bytes=7)
    steps = [
        StepRecord("01", 1 + number // 4, 0, number, "timed", 10, {"forward": 5}, number, gpus=gpus)
        for number, gpus in enumerate([(load,), (), (), ()] * 100)
    ]
    memory = StepsInMemory(100 * 1200)
    assert memory.add("a", 0, steps)
    first = memory.of("a", 0)[0]
    assert (first.peak_bytes, first.gpus, first.block_ns, first.phases_ns) == (3, (load,), 10, {"forward": 5})


def test_what_has_no_rounds_is_refused() -> None:
    memory = StepsInMemory(50_000)
    endless = [StepRecord("01", 0, 0, number, "warmup", 1, {}, None) for number in range(1000)]
    assert not memory.add("a", 0, endless)
    memory.drop("a", 0)
    assert memory.num_bytes == 0
    assert memory.add("a", 1, endless[:10])


def test_a_run_is_compared_as_ever_and_the_report_says_what_its_figures_are_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree("docs/runs/balanced", tmp_path / "run")
    run = RunDir(tmp_path / "run")
    before = compare_run(run)
    monkeypatch.setattr("gpurun.launcher.rundir.files.StepsInMemory", lambda: StepsInMemory(room=150_000))
    after = compare_run(run)
    for now, was in zip(after.variants, before.variants, strict=True):
        assert (now.step_ms, now.status) == (was.step_ms, was.status)
        found, known_ci = known(now.vs_baseline), known(was.vs_baseline).ci
        assert found.percent == known(was.vs_baseline).percent
        # Waiting for cores, which widens it, is compared with one step of a block, not with all.
        assert found.ci == (known_ci and pytest.approx(known_ci, rel=1e-4))
    said = [
        text for each in after.variants for text in warnings_of(after, each) if "based on a sample" in text
    ]
    assert len(said) == len(after.variants)


def test_a_file_of_nothing_but_damage_is_given_up_soon(tmp_path: Path) -> None:
    """An exception for each line of 500 MB takes a minute."""
    shutil.copytree("docs/runs/balanced", tmp_path / "run")
    run = RunDir(tmp_path / "run")
    large = run.steps("ddp-2-balanced", 1)
    large.write_bytes(large.read_bytes() + b'{"x":1}\n' * 500_000)
    after = {variant.id: variant for variant in compare_run(run).variants}
    assert re.search(
        r"rank1.jsonl \(4 MiB\) is not read: 1\d\d,\d{3} of its first 1\d\d,\d{3} lines can't be read",
        str(after.pop("ddp-2-balanced").reason),
    )
    assert all(variant.status == "ok" for variant in after.values())
