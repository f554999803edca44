"""What the nodes measured of the network, judged: each check in both outcomes."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from hpc_elastic.doctor.findings import Finding, Level
from hpc_elastic.doctor.network_checks import judge_network
from hpc_elastic.doctor.network_probe import DATAGRAMS, ClockAhead, NetworkFacts, Reached
from hpc_elastic.doctor.pairs import NetworkVerdict, PairTime

NODES = ("n1", "n2", "n3")
ADDRESS = {"n1": "10.0.0.1", "n2": "10.0.0.2", "n3": "10.0.0.3"}
PAIRS = NetworkVerdict(
    backend="gloo", bytes=4 << 20, median=0.01, seconds={0: 0.01, 1: 0.01, 2: 0.012}, names=dict(enumerate(NODES))
)


def healthy(node: str) -> NetworkFacts:
    others = [other for other in NODES if other != node]
    return NetworkFacts(
        addresses=(ADDRESS[node],),
        names={name: (address,) for name, address in ADDRESS.items()},
        reached=tuple(Reached(node=other, address=ADDRESS[other]) for other in others),
        datagrams={other: {ADDRESS[node]: DATAGRAMS} for other in others},
        clocks={other: ClockAhead(seconds=0.002, bound=0.0002) for other in others},
        master=Reached(node="", address="10.0.0.1"),
        pairs=PAIRS,
    )


def facts(**changed: NetworkFacts) -> dict[str, NetworkFacts]:
    return {node: changed.get(node, healthy(node)) for node in NODES}


def found(facts: dict[str, NetworkFacts], check: str) -> Finding:
    (one,) = [finding for finding in judge_network(facts) if finding.check == f"network.{check}"]
    return one


def test_a_healthy_network_is_ok_in_each_line() -> None:
    assert [(finding.level, finding.check, finding.found) for finding in judge_network(facts())] == [
        (Level.OK, "network.addresses", "each node reaches each (n1 at 10.0.0.1, n2 at 10.0.0.2, n3 at 10.0.0.3)"),
        (Level.OK, "network.nodes-names", "the nodes' names resolve to their addresses on all of them"),
        (Level.OK, "network.master", "MASTER_ADDR=10.0.0.1 is reached from all nodes"),
        (Level.OK, "network.datagrams", "0 of 600 between all nodes were lost"),
        (Level.OK, "network.clocks", "at most 2 ms apart (± 0.2 ms)"),
        (Level.OK, "network.bandwidth", "3.4 Gbit/s in the median, 2.8 Gbit/s at least, between two nodes by gloo"),
    ]
    assert judge_network({"n1": healthy("n1")}) == []


def test_a_node_that_another_cannot_reach_is_a_problem_with_the_reason() -> None:
    n1 = healthy("n1")
    blocked = tuple(replace(one, error="timed out") if one.node == "n3" else one for one in n1.reached)
    one = found(facts(n1=replace(n1, reached=blocked)), "addresses")
    assert (one.level, one.found) == (Level.PROBLEM, "n1 does not reach n3 (10.0.0.3: timed out)")


def test_an_address_that_leads_nowhere_is_a_warning_where_it_is_the_one_of_the_name() -> None:
    wrong = Reached(node="n3", address="192.168.9.3", error="No route to host")
    changed = {node: replace(healthy(node), reached=(*healthy(node).reached, wrong)) for node in ("n1", "n2")} | {
        "n3": replace(healthy("n3"), addresses=("192.168.9.3", ADDRESS["n3"]))
    }
    one = found(facts(**changed), "addresses")
    assert (one.level, one.found) == (Level.WARNING, "n3's 192.168.9.3 is reached by 0 of 2 nodes")
    assert one.means == "a script that uses the name of n3 as MASTER_ADDR does not work everywhere"
    changed["n3"] = replace(healthy("n3"), addresses=(ADDRESS["n3"], "192.168.9.3"))
    one = found(facts(**changed), "addresses")
    assert one.level is Level.OK
    assert one.found.endswith("; n3's 192.168.9.3 is reached by 0 of 2 nodes")


@pytest.mark.parametrize(
    ("resolved", "text"),
    [
        ((), "n3 has no address on n1"),
        (("127.0.1.1",), "n3 is 127.0.1.1 on n1, which is none of its addresses"),
    ],
)
def test_names_that_resolve_to_nothing_or_to_something_else(resolved: tuple[str, ...], text: str) -> None:
    n1 = healthy("n1")
    one = found(facts(n1=replace(n1, names={**n1.names, "n3": resolved})), "nodes-names")
    assert (one.level, one.found) == (Level.WARNING, text)


def test_a_master_that_is_not_reached() -> None:
    n3 = replace(healthy("n3"), master=Reached(node="", address="10.0.0.1", error="Connection refused"))
    one = found(facts(n3=n3), "master")
    assert (one.level, one.found) == (
        Level.PROBLEM, "MASTER_ADDR=10.0.0.1 is not reached from n3 (Connection refused)"
    )  # fmt: skip


def test_datagrams_that_are_lost_are_named_by_pair_and_none_at_all_is_a_firewall() -> None:
    n2 = replace(healthy("n2"), datagrams={"n1": {"10.0.0.2": 70}, "n3": {"10.0.0.2": 99}})
    one = found(facts(n2=n2), "datagrams")
    assert (one.level, one.found) == (Level.WARNING, "from n1 to n2 30 of 100 were lost")
    two_ways = replace(n2, datagrams={"n1": {"10.0.0.2": 70, "10.1.0.2": 100}, "n3": {"10.0.0.2": 99}})
    assert found(facts(n2=two_ways), "datagrams").level is Level.OK, "by one address all came"
    none = {
        node: replace(
            healthy(node), datagrams={other: {ADDRESS[node]: 0} for other in NODES if other != node}, clocks={}
        )
        for node in NODES
    }
    one = found(none, "datagrams")
    assert one.level is Level.WARNING
    assert one.way_out == "have UDP between nodes allowed, or --rdzv-conf doorbell=off"
    assert found(none, "clocks").found == "not known: no datagrams passed both ways"


def test_clocks_that_are_apart() -> None:
    n1 = replace(healthy("n1"), clocks={"n2": ClockAhead(seconds=-7.25, bound=0.001)})
    one = found(facts(n1=n1), "clocks")
    assert (one.level, one.found) == (Level.WARNING, "n1's is -7.2 s against n2's")
    unsure = replace(healthy("n1"), clocks={"n2": ClockAhead(seconds=1.5, bound=1.0)})
    assert found(facts(n1=unsure), "clocks").level is Level.OK


def test_bandwidth() -> None:
    def judged(**changes: object) -> list[tuple[Level, str]]:
        verdict = replace(PAIRS, **changes)  # type: ignore[arg-type]
        changed = {node: replace(healthy(node), pairs=verdict) for node in NODES}
        return [(one.level, one.found) for one in judge_network(changed) if one.check == "network.bandwidth"]

    failed = (PairTime(pair=(0, 1), why="no route"), PairTime(pair=(1, 2), why="no route"))
    assert judged(bad={1: "no transfer succeeded"}, failed=failed) == [(Level.PROBLEM, "n2: no transfer succeeded")]
    assert judged(failed=failed[:1]) == [(Level.PROBLEM, "no transfer between n1 and n2: no route")]
    assert judged(slow={2: "20.0 Mbit/s"}) == [(Level.WARNING, "n3: 20.0 Mbit/s")]
    (without,) = judged(backend="tcp")
    assert without[1].endswith("by a plain TCP connection, as the workers' Python lacks torch")
    nothing = {node: replace(healthy(node), pairs=None, no_pairs="too late") for node in NODES}
    assert found(nothing, "bandwidth").found == "not measured: too late"
