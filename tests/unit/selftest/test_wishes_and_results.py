"""What a self-test begins with, devices and earlier rates, and what it ends with."""

import errno
import json
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from gpurun.launcher.cli.commands.selftest import Lines, line, selftest
from gpurun.launcher.errors import MachineError, SpecError, unwritable
from gpurun.launcher.machine.accelerators import CPU, CUDA
from gpurun.launcher.machine.host import machine_id
from gpurun.launcher.rundir.files import write_json
from gpurun.launcher.rundir.paths import SELFTEST
from gpurun.launcher.selftest import self_test
from gpurun.launcher.selftest import self_test as result_module
from gpurun.launcher.selftest.check_table import CHECKS, findings
from gpurun.launcher.selftest.evidence import (
    FAULTS,
    PARTS,
    TRAINING,
    CheckResult,
    DeviceRate,
    Evidence,
    failed,
    ok,
    skipped,
)
from gpurun.launcher.selftest.machine_checks import driver, earlier_speed, rates_of, visible_devices
from gpurun.launcher.selftest.run_checks import out_of_memory, traces
from gpurun.launcher.selftest.self_test import (
    MOST_EARLIER,
    Result,
    earlier_rates,
    findings_of,
    run_selftest,
    wished_devices,
)
from gpurun.launcher.selftest.self_test import keep as keep_result
from tests.unit.machine.fake_driver import UUIDS, NVMLError
from tests.unit.selftest.healthy import DEVICES, evidence, faulty, health, three_gpus
from tests.unit.selftest.test_named_faults import CU130, first_variant, in_job, judged, unusable
from tests.wording import Wording

# Earlier self-tests


def keep(directory: Path, name: str, gflop_per_s: float, hostname: str = "h", **changes: Any) -> None:
    rate = replace(DeviceRate("cuda:1", UUIDS[1], gflop_per_s, 4096, 0.0), **changes)
    day = name[:10] if len(name) >= 10 else "2026-01-01"
    write_json(directory / name / SELFTEST, Result((), 1, hostname, day, (rate,)))


def test_a_device_that_has_become_slower_is_named(tmp_path: Path, wording: Wording) -> None:
    keep(tmp_path, "2026-01-01_10-00-00", 60_000.0)
    keep(tmp_path, "2026-02-01_10-00-00", 50_200.0)
    found = since(tmp_path)
    assert found.status == "failed"
    wording(found.found)


def test_the_newest_are_looked_at_whatever_their_directories_are_called(tmp_path: Path) -> None:
    for number in range(MOST_EARLIER + 1):
        keep(tmp_path, f"{number:02d}", 50_000.0 + number)
        os.utime(tmp_path / f"{number:02d}" / SELFTEST, (1e9 - number, 1e9 - number))
    ((found,), _, _) = earlier_rates((tmp_path,))
    assert found.rate.gflop_per_s == 50_000.0 + MOST_EARLIER - 1


def since(directory: Path, seen: Evidence | None = None) -> CheckResult:
    """The speed of a machine next to what earlier self-tests have kept."""
    rates, busy, notes = earlier_rates((directory,))
    found = replace(seen or evidence(), earlier=rates, earlier_busy=busy, earlier_notes=notes)
    return earlier_speed(found)


@pytest.mark.parametrize("device", ["tpu:0", ""])
def test_a_result_with_an_unknown_device_is_ignored_and_named(
    tmp_path: Path, device: str, wording: Wording
) -> None:
    keep(tmp_path, "2026-01-01_10-00-00", 50_000.0)
    keep(tmp_path, "2026-01-02_10-00-00", 50_000.0, device=device)
    found = since(tmp_path)
    assert found.status == "ok"
    wording(found.found)


@pytest.mark.parametrize(
    ("name", "rate", "words"),
    [
        ("\x1b[31mred   ", 60_000.0, r"'\x1b[31mred  ' is no day"),
        ("2026-13-01", 60_000.0, "'2026-13-01' is no day"),
        ("2026-01-02", 1e300, "1e+300 GFLOP/s can't be"),
        ("2026-01-02", -1.0, "-1 GFLOP/s can't be"),
    ],
)
def test_a_damaged_result_is_ignored_and_named(tmp_path: Path, name: str, rate: float, words: str) -> None:
    keep(tmp_path, "2026-01-01_10-00-00", 50_000.0)
    keep(tmp_path, name, rate)
    found = since(tmp_path)
    assert found.status == "ok"
    assert found.found.endswith(f"is ignored: {words}")


def test_no_escape_sequence_reaches_the_terminal() -> None:
    """A path, or the name of a device in a damaged file, may have one."""
    text = line(
        failed("gpu-unusable", problem="\x1b[31mred\x1b[0m \x07bell", advice="\x1b]0;title\x07do this").named(
            "a", ""
        ),
        80,
    )
    assert "red bell" in text
    assert "do this" in text
    assert "\x1b" not in text


def test_only_devices_that_were_compared_are_counted(tmp_path: Path, wording: Wording) -> None:
    keep(tmp_path, "2026-01-01_10-00-00", 50_000.0)
    keep(tmp_path, "2026-01-02_10-00-00", 90_000.0, matrix_rows=512)
    keep(tmp_path, "2026-01-03_10-00-00", 90_000.0, matrix_rows=512, identity=UUIDS[2])
    wording(since(tmp_path).found)


def test_it_is_said_that_earlier_rates_are_left_out_because_of_busy_cores(
    tmp_path: Path, wording: Wording
) -> None:
    """Of CPU devices; GPUs compute without the host's cores."""
    host = on_cpu()
    identity = rates_of(host)[0].identity
    of_host: dict[str, Any] = {"device": "cpu:0", "identity": identity, "queue_share": 0.5}
    keep(tmp_path / "cpu", "2026-01-02_10-00-00", 60_000.0, **of_host)
    keep(tmp_path / "gpu", "2026-01-02_10-00-00", 50_000.0, queue_share=0.5)
    assert since(tmp_path / "none", host).found.startswith("no earlier self-test")
    wording(since(tmp_path / "cpu", host).found)
    wording(since(tmp_path / "gpu").found)


def on_cpu(machine_id: str = "b1", cores: tuple[int, ...] = (0, 1), **changes: Any) -> Evidence:
    """A machine with one CPU device."""
    facts = replace(evidence().facts[0], cores=cores)
    machine = replace(evidence().machine, gpus=(), cpu_cores=2, cpu_model="a CPU", hostname="h")
    seen = replace(evidence(), kind=CPU, devices=("cpu:0",), facts=(facts,), machine_id=machine_id)
    return replace(seen, machine=replace(machine, **changes))


OTHER_MACHINES = {
    "another host": on_cpu(hostname="other"),
    "another one of that name": on_cpu(machine_id="c2"),
    "another CPU": on_cpu(cpu_model="another"),
    "other cores": on_cpu(cores=(2, 3)),
    "more cores": on_cpu(cores=(0, 1, 2, 3), cpu_cores=4),
    "a quota": on_cpu(cpu_cores=1),
}


@pytest.mark.parametrize("other", OTHER_MACHINES)
def test_rates_of_a_cpu_are_compared_with_those_of_the_same_cores_alone(other: str, tmp_path: Path) -> None:
    (rate,) = rates_of(on_cpu())
    write_json(tmp_path / "earlier" / SELFTEST, Result((), 1, "h", "2026-01-01", (rate,)))
    assert since(tmp_path, on_cpu()).status == "ok"
    assert since(tmp_path, OTHER_MACHINES[other]).status == "skipped"


def test_a_gpu_is_the_same_whatever_its_host_is_called(tmp_path: Path) -> None:
    """A container's name is made up again each time. Of another GPU nothing is compared."""
    keep(tmp_path, "2026-01-01_10-00-00", 60_000.0, hostname="f3a9c1")
    assert since(tmp_path).status == "failed"
    others = tuple(replace(gpu, uuid=f"GPU-other-{gpu.index}") for gpu in evidence().machine.gpus)
    machine = replace(evidence().machine, hostname="f3a9c1", gpus=others)
    assert since(tmp_path, replace(evidence(), machine=machine)).status == "skipped"


def test_by_what_machines_of_one_name_differ_is_not_the_id_itself(tmp_path: Path) -> None:
    (tmp_path / "etc").mkdir()
    assert machine_id(tmp_path) == ""
    (tmp_path / "etc/machine-id").write_text("0123456789abcdef0123456789abcdef\n")
    first = machine_id(tmp_path)
    (tmp_path / "etc/machine-id").write_text("f123456789abcdef0123456789abcdef\n")
    assert first not in ("", machine_id(tmp_path))
    assert "0123" not in first


def test_of_many_machines_results_each_has_its_own(tmp_path: Path) -> None:
    for number in range(MOST_EARLIER + 1):
        keep(tmp_path, f"{number:02d}", 90_000.0, identity=f"GPU-{number}")
        os.utime(tmp_path / f"{number:02d}" / SELFTEST, (1e9 + number, 1e9 + number))
    assert len(earlier_rates((tmp_path, tmp_path / "../" / tmp_path.name))[0]) == MOST_EARLIER + 1


def test_a_file_of_another_version_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "2026-01-03_10-00-00").mkdir()
    (tmp_path / "2026-01-03_10-00-00" / SELFTEST).write_text("{}")
    assert earlier_rates((tmp_path,)) == ((), frozenset(), ())


# What is said where all is well


@pytest.mark.parametrize(
    "found",
    [
        (ok("gpus-free"), ok("one-node"), skipped("needs-gpu")),
        (ok("gpus-free"), failed("no-gpu"), skipped("needs-gpu")),
    ],
)
def test_the_answer_counts_the_checks(found: tuple[CheckResult, ...], wording: Wording) -> None:
    wording(*(each.text for each in findings_of(found)))


def test_devices_without_counters_of_memory_errors_are_named(wording: Wording) -> None:
    def count(handle: int, *_: int) -> int:
        if handle != 1:
            raise NVMLError("Not Supported")
        return 0

    found = judged(replace(evidence(), health=health(nvmlDeviceGetTotalEccErrors=count)))["memory errors"]
    wording(found.found)


def test_one_rank_has_no_collectives_to_match() -> None:
    alone = first_variant(TRAINING, ranks=evidence().job(TRAINING).variants[0].ranks[:1])(evidence())
    only = in_job(TRAINING, variants=alone.job(TRAINING).variants[:1])(replace(alone, devices=DEVICES[:1]))
    assert traces(only).found == "work on every rank"


def test_without_a_measured_strategy_nothing_is_said_about_traces() -> None:
    lost = tuple(replace(each, status="failed") for each in evidence().job(TRAINING).variants)
    assert traces(in_job(TRAINING, variants=lost)(evidence())).status == "skipped"


def test_amd_gpus_are_named_also_where_cpu_devices_are_tested() -> None:
    note = "this machine has an AMD GPU"
    machine = replace(three_gpus(), gpus=(), driver=None, notes=(note,))
    seen = replace(evidence(), machine=machine, devices=())
    assert note in driver(seen).found
    assert visible_devices(replace(seen, kind=CPU, devices=("cpu:0",))).found.endswith(f"; {note}")


@pytest.mark.parametrize("changes", [{}, {"used_gib": {}}, {"kind": CPU}])
def test_memory_is_called_free_only_where_it_was_looked_at(changes: dict[str, Any], wording: Wording) -> None:
    wording(out_of_memory(replace(evidence(), **changes)).found)


def test_a_next_launch_that_failed_is_not_said_to_have_worked() -> None:
    lost = faulty("sound", "failed", "rank 0 ended with exit code 7")
    failing = evidence().jobs[FAULTS].variants
    variants = tuple(lost if each.split == lost.split else each for each in failing)
    found = judged(in_job(FAULTS, variants=variants)(evidence()))
    for name in ("out of memory", "a killed rank"):
        assert found[name].status == "failed"
        assert found[name].found == "the next launch failed: rank 0 ended with exit code 7"


# Wished devices


@pytest.mark.parametrize(
    ("wish", "names"),
    [("auto", DEVICES), ("cuda", DEVICES), ("cuda:1", ("cuda:1",)), ("cuda:2, cuda:0", ("cuda:2", "cuda:0"))],
)
def test_devices_are_named_as_in_a_job_file_or_by_commas(wish: str, names: tuple[str, ...]) -> None:
    assert wished_devices(wish, three_gpus()) == (CUDA, names)


def test_without_a_gpu_the_checks_run_on_two_cpu_devices() -> None:
    nothing = replace(three_gpus(), gpus=(), cpu_cores=8)
    assert wished_devices("auto", nothing)[1] == ("cpu:0", "cpu:1")
    silent = replace(nothing, nvml_error="Driver/library version mismatch")
    assert wished_devices("auto", silent) == (CUDA, ())


@pytest.mark.parametrize("wish", ["cuda", "cuda:0", "cuda:0,cuda:1", "[cuda:0]", "GPU-1b2c"])
def test_without_a_driver_every_wish_for_gpus_gets_the_checks(wish: str) -> None:
    assert wished_devices(wish, replace(three_gpus(), gpus=())) == (CUDA, ())


def test_gpus_that_torch_cannot_use_are_checked_by_any_name() -> None:
    old = unusable(CU130, "12.8")(evidence()).machine
    assert wished_devices("cuda:1", old) == (CUDA, ("cuda:1",))


@pytest.mark.parametrize("wish", ["cpu:x", "cpu", "cuda:x", "gpu", "cpu:0,cuda:1", ""])
def test_what_an_error_advises_can_be_given(wish: str) -> None:
    with pytest.raises(SpecError) as caught:
        wished_devices(wish, three_gpus())
    advice = re.split("use|write|known kinds|for example|`", str(caught.value), maxsplit=1)[-1]
    for advised in re.findall(r"\[[^]]+\]|cpu:\d|cuda(?::\d)?", advice):
        assert wished_devices(advised, three_gpus())


@pytest.mark.parametrize("wish", ["cpu:x", "cpu:2,cpu:2"])
def test_no_error_about_the_option_shows_what_a_job_file_has(wish: str) -> None:
    with pytest.raises(SpecError) as caught:
        wished_devices(wish, three_gpus())
    assert not re.search(r"\[|`devices", str(caught.value))


def test_checks_that_were_not_run_for_one_reason_are_shown_as_one(capsys: pytest.CaptureFixture[str]) -> None:
    seen = replace(evidence(), machine=replace(evidence().machine, gpus=(), driver=None), devices=())
    lines = Lines(80, on_nodes=False)
    for each in findings(seen, PARTS):
        lines.show(each)
    lines.end()
    shown = capsys.readouterr().out
    assert shown.count("not run, because of: ") == 3
    assert re.search("^skipped  22 checks  ", shown, re.MULTILINE)
    assert all(check.name in " ".join(shown.split()) for check in CHECKS)


def test_a_mistyped_wish_removes_nothing(tmp_path: Path) -> None:
    no_pools: Any = None
    for wish in ("tpu:3", "cpu:0,cuda:0"):
        with pytest.raises(SpecError):
            run_selftest(no_pools, wish, tmp_path, lambda finding: None, lambda *part: None)
        assert tmp_path.is_dir()


def test_nothing_stays_of_a_directory_that_was_made_for_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(wish: str, directory: Path) -> None:
        assert directory.is_dir()
        raise MachineError("a device is not there")

    monkeypatch.setattr(self_test, "begin_evidence", fails)
    no_pools: Any = None
    with pytest.raises(MachineError):
        run_selftest(no_pools, "cpu:1", tmp_path / "a/b/c", lambda one: None, lambda *part: None)
    assert not list(tmp_path.iterdir())


# A full disk


def test_on_a_full_disk_no_rank_is_started_and_the_result_is_returned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wording: Wording
) -> None:
    def full(path: Path, value: Any) -> None:
        raise unwritable(path, OSError(errno.ENOSPC, "No space left on device"))

    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=0))
    monkeypatch.setattr(result_module, "write_json", full)
    no_pools: Any = None
    shown: list[CheckResult] = []
    result, directory, not_kept = run_selftest(
        no_pools, "cpu:1", tmp_path / "run", shown.append, lambda *part: pytest.fail("a job has begun")
    )
    assert {each.name for each in result.checks if each.status == "failed"} == {"run directory"}
    assert list(result.checks) == shown
    assert not directory.exists()
    assert not_kept is not None
    wording(not_kept)
    monkeypatch.setattr(
        "gpurun.launcher.cli.commands.selftest.run", lambda *args: (result, directory, not_kept)
    )
    printed = CliRunner().invoke(selftest, ["--json", "--out", str(tmp_path)])
    assert isinstance(printed.exception, MachineError)
    assert str(printed.exception) == f"1 of {len(CHECKS)} checks failed; {not_kept}"
    assert json.loads(printed.stdout)["checks"][0]["name"] == CHECKS[0].name


def test_what_jobs_wrote_before_the_disk_was_full_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wording: Wording
) -> None:
    (tmp_path / "measuring").mkdir()
    (tmp_path / SELFTEST).mkdir()  # a file can't replace it
    wording(keep_result(Result(()), tmp_path, is_latest=False) or "")


# The page


def test_the_page_names_every_check() -> None:
    page = (Path(__file__).parents[3] / "docs/selftest.md").read_text()
    assert not [check.name for check in CHECKS if check.name not in page]
