"""A stranger's run directory, damaged on purpose: the table as ever, or a sentence, and never a traceback."""

import gzip
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from gpurun.launcher.cli.commands.report import keep_if_other
from gpurun.launcher.cli.main import cli
from gpurun.launcher.compare.build import MAX_MAPPING_BYTES, compare_run
from gpurun.launcher.compare.figures.ranks import read_traced
from gpurun.launcher.compare.model import Comparison
from gpurun.launcher.errors import MachineError, SpecError
from gpurun.launcher.logs.relay import all_lines, not_shown
from gpurun.launcher.plan.model import MAX_DEVICES_OF_ALL, MAX_PROCESSES, Plan
from gpurun.launcher.report.tensorboard import SUFFIX, write_tensorboard
from gpurun.launcher.run.find import (
    MAX_RECORDS_BYTES,
    checked_run,
    find_run,
    run_directory,
    search_directory,
)
from gpurun.launcher.run.open import (
    read_invocation,
)
from gpurun.launcher.rundir.files import (
    MAX_BYTES,
    MAX_EVENTS_BYTES,
    MAX_LINES_BYTES,
    RunDir,
    StepsInMemory,
    read_json,
)
from gpurun.launcher.rundir.paths import rank_files
from gpurun.launcher.rundir.rank_files import RankFiles
from gpurun.launcher.tensorboard_plugin.html import write_html
from gpurun.launcher.trace.analysis.analyse import analyse
from gpurun.launcher.trace.analysis.discover import FoundTraces, find_traces
from gpurun.launcher.trace.kineto import trace_file
from gpurun.launcher.trace.merge import merge_traces
from tests.whole import IS_WHOLE, first
from tests.wording import Wording

RECORDED = Path("docs/runs/balanced")
NESTED = b'{"a":' * 100_000
Plant = Callable[[RunDir], object]


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    shutil.copytree(RECORDED, tmp_path / "run")
    return RunDir(tmp_path / "run")


def variant(run: RunDir) -> Path:
    return min((run.path / "variants").iterdir())


def odd_names(run: RunDir) -> None:
    for name in ("rankfoo", "rank", "rank²", "rank-1", "rank01", f"rank{'9' * 200}"):
        for suffix in (".jsonl", ".pt.trace.json.gz"):
            (variant(run) / f"{name}{suffix}").write_bytes(b"?")


def lines_without_end(run: RunDir) -> None:
    with (variant(run) / "rank0.jsonl").open("ab") as file:
        file.write(b'{"launch": ' + NESTED + b"\n" + b'{"launch": "\xff"}\n')


def rank_of_no_device(run: RunDir) -> None:
    for each in (run.path / "variants").iterdir():
        lines = (each / "rank0.jsonl").read_bytes()
        (each / "rank7.jsonl").write_bytes(lines.replace(b'"energy_mj":null', b'"energy_mj":5.0'))


def numbers_without_end(run: RunDir) -> None:
    """As records that can't be read: figures are logarithms, sums and means of them."""
    lines = (variant(run) / "rank0.jsonl").read_bytes().splitlines()
    keys = (b"step_ns", b"round", b"step", b"cpu_ns", b"others_ns", b"energy_mj", b"block_ns")
    odd = [
        re.sub(rb'"%s":(null|\d+)' % key, b'"%s":%s' % (key, number), lines[-1])
        for key in keys
        for number in (b"-1" + b"0" * 400, b"1" + b"0" * 400)
    ]
    with (variant(run) / "rank0.jsonl").open("ab") as file:
        file.write(b"".join(line + b"\n" for line in odd))


@pytest.mark.parametrize("plant", [odd_names, lines_without_end, rank_of_no_device, numbers_without_end])
def test_what_no_run_contains_changes_nothing(run: RunDir, plant: Plant) -> None:
    before = compare_run(find_run(run.path))
    plant(run)
    after = compare_run(find_run(run.path))
    assert [each.ranks for each in after.variants] == [each.ranks for each in before.variants]


def sparse(path: Path, num_bytes: int) -> None:
    with path.open("r+b") as file:
        file.truncate(num_bytes)


def test_steps_that_fill_the_memory_cost_their_own_variant_alone(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No round ends in them, so that no sample of rounds is smaller."""
    large = run.steps("ddp-2-balanced", 1)
    large.write_bytes(re.sub(rb'"round":\d+', b'"round":0', large.read_bytes()) * 20)
    monkeypatch.setattr("gpurun.launcher.rundir.files.StepsInMemory", lambda: StepsInMemory(room=200_000))
    after = {variant.id: variant for variant in compare_run(find_run(run.path)).variants}
    lost = after.pop("ddp-2-balanced")
    assert lost.status == "failed"
    assert "rank1.jsonl (0 MiB) is not read: gpurun has no memory for so many steps" in str(lost.reason)
    assert all(variant.status == "ok" and variant.step_ms for variant in after.values())


def test_files_without_end_are_refused(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpurun.launcher.rundir.paths.MAX_ENTRIES", 50)
    find_run(run.path)
    for number in range(50):
        (run.path / f"launches/{number}").touch()
    with pytest.raises(SpecError, match="has more than 50 files and directories"):
        find_run(run.path)


def events_without_end(run: RunDir) -> None:
    for name in ("05", "06"):
        run.launch(name).mkdir(parents=True)
        run.events(name).touch()
        sparse(run.events(name), MAX_EVENTS_BYTES // 2 + 1)


def many_tables(run: RunDir) -> None:
    for number in range(9):
        (run.path / f"variants/{number}").mkdir()
        (run.path / f"variants/{number}/trace.json").touch()
        sparse(run.path / f"variants/{number}/trace.json", MAX_RECORDS_BYTES // 8)


def planned(run: RunDir, key: str, times: int) -> None:
    """Repeats what the first entry of a list in the plan has of something."""
    plan = json.loads(run.plan.read_bytes())
    first = plan["variants" if key == "devices" else "launches"][0]
    first |= {key: first[key] * times, "split": []}
    run.plan.write_text(json.dumps(plan))


def pipe_for_plan(run: RunDir) -> None:
    run.plan.unlink()
    os.mkfifo(run.plan)


def dead_link_for_plan(run: RunDir) -> None:
    run.plan.unlink()
    run.plan.symlink_to("nowhere")


def in_plan(run: RunDir, pattern: bytes, replacement: bytes) -> None:
    run.plan.write_bytes(re.sub(pattern, replacement, run.plan.read_bytes(), count=1))


DAMAGES: dict[str, tuple[Plant, str]] = {
    "pipe for plan": (
        pipe_for_plan,
        "plan.json is not a regular file, which no run of gpurun contains; remove it",
    ),
    "dead link for plan": (
        dead_link_for_plan,
        "plan.json is a symbolic link, which no run of gpurun contains; remove it",
    ),
    "many devices": (
        lambda run: planned(run, "devices", MAX_DEVICES_OF_ALL),
        "plan.json: 600,004 devices in one plan; at most 300,000 are allowed",
    ),
    "many processes": (
        lambda run: planned(run, "processes", MAX_PROCESSES),
        r"plan.json: 40,\d+ processes in one plan; at most 20,000 are allowed",
    ),
    "parts without device": (
        lambda run: in_plan(run, rb'("split": ?\[)', rb"\g<1>1,"),
        "3 parts of the batch for 2 devices",
    ),
    "unknown baseline": (
        lambda run: in_plan(run, b'"baseline":', b'"baseline": "even", "was":'),
        "the plan has no variant 'even'",
    ),
    "unknown variant": (
        lambda run: in_plan(run, b'"id": "ddp-2-even"', b'"id": "even"'),
        "the plan has no variant 'ddp-2-even'",
    ),
    "nested status": (
        lambda run: (variant(run) / "status.json").write_bytes(b'{"unknown":' + NESTED),
        "nested too deeply",
    ),
    "nested plan": (lambda run: run.plan.write_bytes(NESTED), "nested too deeply"),
    "endless plan": (
        lambda run: sparse(run.plan, MAX_BYTES + 1),
        "larger than any file that gpurun writes there; remove it",
    ),
    "endless steps": (
        lambda run: sparse(variant(run) / "rank0.jsonl", MAX_LINES_BYTES + 1),
        "larger than any file that gpurun writes there; remove it",
    ),
    "many tables": (many_tables, "has larger records than any run"),
    "large mapping": (
        lambda run: run.host.write_bytes(b'{"a": [' + b"[]," * (MAX_MAPPING_BYTES // 3) + b"[]]}"),
        "larger than any file that gpurun writes there; remove it",
    ),
    "events without end": (events_without_end, "launches has more events than gpurun writes"),
    "endless line": (
        lambda run: sparse(variant(run) / "rank0.jsonl", MAX_LINES_BYTES // 4),
        "larger than any file that gpurun writes there; remove it",
    ),
}


@pytest.mark.parametrize(("plant", "words"), DAMAGES.values(), ids=DAMAGES)
def test_what_cannot_be_read_is_named(run: RunDir, plant: Plant, words: str) -> None:
    plant(run)
    with pytest.raises((MachineError, SpecError), match=words):
        compare_run(find_run(run.path))


@pytest.mark.parametrize("budget_s", [b"0", b"5e-324"])
@pytest.mark.parametrize(("name", "record"), [("gpt-splits", "plan.json"), ("tune", "search.json")])
def test_a_budget_that_no_job_has_is_named(tmp_path: Path, name: str, record: str, budget_s: bytes) -> None:
    shutil.copytree(f"docs/runs/{name}", tmp_path / "run")
    path = tmp_path / "run" / record
    path.write_bytes(re.sub(rb'"budget_s": [^,\n]+', b'"budget_s": ' + budget_s, path.read_bytes()))
    with pytest.raises(MachineError, match=rf"{record}: a budget of less than a nanosecond"):
        compare_run(find_run(tmp_path / "run"))


@pytest.mark.parametrize("error", ["-1", "5e-324"])
def test_an_odd_gradient_error_is_shown(run: RunDir, error: str) -> None:
    for facts in run.path.glob("variants/*/facts.json"):
        facts.write_text(
            re.sub(r'"gradient_error": ?[^,}]+', f'"gradient_error": {error}', facts.read_text())
        )
    done = CliRunner().invoke(cli, ["report", str(run.path)], catch_exceptions=False)
    assert done.exit_code == 0
    assert "gradients agree" in done.output


def test_a_launch_without_a_whole_round_costs_no_other(tmp_path: Path) -> None:
    """One block of the baseline was measured twice, and the other rank lacks that round."""
    shutil.copytree("docs/runs/tune", tmp_path / "run")
    baseline = read_json(RunDir(tmp_path / "run").plan, Plan).baseline
    steps = tmp_path / "run/variants" / str(baseline) / "rank1.jsonl"
    lines = steps.read_text().splitlines(keepends=True)
    for number in range(0, len(lines), 1 if IS_WHOLE else 9):
        steps.write_text("".join(lines[:number] + lines[number + 1 :]))
        compare_run(find_run(tmp_path / "run"))


def test_the_traces_of_all_variants_are_bounded_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree("docs/runs/gpt-splits", tmp_path / "run")
    run = find_run(tmp_path / "run")
    for table in run.path.glob("variants/*/trace.json"):
        table.unlink()
    seen: list[int] = []
    allowed = trace_file.allowed_bytes

    def recorded(*arguments: Any) -> int:
        seen.append(allowed(*arguments))
        return seen[-1]

    monkeypatch.setattr("gpurun.launcher.trace.parallel.allowed_bytes", recorded)
    variants = [each for each in run.path.glob("variants/*") if [*each.glob("*.gz")]]
    assert len(variants) > 1
    assert all(read_traced(run, each.name) for each in variants)
    assert 0.99 * trace_file.UNPACKED_FREE_BYTES < sum(seen) <= trace_file.UNPACKED_FREE_BYTES


def test_the_name_of_the_job_file_may_be_any_text(run: RunDir) -> None:
    run.invocation.write_text(json.dumps({"job_file": "x" * 5000, "overrides": [], "job_dir": None}))
    with pytest.raises(SpecError, match="no longer exists"):
        read_invocation(run.path)


def test_directories_without_end_are_refused(run: RunDir, wording: Wording) -> None:
    fd = os.open(run.path, os.O_RDONLY)
    for _ in range(100):
        os.mkdir("d", dir_fd=fd)
        below = os.open("d", os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = below
    os.close(fd)
    with wording.raises(SpecError):
        find_run(run.path)


@contextmanager
def as_another_user() -> Iterator[None]:
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


other_user = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


@other_user
def test_a_colleagues_run_is_read_while_it_is_in_progress(run: RunDir) -> None:
    """Only its ranks and its owner may enter the control directory."""
    (launch,) = list((run.path / "launches").iterdir())[:1]
    (launch / "control").mkdir(mode=0o700)
    open_to_all(run.path)
    with as_another_user():
        assert find_run(run.path) == run


def open_to_all(path: Path) -> None:
    for directory in (path, *list(path.parents)[:-2]):
        directory.chmod(0o755)


@other_user
@pytest.mark.parametrize("place", [".", "variants", "plan.json"])
def test_what_its_owner_keeps_private_is_named(run: RunDir, place: str, wording: Wording) -> None:
    open_to_all(run.path)
    (run.path / place).chmod(0)
    with as_another_user(), wording.raises((SpecError, MachineError)):
        compare_run(find_run(run.path))


def test_a_pointer_to_the_newest_run_may_hold_anything(run: RunDir) -> None:
    pointer = run.path.parent / "latest"
    for content in (b"\xff\xfe", b"run\0", b"../run", b"x" * 10_000, b""):
        pointer.write_bytes(content)
        with pytest.raises(SpecError, match="no run here"):
            find_run(run.path.parent)
    pointer.write_text("run\n")
    assert find_run(run.path.parent) == run
    (run.path.parent / "machine").mkdir()
    (run.path.parent / "machine/selftest.json").write_text("{}")
    pointer.unlink()
    pointer.symlink_to("/etc/hostname")
    with pytest.raises(SpecError, match=f"can't read {pointer}: not a regular file"):
        find_run(run.path.parent)
    pointer.unlink()
    pointer.write_text("machine\n")
    with pytest.raises(
        SpecError, match=r"is a self-test, not a run: what it found is in .*/machine/selftest\.json"
    ):
        find_run(pointer)
    pointer.unlink()
    (run.path.parent / "improve.json").write_text("{}")
    with pytest.raises(SpecError, match=r"is a search, not a run: `gpurun report .*` shows what it found"):
        find_run(run.path.parent)
    search = run.path.parent / "my search"
    search.mkdir()
    (search / "improve.json").write_text("{}")
    with pytest.raises(SpecError, match=f"`gpurun report '{search}'` shows"):
        find_run(search)


def test_a_name_that_is_too_long_is_no_run_and_no_search(tmp_path: Path) -> None:
    for find in (find_run, run_directory, search_directory):
        with pytest.raises(SpecError, match=r"can't read .*: File name too long"):
            find(tmp_path / (300 * "a"))


def test_a_log_of_no_rank_is_none(run: RunDir) -> None:
    log = next((run.path / "launches").iterdir()) / "log"
    log.mkdir(exist_ok=True)
    for name in ("rank0.log", "rankfoo.log", "rank1.old.log"):
        (log / name).write_text("hello\n")
    assert list(rank_files(log, ".log")) == [0]
    assert list(all_lines(run, None, log.parent.name, colour=False)) == ["[rank 0] hello"]


def test_streams_that_torchrun_would_have_in_files_are_read_after_the_log(run: RunDir) -> None:
    """Of two nodes with a rank each, which share the directory."""
    log = next((run.path / "launches").iterdir()) / "log"
    for rank, text in enumerate(("zero", "one")):
        env = {"RANK": str(rank), "LOCAL_RANK": "0", "TORCHELASTIC_RESTART_COUNT": "0"}
        own = str(log / f"rank{rank}.log")
        files = RankFiles("", redirects=2, tee=0).of({**env, "TORCHELASTIC_RUN_ID": "t"}, own)
        Path(own).touch()
        Path(files["stderr"]).write_text(f"{text}\n")
    found = {rank: list(all_lines(run, rank, log.parent.name, colour=False)) for rank in range(2)}
    assert found == {0: ["[rank 0] zero"], 1: ["[rank 1] one"]}


@pytest.mark.parametrize("rotated", [False, True])
def test_of_an_endless_log_the_end_is_printed(
    run: RunDir, rotated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """200 GB that take no room on the disk."""
    monkeypatch.setattr("gpurun.launcher.logs.relay.PRINTED_BYTES", 64 << 20)
    launch = next((run.path / "launches").iterdir()).name
    log = run.log(launch, 0)
    log.parent.mkdir(exist_ok=True)
    log.touch()
    sparse(log, 200_000_000_000)
    with log.open("ab") as file:
        file.write(b"\nlast\n")
    if rotated:
        log.rename(log.with_name(f"{log.name}.1"))
        log.write_text("newer\n")
    num_bytes = sum(each.stat().st_size for each in log.parent.iterdir())
    note, *lines = all_lines(run, None, launch, colour=False)
    assert note == f"[rank 0] {not_shown(num_bytes - (64 << 20), log)}"
    assert lines[1:] == ["[rank 0] last", "[rank 0] newer"][: 1 + rotated]


@other_user
def test_a_log_that_its_owner_keeps_private_is_named(run: RunDir, wording: Wording) -> None:
    log = next((run.path / "launches").iterdir()) / "log"
    log.mkdir(exist_ok=True)
    (log / "rank0.log").touch(mode=0o600)
    open_to_all(log)
    with as_another_user(), wording.raises(MachineError):
        list(all_lines(run, None, log.parent.name, colour=False))


# A stranger's run or directory that changes while it is read: nothing elsewhere is read or written


def swapped(place: Path, target: Path) -> None:
    place.rename(place.with_name("was"))
    place.symlink_to(target)


MINE = ("report.html", "trace.json", "comparison.json", f"events.out.tfevents.1{SUFFIX}")


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    """A directory in which there is a file by each name that a report may write."""
    (tmp_path / "mine").mkdir()
    for name in MINE:
        (tmp_path / "mine" / name).write_text("mine")
    return tmp_path / "mine"


@pytest.fixture
def traced_run(tmp_path: Path) -> RunDir:
    shutil.copytree("docs/runs/gpt-splits", tmp_path / "traced")
    return find_run(tmp_path / "traced")


@pytest.mark.parametrize("place", first(1, [".", "variants/ddp-2-even"]))
@pytest.mark.parametrize("format", ["html", "tensorboard", "table"])
def test_no_report_is_written_to_where_a_link_leads_that_was_put_there_meanwhile(
    traced_run: RunDir, mine: Path, place: str, format: str
) -> None:
    for table in traced_run.path.glob("variants/*/trace.json"):
        table.unlink()
    comparison = compare_run(traced_run)
    (traced_run.path / "variants/ddp-2-even/trace.json").unlink()
    swapped(traced_run.path / place if place != "." else traced_run.path, mine)
    writers: dict[str, Callable[[Comparison, RunDir], object]] = {
        "html": write_html,
        "tensorboard": write_tensorboard,
        "table": keep_if_other,
    }
    with suppress(MachineError):
        writers[format](replace(comparison, conclusions=1000), traced_run)
    with suppress(MachineError):
        read_traced(traced_run, "ddp-2-even")
    assert {each.name: each.read_text() for each in mine.iterdir()} == dict.fromkeys(MINE, "mine")


def test_no_report_is_written_into_a_run_of_ones_own_that_was_put_in_the_place(
    traced_run: RunDir, tmp_path: Path
) -> None:
    shutil.copytree("docs/runs/balanced", tmp_path / "run")
    run = RunDir(tmp_path / "run")
    comparison = compare_run(traced_run)
    swapped(traced_run.path, run.path)
    with pytest.raises(MachineError, match="another directory was put in the place of the run"):
        write_html(comparison, traced_run)
    assert not (run.path / "report.html").exists()


def test_a_merged_trace_goes_where_its_directory_was_when_it_was_named(
    traced_run: RunDir, tmp_path: Path, mine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "out").mkdir()

    def analyse_and_swap(*arguments: Any, **named: Any) -> Any:
        swapped(tmp_path / "out", mine)
        return analyse(*arguments, **named)

    monkeypatch.setattr("gpurun.launcher.trace.merge.analyse", analyse_and_swap)
    merge_traces([traced_run.variant("ddp-2-even")], tmp_path / "out/trace.json")
    assert (mine / "trace.json").read_text() == "mine"
    assert (tmp_path / "was/trace.json").exists()


VARIANT = "variants/ddp-2-even"
PLACES = (".", "plan.json", "variants", VARIANT, f"{VARIANT}/status.json", "launches/02-ddp-2/log")
COMMANDS = (
    "report R --format json,html",
    "logs R",
    f"trace R/{VARIANT} --merge M",
    f"diff docs/runs/gpt-splits/{VARIANT} R/{VARIANT} --show operators",
)


SWAPS = [(COMMANDS[number % len(COMMANDS)], place) for number, place in enumerate(PLACES)]
SWAPS += [swap for swap in product(COMMANDS, PLACES) if swap not in SWAPS]


@pytest.fixture
def outside(traced_run: RunDir, tmp_path: Path) -> Path:
    """A run of the user's own, whose every name and sentence says so; the stranger's has the same files."""
    log = traced_run.log("02-ddp-2", 0)
    log.parent.mkdir()
    log.write_text("a line of a log\n")
    shutil.copytree(traced_run.path, tmp_path / "outside")
    for path in (each for each in (tmp_path / "outside").rglob("*") if each.is_file()):
        text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        for word in (b"gpt-splits", b"aten::addmm", b"a line"):
            text = text.replace(word, b"OUTSIDE")
        if path.name == "status.json":
            text = b'{"status": "failed", "reason": "OUTSIDE"}'
        path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return tmp_path / "outside"


def shown(command: str, run: Path) -> str:
    """All that a command prints and writes into the run."""
    merged = run.parent / "merged.json"
    words = command.replace("R", str(run)).replace("M", str(merged)).split()
    done = CliRunner().invoke(cli, words)
    made = [each.read_text() for each in (merged, run / "report.html") if each.exists()]
    return "".join([done.output, *made])


@pytest.mark.parametrize("command", first(1, COMMANDS[1:] + COMMANDS[:1]))
def test_the_exploit_would_show(outside: Path, command: str) -> None:
    assert "OUTSIDE" in shown(command, outside)


@pytest.mark.parametrize(("command", "place"), first(len(PLACES), SWAPS))
def test_nothing_is_read_through_a_link_that_was_put_there_after_the_check(
    traced_run: RunDir, outside: Path, place: str, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The swap comes as soon as the run has been checked, or the traces have been found."""
    for table in traced_run.path.glob("variants/*/trace.json"):
        table.unlink()
    left = [traced_run.path / place if place != "." else traced_run.path]

    def check_and_swap(directory: Path) -> RunDir:
        found = checked_run(directory)
        swap()
        return found

    def find_and_swap(paths: Any, within: Any) -> FoundTraces:
        found = find_traces(paths, within)
        if paths[0].is_relative_to(traced_run.path):
            swap()
        return found

    def swap() -> None:
        if left:
            swapped(victim := left.pop(), outside / victim.relative_to(traced_run.path))

    monkeypatch.setattr("gpurun.launcher.run.find.checked_run", check_and_swap)
    monkeypatch.setattr("gpurun.launcher.trace.analysis.analyse.find_traces", find_and_swap)
    assert "OUTSIDE" not in shown(command, traced_run.path)
    assert not left
