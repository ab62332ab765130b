"""Which values of options `gpurun submit` takes, and that none is dropped."""

import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from gpurun.launcher.cli.commands.submit import QUEUES
from gpurun.launcher.cli.main import cli
from gpurun.launcher.errors import MachineError, SpecError
from gpurun.launcher.schedulers.base import SubmitCommand, SubmitOptions, submit
from tests.unit.cli.click_runner import runner
from tests.unit.schedulers.test_submissions import OPTIONS, found_in, script, submission, words_of
from tests.wording import Wording

IN_IMAGES = ("kubernetes", "trainjob")


@pytest.mark.parametrize("name", IN_IMAGES)
@pytest.mark.parametrize(
    ("image", "is_one"),
    [
        ("gpurun", True),
        ("localhost:5000/a__b/c-d.e:v1.2_3", True),
        ("Registry.Example.org/a:1", True),
        ("[fd00::1]:5000/a", True),
        (f"reg/me:1@sha256:{'a' * 64}", True),
        ("a" * 256, False),
        ("Gpurun", False),
        ("reg/me:", False),
        ("reg/me:a b", False),
        ("reg//me", False),
        ("reg/me@sha256:1", False),
        ("https://reg/me", False),
        ('reg/x:1\n  env: [{"name": "A"}] # "', False),
        ("reg/me:1\n", False),
    ],
)
def test_images_are_what_kubernetes_can_pull(name: str, image: str, is_one: bool) -> None:
    options = replace(OPTIONS, image=image)
    if is_one:
        document = list(yaml.safe_load_all(script(name, submission(), options)))[-1]
        assert next(found_in(document, "image")) == image
    else:
        with pytest.raises(SpecError, match=r"--image .* is no name of an image"):
            script(name, submission(), options)


@pytest.mark.parametrize(
    ("claim", "is_one"),
    [
        ("runs.of-me2", True),
        ("a" * 63, True),
        ("a" * 64, True),
        (".".join(["a" * 60] * 4), True),
        (".".join(["a" * 60] * 5), False),
        ("Runs", False),
        ("a_b", False),
        ("-a", False),
        ("a..b", False),
        ("a: b", False),
        ("a\n", False),
    ],
)
def test_claims_are_named_as_kubernetes_wants_it(claim: str, is_one: bool) -> None:
    for name in IN_IMAGES:
        options = replace(OPTIONS, volume=claim)
        if is_one:
            document = list(yaml.safe_load_all(script(name, submission(), options)))[-1]
            assert next(found_in(document, "claimName")) == claim
        else:
            with pytest.raises(SpecError, match=r"--volume .* is no name of a PersistentVolumeClaim"):
                script(name, submission(), options)


OTHER_VALUES: dict[str, tuple[Any, Any]] = {
    "time": (60, 120),
    "partition": ("a", "b"),
    "account": ("a", "b"),
    "gpus_per_node": (1, 2),
    "cpus_per_task": (1, 2),
    "image": ("a", "b"),
    "gpu": ("a.b/c", "a.b/d"),
    "volume": ("a", "b"),
    "out": ("s3://a/b", "s3://a/c"),
}


def as_option(field: str, value: Any) -> dict[str, Any]:
    return {field: value}


@pytest.mark.parametrize("name", QUEUES)
@pytest.mark.parametrize("field", OTHER_VALUES)
def test_every_option_that_a_scheduler_takes_is_in_its_script(name: str, field: str) -> None:
    options = (replace(OPTIONS, **as_option(field, value)) for value in OTHER_VALUES[field])
    texts = {script(name, submission(), each) for each in options}
    assert len(texts) == (2 if field in QUEUES[name].takes else 1)
    assert {field.name for field in fields(SubmitOptions)} == OTHER_VALUES.keys() | {"nodes", "further"}


@pytest.mark.parametrize("name", IN_IMAGES)
def test_a_kind_of_gpu_for_a_job_without_one_is_refused(name: str) -> None:
    options = replace(OPTIONS, gpus_per_node=None, gpu="amd.com/gpu")
    with pytest.raises(SpecError, match="uses no GPU"):
        script(name, submission(devices="cpu:2"), options)


@pytest.mark.parametrize("name", QUEUES)
def test_a_range_of_nodes_means_a_range_or_says_that_it_does_not(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("job.yaml").write_text("workload: gpt\nglobal_batch: 64\ndevices: cpu:2\nnodes: 2..4\n")
    image = ("--image", "x") if "image" in QUEUES[name].takes else ()
    shown = runner().invoke(cli, ["submit", "job.yaml", "--to", name, *image, "--dry-run"])
    assert shown.exit_code == 0, shown.exception
    assert ("takes no range" in shown.stderr) == (name not in ("slurm", "ray"))
    Path("job.yaml").write_text("workload: gpt\nglobal_batch: 64\ndevices: cpu:2\n")
    words = ["submit", "job.yaml", "--to", name, *image, "--dry-run", "--nodes", "2..4"]
    by_option = runner().invoke(cli, words)
    assert by_option.stderr == shown.stderr
    ranges = "--set nodes=2..4", "['nodes=2..4']", "'--set', 'nodes=2..4'"
    assert any(one in by_option.stdout for one in ranges) == (name in ("slurm", "ray"))
    if name == "ray":
        assert "\nNODES = 4\nLEAST = 2\n" in shown.stdout
        assert "nodes=4" not in shown.stdout
    chosen = runner().invoke(cli, ["submit", "job.yaml", "--to", name, *image, "--dry-run", "--nodes", "3"])
    assert chosen.stderr == ""


def test_a_second_submission_leaves_the_script_that_the_first_job_has_yet_to_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray gets a path; `sbatch` and `kubectl` have read the script when they return."""
    monkeypatch.chdir(tmp_path)
    fake = tmp_path / "ray"
    fake.write_text("#!/bin/sh\nfor last; do :; done\necho $last >> submitted\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    Path("job.yaml").write_text("workload: gpt\nglobal_batch: 64\ndevices: cpu:2\n")
    for seed in ("seed=1", "seed=2"):
        done = runner().invoke(cli, ["submit", "job.yaml", "--to", "ray", "--set", seed])
        assert done.exit_code == 0, done.exception
    first, second = (Path(line).read_text() for line in Path("submitted").read_text().splitlines())
    assert "'seed=1'" in first
    assert "'seed=2'" in second


def test_two_jobs_of_mpirun_on_the_same_hosts_meet_at_different_ports(tmp_path: Path) -> None:
    words = [words_of(tmp_path, script("mpi", submission())) for _ in range(3)]
    places = {one[one.index("--rendezvous") + 1] for one in words}
    assert len(places) > 1  # all three alike: once in 10^8
    assert all(re.fullmatch(r"node0:2\d{4}", place) for place in places)


def test_what_a_refused_job_leaves_behind_is_named(tmp_path: Path, wording: Wording) -> None:
    fake = tmp_path / "kubectl"
    fake.write_text(
        "#!/bin/sh\necho secret/x-1 created\necho service/x-1 created\n"
        "echo 'Error from server (Forbidden): exceeded quota' >&2\nexit 1\n"
    )
    fake.chmod(0o755)
    options = ("-n", "ml", "--validate=false", "create", "-f", "-")
    with wording.raises(MachineError):
        submit(QUEUES["kubernetes"], SubmitCommand((str(fake), *options)), tmp_path / "x", submission())


@pytest.mark.parametrize("name", QUEUES)
def test_a_range_is_checked_for_every_number_of_nodes_that_may_come(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The split is for two devices: two nodes of one."""
    monkeypatch.chdir(tmp_path)
    Path("job.yaml").write_text(
        'workload: mlp\nglobal_batch: 64\ndevices: cpu:1\nnodes: 2\ncompare: {split: [even, "3:1"]}\n'
    )
    image = ("--image", "x") if "image" in QUEUES[name].takes else ()

    def submitted(nodes: str) -> Any:
        words = ["submit", "job.yaml", "--to", name, *image, "--dry-run", "--nodes", nodes]
        return runner().invoke(cli, words)

    found = submitted("2..4")
    if name in ("slurm", "ray"):
        assert found.exit_code == 0
        assert "the job can't run on 3, 4 nodes; on 3: " in found.stderr
    else:
        assert "the job uses 4" in str(found.exception)
    assert isinstance(submitted("3..4").exception, SpecError)
    assert submitted("2").stderr == ""


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--to", "slurm", "--sbatch=-N1"), "one task on each node"),
        (("--to", "slurm", "--sbatch=--ntasks=4"), "one task on each node"),
        (("--to", "slurm", "--out", "s3://key:pass@bucket/team"), "name s3://bucket/team"),
        (("--to", "slurm", "--out", "memory://team"), "is lost when the command ends"),
        (("--to", "kubernetes", "--image", "x", "--out", "file:///data"), "the job's own container"),
        (
            ("--to", "slurm", "--set", "devices=[cuda:0@0,cuda:1@1,cuda:2@1]", "--gpus-per-node", "2"),
            "needs 3 on one node",
        ),
    ],
)
def test_what_a_job_could_not_run_with_is_refused_before_it_is_queued(
    words: tuple[str, ...], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("job.yaml").write_text("workload: mlp\nglobal_batch: 64\ndevices: cpu:1\nnodes: 2\n")
    done = runner().invoke(cli, ["submit", "job.yaml", *words, "--dry-run"])
    assert isinstance(done.exception, SpecError)
    assert message in str(done.exception)
    assert ":pass" not in str(done.exception)


def test_an_option_of_mpirun_is_two_words_which_all_of_them_take() -> None:
    options = SubmitOptions(2, further=("--hostfile=my hosts", "-x", "A=1", "--oversubscribe"))
    assert "\nset -- --hostfile 'my hosts' -x A=1 --oversubscribe \"$@\"\n" in script(
        "mpi", submission(), options
    )


@pytest.mark.parametrize(
    ("devices", "nodes", "cpus"),
    [
        ("cpu:4", 1, 4),
        ("auto", 1, 1),
        ("cuda", 2, 1),
        (("cpu:0@0", "cpu:0@1", "cpu:1@1"), 2, 2),
        (("cuda:0", "cuda:1"), 1, 1),
    ],
)
def test_ray_reserves_a_core_for_each_cpu_rank_of_a_node(
    devices: str | tuple[str, ...], nodes: int, cpus: int
) -> None:
    wanted = submission(devices=devices, nodes=nodes)
    options = replace(OPTIONS, nodes=None, cpus_per_task=None, gpus_per_node=None if cpus > 1 else 2)
    assert f"PER_NODE = {{'CPU': {cpus}" in script("ray", wanted, options)
    assert "PER_NODE = {'CPU': 9" in script("ray", wanted, replace(options, cpus_per_task=9))
