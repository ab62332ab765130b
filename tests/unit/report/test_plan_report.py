"""What `gpurun check` shows of a plan."""

import itertools
import re
import sys
from dataclasses import replace
from pathlib import Path
from subprocess import run

import pytest
from click.testing import CliRunner

from gpurun.launcher.cli.main import cli
from gpurun.launcher.compare.label import left_out_texts
from gpurun.launcher.errors import MachineError
from gpurun.launcher.jobfile.model import JobSpec
from gpurun.launcher.plan.estimate import Earlier
from gpurun.launcher.plan.model import Launch, Plan, Process, SkippedCombination, Variant
from gpurun.launcher.report.terminal.grid import cut, grid
from gpurun.launcher.report.terminal.plan import render_memory, render_plan
from gpurun.launcher.run import memory_estimate
from gpurun.launcher.rundir.records import MemoryEstimate, MemoryPeak
from tests.wording import Wording

SPEC = JobSpec(name="gpt-splits", workload="gpt", params={"layers": 4, "width": 256}, global_batch=64)


def variant(strategy: str, *split: int) -> Variant:
    name = "/".join(map(str, split))
    devices = tuple(f"cpu:{i}" for i in range(len(split)))
    variant_id = f"{strategy}-{len(split)}-{name.replace('/', '-')}"
    return Variant(
        id=variant_id,
        strategy=strategy,
        devices=devices,
        split=split,
        split_name=name,
        global_batch=sum(split),
        precision="bf16",
        accumulate=1,
        seed=0,
        varied={},
    )


def launch(number: int, *variants: Variant) -> Launch:
    processes = tuple(Process(rank, {}, (f"cpu:{rank}",)) for rank in range(len(variants[0].devices)))
    name = f"{number:02}-{variants[0].strategy}-2"
    return Launch(name, name[3:], number, tuple(v.id for v in variants), 5, processes)


EVEN, UNEVEN, DP = variant("ddp", 32, 32), variant("ddp", 48, 16), variant("dp", 32, 32)
PLAN = Plan(
    name="gpt-splits",
    workload="gpt",
    baseline=EVEN.id,
    variants=(EVEN, UNEVEN, DP),
    left_out=(SkippedCombination({"strategy": "single", "device_count": 2}, "single has one device"),),
    launches=(launch(1, EVEN, UNEVEN), launch(2, DP), launch(3, DP), launch(4, EVEN, UNEVEN)),
    notes=("9 over 4 devices gives 3 chunks",),
)


@pytest.mark.parametrize("width", [40, 60, 80])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    assert max(map(len, render_plan(PLAN, SPEC, width).splitlines())) <= width


def test_what_is_left_out_for_the_same_reason_is_one_line_where_it_is_a_product() -> None:
    product = [
        SkippedCombination({"strategy": strategy, "bucket_mb": size}, "why")
        for strategy, size in itertools.product(("ddp", "zero1"), (1, 5, 25))
    ]
    assert left_out_texts(product) == [("strategy=ddp or zero1, bucket_mb=1, 5 or 25", "why")]
    assert left_out_texts(product[:4])[::3] == [
        ("strategy=ddp bucket_mb=1", "why"),
        ("strategy=zero1 bucket_mb=1", "why"),
    ]


LONG = replace(
    PLAN,
    left_out=(
        SkippedCombination(
            {"strategy": "ddp", "split": (48, 16)}, "the split [48, 16] is for 2 devices, not for 1"
        ),
        *PLAN.left_out,
    ),
    launches=tuple(replace(item, variants=item.variants * 4) for item in PLAN.launches),
)


def test_a_pipe_gets_every_line_in_full(wording: Wording) -> None:
    shown = render_plan(LONG, SPEC, 40, plain=True)
    assert "…" not in shown
    wording(shown)
    assert shown.count("ddp-2-48-16") == 1 + 2 * 4


def test_check_leaves_nothing_out_when_it_is_piped(tmp_path: Path) -> None:
    splits = ", ".join(f"[{first}, {64 - first}]" for first in range(1, 20))
    job = tmp_path / "job.yaml"
    job.write_text(
        "workload: sleep\nglobal_batch: 64\ndevices: cpu:2\n"
        f"compare: {{device_count: [1, 2], split: [{splits}]}}\n"
    )
    shown = CliRunner().invoke(cli, ["check", str(job)]).output
    assert "…" not in shown
    assert max(map(len, shown.splitlines())) > 200


def test_estimated_memory(wording: Wording) -> None:
    peak = MemoryPeak(parameters=2**30, gradients=2**30, activations=3 * 2**30)
    found = {
        EVEN.id: MemoryEstimate(peak),
        DP.id: MemoryEstimate(reason="torch.compile decides what is kept"),
    }
    wording(render_memory(found, 80, plain=True))


def test_a_table_of_memory_has_one_unit() -> None:
    """So small that parts aren't 0.00 of it; without any estimate there is no figure."""
    small = MemoryEstimate(MemoryPeak(parameters=90 * 2**20, gradients=2 * 2**20))
    large = MemoryEstimate(MemoryPeak(parameters=180 * 2**20))
    _, *rows = render_memory({EVEN.id: small, DP.id: large}, 200, plain=True).splitlines()
    cells = [re.split(r"\s{2,}", row)[1:4] for row in rows]
    assert cells == [["92.00 MiB", "90.00 MiB", "0.00 MiB"], ["180.00 MiB", "180.00 MiB", "0.00 MiB"]]
    assert "GiB" not in render_memory({EVEN.id: MemoryEstimate(reason="why")}, 200, plain=True)


def test_an_estimate_that_takes_too_long_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = tmp_path / "job.yaml"
    job.write_text("workload: mlp\ndevices: cpu:2\nglobal_batch: 8\n")
    monkeypatch.setattr(memory_estimate, "ESTIMATE_LIMIT_S", 0.1)
    with pytest.raises(MachineError, match=r"can't be estimated: that took longer than 0\.1 s"):
        CliRunner().invoke(cli, ["check", str(job), "--memory"], catch_exceptions=False)


def test_lists_among_params_keep_their_brackets(wording: Wording) -> None:
    spec = replace_params(alpha_ms=[100, 50], beta_ms=[5, 6])
    wording(render_plan(PLAN, spec, 100))


def replace_params(**params: object) -> JobSpec:
    return replace(SPEC, params=params)


SHARED = replace(PLAN, variants=(EVEN, UNEVEN), launches=(launch(0, EVEN, UNEVEN),))
REPEATED = replace(
    PLAN,
    budget_s=100.0,
    launches=tuple(launch(n, *some) for n in range(20) for some in ((EVEN, UNEVEN), (DP,))),
)
ACROSS = replace(PLAN, launches=REPEATED.launches[:4])
ENOUGH = replace(PLAN, launches=REPEATED.launches[:12])
SCATTER = Earlier(Path("runs/gpt-splits/1"), shared_percent=2.0, apart_percent=4.0, launch_s=None)


@pytest.mark.parametrize(
    ("plan", "earlier", "said"),
    [
        (SHARED, None, "set `steps: {launches: 6}`."),
        (ACROSS, None, "No verdict is possible with 2 launches: it takes 6 (`steps: {launches: 6}`)."),
        (ENOUGH, None, None),
        (ENOUGH, SCATTER, " % or more can be detected: 6 launches that scatter by 4 %."),
        (ENOUGH, replace(SCATTER, apart_percent=128.0), "6 launches that scatter by 130 %."),
        (ENOUGH, replace(SCATTER, apart_percent=None), None),
        (REPEATED, None, None),
        (REPEATED, replace(SCATTER, launch_s=5.0), "10 launches that scatter by 4 %."),
        (REPEATED, replace(SCATTER, launch_s=2.0), "20 launches that scatter by 4 %."),
        (replace(REPEATED, budget_s=2.0), None, "No verdict is likely: 1 launch of each takes 3.3 s, 6 take"),
        (replace(REPEATED, budget_s=6.0), None, "No verdict is likely: 1 launch of each fits into 6 s"),
    ],
)  # fmt: skip
def test_what_a_run_can_show_is_said_before_it(plan: Plan, earlier: Earlier | None, said: str | None) -> None:
    shown = render_plan(plan, SPEC, 80, plain=True, earlier=earlier)
    assert (said or "") in shown
    assert said or not re.search("verdict|detected", shown, re.IGNORECASE)
    assert max(map(len, shown.splitlines())) <= 80


def test_with_a_budget_each_group_is_shown_once(wording: Wording) -> None:
    shown = render_plan(REPEATED, SPEC, 80)
    wording(shown)
    assert shown.count("\n00-ddp-2") == 1


def test_grid_leaves_out_what_is_empty_everywhere() -> None:
    assert grid(("a", "b", "c"), [("1", "", "x"), ("22", "", "y")], right=(0,)) == [" a  c", " 1  x", "22  y"]
    assert cut("abcdef", 4) == "abc…"
    assert cut("abcd", 4) == "abcd"


def test_check_and_devices_start_without_rich_tensorboard_and_torch() -> None:
    code = (
        "import sys, gpurun.launcher.report.terminal.plan, gpurun.launcher.report.terminal.hardware\n"
        "import gpurun.launcher.machine.host\n"
        "gpurun.launcher.machine.host.inspect_machine()\n"
        "heavy = {'rich', 'tensorboard', 'torch', 'numpy', 'psutil', 'msgspec'}\n"
        "heavy |= {'tempfile', 'statistics', 'random', 'gpurun.launcher.rundir.records'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    assert run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
