"""Which devices a job means on machines with and without GPUs."""

from dataclasses import replace
from pathlib import Path

import pytest

from gpurun.launcher.errors import MachineError, SpecError
from gpurun.launcher.jobfile.load import check_source
from gpurun.launcher.jobfile.values import devices_on
from gpurun.launcher.jobfile.yaml.tree import parse_source
from gpurun.launcher.plan.build import build_plan
from gpurun.launcher.plan.devices import (
    busy_notes,
    core_notes,
    device_notes,
    job_devices,
    resolve_devices,
    with_free_cores,
)
from gpurun.launcher.plan.model import devices_of_node
from tests.unit.plan.machines import FakeGpu, FakeMachine, spec_of
from tests.wording import Wording

TWO_GPUS = FakeMachine(16, (FakeGpu("GPU-a"), FakeGpu("GPU-b")))


@pytest.mark.parametrize(
    ("devices", "machine", "names"),
    [
        ("auto", FakeMachine(8), ("cpu:0", "cpu:1")),
        ("auto", FakeMachine(1), ("cpu:0",)),
        ("auto", FakeMachine(0), ("cpu:0",)),
        ("auto", TWO_GPUS, ("cuda:0", "cuda:1")),
        ("cuda", TWO_GPUS, ("cuda:0", "cuda:1")),
        ("cpu:3", TWO_GPUS, ("cpu:0", "cpu:1", "cpu:2")),
        (("cpu", "cpu:1"), FakeMachine(), ("cpu:0", "cpu:1")),
        (("cuda:1",), TWO_GPUS, ("cuda:1",)),
        (("cuda:0", "cuda:0"), TWO_GPUS, ("cuda:0", "cuda:0")),
    ],
)
def test_names(devices: str | tuple[str, ...], machine: FakeMachine, names: tuple[str, ...]) -> None:
    assert resolve_devices(devices, machine) == names


def test_more_gpus_than_there_are(wording: Wording) -> None:
    with wording.raises(MachineError):
        resolve_devices(("cuda:0", "cuda:2"), TWO_GPUS)


@pytest.mark.parametrize("devices", ["cuda", ("cuda:0",)])
def test_no_gpu_at_all(devices: str | tuple[str, ...]) -> None:
    with pytest.raises(MachineError, match="no NVIDIA GPU"):
        resolve_devices(devices, FakeMachine())


def test_a_job_is_named_where_it_asks_for_them(wording: Wording) -> None:
    job = "workload: mlp\nglobal_batch: 8\ndevices: [cuda:0, cuda:1]\n"
    spec = check_source(parse_source(job.encode(), "job.yaml"), Path())
    with wording.raises(MachineError):
        job_devices(spec, FakeMachine())


def test_kinds_do_not_mix() -> None:
    with pytest.raises(SpecError, match="can't share a batch"):
        resolve_devices(("cuda:0", "cpu:0"), TWO_GPUS)


def test_notes() -> None:
    assert device_notes("auto", ("cpu:0", "cpu:1"), FakeMachine(2)) == ()
    assert "share 2 cores" in device_notes("auto", ("cpu:0", "cpu:1", "cpu:2"), FakeMachine(2))[0]
    (note,) = device_notes("auto", ("cuda:0", "cuda:0"), TWO_GPUS)
    assert note.endswith("DDP uses gloo; without MPS they take turns on it")
    (note,) = device_notes("auto", ("cuda:0", "cuda:0"), replace(TWO_GPUS, has_mps=True))
    assert note.endswith("DDP uses gloo")
    assert device_notes("auto", ("cuda:0", "cuda:1"), TWO_GPUS) == ()


BUSY = FakeMachine(
    16, (FakeGpu("GPU-a"), FakeGpu("GPU-b", busy_with="python (7) uses 9.0 GiB"), FakeGpu("GPU-c"))
)
ALL_BUSY = FakeMachine(16, (FakeGpu("GPU-a", busy_with="it is 90 % utilised"),))


def test_auto_leaves_busy_gpus_out_and_says_so(wording: Wording) -> None:
    found = resolve_devices("auto", BUSY)
    assert found == ("cuda:0", "cuda:2")
    wording(busy_notes("auto", found, BUSY))
    named = resolve_devices("cuda", BUSY)
    assert named == ("cuda:0", "cuda:1", "cuda:2")
    wording(busy_notes("cuda", named, BUSY)[0])
    assert busy_notes(("cuda:0",), ("cuda:0",), BUSY) == ()


def test_where_all_are_busy_all_are_used() -> None:
    assert resolve_devices("auto", ALL_BUSY) == ("cuda:0",)
    assert "affects the times" in busy_notes("auto", ("cuda:0",), ALL_BUSY)[0]


def test_gpus_may_be_named_by_uuid(wording: Wording) -> None:
    mig = FakeMachine(16, (FakeGpu("GPU-aa11"), FakeGpu("MIG-5c/1/0"), FakeGpu("GPU-aa22")))
    assert resolve_devices(("MIG-5c", "GPU-aa2"), mig) == ("cuda:1", "cuda:2")
    with wording.raises(MachineError):
        resolve_devices(("GPU-aa",), mig)
    with wording.raises(MachineError):
        resolve_devices(("GPU-b",), mig)


def looked(job: str, cores: int = 4, gpus: tuple[FakeGpu, ...] = ()) -> int | None:
    """The free cores for a job, where one is; `None` where none are measured."""
    machine = FakeMachine(cores, gpus)
    return with_free_cores(spec_of(job), machine, lambda usable: usable - 3).free_cores


WORKLOAD = "workload: mlp\nglobal_batch: 8\n"


@pytest.mark.parametrize(
    ("job", "free"),
    [
        (f"{WORKLOAD}devices: cpu:2", 1),
        (f"{WORKLOAD}devices: cpu:2\nthreads: 2", None),
        (f"{WORKLOAD}devices: cpu:2\ncompare: {{threads: [1, auto]}}", 1),
        (f"{WORKLOAD}devices: cpu:3", None),
        (f"{WORKLOAD}devices: cpu:1\nnodes: 2", None),
        (f"{WORKLOAD}devices: cuda", None),
        ("module: json.tool\ndevices: cpu:3", 1),
    ],
)
def test_free_cores_are_looked_at_where_threads_depend_on_them(job: str, free: int | None) -> None:
    gpus = (FakeGpu("GPU-a"),) if "cuda" in job else ()
    assert looked(job, gpus=gpus) == free


def test_auto_shares_the_cores_that_other_processes_leave(wording: Wording) -> None:
    spec = spec_of(f"{WORKLOAD}devices: cpu:2\ncompare: {{strategy: [ddp, dp, single]}}")
    for free, threads in ((None, 4), (8, 4), (7, 3), (3, 1), (1, 1)):
        plan = build_plan(spec, replace(FakeMachine(8), free_cores=free))
        assert {variant.threads for variant in plan.variants} == {threads}
    wording(plan.notes)
    program = build_plan(spec_of("module: json.tool\ndevices: cpu:2"), replace(FakeMachine(8), free_cores=3))
    assert {process.env["OMP_NUM_THREADS"] for process in program.launches[0].processes} == {"1"}


@pytest.mark.parametrize(
    "job",
    [
        f"{WORKLOAD}devices: cpu:2\nthreads: 1",
        f"{WORKLOAD}devices: cpu:2",
        f"{WORKLOAD}devices: cpu:4",
        f"{WORKLOAD}devices: cpu:3\ncompare: {{threads: [1, 2]}}",
        f"{WORKLOAD}devices: cpu:1\nthreads: 8",
        "module: json.tool\ndevices: cpu:1",
    ],
)
def test_too_few_cores_for_devices_and_threads_are_noted(job: str, wording: Wording) -> None:
    machine = FakeMachine(4)
    wording(core_notes(build_plan(spec_of(job), machine).variants, machine))


def test_devices_beyond_the_cores_are_noted_once() -> None:
    plan = build_plan(spec_of(f"{WORKLOAD}devices: cpu:8"), FakeMachine(4))
    assert core_notes(plan.variants, FakeMachine(4)) == ()
    assert any("share 4 cores" in note for note in plan.notes)


def test_a_node_has_its_own_devices_by_its_own_names() -> None:
    names = ("cuda:0@0", "cuda:1@0", "cuda:0@1")
    assert [devices_of_node(node, names) for node in range(3)] == [("cuda:0", "cuda:1"), ("cuda:0",), ()]
    assert devices_of_node(0, ("cpu:0", "cpu:1")) == ("cpu:0", "cpu:1")
    many = tuple(f"cpu:0@{node}" for node in range(12))
    assert [devices_on(many, node) for node in (1, 10, 11)] == [("cpu:0",)] * 3
