"""`gpurun run --compare` with a real program: its arguments, its report, and arguments that it refuses."""

from pathlib import Path

import pytest

from tests.integration.command import ending, gpurun, write

PROGRAM = """
    import argparse, os, sys
    import gpurun

    parser = argparse.ArgumentParser()
    parser.add_argument("--num-workers", type=int)
    parser.add_argument("--amp", action="store_true")
    parser.add_argument("--epochs", type=int)
    parser.parse_args()
    print("got", *sys.argv[1:], os.environ["COLOUR"])
    for _ in range(40):
        with gpurun.step():
            pass
"""
SHORT = ("--devices", "cpu:1", "--set", "steps.launches=1", "--set", "profile.steps=0", "--out", "run")


@pytest.fixture(autouse=True)
def program(tmp_path: Path) -> Path:
    return write(tmp_path, "train.py", PROGRAM)


def test_a_program_is_run_with_each_of_the_values(tmp_path: Path) -> None:
    compare = ("--compare", "num_workers=0,2", "--compare", "env:COLOUR=red")
    refused = gpurun(tmp_path, "run", "train.py", *compare, *SHORT)
    assert (refused.code, refused.out) == (2, "")
    compare = (*compare[:3], "env:COLOUR=red,blue")
    line = ("--", "--num-workers=4", "--epochs", "1")
    ran = gpurun(tmp_path, "run", "train.py", *compare, *SHORT, "--json", *line).ended()
    variants = [variant for variant in ran.json["variants"] if ending(variant) == "ok"]
    assert [variant["varied"] for variant in variants] == [
        {"options": {"num_workers": workers}, "env": {"COLOUR": colour}}
        for workers in ("0", "2")
        for colour in ("red", "blue")
    ]
    logs = sorted((tmp_path / "run/launches").glob("*/log/rank0.log"))
    assert [line for log in logs for line in log.read_text().splitlines() if line.startswith("got")] == [
        f"got --num-workers={workers} --epochs 1 {colour}" for workers in "02" for colour in ("red", "blue")
    ]
    resumed = gpurun(tmp_path, "--resume", "run", "--json").ended()
    assert [each["varied"] for each in resumed.json["variants"]] == [each["varied"] for each in variants]


@pytest.mark.slow
def test_arguments_that_the_program_refuses_are_one_error(tmp_path: Path) -> None:
    compare = ("--compare", "wrkers=0,2", "--compare", "amp=on,off", "--compare", "env:COLOUR=red,blue")
    refused = gpurun(tmp_path, "run", "train.py", *compare, *SHORT, "--", "--epochs", "1")
    assert (refused.code, refused.out) == (2, "")
    assert refused.err.count("train.py: error: unrecognized arguments: --wrkers 0") == 1
    assert refused.err.count("usage:") == 1
    assert len(list((tmp_path / "run/launches").iterdir())) == 1
