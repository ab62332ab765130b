"""`gpurun` is the only name that is taken; `test_programs` runs a program with a `launcher` of its own."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
SOURCES = ("launcher", "workloads", "src", "pyproject.toml", "setup.py", "README.md", "LICENSE")


def test_the_wheel_installs_one_name(tmp_path: Path) -> None:
    """Built as pip builds it, and unpacked as pip installs it."""
    pytest.importorskip("setuptools")
    site = tmp_path / "site"
    with zipfile.ZipFile(build_wheel(tmp_path)) as wheel:
        names = {name.partition("/")[0] for name in wheel.namelist()}
        assert {name for name in names if not name.endswith(".dist-info")} == {"gpurun"}
        wheel.extractall(site)
    assert (site / "gpurun/launcher/tensorboard_plugin/static/app.js").is_file()
    lookup = (
        "import gpurun.launcher.errors, gpurun.workloads.registry, importlib.util as u; "
        "print(gpurun.launcher.errors.__file__, u.find_spec('launcher'), u.find_spec('workloads'))"
    )
    found = python(site, "-P", "-c", lookup, env={"PYTHONPATH": str(site)})
    assert found.split() == [str(site / "gpurun/launcher/errors.py"), "None", "None"]


def build_wheel(directory: Path) -> Path:
    """A wheel of the sources; from a copy, since building leaves files behind."""
    for name in SOURCES:
        source = ROOT / name
        if source.is_dir():
            ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
            shutil.copytree(source, directory / name, symlinks=True, ignore=ignored)
        else:
            shutil.copy(source, directory)
    build = "from setuptools import build_meta; build_meta.build_wheel('.')"
    python(directory, "-c", build)
    (wheel,) = directory.glob("*.whl")
    return wheel


def python(directory: Path, *args: str, env: dict[str, str] | None = None) -> str:
    """What `python ARGS` prints; it must end well."""
    done = subprocess.run(
        [sys.executable, *args],
        cwd=directory,
        env={**os.environ, **(env or {})},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_public_face_needs_no_torch_until_it_is_used() -> None:
    code = "import gpurun, sys; assert 'torch' not in sys.modules; sys.modules['torch'] = None; gpurun.uneven"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr.endswith("import of torch halted; None in sys.modules\n"), done.stderr
