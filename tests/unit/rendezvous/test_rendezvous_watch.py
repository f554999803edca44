"""When a participant looks at the files by itself."""

from __future__ import annotations

import random

import pytest

from hpc_elastic.rendezvous.schedule import Schedule, poll_intervals
from hpc_elastic.rendezvous.state import RoundRecord, Status
from hpc_elastic.run.spec import RendezvousSettings

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


def test_many_nodes_are_looked_at_as_rarely_as_their_number_asks_for() -> None:
    def worth(nodes: int) -> bool:
        intervals = poll_intervals(RendezvousSettings(expected_nodes=nodes))
        return Schedule(intervals, random.Random(1), 0.0).is_idle_allowed

    assert worth(2)
    assert worth(2048)
    assert not worth(8192)
