"""Stand-ins for agents in one process, each with a mount, a notifier and the coordination thread of its own: the real
thing but for the workers."""

from __future__ import annotations

import random
import select
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from hpc_elastic.base.clock import SystemClock
from hpc_elastic.rendezvous.coordination import Coordination
from hpc_elastic.rendezvous.membership import NodeInfo
from hpc_elastic.rendezvous.participant import Participant
from hpc_elastic.rendezvous.state import NodeFailure, RoundRecord, Status, new_uid
from hpc_elastic.run.spec import RendezvousSettings
from hpc_elastic.store.file_store import FileStore
from hpc_elastic.store.notifier import Notifier
from tests.rigs.rendezvous_world import settle_always_restarting

HOME = "127.0.0.1"


class ThreadNode:
    """One node. `react` does what an agent would about what has come."""

    def __init__(self, index: int, mount: Path, settings: RendezvousSettings) -> None:
        clock = SystemClock()
        uid = new_uid(index, f"n{index}", clock)
        self.index = index
        self.final: RoundRecord | None = None
        self._running = -1
        self._notifier = (
            Notifier(secret=b"s" * 32, run_uid="threads", uid=uid, host=HOME) if settings.doorbell else None
        )
        self.info = NodeInfo(
            uid=uid,
            node=index,
            host=f"n{index}",
            local_world_size=1,
            addresses=(HOME,) if self._notifier else (),
            port=self._notifier.port if self._notifier else 0,
        )
        self.coordination = Coordination(
            lambda listener: Participant(
                run_id="threads",
                store=FileStore(mount / "store", clock=clock),
                info=self.info,
                settings=settings,
                decide_restart=settle_always_restarting,
                clock=clock,
                rng=random.Random(index),
                listener=listener,
                notifier=self._notifier,
            ),
            notifier=self._notifier,
            clock=clock,
        )
        self.coordination.ask(lambda participant: participant.join())
        self.coordination.start()

    def react(self) -> None:
        for notice in self.coordination.take():
            if isinstance(notice, Exception):
                raise notice
            if isinstance(notice, RoundRecord):
                self._on_record(notice)

    def _on_record(self, record: RoundRecord) -> None:
        member = record.member(self.info.uid) is not None
        if record.status is Status.FROZEN and member:
            master = f"{HOME}:1" if record.members[0].uid == self.info.uid else ""
            self.coordination.ask(lambda participant: participant.claims.confirm(record.round, master))
        elif record.status is Status.FINAL and member:
            self._running, self.final = record.round, record
        elif record.status is Status.JOINABLE and 0 <= self._running < record.round:
            self._running = -1
            self.coordination.ask(lambda participant: participant.join())

    def fail(self) -> None:
        index = self._running
        failure = NodeFailure(node=self.index, fingerprint="E", failure_class="root", retryable=True, message="E")
        self.coordination.ask(lambda participant: participant.claims.report_failure(index, failure))

    def stop(self) -> None:
        self.coordination.stop(within=10)
        if self._notifier is not None:
            self._notifier.close()


def run_until(nodes: Sequence[ThreadNode], condition: Callable[[], bool], *, seconds: float) -> float:
    """Let the nodes react until the condition holds. Returns the seconds that it took."""
    began = time.monotonic()
    poll = select.poll()
    for node in nodes:
        poll.register(node.coordination.fileno(), select.POLLIN)
    while not condition():
        assert time.monotonic() - began < seconds, [(n.index, n.final and n.final.round) for n in nodes]
        poll.poll(100)
        for node in nodes:
            node.react()
    return time.monotonic() - began


def all_in_round(nodes: Sequence[ThreadNode], index: int) -> bool:
    """Whether all of them run in round `index`, which is theirs alone."""
    return all(n.final is not None and n.final.round == index and len(n.final.members) == len(nodes) for n in nodes)
