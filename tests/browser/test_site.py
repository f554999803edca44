"""The documentation's site, opened from disk without a server or a network: its search finds pages, its code fits."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.browser.chromium import Browser
from tests.docs.test_docs_site import ROOT, build
from tests.rigs.waiting import until

QUERY = "document.querySelector('input[data-md-component=search-query]')"
FOUND = "return [...document.querySelectorAll('.md-search-result__link')].map(link => link.getAttribute('href'))"


WIDER = "return [...document.querySelectorAll('pre > code')].filter(code => code.scrollWidth > code.clientWidth).length"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if importlib.util.find_spec("material") is None:
        pytest.skip("pip install -e '.[docs]'")
    folder = tmp_path_factory.mktemp("site")
    done = build(ROOT, folder)
    assert done.returncode == 0, done.stderr
    return folder


def test_the_search_finds_a_page(browser: Browser, site: Path) -> None:
    assert "unpkg.com" not in (site / "index.html").read_text(encoding="utf-8")
    browser.open(site / "index.html")
    browser.run("document.querySelector('#__search').click()")
    browser.run(f"const query = {QUERY}; query.focus(); query.value = 'requeue'")

    def found() -> bool:
        browser.run(f"{QUERY}.dispatchEvent(new Event('keyup', {{bubbles: true}}))")
        return any("save-and-resume.html" in link for link in browser.run(FOUND))

    until(found, "a page about requeues", seconds=30)


def test_no_code_has_to_be_scrolled_sideways(browser: Browser, site: Path) -> None:
    browser.size(1300, 900)
    for page in ("how-to/from-my-sbatch", "how-to/run-in-a-container", "reference/cli", "reference/python"):
        browser.open(site / f"{page}.html")
        assert browser.run(WIDER) == 0, page
