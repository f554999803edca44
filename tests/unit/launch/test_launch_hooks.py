"""Of which records notice is given."""

from __future__ import annotations

from msgspec.structs import replace

from hpc_elastic.agent.restart_policy import HANG_FINGERPRINT
from hpc_elastic.base.outcome import Outcome
from hpc_elastic.launch.hooks import FailureNotice
from hpc_elastic.rendezvous.state import FailureMemory, HangMark, Member, Members, RoundRecord, Status

FINAL = RoundRecord(number=1, epoch="e", term=1, leader="a", round=0, status=Status.FINAL, reason="start")


def kinds(*records: RoundRecord) -> list[list[str]]:
    found = FailureNotice()
    return [[what for what, _ in found.take(record)] for record in records]


def test_the_first_failure_alone() -> None:
    again = replace(FINAL, number=2, round=1, restarts_used=1, reason="rank 0: SIGKILL")
    assert kinds(FINAL, again, replace(again, number=3, round=2, restarts_used=2)) == [[], ["failure"], []]


def test_a_lost_node_is_a_failure_and_a_bigger_round_is_none() -> None:
    grown = replace(FINAL, number=2, round=1)
    assert kinds(FINAL, grown, replace(grown, number=3, round=2, lost=(1,))) == [[], [], ["failure"]]


def test_an_agent_that_another_takes_the_place_of_is_a_failure_and_a_new_member_is_none() -> None:
    first, second, again = (
        Member(uid=uid, node=node, local_world_size=1) for uid, node in (("a", 0), ("b", 1), ("c", 1))
    )
    alone = replace(FINAL, members=Members((first,)))
    grown = replace(FINAL, number=2, round=1, members=Members((first, second)))
    replaced = replace(FINAL, number=3, round=2, members=Members((first, again)))
    assert kinds(alone, grown, replaced) == [[], [], ["failure"]]


def test_each_hang_once() -> None:
    hung = replace(FINAL, number=2, round=1, restarts_used=1, hang=HangMark(3, 9.0))
    later = replace(hung, number=4, round=2, restarts_used=2)
    assert kinds(FINAL, hung, replace(hung, number=3), later) == [[], ["hang", "failure"], [], ["hang"]]


def test_an_end_by_a_failure_or_a_hang() -> None:
    closed = replace(FINAL, number=2, status=Status.CLOSED, outcome=Outcome.FAILED, reason="restarts exhausted")
    hung = replace(closed, memory=FailureMemory(fingerprint=f"{HANG_FINGERPRINT}:x", times=1, step=3))
    assert kinds(FINAL, closed) == [[], ["failure"]]
    assert kinds(FINAL, hung) == [[], ["hang", "failure"]]
    assert kinds(FINAL, replace(closed, outcome=Outcome.SUCCEEDED)) == [[], []]
