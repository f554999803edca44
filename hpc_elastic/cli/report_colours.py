"""The text report in colours, for a terminal. Pure."""

from __future__ import annotations

import re

from hpc_elastic.cli.screen import BOLD, DIM, GREEN, RED, YELLOW, painted

_FIELD = re.compile(r"(  [a-z_ ]{10}: )(.*)", re.DOTALL)
_RULE = re.compile(r"[-=]{20,}\Z")
_BOLD_RED = f"{BOLD};{RED}"


def coloured_report(text: str) -> str:
    """What `render_text` or `render_ranks` gave, with colours."""
    lines = text.split("\n")
    found = []
    is_headline = False
    for number, line in enumerate(lines):
        is_rule = _RULE.match(line) is not None
        after_rule = number > 0 and _RULE.match(lines[number - 1]) is not None
        field = _FIELD.fullmatch(line)
        if is_rule:
            found.append(painted(line, DIM))
        elif line.startswith("Root Cause"):
            found.append(painted(line, _BOLD_RED))
            is_headline = True
            continue
        elif field is not None:
            found.append(painted(field[1], DIM) + field[2])
        elif is_headline and line.startswith("  "):
            found.append(painted(line, BOLD))
            continue
        elif after_rule and number == 1:
            found.append(painted(line, _status_colour(line)))
        elif line and not line.startswith(" ") and (line.endswith(":") or after_rule):
            found.append(painted(line, BOLD))
        else:
            found.append(line)
        is_headline = False
    return "\n".join(found)


def _status_colour(line: str) -> str:
    if " SUCCEEDED" in line:
        return f"{BOLD};{GREEN}"
    return f"{BOLD};{YELLOW}" if "still running" in line or "no attempt yet" in line else _BOLD_RED
