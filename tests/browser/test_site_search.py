"""The search of the documentation finds pages in a site that is opened from disk, without a server or a network."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.browser.chromium import Browser
from tests.docs.test_docs_site import ROOT, build
from tests.rigs.waiting import until

QUERY = "document.querySelector('input[data-md-component=search-query]')"
FOUND = "return [...document.querySelectorAll('.md-search-result__link')].map(link => link.getAttribute('href'))"


@pytest.mark.skipif(importlib.util.find_spec("material") is None, reason="pip install -e '.[docs]'")
def test_the_search_of_a_site_on_disk_finds_a_page(browser: Browser, tmp_path: Path) -> None:
    done = build(ROOT, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "unpkg.com" not in (tmp_path / "index.html").read_text(encoding="utf-8")
    browser.open(tmp_path / "index.html")
    browser.run("document.querySelector('#__search').click()")
    browser.run(f"const query = {QUERY}; query.focus(); query.value = 'requeue'")

    def found() -> bool:
        browser.run(f"{QUERY}.dispatchEvent(new Event('keyup', {{bubbles: true}}))")
        return any("save-and-resume.html" in link for link in browser.run(FOUND))

    until(found, "a page about requeues", seconds=30)
