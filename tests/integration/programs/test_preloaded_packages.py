"""Packages that programs import are imported once for all ranks, where no program can notice it."""

import json
import subprocess
import sys
from pathlib import Path

from tests.integration.command import gpurun, write

PROGRAM = """
    import os, sys
    before = [name for name in ("markdown", "torch") if name in sys.modules]
    hidden = [each._hidden.get("markdown") for each in sys.meta_path if hasattr(each, "_hidden")]
    {sets}
    import markdown
    import torch

    open("said", "a").write(f"{before} {markdown in hidden}\\n")
    assert markdown.__spec__.origin == markdown.__file__
    assert sys.modules["markdown.core"] is markdown.core
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(40):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
"""
"""Says which packages it sees before it imports them, and whether the import gave what was there."""
TWICE = ("--devices", "cpu:1", "--set", "steps.launches=2")
SETS = "os.environ['WANDB_MODE'] = 'offline'"


def said(directory: Path, sets: str, end: str = "") -> list[str]:
    write(directory, "train.py", PROGRAM.replace("{sets}", sets) + end)
    cache = {"XDG_CACHE_HOME": str(directory / "cache")}
    gpurun(directory, "run", "train.py", *TWICE, env=cache).ended(0)
    lines = (directory / "said").read_text().splitlines()
    (directory / "said").unlink()
    return lines


def test_later_launches_share_one_import_which_the_program_does_not_see(tmp_path: Path) -> None:
    assert said(tmp_path, "") == ["[] False", "[] True"]


def test_imports_are_remembered_wherever_the_program_ends(tmp_path: Path) -> None:
    assert said(tmp_path, "", end="    os.chdir('/')\n") == ["[] False", "[] True"]


def test_a_program_that_sets_a_variable_imports_its_packages_itself(tmp_path: Path) -> None:
    assert said(tmp_path, SETS) == ["[] False", "[] False"]


def test_so_does_one_that_sets_its_first_variable(tmp_path: Path) -> None:
    said(tmp_path, "")
    assert said(tmp_path, SETS) == ["[] False", "[] False"]


NOTICED = {
    "thread": "import threading, time; threading.Thread(target=time.sleep, args=(9,), daemon=True).start()",
    "variable": "import os; os.environ['NEW'] = '1'",
    "handler": "import signal; signal.signal(signal.SIGUSR2, lambda *_: None)",
    "filter": "import warnings; warnings.simplefilter('ignore')",
    "method": "import multiprocessing; multiprocessing.set_start_method('spawn')",
    "python": "import random; random.random()",
    "numpy": "import numpy; numpy.random.random()",
    "torch": "import torch; torch.rand(1)",
    "hook": "import sys; sys.excepthook = print",
    "logging": "import logging; logging.basicConfig()",
    "nothing": "import json",
}
CHECK = """
import json, sys
import numpy, torch
from gpurun.launcher.worker.base.preload import is_harmless

print(json.dumps({name: is_harmless([name + "_module"]) for name in sys.argv[1:]}))
"""


def test_what_a_program_could_notice_is_found(tmp_path: Path) -> None:
    for name, code in NOTICED.items():
        (tmp_path / f"{name}_module.py").write_text(code)
    argv = [sys.executable, "-c", CHECK, *NOTICED]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == {name: name == "nothing" for name in NOTICED}
