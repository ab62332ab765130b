"""The batch script, letter by letter, and what it can't hold."""

import json
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpurun import __version__
from gpurun.launcher.errors import SpecError
from gpurun.launcher.jobfile.load import load_text
from gpurun.launcher.schedulers import how_to_requeue
from gpurun.launcher.schedulers.base import Submission, SubmitOptions
from gpurun.launcher.schedulers.slurm import batch_script, next_commands

GOLDEN = Path(__file__).parents[2] / "data" / "submit.sbatch"


def submission(**job: Any) -> Submission:
    text = json.dumps({"name": "gpt-splits", "workload": "gpt", "global_batch": 64, **job})
    spec = load_text(text, "job.yaml", (), Path())
    return Submission(
        spec, Path("/home/me/my jobs/job.yaml"), Path("/home/me/my jobs"), ("seed=3",), ("/opt/gpurun",)
    )


def test_the_script_is_as_it_was_reviewed() -> None:
    options = SubmitOptions(2, 3600, "gpu", "acct", 8, 64, further=("--constraint=a100&ib",))
    script = batch_script(submission(), options).replace(__version__, "VERSION")
    assert script == GOLDEN.read_text()


def test_a_name_with_other_letters_than_ascii_has_a_label_in_slurm() -> None:
    script = batch_script(submission(name="größe"), SubmitOptions())
    assert "#SBATCH --job-name=job-0\n" in script
    assert 'out="runs/größe/slurm-$id"' in script


def test_the_jobs_own_words_are_not_repeated() -> None:
    script = batch_script(submission(nodes=4, devices=["cuda:0", "cuda:3"]), SubmitOptions())
    assert "#SBATCH --nodes=4\n" in script
    assert "nodes=4 --out" not in script
    assert "#SBATCH --gpus-per-node=4\n" in script
    assert "--time" not in script
    open_one = submission(nodes="2..4", devices="cpu:2")
    script = batch_script(open_one, SubmitOptions())
    assert "#SBATCH --nodes=2-4\n" in script
    assert "nodes=" not in script.partition("exec srun ")[2]
    assert "--set nodes=3 --out" in batch_script(open_one, SubmitOptions(nodes=3))


@pytest.mark.parametrize(
    "options",
    [
        SubmitOptions(account="a\n#SBATCH --uid=0"),
        SubmitOptions(partition="a b"),
        SubmitOptions(further=("--x='y'",)),
        SubmitOptions(further=("a100",)),
    ],
)
def test_what_would_be_another_option_is_refused(options: SubmitOptions) -> None:
    with pytest.raises(SpecError):
        batch_script(submission(), options)


def test_what_comes_next_is_said_in_slurms_words() -> None:
    said = next_commands(submission(), SubmitOptions(), "42")
    assert "squeue --job 42" in said["state"]
    assert "'/home/me/my jobs'/slurm-42.out" in said["logs"]
    assert said["cancel"] == "scancel 42"
    array = next_commands(submission(), SubmitOptions(further=("--array=0-3",)), "42")
    assert "/slurm-42_*.out" in array["logs"]
    assert array["results"] == "gpurun view runs/gpt-splits"


@pytest.mark.parametrize(
    ("before", "variables", "out"),
    [
        ("", {}, "slurm-42"),
        ("", {"SLURM_ARRAY_JOB_ID": "40", "SLURM_ARRAY_TASK_ID": "2"}, "slurm-40_2"),
        ("gpu1", {"SLURM_RESTART_COUNT": "1"}, "slurm-42 --resume"),
        ("gpu2", {"SLURM_RESTART_COUNT": "1"}, "slurm-42-restart1"),
        ("", {"SLURM_RESTART_COUNT": "3"}, "slurm-42-restart3"),
    ],
)
def test_a_job_that_is_queued_again_continues_on_the_same_nodes_only(
    tmp_path: Path, before: str, variables: dict[str, str], out: str
) -> None:
    runs = tmp_path / "runs/gpt-splits"
    if before:
        (runs / "slurm-42").mkdir(parents=True)
        (runs / "slurm-42/plan.json").touch()
        (runs / "slurm-42.nodes").write_text(f"{before}\n")
    script = batch_script(replace(submission(), directory=tmp_path), SubmitOptions())
    shown = script.replace("exec srun", "echo")
    env = {"PATH": "/usr/bin:/bin", "SLURM_JOB_ID": "42", "SLURM_JOB_NODELIST": "gpu1", **variables}
    done = subprocess.run(["bash"], input=shown, env=env, capture_output=True, text=True, check=True)
    assert done.stdout.strip().endswith(f" --out runs/gpt-splits/{out}")
    assert (runs / f"{out.split()[0]}.nodes").read_text() == "gpu1\n"
    requeued = how_to_requeue(out.split()[0])
    if "restart" in out:
        assert requeued is None  # queued again, it would begin another run
    else:
        number = out.split()[0].removeprefix("slurm-")
        assert requeued == (f"scontrol requeue {number}", "Slurm")
