"""Packages that programs import are imported once for all ranks, where no program can notice it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gpurun.launcher.rundir.files import write_json
from gpurun.launcher.rundir.remembered import Imports, place_of
from tests.integration.command import FRAMEWORKS, ROOT, gpurun, write

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


NOT_IN_RANKS = ("jobfile", "plan", "trace.analysis", "trace.kineto")


def test_ranks_of_programs_import_neither_jobs_nor_the_analysis_of_traces() -> None:
    begins = "gpurun.launcher.worker.program.program_rank, gpurun.launcher.worker.base.process_group"
    code = f"import sys, {begins}; print(*(name for name in sys.modules if name.startswith('gpurun.')))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    found = [name.removeprefix("gpurun.launcher.") for name in done.stdout.split()]
    assert "worker.program.program_rank" in found
    assert [name for name in found if name.startswith(NOT_IN_RANKS)] == []


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
    for name, end in (("elsewhere", "os.chdir('/')"), ("at once", "os._exit(0)")):
        (tmp_path / name).mkdir()
        assert said(tmp_path / name, "", end=f"    {end}\n") == ["[] False", "[] True"]


def test_a_program_that_sets_a_variable_imports_its_packages_itself(tmp_path: Path) -> None:
    assert said(tmp_path, SETS) == ["[] False", "[] False"]


def test_so_does_one_that_sets_its_first_variable(tmp_path: Path) -> None:
    said(tmp_path, "")
    assert said(tmp_path, SETS) == ["[] False", "[] False"]


NOTICED = {
    "thread": "import threading, time; threading.Thread(target=time.sleep, args=(9,), daemon=True).start()",
    "variable": "import os; os.environ['NEW'] = '1'",
    "handler": "import signal; signal.signal(signal.SIGUSR2, lambda *_: None)",
    "changed variable": "import os; os.environ['HOME'] += '/'",
    "no filters": "import warnings; warnings.resetwarnings()",
    "moved filter": "import warnings; warnings.filters.append(warnings.filters.pop(0))",
    "moved finder": "import sys; sys.meta_path.append(sys.meta_path.pop(0))",
    "path hook": "import sys; sys.path_hooks.append(print)",
    "method": "import multiprocessing; multiprocessing.set_start_method('spawn')",
    "python": "import random; random.random()",
    "numpy": "import numpy; numpy.random.random()",
    "torch": "import torch; torch.rand(1)",
    "hook": "import sys; sys.excepthook = print",
    "logging": "import logging; logging.basicConfig()",
}
DONE_AGAIN = {
    "nothing": "import json",
    "filters": "import warnings; warnings.simplefilter('ignore')",
    "last filters": "import warnings; warnings.simplefilter('error', append=True)",
    "finders": "import sys; sys.meta_path.insert(0, Finder()); sys.meta_path.append(Finder())",
    "torch's variable": "import os; os.environ['TORCHINDUCTOR_CACHE_DIR'] = '/nowhere'",
}
CHECK = """
import json, sys
import numpy, torch
from gpurun.launcher.worker.base.preload import harmless_ones

print(json.dumps({name: [*harmless_ones([name + "_module"])] != [] for name in sys.argv[1:]}))
"""


FINDER = "class Finder:\n    find_spec = staticmethod(lambda *_: None)\n"


def test_what_a_program_could_notice_is_found(tmp_path: Path) -> None:
    for name, code in {**NOTICED, **DONE_AGAIN}.items():
        (tmp_path / f"{name}_module.py").write_text(FINDER + code)
    argv = [sys.executable, "-c", CHECK, *NOTICED, *DONE_AGAIN]
    env = {key: value for key, value in os.environ.items() if key != "TORCHINDUCTOR_CACHE_DIR"}
    done = subprocess.run(argv, cwd=tmp_path, env=env, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == {name: name in DONE_AGAIN for name in (*NOTICED, *DONE_AGAIN)}


STATE = """
    import ctypes, json, os, sys, warnings
    NAMES = ("first", "second", "third", "transformers", "sympy", "scipy")

    def state():
        names = [getattr(each, "__name__", type(each).__name__) for each in sys.meta_path]
        finders = [name for name in names if name not in ("HiddenPackages", "OwnModules")]
        filters = [str(each) for each in warnings.filters]
        shown = [name for name in NAMES if name in sys.modules]
        return filters, finders, os.environ.get("TORCHINDUCTOR_CACHE_DIR"), shown, blas_threads()

    def blas_threads():
        maps = [line.split() for line in open("/proc/self/maps")]
        found = {}
        for path in {words[5] for words in maps if "scipy_openblas" in words[-1] and "scipy" in sys.modules}:
            for name in ("scipy_openblas_get_num_threads64_", "scipy_openblas_get_num_threads"):
                if hasattr(library := ctypes.CDLL(path), name):
                    found[os.path.basename(path)] = getattr(library, name)()
        return sorted(found.items())

    def show(cases):
        hidden = {name for each in sys.meta_path for name in getattr(each, "_hidden", ()) if name in NAMES}
        print(sorted(hidden), flush=True)
        for name, code in cases.items():
            if os.fork() == 0:
                before = state()
                exec(code, globals())
                print(json.dumps([name, before, state()]), flush=True)
                os._exit(0)
            os.wait()
"""
"""What a program sees, but for finders of ours; each case in a process of its own."""
IMPORTS = (
    STATE
    + """
    show({
        "nothing": "",
        "all": "import first; import third",
        "with what it needs": "import first",
        "alone": "import second",
        "the last": "import third",
        "the other way round": "import third; import second; import first",
        "after filters of its own": "warnings.filterwarnings('ignore', 'of the first'); import first",
        "after filters of its own at the end": "warnings.simplefilter('ignore', append=True); import first",
        "after a variable of its own": "os.environ['TORCHINDUCTOR_CACHE_DIR'] = 'own'; import third",
        "between variables": "import third; os.environ['X'] = 'x'; import first",
        "forked": "import first; os.fork() and os._exit(os.wait()[1])",
        "asked for alone": "import importlib.util; importlib.util.find_spec('first')",
    })
"""
)
PACKAGES = {
    "first.py": """
        import warnings
        import second
        warnings.filterwarnings("ignore", "of the first")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            import second.inner
        warnings.simplefilter("ignore", append=True)
    """,
    "second/__init__.py": """
        import sys, warnings

        class First:
            find_spec = staticmethod(lambda *_: None)

        class Last(First):
            pass

        warnings.filterwarnings("ignore", "of the second")
        sys.meta_path.insert(0, First())
        sys.meta_path.append(Last())
    """,
    "second/inner.py": "import warnings\nwarnings.filterwarnings('once', 'of the inner')",
    "third.py": "import os\nos.environ.setdefault('TORCHINDUCTOR_CACHE_DIR', 'by the third')",
}

REMEMBERED = ("first", "second.inner", "second", "third")


def seen(directory: Path, modules: tuple[str, ...]) -> list[str]:
    """What the program writes if these modules are remembered of it; first, which of them are hidden."""
    env = {"XDG_CACHE_HOME": str(directory / f"cache{len(modules)}"), "PYTHONPATH": str(directory)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", env["XDG_CACHE_HOME"])
        place = place_of(str(directory / "train.py"), sys.executable)
    place.parent.mkdir()
    write_json(place, Imports(modules))
    out = f"run{len(modules)}"
    gpurun(directory, "run", "train.py", *TWICE, "--out", out, env=env).ended(0)
    first, _ = sorted((directory / out / "launches").glob("*/log/rank0.log"))
    return first.read_text().splitlines()


def test_what_imports_leave_is_seen_from_when_the_program_imports_them(tmp_path: Path) -> None:
    (tmp_path / "second").mkdir()
    for name, text in {**PACKAGES, "train.py": IMPORTS}.items():
        write(tmp_path, name, text)
    (hidden_none, *plain), (hidden, *preloaded) = (seen(tmp_path, modules) for modules in ((), REMEMBERED))
    assert (hidden_none, hidden) == ("[]", "['first', 'second', 'third']")
    assert preloaded == plain


FRAMEWORK = (
    STATE
    + """
    MODEL = "from transformers import GPT2Config, GPT2LMHeadModel\\n"
    TRAIN = MODEL + (
        "model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=1, vocab_size=16))\\n"
        "tokens = torch.ones(1, 4, dtype=torch.long)\\n"
        "model(input_ids=tokens, labels=tokens).loss.backward()\\n"
    )
    show({
        "nothing": "",
        "torch alone": "import torch",
        "a model": MODEL,
        "torch first": "import torch\\n" + TRAIN,
        "a package that it needs": "import sympy",
        "another": "import scipy.sparse, scipy.special",
        "after a variable": "import torch; os.environ['X'] = 'x'\\n" + TRAIN,
        "after its variable": "import torch; os.environ['TORCHINDUCTOR_CACHE_DIR'] = '/tmp'\\n" + MODEL,
    })
    import torch
    exec(TRAIN)
    import scipy.linalg
"""
)


@pytest.mark.slow
@pytest.mark.parametrize("threads", ["1", "2"])
def test_a_program_with_transformers_sees_what_it_sees_without_preloading(
    tmp_path: Path, threads: str
) -> None:
    write(tmp_path, "train.py", FRAMEWORK)
    own = {"XDG_CACHE_HOME": str(tmp_path / "cache"), "OMP_NUM_THREADS": threads, "HF_HUB_OFFLINE": "1"}
    env = {**os.environ, **own, "PYTHONPATH": str(ROOT / "src")}
    found = []
    for out in ("plain", "preloaded"):
        argv = [FRAMEWORKS, "-m", "gpurun", "run", "train.py", *TWICE, "--out", out]
        done = subprocess.run(argv, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        first, _ = sorted((tmp_path / out / "launches").glob("*/log/rank0.log"))
        found.append(first.read_text().splitlines())
    (hidden_none, *plain), (hidden, *preloaded) = found
    assert (hidden_none, hidden) == ("[]", "['scipy', 'sympy', 'transformers']")
    assert preloaded == plain
