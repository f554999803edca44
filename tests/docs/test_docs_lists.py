"""Every exit code, and every variable of the environment that is ours, has its row on its page."""

from __future__ import annotations

import re
from enum import IntEnum
from pathlib import Path

from hpc_elastic.options.config_files import FILE_LAYERS
from hpc_elastic.options.run_request import ALL_OPTIONS
from hpc_elastic.options.table import key_of, variable_of
from hpc_elastic.run import paths

ROOT = Path(__file__).resolve().parent.parent.parent


def page(name: str) -> str:
    return (ROOT / "docs" / "reference" / name).read_text(encoding="utf-8")


def exit_codes() -> set[int]:
    """The numbers of `hpc_elastic.run.paths`: those of its enum, and the constants that are an agent's own."""
    found = {value for name, value in vars(paths).items() if isinstance(value, int) and name.isupper()}
    for kind in vars(paths).values():
        if isinstance(kind, type) and issubclass(kind, IntEnum) and kind is not IntEnum:
            found |= {int(code) for code in kind}
    return found


def test_every_exit_code_has_its_row_and_no_other() -> None:
    described = {int(code) for code in re.findall(r"^- \*\*(\d+)\*\*: ", page("exit-codes.md"), re.MULTILINE)}
    assert len(exit_codes()) >= 12
    assert described == exit_codes()


def source_files() -> list[Path]:
    """What reads or sets variables: the package, and what runs its checks."""
    tests = [ROOT / "tests" / "check.py", ROOT / "tests" / "run.sh", *(ROOT / "tests").glob("*/conftest.py")]
    return [*(ROOT / "hpc_elastic").rglob("*.py"), *tests]


def named_variables() -> set[str]:
    """Every whole name in the source; of a name that is put together, its beginning, with ``_`` at its end."""
    text = "\n".join(path.read_text(encoding="utf-8") for path in source_files() if path.exists())
    found = set(re.findall(r"HPC_ELASTIC_[A-Z_]*[A-Z]\b(?![\[{_*])", text))
    # (f"HPC_ELASTIC_{name}" for name in ("RUN_DIR", ...))
    for names in re.findall(r'f"HPC_ELASTIC_\{name\}" for name in \(([^()]*)\)', text):
        found |= {f"HPC_ELASTIC_{name}" for name in re.findall(r'"([A-Z_]+)"', names)}
    return found | {f"HPC_ELASTIC_{layer.value.upper()}_CONFIG" for layer in FILE_LAYERS}


def test_every_variable_of_ours_is_described_and_no_other() -> None:
    options = {variable_of(option) for option in ALL_OPTIONS}
    described = set(re.findall(r"`(HPC_ELASTIC_[A-Z_]*[A-Z])(?:=1)?`", page("environment.md")))
    named = named_variables()
    assert {"HPC_ELASTIC_RUN_DIR", "HPC_ELASTIC_NODE_TAG", "HPC_ELASTIC_PROFILE"} <= named
    assert not named - described - options
    scripts = "\n".join(
        path.read_text(encoding="utf-8") for path in ROOT.rglob("*.sh") if not {".venv", ".git"} & set(path.parts)
    )
    assert not {name for name in described - named if name not in scripts}


def test_every_option_has_its_place_on_its_pages() -> None:
    shown, keys = page("cli.md"), page("configuration.md")
    for option in (option for option in ALL_OPTIONS if option.help):
        assert any(re.search(rf"{re.escape(name)}\b(?!-)", shown) for name in option.names), option.names
        if option.in_files and option.constant != "0":  # --no-requeue is requeue = false
            assert re.search(rf"`{re.escape(key_of(option))}`", keys), f"{key_of(option)} has no row"
            assert variable_of(option) == f"HPC_ELASTIC_{key_of(option).upper().replace('-', '_')}"  # as the page says


def test_the_readme_says_on_its_first_screen_what_is_needed_and_brought() -> None:
    """Each dependency by name, the oldest Python, the state, what was tried, and the GPUs that were not."""
    first_screen = (ROOT / "README.md").read_text(encoding="utf-8").partition("\n## Try it")[0]
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    dependencies = re.findall(
        r'^    "([\w-]+)[<>=]', project.partition("\ndependencies = [")[2].partition("\n]")[0], re.M
    )
    assert len(dependencies) > 4
    assert [name for name in dependencies if f"`{name}`" not in first_screen] == []
    (oldest,) = re.findall(r'^requires-python = ">=([\d.]+)"', project, re.MULTILINE)
    (torch,) = re.findall(r'^torch = \["torch>=([\d.]+)"\]', project, re.MULTILINE)
    (state,) = re.findall(r'"Development Status :: \d - (\w+)"', project)
    for text in (
        f"Python {oldest} or later",
        f"PyTorch {torch} or later",
        state.lower(),
        "never met a GPU",
        "](docs/images/",
    ):
        assert text in first_screen
    tried = page("versions.md")
    row = next(line for line in first_screen.splitlines() if line.startswith("| Tried with"))
    versions = re.findall(r"\b\d+\.\d+\b", row)
    assert [version for version in versions if version not in tried] == []
