"""What the documentation says to type is understood, and the generated pages are those of this code."""

from __future__ import annotations

import importlib
import re
import shlex
from pathlib import Path

import pytest

from docs import generate
from hpc_elastic.cli import config
from hpc_elastic.cli import main as cli
from hpc_elastic.cli.preflight import DOCTOR_OPTIONS, REHEARSE_OPTIONS
from hpc_elastic.errors import UsageError
from hpc_elastic.options import table, worker_options
from hpc_elastic.options.run_request import ALL_OPTIONS

ROOT = Path(__file__).resolve().parent.parent.parent
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "docs" / "examples").glob("*.sh")])
RUN_OPTIONS = ALL_OPTIONS
ELSEWHERE = {
    "--container", "--nv", "--help", "--help-all", "--version", "--run-dir", "--kill", "--name", "--gpus-per-task",
    "--ntasks", "--no-kill", "--open-mode", "--seed", "--nprocs", "--num_machines", "--ntasks-per-node", "--time-limit",
    "--mem-per-gpu", "--cpus-per-gpu", "--hint", "--licenses",
}  # fmt: skip
"""Options that are no subcommand's or no real ones (the example's are looked up in it)."""


def text_of(page: Path) -> str:
    """A page without what a program printed: help texts are generated, sample output is no command."""
    return re.sub(r"^```text$.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def commands(page: Path) -> list[str]:
    """Every command line of ours: after a prompt, or as inline code."""
    text = text_of(page)
    found = re.findall(r"^\$ (hpc-elastic .*)$", text.replace("\\\n", " "), re.MULTILINE)
    found += re.findall(r"(?<!`)`(hpc-elastic [^`]+)`", text)
    found += re.findall(r"\.venv/bin/(hpc-elastic [^\n)]+)", text)
    return [command for command in found if not command.split()[1].isupper()]


def parse(command: str) -> None:
    """Read a command line as the CLI does. Raises UsageError where the CLI would."""
    _, name, *argv = shlex.split(command, comments=True)
    if name in ("--help", "--version"):
        return
    assert name in cli._SUBCOMMANDS, f"{name} is no subcommand"
    if name in ("submit", "run", "config"):
        options = config.OPTIONS if name == "config" else RUN_OPTIONS
        table.parse(argv, options, refused=worker_options.REFUSED)
        return
    module = importlib.import_module(f"hpc_elastic.cli.{cli._SUBCOMMANDS[name][0]}")
    if argv and (parameters := cli.of_subcommand(module, "PARAMETERS", name)):
        table.read_arguments(name, "", parameters, argv)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_are_understood(page: Path) -> None:
    for command in commands(page):
        parse(command)


def test_commands_are_found_at_all() -> None:
    assert sum(len(commands(page)) for page in PAGES) >= 8
    assert any("--cluster local" in command for command in commands(ROOT / "docs" / "examples" / "quickstart.sh"))


@pytest.mark.parametrize("page", [page for page in PAGES if page.suffix == ".md"], ids=lambda page: page.name)
def test_options_that_are_named_exist(page: Path) -> None:
    known = {name for option in RUN_OPTIONS for name in option.names} | set(worker_options.REFUSED) | ELSEWHERE
    known |= {name for option in worker_options.UNNEEDED for name in option.names}
    known |= set(worker_options.REMOVED) if page.name == "changelog.md" else set()
    example = (ROOT / "docs" / "examples" / "train_digits.py").read_text(encoding="utf-8")
    known |= set(re.findall(r'add_argument\("(--[a-z-]+)"', example))
    for program in ("check.py", "soak/__main__.py"):
        known |= set(re.findall(r"--[a-z-]+", (ROOT / "tests" / program).read_text(encoding="utf-8")))
    for name in ("report", "logs", "status", "list", "clean", "convert", "cancel", "requeue"):
        module = importlib.import_module(f"hpc_elastic.cli.{cli._SUBCOMMANDS[name][0]}")
        known |= {word for parameter in cli.of_subcommand(module, "PARAMETERS", name) for word in parameter.opts}
    known |= {name for option in (*REHEARSE_OPTIONS, *DOCTOR_OPTIONS) for name in option.names}
    named = {word.split("=")[0] for word in re.findall(r"`(--[^`\s]+)", text_of(page))}
    assert not named - known


@pytest.mark.parametrize("name", generate.PAGES)
def test_generated_pages_are_those_of_this_code(name: str) -> None:
    assert (ROOT / name).read_text(encoding="utf-8") == generate.PAGES[name](), "run: python docs/generate.py"


@pytest.mark.parametrize(
    "command", ["hpc-elastic submit --ndoes 4 train.py", "hpc-elastic sbmit train.py", "hpc-elastic report --nodes 4 x"]
)
def test_a_command_that_is_wrong_is_seen(command: str) -> None:
    with pytest.raises((AssertionError, UsageError)):
        parse(command)
