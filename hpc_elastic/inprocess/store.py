"""Agreement between ranks: barriers, lists, and one decision per iteration, over any ``torch.distributed.Store``.

A barrier is a list of the ranks that arrived; a process that watches another one can arrive for it after its death. How
an iteration ends is decided once, by compare-and-set: no rank can return while another restarts. A wait in the main
thread polls, so that signals and the watchdog get their turn; one thread alone waits in the store.
"""

from __future__ import annotations

import errno
import functools
import os
import socket
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar

import torch.distributed as dist

from hpc_elastic.inprocess.abort import open_sockets, ports
from hpc_elastic.inprocess.state import Interruption, InterruptionRecord, RestartError
from hpc_elastic.pytorch.file_system_store import FileSystemStore as _FileSystemStore

LONGEST_PAUSE = 0.25
_LONGEST_WAIT = timedelta(days=20)
"""Limit of one call of the store; torch counts the milliseconds in 32 bits."""

COMPLETED = "completed"
INTERRUPTED = "interrupted"


class BarrierError(RestartError):
    """A barrier failed."""


class BarrierTimeout(BarrierError):
    """Not all ranks came in time."""


class BarrierOverflow(BarrierError):
    """A rank came twice, or there are more than there should be: two processes take themselves for the same rank."""


if TYPE_CHECKING:
    from torch.distributed import Store as _AnyStore
else:
    _AnyStore = object


class StoreMixin(_AnyStore):  # type: ignore[misc, unused-ignore]
    """The agreement's operations over a ``Store``. It goes before torch's class, which has a ``barrier`` of its own."""

    INITIAL_BARRIER = "initial_barrier"
    ITERATION_BARRIER = "iteration_barrier"
    COMPLETION_BARRIER = "completion_barrier"
    TERMINATION_BARRIER = "termination_barrier"

    @property
    def critical_ranks(self) -> tuple[int, ...]:
        """The initial ranks whose processes the store needs: they leave last."""
        return ()

    @classmethod
    def serve_apart(cls, elsewhere: object, **kwargs: Any) -> Any:
        """Open the store's server in a rank's monitor process: it, `elsewhere` (there is one already), or None."""
        return None

    def append_item(self, key: str, item: str) -> None:
        """Add `item`, which has no line break, to the list `key`. No item is lost, however many ranks write."""
        line = f"{item}\n"
        if self.has_extended_api():
            self.append(key, line)
            return
        old = read_value(self, key)
        while (found := self.compare_set(key, old, old + line).decode()) != old + line:
            old = found

    def items(self, key: str) -> list[str]:
        return read_value(self, key).split("\n")[:-1]

    def set_initial_rank(self, rank: int, initial_rank: int) -> None:
        self.set(f"initial_rank/{rank}", str(initial_rank))

    def get_initial_rank(self, rank: int) -> int:
        """The initial rank of a rank that has published it; waits for the store's timeout."""
        return int(self.get(f"initial_rank/{rank}"))

    def find_initial_rank(self, rank: int) -> int | None:
        """Same as `get_initial_rank`, but returns None at once where `rank` has not published it."""
        found = read_value(self, f"initial_rank/{rank}")
        return int(found) if found else None

    def send_heartbeat(self, rank: int) -> None:
        """Increase this rank's counter: an observer sees a number that changes. No clock."""
        self.add(f"heartbeat/{rank}", 1)

    def get_heartbeat(self, rank: int) -> int:
        return int(self.add(f"heartbeat/{rank}", 0))

    def record_terminated_rank(self, rank: int) -> None:
        self.append_item("terminated", str(rank))

    def get_terminated_ranks(self) -> set[int]:
        """The ranks that the termination barrier published, the same for all; before it, those so far."""
        published = read_value(self, f"{self.TERMINATION_BARRIER}/over")
        if published:
            return {int(rank) for rank in published.split(",") if rank}
        return {int(rank) for rank in self.items("terminated")}

    def record_base_terminated_rank(self, rank: int) -> None:
        """Record that the initial rank `rank` does not need this store any more."""
        self.append_item("base_terminated", str(rank))

    def get_base_terminated_count(self) -> int:
        return len(set(self.items("base_terminated")))

    def record_interrupted(self, record: InterruptionRecord | Iterable[InterruptionRecord] | None = None) -> None:
        """Interrupt this iteration, unless all ranks have completed it; the record is kept in any case."""
        records = [record] if isinstance(record, InterruptionRecord) else list(record or ())
        for each in records:
            self.append_item("interruptions", str(each))
        self.compare_set("over", "", INTERRUPTED)
        self.set("stir", "1")

    def is_first(self, what: str) -> bool:
        """Returns true on the first rank that asks this."""
        return int(self.add(f"first/{what}", 1)) == 1

    def get_interruption_records(self) -> list[InterruptionRecord]:
        return [InterruptionRecord.from_str(item) for item in self.items("interruptions")]

    def outcome(self) -> str | None:
        """How this iteration ended: `COMPLETED`, `INTERRUPTED`, or None: not yet."""
        return read_value(self, "over") or None

    def wait_for_outcome(self) -> str:
        """Wait for the `outcome`. It blocks in the store: no other thread can use this connection."""
        while (found := self.outcome()) is None:
            started = time.monotonic()
            try:
                self.wait(["over"], _LONGEST_WAIT)
            except dist.DistStoreError:
                if time.monotonic() - started < _LONGEST_WAIT.total_seconds():
                    raise
        return found

    def record_completed(self) -> None:
        """Record that the function returned on an active rank: spares may stop waiting."""
        self.add("completed", 1)
        self.set("stir", "1")

    def is_any_rank_completed(self) -> bool:
        return int(self.add("completed", 0)) > 0

    def wait_for_completed_or_interrupted(self, seconds: float) -> bool:
        """Wait up to `seconds` until some rank completed, or the iteration is over; returns whether that happened."""
        return _wait(self, "stir", seconds)

    def answer(self, rank: int, count: int) -> None:
        """Record that `rank` knows of this iteration's interruption, and has recorded its own part."""
        self.append_item("answers", str(rank))
        if len(set(self.items("answers"))) >= count:
            self.set("answered", "1")

    def wait_for_answers(self, seconds: float) -> bool:
        """Wait up to `seconds` until all have answered; returns whether they have."""
        return _wait(self, "answered", seconds)

    def slot_resolution(self, rank: int) -> str:
        """How the slot of an initial rank that died before the first iteration was resolved; "" while that is open."""
        return read_value(self, f"fate/{rank}")

    def resolve_slot(self, rank: int, resolution: str) -> bool:
        """Resolve a slot: the first value holds. Returns whether that is `resolution`."""
        return bool(self.compare_set(f"fate/{rank}", "", resolution).decode() == resolution)

    def decided(self) -> str:
        """The number of the last iteration whose members were decided; "" before that."""
        return read_value(self, "decided")

    def barrier(
        self,
        rank: int,
        group_name: str,
        rendezvous_count: int,
        timeout: timedelta,
        timeout_chunk: timedelta | None = None,
    ) -> None:
        """Wait until all ranks are here. Each comes once. BarrierOverflow, BarrierTimeout.

        `timeout_chunk` is an argument of NVIDIA's, without effect: this never blocks in the store.
        """
        self.append_item(f"{group_name}/arrived", str(rank))
        entries = self.items(f"{group_name}/arrived")
        if len(_arrived(self, group_name)) > rendezvous_count or entries.count(str(rank)) > 1:
            shown = ", ".join(sorted(entries))
            raise BarrierOverflow(
                f"{group_name}: rank {rank} of {rendezvous_count} found these ranks there already: {shown}"
            )
        _meet(self, group_name, rendezvous_count, timeout)

    def reentrant_barrier(
        self,
        rank: int | Collection[int],
        group_name: str,
        rendezvous_count: int,
        timeout: timedelta,
        timeout_chunk: timedelta | None = None,
    ) -> None:
        """Same as `barrier`, but coming twice counts once, and one process may come for several ranks."""
        for each in (rank,) if isinstance(rank, int) else rank:
            self.append_item(f"{group_name}/arrived", str(each))
        if len(arrived := _arrived(self, group_name)) > rendezvous_count:
            raise BarrierOverflow(f"{group_name}: {len(arrived)} ranks came where {rendezvous_count} should")
        _meet(self, group_name, rendezvous_count, timeout)

    initial_barrier = functools.partialmethod(barrier, group_name=INITIAL_BARRIER)
    iteration_barrier = functools.partialmethod(barrier, group_name=ITERATION_BARRIER)
    termination_barrier = functools.partialmethod(reentrant_barrier, group_name=TERMINATION_BARRIER)

    def completion_barrier(
        self, rank: int, rendezvous_count: int, timeout: timedelta, timeout_chunk: timedelta | None = None
    ) -> bool:
        """Wait until all ranks have completed, or the iteration is interrupted; returns whether all have completed."""
        name = self.COMPLETION_BARRIER
        self.append_item(f"{name}/arrived", str(rank))
        if len(set(self.items(f"{name}/arrived"))) >= rendezvous_count:
            self.compare_set("over", "", COMPLETED)
        if not _wait(self, "over", timeout.total_seconds()):
            raise _timeout(self, name, rendezvous_count, timeout)
        return self.outcome() == COMPLETED

    def is_released(self, group_name: str) -> bool:
        return bool(self.check([f"{group_name}/over"]))

    def stand_in_for(self, rank: int, count: int, interruption: Interruption) -> None:
        """Do all that `rank`, which is dead, would have to do in this iteration, so that no rank waits for it."""
        self.record_terminated_rank(rank)
        self.record_interrupted(InterruptionRecord(rank, interruption))
        self.answer(rank, count)
        for name in (self.ITERATION_BARRIER, self.TERMINATION_BARRIER):
            self.append_item(f"{name}/arrived", f"{rank}*")
            _release(self, name, count)

    def report_gone(self, initial_rank: int) -> None:
        """Record that `initial_rank` died before it published its new rank: it has the number that is left."""
        self.append_item("gone", str(initial_rank))
        counts = self.items("count")
        if counts:
            _release(self, self.ITERATION_BARRIER, int(counts[0]))

    def put_count(self, count: int) -> None:
        """Publish how many ranks this iteration has, so that others can find out which are missing."""
        self.append_item("count", str(count))


def _arrived(store: Any, name: str) -> set[int]:
    """The ranks that came to a barrier; a star marks one for which another process came."""
    return {int(entry.rstrip("*")) for entry in store.items(f"{name}/arrived")}


def _release(store: Any, name: str, count: int) -> None:
    arrived = _arrived(store, name)
    if name == store.ITERATION_BARRIER and len(arrived) < count:
        gone = set(store.items("gone"))
        if not gone or len(arrived) + len(gone) < count:
            return
        # Which of them had which number is not known, and it does not matter: all are dead.
        missing = set(range(count)) - arrived
        for rank in missing:
            store.record_terminated_rank(rank)
            store.append_item(f"{store.TERMINATION_BARRIER}/arrived", f"{rank}*")
            store.answer(rank, count)
        store.record_interrupted([InterruptionRecord(rank, Interruption.TERMINATED) for rank in missing])
    elif len(arrived) < count:
        return
    if name == store.TERMINATION_BARRIER:
        terminated = sorted(set(store.items("terminated")), key=int)
        store.compare_set(f"{name}/over", "", ",".join(terminated) + ",")
    else:
        store.set(f"{name}/over", "1")


def _meet(store: Any, name: str, count: int, timeout: timedelta) -> None:
    _release(store, name, count)
    if not _wait(store, f"{name}/over", timeout.total_seconds()):
        raise _timeout(store, name, count, timeout)


def _timeout(store: Any, name: str, count: int, timeout: timedelta) -> BarrierTimeout:
    missing = sorted(set(range(count)) - _arrived(store, name))
    shown = ", ".join(map(str, missing[:16])) + (", …" if len(missing) > 16 else "")
    return BarrierTimeout(
        f"{name}: {len(missing)} of {count} ranks had not come after {timeout.total_seconds():g} s (ranks {shown})"
    )


def pause_after(waited: float, shortest: float = 0.002) -> float:
    """Seconds between two looks of a loop that has waited for `waited` seconds."""
    return min(max(waited / 10, shortest), LONGEST_PAUSE)


def read_value(store: Any, key: str) -> str:
    """A value, or "". torch's ``get`` waits for a missing key."""
    return bytes(store.get(key)).decode() if store.check([key]) else ""


def wait_until(is_so: Callable[[], bool], seconds: float) -> bool:
    started = time.monotonic()
    while not is_so():
        waited = time.monotonic() - started
        if waited >= seconds:
            return False
        time.sleep(min(pause_after(waited, 0.0005), seconds - waited))
    return True


def _wait(store: Any, key: str, seconds: float) -> bool:
    return wait_until(lambda: store.check([key]), seconds)


_HOSTED = "hosted_by_the_ring"


def listen_at(host: str, port: int, environ: Mapping[str, str]) -> dict[str, int]:
    """Arguments by which torch's ``TCPStore`` listens at `host` alone, where all ranks resolve it alike.

    At all addresses for a name on several hosts, which its owner often calls 127.0.1.1, and for an address that is not
    this host's own. OSError: the port is in use.
    """
    everywhere = {"port": port}
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
    except OSError:
        if environ.get("WORLD_SIZE", "1") != environ.get("LOCAL_WORLD_SIZE", "") and host != "localhost":
            return everywhere
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except OSError:
            return everywhere
    family, kind, protocol, _, address = min(found, key=lambda entry: entry[0] != socket.AF_INET)
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(65535)  # the kernel caps it at net.core.somaxconn
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRNOTAVAIL:
            return everywhere
        raise
    return {"port": int(listener.getsockname()[1]), "master_listen_fd": listener.detach()}


def serve_at(host: str, port: int, environ: Mapping[str, str], *, use_libuv: bool) -> dist.TCPStore:
    """A server, and a first client of it. Raises as `listen_at`, and torch.distributed.DistNetworkError."""
    listening = listen_at(host, port, environ)
    return dist.TCPStore(host, is_master=True, wait_for_workers=False, use_libuv=use_libuv, **listening)


def detect_silence(port: int, seconds: float) -> None:
    """Let connections to `port` fail when the other end's node has not answered for `seconds`, unlike TCP."""
    step = max(1, round(seconds / 3))
    for fd in open_sockets():
        if ports(fd)[1] != port:
            continue
        with socket.socket(fileno=os.dup(fd)) as found:
            found.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in (
                (socket.TCP_KEEPIDLE, step),
                (socket.TCP_KEEPINTVL, step),
                (socket.TCP_KEEPCNT, 3),
                (socket.TCP_USER_TIMEOUT, round(seconds * 1000)),
            ):
                found.setsockopt(socket.IPPROTO_TCP, option, value)


class TCPStore(StoreMixin, dist.TCPStore):  # type: ignore[misc, unused-ignore]
    """The default: a server at MASTER_ADDR:MASTER_PORT, in a process beside rank 0 that outlives it.

    When that process' node is gone, all ranks end with an `InternalError`: the launcher starts them again.
    """

    TCP_STORE_HOST_RANK: ClassVar[int] = 0
    is_client_only: ClassVar[bool] = False
    """Never become a server: set in a monitor process, and where a server is known to run."""

    def __init__(
        self,
        host_name: str | None = None,
        port: int | None = None,
        world_size: int | None = None,
        timeout: timedelta = timedelta(seconds=300),
        wait_for_workers: bool = True,
        multi_tenant: bool = False,
        use_libuv: bool = True,
    ) -> None:
        """Args:
        host_name, port, world_size: Default: MASTER_ADDR, MASTER_PORT and WORLD_SIZE.
        timeout, wait_for_workers, multi_tenant, use_libuv: As torch's.

        Raises:
            KeyError: an argument and its variable are missing.
            torch.distributed.DistNetworkError: no server answers.
        """
        host_name = os.environ["MASTER_ADDR"] if host_name is None else host_name
        port = int(os.environ["MASTER_PORT"]) if port is None else port
        arguments = {
            "host_name": host_name,
            "port": port,
            "world_size": int(os.environ["WORLD_SIZE"]) if world_size is None else world_size,
            "timeout": timeout,
            "wait_for_workers": wait_for_workers,
            "multi_tenant": multi_tenant,
            "use_libuv": use_libuv,
        }
        if not self.is_client_only and int(os.environ["RANK"]) == self.TCP_STORE_HOST_RANK:
            try:
                listening = {} if multi_tenant else listen_at(host_name, port, os.environ)
                super().__init__(is_master=True, **{**arguments, **listening})
                self.set(_HOSTED, "1")
                return
            except (OSError, dist.DistNetworkError):
                pass  # a store is served at this port already: the agent's, say
        super().__init__(is_master=False, **arguments)

    @property
    def critical_ranks(self) -> tuple[int, ...]:
        """Empty where the server is neither rank 0 nor its monitor process, but an agent's for instance."""
        return (self.TCP_STORE_HOST_RANK,) if self.check([_HOSTED]) else ()

    @classmethod
    def serve_apart(cls, elsewhere: object, **kwargs: Any) -> Any:
        """Rank 0's monitor process is the server: the restart group outlives that rank."""
        if int(os.environ.get("RANK", "-1")) != cls.TCP_STORE_HOST_RANK or cls.__init__ is not TCPStore.__init__:
            return None  # a class of the user's own, with arguments of its own, serves in its rank
        port = int(os.environ["MASTER_PORT"]) if kwargs.get("port") is None else int(kwargs["port"])
        host = kwargs.get("host_name") or os.environ["MASTER_ADDR"]
        try:
            server = serve_at(host, port, os.environ, use_libuv=kwargs.get("use_libuv", True))
        except (OSError, dist.DistNetworkError):
            return elsewhere
        server.set(_HOSTED, "1")
        return server


class FileStore(StoreMixin, dist.FileStore):  # type: ignore[misc, unused-ignore]
    """torch's: one file, with locks. On one machine; between nodes prefer `SharedFileStore`."""


class SharedFileStore(StoreMixin, _FileSystemStore):
    """This project's store in a folder of a shared filesystem: no process whose death ends the restart group.

    ``Wrapper(store_factory=SharedFileStore, store_kwargs={"path": …})``. The folder is fresh for each start of the
    processes: its name holds the run's id and the round, for instance.
    """


class PrefixStore(StoreMixin, dist.PrefixStore):  # type: ignore[misc, unused-ignore]
    """One iteration's part of a store."""

    STORE_PREFIX: ClassVar[str] = "_inprocess_{iteration}"

    def __init__(self, iteration: object, store: dist.Store) -> None:
        self.base_store = store
        super().__init__(self.STORE_PREFIX.format(iteration=iteration), store)
