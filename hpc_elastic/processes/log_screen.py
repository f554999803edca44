"""A few lines of a terminal, for output that moves the cursor up to draw over lines that have ended. Pure.

Several progress bars at once (tqdm with positions, rich) are drawn so, ten times a second each: every redraw ends lines
that are no news. The rows are kept here, and the caller asks now and then for those that changed.
"""

from __future__ import annotations

import re

from hpc_elastic.lazy_pattern import pattern

CURSOR_UP = pattern(rb"\x1b\[[0-9]*[AF]")
_STEP = pattern(rb"\n|\r|\x1b\[([0-9]*)([ABEFJK])")
_ROWS = 32
_BYTES = 32 << 10


class Screen:
    """Rows that are drawn and drawn over. At most 32 KiB and one `feed` more."""

    __slots__ = ("_at", "_is_home", "_rows", "_shown", "has_moved")

    def __init__(self) -> None:
        self._rows = [b""]
        self._shown: list[bytes | None] = [None]
        """What was last told of each row; None: nothing yet."""
        self._at = 0
        self._is_home = False
        self.has_moved = False
        """Whether the cursor went up since this was last set to False: whether this is still needed."""

    def feed(self, data: bytes) -> bytes:
        """Draw. Returns rows that have left the screen at its top, as lines (mostly none)."""
        at = 0
        for step in _STEP.finditer(data):
            if step.start() > at:
                self._draw(data[at : step.start()])
            at = step.end()
            self._step(step)
        if at < len(data):
            self._draw(data[at:])
        return self._scroll()

    def take(self, *, again: bool) -> bytes:
        """The rows that changed since they were told, as lines.

        Args:
            again: Those too that were told before and are drawn over now and then; else what is new alone.
        """
        told = b""
        for number, row in enumerate(self._rows):
            before = self._shown[number]
            if row != before and row.strip() and (again or before is None):
                told += row + b"\n"
                self._shown[number] = row
        return told

    def close(self) -> tuple[bytes, bytes]:
        """Everything that was not told, as lines, and the row of the cursor where it is the last one."""
        tail = b""
        if self._at == len(self._rows) - 1 and self._rows[-1] != self._shown[-1]:
            tail = self._rows[-1]
            self._rows[-1] = b""
        return self.take(again=True), tail

    def _draw(self, text: bytes) -> None:
        if self._is_home:
            self._rows[self._at] = text
            self._is_home = False
        else:
            self._rows[self._at] += text

    def _step(self, step: re.Match[bytes]) -> None:
        if step[0] == b"\r":
            self._is_home = True
        elif step[0] == b"\n":
            self._down(1)
            self._is_home = True
        elif step[2] in b"AF":
            self._up(_number(step[1]))
            self._is_home |= step[2] == b"F"
        elif step[2] in b"BE":
            self._down(min(_number(step[1]), _ROWS))
            self._is_home |= step[2] == b"E"
        else:
            self._erase(step[1], below=step[2] == b"J")

    def _up(self, count: int) -> None:
        self.has_moved = True
        missing = min(count, _ROWS) - self._at
        if missing > 0:  # rows that were told before there was a screen
            self._rows[:0] = [b""] * missing
            self._shown[:0] = [b""] * missing
        self._at = max(0, self._at - count) if missing <= 0 else 0

    def _down(self, count: int) -> None:
        self._at += count
        while self._at >= len(self._rows):
            self._rows.append(b"")
            self._shown.append(None)

    def _erase(self, how: bytes, *, below: bool) -> None:
        if self._is_home or how in (b"1", b"2"):
            self._rows[self._at] = b""
        if below:
            for number in range(0 if how == b"2" else self._at + 1, len(self._rows)):
                self._rows[number] = b""

    def _scroll(self) -> bytes:
        gone = b""
        while len(self._rows) > 1 and (len(self._rows) > _ROWS or sum(map(len, self._rows)) > _BYTES):
            row, shown = self._rows.pop(0), self._shown.pop(0)
            self._at = max(0, self._at - 1)
            if row != shown and row.strip():
                gone += row + b"\n"
        if len(self._rows[0]) > _BYTES:
            gone += self._rows[0] + b"\n"
            self._rows[0] = b""
        return gone


def _number(digits: bytes) -> int:
    return max(1, int(digits[:4] or b"1"))
