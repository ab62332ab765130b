"""The kernel keeps a process, and what it starts, from writing elsewhere."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gpurun.launcher.machine.landlock import can_restrict_writes
from gpurun.launcher.rundir import launch_writes
from gpurun.launcher.rundir.launch_writes import caches_to_make, is_below, writable_places

KEPT = """
import os, subprocess, sys
from gpurun.launcher.machine.landlock import restrict_writes
restrict_writes(["own", "log", "missing", "/dev"])
for command in sys.argv[1:]:
    print(subprocess.run(command, shell=True, capture_output=True).returncode == 0)
"""


@pytest.mark.skipif(not can_restrict_writes(), reason="this kernel has no Landlock, or an older one")
def test_a_process_and_what_it_starts_writes_only_where_it_may(tmp_path: Path) -> None:
    for name in ("own", "data", "data/sub"):
        (tmp_path / name).mkdir()
    for name in ("log", "own/b", "data/a", "data/sub/a"):
        (tmp_path / name).write_text("before")
    (tmp_path / "own/link").symlink_to("../data")
    allowed = ("echo x >> own/new", "echo x >> log", "mkdir own/d", "rm own/b", "mv own/new own/d/moved",
               "cat data/a", "echo x > /dev/null")  # fmt: skip
    refused = ("echo x >> data/a", "echo x > data/new", "echo x > own/link/cp", "mkdir data/d", "rm data/a",
               "mv data/a data/b", "ln data/a data/b", "ln -s a data/b", "rm -r data/sub", "echo x > new",
               "truncate -s 0 data/a", "mv data/a own/a", "rm log", "mkdir missing")  # fmt: skip
    argv = [sys.executable, "-c", KEPT, *allowed, *refused]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, check=True)
    succeeded = [each == "True" for each in done.stdout.split()]
    assert dict(zip((*allowed, *refused), succeeded, strict=True)) == {
        **dict.fromkeys(allowed, True),
        **dict.fromkeys(refused, False),
    }
    assert sorted(path.name for path in (tmp_path / "data").iterdir()) == ["a", "sub"]
    assert (tmp_path / "data/a").read_text() == (tmp_path / "data/sub/a").read_text() == "before"


def test_a_launch_may_write_to_its_run_devices_temporary_files_and_caches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("TRITON_CACHE_DIR", "/fast/triton")
    found = writable_places("/home/me/project", "/home/me/project/runs/a")
    inside = (
        "/home/me/project/runs/a/launches",
        "/tmp/x",
        "/dev/null",
        "/home/me/.cache/b",
        "/fast/triton/c",
    )
    outside = ("/home/me/project/last.pt", "/home/me/notes", "/home/me/project/runs/abc", "/data", "/fast")
    assert [path for path in (*inside, *outside) if is_below(path, found)] == list(inside)


@pytest.mark.parametrize(
    "path",
    [
        # NVIDIA: the driver, its kernels, MPS
        *("/dev/nvidia0", "/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-caps/nvidia-cap1"),
        *("/home/me/.nv/ComputeCache/index", "/fast/cuda/index", "/tmp/nvidia-mps/control", "/mps/control"),
        # AMD: the driver, what its processes share, MIOpen, the compiler
        *("/dev/kfd", "/dev/dri/renderD128", "/dev/shm/hsakmt_shared_mem", "/dev/shm/sem.hsakmt_semaphore"),
        *(
            "/home/me/.config/miopen/a.ufdb.txt",
            "/home/me/.cache/miopen/a",
            "/fast/miopen/a",
            "/fast/comgr/a",
        ),
        "/home/me/.cache/comgr_cache/a",
        # NCCL and RCCL
        *("/dev/shm/nccl-a", "/dev/infiniband/uverbs0"),
        # torch, Triton, FlashInfer
        *("/tmp/torchinductor_me/a", "/home/me/.cache/torch/kernels/a", "/fast/kernels/a"),
        *("/home/me/.triton/cache/a", "/fast/.triton/cache/a", "/fast/.cache/flashinfer/a"),
        "/home/me/.config/matplotlib/fontlist.json",
    ],
)
def test_what_programs_on_gpus_write_is_allowed(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, place in (
        *(("HOME", "/home/me"), ("CUDA_CACHE_PATH", "/fast/cuda"), ("CUDA_MPS_PIPE_DIRECTORY", "/mps")),
        *(("MIOPEN_CUSTOM_CACHE_DIR", "/fast/miopen"), ("AMD_COMGR_CACHE_DIR", "/fast/comgr")),
        *(("PYTORCH_KERNEL_CACHE_PATH", "/fast/kernels"), ("TRITON_HOME", "/fast")),
        ("FLASHINFER_WORKSPACE_BASE", "/fast"),
    ):
        monkeypatch.setenv(name, place)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    found = writable_places("/home/me/project", "/home/me/project/runs/a")
    assert is_below(path, found)
    assert not is_below("/fast/last.pt", found)
    assert not is_below("/fast/.nv/a", found)
    assert not is_below("/home/me/.config/other", found)


@pytest.mark.parametrize(
    ("devices", "made"),
    [
        ((), [".cache"]),
        (("/dev/nvidiactl",), [".cache", ".triton", ".nv"]),
        (("/dev/kfd", "/dev/dri"), [".cache", ".triton", ".config/miopen"]),
    ],
)
def test_caches_that_programs_make_in_a_new_home_are_there_before_writing_is_restricted(
    devices: tuple[str, ...], made: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    for name in (*launch_writes._CACHES, *launch_writes._HOMES):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os.path, "exists", lambda path: path in ("/", *devices))
    assert caches_to_make() == tuple(f"/home/me/{name}" for name in made)
    monkeypatch.setenv("TORCH_HOME", "/fast/torch")
    monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", "/fast")
    assert (caches_to_make()[0], caches_to_make()[-1]) == ("/fast/torch", "/fast/.cache")
