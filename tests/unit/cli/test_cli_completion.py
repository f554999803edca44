"""The completion script in a real bash: its function, and a TAB on a terminal."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hpc_elastic.cli import main as cli
from hpc_elastic.options.run_request import ALL_OPTIONS

_CALL = (
    'source "$1"; shift; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); compopt() { echo "${@: -1}"; }; '
    '_hpc_elastic_completion hpc-elastic; printf "%s\\n" "${COMPREPLY[@]}"'
)
_PATH = f"{Path(sys.executable).parent}:{os.environ['PATH']}"


@pytest.fixture
def script(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Path:
    assert cli.main(["completion", "bash"]) == 0
    path = tmp_path / "completion.bash"
    path.write_text(capsys.readouterr().out)
    work = tmp_path / "work"
    for name in ("20261123-a", "20261123-b"):
        (work / "runs" / name).mkdir(parents=True)
        (work / "runs" / name / "run.json").touch()
    (work / "my script.py").touch()
    monkeypatch.chdir(work)
    monkeypatch.setenv("PATH", _PATH)
    return path


def completed(script: Path, *words: str) -> list[str]:
    line = ["bash", "--norc", "-c", _CALL, "bash", str(script), *words]
    done = subprocess.run(line, check=True, capture_output=True, text=True)
    assert done.stderr == ""
    return sorted(line for line in done.stdout.splitlines() if line)


_FILES, _FOLDERS = ["default"], ["dirnames"]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (["rep"], ["report"]),
        (["submit", "--no"], ["--no-python", "--no-requeue", "--nodefile", "--nodelist", "--nodes", "--notify"]),
        (["submit", "--nodes", "2", "--cluster", "s"], ["slurm"]),
        (["submit", "m"], _FILES),
        (["submit", "--runs-dir", "my"], _FOLDERS),
        (["run", "--max-requ"], ["--max-requeues"]),
        (["report", "2026"], ["20261123-a", "20261123-b"]),
        (["logs", "--runs-dir", "runs", "l"], ["latest"]),
        (["report", "other/"], _FOLDERS),
        (["report", "--format", "h"], ["html"]),
        (["config", "max-re"], ["max-requeues", "max-restarts"]),
    ],
)
def test_what_is_completed(script: Path, line: list[str], expected: list[str]) -> None:
    assert completed(script, "hpc-elastic", *line) == expected


def test_every_option_of_submit_is_completed(script: Path) -> None:
    known = {name for option in ALL_OPTIONS for name in option.names if name.startswith("--")}
    assert known <= set(completed(script, "hpc-elastic", "submit", "--"))


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_have_theirs(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["completion", shell]) == 0
    assert f"_COMPLETE={shell}_complete" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("typed", "shown"),
    [
        ("submit --allow-l", b"--allow-local-runs-dir "),
        ("submit my", b"my\\ script.py "),
        ("submit --runs-dir ru", b"runs/"),
        ("report 20261123-", b"20261123-a"),
    ],
)
def test_a_tab_in_an_interactive_bash(script: Path, typed: str, shown: bytes) -> None:
    pid, fd = pty.fork()
    if pid == 0:
        os.execvpe("bash", ["bash", "--norc", "--noprofile", "-i"], {**os.environ, "TERM": "dumb", "PS1": "$ "})
    try:
        os.write(fd, f"source {script}\n".encode())
        os.write(fd, f"echo hpc-elastic; hpc-elastic {typed}\t\t".encode())
        seen, until = b"", time.monotonic() + 20
        while shown not in seen and time.monotonic() < until:
            if select.select([fd], [], [], 0.2)[0]:
                seen += os.read(fd, 4096)
        assert shown in seen, seen
    finally:
        os.write(fd, b"\x15exit\n")
        os.close(fd)
        os.waitpid(pid, 0)
