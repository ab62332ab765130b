"""Faults are put into what healthy nodes measure together: each is named, with its node, and nothing else."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from gpurun.launcher.rundir.records import PairRate
from gpurun.launcher.selftest.check_table import NODE_CHECKS, findings, without_links
from gpurun.launcher.selftest.evidence import LINKS, Evidence, RanJob
from tests.unit.selftest.healthy import evidence
from tests.unit.selftest.test_named_faults import of_rank
from tests.wording import Wording


def of_nodes(**changes: Any) -> Evidence:
    """Three nodes with a GPU each, and interfaces of 25 GB/s."""
    facts = tuple(
        replace(each, pairs=tuple(PairRate(each.rank, high, 20.0) for high in range(each.rank + 1, 3)))
        for each in evidence().facts
    )
    together: dict[str, Any] = {"nodes": (0, 1, 2), "hosts": ("a", "b", "c"), "network_gb_per_s": (25.0,) * 3}
    names = tuple(f"cuda:0@{node} ({host})" for node, host in enumerate("abc"))
    return replace(evidence(), devices=names, health=(), **({"facts": facts} | together | changes))


def with_pairs(seen: Evidence, change: Callable[[PairRate], PairRate]) -> Evidence:
    facts = tuple(replace(each, pairs=tuple(map(change, each.pairs))) for each in seen.facts)
    return replace(seen, facts=facts)


def slow_node(pair: PairRate) -> PairRate:
    return replace(pair, gb_per_s=2.0) if pair.high == 2 else pair


def slow_pair(pair: PairRate) -> PairRate:
    return replace(pair, gb_per_s=2.0) if pair.low == 1 else pair


def slow(pair: PairRate) -> PairRate:
    return replace(pair, gb_per_s=0.1)


TIMED_OUT = RanJob(problem="rank 1 raised RuntimeError: connect timeout")
OF_NODES: dict[str, tuple[Evidence, set[str]]] = {
    "none": (of_nodes(), set()),
    "a slow link": (with_pairs(of_nodes(), slow_pair), {"pairs of nodes"}),
    "a slow node": (with_pairs(of_nodes(), slow_node), {"pairs of nodes"}),
    "unknown interfaces": (
        with_pairs(of_nodes(network_gb_per_s=(25.0, None, None)), slow_node),
        {"pairs of nodes"},
    ),
    "all slow": (with_pairs(of_nodes(), slow), {"pairs of nodes"}),
    "a slow device": (of_rank(1, gflop_per_s=100.0)(of_nodes()), {"speed of nodes"}),
    "a wrong sum": (of_rank(1, wrong_sums=("1 of 9 elements on rank 1",))(of_nodes()), {"sums over nodes"}),
    "a firewall": (of_nodes(facts=(), jobs={LINKS: TIMED_OUT}), {"nodes together"}),
}


@pytest.mark.parametrize("fault", OF_NODES)
def test_a_fault_between_nodes_is_named_by_its_check_alone(fault: str, wording: Wording) -> None:
    seen, checks = OF_NODES[fault]
    found = list(findings(seen, (LINKS,)))
    assert [each.name for each in found] == [check.name for check in NODE_CHECKS]
    assert {each.name for each in found if each.status == "failed"} == checks
    wording("\n".join(f"{each.name}: {each.found}; {each.remedy}" for each in found))


def test_links_of_a_node_without_ranks_are_not_measured() -> None:
    found = list(without_links(["visible devices on node 1 (b)"]))
    assert {each.found for each in found} == {"not run, because of: visible devices on node 1 (b)"}
    assert {each.status for each in found} == {"skipped"}
