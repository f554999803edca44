"""The process of a submitted function's run on this machine, which outlives the submitting program.

`main` is the launcher of the run, with a time limit for each attempt: ``python -c … RUN_DIR SECONDS DELAY``.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from hpc_elastic.base.files import read_json, write_json
from hpc_elastic.base.host_facts import command_line, module_command
from hpc_elastic.base.loop import read_each
from hpc_elastic.options.sbatch import ScriptLines
from hpc_elastic.run.paths import AttemptPaths, RunPaths
from hpc_elastic.submission.call import is_timed_out
from hpc_elastic.workers import tree

_MODULE = "hpc_elastic.submission.local_process"
_LOOK_SECONDS = 0.2
_children: dict[int, subprocess.Popen[bytes]] = {}


def start(paths: RunPaths, *, limit: int, delay: int, lines: ScriptLines, cwd: str) -> None:
    """Start the run. Notice is given `delay` seconds before the `limit` of an attempt; 0: unlimited."""
    command = [*module_command(_MODULE, "main"), str(paths.root), f"{limit}", f"{delay}"]
    if lines:
        body = [*lines.setup, '"$@"', "code=$?", *lines.teardown, 'exit "$code"']
        if not lines.teardown:
            body = [*lines.setup, 'exec "$@"']
        command = ["bash", "-c", "\n".join(body), "bash", *command]
    log = os.open(paths.job_log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=cwd, start_new_session=True
        )
    finally:
        os.close(log)
    _children[process.pid] = process
    proc = tree.look_at(process.pid)
    write_json(
        paths.launcher_json,
        {"pid": process.pid, "starttime": proc.starttime if proc else 0, "host": os.uname().nodename},
    )


def lives(paths: RunPaths) -> bool:
    """Return whether the run's launcher is there; True for one on another machine, where that is unknown."""
    facts = read_json(paths.launcher_json)
    if isinstance(facts, str):
        return False
    if facts.get("host") != os.uname().nodename:
        return True
    proc = _launcher(paths, facts)
    child = _children.get(proc.pid) if proc is not None else None
    return proc is not None and (child is None or child.poll() is None)


def send(paths: RunPaths, number: signal.Signals) -> bool:
    facts = read_json(paths.launcher_json)
    if isinstance(facts, str) or facts.get("host") != os.uname().nodename:
        return False
    proc = _launcher(paths, facts)
    if proc is None:
        return False
    pid = proc.pid
    try:
        for child in tree.children(pid):
            found = tree.look_at(child)
            if found is not None and found.sid == pid and any(_MODULE in word for word in command_line(child)):
                os.kill(child, number)
                return True
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


def _launcher(paths: RunPaths, facts: Mapping[str, object]) -> tree.Proc | None:
    """The run's own launcher, while it lives: a copied run's file may name any process of this user's."""
    pid = facts.get("pid")
    proc = tree.look_at(pid) if type(pid) is int and pid > 1 else None
    if proc is None or proc.is_dead or proc.starttime != facts.get("starttime"):
        return None
    for _ in range(51):  # an execve may just be under way: the kernel sets the arguments last
        if words := command_line(proc.pid):
            break
        time.sleep(0.01)
    root = os.path.realpath(paths.root)
    return proc if any(os.path.realpath(word) == root for word in words if word.startswith("/")) else None


class _TimeLimit(threading.Thread):
    def __init__(self, paths: RunPaths, *, limit: float, delay: float) -> None:
        super().__init__(name="time limit", daemon=True)
        self._paths = paths
        self._limit = limit
        self._seconds = max(0.5, limit - delay)
        self._began = float("inf")
        self._attempts: list[AttemptPaths] = []

    def is_near(self) -> bool:
        asked = [attempt.requeue_asked for attempt in self._attempts]
        if any(read_each(asked, Path.exists, patience=_LOOK_SECONDS).values()):
            return False
        return is_timed_out(time.monotonic() - self._began, limit=self._limit)

    def run(self) -> None:
        from hpc_elastic.base.clock import SystemClock, pause

        clock = SystemClock()
        attempt, due = -1, 0.0
        while True:
            found = self._paths.begun_attempts()
            if found and found[-1].number > attempt:
                attempt, self._began, self._attempts = found[-1].number, clock.monotonic(), found[-1:]
                due = self._began + self._seconds
            if due and clock.monotonic() >= due:
                os.kill(os.getpid(), signal.SIGUSR2)
                due = 0.0
            pause(clock, _LOOK_SECONDS)


def main() -> None:
    run_dir, limit, delay = Path(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])
    time_limit = _TimeLimit(RunPaths(run_dir), limit=limit, delay=delay)
    if limit:
        time_limit.start()
    from hpc_elastic.launch.local import run_local

    sys.exit(run_local(run_dir, limit_is_near=time_limit.is_near))
