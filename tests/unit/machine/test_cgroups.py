"""Counters and limits of cgroups, as the kernel's two versions write them."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from gpurun.launcher.errors import MachineError
from gpurun.launcher.machine.resource_limits import check_cgroup, more_memory, oom_kills

V1, V2 = "4:cpu,memory:/job/7\n", "0::/user/x:y\n"


def plant(root: Path, own: str, files: Mapping[str, str]) -> None:
    """Writes `/proc/self/cgroup` below `root`, and files of cgroups by their paths there."""
    placed = {f"sys/fs/cgroup/{name}": content for name, content in files.items()}
    for name, content in {"proc/self/cgroup": own, **placed}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)


@pytest.mark.parametrize(
    ("cgroup", "file", "text", "count"),
    [
        (V2, "user/x:y/memory.events", "low 0\nhigh 0\nmax 12\noom 3\noom_kill 2\noom_group_kill 0\n", 2),
        (V2, "unified/memory.events", "oom_kill 3\n", 3),  # a container sees its own group as the root
        (V1 + V2, "memory/job/7/memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 5\n", 5),
        (V1 + V2, "memory/memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 5\n", 5),
        (V1, "memory/memory.oom_control", "oom_kill_disable 0\nunder_oom 0\n", None),
        (V2, "memory.events", "", None),
        (V2, "memory.events", "three words here\n", None),
        ("2:cpu:/job/7\n", "memory.events", "oom_kill 2\n", None),
    ],
)
def test_the_counter_is_found_and_read(
    tmp_path: Path, cgroup: str, file: str, text: str, count: int | None
) -> None:
    plant(tmp_path, cgroup, {file: text})
    assert oom_kills(tmp_path) == count


@pytest.mark.parametrize(
    ("files", "named"),
    [
        ({"user/memory.max": "max\n", "memory.max": "2147483648\n"}, "memory.max is 2.0 GiB"),
        ({"memory/job/7/memory.limit_in_bytes": "367001600\n"}, "7/memory.limit_in_bytes is 0.34 GiB"),
        ({"memory/job/7/memory.limit_in_bytes": "9223372036854771712\n"}, None),
    ],
)
def test_the_limit_of_memory_that_allows_least_is_named(
    tmp_path: Path, files: dict[str, str], named: str | None
) -> None:
    plant(tmp_path, "4:memory:/job/7\n0::/user\n", files)
    found = more_memory(tmp_path)
    assert found.endswith("end other programs, or use fewer ranks or smaller batches")
    assert ("raise it" in found) == (named is not None)
    assert (named or "") in found


def test_without_a_cgroup_there_is_no_counter(tmp_path: Path) -> None:
    assert oom_kills(tmp_path) is None


@pytest.mark.parametrize(
    ("files", "refused_at"),
    [
        ({"pids/job/7/pids.max": "40\n", "pids/job/7/pids.current": "9\n"}, "pids/job/7/pids.max"),
        ({"pids/job/pids.max": "40\n", "pids/job/pids.current": "9\n"}, "pids/job/pids.max"),
        ({"pids/job/7/pids.max": "41\n", "pids/job/7/pids.current": "9\n"}, None),
        ({"pids/job/7/pids.max": "max\n", "pids/job/7/pids.current": "9\n"}, None),
        ({"user/pids.max": "40\n", "user/pids.current": "9\n"}, "user/pids.max"),
        ({"unified/user/pids.max": "40\n", "unified/user/pids.current": "9\n"}, "unified/user/pids.max"),
        ({}, None),
    ],
)
def test_a_cgroup_that_allows_too_few_threads_is_refused(
    tmp_path: Path, files: dict[str, str], refused_at: str | None
) -> None:
    """With 9 threads in the cgroup, two ranks of 16 each need 41."""
    plant(tmp_path, "9:pids:/job/7\n0::/user/x\n", files)
    if refused_at is None:
        check_cgroup(2, tmp_path)
        return
    with pytest.raises(MachineError) as error:
        check_cgroup(2, tmp_path)
    limit = tmp_path / "sys/fs/cgroup" / refused_at
    assert str(error.value) == (
        f"{limit} is 40: 9 threads run in this cgroup, and 2 ranks may need 32 more\n"
        "    raise it (docker run --pids-limit=4096), or use fewer ranks"
    )
