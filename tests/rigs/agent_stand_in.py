"""A stand-in for the agent in a process of its own: what ends "all descendants" must not run inside pytest."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]

_PREAMBLE = '''
import json, os, resource, select, signal, subprocess, sys, textwrap, threading, time
from pathlib import Path
from hpc_elastic.base.clock import SystemClock
from hpc_elastic.workers import guardian, linux, spawn, stop, tree

def report(**facts):
    print(json.dumps(facts), flush=True)

def until(condition, seconds=60.0):
    """Wait for a condition with a deadline."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise TimeoutError("waited in vain")
        time.sleep(0.005)
    return value

clock = SystemClock()
inherited = spawn.prepare_agent_process()

def start(code, *args, cwd="/", **env):
    return spawn.start_worker(
        argv=[sys.executable, "-S", "-c", "import os, signal, sys, time\\n" + textwrap.dedent(code), *args],
        env={**os.environ, **env}, cwd=cwd, inherited=inherited, clock=clock,
    )

def read_line(fd, seconds=60.0):
    """A line of a worker's output."""
    poll, text, deadline = select.poll(), b"", time.monotonic() + seconds
    poll.register(fd, select.POLLIN)
    while not text.endswith(b"\\n"):
        if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
            raise TimeoutError(f"only {text!r} came")
        more = os.read(fd, 1)
        if not more:
            raise EOFError(text)
        text += more
    return text.decode().strip()

def finish(stopper):
    """Drive a GroupStopper to its end as an event loop would."""
    while not isinstance(result := stopper.step(), stop.Stopped):
        time.sleep(min(result, 0.01))
    return result

def stop_group(workers, grace=30, **changes):
    """Stop a group with SIGTERM first."""
    stopper = stop.GroupStopper(workers, grace=grace, clock=clock, **changes)
    stopper.begin()
    return finish(stopper)

def begin_with_stacks(workers):
    """Begin to stop a group, each asked for its stack first."""
    from hpc_elastic.agent.hang_stop import StacksThenStop, find_targets
    group = stop.GroupStopper(workers, grace=30, clock=clock)
    stopper = StacksThenStop(find_targets([(worker, 0) for worker in workers]), group, clock=clock)
    stopper.begin()
    return stopper

def stop_now(workers, *, clock=clock, **changes):
    """SIGKILL a group at once, and wait for its end."""
    stopper = stop.GroupStopper(workers, grace=0, clock=clock, **changes)
    stopper.kill_now()
    return finish(stopper)

def is_alive(pid):
    proc = tree.look_at(pid)
    return proc is not None and not proc.is_dead

# A worker's ways to misbehave.
IGNORES_TERM = "signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True); time.sleep(600)"
ENDS_ON_TERM = "print('ready', flush=True); time.sleep(600)"
FORKS_AND_EXITS = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
pid = os.fork()
if pid == 0:
    time.sleep(600)
print(pid, flush=True)
"""
DAEMON = """
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print(os.getpid(), flush=True)
        for fd in range(3):
            os.close(fd)
        time.sleep(600)
    os._exit(0)
time.sleep(600)
"""
'''


class StandIn:
    """A running stand-in. Use as a context manager; what it reported comes from `report`."""

    def __init__(self, code: str, *, env: Mapping[str, str] | None = None, prefix: list[str] | None = None) -> None:
        program = _PREAMBLE + textwrap.dedent(code)
        self.process = subprocess.Popen(
            [*(prefix or []), sys.executable, "-c", program],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(ROOT), **(env or {})},
            cwd=ROOT,
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        return self.process.pid

    def report(self) -> dict[str, Any]:
        """The next report; fails with the stand-in's stderr where it died."""
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        line = self.process.stdout.readline()
        if not line:
            raise AssertionError("the stand-in died:\n" + self.process.stderr.read().decode())
        value: dict[str, Any] = json.loads(line)
        return value

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def __enter__(self) -> StandIn:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdout, self.process.stderr):
            if pipe is not None:
                pipe.close()


def run_stand_in(code: str, *, env: Mapping[str, str] | None = None, prefix: list[str] | None = None) -> dict[str, Any]:
    """Run `code` as an agent and return the one report that it makes."""
    with StandIn(code, env=env, prefix=prefix) as stand_in:
        return stand_in.report()
