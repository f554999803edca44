"""Of which records notice is given."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from hpc_elastic.agent.restart_policy import HANG_FINGERPRINT
from hpc_elastic.launch.hooks import FailureNotice
from hpc_elastic.rendezvous.state import FailureMemory, HangMark, Member, Members, RoundRecord, Status
from hpc_elastic.run.paths import Outcome

FINAL = RoundRecord(number=1, epoch="e", term=1, leader="a", round=0, status=Status.FINAL, reason="start")


AGAIN = replace(FINAL, number=2, round=1, restarts_used=1, reason="rank 0: SIGKILL")
GROWN = replace(FINAL, number=2, round=1)
HUNG = replace(AGAIN, reason="start", hang=HangMark(3, 9.0))
CLOSED = replace(FINAL, number=2, status=Status.CLOSED, outcome=Outcome.FAILED, reason="restarts exhausted")
HANG_MEMORY = FailureMemory(fingerprint=f"{HANG_FINGERPRINT}:x", times=1, step=3)


def met(round_index: int, *members: tuple[str, int]) -> RoundRecord:
    found = Members(Member(uid=uid, node=node, local_world_size=1) for uid, node in members)
    return replace(FINAL, number=1 + round_index, round=round_index, members=found)


@pytest.mark.parametrize(
    ("records", "told"),
    [
        # The first failure alone.
        ([FINAL, AGAIN, replace(AGAIN, number=3, round=2, restarts_used=2)], [[], ["failure"], []]),
        # A lost node is one, a bigger round is none.
        ([FINAL, GROWN, replace(GROWN, number=3, round=2, lost=(1,))], [[], [], ["failure"]]),
        # An agent that another takes the place of is one, a new member is none.
        ([met(0, ("a", 0)), met(1, ("a", 0), ("b", 1)), met(2, ("a", 0), ("c", 1))], [[], [], ["failure"]]),
        # Each hang once.
        (
            [FINAL, HUNG, replace(HUNG, number=3), replace(HUNG, number=4, round=2, restarts_used=2)],
            [[], ["hang", "failure"], [], ["hang"]],
        ),
        ([FINAL, CLOSED], [[], ["failure"]]),
        ([FINAL, replace(CLOSED, memory=HANG_MEMORY)], [[], ["hang", "failure"]]),
        ([FINAL, replace(CLOSED, outcome=Outcome.SUCCEEDED)], [[], []]),
    ],
)
def test_what_each_record_gives_notice_of(records: list[RoundRecord], told: list[list[str]]) -> None:
    found = FailureNotice()
    assert [[what for what, _ in found.take(record)] for record in records] == told
