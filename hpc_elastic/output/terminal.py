"""Makes what workers print fit for a log that many of them share, and for the terminal that shows it. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator

from hpc_elastic.base.files import DECEPTIVE, escaped

_NO_COLOUR = re.compile(
    rb"\x1b(?!\[[0-9;:]*m)(?:"
    rb"\[[0-?]*[ -/]*[@-~]?"  # CSI: cursor, erasing, modes
    rb"|[\]PX^_][^\x07\x1b\n]*(?:\x07|\x1b\\)?"  # OSC and the like: titles, links
    rb"|[ -/]*[0-~])?"  # two or three bytes; or the beginning of none
)
_OPEN_COLOUR = re.compile(rb"(\x1b\[(?!0*m)[0-9;:]*m[^\x1b\n]*)\n")
_BEGUN = re.compile(rb"\x1b(?:\[[0-?]*[ -/]*|[\]PX^_][^\x07\x1b\n]*\x1b?|[ -/]*)\Z")
_NOISE = bytes([*range(8), *range(11, 13), *range(14, 27), *range(28, 32), 127])
_STEERING = (b"\x1b", b"\b", b"\a", b"\x0e")
_LONGEST_HELD = 256
_SLICE = 16 << 10


def readable(lines: bytes) -> bytes:
    """Take out of whole lines (without carriage returns) what is not for a log."""
    if not any(byte in lines for byte in _STEERING):
        return lines
    if b"\x1b" in lines:
        plain = b"".join(_NO_COLOUR.sub(b"", text) for text in _slices(lines))
        lines = _OPEN_COLOUR.sub(b"\\1\x1b[0m\n", plain)
    if b"\b" in lines:
        lines = b"\n".join(map(_rubbed_out, lines.split(b"\n")))
    return lines.translate(None, _NOISE)


def unfinished(text: bytes) -> int:
    """How many bytes at the end of `text` are the beginning of an escape sequence, or of a character in UTF-8."""
    escape = text.rfind(b"\x1b", max(0, len(text) - _LONGEST_HELD))
    if escape >= 0:
        if text[escape:] == b"\x1b":
            # It may close a title that an earlier one opened.
            before = text.rfind(b"\x1b", max(0, escape - _LONGEST_HELD), escape)
            if before >= 0 and _BEGUN.match(text, before):
                return len(text) - before
        if _BEGUN.match(text, escape):
            return len(text) - escape
    for back in range(1, min(3, len(text)) + 1):
        byte = text[-back]
        if byte >= 0xC0:
            length = 4 if byte >= 0xF0 else 3 if byte >= 0xE0 else 2
            return back if byte < 0xF8 and length > back else 0
        if byte < 0x80:
            return 0
    return 0


def _slices(text: bytes) -> Iterator[bytes]:
    """`text` in pieces that end no sequence: nothing but escapes would take a hundred times its size for a moment."""
    start = 0
    while start < len(text):
        end = start + _SLICE
        if end < len(text):
            end = text.rfind(b"\n", start, end) + 1 or end - unfinished(text[start:end])
        yield text[start:end]
        start = end


def _rubbed_out(line: bytes) -> bytes:
    """`line` with the characters gone that a backspace went back over (a spinner's); not where there are colours."""
    if b"\b" not in line or b"\x1b" in line:
        return line
    first, *rest = line.split(b"\b")
    drawn = bytearray(first)
    for piece in rest:
        while drawn and 0x80 <= drawn[-1] < 0xC0:
            del drawn[-1]
        del drawn[-1:]
        drawn += piece
    return bytes(drawn)


_HARMFUL = re.compile(f"[{DECEPTIVE}]")

_CONTROL = bytes([*range(9), *range(11, 27), *range(28, 32), 127])
"""All but the tab, the line feed, and what is left of escape: colours."""


def _last_drawn(line: bytes) -> bytes:
    line = line.rstrip(b"\r")
    return line[line.rfind(b"\r") + 1 :]


def harmless(lines: bytes) -> bytes:
    if b"\r" in lines:
        lines = b"\n".join(map(_last_drawn, lines.split(b"\n")))
    lines = readable(lines).translate(None, _CONTROL)
    if lines.isascii():
        return lines
    text = lines.decode("utf-8", "backslashreplace")
    return _HARMFUL.sub(lambda found: escaped(found[0]), text).encode()


def one_line(text: str) -> str:
    """What does not print becomes a space: for all that is printed for people but `harmless` output and the report."""
    return text if text.isprintable() else "".join(char if char.isprintable() else " " for char in text)


def each_line(text: str) -> str:
    return "\n".join(map(one_line, text.split("\n")))


CURSOR_UP = re.compile(rb"\x1b\[[0-9]*[AF]")
_STEP = re.compile(rb"\n|\r|\x1b\[([0-9]*)([ABEFJK])")
_ROWS = 32
_BYTES = 32 << 10


class Screen:
    """Rows that are drawn and drawn over. At most 32 KiB and one `feed` more."""

    def __init__(self) -> None:
        self._rows = [b""]
        self._shown: list[bytes | None] = [None]
        """Each row as it was last printed; None: it was not."""
        self._at = 0
        self._is_home = False
        self.has_moved = False
        """The cursor went up since this was last set to False: the screen is still needed."""

    def feed(self, data: bytes) -> bytes:
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
        """The new rows, or with `again` all that changed since they were printed, as lines."""
        printed = b""
        for number, row in enumerate(self._rows):
            before = self._shown[number]
            if row != before and row.strip() and (again or before is None):
                printed += row + b"\n"
                self._shown[number] = row
        return printed

    def close(self) -> tuple[bytes, bytes]:
        """Everything that was not printed, as lines, and the row of the cursor where it is the last one."""
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
            if self._is_home or step[1] in (b"1", b"2"):
                self._rows[self._at] = b""
            if step[2] == b"J":
                for number in range(0 if step[1] == b"2" else self._at + 1, len(self._rows)):
                    self._rows[number] = b""

    def _up(self, count: int) -> None:
        self.has_moved = True
        missing = min(count, _ROWS) - self._at
        if missing > 0:  # rows that were printed before there was a screen
            self._rows[:0] = [b""] * missing
            self._shown[:0] = [b""] * missing
        self._at = max(0, self._at - count) if missing <= 0 else 0

    def _down(self, count: int) -> None:
        self._at += count
        while self._at >= len(self._rows):
            self._rows.append(b"")
            self._shown.append(None)

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


LONGEST_PARTIAL = 16 << 10
"""Bytes without a line end after which they are shown as a line of their own."""
_SCREENFUL = 64 << 10
"""Who prints more than this at once is not drawing."""


class LineSplitter:
    """One stream's lines: whole ones come out, the beginning of the next one waits. At most 48 KiB."""

    def __init__(self) -> None:
        self._tail = b""
        self._screen: Screen | None = None
        self._is_drawn = False
        self._is_shown = False

    @property
    def has_partial(self) -> bool:
        """A line has begun and not ended, or lines may be drawn over."""
        return bool(self._tail) or self._screen is not None

    def feed(self, data: bytes) -> bytes:
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
        """`final`: also what may be half a character or escape sequence."""
        if self._screen is not None:
            printed = self._screen.take(again=again or final)
            if final or (again and not self._screen.has_moved):
                printed += self._end_screen()
            elif again:
                self._screen.has_moved = False
            return printed + self.flush(final=True) if final else printed
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
        printed, row = self._screen.close()
        self._tail, self._screen, self._is_shown = row + self._tail, None, not row
        return printed


def _as_a_terminal(text: bytes) -> tuple[bytes, bytes]:
    *ended, rest = text.split(b"\n")
    whole = b"".join(_last_drawn(line.rstrip(b"\r")) + b"\n" for line in ended)
    # Carriage returns at the very end stay: a line feed may follow.
    drawn = rest.rstrip(b"\r")
    return whole, _last_drawn(drawn) + rest[len(drawn) :]


def with_prefix(lines: bytes, prefix: bytes) -> bytes:
    return prefix + lines[:-1].replace(b"\n", b"\n" + prefix) + b"\n" if lines else b""
