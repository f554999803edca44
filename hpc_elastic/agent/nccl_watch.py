"""NCCL's RAS, which the agent of group rank 0 asks for all ranks: whether their collectives make progress.

It is asked once a minute. What counts is that nothing has changed for longer than `limit_without_progress` allows. RAS
(2.28.7 and newer) is a text protocol at NCCL_RAS_ADDR, of which NCCL's own client is src/ras/client.cc. A server may be
slow, another program's, run's or user's, or gone in the middle of its answer: each question takes bounded time and
memory.
"""

from __future__ import annotations

import logging
import os
import re
import socket
import time
from collections.abc import Callable, Mapping, Sequence

from msgspec import Struct

from hpc_elastic.agent.heartbeat_watch import Hang
from hpc_elastic.base.clock import Clock
from hpc_elastic.base.loop import FileExecutor
from hpc_elastic.base.text import duration, plural
from hpc_elastic.errors import HpcElasticError
from hpc_elastic.failures.peers import (
    Address,
    Communicator,
    RasReport,
    find_culprits,
    parse_json,
    serving_socket,
    socket_inodes,
)
from hpc_elastic.run.progress import Source
from hpc_elastic.workers.tree import TAG_VARIABLE, Environ, own_processes_where

logger = logging.getLogger(__name__)

ADDRESS_VARIABLE, ENABLE_VARIABLE = "NCCL_RAS_ADDR", "NCCL_RAS_ENABLE"
_PORTS = range(20000, 28000)
"""NCCL's own default is 28028, and Linux gives ports above to outgoing connections."""
_CONNECT_SECONDS = 2.0
_RAS_SECONDS = 5
_ANSWER_SECONDS = 20.0
_BYTES_PER_RANK, _LONGEST_ANSWER = 64 << 10, 64 << 20
"""An answer's room: 90 communicators of each rank; and the most of any."""
LONGEST_FACTOR = 3.0
"""Multiple of the run's own longest pause so far that is no hang."""
_LIBRARY = r"\S*/libnccl\.so\S*"
_NUMBERS = r"(\d+)\.(\d+)\.(\d+)"


def limit_without_progress(longest: float, least: float) -> float:
    return max(least, LONGEST_FACTOR * longest)


class NotOursError(HpcElasticError):
    template = "{address} is not this run's: {why}"


def choose_address(given: Mapping[str, str]) -> str:
    if given.get(ADDRESS_VARIABLE) or given.get(ENABLE_VARIABLE) == "0":
        return ""
    for _ in range(32):
        port = _PORTS[int.from_bytes(os.urandom(4), "big") % len(_PORTS)]
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return f"127.0.0.1:{port}"
    return ""


def parse_address(text: str) -> Address | None:
    """``host:port``, ``[::1]:port``; None: it is something else."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal():
        return None
    return host.strip("[]"), int(port)


def ask_ras(address: Address, *, world_size: int, why_not_ours: Callable[[socket.socket], str]) -> str:
    """`why_not_ours`: empty where the other end is of this run. Raises `OSError`, `NotOursError`."""
    most = min(_LONGEST_ANSWER, _BYTES_PER_RANK * world_size)
    deadline = time.monotonic() + _CONNECT_SECONDS
    shown = f"{address[0]}:{address[1]}"
    with socket.create_connection(address, timeout=_CONNECT_SECONDS) as connection:
        buffer = bytearray()

        def line_after(command: str) -> str:
            connection.settimeout(max(0.01, deadline - time.monotonic()))
            connection.sendall(f"{command}\n".encode())
            while b"\n" not in buffer:
                if not _receive(connection, buffer, deadline) or len(buffer) > 4096:
                    raise NotOursError(address=shown, why=f"it answers {bytes(buffer[:80])!r} to {command}")
            line, _, rest = bytes(buffer).partition(b"\n")
            buffer[:] = rest
            return line.decode("utf-8", "replace").strip()

        if not (line := line_after("CLIENT PROTOCOL 2")).upper().startswith("SERVER PROTOCOL "):
            raise NotOursError(address=shown, why=f"it speaks another protocol ({line[:80]!r})")
        if why := why_not_ours(connection):
            raise NotOursError(address=shown, why=why)
        line_after(f"TIMEOUT {_RAS_SECONDS}")  # one that does not know it has its own
        if (line := line_after("SET FORMAT json")) != "OK":
            raise NotOursError(address=shown, why=f"it answers in no JSON, as NCCL before 2.28.7 ({line[:80]!r})")
        deadline = time.monotonic() + _ANSWER_SECONDS
        connection.settimeout(_CONNECT_SECONDS)
        connection.sendall(b"VERBOSE STATUS\n")
        while _receive(connection, buffer, deadline):
            if len(buffer) > most:
                raise NotOursError(address=shown, why=f"its answer is longer than {most >> 10} KiB")
    return buffer.decode("utf-8", "replace")


def _receive(connection: socket.socket, buffer: bytearray, deadline: float) -> bool:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("NCCL's RAS did not answer in time")
    connection.settimeout(left)
    data = connection.recv(1 << 16)
    buffer += data
    return bool(data)


def nccl_version(pid: int, *, proc: str = "/proc") -> tuple[int, int, int] | None:
    """The version of the NCCL that a process has loaded, by the names of files; None: it has none, or none shows."""
    try:
        with open(f"{proc}/{pid}/maps", encoding="utf-8", errors="replace") as file:
            path = next((found[0] for line in file if (found := re.search(_LIBRARY, line))), "")
        found = re.search(_NUMBERS, os.path.basename(path))
        if path and found is None:  # of a wheel: site-packages/nvidia/nccl/lib/libnccl.so.2
            names = os.listdir(os.path.join(os.path.dirname(path), *[os.pardir] * 3))
            wheels = (re.search(_NUMBERS, name) for name in names if name.startswith("nvidia_nccl"))
            found = next((wheel for wheel in wheels if wheel), None)
    except OSError:
        return None
    return (int(found[1]), int(found[2]), int(found[3])) if found else None


ASK_SECONDS = 60.0
"""RAS asks every process of the job for each question."""
_ASKS_PER_LIMIT = 4
_LOOK_SECONDS = 0.5
_MOST_TROUBLE = 3
"""A program that is no RAS of this run is asked no more in this round after so many answers."""
_SHOWN = 3
_LEAST_VERSION = (2, 28, 7)
"""An older NCCL has no JSON, and before 2.27.5 it may crash when it is asked while communicators are made (nccl issues
1669, 1718 and 1762)."""


class Unchanged(Struct, frozen=True, kw_only=True):
    """The values by name, each with the time since which it is the same, and the longest such time that ended."""

    at: float = 0.0
    values: Mapping[str, tuple[object, float]] = {}
    longest: float = 0.0

    def then(self, values: Mapping[str, object], now: float) -> Unchanged:
        known = {
            name: self.values[name] if name in self.values and self.values[name][0] == value else (value, now)
            for name, value in values.items()
        }
        ended = [self.at - since for name, (_, since) in self.values.items() if known.get(name) != self.values[name]]
        return Unchanged(at=now, values=known, longest=max([self.longest, *ended]))

    def over(self, least: float) -> dict[str, float]:
        limit = limit_without_progress(self.longest, least)
        return {name: since for name, (_, since) in self.values.items() if self.at - since >= limit}


class NcclStall(Struct, frozen=True, kw_only=True):
    progress: Unchanged = Unchanged()
    trouble: Unchanged = Unchanged()

    def then(self, report: RasReport, *, beats: int, now: float) -> NcclStall:
        trouble: dict[str, object] = {each.name: each.trouble for each in report.communicators if each.trouble}
        return NcclStall(
            progress=self.progress.then({"": (report.progress, beats)}, now), trouble=self.trouble.then(trouble, now)
        )

    def in_next_round(self) -> NcclStall:
        return NcclStall(
            progress=Unchanged(longest=self.progress.longest), trouble=Unchanged(longest=self.trouble.longest)
        )


class StallFound(Struct, frozen=True, kw_only=True):
    since: float
    hang: Hang
    is_even: bool = False
    """All ranks have launched the same: a hang of all, or an idle run."""


def judge_stall(
    stall: NcclStall, report: RasReport, *, least: float, hosts: Mapping[int, str], pids: Mapping[int, int]
) -> StallFound | None:
    now = stall.progress.at
    if late := stall.trouble.over(least):
        since = min(late.values())
        said, ranks = _name_culprits(
            [each for each in report.communicators if each.name in late], report, hosts=hosts, pids=pids
        )
        reason = f"NCCL has made no progress for {duration(now - since)}: {said}"
        return StallFound(since=since, hang=Hang(source=Source.NCCL, reason=reason, ranks=ranks, seconds=now - since))
    for since in stall.progress.over(least).values():
        reason = f"all {len(hosts)} ranks have launched the same collectives of NCCL, and none for"
        hang = Hang(source=Source.NCCL, reason=f"{reason} {duration(now - since)}", seconds=now - since)
        return StallFound(since=since, hang=hang, is_even=True)
    return None


def _name_culprits(
    held: Sequence[Communicator], report: RasReport, *, hosts: Mapping[int, str], pids: Mapping[int, int]
) -> tuple[str, tuple[int, ...]]:
    ranks = _ranks_of(report, world_size=len(hosts), pids=pids)
    named: dict[object, str] = {}
    for each in held:
        for number, why in find_culprits(each).items():
            process = each.processes.get(number)
            rank = number if each.size == len(hosts) else ranks.get(process) if process else None
            if rank is not None:
                where = f" on {hosts[rank]}" if hosts.get(rank) else ""
                named.setdefault(rank, f"rank {rank}{where} {why}")
            else:
                where = f" (process {process[1]} on {process[0]})" if process else ""
                named.setdefault((each.name, number), f"rank {number} of {each.size}{where} {why}")
    parts = [*named.values()]
    more = [f"{plural(len(parts) - _SHOWN, 'other rank')} too"] if len(parts) > _SHOWN else []
    said = "; ".join([*parts[:_SHOWN], *more]) or "its ranks have launched different collectives"
    return said, tuple(sorted(rank for rank in named if isinstance(rank, int)))


def _ranks_of(report: RasReport, *, world_size: int, pids: Mapping[int, int]) -> dict[tuple[str, int], int]:
    found: dict[tuple[str, int], int] = {}
    for each in report.communicators:
        for rank, (host, pid) in each.processes.items():
            if each.size == world_size:
                found[host, pid] = rank
            elif pid in pids:
                found.setdefault((host, pid), pids[pid])
    return found


class NcclWatch:
    def __init__(self, address: str, *, run_uid: str, least: float, clock: Clock) -> None:
        self._address, self._run_uid, self._least, self._clock = parse_address(address), run_uid, least, clock
        self._every = min(ASK_SECONDS, least / _ASKS_PER_LIMIT)
        self._thread = FileExecutor(name="nccl-ras")
        self._answers: list[RasReport | None] = []
        self._asked = 0
        """Answers to the questions of another round are late."""
        self._is_asking = False
        self._trouble = 0
        self._stall = NcclStall()
        self.found: StallFound | None = None
        self._next: float | None = None

    @property
    def due(self) -> float | None:
        return self._clock.monotonic() + _LOOK_SECONDS if self._is_asking else self._next

    @property
    def is_due(self) -> bool:
        """An answer has come, or it is time for a question."""
        return bool(self._answers) or self._is_time_to_ask()

    def begin(self) -> None:
        self.end()
        if self._address is not None:
            self._next = self._clock.monotonic() + self._every

    def end(self) -> None:
        """The run's pauses stay known."""
        self._next, self.found = None, None
        self._asked += 1
        self._answers, self._is_asking, self._trouble = [], False, 0
        self._stall = self._stall.in_next_round()

    def look(self, pids: Mapping[int, int], hosts: Mapping[int, str], *, beats: int) -> None:
        now = self._clock.monotonic()
        report = self._answers[-1] if self._answers else None
        self._answers.clear()
        if report is not None:
            self._stall = self._stall.then(report, beats=beats, now=now)
            self.found = judge_stall(self._stall, report, least=self._least, hosts=hosts, pids=pids)
        if not self._is_time_to_ask() or self._address is None:
            return
        self._next = now + self._every if self._trouble < _MOST_TROUBLE else None
        if self._next is not None:
            self._is_asking = True
            number, address, world_size = self._asked, self._address, len(hosts)
            self._thread.post(lambda: self._ask(number, address, list(pids), world_size))

    def _is_time_to_ask(self) -> bool:
        return not self._is_asking and self._next is not None and self._clock.monotonic() >= self._next

    # -- in the other thread -----------------------------------------------------------------------------------------

    def _ask(self, number: int, address: Address, pids: list[int], world_size: int) -> None:
        report: RasReport | None = None
        try:
            report = self._read(address, pids, world_size)
        except OSError as error:
            logger.debug("NCCL's RAS can't be asked: %s", error)  # most often, nobody uses NCCL
        except HpcElasticError as error:
            self._trouble += number == self._asked
            level = logging.INFO if self._trouble == _MOST_TROUBLE else logging.DEBUG
            logger.log(level, "NCCL's RAS is asked no more in this round: %s", error)
        finally:
            if number == self._asked:
                self._answers.append(report)
                self._is_asking = False

    def _read(self, address: Address, pids: list[int], world_size: int) -> RasReport | None:
        version = nccl_version(pids[0]) if pids else None
        if version is not None and version < _LEAST_VERSION:
            logger.debug("NCCL %s is too old to be asked", version)
            return None
        report = parse_json(ask_ras(address, world_size=world_size, why_not_ours=self._why_not_ours))
        if any(each.size > world_size for each in report.communicators):
            raise NotOursError(address=f"{address[0]}:{address[1]}", why=f"it has more than {world_size} ranks")
        self._trouble = 0
        return report

    def _why_not_ours(self, connection: socket.socket) -> str:
        found = serving_socket(connection)
        if found is None:
            return "no process of this host has the other end"
        inode, uid = found
        if uid != os.geteuid():
            return f"a process of uid {uid} listens there"

        def is_of_another_run(environ: Environ) -> bool:
            tag = environ.get(TAG_VARIABLE)
            return bool(tag) and not str(tag).startswith(f"{self._run_uid}:")

        others = own_processes_where(lambda _, environ: is_of_another_run(environ))
        is_others = any(inode in socket_inodes(one.pid) for one in others)
        return "a process of another run listens there" if is_others else ""
