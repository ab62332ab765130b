"""The OOM killer's counters, as the kernel's two cgroup versions write them."""

from pathlib import Path

import pytest

from gpurun.launcher.machine.resource_limits import oom_kills

V1, V2 = "4:cpu,memory:/job/7\n", "0::/user/x:y\n"


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
    for name, content in (("proc/self/cgroup", cgroup), (f"sys/fs/cgroup/{file}", text)):
        path = tmp_path / name
        path.parent.mkdir(parents=True)
        path.write_text(content)
    assert oom_kills(tmp_path) == count


def test_without_a_cgroup_there_is_no_counter(tmp_path: Path) -> None:
    assert oom_kills(tmp_path) is None
