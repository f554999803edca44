"""``hpc_elastic.commit``, and the wait for a lease that is old: no node that thaws writes over a newer checkpoint.

The node's agent keeps a lease for its workers: a file with the time until which their round counts as the current one.
A worker whose lease is old (its node was frozen, or its agent stood still) waits in each call of this package until the
agent has read the run's record again. Where the round is over, the agent kills it there.
"""

from __future__ import annotations

import errno
import os
import struct
import sys
import time
from collections.abc import Callable
from time import CLOCK_BOOTTIME, clock_gettime_ns

from hpc_elastic.errors import HpcElasticError
from hpc_elastic.worker_api.records import FILE_BYTES, LEASE, MAGIC, QUESTIONS, VARIABLE, lease_beside

ASK_SECONDS = 1.0
GONE_SECONDS = 10.0
"""How long a worker without an agent waits to be ended: the guardian needs 4 s."""
_LOOK_SECONDS = 0.001
_WORDS = struct.Struct("=qq")


class RoundOverError(HpcElasticError):
    """This worker's round is over, or its agent is gone: others may train in its place, and it must write no more."""

    template = "{what}: {why}; others may train in this worker's place, so it must not go on"


def await_lease(is_valid: Callable[[], bool], what: str = "progress") -> None:
    """Ask this node's agent to read the newest record, and wait. `RoundOverError`: there is no agent, and no guardian
    has ended this process for that.
    """
    began, asked_at, gone_since = time.monotonic(), float("-inf"), None
    while not is_valid():
        now = time.monotonic()
        if now - asked_at >= ASK_SECONDS:
            asked_at = now
            if _ask_agent():
                gone_since = None
            elif now - (gone_since := now if gone_since is None else gone_since) > GONE_SECONDS:
                raise RoundOverError(what=what, why="this node's agent is gone")
        time.sleep(_LOOK_SECONDS if now - began < ASK_SECONDS else 10 * _LOOK_SECONDS)


def _ask_agent() -> bool:
    pipe = os.path.join(os.path.dirname(os.environ[VARIABLE]), QUESTIONS)
    try:
        fd = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            os.write(fd, b"?")
        finally:
            os.close(fd)
    except OSError as error:
        return error.errno not in (errno.ENOENT, errno.ENXIO, errno.EPIPE)
    return True


def open_page(path: str, mode: int) -> int:
    """Open a file that the agent made for its workers. Raises OSError; ValueError: it is not one."""
    fd = os.open(path, mode | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    info = os.fstat(fd)
    # Another user who owns it could cut it off, and SIGBUS would kill this process.
    is_ours = info.st_uid == os.geteuid() and info.st_size == FILE_BYTES
    if not is_ours or os.pread(fd, len(MAGIC), 0) != MAGIC:
        os.close(fd)
        raise ValueError("not a heartbeat's file of ours")
    return fd


def commit(temporary: str | os.PathLike[str], final: str | os.PathLike[str]) -> None:
    """Write `temporary`, a checkpoint's file or folder, to the disk, and rename it to `final` if this round is current.

    Right before the rename this node's agent reads the run's newest record, past all caches: some milliseconds. What
    remains is the time between that answer and the rename, some microseconds: a node that is frozen just then still
    renames when it thaws. A `final` with the step in its name, which is never written again, closes that too. Outside
    of a run it renames. For any process of a worker; call it on the ranks that rename alone.

    Args:
        temporary: On the same filesystem, written and closed.
        final: A file there is replaced. So is a folder, which is missing for a moment.

    Raises:
        RoundOverError: others may train in this worker's place: nothing was renamed.
        OSError: as `os.replace`.
    """
    temporary, final = os.fspath(temporary), os.fspath(final)
    for folder, _, names in os.walk(temporary):
        for name in (*names, ""):
            _sync(os.path.join(folder, name))
    _sync(temporary)
    page = os.environ.get(VARIABLE)
    old = f"{final}.{os.getpid()}.old.part" if os.path.isdir(final) else ""
    if page:
        _await_look(page, f"commit of {final}")
    if old:
        os.rename(final, old)
    os.replace(temporary, final)
    _sync(os.path.dirname(os.path.abspath(final)))
    if old:
        from shutil import rmtree

        rmtree(old, ignore_errors=True)


def _sync(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _await_look(page: str, what: str) -> None:
    try:
        fd = open_page(lease_beside(page), os.O_RDONLY)
    except (OSError, ValueError) as error:
        sys.stderr.write(f"hpc_elastic: {what}: the agent can't be asked whether the round is over: {error}\n")
        return
    asked_ns = clock_gettime_ns(CLOCK_BOOTTIME)

    def is_current() -> bool:
        until_ns, looked_ns = _WORDS.unpack(os.pread(fd, _WORDS.size, LEASE * 8))
        if looked_ns < 0:
            raise RoundOverError(what=what, why="this worker's round is over")
        return until_ns == 0 or bool(looked_ns >= asked_ns and clock_gettime_ns(CLOCK_BOOTTIME) < until_ns)

    try:
        await_lease(is_current, what)
    finally:
        os.close(fd)
