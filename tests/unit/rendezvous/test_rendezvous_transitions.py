"""What may follow what in the log: every status with every event."""

from __future__ import annotations

import pickle

import pytest

from hpc_elastic.errors import IllegalTransitionError
from hpc_elastic.rendezvous.state import (
    RendezvousClosedError,
    RendezvousError,
    RendezvousStateError,
    RendezvousTimeoutError,
    RoundEvent,
    Status,
    next_status,
)

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
def test_errors_say_what_and_pickle(error: RendezvousError, words: list[str]) -> None:
    for word in words:
        assert word in str(error)
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), again.facts) == (type(error), str(error), error.facts)
