"""Records and claims on disk: they come back as they were; what is foreign, newer or damaged is said to be so."""

from __future__ import annotations

import contextlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from hpc_elastic.base import codec
from hpc_elastic.rendezvous.claims import OwnClaims, read_claim
from hpc_elastic.rendezvous.state import (
    FailureMemory,
    HangMark,
    Member,
    NodeFailure,
    RendezvousStateError,
    RoundRecord,
    Status,
    decode_record,
)
from hpc_elastic.run.paths import Outcome
from hpc_elastic.store.file_store import LONGEST_SYMLINK
from tests.rigs.memory_store import MemoryStore

TEXT = st.text(max_size=20)
SMALL = st.integers(-1, 10**6)
HANGS = st.none() | st.builds(HangMark, SMALL, st.integers(0, 10**6).map(float))
MEMBERS = st.lists(st.builds(Member, uid=TEXT, node=SMALL, local_world_size=SMALL), max_size=4).map(tuple)
RECORDS = st.builds(
    RoundRecord,
    number=st.integers(1, 10**9),
    epoch=TEXT,
    term=SMALL,
    leader=TEXT,
    round=SMALL,
    status=st.sampled_from(Status),
    members=MEMBERS,
    restarts_used=SMALL,
    waiting=SMALL,
    lost=st.lists(SMALL, max_size=4).map(tuple),
    reason=TEXT,
    master=TEXT,
    outcome=st.one_of(st.none(), st.sampled_from(Outcome)),
    retryable=st.booleans(),
    memory=st.builds(FailureMemory, fingerprint=TEXT, times=SMALL, step=SMALL),
    hang=HANGS,
)
JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), TEXT),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(TEXT, inner, max_size=3)),
    max_leaves=5,
)
RECORD = RoundRecord(
    number=7, epoch="e", term=2, leader="00000-a", round=3, status=Status.FINAL, members=(Member("00000-a", 0, 8),)
)


@given(record=RECORDS)
def test_records_come_back_as_they_were(record: RoundRecord) -> None:
    assert decode_record(record.number, json.loads(json.dumps(record.to_json())), run_id="r") == record


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


def test_members_are_found_by_uid() -> None:
    assert RECORD.member("00000-a") == RECORD.members[0]
    assert RECORD.member("00000-b") is None


FAILURE = NodeFailure(node=3, fingerprint="F", failure_class="root", retryable=True, message="boom", step=9, seconds=2)


@given(
    failure=st.builds(
        NodeFailure,
        node=SMALL,
        fingerprint=TEXT,
        failure_class=TEXT,
        retryable=st.booleans(),
        message=TEXT,
        step=SMALL,
        seconds=st.integers(0, 10**6).map(float),
        hang=HANGS,
    )
)
def test_a_nodes_failure_comes_back(failure: NodeFailure) -> None:
    assert read_claim(NodeFailure, codec.dumps(failure)) == failure


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
