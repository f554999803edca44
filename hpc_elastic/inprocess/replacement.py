"""A fresh process takes the place of one that died: it announces itself, and the ranks that are left take it in.

Between two iterations the ranks that are left wait until a fresh process has come for every place that is empty, or
until spares are enough, or for `HPC_ELASTIC_RING_WAIT` seconds. One of them writes the next members down, by
compare-and-set. The terminated ranks that `rank_assignment` then gets are the places that stayed empty.
"""

from __future__ import annotations

import errno
import logging
import os
import time
import uuid
from collections.abc import Collection, Mapping
from typing import Any

from msgspec import Struct

from hpc_elastic.base.clock import Staleness
from hpc_elastic.base.codec import dumps, loads
from hpc_elastic.inprocess.state import InternalError, State
from hpc_elastic.inprocess.store import LONGEST_PAUSE, pause_after, read_value
from hpc_elastic.worker_api.records import (
    RESTART_REPLACES,
    RESTART_REPORTS,
    RESTART_WAIT,
    RestartGroupEvent,
    RestartGroupReport,
)

logger = logging.getLogger(__name__)

JOINERS, WITHDRAWN, SEATED = "joiners", "withdrawn", "seated"
DECIDED, FINISHED, PULSE = "decided", "finished", "pulse"


class Admission(Struct, frozen=True, kw_only=True):
    """The members of the next iteration, in the numbers of the one that ended."""

    iteration: int
    world_size: int
    """Empty places included."""
    places: Mapping[str, int]
    """The rank of each request's `uid`."""
    empty: tuple[int, ...]


def admission(
    *, iteration: int, world_size: int, terminated: Mapping[int, int | None], requests: Mapping[str, int]
) -> Admission:
    """Give each request, in order, the dead one's place that it was started for, else an empty one, else a new one.

    `world_size` is that of the iteration that ended. `terminated`: empty ranks, with their initial ranks if known.
    """
    free = dict(sorted(terminated.items()))
    places: dict[str, int] = {}
    for uid, initial_rank in requests.items():
        own = next((rank for rank, initial in free.items() if initial == initial_rank), None)
        if own is not None:
            del free[own]
            places[uid] = own
    for uid in [uid for uid in requests if uid not in places]:
        if free:
            places[uid] = min(free)
            del free[min(free)]
        else:
            places[uid] = world_size
            world_size += 1
    return Admission(iteration=iteration, world_size=world_size, places=places, empty=tuple(free))


def is_enough(*, world_size: int, active_world_size: int, terminated: int, requests: int) -> bool:
    """Each place is taken, or spares fill those of all ranks that ran the function in the iteration that ended."""
    return requests >= terminated or world_size - terminated + requests >= active_world_size


class Admissions:
    """The side of a rank that is in the restart group. It waits for fresh processes for `wait` seconds."""

    def __init__(self, base: Any, *, wait: float) -> None:
        self._base = base
        self._wait = wait

    def admit(self, state: State, store: Any, terminated: Collection[int]) -> Admission:
        """Agree on the members of the next iteration, to which `state` is advanced; its ranks, `store` and `terminated`
        are still those of the one that ended."""
        key = f"admitted/{state.iteration}"
        initial = {rank: store.find_initial_rank(rank) for rank in terminated}
        began = time.monotonic()
        has_reported = False
        while not (found := read_value(self._base, key)):
            requests = self._waiting()
            waited = time.monotonic() - began
            if waited >= self._wait or is_enough(
                world_size=state.world_size,
                active_world_size=state.active_world_size,
                terminated=len(initial),
                requests=len(requests),
            ):
                decided = admission(
                    iteration=state.iteration, world_size=state.world_size, terminated=initial, requests=requests
                )
                self._base.compare_set(key, "", dumps(decided))
                continue
            if not has_reported:
                logger.info("rank %d waits for fresh processes in the places of ranks %s", state.rank, sorted(initial))
                has_reported = True
            time.sleep(pause_after(waited))
        self._base.set(DECIDED, str(state.iteration))
        return loads(Admission, found)

    def _waiting(self) -> dict[str, int]:
        gone = {*self._base.items(WITHDRAWN), *self._base.items(SEATED)}
        asked = (item.partition(" ") for item in self._base.items(JOINERS))
        return {uid: int(rank) for uid, _, rank in asked if uid not in gone}

    def finish(self) -> None:
        """Give no places any more: all have completed."""
        self._base.set(FINISHED, "1")


class ReplacementProcess:
    """A fresh process' side, until it has a place."""

    def __init__(self, initial_rank: int, *, uid: str | None = None) -> None:
        self.uid = uid or uuid.uuid4().hex
        self.initial_rank = initial_rank

    def wait_for_place(self, base: Any, *, patience: float) -> Admission | None:
        """Announce this process, and wait for its place; None where the call ended without it.

        InternalError: the restart group has shown no life for `patience` seconds.
        """
        base.append_item(JOINERS, f"{self.uid} {self.initial_rank}")
        seen, pause = "", 0.002
        ages: Staleness[str] = Staleness()
        while True:
            now, decided = time.monotonic(), read_value(base, DECIDED)
            if decided != seen:
                seen = decided
                if (found := self.place_in(base, decided)) is not None:
                    base.append_item(SEATED, self.uid)
                    return found
            if read_value(base, FINISHED):
                return None
            if ages.observe("group", (decided, int(base.add(PULSE, 0))), now) >= patience:
                raise InternalError(
                    f"the restart group that this process was to join has shown no life for {patience:g} s"
                )
            time.sleep(pause)
            pause = min(pause * 1.2, LONGEST_PAUSE)

    def place_in(self, base: Any, decided: str) -> Admission | None:
        """The admission with that number, if this process is in it."""
        text = read_value(base, f"admitted/{decided}") if decided else ""
        found = loads(Admission, text) if text else None
        return found if found is not None and self.uid in found.places else None


class AgentLink(Struct, frozen=True, kw_only=True):
    """The connection to a node's agent. Under torchrun or srun there is no agent, and every field has its default."""

    reports: str = ""
    wait: float | None = None
    """Seconds for a fresh process to come in a dead one's place; None: the agent starts none."""
    replaces: int = 0
    """How many processes of this slot came before; 0: none."""

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> AgentLink:
        try:
            wait = float(env[RESTART_WAIT]) if env.get(RESTART_WAIT) else None
            replaces = int(env.get(RESTART_REPLACES) or 0)
        except ValueError:
            logger.warning(
                "%s=%r, %s=%r: not numbers",
                RESTART_WAIT,
                env.get(RESTART_WAIT),
                RESTART_REPLACES,
                env.get(RESTART_REPLACES),
            )
            wait, replaces = None, 0
        return cls(reports=env.get(RESTART_REPORTS, ""), wait=wait, replaces=replaces)

    def report(self, event: RestartGroupEvent, *, rank: int, **facts: Any) -> None:
        """Report to the agent, if there is one. This never waits, and a failure of it does not fail the group."""
        if not self.reports:
            return
        try:
            fd = os.open(self.reports, os.O_WRONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                os.write(fd, RestartGroupReport(event=event, pid=os.getpid(), rank=rank, **facts).encode())
            finally:
                os.close(fd)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENXIO):
                logger.warning("the report to the agent fails: %s", error)
