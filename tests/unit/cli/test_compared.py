"""`gpurun run --compare` makes the job that a job file would, and says what is wrong with its values."""

from pathlib import Path
from typing import Any

import pytest

from gpurun.launcher.compare.label import variant_label
from gpurun.launcher.errors import SpecError
from gpurun.launcher.jobfile.load import compared, load_job, load_text, program_job
from gpurun.launcher.plan.build import build_plan
from gpurun.launcher.plan.model import Plan
from tests.unit.plan.machines import FakeMachine
from tests.wording import Wording


def plan_of(directory: Path, args: str, *compare: str) -> Plan:
    (directory / "train.py").touch()
    text = program_job("train.py", None, args.split(), "cpu:2", compared(compare))
    return build_plan(load_text(text, "", (), directory), FakeMachine())


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("workers=0,2", {"options": [{"workers": "0"}, {"workers": "2"}]}),
        ("--workers=0, 2", {"options": [{"workers": "0"}, {"workers": "2"}]}),
        ("amp=on,off", {"options": [{"amp": "on"}, {"amp": "off"}]}),
        ("+model.width=64,128", {"options": [{"+model.width": "64"}, {"+model.width": "128"}]}),
        ("env:OMP_NUM_THREADS=1,2", {"env": [{"OMP_NUM_THREADS": "1"}, {"OMP_NUM_THREADS": "2"}]}),
        ('sizes=["1,2","3,4"]', {"options": [{"sizes": "1,2"}, {"sizes": "3,4"}]}),
        ('lr=[0.1, ""]', {"options": [{"lr": 0.1}, {"lr": ""}]}),
        ("where=a=b,c", {"options": [{"where": "a=b"}, {"where": "c"}]}),
        ("env=dev,prod", {"options": [{"env": "dev"}, {"env": "prod"}]}),
    ],
)
def test_each_form_is_what_a_job_file_has(text: str, wanted: dict[str, Any]) -> None:
    assert compared([text]) == wanted


def test_every_combination_is_a_variant_that_is_called_by_what_differs(tmp_path: Path) -> None:
    compare = ("workers=0,2", "amp=on,off", "env:A=1,2")
    plan = plan_of(tmp_path, "--epochs 1 --workers=4 data", *compare)
    assert [variant_label(variant) for variant in plan.variants] == [
        f"workers={workers} amp={amp} A={a}" for workers in "02" for amp in ("on", "off") for a in "12"
    ]
    assert plan.variants[0].id == "script-2-workers-0-amp-on-A-1"
    lines = [variant.line for variant in plan.variants]
    assert lines[0] == ("--epochs", "1", "--workers=0", "data", "--amp")
    assert lines[-1] == ("--epochs", "1", "--workers=2", "data")
    assert plan.launches[0].processes[0].env["A"] == "1"
    assert plan_of(tmp_path, "", "+model.width=1,2").variants[0].id == "script-2-model.width-1"


def test_a_job_file_says_the_same(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(
        "name: train\nscript: train.py\nargs: [--epochs, 1]\ndevices: cpu:2\n"
        "compare: {options: [{workers: 0}, {workers: 2, amp: true}]}\nbaseline: {options: {amp: on}}\n"
    )
    plan = plan_of(tmp_path, "--epochs 1", "workers=0,2")
    written = build_plan(load_job(tmp_path / "job.yaml"), FakeMachine())
    assert written.variants[0] == plan.variants[0]
    assert written.variants[1].line == ("--epochs", "1", "--workers", "2", "--amp")
    assert written.baseline == written.variants[1].id


MISTAKES = (
    *("workers", "workers=", "workers=2", "amp=on", "workers=0,,2", "workers=2,2", "sizes=[]"),
    *("a b=1,2", "=1,2", "~x=1,2", "++model.x=1,2", "2=1,2"),
    *('sizes=["1,2"]', "sizes=[1,2],[3,4]", 'sizes=["1,2"', "sizes=[[1],[2]]", "sizes=[null,1]"),
    *("+model.x=64", "--workers=2", "env=OMP_NUM_THREADS=1,2"),
    *("env:1X=1,2", "env:=1,2", "env:A B=1,2", "env:RANK=0,1", "env:A=", "env:HF_TOKEN=hidden"),
)


def test_every_mistake_says_what_to_write_instead(wording: Wording) -> None:
    for text in MISTAKES:
        with wording.raises(SpecError) as caught:
            compared([text])
        assert all(problem.hint for problem in caught.value.problems)
        assert "hidden" not in str(caught.value)


@pytest.mark.parametrize("again", ["num_workers=4,8", "num-workers=4,8", "+num_workers=4,8"])
def test_a_key_has_all_its_values_at_once(again: str, wording: Wording) -> None:
    with wording.raises(SpecError):
        compared(["num_workers=0,2", again])
    assert compared(["a=0,2", "env:a=0,2", "env:A=0,2"]).keys() == {"options", "env"}


def test_mistakes_in_several_are_said_together() -> None:
    with pytest.raises(SpecError) as caught:
        compared(["a", "b=1", "c=1,2"])
    assert len(caught.value.problems) == 2
