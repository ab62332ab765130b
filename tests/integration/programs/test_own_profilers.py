"""Programs that profile themselves: their profiler works as it does without gpurun."""

from pathlib import Path

import pytest

from tests.integration.command import Result, ending, gpurun, write

PROGRAM = """
    import os, sys
    import torch
    from torch.profiler import ProfilerActivity, profile, schedule, tensorboard_trace_handler

    mode = sys.argv[2]
    model = torch.nn.Linear(64, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    place = os.path.join(os.environ["GPURUN_LAUNCH_DIR"], "mine")
    how = {"activities": [ProfilerActivity.CPU], "on_trace_ready": tensorboard_trace_handler(place)}
    schedules = {
        "scheduled": schedule(wait=5, warmup=2, active=30, repeat=2),
        "cyclic": schedule(wait=4, warmup=1, active=3, repeat=0),
    }


    def step():
        model(torch.randn(64, 64)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


    if mode in ("autograd", "disabled"):
        with torch.autograd.profiler.profile(enabled=mode == "autograd") as profiler:
            for _ in range(60):
                step()
        assert mode == "disabled" or "aten::addmm" in profiler.key_averages().table()
        if mode == "autograd":
            os.mkdir(place)
            profiler.export_chrome_trace(os.path.join(place, "trace.json"))
    else:
        for _ in range({"late": 31, "after": 50}.get(mode, 0)):
            step()
        profiler = profile(schedule=schedules.get(mode), **how)
        profiler.start()
        for number in range(10 if mode == "ended" else 80):
            step()
            profiler.step()
        profiler.stop()
        for _ in range(50 if mode == "ended" else 0):
            step()
            profiler.step()
    names = os.listdir(place) if os.path.isdir(place) else []
    print("traces", len(names))
"""
STACKS = """
    import json
    from collections import Counter
    import torch
    from torch.profiler import ProfilerActivity, profile

    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with profile(activities=[ProfilerActivity.CPU], with_stack=True) as profiler:
        for _ in range(9):
            model(torch.randn(4, 8)).mean().backward()
            optimizer.step()
    profiler.export_chrome_trace("trace.json")
    names = Counter(event["name"] for event in json.load(open("trace.json"))["traceEvents"])
    assert sum("optimizer.py" in name for name in names)
    print([name.partition(": ")[2] for name, num in names.items() if "gpurun/" in name and num >= 9])
"""


def test_its_stacks_have_one_line_of_ours_per_step(tmp_path: Path) -> None:
    write(tmp_path, "train.py", STACKS)
    gpurun(tmp_path, "run", "train.py", "--devices", "cpu:1", "--out", "run").ended(0)
    (log,) = (tmp_path / "run" / "launches").glob("*/log/rank0.log")
    assert "['guarded']\n" in log.read_text()


ON_RANK_0 = """
    import os
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with torch.autograd.profiler.profile(enabled=os.environ["RANK"] == "0"):
        for _ in range(60):
            model(torch.randn(4, 8)).mean().backward()
            optimizer.step()
    while os.environ["RANK"] == "0" and not os.path.exists("run/variants/script-2/rank1.pt.trace.json.gz"):
        os.sched_yield()
    dist.barrier()
"""


def test_ranks_without_a_profiler_of_their_own_are_traced(tmp_path: Path) -> None:
    write(tmp_path, "train.py", ON_RANK_0)
    gpurun(tmp_path, "run", "train.py", "--devices", "cpu:2", "--out", "run").ended(0)
    said = gpurun(tmp_path, "report", "run", "--details").ended(0).out
    assert "Rank 0 has no trace: the program's own profiler ran" in " ".join(said.split())


TRACES = {
    "whole": 1,
    "scheduled": 2,
    "cyclic": 10,
    "late": 1,
    "ended": 1,
    "after": 1,
    "autograd": 1,
    "disabled": 0,
}
"""How many traces each program writes by itself, as it does under Python alone."""
WITH_OURS = ("after", "disabled")
"""Programs whose steps 31 to 33 no profiler of theirs has anything to do with."""


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Result:
    directory = tmp_path_factory.mktemp("profilers")
    write(directory, "train.py", PROGRAM)
    compared = f"mode={','.join(TRACES)}"
    words = ("--devices", "cpu:1", "--set", "steps.launches=1", "--out", "run", "--json")
    return gpurun(directory, "run", "train.py", "--compare", compared, *words)


def launch_of(ran: Result, mode: str) -> Path:
    (path,) = (ran.directory / "run" / "launches").glob(f"*{mode}")
    return path


@pytest.mark.parametrize("mode", TRACES)
def test_its_profiler_works_as_without_gpurun(ran: Result, mode: str) -> None:
    (variant,) = [each for each in ran.json["variants"] if each["id"].endswith(mode)]
    assert ending(variant) == "ok", ran.err
    assert f"traces {TRACES[mode]}\n" in (launch_of(ran, mode) / "log" / "rank0.log").read_text()


@pytest.mark.parametrize("mode", TRACES)
def test_the_report_says_whose_traces_there_are(ran: Result, mode: str) -> None:
    (variant,) = [each for each in ran.json["variants"] if each["id"].endswith(mode)]
    about = [each for each in ran.json["findings"] if variant["id"] in each["figures"].get("variants", ())]
    is_ours = mode in WITH_OURS
    assert any("the program's own profiler ran" in each["text"] for each in about) != is_ours, about
    traces = list((ran.directory / "run" / "variants" / variant["id"]).glob("*.pt.trace.json.gz"))
    assert len(traces) == is_ours
