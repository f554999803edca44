"""How often a participant looks: as documented, within the budget, and such that no node is missed falsely."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from hpc_elastic.rendezvous.schedule import OPERATIONS_PER_PERIOD, PollIntervals, poll_intervals
from hpc_elastic.run.spec import RendezvousSettings

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


def test_no_interval_is_shorter_than_given() -> None:
    for nodes in SIZES:
        found = intervals(
            nodes, poll_interval=7, heartbeat_interval=400, heartbeat_ttl=2000, beat_interval=9, beat_silence=30
        )
        assert found.poll >= 7
        assert found.poll_connected >= 7
        assert found.heartbeat >= 400
        assert found.heartbeat_connected >= 400
        assert found.lease >= 2000
        assert found.beat >= 9


def test_a_server_that_can_take_more_is_looked_at_more_often() -> None:
    settings = RendezvousSettings(max_nodes=1024, expected_nodes=1024)
    before, after = poll_intervals(settings), poll_intervals(replace(settings, operations_per_second=1500))
    assert after.poll == pytest.approx(before.poll / 10)
    assert after.lease == pytest.approx(before.lease / 10)
