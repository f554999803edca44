"""The lease that an agent puts before its workers: when it holds, when it is lost, and when the round is over."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from hpc_elastic.rendezvous.schedule import LEASE_OVER, Lease, is_round_over, poll_intervals
from hpc_elastic.rendezvous.state import Member, RoundRecord, Status
from hpc_elastic.run.paths import Outcome
from hpc_elastic.run.spec import RendezvousSettings
from tests.rigs.fake_clock import FakeClock

UIDS = ("00000-n0-0000000000000001-aaaa", "00001-n1-0000000000000001-bbbb")


def record(**changes: object) -> RoundRecord:
    members = tuple(Member(uid=uid, node=node, local_world_size=1) for node, uid in enumerate(UIDS))
    facts = {"number": 5, "round": 3, "status": Status.FINAL, "members": members, **changes}
    return RoundRecord(epoch="e", term=1, leader=UIDS[0], **facts)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "was_silent", "is_over"),
    [
        ({}, True, False),
        ({"members": record().members[:1]}, False, True),
        ({"lost": (1,)}, False, True),
        # It is waited for: the workers have their grace.
        ({"round": 4, "status": Status.JOINABLE}, True, False),
        ({"round": 4, "status": Status.JOINABLE, "lost": (1,)}, True, True),
        ({"round": 4, "status": Status.FROZEN}, False, True),
        ({"round": 4}, False, True),
        ({"round": 5, "status": Status.JOINABLE}, False, True),
        ({"status": Status.CLOSED, "outcome": Outcome.SUPERSEDED}, False, False),
        ({"status": Status.CLOSED, "outcome": Outcome.SUPERSEDED}, True, True),
        ({"status": Status.CLOSED, "outcome": Outcome.TOO_FEW_NODES}, True, True),
    ],
)
def test_a_round_is_over_where_others_may_train_in_its_place(
    changes: dict[str, object], was_silent: bool, is_over: bool
) -> None:
    found = is_round_over(record(**changes), round_index=3, uid=UIDS[1], node=1, was_silent=was_silent)
    assert found is is_over


class Page:
    """A lease, and what the workers see of it."""

    def __init__(self, *, has_beats: bool = True, silence: float = 7.0) -> None:
        self.clock = FakeClock()
        self._read, self.write = os.pipe2(os.O_NONBLOCK)
        self.lease = Lease(self.clock, uid=UIDS[1], node=1, questions=self._read)
        self.lease.set_intervals(poll_intervals(RendezvousSettings(heartbeat_ttl=20.0)), has_beats=has_beats)
        self.until = self.looked = 0.0
        self.lease.stepped(renews=True)
        self.lease.note(record())
        self.lease.begin(3, self._show)

    def _show(self, until_ns: int, looked_ns: int) -> None:
        self.until, self.looked = until_ns / 1e9, looked_ns / 1e9 if looked_ns > 0 else looked_ns

    @property
    def left(self) -> float:
        return self.until - self.clock.monotonic()

    def close(self) -> None:
        os.close(self._read)
        os.close(self.write)


@pytest.fixture
def page() -> Iterator[Page]:
    found = Page()
    yield found
    found.close()


def test_beats_renew_it_for_less_than_the_silence_that_others_bear(page: Page) -> None:
    for _ in range(50):  # while the files hang, say
        page.clock.now += 1.0
        assert not page.lease.renew()
        assert 1.0 < page.left < 6.0
    assert not page.lease.wants_look()


def test_after_a_gap_only_a_look_that_began_later_renews_it(page: Page) -> None:
    began_before = page.clock.monotonic()
    page.clock.now += 30.0
    assert page.left < 0
    assert page.lease.renew()
    page.clock.now += 1.0
    page.lease.looked(began_before)  # it hung meanwhile, and shows what was there then
    assert page.lease.renew()
    assert page.left < 0
    page.lease.looked(page.clock.monotonic())
    assert not page.lease.renew()
    assert page.left > 1.0


def test_a_gap_within_the_look_wants_another_one(page: Page) -> None:
    page.clock.now += 30.0
    assert page.lease.wants_look()
    began = page.clock.monotonic()
    page.clock.now += 30.0
    page.lease.looked(began)
    assert page.lease.wants_look()
    assert page.left < 0


def test_a_question_wants_one_look(page: Page) -> None:
    assert not page.lease.wants_look()
    os.write(page.write, b"??")
    assert page.lease.wants_look()
    page.clock.now += 0.5
    page.lease.looked(page.clock.monotonic())
    assert page.looked == page.clock.monotonic()
    assert not page.lease.wants_look()


def test_once_over_it_never_holds_again_in_this_round(page: Page) -> None:
    page.lease.note(record(number=6, round=4))
    page.lease.looked(page.clock.monotonic())
    page.lease.renew()
    assert (page.looked, page.left < 0, page.lease.is_over) == (LEASE_OVER, True, True)
    page.lease.note(record(number=7, round=5))
    page.lease.begin(5, page._show)
    assert page.left > 1.0
    page.lease.end()
    page.lease.note(record(number=8, round=7))
    assert page.left > 1.0


def test_a_round_that_is_over_before_its_workers_start_is_over(page: Page) -> None:
    page.lease.note(record(number=7, round=5, lost=(1,)))
    page.lease.begin(4, page._show)
    assert page.lease.is_over


@pytest.mark.parametrize(("seconds", "beats"), [(10, True), (10, False), (19, True), (19, False)])
def test_a_silence_as_long_as_the_next_attempt_waits_costs_the_grace(page: Page, seconds: int, beats: bool) -> None:
    """The next attempt waits 20 s for an agent that does not answer; beats alone are no answer."""
    for _ in range(seconds):
        page.clock.now += 1.0
        if beats:  # while the files hang
            page.lease.renew()
    page.lease.note(record(number=6, status=Status.CLOSED, outcome=Outcome.SUPERSEDED))
    assert page.lease.is_over is (seconds == 19)


def test_without_beats_a_step_renews_it_for_longer() -> None:
    page = Page(has_beats=False)
    page.clock.now += 5.0
    assert not page.lease.wants_look()
    page.clock.now += 10.0
    assert page.lease.wants_look()
    page.close()
