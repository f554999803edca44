"""Command lines against a table of options."""

from __future__ import annotations

import pytest

from hpc_elastic.cli.main import main
from hpc_elastic.options.table import HelpWanted, Option, Parsed, parse

TABLE = (
    Option(names=("-N", "--nodes", "--nnodes"), dest="nodes", metavar="N", help="nodes", env="PET_NNODES"),
    Option(names=("--nproc-per-node",), dest="nproc", metavar="N", help="workers"),
    Option(names=("-m", "--module"), dest="module", help="a module", env="PET_MODULE"),
    Option(names=("--exclusive",), dest="exclusive", metavar="user", optional_value=True, help="alone"),
    Option(names=("--requeue",), dest="requeue", help="again"),
    Option(names=("--no-requeue",), dest="requeue", constant="0", help="never"),
    Option(names=("--sbatch-arg",), dest="extra", metavar="ARG", repeatable=True, help="more"),
)


def read(*argv: str) -> Parsed:
    return parse(argv, TABLE, refused={"--rdzv-backend": "not needed: nodes find each other"})


@pytest.mark.parametrize(
    "argv",
    [
        ("-N", "4", "s.py"),
        ("-N4", "s.py"),
        ("--nodes", "4", "s.py"),
        ("--nodes=4", "s.py"),
        ("--nnodes=4", "s.py"),
        ("--nodes=2", "--nodes=4", "s.py"),
        ("--nodes=4", "--", "s.py"),
    ],
)
def test_spellings(argv: tuple[str, ...]) -> None:
    parsed = read(*argv)
    assert parsed.get("nodes") == "4"
    assert parsed.command == ("s.py",)


def test_underscores_are_dashes_in_names_only() -> None:
    parsed = read("--nproc_per_node=a_b", "my_script.py", "--nproc_per_node")
    assert parsed.get("nproc") == "a_b"
    assert parsed.source("nproc", "") == "--nproc-per-node"
    assert parsed.command == ("my_script.py", "--nproc_per_node")


@pytest.mark.parametrize(
    "tail",
    [
        ["s.py", "--nodes", "9"],
        ["s.py", "--", "-h"],
        ["s.py", "a b", "it's", "$HOME", "new\nline", "é", "", "-"],
        ["-", "x"],
    ],
)
def test_what_follows_the_script_is_the_scripts(tail: list[str]) -> None:
    assert read("-N4", *tail).command == tuple(tail)


def test_the_first_double_dash_ends_ours_and_is_dropped() -> None:
    assert read("--", "--odd-name.py", "--", "x").command == ("--odd-name.py", "--", "x")
    assert read("-N4", "--").command == ()


def test_a_value_may_begin_with_a_dash() -> None:
    assert read("--sbatch-arg", "--licenses=m", "--sbatch-arg=-Lx", "s.py").all("extra") == ("--licenses=m", "-Lx")


def test_flags_and_optional_values() -> None:
    parsed = read("-m", "--exclusive", "--no-requeue", "pkg.mod")
    assert parsed.flag("module")
    assert parsed.get("exclusive") == ""
    assert parsed.get("requeue") == "0"
    assert parsed.command == ("pkg.mod",)
    assert read("--exclusive=user", "s").get("exclusive") == "user"
    assert read("--no-requeue", "--requeue", "s").get("requeue") == "1"
    assert read("s").get("exclusive") is None


@pytest.mark.parametrize("word", ["-h", "--help", "--help-all", "--help_all"])
def test_help_is_asked_for_before_the_script_only(word: str) -> None:
    with pytest.raises(HelpWanted) as wanted:
        read("-N4", word)
    assert wanted.value.everything is ("all" in word)
    assert read("s.py", word).command == ("s.py", word)


@pytest.mark.parametrize("option", ["--dry-run", "--follow", "--wait", "--template"])
def test_what_belongs_to_submit_is_named_so_by_run(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", option, "train.py"]) == 2
    assert f"{option} belongs to hpc-elastic submit" in capsys.readouterr().err
