"""Which runs a tab lists of a directory that holds much else."""

from pathlib import Path

import pytest

from gpurun.launcher.tensorboard_plugin import logdir
from gpurun.launcher.tensorboard_plugin.logdir import Listing, choose


def files(directory: Path, count: int) -> None:
    directory.mkdir(parents=True)
    for number in range(count):
        (directory / f"{number}.jpg").touch()


def test_neither_data_nor_a_virtual_environment_hides_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logdir, "MAX_ENTRIES", 40)
    files(tmp_path / "data", 100)
    files(tmp_path / "datasets/a", 100)
    files(tmp_path / "env/lib/python3.11/site-packages/a", 100)
    (tmp_path / "env/pyvenv.cfg").touch()
    run = tmp_path / "runs/gpt/2026-11-21_14-02-11"
    run.mkdir(parents=True)
    (run / "plan.json").write_text("{}")
    assert list(Listing(str(tmp_path)).all()) == ["runs/gpt/2026-11-21_14-02-11"]


def test_steps_are_thinned_out_but_the_slowest_stay() -> None:
    values = [float(i % 97) for i in range(5000)]
    values[1234] = 1e9
    chosen = choose(values, 300)
    assert len(chosen) <= 300
    assert 1234 in chosen
    assert chosen == sorted(set(chosen))
    assert choose(values, 5000) == list(range(5000))
