"""The documentation stays as small as one person can read: its pages, its words, its home, its code blocks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hpc_elastic.options.run_request import ALL_OPTIONS
from tests.rigs.shown_output import WIDTH

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
MOST_PAGES, MOST_WORDS, MOST_CHANGES = 45, 45_000, 40
_FENCE = re.compile(r"^ *```(?!mermaid)\w*\n(.*?)^ *```$|^```mermaid\n.*?^```$", re.MULTILINE | re.DOTALL)


def text(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def code_lines(page: Path) -> list[str]:
    fenced = [line for block in _FENCE.findall(text(page)) for line in block.splitlines()]
    rest = _FENCE.sub("", text(page)).split("\n\n")
    return fenced + [line[4:] for part in rest if part.startswith("    ") for line in part.splitlines()]


def test_the_pages_and_their_words_are_few() -> None:
    assert len(PAGES) <= MOST_PAGES
    counts = {str(page.relative_to(DOCS)): len(text(page).split()) for page in PAGES}  # as `wc -w` counts
    assert sum(counts.values()) <= MOST_WORDS, sorted(counts.items(), key=lambda pair: -pair[1])[:10]


def test_home_is_five_lines_and_eight_links() -> None:
    lines = [line for line in text(DOCS / "index.md").splitlines()[1:] if line]
    assert sum(not line.startswith("- ") for line in lines) == 5
    assert len(re.findall(r"\]\(", text(DOCS / "index.md"))) == 8


def test_the_changes_of_what_is_not_released_fit_a_screen() -> None:
    assert len(text(DOCS / "changelog.md").splitlines()) <= MOST_CHANGES


@pytest.mark.parametrize("page", [ROOT / "README.md", *PAGES], ids=lambda page: str(page.relative_to(ROOT)))
def test_code_fits_the_page(page: Path) -> None:
    assert [line for line in code_lines(page) if len(line) > WIDTH] == []


def test_the_readme_has_the_six_options_before_any_other_and_what_a_heartbeat_adds() -> None:
    readme = text(ROOT / "README.md")
    assert "unmodified script" in readme.partition("\n## ")[0]
    assert "`hpc_elastic.heartbeat(step)`" in readme.partition("\n## ")[0]
    table = readme.partition("\n## The six options that matter\n")[2].partition("\n## ")[0]
    first = re.findall(r"^\| `(--[\w-]+)[ `]", table, re.MULTILINE)
    assert len(first) == 6
    options = {name for option in ALL_OPTIONS for name in option.names}
    before = readme.partition("\n## The six options that matter\n")[0]
    named = set(re.findall(r"`(--[\w-]+)", before)) & options
    assert set(first) <= options
    assert named <= {"--section-timeouts", "--start-method"}, "in the sentences on top alone"


GENERATED = {"cli.md", "configuration.md", "events.md", "known-failures.md", "python.md"}


@pytest.mark.parametrize("page", [page for page in PAGES if page.name not in GENERATED], ids=lambda page: page.name)
def test_a_sentence_begins_with_its_subject(page: Path) -> None:
    prose = _FENCE.sub("", text(page))
    found = re.findall(r"(?:^|[.!?] )((?:Of|For|By|Since|Whose|As|Where|None) [a-z][^.?]*[.?])", prose, re.MULTILINE)
    assert [sentence for sentence in found if not sentence.endswith("?")] == []
