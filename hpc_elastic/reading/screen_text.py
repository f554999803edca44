"""Makes what workers printed harmless for the terminal that shows it. Pure; bytes in, bytes out.

Colours stay. What else steers a terminal is taken out (`processes.ansi`), and so are the same in eight bits and the
characters that turn the direction of writing around, with which a line could look like another one.
"""

from __future__ import annotations

import re

from hpc_elastic.atomic_file import DECEPTIVE, escaped
from hpc_elastic.processes.ansi import readable

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
