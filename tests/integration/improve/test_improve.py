"""`gpurun improve` on real programs: what helps is found, proven and written; what is not safe is refused."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.integration.command import gpurun, write

SLOW = """
import time, torch, torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

class Slow(Dataset):
    def __len__(self):
        return 4000

    def __getitem__(self, index):
        time.sleep(0.003)
        return torch.full((8,), index / 4000)

torch.manual_seed(0)
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for batch in DataLoader(Slow(), batch_size=8, shuffle=True):
    optimizer.zero_grad()
    model(batch).pow(2).mean().backward()
    optimizer.step()
"""


FORKED = """\
import os
    if not (child := os.fork()):
        try:
            {}
        finally:
            os._exit(0)
    os.waitpid(child, 0)"""


def git(directory: Path, *args: str) -> None:
    identity = ("-c", "user.name=a", "-c", "user.email=a@b")
    subprocess.run(["git", *identity, *args], cwd=directory, check=True, capture_output=True)


def row(found: Any, start: str) -> Any:
    return next(each for each in found["remedies"] if each["code"].startswith(start))


@pytest.mark.slow
def test_what_helps_is_kept_proven_and_written(tmp_path: Path) -> None:
    """Waiting for data takes most of a step: workers help, whatever else runs on the machine."""
    write(tmp_path, "train.py", SLOW)
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "before")
    line = ("improve", "train.py", "--devices", "cpu:2", "--budget", "4m", "--out", "found", "--json")
    found = gpurun(tmp_path, *line, timeout_s=400).ended().json["improve"]
    workers = row(found, "DataLoader(num_workers=2")
    assert (workers["verdict"], workers["place"]) == ("kept", "train.py:16")
    assert workers["ci"][1] < 0
    assert found["gain"]["ci"][0] <= found["gain"]["percent"] <= found["gain"]["ci"][1] < 0
    assert row(found, "DataLoader(pin_memory=True)")["verdict"] == "not tried"
    assert "num_workers=2" in found["diff"]

    said = gpurun(tmp_path, "improve", "--resume", "found").ended()  # measures nothing
    assert said.out.startswith("Faster ")
    assert "1 of 3" not in said.err
    refused = gpurun(tmp_path, "improve", "--resume", "found", "--write").ended(2)
    assert "--yes" in refused.err
    assert refused.out == ""
    measured = (tmp_path / "train.py").read_text()
    (tmp_path / "train.py").write_text(f"{measured}# newer\n")
    refused = gpurun(tmp_path, "improve", "--resume", "found", "--write", "--yes").ended(2)
    assert "has changed since it was measured" in refused.err
    assert refused.out == ""
    (tmp_path / "train.py").write_text(measured)
    gpurun(tmp_path, "improve", "--resume", "found", "--write", "--yes").ended()
    assert "num_workers=2" in (tmp_path / "train.py").read_text()
    again = gpurun(tmp_path, "improve", "--resume", "found", "--write", "--yes").ended()
    assert "the change has been written already" in again.err
    (tmp_path / "train.py").write_text(f"{measured}# newer\n")
    refused = gpurun(tmp_path, "improve", "--resume", "found", "--write", "--yes").ended(2)
    assert "has changed since it was measured" in refused.err


@pytest.mark.parametrize(
    ("statement", "named"),
    [
        ('torch.save(model.state_dict(), "last.pt")', "job/last.pt"),
        ('__import__("shutil").rmtree("../job/run")', "job/run"),
        ('open("../elsewhere.pt", "w").close()', "elsewhere.pt"),  # below /tmp, but not of this launch
        ('torch.jit.save(torch.jit.script(torch.nn.Linear(1, 1)), "last.pt")', "job/last.pt"),
        (FORKED.format('open("last.pt", "w")'), "job/last.pt"),
        ('__import__("os").chmod("last.pt", 0o600)', "job/last.pt"),
    ],
)
def test_a_program_that_writes_where_its_launches_meet_is_refused(
    tmp_path: Path, statement: str, named: str
) -> None:
    job = tmp_path / "job"
    (job / "run").mkdir(parents=True)
    write(job, "train.py", SLOW)
    text = (job / "train.py").read_text().replace("optimizer.step()", "optimizer.step(); save()")
    (job / "train.py").write_text(text.replace("for batch", f"def save():\n    {statement}\n\nfor batch"))
    kept = [job / "last.pt", job / "run/epoch1.pt", tmp_path / "elsewhere.pt"]
    for path in kept:
        path.write_text("two weeks of training")
    line = ("improve", "train.py", "--devices", "cpu:1", "--budget", "1m", "--out", "found")
    refused = gpurun(job, *line).ended(2)
    assert [path.read_text() for path in kept] == ["two weeks of training"] * 3
    assert f"train.py writes to {tmp_path / named}" in refused.err
    assert "$GPURUN_LAUNCH_DIR" in refused.err
    assert json.loads((job / "found/improve.json").read_text())["complete"] is False


def test_a_file_that_a_process_of_the_program_changes_is_named_and_nothing_else_launched(
    tmp_path: Path,
) -> None:
    """No audit event shows its writes."""
    shell = '__import__("subprocess").run("echo $RANDOM >> last.txt; date >> sub/new.txt", shell=True)'
    (tmp_path / "sub").mkdir()
    write(tmp_path, "train.py", f"{SLOW}\n{shell}\n".replace("return 4000", "return 160"))
    line = ("improve", "train.py", "--devices", "cpu:1", "--budget", "1m", "--out", "found")
    for words in (line, ("improve", "--resume", "found")):
        refused = gpurun(tmp_path, *words).ended(2)
        said = f"{tmp_path / 'last.txt'}, {tmp_path / 'sub/new.txt'} changed while train.py ran"
        assert said in refused.err
        assert "$GPURUN_LAUNCH_DIR" in refused.err
    assert not (tmp_path / "found/2-alone").exists()


@pytest.mark.slow
def test_a_file_that_changes_only_in_a_later_stage_is_named_then(tmp_path: Path) -> None:
    shell = '__import__("subprocess").run("test -e found/2-alone && date >> last.txt", shell=True)'
    write(tmp_path, "train.py", f"{SLOW}\n{shell}\n".replace("return 4000", "return 160"))
    line = ("improve", "train.py", "--devices", "cpu:1", "--budget", "4m", "--out", "found")
    refused = gpurun(tmp_path, *line, timeout_s=400).ended(2)
    assert f"{tmp_path / 'last.txt'} changed while train.py ran" in refused.err
    assert (tmp_path / "found/2-alone/plan.json").exists()
    assert not (tmp_path / "found/2-best").exists()


def test_a_program_that_makes_no_step_ends_within_the_budget(tmp_path: Path) -> None:
    write(tmp_path, "train.py", "import time\ntime.sleep(10000)\n")
    line = ("improve", "train.py", "--devices", "cpu:1", "--budget", "12s", "--out", "found")
    assert "no step of train.py ended in " in gpurun(tmp_path, *line).ended(4).err


def test_gradients_that_accumulation_sends_each_time_are_advised_on_by_line(tmp_path: Path) -> None:
    """There is hardly time to try anything, but the program was seen."""
    once = "    model(batch).pow(2).mean().backward()\n"
    parts = "    for part in batch.chunk(2):\n        model(part).pow(2).mean().backward()\n"
    twice = SLOW.replace("time.sleep(0.003)", "pass").replace(once, parts)
    write(tmp_path, "train.py", twice)
    words = ("improve", "train.py", "--devices", "cpu:2", "--out", "found", "--budget", "40s")
    assert gpurun(tmp_path, *words).code in (0, 2)
    (advice,) = json.loads((tmp_path / "found/improve.json").read_text())["advice"]
    lines = (tmp_path / "train.py").read_text().splitlines()
    line = next(number for number, text in enumerate(lines, 1) if "backward()" in text)
    assert advice["place"] == f"train.py:{line}"
    assert advice["text"].startswith("2 backward passes for each step send gradients")


def test_the_search_of_another_user_is_not_continued_nor_written(tmp_path: Path) -> None:
    """What it says would be run, and put into files."""
    found = tmp_path / "found"
    (found / "1-original").mkdir(parents=True)
    found.chmod(0o777)
    (found / "improve.json").write_text("{}")
    refused = gpurun(tmp_path, "improve", "--resume", "found", "--write", "--yes").ended(2)
    assert "may write to found" in refused.err


def test_what_lies_where_a_search_is_to_be_is_left_alone(tmp_path: Path) -> None:
    write(tmp_path, "train.py", SLOW)
    for name in ("others/improve.json", "empty/a/notes"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text("{}")
    line = ("improve", "train.py", "--devices", "cpu:1", "--budget", "1m", "--out")
    said = {"train.py": "is a file", "empty": "is a directory with other files", "others": "--resume others"}
    for out, words in said.items():
        assert words in gpurun(tmp_path, *line, out).ended(2).err
    assert (tmp_path / "train.py").is_file()


NO_STEP = "import torch\ntorch.ones(1)\n"
FAILS = "import os; os.system('date >> log.txt')\nraise SystemExit('no data')\n"
EMPTY = SLOW.replace("return 4000", "return 0").replace(", shuffle=True", "")


@pytest.mark.parametrize(
    ("script", "more", "code", "said"),
    [
        (NO_STEP, (), 4, "no step of train.py could be timed: it makes no optimizer of torch.optim"),
        (EMPTY, (), 4, "no step of train.py could be timed: step() of the SGD at train.py:15 isn't called"),
        (FAILS, (), 4, "gpurun: train.py fails as it is: rank 0 ended by itself: no data"),
        (SLOW, ("--set", "compare.args=[[],[-v]]"), 2, "starts from one setting: remove `compare` (args)"),
        (SLOW, ("--set", "nodes=2"), 2, "runs on one machine"),
        (SLOW, ("--budget", "1s"), 2, "the budget is too short to try anything"),
    ],
    ids=["no step", "no data", "fails", "compares", "nodes", "budget"],
)
def test_what_cant_be_improved_is_said_in_a_line(
    tmp_path: Path, script: str, more: tuple[str, ...], code: int, said: str
) -> None:
    write(tmp_path, "train.py", script)
    found = gpurun(tmp_path, "improve", "train.py", "--devices", "cpu:1", "--out", "found", *more).ended(code)
    assert said in found.err
    assert "gpurun/launcher" not in found.err
