"""From a stream's bytes to lines for the job log. Pure; bytes in, bytes out, valid UTF-8 or not.

The job log shows what a terminal would show, one line at a time: a progress bar that redraws itself with carriage
returns, or several that move the cursor up, appear as their latest state whenever they are flushed (the caller does so
every few seconds), not as each of their redraws. What else steers a terminal is taken out by `ansi.readable` when the
lines are written. The per-rank files hold every byte as it came.
"""

from __future__ import annotations

from hpc_elastic.processes.ansi import unfinished
from hpc_elastic.processes.log_screen import CURSOR_UP, Screen

LONGEST_PARTIAL = 16 << 10
"""Bytes without a line end after which they are shown as a line of their own."""
_SCREENFUL = 64 << 10
"""Who prints more than this at once is not drawing."""


class LineSplitter:
    """One stream's lines: whole ones come out, the beginning of the next one waits. At most 48 KiB."""

    __slots__ = ("_is_drawn", "_is_shown", "_screen", "_tail")

    def __init__(self) -> None:
        self._tail = b""
        self._screen: Screen | None = None
        self._is_drawn = False
        """Whether the line that has begun was written over by a carriage return."""
        self._is_shown = False
        """Whether a state of it was shown already."""

    @property
    def has_partial(self) -> bool:
        """Whether a line has begun and not ended, or lines may be drawn over."""
        return bool(self._tail) or self._screen is not None

    def feed(self, data: bytes) -> bytes:
        """Take the next bytes; returns whole lines, each with its line feed (possibly none)."""
        if self._screen is None and b"\x1b" in data and len(data) <= _SCREENFUL and CURSOR_UP.search(self._tail + data):
            self._screen, self._tail, data = Screen(), b"", self._tail + data
        if self._screen is not None:
            if len(data) <= _SCREENFUL:
                return self._draw(self._screen, data)
            return self._end_screen() + self.feed(data)
        text = self._tail + data
        if b"\r" in text:
            whole, self._tail = _as_a_terminal(text)
            self._is_drawn = b"\r" in text[text.rfind(b"\n") + 1 :] or (self._is_drawn and not whole)
        else:
            cut = text.rfind(b"\n") + 1
            whole, self._tail = text[:cut], text[cut:]
            self._is_drawn = self._is_drawn and not whole
        if whole:
            if self._is_shown and whole[:1] == b"\n":
                whole = whole[1:]  # the end of what was shown as a line
            self._is_shown = False
        if len(self._tail) > LONGEST_PARTIAL:
            whole += self.flush()
        return whole

    def flush(self, *, again: bool = True, final: bool = False) -> bytes:
        """The line that has begun, as a line (possibly none), or what changed of the lines that are drawn over.

        Args:
            again: Later states of what was shown already, too.
            final: No more comes: also what may be half a character or escape sequence.
        """
        if self._screen is not None:
            told = self._screen.take(again=again or final)
            if final or (again and not self._screen.has_moved):
                told += self._end_screen()
            elif again:
                self._screen.has_moved = False
            if not final:
                return told
            return told + self.flush(final=True)
        if self._is_drawn and self._is_shown and not (again or final):
            return b""
        cut = len(self._tail) - (0 if final else unfinished(self._tail))
        line, self._tail = self._tail[:cut].rstrip(b"\r"), self._tail[cut:]
        if not line or (self._is_drawn and not line.strip()):
            return b""  # a bar that was wiped away
        self._is_drawn, self._is_shown = False, True
        return line + b"\n"

    def _draw(self, screen: Screen, data: bytes) -> bytes:
        # A sequence that has only begun waits for its rest.
        text = self._tail + data
        cut = len(text) - unfinished(text)
        self._tail = text[cut:]
        return screen.feed(text[:cut])

    def _end_screen(self) -> bytes:
        assert self._screen is not None
        told, row = self._screen.close()
        self._tail, self._screen, self._is_shown = row + self._tail, None, not row
        return told


def _as_a_terminal(text: bytes) -> tuple[bytes, bytes]:
    """Whole lines and the rest of `text`, without what a carriage return led back to and wrote over."""
    *ended, rest = text.split(b"\n")
    whole = b"".join(_last_drawn(line.rstrip(b"\r")) + b"\n" for line in ended)
    # Carriage returns at the very end stay: a line feed may follow.
    drawn = rest.rstrip(b"\r")
    return whole, _last_drawn(drawn) + rest[len(drawn) :]


def _last_drawn(line: bytes) -> bytes:
    return line[line.rfind(b"\r") + 1 :]


def with_prefix(lines: bytes, prefix: bytes) -> bytes:
    """Put `prefix` before every line of `lines`, which is empty or ends with a line feed."""
    return prefix + lines[:-1].replace(b"\n", b"\n" + prefix) + b"\n" if lines else b""
