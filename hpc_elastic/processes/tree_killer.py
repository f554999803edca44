"""How to end processes that multiply while they are being ended."""

from __future__ import annotations

import signal
from collections.abc import Iterable

from hpc_elastic.processes.tree import Proc

_KILLING_LOOKS = 3
_MOST_STOPS = 400


class TreeKiller:
    """Chooses the signal for the processes that were found in a look. Pure.

    SIGKILL, as a rule. Where new ones appear look after look, each kill makes room for another fork within the user's
    limit of processes, so they are stopped instead: who is stopped forks no more and yet takes a place. Once a look
    finds nobody new, all are there and none runs: SIGKILL for all at once.
    """

    def __init__(self) -> None:
        self._known: set[tuple[int, int]] = set()
        self._looks = 0
        self._stops = 0

    def next_signal(self, found: Iterable[Proc]) -> signal.Signals:
        """Take a look's result in.

        Returns:
            SIGKILL or SIGSTOP, for each of `found`.
        """
        now = {(proc.pid, proc.starttime) for proc in found}
        new = now - self._known
        self._known |= now
        self._looks += 1
        if self._looks <= _KILLING_LOOKS or not new or self._stops >= _MOST_STOPS:
            return signal.SIGKILL
        self._stops += 1
        return signal.SIGSTOP
