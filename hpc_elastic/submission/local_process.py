"""A submitted function's run on this machine, in a process of its own that outlives the submitting program.

As a program, ``python -c … RUN_DIR SECONDS DELAY``, it is the launcher of the run, with a time limit for each attempt.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hpc_elastic.atomic_file import read_json, write_json
from hpc_elastic.launch.attempts import begun_attempts
from hpc_elastic.processes import tree
from hpc_elastic.run_paths import RunPaths
from hpc_elastic.self_command import module_command
from hpc_elastic.slurm.sbatch import ScriptLines
from hpc_elastic.submission import places

_LOOK_SECONDS = 0.2
_children: dict[int, subprocess.Popen[bytes]] = {}
"""Launchers that this process started, to be waited for when they have ended."""


def start(paths: RunPaths, *, limit: float, delay: float, lines: ScriptLines, env: Mapping[str, str], cwd: str) -> None:
    """Start the run.

    Args:
        paths: The run's, just made.
        limit: Seconds that an attempt may take; 0: as long as it likes.
        delay: Seconds before that at which notice is given.
        lines: Shell commands around it.
        env: For the launcher, the agents and the workers.
        cwd: Where.
    """
    command = [*module_command("hpc_elastic.submission.local_process", "main"), str(paths.root), f"{limit}", f"{delay}"]
    if lines:
        body = [*lines.setup, '"$@"', "code=$?", *lines.teardown, 'exit "$code"']
        if not lines.teardown:
            body = [*lines.setup, 'exec "$@"']
        command = ["bash", "-c", "\n".join(body), "bash", *command]
    log = os.open(paths.job_log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=dict(env), cwd=cwd, start_new_session=True
        )
    finally:
        os.close(log)
    _children[process.pid] = process
    proc = tree.look_at(process.pid)
    write_json(
        places.launcher_file(paths),
        {"pid": process.pid, "starttime": proc.starttime if proc else 0, "host": os.uname().nodename},
    )


def lives(paths: RunPaths) -> bool:
    """Whether the run's launcher is there. On another machine's nothing can be said: yes."""
    facts = _launcher(paths)
    if facts is None:
        return False
    if facts.host != os.uname().nodename:
        return True
    child = _children.get(facts.pid)
    if child is not None and child.poll() is not None:
        return False
    return facts.is_running(paths)


def send(paths: RunPaths, number: signal.Signals) -> bool:
    """A signal for the launcher (and its shell, where it has one); False where it is not there."""
    facts = _launcher(paths)
    if facts is None or facts.host != os.uname().nodename or not facts.is_running(paths):
        return False
    try:
        for proc in tree.subtree(tree.all_processes(), [facts.pid]):
            if proc.ppid == facts.pid and proc.sid == facts.pid and _launches(proc.pid, paths):
                os.kill(proc.pid, number)
                return True
        os.kill(facts.pid, number)
    except ProcessLookupError:
        return False
    return True


@dataclass(frozen=True, slots=True)
class _Launcher:
    """What launcher.json says."""

    pid: int
    starttime: int
    host: str

    def is_running(self, paths: RunPaths) -> bool:
        """Whether the process is there, and launches this run: another user may have prepared the file."""
        proc = tree.look_at(self.pid)
        is_same = proc is not None and not proc.is_dead and proc.starttime == self.starttime
        return is_same and _launches(self.pid, paths)


def _launcher(paths: RunPaths) -> _Launcher | None:
    value = read_json(places.launcher_file(paths))
    if isinstance(value, str):
        return None
    pid, starttime, host = value.get("pid"), value.get("starttime"), value.get("host")
    if type(pid) is not int or pid <= 1 or type(starttime) is not int or not isinstance(host, str):
        return None
    return _Launcher(pid, starttime, host)


def _launches(pid: int, paths: RunPaths) -> bool:
    """Whether a process, by its arguments, is the launcher of this run, or its shell."""
    try:
        words = [os.fsdecode(word) for word in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")]
    except OSError:
        return False
    is_launcher = any("hpc_elastic.submission.local_process" in word for word in words)
    return is_launcher and any(os.path.basename(word) == paths.root.name for word in words)


class _TimeLimit(threading.Thread):
    """Gives this process notice, in each attempt once, before its time is over."""

    def __init__(self, paths: RunPaths, *, seconds: float) -> None:
        super().__init__(name="time limit", daemon=True)
        self._paths = paths
        self._seconds = seconds

    def run(self) -> None:
        from hpc_elastic.clock import SystemClock

        clock, never = SystemClock(), threading.Event()
        attempt, due = -1, 0.0
        while True:
            found = begun_attempts(self._paths)
            if found and found[-1].number > attempt:
                attempt, due = found[-1].number, clock.monotonic() + self._seconds
            if due and clock.monotonic() >= due:
                os.kill(os.getpid(), signal.SIGUSR2)
                due = 0.0
            clock.wait(never, _LOOK_SECONDS)


def main() -> None:
    """Run, in the process that `start` started."""
    run_dir, limit, delay = Path(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])
    if limit:
        _TimeLimit(RunPaths(run_dir), seconds=max(0.5, limit - delay)).start()
    from hpc_elastic.launch.local_launch import run_local

    sys.exit(run_local(run_dir))
