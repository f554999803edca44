"""Where the ranks go on when the node of the `TCPStore`'s server is gone: to a standby store on another node.

The monitor processes of a few ranks listen from the start; all ranks read the same list of them after the initial
barrier. When the store's connection is lost, each rank goes to the first standby of the list that does not refuse, says
there that it lives, aborts its function, and comes to a meeting. The members that have come by then are decided once,
by compare-and-set, from what the ranks know themselves; a rank that is not among them ends.

There are never two restart groups. A server that answers again is alive: a rank that alone has lost it ends. A server
that refuses is dead. One that is silent may be alive behind a broken network: then more than half of the ranks must
have come, and the ranks that stay with the server end when more are silent than are left (`may_stay`).

What the ranks make of it when they meet at a standby store, and their own store is lost. Pure.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Collection, Mapping
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from msgspec import Struct, field

from hpc_elastic.base.codec import dumps, loads
from hpc_elastic.inprocess.settings import Settings
from hpc_elastic.inprocess.sockets import detect_silence, serve_at
from hpc_elastic.inprocess.state import InternalError
from hpc_elastic.inprocess.store import PrefixStore, TCPStore, pause_after, read_value

logger = logging.getLogger(__name__)

COUNT = 3
"""How many nodes (on one node alone: ranks) have a standby."""
STANDBYS = "standbys"
ALIVE, CAME, MET = "moved/alive", "moved/came", "moved/met"
_KNOCK_SECONDS = 10.0
"""Without an answer, after which an address is silent."""
_DYING_SECONDS = 2.0
"""A process that dies may close its connections before its listening socket."""


class Standby(Struct, frozen=True, kw_only=True):
    """A store that is not used yet."""

    initial_rank: int
    """Beside whose process it is."""
    host: str
    port: int


def is_candidate(environ: Mapping[str, str]) -> bool:
    """Whether the rank with this environment has a standby: the first one of each of the nodes after rank 0's.

    Where it is not known which ranks share a node, or all do: the ranks after 0.
    """
    if environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return False  # an agent serves, and the restart group has no server of its own
    rank, world_size = int(environ.get("RANK", "0")), int(environ.get("WORLD_SIZE", "1"))
    given = environ.get("LOCAL_WORLD_SIZE") or environ.get("SLURM_STEP_TASKS_PER_NODE") or ""
    here = int(given.partition("(")[0].partition(",")[0] or 0)  # Slurm's has the form 4(x2),3
    step = here if 0 < here < world_size else 1
    return rank % step == 0 and 1 <= rank // step <= COUNT


def listen(factory: type, kwargs: Mapping[str, Any], environ: Mapping[str, str]) -> tuple[Any, Standby] | None:
    """Serve a standby store, where this rank is to have one.

    Args:
        factory, kwargs: Of the restart group's store.
        environ: The rank's.

    Returns:
        What keeps the server, and where it is.
    """
    if not is_plain(factory) or not is_candidate(environ):
        return None
    try:
        host = _own_address(*_address(kwargs, environ))
        server = serve_at(host, 0, environ, use_libuv=kwargs.get("use_libuv", True))
    except (OSError, dist.DistError) as error:
        logger.warning("there is no standby store here: %s", error)
        return None
    return server, Standby(initial_rank=int(environ["RANK"]), host=host, port=server.port)


def is_plain(factory: type) -> bool:
    """Whether this is `TCPStore`, with its arguments."""
    return issubclass(factory, TCPStore) and factory.__init__ is TCPStore.__init__


def _address(kwargs: Mapping[str, Any], environ: Mapping[str, str]) -> tuple[str, int]:
    port = environ["MASTER_PORT"] if kwargs.get("port") is None else kwargs["port"]
    return kwargs.get("host_name") or environ["MASTER_ADDR"], int(port)


def _own_address(host: str, port: int) -> str:
    """This node's, on the network on which it reaches `host`. Nothing is sent."""
    family, kind, protocol, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])


class Refuge(Struct, kw_only=True):
    """A rank's way to the standby stores of its call."""

    name: str
    """The call's: the prefix of its keys."""
    initial_rank: int
    server: tuple[str, int]
    """Where the store's server is."""
    left: list[Standby]
    """In the order in which they are tried; the same on all ranks."""
    timeout: timedelta
    """The store's own."""
    silence: float
    """Seconds without any sign of a rank, after which it is dead."""
    patience: float
    """Seconds in which a rank that lives leaves its function and comes."""
    lock: Any = field(default_factory=threading.Lock)
    is_certain: bool = False
    fled_at: float = 0.0
    raw: Any = None
    """The store of the standby to which this rank has fled."""
    standby: Standby | None = None

    def flee(self) -> None:
        """Go to the first standby that does not refuse, and say there that this rank lives. From any thread.

        Raises:
            InternalError: the server is alive, or there is no standby, or the next one does not answer.
        """
        with self.lock:
            if self.raw is not None:
                return
            self.is_certain = not self._is_silent(self.server)
            while self.left:
                found = self.left.pop(0)
                knocked = knock((found.host, found.port), _KNOCK_SECONDS)
                if knocked is None:
                    self.left.clear()  # ranks that reach it are there: no other will do
                    raise InternalError(f"the restart group's store is lost, and the standby at {found.host} is silent")
                if knocked:
                    self._move_to(found)
                    return
            raise InternalError("the restart group's store is lost, and all its standbys are")

    def _is_silent(self, server: tuple[str, int]) -> bool:
        deadline = time.monotonic() + _DYING_SECONDS
        while (answer := knock(server, _KNOCK_SECONDS)) and time.monotonic() < deadline:
            time.sleep(0.05)
        if answer:
            raise InternalError("this rank alone has lost the connection to the restart group's store, which is alive")
        return answer is None

    def _move_to(self, standby: Standby) -> None:
        try:
            raw = connect(standby, self.timeout)
            PrefixStore(self.name, raw).append_item(ALIVE, str(self.initial_rank))
        except dist.DistError as error:
            self.left.clear()
            raise InternalError(f"the restart group's store is lost, and its standby fails: {error}") from error
        logger.warning("rank %d goes to the standby store at %s", self.initial_rank, standby.host)
        self.raw, self.standby, self.fled_at = raw, standby, time.monotonic()

    def meet(self, *, iteration: int, world_size: int, has_returned: bool) -> Meeting:
        """Wait for all that live, and agree with them on the members of the next iteration.

        Args:
            iteration, world_size, has_returned: As `Arrival`.

        Raises:
            InternalError: those who came must not go on, or they did without this rank.
            torch.distributed.DistNetworkError: this standby is lost, too.
        """
        self.flee()
        mine = Arrival(
            initial_rank=self.initial_rank,
            iteration=iteration,
            world_size=world_size,
            has_returned=has_returned,
            is_certain=self.is_certain,
        )
        try:
            meeting = self._agree(PrefixStore(self.name, self.raw), mine)
        except dist.DistNetworkError:
            self._forget_old_server()
            raise
        if meeting.objection:
            raise InternalError(f"the restart group's store is lost: {meeting.objection}")
        if self.initial_rank not in meeting.present:
            raise InternalError(
                "the restart group's store is lost, and the others went on without this rank, which came late"
            )
        return meeting

    def _agree(self, base: Any, mine: Arrival) -> Meeting:
        base.append_item(CAME, dumps(mine))
        began = time.monotonic()
        while not (found := read_value(base, MET)):
            arrivals = [loads(Arrival, item) for item in base.items(CAME)]
            alive = {int(item) for item in base.items(ALIVE)}
            waited = time.monotonic() - began
            if (
                len(arrivals) >= count_expected(arrivals)
                or (time.monotonic() - self.fled_at >= self.silence and len(arrivals) >= len(alive))
                or waited >= self.patience
            ):
                base.compare_set(MET, "", dumps(decide(arrivals)))
                continue
            time.sleep(pause_after(waited))
        return loads(Meeting, found)

    def move_in(self) -> tuple[Any, Any, Standby]:
        """The store of now on, a second connection to it, and where it is. From now on it is what may be lost.

        Raises:
            torch.distributed.DistNetworkError: it is.
        """
        raw, standby = self._forget_old_server()
        second = raw.clone()
        detect_silence(standby.port, self.silence)
        return raw, second, standby

    def _forget_old_server(self) -> tuple[Any, Standby]:
        raw, standby = self.raw, self.standby
        assert standby is not None
        self.server = standby.host, standby.port
        self.raw = self.standby = None
        return raw, standby


def find_refuge(
    raw: Any, *, name: str, initial_rank: int, settings: Settings, environ: Mapping[str, str]
) -> Refuge | None:
    """After the initial barrier: the way to the standbys; None where the restart group does not need any.

    Args:
        raw: The restart group's store.
        name, initial_rank: As `Refuge`.
        settings: The wrapper's.
        environ: The rank's.
    """
    if not is_plain(settings.store_factory) or not raw.critical_ranks:
        return None
    standbys = [loads(Standby, item) for item in PrefixStore(name, raw).items(STANDBYS)]
    kwargs = settings.store_kwargs or {}
    server, silence = _address(kwargs, environ), settings.heartbeat_timeout.total_seconds()
    detect_silence(server[1], silence)
    return Refuge(
        name=name,
        initial_rank=initial_rank,
        server=server,
        left=sorted(standbys, key=lambda each: each.initial_rank),
        timeout=kwargs.get("timeout", timedelta(seconds=300)),
        silence=silence,
        patience=settings.barrier_timeout.total_seconds(),
    )


class _Client(TCPStore):
    """Never the server, whatever the rank's number."""

    is_client_only = True


def connect(standby: Standby, timeout: timedelta) -> TCPStore:
    """Raises: torch.distributed.DistError: it does not answer."""
    return _Client(standby.host, standby.port, timeout=timeout, wait_for_workers=False)


def knock(address: tuple[str, int], seconds: float) -> bool | None:
    """Whether a server listens at `address`; None where there is no answer at all."""
    try:
        socket.create_connection(address, timeout=seconds).close()
    except ConnectionRefusedError:
        return False
    except OSError:
        return None
    return True


class Arrival(Struct, frozen=True, kw_only=True):
    """What a rank knows when it comes to a meeting."""

    initial_rank: int
    iteration: int
    world_size: int
    """Of that iteration."""
    has_returned: bool
    """Its function has, in that iteration, and it is not known whether those of all others have."""
    is_certain: bool
    """The store's server is dead; else it was silent."""


def count_expected(arrivals: Collection[Arrival]) -> int:
    """How many ranks there were at the last that is known."""
    return max(arrivals, key=lambda each: each.iteration).world_size


def objection(arrivals: Collection[Arrival]) -> str:
    """Why the ranks that came must not go on; "" where they may."""
    expected = count_expected(arrivals)
    if not any(each.is_certain for each in arrivals) and 2 * len(arrivals) <= expected:
        return f"the store's server is silent, and only {len(arrivals)} of {expected} ranks are here: others may go on"
    if len(arrivals) < expected and all(each.has_returned for each in arrivals):
        return "the function has returned on all ranks that are left: whether the call was over can't be known"
    return ""


class Meeting(Struct, frozen=True, kw_only=True):
    """What all that came have agreed on."""

    iteration: int
    """The next one."""
    present: tuple[int, ...]
    """Initial ranks."""
    objection: str = ""


def decide(arrivals: Collection[Arrival]) -> Meeting:
    """Args: arrivals: of all who came; at least one."""
    return Meeting(
        iteration=max(each.iteration for each in arrivals) + 1,
        present=tuple(sorted(each.initial_rank for each in arrivals)),
        objection=objection(arrivals),
    )


def may_stay(*, silent: int, left: int) -> bool:
    """Whether those who still have their store may go on: else they are few enough for the others to go on elsewhere.

    Args:
        silent: Ranks that were declared dead in this call for their silence alone.
        left: How many are left.
    """
    return silent <= left
