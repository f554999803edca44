"""What is still there after each way that a job can end: processes, sockets, files."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.bench.systems import Session, System, TookTooLong
from tests.rigs.local_run import all_below
from tests.rigs.processes import Process, below, sockets_left, sockets_of

SETTLE = 15.0
"""Seconds that anything has to go away in, after what ended the job."""


@dataclass(frozen=True, slots=True)
class Left:
    """What one ending left, by name, so that the table can say more than a number."""

    ending: str
    processes: tuple[str, ...]
    sockets: int
    files: tuple[str, ...]
    seconds: float
    """From the ending's cause until nothing was left, or `SETTLE`."""
    note: str = ""

    @property
    def count(self) -> int:
        return len(self.processes) + self.sockets + len(self.files)


@dataclass(frozen=True, slots=True)
class Ending:
    """One way that a job ends."""

    name: str
    then: str
    """What the workers do (worker.py)."""
    cause: Callable[[Session], None]
    whole_job: bool = True
    """Whether the job ends with it; otherwise the killed agents' own processes are what must be gone."""
    every_agent: bool = False
    """Which agents are killed, where the job goes on: all of them, or the last."""


def _interrupt(session: Session) -> None:
    for process in session.started:
        process.send_signal(signal.SIGINT)


def _kill_started(session: Session) -> None:
    for process in session.started:
        process.kill()


ENDINGS = (
    Ending("all workers exit 0", "exit", lambda session: None),
    Ending("workers raise, restarts exhausted", "raise", lambda session: None),
    Ending("Ctrl-C, a worker's child ignores SIGTERM", "fork", _interrupt),
    Ending("kill -9 of one agent, the job goes on", "fork", lambda session: None, whole_job=False),
    Ending(
        "kill -9 of every agent, which are started again", "fork", lambda _: None, whole_job=False, every_agent=True
    ),
    Ending("kill -9 of what was started", "fork", _kill_started),
)


def measure(system: System, ending: Ending) -> Left:
    """Run a job into this ending and count what is left of it. Never raises for what the job does."""
    with Session(system, "plain", ending.then) as session:
        try:
            if ending.then == "fork":
                session.wait_for_all("child", since=session.began)
            seen = session.processes()
            sockets = sockets_of(process.pid for process in seen)
            if not ending.whole_job:
                return _agents_killed(session, ending)
            began = time.monotonic()
            ending.cause(session)
            note = ""
            try:
                if ending.then in ("exit", "raise"):
                    while any(process.poll() is None for process in session.started):
                        sockets |= sockets_of(process.pid for process in session.processes())
                        if time.monotonic() - began > 60:
                            raise TookTooLong("the job does not end")
                        time.sleep(0.02)
                    began = time.monotonic()
                session.wait_until(lambda: not session.processes(), "end of all processes", limit=SETTLE)
            except TookTooLong as error:
                note = str(error).splitlines()[0]
            return Left(
                ending=ending.name,
                processes=tuple(_name(process) for process in session.processes()),
                sockets=len(sockets_left(sockets)),
                files=_files(session.folder),
                seconds=time.monotonic() - began,
                note=note,
            )
        except TookTooLong as error:
            return Left(ending=ending.name, processes=(), sockets=0, files=(), seconds=0.0, note=str(error))


def _agents_killed(session: Session, ending: Ending) -> Left:
    """Kill agents; what was below them must go, while the job forms a new round or ends."""
    agents = session.agents() if ending.every_agent else session.agents()[-1:]
    everybody = session.processes()
    its_own = [process for agent in agents for process in (agent, *below(agent.pid, everybody))]
    pids = {process.pid for process in its_own}
    ranks = {moment["rank"] for moment in session.moments("line") if moment["pid"] in pids}
    sockets = sockets_of(pids) - sockets_of(process.pid for process in everybody if process.pid not in pids)
    began = time.monotonic()
    for agent in agents:
        os.kill(agent.pid, signal.SIGKILL)
    note = "" if ranks else "the killed agents had no worker"
    try:
        session.wait_until(lambda: not any(process.lives() for process in its_own), "end", limit=SETTLE)
    except TookTooLong:
        note = f"not gone after {SETTLE:.0f} s"
    return Left(
        ending=ending.name,
        processes=tuple(_name(process) for process in its_own if process.lives()),
        sockets=len(sockets_left(sockets)),
        files=(),
        seconds=time.monotonic() - began,
        note=note,
    )


def _name(process: Process) -> str:
    return " ".join(Path(word).name if "/" in word else word for word in process.argv[:4])[:80]


def _files(folder: Path) -> tuple[str, ...]:
    """Files outside the run directory, and temporary ones within it."""
    left = [path for top in ("tmp", "home") for path in all_below(folder / top)]
    left += [path for path in all_below(folder / "runs") if path.name.startswith(".") and path.is_file()]
    return tuple(str(path.relative_to(folder)) for path in left)
