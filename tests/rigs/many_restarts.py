"""One agent whose worker fails at once, again and again: what grows with the number of rounds, and what does not."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.rigs.local_run import LocalRun
from tests.rigs.processes import children, resident_mb


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentState:
    """What an agent holds after so many rounds."""

    rounds: int
    descriptors: int
    threads: int
    children: int
    resident: float
    """MB."""
    files: int
    """In the run directory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Restarts:
    early: AgentState
    late: AgentState
    seconds: float
    """From the early state to the late one."""

    @property
    def seconds_each(self) -> float:
        return self.seconds / max(1, self.late.rounds - self.early.rounds)

    @property
    def files_each(self) -> float:
        return (self.late.files - self.early.files) / max(1, self.late.rounds - self.early.rounds)

    @property
    def kib_each(self) -> float:
        return (self.late.resident - self.early.resident) * 1e6 / 1024 / max(1, self.late.rounds - self.early.rounds)


def restart(folder: Path, *, rounds: int, warm: int, environ: Mapping[str, str] | None = None) -> Restarts:
    """Run the real agent, whose worker fails `rounds` times; look at it after `warm` of them and after all."""
    command = ["--no-python", "sh", "-c", "test $TORCHELASTIC_RESTART_COUNT -lt $ROUNDS && exit 7; sleep 1000"]
    run = LocalRun(
        folder,
        "",
        nodes=1,
        interpreter=command,
        options=["--max-restarts", str(rounds + 10), "--max-same-failures", "0"],
        environ={**(environ or {}), "ROUNDS": str(rounds)},
    )
    with run:
        agent = run.agent(0).pid
        run.until(lambda: _rounds(run) >= warm, f"round {warm}", within=60 + warm)
        early, began = _look(run, agent), time.monotonic()
        run.until(lambda: _rounds(run) >= rounds, f"round {rounds}", within=60 + rounds)
        late, seconds = _look(run, agent), time.monotonic() - began
        os.kill(run.front(), 15)
        run.finish()
    return Restarts(early=early, late=late, seconds=seconds)


def _rounds(run: LocalRun) -> int:
    found = [int(path.name.partition("-")[2]) for path in run.attempt().root.glob("round-*")]
    return max(found, default=-1)


def _look(run: LocalRun, agent: int) -> AgentState:
    return AgentState(
        rounds=_rounds(run),
        descriptors=len(os.listdir(f"/proc/{agent}/fd")),
        threads=len(os.listdir(f"/proc/{agent}/task")),
        children=len(children(agent)),
        resident=resident_mb(agent),
        files=sum(len(files) for _, _, files in os.walk(run.paths.root)),
    )
