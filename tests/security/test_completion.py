"""A TAB in a folder where others made folders: their names reach the victim's shell as data."""

from __future__ import annotations

import os
import pty
import select
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.rigs.two_users import User

NAMES = (
    "$(>attacked)",
    "`>attacked`",
    "$(touch attacked)",
    "2026 $(>attacked)",
    "2026\n$(>attacked)",
    "2026;touch attacked",
    "2026'$(>attacked)'",
    '2026"$(>attacked)"',
    "2026${IFS}$(>attacked)",
    "2026[$(>attacked)]",
    "2026<(touch attacked)",
    "2026*",
    "~root",
    "-2026",
    "x[$(>attacked)]",
)
LINES = (
    "hpc-elastic report 2026",
    "hpc-elastic report ",
    "hpc-elastic logs --runs-dir runs ",
    "hpc-elastic logs --runs-dir=runs ",
    "hpc-elastic logs --runs-dir '$(>attacked)' ",
    "hpc-elastic logs --runs-dir=$(>attacked) ",
    "hpc-elastic cancel runs/",
    "hpc-elastic submit runs/2",
    "hpc-elastic submit --template runs/",
    "hpc-elastic submit --runs-dir runs/",
    "HPC_ELASTIC_RUNS_DIR='$(>attacked)' ; hpc-elastic report 2026",
    "hpc-elastic report '$(>attacked)",
    "hpc-elastic report a[$(>attacked)]",
    "hpc-elastic $(>attacked)",
    "hpc-elastic submit --cluster $(>attacked)",
)


@pytest.fixture
def planted(attacker: User, victim: User, shared: Path) -> Path:
    """Folders of such names, which look like runs, in the folder in which the victim works; and one real run id."""
    attacker.python(
        """
        import os, sys
        for runs in ("runs", "$(>attacked)"):
            for name in (*sys.argv[2:], "20261126-good"):
                place = os.path.join(sys.argv[1], runs, name)
                os.makedirs(place)
                open(os.path.join(place, "run.json"), "w").close()
        """,
        shared,
        *NAMES,
    )
    (shared / "rc").write_text(victim.hpc_elastic("completion", "bash", check=True).stdout + "PS1='$ '\n")
    return shared


class Terminal:
    """An interactive bash of the victim's, and what it shows."""

    def __init__(self, victim: User, folder: Path) -> None:
        self._fd, theirs = pty.openpty()
        env = {"TERM": "dumb", "INPUTRC": "/dev/null"}
        argv = ["bash", "--noprofile", "--rcfile", str(folder / "rc"), "-i"]
        self._bash = victim.popen(argv, cwd=folder, env=env, stdin=theirs, stdout=theirs, stderr=theirs)
        os.close(theirs)
        self.until("$ ")

    def until(self, text: str, *, within: float = 20.0) -> str:
        seen, end = "", time.monotonic() + within
        while text not in seen and time.monotonic() < end:
            if select.select([self._fd], [], [], 0.2)[0]:
                seen += os.read(self._fd, 65536).decode(errors="replace")
        assert text in seen, seen
        return seen

    def type(self, text: str) -> None:
        os.write(self._fd, text.encode())

    def end(self) -> None:
        self._bash.kill()
        self._bash.wait()
        os.close(self._fd)


@pytest.fixture
def terminal(victim: User, planted: Path) -> Iterator[Terminal]:
    made = Terminal(victim, planted)
    yield made
    made.end()


def test_a_tab_runs_nothing_that_a_name_says(terminal: Terminal, planted: Path) -> None:
    for number, line in enumerate(LINES):
        terminal.type(f"{line}\t\ty\t")  # the second lists them, or asks whether to
        if "attacked" not in line:
            terminal.type("\n")  # what was completed is executed
        terminal.type(f"\x01\x0becho done-$(({number}+100))\n")  # the line is thrown away
        terminal.until(f"done-{number + 100}\r\n")
        assert not (planted / "attacked").exists(), line


def test_only_run_ids_are_offered(terminal: Terminal) -> None:
    terminal.type("echo hpc-elastic; hpc-elastic report 2026\t")
    terminal.until("report 20261126-good ")
