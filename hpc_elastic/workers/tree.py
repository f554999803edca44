"""The processes of this host, their parents and marks; and signals that hit no recycled pid.

Where there is no descriptor left, not even `linux.SPARE`, looks raise OSError: no process counts as gone for that. A
process is known by its pid *and* its start time: a pid alone may name another process a moment later.

Everything comes from ``/proc`` by hand. psutil 7.2 (which serves in `base.host_facts`) takes 2 to 400 times as long for
these walks, and lacks a start time that a step of the wall clock leaves alone, pidfds to signal by, sessions and
groups, and a way out of ``/proc/<pid>/environ`` where that blocks (`read_environments`).

The marks by which a run's processes are known, in the environment that a process was *started* with:

- ``HPC_ELASTIC_TAG=<run uid>:<node key>:<agent uid>`` in every worker and all that it starts.
- ``HPC_ELASTIC_NODE_TAG=<run uid>:<node key>`` in the agent itself, put there by its launcher, so that a later
  incarnation finds an earlier one that is stopped or stuck.

A worker that submits another job hands its tags on to it, so a tag counts only in the run's own Slurm jobs.
"""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from enum import Enum

from msgspec import Struct

from hpc_elastic.base.loop import read_each
from hpc_elastic.workers import linux
from hpc_elastic.workers.linux import OUT_OF_DESCRIPTORS, SPARE


class Proc(Struct, frozen=True, kw_only=True):
    pid: int
    starttime: int
    """Clock ticks since this host's boot; never changes."""
    ppid: int
    pgid: int
    sid: int
    state: str
    """R, S, D (uninterruptible), T (stopped), Z (ended, not waited for) …, as ps shows it."""
    name: str

    @property
    def is_dead(self) -> bool:
        return self.state in ("Z", "X")


class Delivery(Enum):
    SENT = "sent"
    GONE = "gone"
    """The process has ended; its pid may be another's by now."""
    REFUSED = "refused"


class Environ:
    __slots__ = ("_raw",)

    def __init__(self, raw: bytes) -> None:
        self._raw = b"\0" + raw

    def get(self, key: str) -> str | None:
        mark = b"\0" + key.encode() + b"="
        start = self._raw.find(mark)
        if start < 0:
            return None
        start += len(mark)
        end = self._raw.find(b"\0", start)
        return os.fsdecode(self._raw[start:] if end < 0 else self._raw[start:end])


def parse_stat(raw: bytes) -> Proc | None:
    """Read ``/proc/<pid>/stat``; None: not readable. A name may be ``a) R 1 (b``: the last bracket counts."""
    try:
        head, _, tail = raw.rpartition(b")")
        pid, _, name = head.partition(b" (")
        words = tail.split()
        return Proc(
            pid=int(pid),
            starttime=int(words[19]),
            ppid=int(words[1]),
            pgid=int(words[2]),
            sid=int(words[3]),
            state=words[0].decode("ascii", "replace"),
            name=name.decode("utf-8", "replace"),
        )
    except (ValueError, IndexError):
        return None


def _read(path: str) -> bytes | None:
    try:
        return SPARE.lend(lambda: _read_now(path))
    except OSError as error:
        if error.errno in OUT_OF_DESCRIPTORS:
            raise  # not "there is no such process"
        return None


def _read_now(path: str) -> bytes | None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        chunks = []
        while chunk := os.read(fd, 65536):
            chunks.append(chunk)
        return b"".join(chunks)
    except OSError:
        return None  # it ended while we looked
    finally:
        os.close(fd)


def _list(path: str) -> list[str]:
    return SPARE.lend(lambda: os.listdir(path))


def look_at(pid: int) -> Proc | None:
    raw = _read(f"/proc/{pid}/stat")
    return None if raw is None else parse_stat(raw)


def lives(proc: Proc) -> bool:
    now = look_at(proc.pid)
    return now is not None and now.starttime == proc.starttime and not now.is_dead


def all_processes() -> dict[int, Proc]:
    """Every process that we may see, by pid. Not one moment's picture: processes come and go while it is taken."""
    found = (look_at(int(name)) for name in _list("/proc") if name.isdigit())
    return {proc.pid: proc for proc in found if proc is not None}


def subtree(processes: Mapping[int, Proc], roots: Collection[int], *, excluding: Collection[int] = ()) -> list[Proc]:
    """The descendants of `roots` among `processes`, parents first; neither the roots nor what is below `excluding`."""
    children: dict[int, list[Proc]] = {}
    for proc in processes.values():
        children.setdefault(proc.ppid, []).append(proc)
    found: list[Proc] = []
    seen = set(roots) | set(excluding)
    queue = list(roots)
    while queue:
        for proc in children.get(queue.pop(), ()):
            if proc.pid not in seen:
                seen.add(proc.pid)
                found.append(proc)
                queue.append(proc.pid)
    return found


def descendants(root_pid: int, *, excluding: Collection[int] = ()) -> list[Proc]:
    return subtree(all_processes(), (root_pid,), excluding=excluding)


def ancestors(processes: Mapping[int, Proc], pid: int) -> set[int]:
    found: set[int] = set()
    while pid not in found and pid > 0:
        found.add(pid)
        proc = processes.get(pid)
        pid = 0 if proc is None else proc.ppid
    return found


def children(pid: int) -> list[int]:
    """Exact for a subreaper where it matters: an orphan becomes our child *before* its parent is seen as ended, so no
    child means no descendant.
    """
    if not os.path.exists(f"/proc/{pid}/task/{pid}/children"):
        # Gone, or a kernel without CONFIG_PROC_CHILDREN: the long way.
        return [proc.pid for proc in all_processes().values() if proc.ppid == pid]
    found: list[int] = []
    try:
        threads = _list(f"/proc/{pid}/task")
    except OSError as error:
        if error.errno in OUT_OF_DESCRIPTORS:
            raise
        return found
    for thread in threads:
        raw = _read(f"/proc/{pid}/task/{thread}/children")
        found.extend(int(word) for word in (raw or b"").split())
    return found


def below(roots: Collection[int]) -> dict[int, list[int]]:
    """Pids of each root's descendants, parents first. The host's other processes, maybe thousands, cost nothing."""
    if main_children(os.getpid()) is None:  # a kernel without CONFIG_PROC_CHILDREN
        processes = all_processes()
        return {root: [proc.pid for proc in subtree(processes, (root,))] for root in roots}
    found = {root: children(root) for root in roots}
    for pids in found.values():
        for pid in pids:  # which grows meanwhile
            pids += children(pid)
    return found


def main_children(pid: int) -> list[int] | None:
    """Orphans become its too. None where there is no such process, or a kernel without CONFIG_PROC_CHILDREN."""
    raw = _read(f"/proc/{pid}/task/{pid}/children")
    return None if raw is None else [int(word) for word in raw.split()]


def own_processes_where(matches: Callable[[Proc, Environ], bool]) -> list[Proc]:
    """Those that hide their environment (set-user-id programs), or do not answer (`read_all`), are left out."""
    uid = os.geteuid()
    own: dict[int, Proc] = {}
    for name in _list("/proc"):
        if not name.isdigit():
            continue
        try:
            if os.stat(f"/proc/{name}").st_uid != uid:
                continue
        except OSError:
            continue
        # The start time first: were the pid recycled before we read the environment, a signal would miss, not err.
        proc = look_at(int(name))
        if proc is not None and not proc.is_dead:
            own[proc.pid] = proc
    raw = read_environments(list(own))
    return [proc for pid, proc in own.items() if pid in raw and matches(proc, Environ(raw[pid]))]


def read_environments(
    pids: Sequence[int], read: Callable[[int], bytes | None] | None = None, *, patience: float = 1.0
) -> dict[int, bytes]:
    """Those that have none, or do not answer within `patience` seconds, are left out: to open ``/proc/<pid>/environ``
    is to wait for a program that is being loaded, and one whose inherited file lies on a mount that hangs is loaded
    never (``exec_update_lock``, seen on Linux 6.18).
    """
    found = read_each(pids, read or (lambda pid: _read(f"/proc/{pid}/environ")), patience=patience)
    return {pid: raw for pid, raw in found.items() if raw}


def tagged(key: str, value: str) -> list[Proc]:
    return own_processes_where(lambda _proc, environ: environ.get(key) == value)


def cgroup_job(pid: int) -> str | None:
    """The id of the Slurm job in whose cgroup a process is; None where Slurm keeps no cgroups, or it is gone."""
    return parse_cgroup_job(_read(f"/proc/{pid}/cgroup") or b"")


def parse_cgroup_job(raw: bytes) -> str | None:
    """Read ``/proc/<pid>/cgroup``: ``…/slurm/uid_1000/job_12/step_0`` (v1), ``…/slurmstepd.scope/job_12/…`` (v2)."""
    for line in raw.splitlines():
        for folder in line.split(b"/"):
            number = folder.removeprefix(b"job_")
            if number != folder and b"slurm" in line and number.isdigit():
                return number.decode()
    return None


def kill_safely(proc: Proc, signal_number: int, *, main_thread: bool = False) -> Delivery:
    """Raises nothing for the process's sake. Without pidfd (before 5.3) a gap of microseconds is left between the look
    and the signal. `main_thread`: only where this architecture's call for that is known; else any thread may get it.
    """
    try:
        pidfd = linux.pidfd_open(proc.pid)
    except ProcessLookupError:
        return Delivery.GONE
    except OSError:
        pidfd = None  # out of descriptors: better with the gap than not at all
    try:
        now = look_at(proc.pid)
        if now is None or now.starttime != proc.starttime:
            return Delivery.GONE
        if main_thread:
            try:
                linux.signal_main_thread(proc.pid, signal_number)
                return Delivery.SENT
            except OSError as error:
                if error.errno != errno.ENOSYS:
                    raise
        if pidfd is None:
            os.kill(proc.pid, signal_number)
        else:
            linux.pidfd_send_signal(pidfd, signal_number)
    except ProcessLookupError:
        return Delivery.GONE
    except PermissionError:
        return Delivery.REFUSED
    finally:
        if pidfd is not None:
            os.close(pidfd)
    return Delivery.SENT


_KILLING_LOOKS = 3
_MOST_STOPS = 400


class TreeKiller:
    """Chooses the signal for the processes that were found in a look: they may multiply while they are killed. Pure.

    Where new ones appear look after look, each SIGKILL makes room for another fork within the user's limit of
    processes, so they are stopped instead. Once a look finds none that is new, none runs: SIGKILL for all at once.
    """

    def __init__(self) -> None:
        self._known: set[tuple[int, int]] = set()
        self._looks = 0
        self._stops = 0

    def next_signal(self, found: Iterable[Proc]) -> signal.Signals:
        now = {(proc.pid, proc.starttime) for proc in found}
        new = now - self._known
        self._known |= now
        self._looks += 1
        if self._looks <= _KILLING_LOOKS or not new or self._stops >= _MOST_STOPS:
            return signal.SIGKILL
        self._stops += 1
        return signal.SIGSTOP


JOB_VARIABLE = "SLURM_JOB_ID"
TAG_VARIABLE = "HPC_ELASTIC_TAG"
NODE_TAG_VARIABLE = "HPC_ELASTIC_NODE_TAG"


class Tag(Struct, frozen=True, kw_only=True):
    """One incarnation of one node's agent in one run. Distinct runs have distinct uids, so their tags never match."""

    run_uid: str
    node_key: str
    agent_uid: str
    jobs: frozenset[str] = frozenset()
    """SLURM_JOB_ID of this agent and of the run's earlier attempts; a requeued job keeps it. Empty outside Slurm."""

    def __post_init__(self) -> None:
        for name in ("run_uid", "node_key", "agent_uid"):
            value = getattr(self, name)
            if not value or not value.isascii() or not value.isprintable() or ":" in value or "=" in value:
                raise ValueError(f"{name}={value!r} cannot be part of a tag: give printable ASCII without ':' and '='")

    @property
    def node(self) -> str:
        return f"{self.run_uid}:{self.node_key}"

    def __str__(self) -> str:
        return f"{self.node}:{self.agent_uid}"

    def is_in_own_job(self, environ: Environ, cgroup_job: Callable[[], str | None]) -> bool:
        """A run that is no job's: to no job at all. `cgroup_job`: of a process that has dropped SLURM_JOB_ID."""
        job = environ.get(JOB_VARIABLE)
        if not self.jobs:
            return not job
        return (job or cgroup_job()) in self.jobs

    def is_own_worker(self, environ: Environ, cgroup_job: Callable[[], str | None]) -> bool:
        return environ.get(TAG_VARIABLE) == str(self) and self.is_in_own_job(environ, cgroup_job)

    def is_of_other_incarnation(self, worker_tag: str) -> bool:
        return worker_tag.startswith(self.node + ":") and worker_tag != str(self)


def node_key(cluster: str, node: int) -> str:
    """Tell one run's agents on one host apart by tags: a cluster's host has one agent, a local run many."""
    return str(node) if cluster == "local" else "host"
