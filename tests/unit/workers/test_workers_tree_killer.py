"""Which signal those get who multiply."""

from __future__ import annotations

import signal

from hpc_elastic.workers.tree import Proc, TreeKiller


def _procs(*pids: int) -> list[Proc]:
    return [Proc(pid=pid, starttime=1, ppid=1, pgid=pid, sid=pid, state="S", name="x") for pid in pids]


def test_those_who_stand_still_are_killed() -> None:
    killer = TreeKiller()
    assert [killer.next_signal(_procs(1, 2)) for _ in range(9)] == [signal.SIGKILL] * 9


def test_those_who_multiply_are_stopped_until_all_are_known() -> None:
    killer = TreeKiller()
    sent = [killer.next_signal(_procs(*range(10 * look))) for look in range(1, 6)]
    assert sent == [signal.SIGKILL] * 3 + [signal.SIGSTOP] * 2
    assert killer.next_signal(_procs(*range(50))) is signal.SIGKILL
    assert killer.next_signal(_procs(60)) is signal.SIGSTOP


def test_it_does_not_stop_them_for_ever() -> None:
    """Where each one that is stopped is followed by another without end, somebody must be killed at last."""
    killer = TreeKiller()
    sent = [killer.next_signal(_procs(look)) for look in range(500)]
    assert sent[-1] is signal.SIGKILL
