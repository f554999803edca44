"""When a participant looks at the files, how often, and how long its lease holds."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from hpc_elastic.rendezvous.schedule import (
    LEASE_OVER,
    OPERATIONS_PER_PERIOD,
    Lease,
    PollIntervals,
    Schedule,
    is_round_over,
    poll_intervals,
)
from hpc_elastic.rendezvous.state import Member, RoundRecord, Status
from hpc_elastic.run.paths import Outcome
from hpc_elastic.run.spec import RendezvousSettings
from tests.rigs.fake_clock import FakeClock

PAGE = Path(__file__).resolve().parents[3] / "docs" / "reference" / "rendezvous.md"
SIZES = (1, 8, 64, 256, 1024, 2550, 8192, 50_000)


def intervals(nodes: int, **more: float) -> PollIntervals:
    return poll_intervals(RendezvousSettings(max_nodes=nodes, expected_nodes=nodes, **more))  # type: ignore[arg-type]


def table() -> list[str]:
    """The page's, to be put there where this test says that it is another."""
    sizes = (8, 64, 256, 1024, 8192)
    lines = ["| nodes | " + " | ".join(map(str, sizes)) + " |", "|---|" + "---:|" * len(sizes)]
    for title, of in (
        ("between two looks at the log, in touch", lambda p: p.poll_connected),
        ("the same where no packets come through", lambda p: p.poll),
        ("between two heartbeats in the files, in touch", lambda p: p.heartbeat_connected),
        ("the same where no packets come through", lambda p: p.heartbeat),
        ("no heartbeat, lost after", lambda p: p.lease),
        ("between two beats", lambda p: p.beat),
        ("silent, and asked, after", lambda p: p.silence),
        ("time for the answer", lambda p: p.answer),
    ):
        lines.append(f"| {title} | " + " | ".join(f"{of(intervals(nodes)):.3g}" for nodes in sizes) + " |")
    return lines


def test_the_page_has_these_numbers() -> None:
    text = PAGE.read_text()
    _, _, rest = text.partition("<!-- intervals: begin -->\n")
    shown, _, _ = rest.partition("<!-- intervals: end -->")
    assert shown.splitlines() == table()


def test_a_few_nodes_go_by_the_settings() -> None:
    settings = RendezvousSettings()
    found = intervals(8)
    assert (found.poll, found.heartbeat, found.lease) == (1, settings.heartbeat_interval, settings.heartbeat_ttl)
    assert (found.beat, found.silence, found.answer) == (1, settings.beat_silence, settings.suspect_answer)
    assert found.first_look == found.coordinator == found.first_reading == 0


@pytest.mark.parametrize("nodes", SIZES)
def test_looks_and_heartbeats_stay_within_the_budget(nodes: int) -> None:
    found = intervals(nodes)
    if found.poll_connected > 2:  # below that, it is the shortest interval that counts
        most = max(150.0, nodes / 17)
        assert nodes * OPERATIONS_PER_PERIOD / found.poll_connected <= most
        assert nodes * OPERATIONS_PER_PERIOD / found.heartbeat_connected <= most


@pytest.mark.parametrize("nodes", SIZES)
@pytest.mark.parametrize("poll", [0.1, 1.0, 10.0])
def test_nobody_is_missed_before_it_can_have_answered(nodes: int, poll: float) -> None:
    found = intervals(nodes, poll_interval=poll, suspect_answer=4 * poll)
    assert found.silence >= 3 * found.beat
    # In touch, it hears within `beat` that it is not heard, notices it within a stride, and looks.
    assert found.answer >= found.beat + found.stride + found.poll_anxious
    # Not in touch, it looks when it always does.
    assert found.answer_unheard >= max(found.poll, found.poll_connected) * 1.15
    assert found.anxious > found.silence + found.answer
    assert found.lease >= 3 * found.heartbeat or found.heartbeat == RendezvousSettings().heartbeat_interval
    assert found.reading <= found.lease / 3


@pytest.mark.parametrize("nodes", SIZES)
def test_no_interval_is_shorter_than_given(nodes: int) -> None:
    found = intervals(
        nodes, poll_interval=7, heartbeat_interval=400, heartbeat_ttl=2000, beat_interval=9, beat_silence=30
    )
    assert min(found.poll, found.poll_connected) >= 7
    assert min(found.heartbeat, found.heartbeat_connected) >= 400
    assert found.lease >= 2000
    assert found.beat >= 9


def test_a_server_that_can_take_more_is_looked_at_more_often() -> None:
    settings = RendezvousSettings(max_nodes=1024, expected_nodes=1024)
    before, after = poll_intervals(settings), poll_intervals(replace(settings, operations_per_second=1500))
    assert after.poll == pytest.approx(before.poll / 10)
    assert after.lease == pytest.approx(before.lease / 10)


# -- when a participant looks at the files by itself


PACE = poll_intervals(RendezvousSettings(expected_nodes=2, poll_interval=1.0))
FINAL = RoundRecord(number=3, epoch="e", term=1, leader="a", notifier="", round=0, status=Status.FINAL, reason="")


def asleep() -> Schedule:
    """A coordinator's that has just looked at everything, at 100.0, while workers run."""
    watch = Schedule(PACE, random.Random(1), 0.0)
    assert watch.look_now(100.0, notified=False, connected=False)
    assert watch.survey_now(100.0, notified=False)
    assert watch.wait(100.0, FINAL, leads=True, connected=False) == pytest.approx(1.0)
    return watch


@pytest.mark.parametrize(("after", "looks"), [(0.5, False), (0.89, False), (0.91, True), (1.0, True), (1.3, True)])
def test_what_is_due_in_a_moment_is_done_with_the_beat_that_comes_before_it(after: float, looks: bool) -> None:
    """The wait ends with such a beat: a step that found nothing due would need another wake-up right after."""
    watch = asleep()
    assert watch.look_now(100.0 + after, notified=False, connected=False) == looks
    assert watch.survey_now(100.0 + after, notified=False) == looks
    left = watch.wait(100.0 + after, FINAL, leads=True, connected=False)
    assert left == pytest.approx(1.0 if looks else 1.0 - after)


def test_a_notification_is_looked_at_whenever_it_comes() -> None:
    watch = asleep()
    assert watch.look_now(100.1, notified=True, connected=False)
    assert watch.survey_now(100.1, notified=True)


def test_a_coordinator_that_hears_all_looks_half_as_often_until_somebody_falls_silent() -> None:
    watch = asleep()
    assert watch.look_now(101.0, notified=False, connected=False)
    assert watch.survey_now(101.0, notified=False)
    assert watch.wait(101.0, FINAL, leads=True, connected=False, idle=True) == pytest.approx(1.0)
    assert not watch.look_now(102.0, notified=False, connected=False)
    assert not watch.survey_now(102.0, notified=False)
    assert watch.wait(102.0, FINAL, leads=True, connected=False, idle=True) == pytest.approx(1.0)
    watch.update(idle=True)
    assert not watch.survey_now(102.0, notified=False)
    watch.update(idle=False)
    assert watch.look_now(102.0, notified=False, connected=False)
    assert watch.survey_now(102.0, notified=False)


@pytest.mark.parametrize(("nodes", "worth"), [(2, True), (2048, True), (8192, False)])
def test_many_nodes_are_looked_at_as_rarely_as_their_number_asks_for(nodes: int, worth: bool) -> None:
    found = poll_intervals(RendezvousSettings(expected_nodes=nodes))
    assert Schedule(found, random.Random(1), 0.0).is_idle_allowed is worth


# -- the lease before the workers: when it holds, when it is lost, and when the round is over


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
    began = page.clock.monotonic()
    page.clock.now += 30.0  # another gap, within the look
    page.lease.looked(began)
    assert page.lease.wants_look()
    assert page.left < 0
    page.lease.looked(page.clock.monotonic())
    assert not page.lease.renew()
    assert page.left > 1.0


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
    page.lease.note(record(number=8, round=7, lost=(1,)))
    assert page.left > 1.0
    page.lease.begin(6, page._show)
    assert page.lease.is_over, "before its workers start"


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
