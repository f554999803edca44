"""Every relative link of the documentation leads somewhere, and every page can be reached."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def links(page: Path) -> list[str]:
    text = _FENCE.sub("", page.read_text(encoding="utf-8"))
    return [link for link in _LINK.findall(text) if not re.match(r"[a-z]+:", link)]


def anchors(page: Path) -> set[str]:
    """The names that GitHub gives the headings of a page."""
    titles = re.findall(r"^#+ +(.*)$", _FENCE.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_relative_links_lead_somewhere(page: Path) -> None:
    broken = []
    for link in links(page):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        inside = target.is_relative_to(ROOT)
        if not inside or not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert not broken


def test_every_page_is_reached_from_the_readme() -> None:
    reached: set[Path] = set()
    waiting = [ROOT / "README.md"]
    while waiting:
        page = waiting.pop()
        if page in reached:
            continue
        reached.add(page)
        targets = ((page.parent / link.partition("#")[0]).resolve() for link in links(page))
        waiting += [target for target in targets if target.suffix == ".md" and target.exists()]
    assert not set(PAGES) - reached
