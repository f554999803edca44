"""Names of participants: unique, readable, and in order on one node."""

from __future__ import annotations

import itertools

import pytest

from hpc_elastic.rendezvous.state import new_uid, node_of, supersedes
from tests.rigs.fake_clock import FakeClock
from tests.rigs.memory_store import fits_key


def test_it_reads_well() -> None:
    name = new_uid(3, "nid003", FakeClock(1.0))
    head, host, started, chance = name.split("-")
    assert (head, host, started) == ("00003", "nid003", f"{10**9 >> 16:016x}")
    assert len(chance) == 4


@pytest.mark.parametrize("host", ["n1", "a-b-c", "node.example.org", "grüße/..\n", "x" * 300, "", "-", "."])
def test_any_host_name_gives_a_name_that_fits(host: str) -> None:
    name = new_uid(7, host, FakeClock())
    assert fits_key(name)
    assert fits_key(f"leave+{name}")
    assert node_of(name) == 7


def test_two_starts_in_the_same_nanosecond_differ() -> None:
    clock = FakeClock()
    assert len({new_uid(0, "n", clock) for _ in range(50)}) > 45


@pytest.mark.parametrize(
    ("name", "node"), [("", -1), ("x", -1), ("-1-n", -1), ("n0-1-2", -1), ("nonsense", -1), ("00042-n-1-2", 42)]
)
def test_the_node_in_a_name(name: str, node: int) -> None:
    assert node_of(name) == node


def test_a_later_agent_of_a_node_supersedes_the_earlier_one() -> None:
    clock = FakeClock()
    names = []
    for seconds in (0.0001, 1, 86400, 10**8):
        clock.now += seconds
        names.append(new_uid(4, "a-b", clock))
    for earlier, later in itertools.pairwise(names):
        assert supersedes(later, earlier)
        assert not supersedes(earlier, later)


def test_a_node_whose_clock_was_set_back_goes_by_its_starts() -> None:
    clock = FakeClock(10**6)
    old = new_uid(4, "n4", clock, start=9)
    clock.now -= 3600
    new = new_uid(4, "n4", clock, start=10)
    assert supersedes(new, old)
    assert not supersedes(old, new)


@pytest.mark.parametrize(
    ("newer", "older", "supersedes_it"),
    [
        ("00004-aaa-0000000000000002-aaaa", "00004-zzz-0000000000000001-bbbb", True),  # the host does not count
        ("00005-aaa-0000000000000002-aaaa", "00004-aaa-0000000000000001-bbbb", False),  # the node does
        ("00004-n-0000000000000001-aaaa", "00004-n-0000000000000001-aaaa", False),  # itself
        ("00001-n-0000000000000001-bbbb", "00001-n-0000000000000001-aaaa", True),  # of one nanosecond
        ("00001-n-0000000000000001-aaaa", "00001-n-0000000000000001-bbbb", False),
    ],
)
def test_who_supersedes_whom(newer: str, older: str, supersedes_it: bool) -> None:
    assert supersedes(newer, older) is supersedes_it
