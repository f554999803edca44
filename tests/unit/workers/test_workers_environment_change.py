"""What ``--setup`` printed, and what is concluded from it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from hpc_elastic.workers.spawn import NO_CHANGE, EnvironmentChange
from hpc_elastic.workers.user_command import CommandEnd, describe_end, last_lines, read_change, setup_command

BASE = {"PATH": "/usr/bin", "GONE": "1", "KEPT": "1", "HPC_ELASTIC_TAG": "mine", "PWD": "/here"}


def printed(env: dict[str, str]) -> bytes:
    return b"".join(f"{name}={value}".encode() + b"\0" for name, value in env.items())


def test_what_was_set_and_removed_is_the_change_and_what_is_ours_stays() -> None:
    after = {"PATH": "/usr/bin", "KEPT": "1", "NEW": "a=b\nc", "HPC_ELASTIC_TAG": "other", "PWD": "/", "SHLVL": "1"}
    change = read_change(CommandEnd(exitcode=0, stdout=printed(after)), BASE)
    assert isinstance(change, EnvironmentChange)
    assert (change.put, change.unset, change.python) == ({"NEW": "a=b\nc"}, {"GONE"}, "")
    assert change.apply({"GONE": "2", "RANK": "0"}) == {"RANK": "0", "NEW": "a=b\nc"}


def test_another_python_first_on_path_is_the_workers(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.touch(mode=0o700)
    change = read_change(CommandEnd(exitcode=0, stdout=printed({**BASE, "PATH": f"{tmp_path}:/usr/bin"})), BASE)
    assert isinstance(change, EnvironmentChange)
    assert change.command([sys.executable, "-u", "train.py"]) == [str(python), "-u", "train.py"]
    assert change.command(["/chosen/python", "train.py"]) == ["/chosen/python", "train.py"]
    assert NO_CHANGE.command([sys.executable]) == [sys.executable]


@pytest.mark.parametrize(
    ("end", "why"),
    [
        (CommandEnd(exitcode=3, stderr=b"loading\nno licence\n"), "exit code 3: no licence"),
        (CommandEnd(exitcode=1, stdout=b"\x014\0ls  /x\0"), "exit code 1 from 'ls /x' (line 4)"),
        (CommandEnd(exitcode=2, stdout=b'\x01\0eval "$1"\0'), "exit code 2"),
        (CommandEnd(exitcode=-9), "SIGKILL"),
        (CommandEnd(exitcode=-9, is_late=True, seconds=300.1), "it had not ended after 300 s"),
        (CommandEnd(exitcode=0), "it has ended before its environment could be read"),
    ],
)
def test_why_a_setup_has_failed(end: CommandEnd, why: str) -> None:
    assert read_change(end, BASE) == why


@pytest.mark.parametrize(
    ("setup", "depth"),
    [("source /a/b.sh", "1"), ("source '/a b/c.sh'", "1"), ("source a.sh; module load x", "0"), ("true", "0")],
)
def test_a_file_that_is_given_is_judged_line_by_line(setup: str, depth: str) -> None:
    assert setup_command(setup)[-2:] == [setup, depth]


def test_what_a_terminal_would_act_on_is_not_passed_on() -> None:
    assert last_lines(b"\x1b[31mred\n\n  \nhpc-elastic: line 19: module: command not found\n", 5) == [
        "?[31mred",
        "module: command not found",
    ]
    assert describe_end(CommandEnd(exitcode=0)) == ""
