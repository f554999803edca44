"""A program in the style of NVIDIA's extension 0.2 runs when its import is changed: as plain processes, no agent."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.rigs.inprocess_ranks import ROOT, free_ports

pytestmark = pytest.mark.torch


def test_all_hooks_together_restart_after_an_exception(tmp_path: Path) -> None:
    count, port = 4, free_ports()
    shared = {**os.environ, "WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    shared |= {"GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(ROOT)}
    script, logs = ROOT / "tests" / "rigs" / "inprocess_style.py", [tmp_path / f"{rank}.log" for rank in range(count)]
    running = []
    for rank, log in enumerate(logs):
        with open(log, "wb") as output:
            running.append(
                subprocess.Popen(
                    [sys.executable, str(script), str(tmp_path / f"{rank}.json")],
                    env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                )
            )
    try:
        codes = [process.wait(timeout=400) for process in running]
    finally:
        for process in running:
            process.kill()
            process.wait()
    assert codes == [0] * count, "\n".join(log.read_text(errors="replace") for log in logs)
    for rank in range(count):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert found["result"] == {"total": 46.0, "iteration": 1, "rank": rank}
        calls = [call for call in found["calls"] if call != "saved"]
        assert calls == [f"initialize 0 {rank}/4", "cleaned up", f"initialize 1 {rank}/4"]
