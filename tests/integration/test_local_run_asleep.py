"""What a run costs while its workers work: nobody polls, and agents are small. (CPU depends on load: tests/bench.)"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import pytest

from hpc_elastic.workers.guardian import GUARDIAN_NAME
from tests.rigs.local_run import LocalRun

SECONDS = 3.0
AGENT_WAKES, GUARDIAN_WAKES, SUPERVISOR_WAKES, FRONT_WAKES = 5.0, 1.0, 3.7, 1.0
"""A second, of all threads: somewhat more than there are. An agent hears a beat, sends one, and looks once; who looked
twice a second would show."""
MEGABYTES = 32.0
"""Resident, with psutil, which the memory check of the health of a node needs (1.3 MB)."""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment in which all is compiled, as installed: who compiles grows by it."""
    env = {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(tmp_path_factory.mktemp("cache"))}
    code = "import hpc_elastic.agent.main"
    subprocess.run([sys.executable, "-c", code], env={**os.environ, **env}, check=True)
    return env


def test_nobody_polls_and_agents_are_small(tmp_path: Path, compiled: dict[str, str]) -> None:
    run = LocalRun(
        tmp_path,
        "",
        nodes=2,
        nproc=2,
        interpreter=["--no-python", "sh", "-c", "touch $LOCAL_RUN_STAGE/$RANK; exec sleep 1000"],
        heartbeat_ttl=20.0,
        environ=compiled,
    )
    with run:
        run.until(lambda: len(list(run.stage.iterdir())) == 4, "all workers")
        agents = [run.agent(node).pid for node in range(2)]
        guardians = [_guardian_of(agent) for agent in agents]
        most = {
            **dict.fromkeys(agents, AGENT_WAKES),
            **dict.fromkeys(guardians, GUARDIAN_WAKES),
            run.supervisor(): SUPERVISOR_WAKES,
            run.front(): FRONT_WAKES,
        }
        time.sleep(0.5)  # what there is to do at the start
        for _ in range(6):  # on a busy machine that takes longer; who polls does it each time
            before, began = _wakes(most), time.monotonic()
            time.sleep(SECONDS)
            passed = time.monotonic() - began
            found = {pid: (count - before[pid]) / passed for pid, count in _wakes(most).items()}
            too_many = {pid: wakes for pid, wakes in found.items() if wakes > most[pid]}
            if not too_many:
                break
        assert too_many == {}
        assert all(_megabytes(agent) < MEGABYTES for agent in agents), [_megabytes(agent) for agent in agents]
        run.signal(signal.SIGINT)
        run.finish()


def _guardian_of(agent: int) -> int:
    children = Path(f"/proc/{agent}/task/{agent}/children").read_text().split()
    return next(int(pid) for pid in children if Path(f"/proc/{pid}/comm").read_text().strip() == GUARDIAN_NAME)


def _wakes(pids: Iterable[int]) -> dict[int, int]:
    """Voluntary context switches of all threads."""
    return {
        pid: sum(
            int((task / "status").read_text().partition("\nvoluntary_ctxt_switches:")[2].split()[0])
            for task in Path(f"/proc/{pid}/task").iterdir()
        )
        for pid in pids
    }


def _megabytes(pid: int) -> float:
    return int(Path(f"/proc/{pid}/status").read_text().partition("VmRSS:")[2].split()[0]) * 1024 / 1e6
