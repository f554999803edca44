"""When an agent counts as stopped: the others go on without it, and its workers must not run beside theirs."""

from __future__ import annotations

_STOPPED = "T"


class StoppedWatch:
    """What somebody who looks at the agent now and then makes of it. Pure."""

    def __init__(self, *, limit: float, longest_gap: float) -> None:
        """Args:
        limit: Seconds for which it has to be seen stopped.
        longest_gap: Between two looks; where more time has passed, the looker was stopped itself (the whole job was
            suspended), and begins anew.
        """
        self._limit = limit
        self._longest_gap = longest_gap
        self._since: float | None = None
        self._looked: float | None = None

    def look(self, state: str, now: float) -> bool:
        """Take a look in.

        Args:
            state: The process' state, as ps shows it. A debugger's ``t`` is not meant.
            now: Seconds, monotonic.

        Returns:
            Whether it has been stopped for so long that its workers are to be ended.
        """
        suspended = self._looked is not None and now - self._looked > self._longest_gap
        self._looked = now
        if state != _STOPPED:
            self._since = None
        elif self._since is None or suspended:
            self._since = now
        return self._since is not None and now - self._since >= self._limit
