"""Records and claims on disk: what is foreign, newer or damaged is said to be so; and names of participants."""

from __future__ import annotations

import contextlib
import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from hpc_elastic.base import codec
from hpc_elastic.errors import IllegalTransitionError
from hpc_elastic.rendezvous.claims import OwnClaims, read_claim
from hpc_elastic.rendezvous.state import (
    Member,
    NodeFailure,
    RendezvousClosedError,
    RendezvousError,
    RendezvousStateError,
    RendezvousTimeoutError,
    RoundEvent,
    RoundRecord,
    Status,
    decode_record,
    new_uid,
    next_status,
    node_of,
    supersedes,
)
from hpc_elastic.store.file_store import LONGEST_SYMLINK
from tests.rigs.fake_clock import FakeClock
from tests.rigs.memory_store import MemoryStore, fits_key

TEXT = st.text(max_size=20)
JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), TEXT),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(TEXT, inner, max_size=3)),
    max_leaves=5,
)
RECORD = RoundRecord(
    number=7, epoch="e", term=2, leader="00000-a", round=3, status=Status.FINAL, members=(Member("00000-a", 0, 8),)
)


def test_unknown_keys_are_left_alone() -> None:
    value = {**RECORD.to_json(), "nonce": "12ab", "from_the_future": [1]}
    assert decode_record(7, value, run_id="r") == RECORD


@pytest.mark.parametrize("version", [0, 2, "1", None])
def test_another_version_is_named(version: object) -> None:
    with pytest.raises(RendezvousStateError, match=r"record 7 is of format version") as caught:
        decode_record(7, {**RECORD.to_json(), "v": version}, run_id="my run")
    assert repr(version) in str(caught.value)
    assert "'my run'" in str(caught.value)


@pytest.mark.parametrize("key", [key for key in RECORD.to_json() if key != "v"])
@given(garbage=JSON)
def test_a_damaged_record_is_said_to_be_so(key: str, garbage: object) -> None:
    value = RECORD.to_json()
    for damaged in ({**value, key: garbage}, {k: v for k, v in value.items() if k != key}):
        with contextlib.suppress(RendezvousStateError):  # nothing else comes out
            decode_record(7, damaged, run_id="r")


@pytest.mark.parametrize(
    "change",
    [
        {"status": "melting"},
        {"outcome": "glorious"},
        {"members": [["a", 1]]},
        {"members": 5},
        {"members": [["a", "b", "c"]]},
        {"term": None},
        {"round": float("inf")},
        {"lost": ["x"]},
        {"memory": ["f", "once"]},
        {"memory": None},
    ],
)
def test_nonsense_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(RendezvousStateError, match="unreadable"):
        decode_record(7, {**RECORD.to_json(), **change}, run_id="r")


def test_a_record_of_a_few_nodes_fits_into_a_symlink() -> None:
    """The cheapest and the only untearable form: 4 nodes with long names must not fall out of it."""
    members = tuple(Member(f"{n:05d}-node{n:04d}.example.org-{n:016x}-abcd", n, 8) for n in range(4))
    record = replace(RECORD, members=members, reason="r" * 100, master="10.10.10.10 29500 1", lost=(4, 5))
    assert len(json.dumps({**record.to_json(), "nonce": "0" * 16}, separators=(",", ":"))) < LONGEST_SYMLINK


FAILURE = NodeFailure(node=3, fingerprint="F", failure_class="root", retryable=True, message="boom", step=9, seconds=2)


def test_a_long_message_is_cut() -> None:
    claims = OwnClaims(store := MemoryStore(), "00001-a")
    claims.sum_up_failures(0, replace(FAILURE, message="m" * 5000))
    found = read_claim(NodeFailure, store.get(claims.flush()[0]))
    assert found is not None
    assert 100 < len(found.message) < 900


@given(garbage=st.dictionaries(st.sampled_from([*codec.to_json(FAILURE)]), JSON))
def test_claims_that_make_no_sense_are_none(garbage: dict[str, object]) -> None:
    read_claim(NodeFailure, json.dumps(garbage))
    assert read_claim(NodeFailure, "{}") is None


@pytest.mark.parametrize("key", ["node", "step", "seconds"])
@pytest.mark.parametrize("value", [None, "x", []])
def test_a_failure_without_sensible_numbers_is_none(key: str, value: object) -> None:
    assert codec.readable(NodeFailure, {**codec.to_json(FAILURE), key: value}) is None


# -- what may follow what in the log: every status with every event


J, Z, F, C = Status.JOINABLE, Status.FROZEN, Status.FINAL, Status.CLOSED
E = RoundEvent
LEGAL = {
    **{(status, event): status for status in (J, Z, F) for event in (E.TAKE_OVER, E.ASK, E.HEARD, E.NOTICE)},
    **{(status, E.CLOSE): C for status in (J, Z, F)},
    (J, E.ANNOUNCE): J,
    (J, E.FREEZE): Z,
    (Z, E.CONFIRM): F,
    (Z, E.REOPEN): J,
    (F, E.ANNOUNCE): F,
    (F, E.AGREE): F,
    (F, E.REOPEN): J,
}


@pytest.mark.parametrize("event", RoundEvent)
@pytest.mark.parametrize("status", Status)
def test_every_pair_is_legal_or_refused_by_name(status: Status, event: RoundEvent) -> None:
    if (status, event) in LEGAL:
        assert next_status(status, event) is LEGAL[status, event]
        return
    with pytest.raises(IllegalTransitionError) as caught:
        next_status(status, event)
    assert (caught.value.state, caught.value.event) == (status.value, event.value)
    assert status.value in str(caught.value)
    assert event.value in str(caught.value)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (RendezvousClosedError(run_id="r/1", outcome="failed", reason="boom"), ["'r/1'", "failed", "boom"]),
        (
            RendezvousTimeoutError(run_id="r", missing_count=1, expected=4, timeout=600.0, missing="nid003", fewer=3),
            ["1 of 4", "600 s", "nid003", "fewer nodes, 3-4"],
        ),
        (RendezvousStateError(run_id="r", number=7, why="unreadable"), ["record 7", "unreadable"]),
    ],
)
def test_errors_say_what(error: RendezvousError, words: list[str]) -> None:
    for word in words:
        assert word in str(error)


# -- names of participants: unique, readable, and in order on one node


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
