"""What `gpurun submit` writes for every scheduler, read back by what will read it."""

import ast
import importlib
import json
import re
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from gpurun import __version__
from gpurun.launcher.cli.commands.job import job
from gpurun.launcher.cli.commands.submit import QUEUES, label_for
from gpurun.launcher.cli.main import cli
from gpurun.launcher.errors import Interrupted, MachineError, SpecError
from gpurun.launcher.jobfile.load import load_text
from gpurun.launcher.nodes.rendezvous import Facts, NodeFlags, find_facts
from gpurun.launcher.processes.guard import SECRET_VARIABLE
from gpurun.launcher.schedulers import SCHEDULERS, how_to_requeue
from gpurun.launcher.schedulers.base import Submission, SubmitCommand, SubmitOptions, submit, time_limit
from gpurun.launcher.schedulers.kubernetes import DEFAULT_CLAIM
from gpurun.launcher.schedulers.slurm import batch_script, next_commands
from tests.unit.cli.click_runner import runner
from tests.wording import Wording

HOME = Path("/home/me/my jobs")
OPTIONS = SubmitOptions(nodes=2, gpus_per_node=8, cpus_per_task=64, time=7200, image="reg/me:1")
HOSTILE = (
    "params.text=$(touch here) `touch here` ' \" \\ \n- $HOME $(POD_NAME) $$ # {{x}} &\u2028é\U0001f600",
    "params.list=[a, 'b: c']",
    "-x=--y",
)
"""What some shell, YAML, Kubernetes or Python would take for something else."""
GOLDEN = Path(__file__).parents[2] / "data" / "submit.sbatch"
MODELS = {
    "Service": "io_k8s_api_core_v1_service.IoK8sApiCoreV1Service",
    "Job": "io_k8s_api_batch_v1_job_spec.IoK8sApiBatchV1JobSpec",
    "TrainJob": "trainer_v1alpha1_train_job.TrainerV1alpha1TrainJob",
}


def submission(*overrides: str, label: str = "gpt-splits-1a2b3c", **job: Any) -> Submission:
    text = json.dumps({"name": "gpt-splits", "workload": "gpt", "global_batch": 64, **job})
    spec = load_text(text, "job.yaml", (), Path())
    return Submission(spec, HOME / "a job.yaml", HOME, overrides, ("/opt/gpurun",), label)


def script(name: str, wanted: Submission, options: SubmitOptions = OPTIONS) -> str:
    return QUEUES[name].script(wanted, options)


def test_they_are_as_they_were_reviewed(snapshot: Callable[[str, str], None]) -> None:
    texts = [f"--- {name}\n{script(name, submission('seed=3'))}" for name in QUEUES if name != "slurm"]
    snapshot("submissions.txt", "\n".join(texts).replace(__version__, "VERSION"))


@pytest.mark.parametrize("name", ["kubernetes", "trainjob"])
@pytest.mark.parametrize("options", [OPTIONS, SubmitOptions(image="reg/me:1", gpus_per_node=1)])
def test_manifests_are_what_the_published_models_know(name: str, options: SubmitOptions) -> None:
    """A field that a model doesn't know, or one of another type, doesn't come back."""
    for document in yaml.safe_load_all(script(name, submission(*HOSTILE), options)):
        module, _, model = MODELS[document["kind"]].partition(".")
        part = document["spec"] if document["kind"] == "Job" else document
        read = getattr(import_module(f"kubeflow_trainer_api.models.{module}"), model).from_dict(part)
        assert without_empty(read.to_dict()) == part


@pytest.mark.parametrize("version", ["1.29", "1.37"])
@pytest.mark.parametrize("options", [OPTIONS, SubmitOptions(image="reg/me:1", gpus_per_node=1)])
def test_manifests_follow_the_schema_of_kubernetes(version: str, options: SubmitOptions) -> None:
    """Strictly: a field that isn't in it is an error."""
    for document in yaml.safe_load_all(script("kubernetes", submission(*HOSTILE), options)):
        kubernetes_validate.validate(document, version, strict=True)
        with pytest.raises(kubernetes_validate.ValidationError, match="unexpected"):
            kubernetes_validate.validate(document | {"x": 1}, version, strict=True)


def without_empty(part: Any) -> Any:
    """Without what a model adds: empty lists and mappings."""
    if isinstance(part, dict):
        kept = {key: without_empty(value) for key, value in part.items()}
        return {key: value for key, value in kept.items() if value not in ({}, [])}
    return [without_empty(item) for item in part] if isinstance(part, list) else part


STAND_IN = """\
#!/bin/sh
case "$*" in
    --version) echo "mpirun (Open MPI) 4.1.4" ;;
    *hostname) echo node0 ;;
    *) for word; do printf '%s\\0' "$word"; done ;;
esac
"""
"""Prints the words that it is called with."""


def words_of(directory: Path, text: str, **environ: str) -> list[str]:
    """What bash, running this, calls `gpurun` with: `srun`, `mpirun` and `gpurun` print that."""
    for command in ("srun", "mpirun", "gpurun"):
        (directory / command).write_text(STAND_IN)
        (directory / command).chmod(0o755)
    text = re.sub(r"(?m)^cd .*$", "", text)  # that directory doesn't exist
    env = {"PATH": f"{directory}:/usr/bin:/bin", "SLURM_JOB_ID": "42", "SLURM_JOB_NODELIST": "a", **environ}
    done = subprocess.run(["bash", "-c", text], capture_output=True, cwd=directory, env=env, check=True)
    assert not (directory / "here").exists()
    return done.stdout.decode().split("\0")[:-1]


def kubernetes_words(command: list[str]) -> list[str]:
    """As Kubernetes expands them: `$$` is a `$`, `$(POD_NAME)` its value."""
    values = {"$$": "$", "$(POD_NAME)": "pod"}
    return [re.sub(r"\$\$|\$\(POD_NAME\)", lambda found: values[found[0]], word) for word in command]


def commands_in(name: str, text: str, directory: Path) -> list[str]:
    """The words of the command that a script has the scheduler start."""
    if name in ("slurm", "mpi"):
        return words_of(directory, text)
    if name == "ray":
        first = next(node for node in ast.parse(text).body if isinstance(node, ast.Assign))
        return list(ast.literal_eval(first.value))
    document = list(yaml.safe_load_all(text))[-1]
    return kubernetes_words(next(found_in(document, "command")))


def found_in(part: Any, key: str) -> Iterator[Any]:
    """The values of a key, at any depth."""
    if isinstance(part, dict):
        yield from (value for name, value in part.items() if name == key)
    for item in part.values() if isinstance(part, dict) else part if isinstance(part, list) else ():
        yield from found_in(item, key)


@pytest.mark.parametrize("name", QUEUES)
def test_whatever_a_job_is_called_gpurun_gets_it_letter_by_letter(name: str, tmp_path: Path) -> None:
    odd = HOME / 'it\'s "a" $(touch here) `job`: \n- .yaml'
    wanted = replace(submission(*HOSTILE), job_file=odd)
    words = commands_in(name, script(name, wanted), tmp_path)
    job = str(odd) if str(odd) in words else odd.name
    expected = [job, *(word for override in (*HOSTILE, "nodes=2") for word in ("--set", override))]
    begin = words.index(job)
    assert words[begin : begin + len(expected)] == expected
    assert words[begin - 1] in ("gpurun", "/opt/gpurun")


@pytest.mark.parametrize("name", QUEUES)
def test_results_go_to_a_store_below_a_name_of_their_own(name: str, tmp_path: Path) -> None:
    odd = "s3://bucket/$HOME $(POD_NAME) it's"
    text = script(name, submission(), replace(OPTIONS, out=odd))
    words = commands_in(name, text, tmp_path)
    directory, url = (word for before, word in pairwise(words) if before == "--out")
    assert url == f"{odd}/{directory.rpartition('/')[2]}"
    assert "persistentVolumeClaim" not in text
    plain = replace(OPTIONS, out="s3://bucket/x")
    assert "s3://bucket/x" in QUEUES[name].next_commands(submission(), plain, "42").get(
        "results", "s3://bucket/x"
    )
    both = replace(OPTIONS, out=odd, volume="mine")
    assert ("claimName: mine" in script(name, submission(), both)) == ("volume" in QUEUES[name].takes)


@pytest.mark.parametrize("name", ["kubernetes", "trainjob"])
def test_a_claim_that_several_machines_mount_is_said_to_need_an_access_mode(name: str) -> None:
    for options in (OPTIONS, replace(OPTIONS, nodes=1), replace(OPTIONS, out="s3://bucket/x")):
        assert ("ReadWriteMany" in script(name, submission(), options)) == (options is OPTIONS)


@pytest.mark.parametrize(
    ("name", "word"), [("-j.yaml", "./-j.yaml"), ("report", "./report"), ("a/b.yaml", "a/b.yaml")]
)
def test_the_name_of_a_job_is_no_option_and_no_other_command(name: str, word: str) -> None:
    wanted = replace(submission(), job_file=HOME / name)
    assert wanted.command_in_image(OPTIONS)[:2] == ["gpurun", word]


def test_dots_lead_out_of_no_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "job.yaml").write_text("workload: gpt\nglobal_batch: 8\n")
    monkeypatch.chdir(tmp_path / "sub")
    argv = [
        "submit",
        "../job.yaml",
        "--to",
        "kubernetes",
        "--image",
        "a",
        "--gpus-per-node",
        "1",
        "--dry-run",
    ]
    done = CliRunner().invoke(cli, argv)
    assert isinstance(done.exception, SpecError)
    assert "submit from a directory that holds the job file" in str(done.exception)


@pytest.mark.parametrize("name", QUEUES)
def test_no_script_holds_the_secret(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the job can't make one itself, it goes to the command that submits, not into a file."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GPURUN_SECRET", "sesame")
    Path("job.yaml").write_text("workload: gpt\nglobal_batch: 64\ndevices: cpu:2\nnodes: 2\n")
    image = ("--image", "x") if "image" in QUEUES[name].takes else ()
    shown = CliRunner().invoke(cli, ["submit", "job.yaml", "--to", name, *image, "--dry-run"])
    assert shown.exit_code == 0, shown.exception
    assert "sesame" not in shown.output
    assert list(tmp_path.iterdir()) == [tmp_path / "job.yaml"]
    path = tmp_path / "script"
    path.write_text(shown.output)
    call = QUEUES[name].call(submission(), OPTIONS, path, "sesame")
    assert "sesame" not in " ".join(call.argv)
    assert ("sesame" in call.stdin) == (name in ("kubernetes", "trainjob"))


@pytest.mark.parametrize(
    ("name", "options", "job"),
    [
        ("kubernetes", replace(OPTIONS, image=None), {}),
        ("kubernetes", replace(OPTIONS, gpus_per_node=None), {"devices": "cuda"}),
        ("trainjob", replace(OPTIONS, volume="Runs_of_me"), {}),
        ("kubernetes", replace(OPTIONS, image="registry.example.org/Team/gpurun"), {}),
        *(
            (name, replace(OPTIONS, gpus_per_node=None, gpu="amd.com/gpu"), {"devices": "cpu:2"})
            for name in ("kubernetes", "trainjob")
        ),
    ],
)
def test_what_is_missing_is_named(
    name: str, options: SubmitOptions, job: dict[str, Any], wording: Wording
) -> None:
    with wording.raises(SpecError):
        script(name, submission(**job), options)
    with wording.raises(SpecError):
        script(name, replace(submission(), job_file=Path("/elsewhere/job.yaml")))


def test_gpus_are_requested_where_the_job_has_some() -> None:
    def gpus(options: SubmitOptions, **job: Any) -> list[Any]:
        texts = yaml.safe_load_all(script("kubernetes", submission(**job), options))
        return [value for document in texts for value in found_in(document, "nvidia.com/gpu")]

    assert gpus(OPTIONS) == [8]
    assert gpus(replace(OPTIONS, gpus_per_node=None), devices=["cuda:0", "cuda:3"]) == [4]
    assert gpus(replace(OPTIONS, gpus_per_node=None), devices="cpu:2") == []
    amd = script("trainjob", submission(), replace(OPTIONS, gpu="amd.com/gpu"))
    assert list(found_in(yaml.safe_load(amd), "amd.com/gpu")) == [8]
    with pytest.raises(SpecError, match="it names a resource"):
        script("kubernetes", submission(), replace(OPTIONS, gpu="H100"))


@pytest.mark.parametrize("nodes", [1, 2])
def test_only_pods_of_several_nodes_need_machines_of_their_own(nodes: int) -> None:
    texts = yaml.safe_load_all(script("kubernetes", submission(), replace(OPTIONS, nodes=nodes)))
    assert len([value for text in texts for value in found_in(text, "podAntiAffinity")]) == nodes - 1


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("2:00:00", 7200),
        ("1-00:00:30", 86430),
        ("1-12", 129600),
        ("1-12:30", 131400),
        ("30:00", 1800),
        ("90m", 5400),
        ("1.5h", 5400),
        ("45s", 45),
        ("30", None),
        ("0:00", None),
        ("0m", None),
        ("soon", None),
        ("2:", None),
        ("1:00\n", None),
        ("\u0663", None),
    ],
)
def test_time_limits(text: str, value: int | None) -> None:
    if value is None:
        with pytest.raises(SpecError, match="--time"):
            time_limit(text)
    else:
        assert time_limit(text) == value


def test_every_engine_gets_the_same_time_in_its_own_form() -> None:
    options = replace(OPTIONS, time=time_limit("1-12"))
    assert "#SBATCH --time=1-12:00:00\n" in script("slurm", submission(), options)
    for name in ("kubernetes", "trainjob"):
        document = list(yaml.safe_load_all(script(name, submission(), options)))[-1]
        assert list(found_in(document, "activeDeadlineSeconds")) == [129600]


@given(st.text(max_size=150))
def test_every_name_becomes_one_that_kubernetes_takes(name: str) -> None:
    label = label_for(name)
    assert re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", label)
    assert len(f"{label}-node-0-999999") <= 63
    assert label != label_for(name)


def test_the_list_names_all_and_how_each_announces_a_preemption() -> None:
    shown = CliRunner().invoke(cli, ["submit", "--list"])
    assert shown.exit_code == 0
    for name in QUEUES:
        assert re.search(rf"(?m)^{name} ", shown.output)
        assert SCHEDULERS[name].preemption in shown.output
    assert "--node-rank N --rendezvous HOST[:PORT]" in shown.output  # by hand


@pytest.mark.parametrize("name", [name for name, queue in QUEUES.items() if not queue.is_foreground])
def test_it_says_how_to_look_after_the_job(name: str) -> None:
    options = replace(OPTIONS, further=("--namespace=it's",))
    said = QUEUES[name].next_commands(submission(), options, "42")
    assert list(said) == ["state", "logs", "results", "cancel"]
    assert not any("it's" in command for command in said.values())  # quoted, where it is repeated


@pytest.mark.parametrize(
    ("name", "further", "repeated"),
    [
        ("kubernetes", ("--namespace=ml", "--validate=false"), "kubectl --namespace=ml "),
        ("trainjob", ("--dry-run=client", "-n", "ml", "--token=secret"), "kubectl -n ml "),
        ("kubernetes", ("-nml", "--save-config"), "kubectl -nml "),
        ("kubernetes", ("-", "-nml"), "kubectl -nml "),
        ("ray", ("--runtime-env-json={}", "--address", "http://head:8265"), "--address http://head:8265 42"),
    ],
)
def test_only_options_that_other_commands_know_are_repeated(
    name: str, further: tuple[str, ...], repeated: str
) -> None:
    said = QUEUES[name].next_commands(submission(), replace(OPTIONS, further=further), "42")
    text = "\n".join(said[each] for each in ("state", "logs", "cancel"))
    assert text.count(repeated) == 3
    assert not any(word in text for word in ("validate", "dry-run", "secret=", "save-config", "runtime"))


def test_a_command_that_is_missing_and_one_that_refuses(tmp_path: Path, wording: Wording) -> None:
    def answer(*argv: str, queue: str = "slurm") -> str:
        return submit(QUEUES[queue], SubmitCommand(argv, "standard input"), tmp_path / "x", submission())

    with pytest.raises(MachineError, match="no-such-sbatch was not found"):
        answer("no-such-sbatch")
    with wording.raises(MachineError):
        answer("sh", "-c", "echo invalid partition >&2; exit 1")
    with pytest.raises(MachineError, match="it answered 'hello'"):
        answer("sh", "-c", "echo hello")
    assert answer("sh", "-c", "echo '42;cluster'") == "42"
    assert answer("grep", "standard input", queue="ray") == submission().label


@pytest.mark.parametrize(
    ("job", "options", "is_said"),
    [
        ({"devices": "cuda"}, SubmitOptions(), True),
        ({}, SubmitOptions(), True),
        ({"devices": "cpu:2"}, SubmitOptions(), False),
        ({"devices": "cuda"}, SubmitOptions(gpus_per_node=2), False),
        ({"devices": "cuda"}, SubmitOptions(further=("--gres=gpu:2",)), False),
        ({"devices": "cuda"}, SubmitOptions(further=("--constraint=a100",)), True),
    ],
)
def test_a_script_without_gpus_is_noted(job: dict[str, str], options: SubmitOptions, is_said: bool) -> None:
    note = QUEUES["slurm"].note(submission(**job), options)
    assert (note is not None and "--gpus-per-node" in note) == is_said


def test_the_docs_have_a_row_for_each() -> None:
    page = (Path(__file__).parents[3] / "docs" / "clusters.md").read_text()
    assert [name for name in QUEUES if not re.search(rf"(?m)^\| `{name}`", page)] == []


# Which values of options `gpurun submit` takes, and that none is dropped


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
    assert any(text in by_option.stdout for text in ranges) == (name in ("slurm", "ray"))
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
    places = {command[command.index("--rendezvous") + 1] for command in words}
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
        assert "the job can't run on 3 and 4 nodes; on 3: " in found.stderr
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


# The manifests in docs/clusters.md, for engines that `gpurun submit` doesn't know


PAGE = (Path(__file__).parents[3] / "docs" / "clusters.md").read_text(encoding="utf-8")
TOP, JOBSET, SKYPILOT = map(yaml.safe_load, re.findall(r"(?ms)^```yaml\n(.*?)^```$", PAGE))
"""The job at the top of the page, and the manifests that start it."""


def parsed(words: list[str]) -> dict[str, Any]:
    """The arguments of `gpurun JOB.yaml` as the command's own parser reads them."""
    return job.make_context("gpurun", words).params


def facts(options: dict[str, Any], environ: dict[str, str]) -> Facts:
    return find_facts(TOP["nodes"], NodeFlags(options["node_rank"], options["rendezvous"]), environ)


@pytest.mark.slow
def test_the_jobset_is_what_the_published_models_know() -> None:
    models = importlib.import_module("kubeflow_trainer_api.models")  # which takes a second
    assert without_empty(models.JobsetV1alpha2JobSet.from_dict(JOBSET).to_dict()) == JOBSET
    (node,) = JOBSET["spec"]["replicatedJobs"]
    part = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}, **node["template"]}
    for version in ("1.29", "1.37"):
        kubernetes_validate.validate(part, version, strict=True)


def test_the_pods_of_the_jobset_are_the_nodes_of_the_job() -> None:
    name = JOBSET["metadata"]["name"]
    (node,) = JOBSET["spec"]["replicatedJobs"]
    spec = node["template"]["spec"]
    assert spec["completions"] == spec["parallelism"] == TOP["nodes"]
    (pod,) = found_in(spec, "containers")
    (container,) = pod
    assert list(found_in(spec, "onExitCodes")) == [
        {"containerName": container["name"], "operator": "In", "values": [Interrupted.exit_code]}
    ]
    first, *words = kubernetes_words(container["command"])
    options = parsed(words)
    assert (first, str(options["job_file"]), options["out"]) == (
        "gpurun",
        "job.yaml",
        (Path("/runs/pod"), None),
    )
    node_0 = f"{name}-{node['name']}-0-0.{name}"
    assert facts(options, {"JOB_COMPLETION_INDEX": "1"}) == Facts(1, node_0, 29400, True)
    assert [each["name"] for each in container["env"]] == ["POD_NAME", SECRET_VARIABLE]
    assert list(found_in(container, "secretKeyRef")) == [{"name": name, "key": "secret"}]
    assert f"create secret generic {name} --from-file=secret=" in PAGE
    assert list(found_in(spec, "claimName")) == [DEFAULT_CLAIM]


@pytest.mark.parametrize("rank", [0, 1])
def test_the_task_of_skypilot_runs_one_gpurun_per_node(rank: int, tmp_path: Path) -> None:
    environ = {
        "SKYPILOT_NODE_RANK": str(rank),
        "SKYPILOT_NODE_IPS": "10.0.0.7\n10.0.0.8\n",
        "SKYPILOT_NUM_NODES": "2",
        "SKYPILOT_TASK_ID": "sky-1",
    }
    options = parsed(words_of(tmp_path, SKYPILOT["run"], **environ))
    assert (str(options["job_file"]), options["out"]) == ("job.yaml", (Path("runs/two/sky-1"), None))
    assert facts(options, environ) == Facts(rank, "10.0.0.7", 29400)
    assert SKYPILOT["num_nodes"] == TOP["nodes"]
    assert SKYPILOT["secrets"] == {SECRET_VARIABLE: None}
    assert f"sky launch --cluster {SKYPILOT['name']} --secret {SECRET_VARIABLE} " in PAGE


# Slurm


def test_the_batch_script_is_as_it_was_reviewed() -> None:
    options = SubmitOptions(2, 3600, "gpu", "acct", 8, 64, further=("--constraint=a100&ib",))
    wanted = replace(submission("seed=3"), job_file=HOME / "job.yaml")
    assert batch_script(wanted, options).replace(__version__, "VERSION") == GOLDEN.read_text()


def test_a_name_with_other_letters_than_ascii_has_a_label_in_slurm() -> None:
    text = batch_script(submission(label="job-0", name="größe"), SubmitOptions())
    assert "#SBATCH --job-name=job-0\n" in text
    assert 'out="runs/größe/slurm-$id"' in text


def test_the_jobs_own_words_are_not_repeated() -> None:
    text = batch_script(submission(nodes=4, devices=["cuda:0", "cuda:3"]), SubmitOptions())
    assert "#SBATCH --nodes=4\n" in text
    assert "nodes=4 --out" not in text
    assert "#SBATCH --gpus-per-node=4\n" in text
    assert "--time" not in text
    open_one = submission(nodes="2..4", devices="cpu:2")
    text = batch_script(open_one, SubmitOptions())
    assert "#SBATCH --nodes=2-4\n" in text
    assert "nodes=" not in text.partition("exec srun ")[2]
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
    text = batch_script(replace(submission(), directory=tmp_path), SubmitOptions())
    shown = text.replace("exec srun", "echo")
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
