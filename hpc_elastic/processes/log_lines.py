"""From a stream's bytes to lines for the job log. Pure; bytes in, bytes out, valid UTF-8 or not.

The job log shows what a terminal would show, one line at a time: a progress bar that redraws itself with carriage
returns appears as its latest state whenever the line is flushed (the caller does so about once a second), not as each
of its redraws; cursor movements are taken out, colours stay. The per-rank files hold every byte as it came.
"""

from __future__ import annotations

import re

_CURSOR = re.compile(rb"\x1b\[[0-9;?]*[A-HJKSTfhlsu]")
LONGEST_PARTIAL = 16 << 10
"""Bytes without a line end after which they are shown as a line of their own."""


class LineSplitter:
    """One stream's lines: whole ones come out, the beginning of the next one waits."""

    __slots__ = ("_tail",)

    def __init__(self) -> None:
        self._tail = b""

    @property
    def has_partial(self) -> bool:
        """Whether a line has begun and not ended."""
        return bool(self._tail)

    def feed(self, data: bytes) -> bytes:
        """Take the next bytes; returns whole lines, each with its line feed (possibly none)."""
        text = self._tail + data
        if b"\r" in text:
            whole, self._tail = _as_a_terminal(text)
        else:
            cut = text.rfind(b"\n") + 1
            whole, self._tail = text[:cut], text[cut:]
        if len(self._tail) > LONGEST_PARTIAL:
            whole += self.flush()
            return whole
        return _without_cursor(whole)

    def flush(self) -> bytes:
        """The line that has begun, as a line (possibly none): at the end, or when it has waited long enough."""
        tail, self._tail = self._tail.rstrip(b"\r"), b""
        return _without_cursor(tail + b"\n") if tail else b""


def _as_a_terminal(text: bytes) -> tuple[bytes, bytes]:
    """Whole lines and the rest of `text`, without what a carriage return led back to and wrote over."""
    *ended, rest = text.split(b"\n")
    whole = b"".join(_last_drawn(line.rstrip(b"\r")) + b"\n" for line in ended)
    # Carriage returns at the very end stay: a line feed may follow.
    drawn = rest.rstrip(b"\r")
    return whole, _last_drawn(drawn) + rest[len(drawn) :]


def _last_drawn(line: bytes) -> bytes:
    return line[line.rfind(b"\r") + 1 :]


def _without_cursor(lines: bytes) -> bytes:
    return _CURSOR.sub(b"", lines) if b"\x1b" in lines else lines


def with_prefix(lines: bytes, prefix: bytes) -> bytes:
    """Put `prefix` before every line of `lines`, which is empty or ends with a line feed."""
    return prefix + lines[:-1].replace(b"\n", b"\n" + prefix) + b"\n" if lines else b""
