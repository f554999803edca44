"""What real Slurms printed: `tests/data/slurm/<version>/`, recorded on a rig of four nodes n1..n4.

``X.txt`` is a command's standard output, ``X.stderr.txt`` its standard error (no file: it was empty), and commands.tsv
holds file, exit code and command. Job ids, nodes and times are those of the recording.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

DATA = Path(__file__).parents[1] / "data" / "slurm"
VERSIONS = ("20.11.4", "22.05.8", "24.11.5", "26.05.5")


@cache
def _exit_codes(version: str) -> dict[str, int]:
    codes: dict[str, int] = {}
    for line in (DATA / version / "commands.tsv").read_text().splitlines():
        cells = line.split("\t")
        if len(cells) >= 2 and cells[1].lstrip("-").isdigit():
            codes[cells[0].removesuffix(".stderr.txt").removesuffix(".txt")] = int(cells[1])
    return codes


def exists(version: str, name: str) -> bool:
    folder = DATA / version
    return (folder / f"{name}.txt").exists() or (folder / f"{name}.stderr.txt").exists()


def captured(version: str, name: str) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of a recorded command."""
    if not exists(version, name):
        raise FileNotFoundError(f"no capture {name} of Slurm {version}")
    texts = []
    for suffix in (".txt", ".stderr.txt"):
        path = DATA / version / (name + suffix)
        texts.append(path.read_text() if path.exists() else "")
    return _exit_codes(version).get(name, 0), texts[0], texts[1]  # a job's output has no exit code


def names(version: str, pattern: str) -> list[str]:
    """The captures whose standard output's file matches `pattern`, without ``.txt``."""
    return sorted(
        path.name.removesuffix(".txt")
        for path in (DATA / version).glob(f"{pattern}.txt")
        if not path.name.endswith(".stderr.txt")
    )
