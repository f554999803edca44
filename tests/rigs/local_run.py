"""A real run by the local launcher, in a process of its own: started, disturbed, looked at, and cleared up after.

Workers are small scripts without torch. Each imports `stage` (written beside it), by which it tells the test what it
sees (`tell`) and waits for the test's word (`wait_for`): no test of a run sleeps.
"""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import textwrap
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpc_elastic.failures.stacks import look_at_process
from hpc_elastic.run.option_values import StartMethod
from hpc_elastic.run.paths import AttemptPaths, RankPaths, RunPaths
from hpc_elastic.workers.tree import NODE_TAG_VARIABLE, TAG_VARIABLE
from tests.rigs.event_pairs import read_events
from tests.rigs.folded_run import unfold
from tests.rigs.processes import Process, all_processes, bare_environ, below, kill_all, sockets_left, sockets_of

ROOT = Path(__file__).resolve().parents[2]
MARK = "LOCAL_RUN_MARK"
START_METHODS = tuple(method.value for method in StartMethod)
PATIENCE = 80.0
"""Seconds after which a moment that has not come never will; less than the 100 s of what nobody is to wait for."""
_POLL = 0.01

_STAGE = '''
"""What a worker and its test say to each other: files in one folder."""
import json, os, signal, subprocess, sys, time

FOLDER = os.environ["LOCAL_RUN_STAGE"]
RANK = int(os.environ["RANK"])
ROUND = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
ATTEMPT = int(os.environ["HPC_ELASTIC_ATTEMPT"])
WORLD = int(os.environ["WORLD_SIZE"])


def tell(moment, **facts):
    name = f"{ATTEMPT}-{ROUND}-{RANK}-{os.getpid()}-{moment}"
    value = {"moment": moment, "attempt": ATTEMPT, "round": ROUND, "rank": RANK, "pid": os.getpid(),
             "t": time.time_ns(), **facts}
    with open(f"{FOLDER}/.{name}", "w") as file:
        json.dump(value, file)
    os.rename(f"{FOLDER}/.{name}", f"{FOLDER}/{name}")


def is_said(word):
    return os.path.exists(f"{FOLDER}/say-{word}")


def wait_for(word, seconds=240.0):
    deadline = time.monotonic() + seconds
    while not is_said(word):
        if time.monotonic() > deadline:
            raise TimeoutError(f"nobody said {word}")
        time.sleep(0.01)


def others_in_round():
    """Wait until all ranks of this round have told that they are here."""
    deadline = time.monotonic() + 240.0
    while True:
        here = {name.split("-")[2] for name in os.listdir(FOLDER)
                if name.startswith(f"{ATTEMPT}-{ROUND}-") and name.endswith("-here")}
        if len(here) == WORLD:
            return
        if time.monotonic() > deadline:
            raise TimeoutError("the others did not come")
        time.sleep(0.01)
'''


class TookTooLong(AssertionError):
    """A moment that did not come; says which, and what the run had to say last."""


@dataclass
class LocalRun:
    """One run, and everything that the test gave it. For a ``with``: at its end nothing may be left, and nothing is."""

    folder: Path
    """Of the test; empty."""
    script: str
    """Python, after `prelude`; the leading blanks are taken away."""
    nodes: int = 2
    min_nodes: int | None = None
    nproc: int | str = 1
    arguments: Sequence[str] = ()
    options: Sequence[str] = ()
    """Further ones of ``hpc-elastic run``."""
    environ: Mapping[str, str] = field(default_factory=dict)
    heartbeat_ttl: float = 3.0
    umask: int = 0o022
    runs_dir: Path | None = None
    interpreter: Sequence[str] | None = None
    """The whole command line of the workers in place of the script."""
    before: Sequence[str] = ()
    """A program that starts the run's process, such as strace with its arguments."""
    prelude: str = "from stage import *\n"
    """The script's first lines; empty for a script that knows nothing of its test."""
    start_method: str = "spawn"
    """`forkserver`: the workers are forks, of a server that has imported torch where the script names it."""

    def __post_init__(self) -> None:
        self.mark = uuid.uuid4().hex
        self.stage = self.folder / "stage"
        self.tmp = self.folder / "tmp"
        self.runs = self.runs_dir or self.folder / "runs"
        for path in (self.stage, self.tmp, self.folder / "home", self.folder / "state", self.runs):
            path.mkdir(mode=0o700, exist_ok=True)
        self.script_path = self.folder / "train.py"
        (self.folder / "stage.py").write_text(_STAGE)
        self.script_path.write_text(self.prelude + textwrap.dedent(self.script))
        self.log_path = self.folder / "job.log"
        self._supervisor: subprocess.Popen[bytes] | None = None
        self._behind: int | None = None
        self._sockets: set[str] = set()
        self._run_dir: Path | None = None
        self._uid = ""
        """Kept: a test may remove the run directory."""

    # -- its life ------------------------------------------------------------------------------------------------

    def __enter__(self) -> LocalRun:
        nodes = str(self.nodes) if self.min_nodes is None else f"{self.min_nodes}-{self.nodes}"
        command = [*self.before, sys.executable, "-m", "hpc_elastic", "run", "--cluster", "local", "--nodes", nodes]
        command += ["--nproc-per-node", str(self.nproc), "--runs-dir", str(self.runs)]
        command += ["--rdzv-conf", f"heartbeat_ttl={self.heartbeat_ttl:g}"]
        command += ["--max-requeues", "0", *self.options]
        if self.start_method != "spawn":
            command += ["--start-method", self.start_method, "--preload", "auto" if self._names_torch() else "json"]
        command += self.interpreter if self.interpreter is not None else [str(self.script_path), *self.arguments]
        with open(self.log_path, "ab") as log:
            self._supervisor = subprocess.Popen(
                command,
                cwd=self.folder,
                env=self._environ(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                umask=self.umask,
                start_new_session=True,
            )
        return self

    def _names_torch(self) -> bool:
        scripts = [*self.folder.glob("*.py"), *(Path(word) for word in self.interpreter or () if word.endswith(".py"))]
        return any("torch" in path.read_text(errors="replace") for path in scripts)

    def _environ(self) -> dict[str, str]:
        return {
            **bare_environ(),
            MARK: self.mark,
            "LOCAL_RUN_STAGE": str(self.stage),
            "TMPDIR": str(self.tmp),
            "XDG_RUNTIME_DIR": str(self.tmp),
            "XDG_STATE_HOME": str(self.folder / "state"),
            "HOME": str(self.folder / "home"),
            # Where dependencies were brought along in a folder, they stand there.
            "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
            **self.environ,
        }

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            if kind is None:
                self.finish()
                self.check_nothing_left()
        finally:
            self._kill_all()

    def _kill_all(self) -> None:
        deadline = time.monotonic() + 10.0
        while (left := self.processes()) and time.monotonic() < deadline:
            kill_all(process.pid for process in left)
            time.sleep(_POLL)
        if self._supervisor is not None:
            self._supervisor.kill()
            self._supervisor.wait()

    def finish(self, *, within: float = PATIENCE) -> int:
        """Wait for the end of the run. Returns its exit code."""
        assert self._supervisor is not None
        try:
            return self._supervisor.wait(within)
        except subprocess.TimeoutExpired:
            raise TookTooLong(f"the run does not end\n{self.log_tail()}\n{self._what_is_left()}") from None

    def finish_well(self) -> None:
        """End the workers' `wait_for("end")`, and with that the run."""
        self.say("end")
        code = self.finish()
        assert code == 0, f"the run ended with {code}\n{self.log_tail()}"

    def _what_is_left(self) -> str:
        """Each process of the run, and where in the kernel its threads stand."""
        lines = []
        for process in self.processes():
            threads = look_at_process(process.pid).threads
            lines += [str(process), *(f"    {thread.name}: {thread.describe()}" for thread in threads)]
        return "\n".join(lines)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the run, as a shell does: its front, which hands it to the supervisor. SIGKILL: to both."""
        assert self._supervisor is not None
        if number is signal.SIGKILL:
            supervisor = self.supervisor()
            self._supervisor.send_signal(signal.SIGSTOP)  # else it might see the other's end, and end by itself
            os.kill(supervisor, number)
        self._supervisor.send_signal(number)

    # -- what can be seen of it ----------------------------------------------------------------------------------

    def until(
        self, condition: Callable[[], Any], what: str, *, within: float = PATIENCE, after_its_end: bool = False
    ) -> Any:
        """Wait for a condition to be true, in vain once the run has ended unless `after_its_end`. Returns its value."""
        assert self._supervisor is not None
        deadline = time.monotonic() + within
        while True:
            has_ended = self._supervisor.poll() is not None and not after_its_end
            if value := condition():
                return value
            if has_ended or time.monotonic() > deadline:
                when = "before the run ended" if has_ended else f"within {within:g} s"
                raise TookTooLong(f"no {what} {when}\n{self.log_tail()}")
            time.sleep(_POLL)

    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def log_tail(self) -> str:
        return "\n".join(self.log().splitlines()[-60:])

    @property
    def paths(self) -> RunPaths:
        if self._run_dir is None:
            self._run_dir = self.until(
                lambda: next((path.parent for path in self.runs.glob("*/run.json")), None),
                "run directory",
                after_its_end=True,
            )
        return RunPaths(self._run_dir)

    def attempt(self, number: int = 0) -> AttemptPaths:
        """Its files where they were written, also when the run is over."""
        attempt = self.paths.attempt(number)
        if self._supervisor is not None and self._supervisor.poll() is not None:
            unfold(attempt.root)
        return attempt

    def rank(self, rank: int, *, round_index: int = 0, attempt: int = 0) -> RankPaths:
        return self.attempt(attempt).rank(round_index, rank)

    @property
    def uid(self) -> str:
        if not self._uid:
            self._uid = str(json.loads(self.paths.run_json.read_text())["uid"])
        return self._uid

    def events(self, name: str, *, attempt: int = 0) -> list[dict[str, Any]]:
        """All events of this name, by time (one machine, one clock)."""
        found = [event for event in read_events(self.attempt(attempt).events) if event["event"] == name]
        return sorted(found, key=lambda event: event["t"])

    def report(self, attempt: int = 0) -> dict[str, Any]:
        value: dict[str, Any] = json.loads(self.attempt(attempt).report_json.read_text())
        return value

    # -- workers -------------------------------------------------------------------------------------------------

    def say(self, word: str) -> None:
        """The workers' `wait_for(word)` ends."""
        (self.stage / f"say-{word}").touch()

    def moments(
        self, moment: str, *, round_index: int | None = None, attempt: int | None = None
    ) -> list[dict[str, Any]]:
        """What the workers told under this name, by time."""
        found = []
        for path in self.stage.glob(f"[0-9]*-{moment}"):
            value = json.loads(path.read_text())
            if round_index in (None, value["round"]) and attempt in (None, value["attempt"]):
                found.append(value)
        return sorted(found, key=lambda value: value["t"])

    def wait_moments(
        self, moment: str, *, count: int, round_index: int | None = None, attempt: int | None = None
    ) -> list[dict[str, Any]]:
        """Wait until `count` workers (of the round) have told `moment`; by rank."""
        self.until(
            lambda: len(self.moments(moment, round_index=round_index, attempt=attempt)) >= count,
            f"'{moment}' of {count} workers (round {round_index}, attempt {attempt})",
        )
        self._remember_sockets()
        found = self.moments(moment, round_index=round_index, attempt=attempt)
        return sorted(found, key=lambda value: (value["round"], value["rank"]))

    def worker(self, rank: int, *, round_index: int, attempt: int = 0) -> int:
        """The pid of a rank's worker in a round that has told that it is here."""
        for value in self.moments("here", round_index=round_index, attempt=attempt):
            if value["rank"] == rank:
                return int(value["pid"])
        raise AssertionError(f"rank {rank} has not told 'here' in round {round_index}")

    def kill_worker(self, rank: int, *, round_index: int) -> None:
        os.kill(self.worker(rank, round_index=round_index), signal.SIGKILL)

    # -- processes -----------------------------------------------------------------------------------------------

    def processes(self) -> list[Process]:
        """Every living process that the run started, by the mark in its environment or by the run's own tags."""
        return [process for process in all_processes() if self._is_ours(process)]

    def _is_ours(self, process: Process) -> bool:
        if process.environ.get(MARK) == self.mark:
            return True
        if self._run_dir is None:
            return False
        tags = (process.environ.get(TAG_VARIABLE, ""), process.environ.get(NODE_TAG_VARIABLE, ""))
        return any(tag.startswith(self.uid) for tag in tags)

    def front(self) -> int:
        assert self._supervisor is not None
        return self._supervisor.pid

    def supervisor(self) -> int:
        """The pid of the process behind it."""
        if self._behind is None:
            front = self.front()
            self._behind = self.until(
                lambda: next((p.pid for p in self.processes() if p.parent == front), None), "supervisor"
            )
        assert self._behind is not None
        return self._behind

    def agent(self, node: int) -> Process:
        """The agent of a node, waited for."""
        found = self.until(lambda: self._agent(node), f"agent on node {node}")
        assert isinstance(found, Process)
        return found

    def _agent(self, node: int) -> Process | None:
        children = [process for process in self.processes() if process.parent == self.supervisor()]
        # Between fork and exec it still has the supervisor's own arguments and environment.
        mine = [p for p in children if p.environ.get(NODE_TAG_VARIABLE, "").endswith(f":{node}")]
        return mine[0] if mine else None

    def kill_agent_in_a_round(self, node: int) -> None:
        """SIGKILL the agent of a node, once its workers run."""

        def found() -> Process | None:
            agent = self._agent(node)
            return agent if agent is not None and self._workers_of(agent) else None

        agent = self.until(found, f"agent with workers on node {node}")
        os.kill(agent.pid, signal.SIGKILL)
        # Else the next call might find the same one, dying.
        self.until(lambda: not agent.lives(), f"end of the agent on node {node}")

    def _workers_of(self, agent: Process) -> list[Process]:
        # Not by their environment, which is the fork server's where they are forks of it.
        started = {pid for event in self.events("workers_started") for pid in event["pids"]}
        return [p for p in self.processes() if p.parent == agent.pid and p.pid in started]

    def is_alive(self, pid: int) -> bool:
        return any(process.pid == pid for process in self.processes())

    def below(self, process: Process) -> list[Process]:
        return below(process.pid, self.processes())

    def tagged(self, node: int) -> list[Process]:
        """A node's workers and everything that they started, daemons included."""
        wanted = f"{self.uid}:{node}:"
        return [p for p in self.processes() if p.environ.get(TAG_VARIABLE, "").startswith(wanted)]

    # -- what must not be left -----------------------------------------------------------------------------------

    def _remember_sockets(self) -> None:
        self._sockets |= sockets_of(process.pid for process in self.processes())

    def check_nothing_left(self, *, within: float = 0.0) -> None:
        """No process, socket or temporary file of the run is there, `within` seconds from now at the latest."""
        deadline = time.monotonic() + within
        while (left := self.left()) and time.monotonic() < deadline:
            time.sleep(_POLL)
        if left:
            raise AssertionError("left behind: " + "; ".join(left) + f"\n{self.log_tail()}")

    def left(self) -> list[str]:
        found = [f"process {process}" for process in self.processes()]
        found += [f"socket {inode}" for inode in sockets_left(self._sockets)]
        for top in (self.tmp, self.folder / "home"):
            found += [f"file {path}" for path in all_below(top)]
        found += [f"temporary file {path}" for path in all_below(self.runs) if path.name.startswith(".")]
        names = (self.uid, self.paths.run_id) if self._run_dir is not None else ()
        for folder in ("/tmp", "/dev/shm", "/var/tmp"):
            found += [f"file {folder}/{name}" for name in os.listdir(folder) if any(word in name for word in names)]
        return found


def all_below(folder: Path) -> Iterator[Path]:
    """All that is in a folder. Python 3.11.2's `Path.rglob` fails at a link whose text is too long for a path."""
    for root, folders, files in os.walk(folder):
        yield from (Path(root, name) for name in (*folders, *files))


def open_to_others(folder: Path) -> list[str]:
    """What below `folder`, itself included, another user could read or write (links aside)."""
    found = []
    for path in (folder, *all_below(folder)):
        mode = path.lstat().st_mode
        if not stat.S_ISLNK(mode) and mode & 0o077:
            found.append(f"{path}: {stat.S_IMODE(mode):04o}")
    return found
