"""Processes in namespaces: who is where, from /proc; and a Popen for a program started inside."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from .layout import RigError

CROWDED = 3.0
"""Every deadline of the rig, and of the tests on it, is what a machine needs that has the time, times this: all of them
wait for a condition, so it costs nothing where nothing is wrong."""


def wait_until(condition: Callable[[], bool], *, timeout: float, what: str, interval: float = 0.02) -> None:
    """Wait until `condition` holds: `timeout` seconds on a machine that has the time (`CROWDED`)."""
    deadline = time.monotonic() + CROWDED * timeout
    while not condition():
        if time.monotonic() > deadline:
            raise RigError(f"within {CROWDED * timeout:g} s this did not happen: {what}")
        time.sleep(interval)


def all_pids() -> Iterator[int]:
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            yield int(entry)


def namespace_of(pid: int, kind: str) -> int | None:
    """The inode of the process' namespace (`kind`: net, pid, mnt …), or ``None`` when the process is gone."""
    try:
        return os.stat(f"/proc/{pid}/ns/{kind}").st_ino
    except OSError:  # it ended, or is a zombie
        return None


def pids_in_namespace(kind: str, inode: int) -> list[int]:
    return [pid for pid in all_pids() if namespace_of(pid, kind) == inode]


def is_namespace_init(pid: int) -> bool:
    """Whether the process is number 1 of a pid namespace below this one."""
    try:
        with open(f"/proc/{pid}/status") as status:
            for line in status:
                if line.startswith("NSpid:"):
                    numbers = line.split()[1:]
                    return len(numbers) > 1 and numbers[-1] == "1"
    except OSError:
        pass
    return False


def command_line(pid: int) -> str:
    """The process' arguments with spaces between, or its name in brackets where it has none; empty when it is gone."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            words = file.read().split(b"\0")
        if any(words):
            return b" ".join(words).decode(errors="replace").strip()
        with open(f"/proc/{pid}/comm") as file:
            return f"[{file.read().strip()}]"
    except OSError:
        return ""


def owner_of(pid: int) -> int | None:
    """The process' real user id, or ``None`` when it is gone."""
    try:
        with open(f"/proc/{pid}/status") as status:
            for line in status:
                if line.startswith("Uid:"):
                    return int(line.split()[1])
    except OSError:
        pass
    return None


def listens(pid: int, port: int) -> bool:
    """Whether something listens on TCP `port` in the network namespace of process `pid`."""
    listening = "0A"
    try:
        for table in ("tcp", "tcp6"):
            with open(f"/proc/{pid}/net/{table}") as file:
                for line in file.readlines()[1:]:
                    fields = line.split()
                    if fields[3] == listening and int(fields[1].rpartition(":")[2], 16) == port:
                        return True
    except OSError:
        pass
    return False


class RigProcess(subprocess.Popen[str]):
    """A program started through nsenter, which waits for it outside and ends as it does.

    Signals go to the program, not to nsenter (which would leave it behind).
    """

    def send_signal(self, sig: int) -> None:
        try:
            with open(f"/proc/{self.pid}/task/{self.pid}/children") as file:
                children = [int(word) for word in file.read().split()]
        except OSError:
            children = []
        if not children:
            super().send_signal(sig)
            return
        for pid in children:
            try:
                os.kill(pid, sig)
            except ProcessLookupError:
                pass


class CommandFailed(subprocess.CalledProcessError):
    """A checked command of the rig ended with another code than 0; the message shows what it wrote."""

    def __str__(self) -> str:
        return f"{super().__str__()}\nstdout: {_tail(self.stdout)}\nstderr: {_tail(self.stderr)}"


def _tail(text: Any) -> str:
    return str(text or "")[-4000:].strip()


def call(argv: Sequence[str], *, input: str | None = None, timeout: float = 60, check: bool = True) -> str:
    done = subprocess.run(argv, text=True, capture_output=True, timeout=timeout, check=False, input=input or "")
    if check and done.returncode != 0:
        raise CommandFailed(done.returncode, list(argv), done.stdout, done.stderr)
    return done.stdout
