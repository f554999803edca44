"""Makes what workers printed harmless for the terminal that shows it. Pure; bytes in, bytes out.

Colours stay. What else steers a terminal is taken out (`processes.ansi`), and so are the same in eight bits and the
characters that turn the direction of writing around, with which a line could look like another one.
"""

from __future__ import annotations

import re

from hpc_elastic.processes.ansi import readable

_HARMFUL = re.compile("[\x80-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff]")

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
    return _HARMFUL.sub(lambda found: f"\\u{ord(found[0]):04x}", text).encode()


def _last_drawn(line: bytes) -> bytes:
    """What a carriage return left of a line: a progress bar's last state."""
    line = line.rstrip(b"\r")
    return line[line.rfind(b"\r") + 1 :]


def one_line(text: str) -> str:
    """Text that came from a file, for one line of a terminal: what does not print becomes a space."""
    return "".join(char if char.isprintable() else " " for char in text)
