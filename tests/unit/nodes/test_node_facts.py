"""Which node this is and where the nodes meet, from every source."""

from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpurun.launcher.errors import SpecError
from gpurun.launcher.nodes.join import source_sha256
from gpurun.launcher.nodes.rendezvous import Facts, NodeFlags, bounds_here, find_facts, parse_endpoint
from gpurun.launcher.schedulers.slurm import expand_hosts, slurm_port
from tests.wording import Wording

SLURM = {
    "SLURM_JOB_ID": "123456",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "1",
    "SLURM_NODEID": "1",
    "SLURM_LOCALID": "0",
    "SLURM_STEP_NODELIST": "gpu[08-09]",
    "SLURM_STEP_NUM_NODES": "2",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
    "OMPI_COMM_WORLD_NODE_RANK": "0",
    "OMPI_COMM_WORLD_SIZE": "2",
    "PMIX_RANK": "1",
}
"""Of Open MPI 4.1.4, as `mpirun --map-by ppr:1:node` sets them on the second node."""
HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "2", "PMI_FD": "8", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "1"}
"""Of MPICH 4.0.2, as `mpirun -ppn 1` sets them on the second node."""
BELOW_SLURM = {**SLURM, "SLURM_NODEID": "0", "SLURM_STEP_NODELIST": "gpu09", "SLURM_STEP_NUM_NODES": "1"}
"""Below mpirun: Slurm's variables describe the daemons that mpirun has started on the other nodes."""
POD = {"JOB_COMPLETION_INDEX": "1", "HOSTNAME": "demo-1", "KUBERNETES_SERVICE_HOST": "10.96.0.1"}
"""In a Pod of an Indexed Job."""
TRAINJOB = {
    **POD,
    "PET_NNODES": "2",
    "PET_NODE_RANK": "1",
    "PET_MASTER_PORT": "29400",
    "PET_NPROC_PER_NODE": "auto",
}
TRAINJOB["PET_MASTER_ADDR"] = "demo-node-0-0.demo"
PET = {"PET_NODE_RANK": "1", "PET_MASTER_ADDR": "head", "PET_MASTER_PORT": "1234", "PET_NNODES": "2"}


@pytest.mark.parametrize(
    ("flags", "environ", "facts"),
    [
        (NodeFlags(1, "a:5"), {}, Facts(1, "a", 5)),
        (NodeFlags(1, "a"), {}, Facts(1, "a", 29400)),
        (NodeFlags(0, "[fd00::1]:5"), {}, Facts(0, "fd00::1", 5)),
        (NodeFlags(0, "fd00::1"), {}, Facts(0, "fd00::1", 29400)),
        (NodeFlags(), PET, Facts(1, "head", 1234, True)),
        (NodeFlags(), {"PET_NODE_RANK": "0", "PET_RDZV_ENDPOINT": "h:7"}, Facts(0, "h", 7, True)),
        (NodeFlags(), SLURM, Facts(1, "gpu08", 23456)),
        (NodeFlags(0), SLURM, Facts(0, "gpu08", 23456)),
        (NodeFlags(None, "b:9"), SLURM, Facts(1, "b", 9)),
        (NodeFlags(), {**SLURM, **PET}, Facts(1, "head", 1234, True)),
        (
            NodeFlags(),
            {**SLURM, "PMI_RANK": "1", "PMI_SIZE": "2", "PMIX_RANK": "1"},
            Facts(1, "gpu08", 23456),
        ),
        (NodeFlags(None, "a:5"), OPEN_MPI, Facts(1, "a", 5)),
        (NodeFlags(None, "a:5"), HYDRA, Facts(1, "a", 5)),
        (NodeFlags(None, "a:5"), {"PMIX_RANK": "1"}, Facts(1, "a", 5)),
        (NodeFlags(None, "a:5"), {**BELOW_SLURM, **OPEN_MPI}, Facts(1, "a", 5)),
        (NodeFlags(None, "demo-0.demo"), POD, Facts(1, "demo-0.demo", 29400, True)),
        (NodeFlags(), TRAINJOB, Facts(1, "demo-node-0-0.demo", 29400, True)),
    ],
)
def test_facts(flags: NodeFlags, environ: Mapping[str, str], facts: Facts) -> None:
    assert find_facts(2, flags, environ) == facts


@pytest.mark.parametrize(
    ("flags", "environ", "words"),
    [
        (NodeFlags(), {}, "the rank of this node must be set"),
        (NodeFlags(0), {}, "the rendezvous address must be set"),
        (NodeFlags(2, "a"), {}, "node rank 2 is out of range: with 2 nodes, ranks are 0 to 1"),
        (NodeFlags(0, "a:99999"), {}, "not HOST[:PORT]"),
        (NodeFlags(0, ":1"), {}, "not HOST[:PORT]"),
        (NodeFlags(), {**PET, "PET_NNODES": "3"}, "`nodes: 2`, but PET_NNODES specifies 3"),
        (NodeFlags(), {**PET, "PET_NODE_RANK": "x"}, "PET_NODE_RANK should be a number"),
        (NodeFlags(), {**SLURM, "SLURM_STEP_NUM_NODES": "4"}, "--set nodes=4"),
        (NodeFlags(), {**SLURM, "SLURM_LOCALID": "1"}, "--ntasks-per-node=1"),
        (NodeFlags(), {**SLURM, "SLURM_STEP_NODELIST": "gpu[8-"}, "can't be read"),
        (NodeFlags(), {**BELOW_SLURM, **OPEN_MPI}, "the rendezvous address must be set"),
        (NodeFlags(None, "a"), {**HYDRA, "PMI_SIZE": "3"}, "but mpirun specifies 3"),
        (NodeFlags(None, "a"), {**HYDRA, "MPI_LOCALRANKID": "1"}, "several processes on this node"),
        (NodeFlags(None, "a"), {**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_RANK": "1"}, "--map-by ppr:1:node"),
        (NodeFlags(None, "a"), {"OMPI_COMM_WORLD_RANK": "0"}, "without OMPI_COMM_WORLD_LOCAL_RANK and OMPI"),
        (NodeFlags(None, "a"), {**OPEN_MPI, "PMIX_RANK": "7"}, "but PMIX_RANK is 7"),
        (NodeFlags(), POD, "the rendezvous address must be set"),
        (NodeFlags(), {key: SLURM[key] for key in ("SLURM_JOB_ID", "SLURM_NODEID")}, "the rank of this node"),
    ],
)
def test_missing_and_contradictory_facts(flags: NodeFlags, environ: Mapping[str, str], words: str) -> None:
    with pytest.raises(SpecError, match=words.replace("[", r"\[")):
        find_facts(2, flags, environ)


@pytest.mark.parametrize(
    ("given", "bounds"), [({}, (2, 4)), (PET, (2, 2)), ({**PET, "PET_NNODES": "2:4"}, (2, 4))]
)
def test_a_range_of_nodes_is_what_the_scheduler_gives(
    given: Mapping[str, str], bounds: tuple[int, int], wording: Wording
) -> None:
    assert bounds_here("2..4", NodeFlags(), given) == bounds
    assert find_facts("2..4", NodeFlags(3, "a"), given).rank == 3
    with wording.raises(SpecError):
        bounds_here("2..4", NodeFlags(), {**PET, "PET_NNODES": "5"})


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("a", ("a",)),
        ("a,b-1", ("a", "b-1")),
        ("n[0-1,5],login", ("n0", "n1", "n5", "login")),
        ("gpu[08-11]", ("gpu08", "gpu09", "gpu10", "gpu11")),
        ("r[1-2]n[1-2]x", ("r1n1x", "r1n2x", "r2n1x", "r2n2x")),
    ],
)
def test_host_lists(text: str, hosts: tuple[str, ...]) -> None:
    assert expand_hosts(text) == hosts


@given(st.text(alphabet="ab0123[]-,. ", max_size=30))
def test_a_host_list_is_read_or_refused(text: str) -> None:
    try:
        hosts = expand_hosts(text)
    except SpecError:
        return
    assert hosts
    assert not any(set("[]") & set(host) for host in hosts)


def test_a_host_list_without_end_is_refused() -> None:
    with pytest.raises(SpecError):
        expand_hosts("n[0-999999999]x[0-999999999]")


@given(st.integers(0, 2**32))
def test_ports_of_slurm_jobs_are_not_those_of_outgoing_connections(job_id: int) -> None:
    assert 1024 <= slurm_port(job_id) < 32768
    assert parse_endpoint(f"h:{slurm_port(job_id)}") == ("h", slurm_port(job_id))


def test_a_working_copy_is_known_by_what_its_links_lead_to(tmp_path: Path) -> None:
    """There, gpurun is a directory of links."""
    for name in ("launcher", "package"):
        (tmp_path / name).mkdir()
    (tmp_path / "package" / "launcher").symlink_to("../launcher")
    (tmp_path / "launcher" / "start.py").write_text("1")
    before = source_sha256(tmp_path / "package")
    (tmp_path / "launcher" / "start.py").write_text("2")
    assert source_sha256(tmp_path / "package") != before


def test_flags_that_say_all_are_taken_whatever_variables_are_left_over() -> None:
    facts = find_facts(2, NodeFlags(0, "127.0.0.1:29499"), {"OMPI_COMM_WORLD_RANK": "1"})
    assert (facts.rank, facts.host, facts.port) == (0, "127.0.0.1", 29499)
