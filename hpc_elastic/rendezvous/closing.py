"""Closing a run from outside its participants: whoever creates the next record of the log does it."""

from __future__ import annotations

import errno
import secrets

from hpc_elastic.outcome import Outcome
from hpc_elastic.rendezvous.claims import read_claims
from hpc_elastic.rendezvous.coordinator import closed_after
from hpc_elastic.rendezvous.round_log import RoundLog
from hpc_elastic.rendezvous.state import RoundRecord, Status
from hpc_elastic.store.base import Store


def close_run(store: Store, run_id: str, outcome: Outcome, reason: str) -> None:
    """Append the closing record, also where nothing was there yet. The first one to close wins.

    Raises:
        OSError: a passing fault; the call may be repeated.
        RendezvousStateError: the log can't be understood.
    """
    log = RoundLog(store, run_id)
    while True:
        record = log.latest()
        if record is None:
            closed = _closed_at_once(store, outcome, reason)
        elif record.status is Status.CLOSED:
            return
        else:
            closed = closed_after(record, outcome, reason)
        if log.append(closed):
            return


def close_if_last(store: Store, run_id: str) -> None:
    """Close where all that take part, or wait, have said goodbye.

    Each node says its own goodbye before it looks, so at least the last one sees all.
    """
    record = RoundLog(store, run_id).latest()
    if record is None or record.status is Status.CLOSED:
        return
    here, following = read_claims(store, record.round), read_claims(store, record.round + 1)
    everyone = {m.uid for m in record.members} | {*here.get("join", ()), *following.get("join", ())}
    if not everyone <= set(store.list("bye")):
        return
    done = record.status is Status.FINAL and {m.uid for m in record.members} <= set(here.get("done", ()))
    if done:
        close_run(store, run_id, Outcome.SUCCEEDED, "all workers ended with 0")
    else:
        close_run(store, run_id, Outcome.FAILED, "all nodes left")


def _closed_at_once(store: Store, outcome: Outcome, reason: str) -> RoundRecord:
    store.put_if_absent("epoch/id", secrets.token_hex(8))
    epoch = store.get("epoch/id")
    if epoch is None:
        raise OSError(errno.EIO, "the store's epoch can't be read yet")
    return RoundRecord(
        number=1, epoch=epoch, term=1, leader="", round=0, status=Status.CLOSED, outcome=outcome, reason=reason
    )
