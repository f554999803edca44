"""What of the in-process restart group needs no torch, on every Python that is installed here."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.rigs.pythons import pythons

SCRIPT = Path(__file__).resolve().parents[1] / "rigs" / "inprocess_without_torch.py"
CASES = 10


def test_interruptions_and_the_probe_on_every_python() -> None:
    found = pythons()
    running = {
        version: subprocess.Popen(
            [path, "-I", str(SCRIPT)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for version, path in found.items()
    }
    for version, process in running.items():
        output, _ = process.communicate(timeout=400)
        assert process.returncode == 0, f"Python {version}\n{output}"
        assert output.count(": ok\n") == CASES, f"Python {version}\n{output}"
