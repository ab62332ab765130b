"""Which cores a rank gets, on machines that are made up."""

from pathlib import Path

import pytest

from gpurun.launcher.machine.host import Topology, gpu_node, inspect_topology, parse_cpus
from gpurun.launcher.plan.model import bind_ranks

TWO_NODES = Topology(
    nodes={0: (0, 1, 2, 3, 8, 9, 10, 11), 1: (4, 5, 6, 7, 12, 13, 14, 15)},
    cores=tuple((cpu, cpu + 8) for cpu in range(8)),
)
"""Two sockets of four cores, each with two hardware threads, numbered as Linux does."""


def make_sysfs(root: Path, nodes: dict[int, str], siblings: dict[int, str]) -> None:
    for node, cpus in nodes.items():
        directory = root / f"sys/devices/system/node/node{node}"
        directory.mkdir(parents=True)
        (directory / "cpulist").write_text(f"{cpus}\n")
    for cpu, text in siblings.items():
        directory = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
        directory.mkdir(parents=True)
        (directory / "thread_siblings_list").write_text(f"{text}\n")


def test_sysfs_lists_nodes_and_cores_as_far_as_they_may_be_used(tmp_path: Path) -> None:
    make_sysfs(tmp_path, {0: "0-1,4-5", 1: "2-3,6-7"}, {cpu: f"{cpu % 4},{cpu % 4 + 4}" for cpu in range(8)})
    whole = inspect_topology(range(8), tmp_path)
    assert whole.nodes == {0: (0, 1, 4, 5), 1: (2, 3, 6, 7)}
    assert whole.cores == ((0, 4), (1, 5), (2, 6), (3, 7))
    part = inspect_topology([0, 4, 5], tmp_path)
    assert (part.nodes, part.cores) == ({0: (0, 4, 5)}, ((0, 4), (5,)))
    assert inspect_topology([0, 1], tmp_path / "nothing").nodes == {0: (0, 1)}


def test_a_gpus_node_by_its_address(tmp_path: Path) -> None:
    directory = tmp_path / "sys/bus/pci/devices/0000:1b:00.0"
    directory.mkdir(parents=True)
    (directory / "numa_node").write_text("1\n")
    assert gpu_node("0000:1b:00.0", tmp_path) == 1
    (directory / "numa_node").write_text("-1\n")
    assert gpu_node("0000:1b:00.0", tmp_path) is None
    assert gpu_node("", tmp_path) is None


@pytest.mark.parametrize(("text", "cpus"), [("", ()), ("3", (3,)), ("0-2,8", (0, 1, 2, 8))])
def test_lists_of_cpus(text: str, cpus: tuple[int, ...]) -> None:
    assert parse_cpus(text) == cpus


def test_numa_follows_the_gpu_and_spreads_what_has_none() -> None:
    assert bind_ranks("none", [1, 0], TWO_NODES) == ((), ())
    assert bind_ranks("numa", [1, 0], TWO_NODES) == (TWO_NODES.nodes[1], TWO_NODES.nodes[0])
    first, second = TWO_NODES.nodes.values()
    assert bind_ranks("numa", [None] * 4, TWO_NODES) == (first, first, second, second)
    assert bind_ranks("numa", [7], TWO_NODES) == (first,)  # a node that may not be used


def test_cores_are_whole_and_no_one_elses() -> None:
    bound = bind_ranks("cores", [None] * 4, TWO_NODES)
    assert bound == ((0, 8, 1, 9), (2, 10, 3, 11), (4, 12, 5, 13), (6, 14, 7, 15))
    assert bind_ranks("cores", [0, 0, 0], TWO_NODES) == ((0, 8), (1, 9), (2, 10, 3, 11))


def test_with_too_few_cores_ranks_share_them() -> None:
    small = Topology({0: (0, 1)}, ((0,), (1,)))
    assert bind_ranks("cores", [None] * 4, small) == ((0,), (0,), (0,), (1,)) or all(
        cpus in ((0,), (1,)) for cpus in bind_ranks("cores", [None] * 4, small)
    )
    assert bind_ranks("cores", [None], Topology({}, ())) == ((),)
