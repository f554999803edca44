"""When an agent counts as stopped."""

from __future__ import annotations

from hpc_elastic.workers.guardian import StoppedWatch


def looks(*seen: tuple[float, str]) -> list[bool]:
    watch = StoppedWatch(limit=3.0, longest_gap=2.5)
    return [watch.look(state, now) for now, state in seen]


def test_it_counts_from_the_first_look_that_shows_it_stopped() -> None:
    assert looks((0, "S"), (1, "T"), (2, "T"), (3, "T"), (4, "T"), (5, "T")) == [False] * 4 + [True] * 2


def test_an_agent_that_runs_in_between_begins_anew() -> None:
    assert looks((0, "T"), (2, "T"), (3, "R"), (4, "T"), (6, "T")) == [False] * 5


def test_a_debugger_does_not_count() -> None:
    assert looks(*[(now, "t") for now in range(9)]) == [False] * 9


def test_a_suspended_job_does_not_count() -> None:
    """The guardian slept with the agent, and cannot tell for how long that was stopped."""
    assert looks((0, "T"), (1, "T"), (600, "T"), (601, "T"), (602, "S")) == [False] * 5
