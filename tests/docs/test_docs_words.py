"""Every text that a user reads is standard English: a list of what was replaced, and must not come back.

``python -m tests.docs.test_docs_words`` prints all texts of the package, one a line, to be read by a person.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
PACKAGE = ROOT / "hpc_elastic"
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
HISTORY = {"changelog.md"}
"""Quotes what was replaced."""

BANNED = (
    # a verb that is not the field's, or not said of a program
    r"\bgave no sign\b", r"\bsigns? of life\b", r"\bno word (?:of|from)\b", r"\bwithout a word\b", r"\btold \d",
    r"\btells? (?:its|their)\b", r"\bsaid nothing\b", r"\bhave not said\b", r"\basked whether it lives\b",
    r"\bis armed\b", r"\brequeue armed\b", r"\bnobody is judged\b", r"\bnobody waits\b", r"\bgone within the grace\b",
    r"\bended for that\b", r"\bkilled for that\b", r"\bnot worth another try\b", r"\bis no more\b",
    # "no" before a noun in place of "not a"
    r"\bis no (?:run|job|number|table|option|function|check|multiple|timedelta|section's|regular|interpreter)\b",
    # inversion, or a clause in place of the subject
    r"\bstand behind its name\b", r"\bstand in quotes\b", r"\bchanges places for\b", r"\bhave all of --max-restarts\b",
    r"\bNo worker failed by itself\b", r"\bWhat was done about it\b", r"\ban exception that nothing caught\b",
    r"\bkilled from outside, not by this job's agent\b", r"\bnothing to point at\b", r"\bis made up by the kernel\b",
)  # fmt: skip
_BANNED = re.compile("|".join(BANNED), re.IGNORECASE)


def texts_of(path: Path) -> Iterator[tuple[int, str]]:
    """Each string of three words or more that is no docstring, with its line; ``{}`` for what is filled in."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    left_out: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            left_out.add(id(node.value))
        if isinstance(node, ast.JoinedStr):
            left_out |= {id(part) for part in ast.walk(node) if part is not node and isinstance(part, ast.Constant)}
    for node in ast.walk(tree):
        if id(node) in left_out:
            continue
        text = None
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = node.value
        elif isinstance(node, ast.JoinedStr):
            parts = (part.value if isinstance(part, ast.Constant) else "{}" for part in node.values)
            text = "".join(map(str, parts))
        if text is not None and len(text.split()) >= 3 and re.search("[a-z]", text):
            yield getattr(node, "lineno", 0), text


@cache
def all_texts() -> list[tuple[str, str]]:
    files = sorted(PACKAGE.rglob("*.py"))
    return [(f"{path.relative_to(ROOT)}:{line}", text) for path in files for line, text in texts_of(path)]


def test_no_text_of_the_program_has_a_phrase_that_was_replaced() -> None:
    found = [f"{place}: {text!r}" for place, text in all_texts() if _BANNED.search(text)]
    assert found == []


@pytest.mark.parametrize("page", [page for page in PAGES if page.name not in HISTORY], ids=lambda page: page.name)
def test_no_page_has_one(page: Path) -> None:
    lines = enumerate(page.read_text(encoding="utf-8").splitlines(), 1)
    assert [f"{number}: {line}" for number, line in lines if _BANNED.search(line)] == []


def test_texts_are_found_at_all() -> None:
    texts = [text for _, text in all_texts()]
    assert len(texts) > 1500
    assert "print the plan and the batch script, and change nothing" in texts
    assert any("no such run (searched run directories" in text for text in texts)


if __name__ == "__main__":
    for place, text in all_texts():
        print(f"{place}: {text!r}")
