"""Terminal control in the workers' output, made fit for a log that many of them share. Pure; bytes in, bytes out.

Colours stay, and end with their line, so that one rank's red is not the next one's. Whatever else steers a terminal
(cursor movements, titles, notifiers, other character sets) is taken out: in a file it is noise, and on the terminal
where the job log is read it would draw over another rank's lines.

Makes what workers printed harmless for the terminal that shows it. Pure; bytes in, bytes out.

Colours stay. What else steers a terminal is taken out (`processes.ansi`), and so are the same in eight bits and the
characters that turn the direction of writing around, with which a line could look like another one.
"""

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
"""What makes a closer look necessary."""
_LONGEST_HELD = 256
_SLICE = 16 << 10


def readable(lines: bytes) -> bytes:
    """Take out of whole lines (without carriage returns) what is not for a log.

    Args:
        lines: Empty, or ending with a line feed.
    """
    if not any(byte in lines for byte in _STEERING):
        return lines
    if b"\x1b" in lines:
        lines = _OPEN_COLOUR.sub(b"\\1\x1b[0m\n", b"".join(map(_without_steering, _slices(lines))))
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


def _without_steering(text: bytes) -> bytes:
    return _NO_COLOUR.sub(b"", text)


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


def harmless(lines: bytes) -> bytes:
    """Whole lines as a terminal may show them.

    Args:
        lines: Empty, or ending with a line feed.
    """
    if b"\r" in lines:
        lines = b"\n".join(map(_last_drawn, lines.split(b"\n")))
    lines = readable(lines).translate(None, _CONTROL)
    if lines.isascii():
        return lines
    text = lines.decode("utf-8", "backslashreplace")
    return _HARMFUL.sub(lambda found: escaped(found[0]), text).encode()


def _last_drawn(line: bytes) -> bytes:
    """What a carriage return left of a line: a progress bar's last state."""
    line = line.rstrip(b"\r")
    return line[line.rfind(b"\r") + 1 :]


def one_line(text: str) -> str:
    """Text of any origin for one line of a terminal: what does not print becomes a space.

    All that the subcommands write for people goes through here, but for what workers printed (`harmless`) and the
    report, which cleans what it quotes.
    """
    return text if text.isprintable() else "".join(char if char.isprintable() else " " for char in text)


def each_line(text: str) -> str:
    """`one_line` of each."""
    return "\n".join(map(one_line, text.split("\n")))
