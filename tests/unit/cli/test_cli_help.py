"""``--help`` and ``--help-all`` of the subcommands that have our own table of options."""

from __future__ import annotations

import re

import pytest

from hpc_elastic.cli import main as cli
from hpc_elastic.options.run_request import ALL_OPTIONS
from hpc_elastic.options.table import Group

WIDTHS = (60, 80, 100, 120, 200)


def help_of(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert cli.main(argv) == 0
    return capsys.readouterr().out


def named(text: str) -> set[str]:
    """The options that have a line of their own."""
    lines = re.findall(r"(?m)^  (?:-\w, )?(--[a-z-]+)", text)
    return set(lines) - {"--"}


def is_command(line: str) -> bool:
    """An example, which stands on one line so that it can be pasted."""
    return line.startswith(("  hpc-elastic ", "  srun "))


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", ["submit", "run", "agent", "config"])
@pytest.mark.parametrize("which", ["--help", "--help-all"])
def test_no_line_is_wider_than_the_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, width: int, name: str, which: str
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    text = help_of(capsys, name, which)
    wide = [line for line in text.splitlines() if len(line) > width and not is_command(line)]
    assert not [line for line in wide if len(line.split()) > 1], wide
    assert len(wide) <= 2  # a metavar of one word


def sections(text: str) -> dict[str, list[str]]:
    """Title → its options, in order."""
    parts = re.split(r"(?m)^(\S.*):$", text)[1:]
    return {
        title: re.findall(r"(?m)^  (?:-\w, )?(--[a-z-]+)", part)
        for title, part in zip(parts[::2], parts[1::2], strict=True)
    }


THEN = ["--setup", "--export", "--container-image", "--hangs"]


@pytest.mark.parametrize(
    ("name", "first", "then"),
    [
        ("submit", "--nodes --gpus-per-node --nproc-per-node --time --partition --max-restarts", THEN),
        ("run", "--nodes --nproc-per-node --cluster --runs-dir --module --max-restarts", [*THEN[:1], *THEN[2:]]),
        ("rehearse", "--nodes --gpus-per-node --nproc-per-node --time --partition --max-restarts", None),
    ],
)
def test_the_short_help_begins_with_six_options(
    capsys: pytest.CaptureFixture[str], name: str, first: str, then: list[str] | None
) -> None:
    text = help_of(capsys, name, "--help")
    found = sections(text)
    assert found["options that matter most"] == first.split()
    assert found.get("often needed, too") == then
    assert f"hpc-elastic {name} --help-all" in " ".join(text.split())
    assert "--segment" not in text


def test_the_full_help_has_every_option_in_its_group(capsys: pytest.CaptureFixture[str]) -> None:
    text = help_of(capsys, "submit", "--help-all")
    for option in (option for option in ALL_OPTIONS if option.help):
        assert any(line.startswith("  " + ", ".join(option.names)) for line in text.splitlines()), option.names
    titles = [group.value for group in Group if group is not Group.SHOWN]
    assert [line[:-1] for line in text.splitlines() if line[:-1] in titles] == titles
    assert "[PET_NNODES]" in text
    assert "--exclusive[=user|mcs]" in text


def test_run_and_agent_show_what_they_take(capsys: pytest.CaptureFixture[str]) -> None:
    of_run, of_agent = help_of(capsys, "run", "--help-all"), help_of(capsys, "agent", "--help-all")
    for option in ("--partition", "--time", "--mail-type", "--sbatch-arg", "--dry-run", "--follow", "--template"):
        assert option not in named(of_run) | named(of_agent)
    assert {"--nodes", "--nodelist", "--exclude", "--cluster", "--srun-arg"} <= named(of_run)
    only_run = {"--nodelist", "--exclude", "--cluster", "--srun-arg"}
    assert named(of_run) - named(of_agent) == only_run
    assert named(help_of(capsys, "config", "--help")) == {"--json", "--all", "--profile"}
    assert "--partition" in named(help_of(capsys, "config", "--help-all"))


def test_what_has_no_effect_is_hidden_and_named_all_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    """A command line that was written for submit can be given to run."""
    assert cli.main(["run", "--cluster", "local", "-p", "gpu", "--nodes", "0", "x.py"]) == 2
    assert "no effect without Slurm: -p" in capsys.readouterr().err


def test_the_examples_of_configs_help_hold(capsys: pytest.CaptureFixture[str]) -> None:
    """The others need a script or a cluster; ``tests/docs`` runs those that the documentation shows."""
    examples = re.findall(r"(?m)^  hpc-elastic (config.*)$", help_of(capsys, "config", "--help"))
    assert len(examples) == 2
    for example in examples:
        assert cli.main(example.split()) == 0, example
