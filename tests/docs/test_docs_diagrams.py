"""The diagrams of the documentation are mermaid that a browser can draw: their grammar, as far as they use it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
DIAGRAMS = [
    (str(page.relative_to(ROOT)), text)
    for page in PAGES
    for text in re.findall(r"^ *```mermaid\n(.*?)^ *```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
]
_PARTICIPANT = re.compile(r"(?:participant|actor) (\w+)(?: as \S.*)?\Z")
_MESSAGE = re.compile(r"(\w+)(?:->>|-->>|->|-->|-x|--x|-\)|--\))[+-]?(\w+): \S")
_NOTE = re.compile(r"Note (?:over (\w+)(?:,(\w+))?|(?:left|right) of (\w+)): \S")
_OPENS = re.compile(r"(?:alt|opt|loop|par|critical|break|rect)(?: |\Z)")
_GOES_ON = re.compile(r"(?:else|and|option)(?: |\Z)")
_STATE = re.compile(r"\w+|\[\*\]")
_TRANSITION = re.compile(r"(\S+) --> (\S+?)(?:: ?\S.*)?\Z")
_STATE_LINE = re.compile(
    r'state "[^"]+" as \w+\Z|state \w+ \{\Z|\}\Z|direction (?:LR|TB)\Z|\w+: \S.*\Z|\w+\Z|note .*\Z|end note\Z'
)


def problems(text: str) -> list[str]:
    """What a browser would stumble over, by line."""
    kind, *lines = [line.strip() for line in text.strip().splitlines()]
    lines = [line for line in lines if line and not line.startswith("%%")]
    if kind == "sequenceDiagram":
        return _sequence(lines)
    if kind in ("stateDiagram-v2", "stateDiagram"):
        return _states(lines)
    return [f"{kind}: a kind of diagram that nobody checks"]


def _sequence(lines: list[str]) -> list[str]:
    known: set[str] = set()
    found, depth = [], 0
    for line in lines:
        if match := _PARTICIPANT.match(line):
            known.add(match[1])
        elif match := _MESSAGE.match(line) or _NOTE.match(line):
            found += [f"{line}: {name} is no participant" for name in match.groups() if name and name not in known]
        elif _OPENS.match(line):
            depth += 1
        elif line == "end":
            depth -= 1
        elif not (_GOES_ON.match(line) and depth):
            found.append(f"{line}: what is it?")
        # A semicolon ends a statement, and # begins the name of a character.
        found += [f"{line}: {sign} means something else in mermaid" for sign in ";#" if sign in line]
    return found + (["not every block has its end"] if depth else [])


def _states(lines: list[str]) -> list[str]:
    found = []
    for line in lines:
        match = _TRANSITION.match(line)
        if match is None and not _STATE_LINE.match(line):
            found.append(f"{line}: what is it?")
        elif match is not None and not all(_STATE.fullmatch(name) for name in match.groups()):
            found.append(f"{line}: not two states")
    opened = sum(line.endswith("{") for line in lines)
    return found + (["not every state has its end"] if opened != lines.count("}") else [])


@pytest.mark.parametrize(("page", "text"), DIAGRAMS, ids=[f"{page}-{n}" for n, (page, _) in enumerate(DIAGRAMS)])
def test_a_diagram_can_be_drawn(page: str, text: str) -> None:
    assert problems(text) == [], page


def test_every_death_has_its_sequence() -> None:
    sections = (ROOT / "docs/explanation/when-something-dies.md").read_text(encoding="utf-8").split("\n## ")[1:]
    assert len(sections) == 7
    assert [text.partition("\n")[0] for text in sections if "\nsequenceDiagram\n" not in text] == []


@pytest.mark.parametrize(
    "line",
    ["A->>C: x", "A->>B:", "A>>B: x", "A->>B: x; y", "A->>B: issue #7", "alt x", "end", "Note over C: x", "x"],
)
def test_what_can_not_be_drawn_is_seen(line: str) -> None:
    assert problems(f"sequenceDiagram\nparticipant A\nparticipant B as the other\n{line}\n") != []
    assert problems("sequenceDiagram\nparticipant A\nA->>A: x\n") == []
