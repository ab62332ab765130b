"""Which keys of a job have an effect on a workload."""

import os
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch._dynamo  # the first optimizer imports it, and that sets an environment variable
from torch import nn

from gpurun import Workload
from gpurun.launcher.machine.landlock import can_restrict_writes
from gpurun.launcher.rundir.files import RunDir
from gpurun.launcher.rundir.launch_writes import (
    MAX_COPIED_BYTES,
    use_own_places,
    writable_places,
)
from gpurun.launcher.rundir.records import VariantConfig
from gpurun.launcher.worker.base.seeding import StepSeeds, own_numbers
from gpurun.launcher.worker.program.observed import Writes, trainer_options
from gpurun.launcher.worker.training.observed import given_to
from gpurun.launcher.worker.training.trainer import Trainer
from tests.launches import launch_config

OPTIMIZER = {"optimizer": "'default'", "foreach": "None", "fused": "None"}
ALWAYS = {"compile": "False", "threads": "1", "precision": "'fp32'"}
SAMPLES = [(torch.ones(1, 8, 8), torch.zeros(())) for _ in range(16)]


def linear(**more: Any) -> Workload:
    return Workload(nn.Linear(4, 1), lambda size, generator: (torch.ones(size, 4), torch.zeros(size, 1)),
                    nn.functional.mse_loss, **more)  # fmt: skip


def images(num_workers: int) -> Workload:
    model = nn.Sequential(nn.Conv2d(1, 1, 3), nn.Flatten(), nn.Linear(36, 1), nn.Flatten(0))
    loss = nn.functional.mse_loss
    return Workload(model, loss=loss, dataset=SAMPLES, num_workers=num_workers)


def layers() -> Workload:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    return Workload(model, lambda size, generator: (torch.ones(size, 4),) * 2, nn.functional.mse_loss)


@pytest.mark.parametrize(
    ("workload", "options", "expected"),
    [
        (linear(), {}, ALWAYS | OPTIMIZER),
        (linear(), {"optimizer": "fused"}, ALWAYS | OPTIMIZER | {"optimizer": "'fused'", "foreach": "False",
                                                                "fused": "True"}),
        (linear(optimizer=lambda p: torch.optim.RMSprop(p)), {},
         ALWAYS | {"optimizer": "'default'", "foreach": "None"}),
        (linear(optimizer=lambda p: torch.optim.LBFGS(p)), {}, ALWAYS),
        (layers(), {"checkpointing": "full"}, ALWAYS | OPTIMIZER | {"checkpointing": "'full'"}),
        (images(0), {},
         ALWAYS | OPTIMIZER | {"workers": "0", "channels_last": "False", "cudnn_benchmark": "False"}),
        (images(0), {"workers": 1, "prefetch": 3},
         ALWAYS | OPTIMIZER
         | {"workers": "1", "prefetch": "3", "channels_last": "False", "cudnn_benchmark": "False"}),
    ],
)  # fmt: skip
def test_keys_that_have_an_effect_are_given_with_their_values(
    tmp_path: Path, workload: Workload, options: dict[str, Any], expected: dict[str, str]
) -> None:
    config = launch_config(VariantConfig("v", (4,), 1), **options)
    assert dict(given_to(Trainer(workload, config, 0), config, RunDir(tmp_path))) == expected


@pytest.mark.parametrize(
    ("accumulate", "sync_every", "expected"), [(4, 1, "1"), (4, None, "4"), (1, None, None)]
)
def test_averages_within_a_step_are_a_key_where_there_can_be_several(
    tmp_path: Path, accumulate: int, sync_every: int | None, expected: str | None
) -> None:
    variant = VariantConfig("v", (4, 4), 1)
    config = launch_config(variant)
    trainer = Trainer(linear(), config, 0)
    trainer.strategy = cast(Any, SimpleNamespace(world_size=2))
    variant = replace(variant, accumulate=accumulate, sync_every=sync_every)
    found = dict(given_to(trainer, replace(config, variants=(variant,)), RunDir(tmp_path)))
    assert (found.get("sync_every"), found.get("accumulate")) == (expected, expected and str(accumulate))


def test_a_directory_that_is_not_open_is_left_to_the_programs_own_error(tmp_path: Path) -> None:
    writes = Writes(str(tmp_path), str(tmp_path / "run"))
    writes._audit("os.mkdir", ("made", 0o777, 1 << 30))
    assert not writes.found


@pytest.mark.parametrize("name", ["__pycache__", ".cache", "torchinductor_me"])
def test_a_cache_that_is_made_again_may_be_made(tmp_path: Path, name: str) -> None:
    """As `import model` makes `__pycache__` beside the program where it is missing."""
    job = tmp_path / "job"
    job.mkdir()
    writes = Writes(str(job), str(tmp_path / "run"))
    with writes.watch():
        (job / name).mkdir()
        (job / name / "model.pyc").touch()
    assert not writes.found


CHANGES: list[Callable[[Path, int], object]] = [
    lambda path, fd: path.chmod(0o600),
    lambda path, fd: os.fchmod(fd, 0o600),
    lambda path, fd: os.chown(path, os.getuid(), os.getgid()),
    lambda path, fd: os.utime(path, (0, 0)),
    lambda path, fd: os.setxattr(path, "user.a", b"b"),
    lambda path, fd: path.write_text("other"),
]


@pytest.mark.parametrize("number", range(len(CHANGES)))
def test_a_launch_changes_no_file_nor_its_mode_owner_and_times(tmp_path: Path, number: int) -> None:
    kept = tmp_path / "job/last.pt"
    kept.parent.mkdir()
    kept.write_text("best")
    before, writes = kept.stat(), Writes(str(kept.parent), str(tmp_path / "run"))
    with kept.open() as file, writes.watch(), pytest.raises(PermissionError, match=r"last\.pt"):
        CHANGES[number](kept, file.fileno())
    assert (writes.found, kept.stat()[:9], kept.read_text()) == ({str(kept)}, before[:9], "best")


@pytest.mark.parametrize("place", ["", "job", "/.cache"])
def test_a_cache_that_the_job_lies_in_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """`HF_HOME=/workspace` with the project below it, `TORCH_HOME=.`, a project below `~/.cache`."""
    job = tmp_path / ".cache/job"
    job.mkdir(parents=True)
    monkeypatch.setenv("HF_HOME", str(tmp_path if not place else job.parent if place == "/.cache" else job))
    (kept := job / "last.pt").write_text("best")
    writes = Writes(str(job), str(tmp_path / "run"))
    with writes.watch(), pytest.raises(PermissionError, match=r"last\.pt"):
        kept.write_text("other")
    assert (kept.read_text(), writable_places(str(job), str(tmp_path / "run")).count(str(tmp_path))) == (
        "best", 0
    )  # fmt: skip


@pytest.mark.parametrize(
    "name",
    ["XDG_CACHE_HOME", "HF_HOME", "TORCH_HOME", "TORCHINDUCTOR_CACHE_DIR", "PYTHONPYCACHEPREFIX", "TMPDIR"],
)
def test_a_launch_has_its_own_place_for_what_a_variable_puts_in_the_project(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Also beside the job's directory, in the same work tree of git."""
    place, job, run = tmp_path / "data", tmp_path / "job", tmp_path / "job/runs/a"
    for directory in (place / "sub", run, tmp_path / ".git"):
        directory.mkdir(parents=True)
    (place / "sub/best.txt").write_text("best")
    (place / "large").write_bytes(bytes(MAX_COPIED_BYTES + 1))
    monkeypatch.setenv(name, str(place))
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(sys, "pycache_prefix", None)
    assert str(place) not in writable_places(str(job), str(run))
    use_own_places(str(job), str(run / "launches/b/caches"))
    if name == "TMPDIR":
        assert name not in os.environ
        return
    own = Path(os.environ[name])
    assert own.is_relative_to(run)
    assert sys.pycache_prefix == (str(own) if name == "PYTHONPYCACHEPREFIX" else None)
    (own / "sub/best.txt").write_text("other")
    assert ((place / "sub/best.txt").read_text(), (own / "large").resolve()) == ("best", place / "large")
    own_again = own.stat().st_ino
    use_own_places(str(job), str(run / "launches/b/caches"))  # of another rank
    assert (own.stat().st_ino, [path.name for path in own.parent.iterdir()]) == (own_again, [name])


def test_a_cache_stays_where_its_name_says_that_it_is_one_or_outside_of_the_project(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stated = {"HF_HOME": str(tmp_path / "job/.cache/hf"), "TORCH_HOME": str(tmp_path / "fast")}
    for name, place in stated.items():
        monkeypatch.setenv(name, place)
    use_own_places(str(tmp_path / "job"), str(tmp_path / "job/run/launches/b/caches"))
    assert {name: os.environ[name] for name in stated} == stated
    assert set(stated.values()) < set(writable_places(str(tmp_path / "job"), str(tmp_path / "job/run")))


@pytest.mark.parametrize(
    ("name", "is_write", "temporary"),
    [
        (":memory:", False, "/"),
        ("", False, "/"),
        ("file:old.db?mode=ro", False, "/"),
        ("file::memory:?cache=shared", False, "/"),
        ("file:old.db?cache=shared&mode=rw", True, "/"),
        ("new.db", True, "/"),
        ("old.db", True, "/"),  # where launches may write, the kernel keeps none from it
        ("old.db", not can_restrict_writes(), "/nowhere"),
    ],
)
def test_a_database_is_written_unless_it_is_in_memory_or_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, is_write: bool, temporary: str
) -> None:
    (tmp_path / "old.db").touch()
    monkeypatch.chdir(tmp_path)
    places = "gpurun.launcher.worker.program.observed.temporary_places"
    monkeypatch.setattr(places, lambda _: (temporary,))
    writes = Writes(str(tmp_path), str(tmp_path / "run"))
    with writes.watch(), pytest.raises(PermissionError) if is_write else nullcontext():
        sqlite3.connect(name, uri=name.startswith("file:")).close()
    assert bool(writes.found) == is_write


def test_what_an_earlier_launch_left_in_shared_memory_is_not_written(tmp_path: Path) -> None:
    with tempfile.NamedTemporaryFile(dir="/dev/shm") as file:
        writes = Writes(str(tmp_path), str(tmp_path / "run"), began_s=time.time() + 60)
        with writes.watch():
            with pytest.raises(PermissionError, match="/dev/shm/"):
                Path(file.name).write_text("other")
            Path("/dev/null").write_text("other")
    assert writes.found == {file.name}


KEPT = """
import sys
from pathlib import Path
from gpurun.launcher.rundir import launch_writes
launch_writes.temporary_places = lambda _: ()  # where this test runs
observes, kind = sys.argv[1] == "True", sys.argv[2]

def train(*_):
    Path("run/own").touch()
    Path("last.pt").write_text("other")

if kind == "program":
    from gpurun.launcher.rundir.files import RunDir
    from gpurun.launcher.rundir.records import ProgramConfig
    from gpurun.launcher.worker.program.run_program import with_own_directory
    config = ProgramConfig("l", "run", ".", "train.py", None, (), None, 1, 0, (), observe=observes)
    with_own_directory(config, RunDir(Path("run")))
    train()
else:
    from gpurun.launcher.worker.entry import workload_rank
    from gpurun.launcher.rundir.files import write_json
    from tests.launches import launch_config
    write_json(Path("config"), launch_config(run_dir="run", observe=observes))
    workload_rank.run_launch = train
    workload_rank.main(["config", "0"])
"""


@pytest.mark.skipif(not can_restrict_writes(), reason="this kernel has no Landlock, or an older one")
@pytest.mark.parametrize("kind", ["program", "workload"])
@pytest.mark.parametrize("observes", [True, False])
def test_a_launch_of_a_search_is_kept_to_its_places_and_no_other(
    tmp_path: Path, kind: str, observes: bool
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "last.pt").write_text("best")
    argv = [sys.executable, "-c", KEPT, str(observes), kind]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    done = subprocess.run(argv, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert (tmp_path / "run/own").exists(), done.stderr
    assert ("Permission denied: 'last.pt'" in done.stderr, done.returncode != 0) == (observes, observes)
    assert (tmp_path / "last.pt").read_text() == ("best" if observes else "other")


def test_the_options_of_a_trainer_are_those_of_the_installed_version(monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclass
    class Arguments:
        ddp_bucket_cap_mb: int | None = None

    @dataclass
    class NewerArguments(Arguments):
        ddp_static_graph: bool | None = None

    assert trainer_options() == ()
    for made, options in (
        (Arguments, ("ddp_bucket_cap_mb",)),
        (NewerArguments, ("ddp_bucket_cap_mb", "ddp_static_graph")),
    ):
        module = SimpleNamespace(TrainingArguments=made)
        monkeypatch.setitem(sys.modules, "transformers.training_args", cast(Any, module))
        assert trainer_options() == options


def test_seeded_ranks_draw_numbers_of_their_own_in_each_step() -> None:
    def drawn(rank: int) -> list[float]:
        weight = nn.Parameter(torch.ones(1))
        optimizer, numbers = torch.optim.SGD([weight], lr=0.1), []
        with own_numbers(rank), StepSeeds(rank, 2).watch():
            for _ in range(3):
                optimizer.step()
                numbers.append(torch.rand(()).item())
        return numbers

    first, second = drawn(0), drawn(1)
    assert len({*first, *second}) == 6
    assert drawn(1) == second
