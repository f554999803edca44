"""What a run costs while its workers work: nobody polls, and agents are small. (CPU depends on load: tests/bench.)"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.rigs.local_run import LocalRun
from tests.rigs.processes import cost, guardian_of, resident_mb

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
    code = (
        "import hpc_elastic.agent.main; from hpc_elastic.agent import part, rounds; rounds.load()\n"
        "for name, _, _ in part.PARTS: __import__(f'hpc_elastic.agent.{name}')"
    )
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
        guardians = [guardian_of(agent) for agent in agents]
        most = {
            **dict.fromkeys(agents, AGENT_WAKES),
            **dict.fromkeys(guardians, GUARDIAN_WAKES),
            run.supervisor(): SUPERVISOR_WAKES,
            run.front(): FRONT_WAKES,
        }
        time.sleep(0.5)  # what there is to do at the start
        for _ in range(6):  # on a busy machine that takes longer; who polls does it each time
            before, began = {pid: cost(pid)[1] for pid in most}, time.monotonic()
            time.sleep(SECONDS)
            passed = time.monotonic() - began
            found = {pid: (cost(pid)[1] - before[pid]) / passed for pid in most}
            too_many = {pid: wakes for pid, wakes in found.items() if wakes > most[pid]}
            if not too_many:
                break
        assert too_many == {}
        sizes = [resident_mb(agent) for agent in agents]
        assert max(sizes) < MEGABYTES, sizes
        run.signal(signal.SIGINT)
        run.finish()
