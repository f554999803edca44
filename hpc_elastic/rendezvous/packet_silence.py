"""When each node's packets came last, by this process' own clock; and which nodes were asked whether they live."""

from __future__ import annotations

from collections.abc import Iterable


class PacketSilence:
    """Bookkeeping of one participant. Times are seconds of its monotonic clock."""

    def __init__(self) -> None:
        self._heard: dict[str, float] = {}
        self._asked: dict[str, float] = {}
        self._hears: dict[str, bool] = {}
        self._out: dict[str, float] = {}
        """Who answered through the files and is not heard: when it was heard last."""
        self._back: list[tuple[str, float, float]] = []

    def heard(self, uids: Iterable[str], now: float, *, hears_us: bool | None = True) -> None:
        """Args:
        uids: Whose datagrams came.
        now: When.
        hears_us: Whether they say that they hear this participant; None: they did not say.
        """
        for uid in uids:
            self._heard[uid] = now
            if (since := self._out.pop(uid, None)) is not None:
                self._back.append((uid, since, now))
            if hears_us is not None:
                self._hears[uid] = hears_us

    def hears_us(self, uid: str) -> bool:
        """Whether its last word was that it hears this participant."""
        return self._hears.get(uid, False)

    def expect(self, uids: Iterable[str], now: float) -> None:
        """Those that were not heard yet are to be heard from now on: from now on their silence means something."""
        for uid in uids:
            self._heard.setdefault(uid, now)

    def silence(self, uid: str, now: float) -> float | None:
        """Seconds since `uid` was heard; None where it was not heard at all, which says nothing."""
        at = self._heard.get(uid)
        return None if at is None else now - at

    def forget(self, uid: str) -> None:
        """It has to be heard again before its silence means anything: no packet of its comes through, and it lives."""
        self._heard.pop(uid, None)

    def asked(self, suspects: Iterable[str], now: float) -> None:
        """These are suspects now: remember since when, for those that were not before."""
        self._asked = {uid: self._asked.get(uid, now) for uid in suspects}

    def answered(self, uid: str) -> None:
        """It was asked, and has answered through the files: it lives, and no packet of its comes through."""
        if (at := self._heard.get(uid)) is not None:
            self._out.setdefault(uid, at)
        self.forget(uid)

    def take_back(self) -> list[tuple[str, float, float]]:
        """Whose packets come through again since the last call, from when to when they did not."""
        taken, self._back = self._back, []
        return taken

    def out(self) -> dict[str, float]:
        """Whose packets do not come through, though it lives: since when."""
        return dict(self._out)

    def lost(self, uids: Iterable[str]) -> None:
        """These are lost: their silence was no matter of packets."""
        for uid in uids:
            self._out.pop(uid, None)

    def asked_since(self, uid: str) -> float | None:
        return self._asked.get(uid)

    def packets_dropped_for(self, seconds: float, *, now: float) -> None:
        """This host may have dropped the packets of the last `seconds`: that time counts as silence of no node."""
        for uid in self._heard:
            self._heard[uid] = min(now, self._heard[uid] + seconds)

    def paused_for(self, seconds: float, *, now: float) -> None:
        """This process was paused for so long: that time counts as silence of no node, and for no answer."""
        for times in (self._heard, self._asked, self._out):
            for uid in times:
                times[uid] = min(now, times[uid] + seconds)
