"""Jobs that run a program: their keys, their mistakes, their plans."""

import os
import re
import sys
import textwrap
from dataclasses import replace
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path

import pytest

from gpurun.launcher.errors import MachineError, SpecError
from gpurun.launcher.jobfile.kinds import JOB_KINDS, JobKind
from gpurun.launcher.jobfile.load import load_job, load_text, program_job
from gpurun.launcher.jobfile.values import ONE_GPU_PATTERN
from gpurun.launcher.machine.host import Topology
from gpurun.launcher.plan.build import build_plan
from gpurun.launcher.plan.launch_config import program_config
from gpurun.launcher.plan.model import Plan
from gpurun.launcher.report.terminal.plan import render_plan
from gpurun.launcher.run.job import Output
from gpurun.launcher.run.running_attempt import Starter
from gpurun.launcher.rundir.files import RunDir, append_lines, read_json
from gpurun.launcher.rundir.records import ProgramConfig, Restart
from tests.unit.plan.machines import FakeGpu, FakeMachine
from tests.wording import Wording

CORES = Topology({0: (0, 1, 2, 3)}, ((0,), (1,), (2,), (3,)))
MACHINE = FakeMachine(8, topology=CORES)
ERRORS = "TORCH_NCCL_ASYNC_ERROR_HANDLING"


def job_file(directory: Path, text: str, **files: str) -> Path:
    (directory / "train.py").write_text("print('never run')\nraise SystemExit(1)\n")
    for name, content in files.items():
        (directory / name.replace("__", ".")).write_text(content)
    path = directory / "job.yaml"
    path.write_text(textwrap.dedent(text))
    return path


def mistakes(directory: Path, text: str, **files: str) -> str:
    with pytest.raises(SpecError) as caught:
        load_job(job_file(directory, text, **files))
    return str(caught.value).replace(f"{directory}/", "")


def plan_of(directory: Path, text: str, machine: FakeMachine = MACHINE) -> Plan:
    return build_plan(load_job(job_file(directory, text)), machine)


def test_a_module_is_found_next_to_the_job_without_importing_its_package(tmp_path: Path) -> None:
    package = tmp_path / "own_package"
    package.mkdir()
    (package / "__init__.py").write_text("raise SystemExit('imported')\n")
    (package / "train.py").write_text("def f(:\n")
    assert "train.py:1:7: invalid Python" in mistakes(tmp_path, "module: own_package.train")
    assert "own_package" not in sys.modules


def test_a_module_is_found_where_an_editable_installation_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "project/own_package"
    package.mkdir(parents=True)
    for name in ("__init__.py", "train.py"):
        (package / name).touch()

    class Finder:
        @staticmethod
        def find_spec(name: str, path: object = None, target: object = None) -> ModuleSpec | None:
            file = package / "__init__.py"
            return spec_from_file_location(name, file) if name == "own_package" else None

    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, Finder])
    assert load_job(job_file(tmp_path, "module: own_package.train")).module == "own_package.train"
    assert "there is no module `own_package.trian`" in mistakes(tmp_path, "module: own_package.trian")
    assert "own_package" not in sys.modules


def test_every_combination_is_a_variant_with_launches_of_its_own(tmp_path: Path) -> None:
    plan = plan_of(
        tmp_path,
        """
        script: train.py
        args: [--epochs, 1]
        devices: cpu:2
        compare: {args: [[--batch, 64], [--batch, 128]], env: [{A: 1}], device_count: [1, 2]}
        baseline: {device_count: 2, args: [--batch, 64]}
        until: fixed
        """,
    )
    assert [variant.id for variant in plan.variants] == [
        "script-1-batch-64-A-1",
        "script-1-batch-128-A-1",
        "script-2-batch-64-A-1",
        "script-2-batch-128-A-1",
    ]
    assert plan.baseline == "script-2-batch-64-A-1"
    assert plan.variants[0].args == ("--epochs", "1", "--batch", "64")
    assert len(plan.launches) == 6 * 4  # six pairs of launches for a verdict
    launched = [launch.variants[0] for launch in plan.launches]
    assert all(sorted(launched[i : i + 4]) == sorted(launched[:4]) for i in range(0, 24, 4))
    assert launched[:4] == [variant.id for variant in plan.variants]


def test_ranks_of_a_program_are_bound_to_cores(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, "script: train.py\ndevices: cpu:2\nbind: cores\n")
    assert [process.cpus for process in plan.launches[0].processes] == [(0, 1), (2, 3)]


def test_a_program_alone_is_launched_once(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, "script: train.py\ndevices: cpu:3\n")
    assert [launch.id for launch in plan.launches] == ["01-script-3"]
    assert len(plan.launches[0].processes) == 3


def test_ranks_get_the_environment_of_torchrun_and_a_fair_share_of_the_cores(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, "script: train.py\ndevices: cpu:3\nrestarts: 2\nenv: {COLOUR: red}\n")
    env = plan.launches[0].processes[2].env
    wanted = {
        "RANK": "2",
        "LOCAL_RANK": "2",
        "WORLD_SIZE": "3",
        "LOCAL_WORLD_SIZE": "3",
        "GROUP_RANK": "0",
        "ROLE_RANK": "2",
        "ROLE_WORLD_SIZE": "3",
        "MASTER_ADDR": "127.0.0.1",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "2",
        "OMP_NUM_THREADS": "2",
        "COLOUR": "red",
    }
    assert wanted.items() <= env.items()


@pytest.mark.parametrize(("stated", "run_id"), [("", None), ("env: {TORCHELASTIC_RUN_ID: mine}\n", "mine")])
def test_ranks_know_how_often_they_have_been_started_again(
    tmp_path: Path, stated: str, run_id: str | None
) -> None:
    plan = plan_of(tmp_path, f"script: train.py\ndevices: cpu:1\nrestarts: 2\n{stated}")
    run, (launch,) = RunDir(tmp_path / "run"), plan.launches
    failed = [Restart(0, attempt, 1, "why") for attempt in ("01-script-1", "01-script-1~2", "02-other")]
    append_lines(run.restarts, failed)
    starter = Starter(plan, load_job(tmp_path / "job.yaml"), run, tmp_path, MACHINE)
    _, rank = starter.prepare_attempt(launch, "01-script-1~3", dict.fromkeys(launch.variants, 1))
    assert rank.env["TORCHELASTIC_RESTART_COUNT"] == "2"
    of_attempts = {rank.env["TORCHELASTIC_RUN_ID"]}
    for each in (starter, Starter(plan, starter.spec, run, tmp_path, MACHINE)):  # the next is another run
        _, rank = each.prepare_attempt(launch, "01-script-1~4", dict.fromkeys(launch.variants, 1))
        of_attempts.add(rank.env["TORCHELASTIC_RUN_ID"])
    assert of_attempts == {run_id} if run_id else len(of_attempts) == 2


def test_ranks_are_observed_and_seeded_where_the_plan_says_so(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, "script: train.py\ndevices: cpu:1\ncalls: {compile: {}}\n")
    run, (launch,) = RunDir(tmp_path / "run"), plan.launches
    found = []
    for each in (plan, replace(plan, observe=True, seeds_steps=True)):
        starter = Starter(each, load_job(tmp_path / "job.yaml"), run, tmp_path, MACHINE)
        starter.prepare_attempt(launch, launch.id, dict.fromkeys(launch.variants, 1))
        config = read_json(run.launch_config(launch.id), ProgramConfig)
        found.append((config.observe, config.seeds_steps, config.calls))
    assert found == [(False, False, {"compile": {}}), (True, True, {"compile": {}})]


def test_every_rank_sees_all_gpus_of_its_launch_by_uuid(tmp_path: Path) -> None:
    machine = FakeMachine(8, [FakeGpu("GPU-a"), FakeGpu("GPU-b"), FakeGpu("GPU-c")], CORES)
    plan = plan_of(tmp_path, "script: train.py\ndevices: [cuda:2, cuda:0]\n", machine)
    seen = [process.env["CUDA_VISIBLE_DEVICES"] for process in plan.launches[0].processes]
    assert seen == ["GPU-c,GPU-a"] * 2


def test_too_few_devices_are_the_machines_fault(tmp_path: Path) -> None:
    with pytest.raises(MachineError):
        plan_of(tmp_path, "script: train.py\ndevices: cuda\n")


@pytest.mark.parametrize(
    ("shell", "stated", "given"), [(None, "", "1"), ("3", "", "3"), ("3", f"env: {{{ERRORS}: '2'}}\n", "2")]
)
def test_what_the_shell_or_the_job_says_of_errors_of_nccl_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shell: str | None, stated: str, given: str
) -> None:
    """torchrun sets the variable where the shell has none: on each node, whose server has what it has."""
    monkeypatch.setenv(ERRORS, "0")  # of node 0
    server = {} if shell is None else {ERRORS: shell}
    plan = plan_of(tmp_path, f"script: train.py\ndevices: cpu:1\n{stated}")
    starter = Starter(plan, load_job(tmp_path / "job.yaml"), RunDir(tmp_path / "run"), tmp_path, MACHINE)
    _, rank = starter.prepare_attempt(
        plan.launches[0], "01-script-1", dict.fromkeys(plan.launches[0].variants, 1)
    )
    assert rank.environ(server)[ERRORS] == given


def test_a_seed_counts_only_where_it_is_stated(tmp_path: Path) -> None:
    assert plan_of(tmp_path, "script: train.py\ndevices: cpu:1\n").variants[0].seed is None
    assert plan_of(tmp_path, "script: train.py\ndevices: cpu:1\nseed: 0\n").variants[0].seed == 0
    varied = plan_of(tmp_path, "script: train.py\ndevices: cpu:1\ncompare: {seed: [1, 2]}\n")
    assert [variant.seed for variant in varied.variants] == [1, 2]


def test_a_program_may_take_as_long_as_it_needs_unless_the_job_says_so(tmp_path: Path) -> None:
    assert load_job(job_file(tmp_path, "script: train.py\n")).limit_s == float("inf")
    assert load_job(job_file(tmp_path, "script: train.py\ntimeout: 5m\n")).limit_s == 300


def test_the_resolved_job_is_the_same_job(tmp_path: Path) -> None:
    text = "script: train.py\nargs: [a b, 1]\nenv: {A: 1}\nsteps: {warmup: 12}\ncompare: {seed: [1]}\n"
    spec = load_job(job_file(tmp_path, text))
    again = job_file(tmp_path, repr(spec.resolved()).replace("True", "true").replace("False", "false"))
    assert load_job(again).resolved() == spec.resolved()


def test_gpurun_run_means_a_job_that_can_be_written_down(tmp_path: Path) -> None:
    job_file(tmp_path, "")
    text = program_job("train.py", None, ["--epochs", "1", "yes: #", "ü 🚀"], "cpu:2")
    spec = load_text(text, "", ["steps.warmup=3"], tmp_path)
    assert (spec.name, spec.script, spec.devices) == ("train", "train.py", "cpu:2")
    assert spec.args == ("--epochs", "1", "yes: #", "ü 🚀")
    assert spec.steps.warmup == 3
    listed = load_text(program_job(None, "json.tool", [], "cuda:0, cuda:1"), "", [], tmp_path)
    assert (listed.module, listed.devices) == ("json.tool", ("cuda:0", "cuda:1"))


@pytest.mark.parametrize(
    ("script", "args", "compare"),
    [("a\udcff.py", [], {}), ("t.py", ["\udcff"], {}), ("t.py", [], {"options": [{"a": "\udcff"}]})],
)
def test_a_command_line_that_is_no_text_is_refused(
    script: str, args: list[str], compare: dict[str, object]
) -> None:
    with pytest.raises(SpecError, match="the command line isn't UTF-8: a stray byte 0xff"):
        program_job(script, None, args, "cpu:2", compare)


def test_mistakes_of_gpurun_run_have_no_line(tmp_path: Path, wording: Wording) -> None:
    with wording.raises(SpecError):
        load_text(program_job("nope.py", None, [], "cpu:2"), "", [], tmp_path)
    os.mkfifo(tmp_path / "pipe.py")
    with wording.raises(SpecError):
        load_text(program_job("pipe.py", None, [], "cpu:2"), "", [], tmp_path)


def test_a_rank_that_there_will_not_be_can_not_be_shown(tmp_path: Path, wording: Wording) -> None:
    plan = plan_of(tmp_path, "script: train.py\ndevices: cpu:2\n")
    Output(only_rank=1).check(plan)
    Output().check(plan)
    with wording.raises(SpecError):
        Output(only_rank=2).check(plan)


@pytest.mark.parametrize("kind", JOB_KINDS.values(), ids=list(JOB_KINDS))
def test_what_is_proposed_to_compare_is_a_job(tmp_path: Path, kind: JobKind) -> None:
    heads = {
        "training": "workload: gpt\nglobal_batch: 8\ndevices: cpu:2",
        "program": "script: train.py\ndevices: cpu:2",
        "micro-benchmark": "workload: matmul\ndevices: cpu:1",
    }
    spec = load_job(job_file(tmp_path, f"{heads[kind.name]}\n{kind.example}\n"))
    assert spec.kind == kind
    assert len(build_plan(spec, MACHINE).variants) == 2


@pytest.mark.parametrize("device", ["cuda:0", "cuda:1@0", "GPU-1b2c", "MIG-1b2c"])
def test_one_gpu_needs_no_list(device: str) -> None:
    text = program_job(None, "json.tool", (), device)
    assert load_text(text, "", (), Path()).devices == (device,)
    pattern = re.compile(ONE_GPU_PATTERN)
    assert pattern.search(device)
    assert not pattern.search("cpu:2")


@pytest.mark.parametrize("devices", ["cpu:1", "cuda:0"])
def test_the_plan_names_the_steps_that_ranks_trace(tmp_path: Path, devices: str, wording: Wording) -> None:
    """On a GPU later ones, since those after them don't count."""
    spec = load_job(job_file(tmp_path, f"script: train.py\ndevices: {devices}\n"))
    plan = build_plan(spec, FakeMachine(8, [FakeGpu("GPU-a")], CORES))
    (only,) = plan.variants
    given = program_config(spec, only, "01-script-1", run_dir=tmp_path, job_dir=tmp_path, is_first=True)
    (line,) = (line for line in render_plan(plan, spec, 200).splitlines() if "are traced" in line)
    assert f"Steps {given.first_traced_step + 1} to" in line
    wording(line)
