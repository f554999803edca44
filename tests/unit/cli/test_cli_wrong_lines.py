r"""Wrong command lines, each with exactly what it prints before it exits with 2: a net that does not look inside.

``wrong_lines.txt`` holds commands as a shell takes them, with what they print below; ``pytest --update-docs`` with this
file writes what they print now. A line ``# FILE: TEXT`` above a command makes that file (``\n`` is a new line).
"""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path

import pytest

from hpc_elastic.cli.main import main

LINES = Path(__file__).with_name("wrong_lines.txt")
_COMMAND = re.compile(r"(?:(?P<variables>(?:[A-Z_]+=\S* )*))hpc-elastic(?P<words>.*)")


def _blocks() -> list[list[str]]:
    """Each block: its `#` lines, its ``$`` line, and what the command prints (and ``exit N``, were it not 2)."""
    return [block.splitlines() for block in LINES.read_text().rstrip("\n").split("\n\n")]


def _printed(block: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The lines of a block with what its command prints now."""
    given = [line for line in block if line.startswith(("# ", "$ "))]
    for line in given[:-1]:
        name, text = line.removeprefix("# ").split(": ", 1)
        Path(name).write_text(text.replace("\\n", "\n") + "\n")
    found = _COMMAND.fullmatch(given[-1].removeprefix("$ "))
    assert found, given[-1]
    for setting in found["variables"].split():
        monkeypatch.setenv(*setting.split("=", 1))
    code = main(shlex.split(found["words"]))
    out, err = capsys.readouterr()
    here = os.getcwd()
    return [*given, *(out + err).replace(here, "/here").splitlines(), *([f"exit {code}"] if code != 2 else [])]


@pytest.mark.parametrize("block", _blocks(), ids=lambda block: next(line for line in block if line[0] == "$")[2:72])
def test_a_wrong_line_prints_this(
    block: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("bin").mkdir()
    for name in ("sbatch", "srun", "squeue", "sacct", "scontrol", "scancel", "sinfo", "sacctmgr"):
        Path("bin", name).write_text(f"#!/bin/sh\necho '{name}: error: no cluster in this test' >&2\nexit 1\n")
        Path("bin", name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in [name for name in os.environ if name.startswith(("SLURM_", "SBATCH_", "PET_", "HPC_ELASTIC_"))]:
        monkeypatch.delenv(name)
    for name, value in (("SITE_CONFIG", ""), ("USER_CONFIG", ""), ("ALLOW_LOCAL_RUNS_DIR", "true")):
        monkeypatch.setenv(f"HPC_ELASTIC_{name}", value)
    Path("train.py").write_text("print('trains')\n")
    printed = _printed(block, capsys, monkeypatch)
    if request.config.getoption("--update-docs"):
        LINES.write_text(LINES.read_text().replace("\n".join(block), "\n".join(printed)))
        return
    assert printed == block
    assert not printed[-1].startswith("exit ")
