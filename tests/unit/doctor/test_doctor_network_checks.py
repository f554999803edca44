"""What the nodes measured of the network, judged: each check in both outcomes."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from msgspec.structs import replace

from hpc_elastic.doctor.checks import DoctorFinding, Severity
from hpc_elastic.doctor.node_job import (
    BandwidthFacts,
    NetworkFacts,
    Reached,
    Transfer,
    judge_bandwidth,
    judge_network,
    partners_of,
)

OK, WARNING, PROBLEM = Severity.OK, Severity.WARNING, Severity.PROBLEM

NODES = ("n1", "n2", "n3")
ADDRESS = {"n1": "10.0.0.1", "n2": "10.0.0.2", "n3": "10.0.0.3"}
SIZE = 4 << 20


def healthy(node: str) -> NetworkFacts:
    others = [other for other in NODES if other != node]
    return NetworkFacts(
        addresses=(ADDRESS[node],),
        reached=tuple(Reached(node=other, address=ADDRESS[other], ahead=0.002, bound=0.0002) for other in others),
        master=Reached(node="", address="10.0.0.1"),
    )


def facts(**changed: NetworkFacts) -> dict[str, NetworkFacts]:
    return {node: changed.get(node, healthy(node)) for node in NODES}


def found(facts: dict[str, NetworkFacts], check: str) -> DoctorFinding:
    (one,) = [finding for finding in judge_network(facts) if finding.check == f"network.{check}"]
    return one


def test_a_healthy_network_is_ok_in_each_line() -> None:
    assert [(finding.level, finding.check, finding.found) for finding in judge_network(facts())] == [
        (OK, "network.addresses", "each node reaches each (n1 at 10.0.0.1, n2 at 10.0.0.2, n3 at 10.0.0.3)"),
        (OK, "network.master", "MASTER_ADDR=10.0.0.1 is reached from all nodes"),
        (OK, "network.clocks", "at most 2.2 ms apart"),
    ]
    assert judge_network({"n1": healthy("n1")}) == []


def test_a_node_that_another_cannot_reach_is_a_problem_with_the_reason() -> None:
    n1 = healthy("n1")
    blocked = tuple(replace(one, error="timed out") if one.node == "n3" else one for one in n1.reached)
    one = found(facts(n1=replace(n1, reached=blocked)), "addresses")
    assert (one.level, one.found) == (PROBLEM, "n1 does not reach n3 (10.0.0.3: timed out)")


def test_an_address_that_leads_nowhere_is_a_warning_where_it_is_the_one_of_the_name() -> None:
    wrong = Reached(node="n3", address="192.168.9.3", error="No route to host")
    changed = {node: replace(healthy(node), reached=(*healthy(node).reached, wrong)) for node in ("n1", "n2")} | {
        "n3": replace(healthy("n3"), addresses=("192.168.9.3", ADDRESS["n3"]))
    }
    one = found(facts(**changed), "addresses")
    assert (one.level, one.found) == (WARNING, "not reached: n3's 192.168.9.3 from n1, n3's 192.168.9.3 from n2")
    assert one.means == "a script that uses the name of such a node as MASTER_ADDR does not work everywhere"
    changed["n3"] = replace(healthy("n3"), addresses=(ADDRESS["n3"], "192.168.9.3"))
    one = found(facts(**changed), "addresses")
    assert (one.level, one.found.count("n3's 192.168.9.3")) == (OK, 2)


def test_a_master_that_is_not_reached() -> None:
    n3 = replace(healthy("n3"), master=Reached(node="", address="10.0.0.1", error="Connection refused"))
    one = found(facts(n3=n3), "master")
    assert (one.level, one.found) == (PROBLEM, "MASTER_ADDR=10.0.0.1 is not reached from n3 (Connection refused)")


def clock_of_n2(*seen: tuple[float, float]) -> dict[str, NetworkFacts]:
    """As n1 sees it by each of its addresses."""
    reached = [Reached(node="n2", address=ADDRESS["n2"], ahead=ahead, bound=bound) for ahead, bound in seen]
    n1 = healthy("n1")
    return facts(n1=replace(n1, reached=(*reached, *(one for one in n1.reached if one.node != "n2"))))


def test_clocks_that_are_apart() -> None:
    one = found(clock_of_n2((-7.25, 0.5), (-7.24, 0.001)), "clocks")
    assert (one.level, one.found) == (WARNING, "up to 7.2 s apart: n1's and n2's")
    assert found(clock_of_n2((1.5, 1.0)), "clocks").level is OK, "that may be the network's delay"
    silent = {node: replace(healthy(node), reached=()) for node in NODES}
    assert found(silent, "clocks").found == "not known: no node reached another"


# -- bandwidth -----------------------------------------------------------------------------------------------------

Link = Callable[[int, int], "float | None"]


@pytest.mark.parametrize("count", range(2, 14))
def test_each_node_meets_another_one_in_each_round(count: int) -> None:
    met: set[tuple[int, int]] = set()
    for partners in zip(*(partners_of(rank, count) for rank in range(count)), strict=True):
        pairs = {(rank, partner) for rank, partner in enumerate(partners) if partner is not None}
        assert all(partners[partner] == rank != partner for rank, partner in pairs)
        assert partners.count(None) == count % 2
        assert not pairs & met
        met |= pairs
    assert {rank for rank, _ in met} == set(range(count))


def measured(count: int, link: Link, by: str = "gloo") -> dict[str, BandwidthFacts]:
    def transfer(rank: int, partner: int) -> Transfer:
        seconds = link(rank, partner)
        return Transfer(node=f"n{partner}", seconds=seconds, bytes=SIZE, why="" if seconds else "no route")

    return {
        f"n{rank}": BandwidthFacts(
            transfers=tuple(transfer(rank, one) for one in partners_of(rank, count) if one is not None), backend=by
        )
        for rank in range(count)
    }


def levels(count: int, link: Link) -> list[tuple[Severity, str]]:
    return [(one.level, one.found) for one in judge_bandwidth(measured(count, link))]


@pytest.mark.parametrize("count", range(3, 12))
def test_the_one_bad_or_slow_node_is_found_and_no_other(count: int) -> None:
    for odd in range(count):
        rng = random.Random(odd)
        (bad,) = judge_bandwidth(measured(count, lambda a, b, odd=odd: None if odd in (a, b) else 0.1))
        assert bad.level is PROBLEM
        assert f"n{odd}" in bad.found
        assert bad.found.endswith(": no route")
        assert bad.way_out.startswith(f"--exclude n{odd},")
        ((level, text),) = levels(
            count, lambda a, b, odd=odd, rng=rng: (0.3 if odd in (a, b) else 0.1) * rng.uniform(1, 1.2)
        )
        assert level is WARNING
        assert text.startswith(f"n{odd}: ")
        assert f", where the median of {count} nodes is " in text


@pytest.mark.parametrize("count", range(2, 12))
def test_a_healthy_network_has_neither(count: int) -> None:
    rng = random.Random(count)
    ((level, text),) = levels(count, lambda a, b: rng.uniform(0.1, 0.19))
    assert level is OK
    assert "Mbit/s in the median" in text


def test_two_nodes_or_halves_that_do_not_reach_each_other_are_not_blamed() -> None:
    assert levels(2, lambda a, b: None) == [(PROBLEM, "no transfer between n0 and n1: no route")]
    (halves,) = judge_bandwidth(measured(4, lambda a, b: 0.1 if {a, b} in ({0, 1}, {2, 3}) else None))
    assert (halves.level, halves.found.count("no route")) == (PROBLEM, 2)
    assert "--exclude" not in halves.way_out


def test_the_reason_is_that_of_the_end_that_tried() -> None:
    whys = {
        node: BandwidthFacts(transfers=(Transfer(node=other, why=why),), backend="gloo")
        for node, other, why in (("n0", "n1", "the other node did not connect"), ("n1", "n0", "10.0.0.1: timed out"))
    }
    assert [each.found for each in judge_bandwidth(whys)] == ["no transfer between n0 and n1: 10.0.0.1: timed out"]


def test_a_measurement_without_torch_is_named_and_one_node_has_none() -> None:
    (tcp,) = judge_bandwidth(measured(3, lambda a, b: 0.01, by="tcp"))
    assert tcp.found.endswith("by a plain TCP connection, as the workers' Python lacks torch")
    assert list(judge_bandwidth({"n0": BandwidthFacts()})) == []
