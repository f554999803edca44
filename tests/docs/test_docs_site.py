"""docs/ builds into a site: strictly, with every link and anchor, and nothing of a page lost on the way.

The tools are those of the extra ``docs``, which ``dev`` holds. Where they are missing the tests are skipped, but in CI
(``CI=true``) they fail.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from docs import python_page

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
COUNTED = ("li", "pre", "table", "tr", "h1", "h2", "h3", "h4")


def build(root: Path, site: Path) -> subprocess.CompletedProcess[str]:
    """What README says, into another folder."""
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--site-dir", str(site)],
        cwd=root, capture_output=True, text=True, timeout=240, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
    )  # fmt: skip


@pytest.fixture(scope="module")
def tools() -> None:
    lacking = [name for name in ("mkdocs", "material", "markdown_it") if importlib.util.find_spec(name) is None]
    if lacking:
        why = f"{', '.join(lacking)} missing: pip install -e '.[docs]'"
        if os.environ.get("CI"):
            pytest.fail(why, pytrace=False)
        pytest.skip(why)


@pytest.fixture(scope="module")
def site(tools: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = build(ROOT, folder)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "WARNING" not in done.stderr
    return folder


@pytest.fixture
def copy(tools: None, tmp_path: Path) -> Path:
    """Of all that the site is made of."""
    for name in ("docs", "mkdocs.yml", "hpc_elastic", "tests/catalogue/golden", "tests/unit", "README.md"):
        source, target = ROOT / name, tmp_path / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy2(source, target)
    return tmp_path


def elements(html: str) -> dict[str, int]:
    return {name: len(re.findall(rf"<{name}[ >]", html)) for name in COUNTED}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(DOCS)))
def test_a_page_is_on_the_site_as_it_is_read_elsewhere(site: Path, page: Path) -> None:
    """The site's Markdown is not CommonMark: a list or a fence that it does not see would be lost."""
    markdown_it = importlib.import_module("markdown_it")
    html = (site / page.relative_to(DOCS).with_suffix(".html")).read_text(encoding="utf-8")
    article = html.partition("<article")[2].partition("</article>")[0]
    common = markdown_it.MarkdownIt("commonmark").enable("table").render(page.read_text(encoding="utf-8"))
    assert elements(article) == elements(common)


def test_the_files_that_pages_link_to_are_on_the_site(site: Path) -> None:
    page = (site / "how-to" / "read-a-failure-report.html").read_text(encoding="utf-8")
    assert (site / "source/tests/catalogue/golden/deadlock.txt.txt").is_file()
    assert 'href="../source/tests/catalogue/golden/deadlock.txt.txt"' in page


def test_links_that_lead_nowhere_end_the_build(copy: Path) -> None:
    links = ("no-such-page.md", "configure.md#no-such-heading", "../../hpc_elastic/no_such_module.py")
    page = copy / "docs" / "how-to" / "submit-to-slurm.md"
    page.write_text(page.read_text(encoding="utf-8") + "".join(f"\n[x]({link})\n" for link in links), encoding="utf-8")
    done = build(copy, copy / "site")
    assert done.returncode != 0
    warned = [line for line in done.stderr.splitlines() if line.startswith("WARNING") and "submit-to-slurm.md" in line]
    assert [link for link in links if not any(link in line for line in warned)] == [], done.stderr


# The page of the Python API -----------------------------------------------------------------------------------------


def test_all_that_the_packages_offer_is_on_the_python_page() -> None:
    import hpc_elastic
    from hpc_elastic import agent, submission

    on_page = {name.rpartition(".")[2] for name in python_page.names()}
    constants = {"DEFAULT_ROLE", "WorkerGroupFailureException"}  # the second is an alias
    offered = {*hpc_elastic._FROM, *submission._FROM, *agent._MODULE_OF} - constants
    assert offered - on_page == set()


def test_an_argument_of_a_docstring_is_on_the_python_page() -> None:
    text = python_page.python_page()
    assert "\nshould_checkpoint(step: int) -> bool\n" in text
    assert "- `soft_timeout`: A rank without progress for this long is interrupted." in text
    assert "- `name`: 1 to 32 letters" in text
    assert "``" not in re.sub(r"^```.*$", "", text, flags=re.MULTILINE)
