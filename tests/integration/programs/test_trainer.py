"""A Hugging Face Trainer, in an environment of its own that `make test` sets up."""

import os
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
PYTHON = ROOT / ".venv-trainer" / "bin" / "python"


def test_a_trainer_runs_unchanged_and_its_steps_are_seen(tmp_path: Path) -> None:
    assert PYTHON.exists(), "`make trainer` sets up the environment of this test; `make test` does it too"
    shutil.copy(Path(__file__).with_name("trainer.py"), tmp_path)
    done = subprocess.run(
        [PYTHON, "-m", "gpurun", "run", "trainer.py", "--devices", "cpu:2", "--out", "run"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    log = (tmp_path / "run/launches/01-script-2/log/rank0.log").read_text()
    assert "world size 2 steps 16" in log
    for rank in range(2):
        steps = (tmp_path / f"run/variants/script-2/rank{rank}.jsonl").read_text().splitlines()
        assert len(steps) == 15  # from the first call of its optimizer to the last
