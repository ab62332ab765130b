"""Keys of a job file get other values, and all else stays as it is."""

import pytest

from gpurun.launcher.improve.rewrite import NoPlaceError, with_keys
from gpurun.launcher.jobfile.yaml.tree import parse_source

JOB = """\
# Our job.
workload: train.py:build   # the model
bucket_mb: 1  # MiB, for now
compare: &later
  strategy: [ddp]

split:
  - 8
  - 8
"""


@pytest.mark.parametrize(
    ("before", "keys", "after"),
    [
        (JOB, {"bucket_mb": 25}, JOB.replace("bucket_mb: 1 ", "bucket_mb: 25 ")),
        (JOB, {"workers": 2}, JOB.replace("for now\n", "for now\nworkers: 2\n")),
        (
            JOB,
            {"optimizer": "fused", "compile": True},
            JOB.replace("for now\n", "for now\noptimizer: fused\ncompile: true\n"),
        ),
        (JOB, {"split": "balanced"}, JOB.replace("- 8\n  - 8", "balanced")),
        (JOB, {"bucket_mb": None}, JOB.replace("bucket_mb: 1  # MiB, for now\n", "")),
        (JOB, {"sync_every": None}, JOB),
        ("workload: mlp", {"workers": 2}, "workload: mlp\nworkers: 2"),
        ("workload: mlp\r\nthreads: 1\r\n", {"workers": 2}, "workload: mlp\r\nthreads: 1\r\nworkers: 2\r\n"),
        ("\ufeffthreads: 1 # ä\n", {"threads": "auto"}, "\ufeffthreads: auto # ä\n"),
        ("{workload: mlp, threads: 1}\n", {"workers": 2}, "{workload: mlp, threads: 1, workers: 2}\n"),
        ("---\n  workload: mlp\n...\n", {"workers": 2}, "---\n  workload: mlp\n  workers: 2\n...\n"),
        ('"threads": "1"\nworkload: mlp\n', {"threads": 2}, '"threads": 2\nworkload: mlp\n'),
        ("compare: {strategy: [ddp]}\n", {"workers": 2}, "compare: {strategy: [ddp]}\nworkers: 2\n"),
    ],
)  # fmt: skip
def test_a_key_is_changed_added_or_removed(before: str, keys: dict[str, object], after: str) -> None:
    assert with_keys(before.encode(), keys).decode() == after


@pytest.mark.parametrize(
    "job",
    [
        "split:\n  - 8  # the large one\n  - 8\n",
        "threads: &n 1\nsplit: &s [8, 8]\nother: *s\n",
        "other: &s [8, 8]\nsplit: *s\n",
        "- 1\n",
    ],
)
def test_what_would_change_more_than_its_key_is_left_to_the_user(job: str) -> None:
    with pytest.raises(NoPlaceError):
        with_keys(job.encode(), {"split": "balanced"})


def test_a_job_with_tabs_is_left_to_the_user() -> None:
    """libyaml, which reads jobs, takes a tab before a comment; what finds places in the text doesn't."""
    job = b"bucket_mb: 1\t# MiB\n"
    assert parse_source(job, "").root.plain() == {"bucket_mb": 1}
    with pytest.raises(NoPlaceError):
        with_keys(job, {"bucket_mb": 25})
