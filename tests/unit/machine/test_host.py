"""What a machine is said to have, with a driver and a file system that are made up."""

import json
import os
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from gpurun.launcher.machine import read_text
from gpurun.launcher.machine.git import git, is_changed
from gpurun.launcher.machine.gpus.gpu import Gpus
from gpurun.launcher.machine.gpus.nvml import inspect_nvidia_gpus, load_nvml
from gpurun.launcher.machine.helper_process import temporary_directory
from gpurun.launcher.machine.host import (
    Machine,
    has_own_quota,
    host_record,
    inspect_machine,
    memory_bytes,
    usable_cores,
)
from gpurun.launcher.machine.process_tree import status_number
from gpurun.launcher.report.terminal.hardware import render_devices
from gpurun.launcher.units import GIB
from tests.known import known
from tests.unit.machine.fake_driver import UUIDS, NVMLError, NVMLErrorLibraryNotFound, fake, unsupported
from tests.wording import Wording


def machine(visible: str | None = None, **changes: Any) -> Machine:
    nvml = fake(changes.pop("links", None))
    for name, value in changes.items():
        setattr(nvml, name, value)
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    found = inspect_machine(nvml, environ, pause=lambda seconds: None)
    return replace(found, gpus=tuple(replace(gpu, unusable=None) for gpu in found.gpus))


def test_gpus_have_what_the_driver_says_and_none_where_it_does_not() -> None:
    gpu = machine().gpus[1]
    assert (gpu.name, gpu.uuid, gpu.memory_gib, gpu.used_gib) == ("NVIDIA H200", UUIDS[1], 140.0, 10.0)
    assert (gpu.utilisation_percent, gpu.power_w, gpu.power_limit_w) == (90, 212.4, None)
    (process,) = known(gpu.processes)
    assert (process.pid, process.used_gib) == (os.getpid(), 6.0)
    assert process.name
    assert (machine().driver, machine().cuda_driver_version) == ("580.65.06", "13.1")


@pytest.mark.parametrize(
    ("visible", "uuids"),
    [
        (None, UUIDS),
        ("2,0", (UUIDS[2], UUIDS[0])),
        ("", ()),
        ("-1", ()),
        ("0,7,1", (UUIDS[0],)),
        ("GPU-cccc-2, 1", (UUIDS[2], UUIDS[1])),
        ("GPU-c", (UUIDS[2],)),
        ("GPU-a", ()),
        ("MIG-1234", ()),
    ],
    ids=["unset", "order", "empty", "none", "unknown ends it", "uuid", "short uuid", "ambiguous", "no mig"],
)
def test_devices_count_as_cuda_counts_them(visible: str | None, uuids: tuple[str, ...]) -> None:
    gpus = machine(visible).gpus
    assert tuple(gpu.uuid for gpu in gpus) == uuids
    assert [gpu.index for gpu in gpus] == list(range(len(uuids)))


@pytest.mark.parametrize(
    ("visible", "changes", "links"),
    [
        (None, {}, {1: "NVLink 2x", 2: "PCIe, one CPU"}),
        ("2,1", {}, {1: "PCIe, one CPU"}),
        (None, {"links": {0: (-1,) * 3, 1: (-1,) * 3, 2: ()}}, {1: "NVLink 3x", 2: "PCIe, one CPU"}),
        (
            "2,1",
            {"nvmlDeviceGetP2PStatus": lambda a, b, index: 5},
            {1: "PCIe, one CPU, no peer access"},
        ),
        (
            "2,1",
            {"nvmlDeviceGetNvLinkState": unsupported, "nvmlDeviceGetP2PStatus": lambda a, b, index: 0},
            {1: "NVLink"},
        ),
    ],
    ids=["all", "visible ones", "behind a switch", "messages go through the host", "virtual machine"],
)
def test_links_count_between_visible_devices(
    visible: str | None, changes: dict[str, Any], links: dict[int, str]
) -> None:
    assert machine(visible, **changes).gpus[0].peer_links == links


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (NVMLErrorLibraryNotFound("NVML Shared Library Not Found"), None),
        (NVMLError("Driver/library version mismatch"), "Driver/library version mismatch"),
    ],
    ids=["no driver", "it fails"],
)
def test_without_a_driver_there_are_no_gpus_and_only_one_that_fails_is_an_error(
    error: Exception, said: str | None, wording: Wording
) -> None:
    def broken() -> None:
        raise error

    found = machine(nvmlInit=broken)
    assert (found.gpus, found.nvml_error) == ((), said)
    wording(render_devices(found, 80).splitlines()[1:])


@pytest.mark.parametrize("is_newer", [False, True])
def test_clients_of_mps_are_processes_of_their_gpu(is_newer: bool) -> None:
    """NVML lists them apart; a driver may list the server's memory there too."""
    changes: dict[str, Any] = {}
    if is_newer:
        listed = [SimpleNamespace(pid=pid, usedGpuMemory=4 * GIB) for pid in (os.getpid(), 1)]
        changes["nvmlDeviceGetMPSComputeRunningProcesses"] = lambda gpu: listed if gpu == 1 else []
    first, second, _ = machine(**changes).gpus
    assert first.processes == ()
    assert [process.pid for process in known(second.processes)] == [os.getpid(), 1][: 1 + is_newer]


def of_module(tmp_path: Path, visible: str | None) -> Gpus:
    """What is found where only the kernel's module is there, as in a container without libnvidia-ml."""

    def missing() -> None:
        raise NVMLErrorLibraryNotFound("NVML Shared Library Not Found")

    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidiactl").touch()
    here = [("0000:1B:00.0", "GPU-aa11"), ("0000:43:00.0", "GPU-bb22"), ("0000:44:00.0", "????")]
    for minor, (bus, uuid) in enumerate([*here, ("0000:45:00.0", "GPU-dd44")]):
        if (bus, uuid) in here:  # the last one is for other containers
            (tmp_path / f"dev/nvidia{minor}").touch()
        file = tmp_path / f"proc/driver/nvidia/gpus/{bus}/information"
        file.parent.mkdir(parents=True)
        file.write_text(
            f"Model: \t\t NVIDIA H100 80GB HBM3\nIRQ:   \t\t 42\nGPU UUID: \t {uuid}\n"
            f"Device Minor: \t {minor}\n"
        )
    said = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  550.54.15  Release Build\nGCC"
    (tmp_path / "proc/driver/nvidia/version").write_text(said)
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    nvml = fake()
    nvml.nvmlInit = missing
    return inspect_nvidia_gpus(environ, tmp_path, nvml)


@pytest.mark.parametrize(
    ("visible", "buses"),
    [
        (None, ["0000:1b:00.0", "0000:43:00.0"]),
        ("1", ["0000:43:00.0"]),
        ("GPU-bb,GPU-aa", ["0000:43:00.0", "0000:1b:00.0"]),
        ("0,7,1", ["0000:1b:00.0"]),
    ],
)
def test_in_a_container_without_nvml_gpus_are_those_of_the_module(
    tmp_path: Path, visible: str | None, buses: list[str]
) -> None:
    found = of_module(tmp_path, visible)
    assert [gpu.bus for gpu in found.gpus] == buses
    assert {gpu.name for gpu in found.gpus} == {"NVIDIA H100 80GB HBM3"}
    assert (found.nvml_error, found.driver) == (None, "550.54.15")
    assert "libnvidia-ml.so.1 is missing" in found.notes[0]


def test_a_gpu_that_is_named_twice_leaves_none(tmp_path: Path) -> None:
    """As in torch."""
    assert of_module(tmp_path, "0,GPU-aa").gpus == ()


def test_the_binding_has_every_function_that_is_asked_for() -> None:
    """The fake replaces pynvml; a name that pynvml lacks would pass with the fake alone."""
    nvml = load_nvml()
    assert [name for name in vars(fake()) if not hasattr(nvml, name)] == []


def test_this_machine_can_be_inspected() -> None:
    found = inspect_machine()
    assert 1 <= found.cpu_cores <= len(os.sched_getaffinity(0))
    assert 0 < found.memory_available_gib <= found.memory_gib
    assert found.cpu_model


@pytest.mark.parametrize(
    ("files", "most"),
    [
        ({"proc/self/cgroup": "0::/a/b", "sys/fs/cgroup/a/b/cpu.max": "max 100000"}, None),
        (
            {
                "proc/self/cgroup": "0::/a/b",
                "sys/fs/cgroup/a/cpu.max": "100000 100000",
                "sys/fs/cgroup/a/b/x": "",
            },
            1,
        ),
        (
            {
                "proc/self/cgroup": "3:cpu,cpuacct:/a\n1:memory:/",
                "sys/fs/cgroup/cpu/a/cpu.cfs_quota_us": "50000",
                "sys/fs/cgroup/cpu/a/cpu.cfs_period_us": "100000",
            },
            1,
        ),
        ({"proc/self/cgroup": "0::/not/mounted/here"}, None),
        ({}, None),
    ],
    ids=["no limit", "parent's limit", "version 1", "container", "no cgroups"],
)
def test_cores_are_cut_by_the_cgroup_quota(tmp_path: Path, files: dict[str, str], most: int | None) -> None:
    write(tmp_path, files)
    everything = len(os.sched_getaffinity(0))
    assert usable_cores(tmp_path) == (everything if most is None else most)


def test_memory_is_cut_by_the_cgroup_limit(tmp_path: Path) -> None:
    meminfo = "MemTotal: 33554432 kB\nMemFree: 1 kB\nMemAvailable: 16777216 kB"
    write(tmp_path, {"proc/meminfo": meminfo, "proc/self/cgroup": "0::/a"})
    free = inspect_machine(fake(), {}, tmp_path)
    assert (free.memory_gib, free.memory_available_gib) == (32.0, 16.0)
    write(
        tmp_path, {"sys/fs/cgroup/a/memory.max": str(8 * GIB), "sys/fs/cgroup/a/memory.current": str(5 * GIB)}
    )
    limited = inspect_machine(fake(), {}, tmp_path)
    assert (limited.memory_gib, limited.memory_available_gib) == (8.0, 3.0)


@pytest.mark.parametrize(
    ("own", "files", "available_gib"),
    [
        ("0::/a", {"a/memory.max": 8, "a/memory.current": 7}, 5),
        ("4:memory:/a", {"memory/a/memory.limit_in_bytes": 8, "memory/a/memory.usage_in_bytes": 7}, 4),
    ],
    ids=["version 2", "version 1"],
)
def test_page_cache_that_a_cgroup_can_take_back_is_available(
    tmp_path: Path, own: str, files: Mapping[str, int], available_gib: int
) -> None:
    """The first version counts the groups below it apart, in `total_inactive_file`."""
    write(tmp_path, {"proc/meminfo": "MemTotal: 33554432 kB\nMemAvailable: 16777216 kB"})
    write(tmp_path, {"proc/self/cgroup": own})
    write(tmp_path, {f"sys/fs/cgroup/{name}": str(gib * GIB) for name, gib in files.items()})
    stat = f"anon {2 * GIB}\ninactive_file {4 * GIB}\n"
    if own != "0::/a":
        stat += f"total_inactive_file {3 * GIB}\n"
    write(tmp_path, {f"sys/fs/cgroup/{Path(next(iter(files))).parent}/memory.stat": stat})
    assert memory_bytes(tmp_path) == (8 * GIB, available_gib * GIB)


def write(root: Path, files: Mapping[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def test_host_record_is_plain_json_and_names_the_versions() -> None:
    record = json.loads(msgspec.json.encode(host_record(machine())))
    assert record["gpus"][0]["uuid"] == UUIDS[0]
    assert record["driver"] == "580.65.06"
    assert record["versions"]["torch"]
    assert record["versions"]["python"]
    assert len(record["load_average"]) == 3


@pytest.mark.parametrize(
    ("files", "own"),
    [
        ({"cpu.cfs_quota_us": "40000", "cgroup.procs": "12"}, True),
        ({"cpu.cfs_quota_us": "40000", "cgroup.procs": "12\n13"}, False),
        ({"cpu.cfs_quota_us": "-1", "cgroup.procs": "12"}, False),
        ({"cgroup.procs": "12"}, False),
    ],
)
def test_a_quota_is_a_ranks_own_where_none_shares_it(
    tmp_path: Path, files: dict[str, str], own: bool
) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("5:cpu:/slow\n")
    directory = tmp_path / "sys/fs/cgroup/cpu/slow"
    directory.mkdir(parents=True)
    for name, text in files.items():
        (directory / name).write_text(text)
    assert has_own_quota(tmp_path) is own


def test_a_gpu_in_mig_mode_is_replaced_by_its_instances() -> None:
    """Instances are handles beyond those of the GPUs, as NVML gives them; the driver has room for three."""
    instances = {10: "MIG-1111", 11: "MIG-2222"}

    def instance(gpu: int, number: int) -> int:
        if number > 1:
            raise NVMLError("Not Found")
        return 10 + number

    changes = {
        "nvmlDeviceGetMigMode": lambda gpu: [int(gpu == 1), 0],
        "nvmlDeviceGetMaxMigDeviceCount": lambda gpu: 3,
        "nvmlDeviceGetMigDeviceHandleByIndex": instance,
        "nvmlDeviceGetUUID": lambda gpu: instances.get(gpu) or UUIDS[gpu],
        "nvmlDeviceGetHandleByUUID": lambda uuid: next(h for h, name in instances.items() if name == uuid),
        "nvmlDeviceGetNvLinkState": unsupported,
        "nvmlDeviceGetPciInfo": lambda gpu: unsupported() if gpu >= 10 else SimpleNamespace(busId="0:1:0.0"),
        "nvmlDeviceGetDeviceHandleFromMigDeviceHandle": lambda gpu: 1,
    }
    found = [gpu.uuid for gpu in machine(None, **changes).gpus]
    assert found == [UUIDS[0], "MIG-1111", "MIG-2222", UUIDS[2]]
    assert [gpu.uuid for gpu in machine("1", **changes).gpus] == ["MIG-1111", "MIG-2222"]
    chosen = machine("MIG-2222", **changes).gpus
    assert ([gpu.uuid for gpu in chosen], chosen[0].bus) == (["MIG-2222"], "0:1:0.0")


def test_a_gpu_in_use_is_busy(wording: Wording) -> None:
    idle, used, utilised = machine().gpus
    assert idle.busy_with is None
    assert used.busy_with is not None
    assert f"({os.getpid()}) uses 6.0 GiB" in used.busy_with
    utilised = replace(utilised, used_gib=0.0)
    assert utilised.busy_with is None  # its processes are listed, and there is none: that was a moment ago
    wording(replace(utilised, processes=None).busy_with)
    hidden = replace(idle, used_gib=20.0)  # in a container whose driver names no processes
    wording(hidden.busy_with)


def test_a_gpus_numa_node_is_looked_up(tmp_path: Path) -> None:
    directory = tmp_path / "sys/bus/pci/devices/0000:02:00.0"
    directory.mkdir(parents=True)
    (directory / "numa_node").write_text("1")
    assert [gpu.numa_node for gpu in inspect_machine(fake(), {}, tmp_path).gpus] == [None, None, 1]


def test_no_command_of_a_repository_runs_to_see_what_has_changed(tmp_path: Path) -> None:
    """Its own configuration may name one that filters files; it may come from an unpacked archive."""
    ran = tmp_path / "ran"
    (tmp_path / "data.txt").write_text("1")
    (tmp_path / ".gitattributes").write_text("*.txt filter=odd\n")
    author = ("-c", "user.name=a", "-c", "user.email=a@example.org")
    for words in (["init", "-q"], ["add", "."], [*author, "commit", "-qm", "1"]):
        assert git(tmp_path, *words).code == 0
    for key, value in (("clean", f"touch {ran}; cat"), ("required", "true")):
        git(tmp_path, "config", f"filter.odd.{key}", value)
    assert not is_changed(tmp_path)
    (tmp_path / "data.txt").write_text("2")
    assert is_changed(tmp_path)
    assert not ran.exists()


def test_a_directory_in_use_stays_where_another_of_its_purpose_is_made() -> None:
    with temporary_directory("test-of-two") as first, temporary_directory("test-of-two"):
        assert first.is_dir()
    assert not first.exists()


def test_a_name_that_the_kernel_cut_within_a_character_hides_no_process() -> None:
    def renamed() -> tuple[int, int]:
        thread = Path("/proc/thread-self")
        (thread / "comm").write_text("é" * 9)
        return status_number(thread, "Pid"), len(read_text(thread / "comm"))

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(renamed).result() == (pool.submit(threading.get_native_id).result(), 8)
