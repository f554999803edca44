"""docs/explanation/architecture.md is a picture of the packages as they are, and what its pages link to exists."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.rigs.ways import MOST_STEPS, PAGES, ROOT, WAYS, Step, read_way

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ARCHITECTURE = (PAGES / "architecture.md").read_text(encoding="utf-8")
TITLES = re.findall(r"^## (.*)$", WAYS.read_text(encoding="utf-8"), re.MULTILINE)
_LINK = re.compile(r"\[`([\w.]+)`\]\(([^)\s]+\.py)\)")
LINKS = [
    Step(number=0, name=name, path=(page.parent / path).resolve(), where=page.name)
    for page in sorted(PAGES.glob("*.md"))
    for name, path in _LINK.findall(page.read_text(encoding="utf-8"))
    if name != Path(path).stem  # a module
]


def layers() -> list[set[str]]:
    """The packages of import-linter's layers, from the top; single modules are left out."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"][
        "contracts"
    ]
    given = next(contract for contract in contracts if contract["id"] == "direction")["layers"]
    found = [{name.strip(" ()") for name in layer.split(":")} for layer in given]
    rows = [{name for name in layer if (ROOT / "hpc_elastic" / name).is_dir()} for layer in found]
    return [row for row in rows if row]


def test_the_table_of_packages_is_that_of_the_layers() -> None:
    table = ARCHITECTURE.partition("## The rooms")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| ((?:`\w+` ?)+)\|", table, re.MULTILINE)
    assert [set(re.findall(r"`(\w+)`", row)) for row in rows] == layers()


def test_every_package_has_its_row() -> None:
    packages = {path.parent.name for path in (ROOT / "hpc_elastic").glob("*/__init__.py")}
    assert set().union(*layers()) == packages


def test_every_module_of_the_glossary_is_there() -> None:
    named = re.findall(r"`(\w+/(?:\w+\.py)?)`", (PAGES / "glossary.md").read_text(encoding="utf-8"))
    assert len(named) > 50
    assert not [path for path in named if path != "hpc_elastic/" and not (ROOT / "hpc_elastic" / path).exists()]


def test_the_packages_that_an_agent_imports_are_those_of_the_answer() -> None:
    names = "(name.split('.')[1] for name in sys.modules if name.startswith('hpc_elastic.'))"
    code = f"import sys, hpc_elastic.agent.main; print(*{names})"
    loaded = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    (answer,) = re.findall(r"^\| What does an agent import\? \| (.*?); never", ARCHITECTURE, re.MULTILINE)
    assert set(re.findall(r"`(\w+)`", answer)) == set(loaded.split())


def test_it_fits_a_page() -> None:
    assert len(ARCHITECTURE.splitlines()) < 100


@pytest.mark.parametrize("link", LINKS, ids=lambda link: f"{link.where}:{link.name}")
def test_a_linked_function_or_class_is_there(link: Step) -> None:
    assert link.find() is not None


@pytest.mark.parametrize("title", TITLES)
def test_a_way_is_told_in_few_functions(title: str) -> None:
    steps = read_way(title)
    assert [step.number for step in steps] == list(range(1, len(steps) + 1))
    assert 8 <= len(steps) <= MOST_STEPS
    assert all(step.code() for step in steps)
