"""The box that rich's traceback handler draws, turned into Python's own form.

``rich.traceback.install()`` of rich 15.0.0 prints, in Unicode or in ASCII::

    ╭────────────── Traceback (most recent call last) ───────────────╮
    │ /home/ann/train.py:13 in <module>                              │
    │                                                                │
    │   12 │   step(17)                                              │
    │ ❱ 13 main()                                                    │
    ╰────────────────────────────────────────────────────────────────╯
    ValueError: bad batch 17
"""

from __future__ import annotations

import re

TITLE = " Traceback (most recent call last) "
INSIDE = "  "
"""What stands for a line of a box that says nothing: as long as any line of a traceback, and dropped from its text."""

# Texts, which `re` compiles at the first use: few agents ever see such a box.
_TOP = r"[╭┌+][─-]+ Traceback \(most recent call last\) [─-]+[╮┐+]\s*\Z"
_BOTTOM = r"[╰└+][─-]+[╯┘+]\s*\Z"
_SIDES = r"[│|] (.*?)\s*[│|]?\s*\Z"
_PLACE = r"(.+):(\d+) in (\S+)\Z"
_SOURCE = r"(?:❱|\\u2771|>) +\d+ (.*)\Z"
_GUIDES = r"[│|] ?"
_MOST_LINES = 4000
_PATH_LINES = 6


def plain_tracebacks(lines: list[str], header: str) -> None:
    """Rewrite every box in `lines` in place, line by line, so that each keeps its number.

    Args:
        lines: Without colours.
        header: What Python prints in place of the box's top.
    """
    for top, line in enumerate(lines):
        if TITLE not in line or not re.match(_TOP, line):
            continue
        bottom = next(
            (at for at in range(top + 1, min(len(lines), top + _MOST_LINES)) if re.match(_BOTTOM, lines[at])), 0
        )
        if bottom:
            lines[top] = header
            _rewrite(lines, top + 1, bottom)


def _rewrite(lines: list[str], first: int, bottom: int) -> None:
    inside = [_inside(line) for line in lines[first:bottom]]
    lines[first : bottom + 1] = [INSIDE] * (bottom + 1 - first)
    at = 0
    while at < len(inside):
        taken, place = _place(inside, at)
        if place is not None:
            lines[first + at] = f'  File "{place[1]}", line {place[2]}, in {place[3]}'
        elif source := re.match(_SOURCE, inside[at]):
            lines[first + at] = f"    {re.sub(_GUIDES, '', source[1]).strip()}"
        at += taken


def _inside(line: str) -> str:
    match = re.match(_SIDES, line)
    return match[1] if match else ""


def _place(inside: list[str], at: int) -> tuple[int, re.Match[str] | None]:
    """``path:13 in main``, which may be long enough for several lines, and how many it takes."""
    if not inside[at] or inside[at][0].isspace() or (at and inside[at - 1]):
        return 1, None
    text = ""
    for count, piece in enumerate(inside[at : at + _PATH_LINES], 1):
        if not piece:
            break
        text += piece if not text or text[-1] in "-/" else f" {piece}"
        if match := re.match(_PLACE, text):
            return count, match
    return 1, None
