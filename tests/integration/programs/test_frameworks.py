"""Programs of the usual frameworks, unchanged, in an environment of their own that `make` sets up."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.integration.command import FRAMEWORKS, ROOT, ending, write

pytestmark = pytest.mark.slow

EXAMPLES = ROOT / "examples" / "frameworks"
PROGRAMS = ("hf_trainer.py", "with_accelerate.py", "with_lightning.py", "fsdp2.py")


def gpurun(directory: Path, *args: str) -> subprocess.CompletedProcess[str]:
    """`gpurun ARGS`, under the environment that has the frameworks."""
    return subprocess.run(
        [FRAMEWORKS, "-m", "gpurun", *args, "--out", "run"],
        cwd=directory,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of one run of all programs, each a variant of a program that runs the one it is given."""
    directory = tmp_path_factory.mktemp("frameworks")
    shutil.copytree(EXAMPLES, directory, dirs_exist_ok=True)
    write(directory, "any.py", "import runpy, sys\nrunpy.run_path(sys.argv[1], run_name='__main__')\n")
    write(
        directory,
        "job.yaml",
        f"""
        script: any.py
        devices: cpu:2
        compare: {{args: {json.dumps([[name] for name in PROGRAMS])}}}
        steps: {{launches: 1}}
        profile: {{steps: 0}}
        """,
    )
    done = gpurun(directory, "job.yaml")
    assert done.returncode == 0, done.stderr
    return directory / "run"


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_frameworks_steps_are_seen_and_timed(ran: Path, name: str) -> None:
    variants = json.loads((ran / "comparison.json").read_text())["variants"]
    variant = next(variant for variant in variants if variant["id"] == f"script-2-{name}")
    (launch,) = ran.glob(f"launches/*-{variant['id']}")
    assert "world size 2 steps 40" in (launch / "log" / "rank0.log").read_text()
    for rank in range(2):
        steps = (ran / "variants" / variant["id"] / f"rank{rank}.jsonl").read_text().splitlines()
        assert len(steps) == 39  # from the first call of its optimizer to the last
    low, high = variant["step_ms"]["ci"]
    assert 0 < low <= variant["step_ms"]["estimate"] <= high


def test_a_hugging_face_model_is_split_like_any_other(tmp_path: Path) -> None:
    shutil.copytree(EXAMPLES, tmp_path, dirs_exist_ok=True)
    # Each launch imports transformers. How steady times are, next to other load, isn't the question here.
    sizes = ("--set", "steps.rounds=2", "--set", "steps.launches=1", "--set", "steps.warmup=3")
    done = gpurun(tmp_path, "hf_model.yaml", *sizes, "--set", "profile.steps=0")
    assert done.returncode == 0, done.stderr
    variants = json.loads((tmp_path / "run" / "comparison.json").read_text())["variants"]
    assert len(variants) == 4
    assert {ending(variant) for variant in variants} == {"ok"}
    assert max(variant["gradient_error"] for variant in variants) < 1e-5
