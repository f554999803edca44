"""The supervisor over real participants and a launcher of the test's own: `Stage`."""

from __future__ import annotations

import random
import signal
from collections import deque
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

from hpc_elastic.launch.agents import AgentEnd
from hpc_elastic.launch.requeue import AttemptResult
from hpc_elastic.launch.site import Allocation, JobCondition, SignalResolver, SlurmAnswer
from hpc_elastic.launch.supersede import EndClaim
from hpc_elastic.launch.supervisor import Supervisor
from hpc_elastic.rendezvous.coordination import Refusal
from hpc_elastic.rendezvous.membership import NodeInfo
from hpc_elastic.rendezvous.participant import OBSERVER_NODE, Participant
from hpc_elastic.rendezvous.state import PreemptionStatus, RoundRecord, Status, new_uid
from hpc_elastic.run.events import RunEvent
from hpc_elastic.run.paths import Outcome
from hpc_elastic.run.spec import RendezvousSettings
from tests.rigs.event_pairs import log_into
from tests.rigs.memory_store import MemoryStore
from tests.rigs.rendezvous_world import Node, World, settle_always_restarting
from tests.rigs.specs import make_attempt

SETTINGS = RendezvousSettings(
    min_nodes=2, max_nodes=3, expected_nodes=3, last_call_timeout=5, heartbeat_interval=1, heartbeat_ttl=5
)
TICK = 0.1
"""Seconds that pass with each turn of the supervisor's loop."""


class StaleStore:
    """The supervisor's view of the store through a cache that shows no new record until the folder is invalidated."""

    def __init__(self, inner: MemoryStore) -> None:
        self._inner = inner
        self._kept: list[str] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def keep(self) -> None:
        """From now on."""
        self._kept = self._inner.list("log")

    def list(self, folder: str) -> list[str]:
        return self._inner.list(folder) if folder != "log" or self._kept is None else self._kept

    def invalidate(self, folder: str) -> None:
        if self._kept is not None and folder == "log":
            self.keep()


class Look:
    """Stands for `Coordination`: the same participant, stepped whenever the supervisor looks."""

    refusal: Refusal | None = None

    def lasting_refusal(self) -> None:
        return None

    def __init__(self, world: World, fd: int) -> None:
        self._fd = fd
        self._messages: deque[Any] = deque()
        self.failure: Exception | None = None
        self.hangs = False
        """The filesystem does not answer."""
        self.stopped = False
        self.store = StaleStore(world.store)
        info = NodeInfo(
            uid=new_uid(99999, "supervisor", world.clock),
            node=OBSERVER_NODE,
            host="head",
            local_world_size=0,
            addresses=(),
            port=0,
        )
        self._participant = Participant(
            run_id="unit",
            store=self.store,  # type: ignore[arg-type]
            info=info,
            settings=world.settings,
            decide_restart=settle_always_restarting,
            clock=world.clock,
            rng=random.Random(0),
            listener=self,
        )

    def on_record(self, record: RoundRecord) -> None:
        self._messages.append(record)

    def on_event(self, event: RunEvent) -> None:
        self._messages.append(event)

    def start(self) -> None:
        pass

    def fileno(self) -> int:
        return self._fd

    def ask(self, command: Callable[[Participant], None]) -> None:
        command(self._participant)

    def take(self) -> list[Any]:
        if self.failure is not None:
            failure, self.failure = self.failure, None
            return [failure]
        while not self.hangs and self._participant.step() == 0.0:
            pass
        taken = list(self._messages)
        self._messages.clear()
        return taken

    def stop(self, *, within: float) -> bool:
        self.stopped = True
        if not self.hangs:
            self._participant.step()
        return not self.hangs


class Agents:
    """A launcher whose agents are the world's nodes. A test says who dies; those of a closed run end by themselves."""

    def __init__(self, world: World, play: Iterator[Callable[[], Any] | float]) -> None:
        self._world = world
        self._play = play
        self._until = 0.0
        self._ended: list[AgentEnd] = []
        self.of: dict[int, Node] = {}
        self.relaunched: list[tuple[int, float]] = []
        self.ends: list[float] = []
        self.terminated: list[float] = []
        self.stubborn = False
        self.silent = False
        """The launcher never says that somebody has ended."""
        self.hears_all_ends = True
        self.unlaunched: dict[int, str] = {}
        self.messages: dict[int, str] = {}
        """Node → what the launcher knows that it printed last."""
        self.powerless: set[int] = set()
        """Nodes on which no agent can be started."""

    def launch(self) -> None:
        for node in range(self._world.settings.expected_nodes):
            self.of[node] = self._world.start(node)

    def relaunch(self, node: int) -> None:
        self.relaunched.append((node, self._world.clock.now))
        if node in self.powerless:
            self._ended.append(AgentEnd(node=node, code=None, detail="launch failed", started=False))
            return
        self.of[node] = self._world.start(node)

    def kill(self, node: int, code: int | None = -9, *, started: bool = True, detail: str = "Killed") -> None:
        self.of.pop(node).alive = False
        self._ended.append(AgentEnd(node=node, code=code, detail=detail, started=started))

    def kill_all(self, code: int | None, *, started: bool = True, detail: str = "Killed") -> None:
        for node in list(self.of):
            self.kill(node, code, started=started, detail=detail)

    def stand_in(self, node: int) -> None:
        """Something runs there that is no agent."""
        self.of[node] = SimpleNamespace(alive=True, frozen=True, participant=SimpleNamespace(record=None))  # type: ignore[assignment]

    def cut_power(self, node: int) -> None:
        """Nobody hears of it."""
        self.of.pop(node).alive = False
        self.powerless.add(node)

    def give_up(self, node: int) -> None:
        self._ended.append(AgentEnd(node=node, code=None, detail="given up", started=False, gone=True))

    def filenos(self) -> list[int]:
        return []

    def due(self) -> float | None:
        return None

    def take(self) -> list[AgentEnd]:
        world = self._world
        world.clock.now += TICK
        for agent in list(self.of.values()):
            if not agent.frozen:
                agent.step()
        for number, agent in list(self.of.items()):
            record = agent.participant.record
            if not self.stubborn and record is not None and record.status is Status.CLOSED:
                agent.participant.claims.deregister()
                agent.step()
                if not self.silent:
                    self.kill(number, 0 if record.outcome is Outcome.SUCCEEDED else 1, detail="ended")
        if world.clock.now >= self._until and (now := next(self._play, None)) is not None:
            if callable(now):
                now()
            else:
                self._until = world.clock.now + now
        ended, self._ended = self._ended, []
        return ended

    def running(self) -> bool:
        return bool(self.of)

    def last_message(self, node: int) -> str:
        return self.messages.get(node, "")

    def terminate(self) -> None:
        self.terminated.append(self._world.clock.now)

    def end(self, *, within: float) -> None:
        self.ends.append(within)


class Stage:
    """A supervisor with all that is around it."""

    def __init__(self, ready: int, never: int) -> None:
        """`ready` is a descriptor that can always be read, `never` one that never can."""
        self.world = World(SETTINGS)
        self.signals: list[signal.Signals] = []
        self.sender = ""
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.answer = SlurmAnswer(JobCondition.RUNNING)
        """What Slurm says when it is asked."""
        self.allocation = Allocation.HELD
        self.script: deque[Callable[[], Any] | float] = deque()
        self.noted = 0.0
        self.agents = Agents(self.world, self._plays())
        self.look = Look(self.world, ready)
        self.end_claim = EndClaim(
            lambda: self.allocation, self.look.ask, clock=self.world.clock, start=lambda work: work()
        )
        self.supervisor = Supervisor(
            attempt=make_attempt(nodes=tuple(f"n{n}" for n in range(SETTINGS.expected_nodes)), batch_host="head"),
            launcher=self.agents,
            coordination=self.look,  # type: ignore[arg-type]
            signals=SimpleNamespace(fileno=lambda: never, take=self._take_signals, sender=lambda number: self.sender),  # type: ignore[arg-type]
            events=log_into(self.events),  # type: ignore[arg-type]
            clock=self.world.clock,
            shutdown_timeout=30.0,
            resolver=SignalResolver(
                lambda near: self.answer,
                grace=120.0,
                kill_wait=30.0,
                events=log_into(self.events),  # type: ignore[arg-type]
                clock=self.world.clock,
            ),
            end_claim=self.end_claim,
        )

    def _plays(self) -> Iterator[Callable[[], Any] | float]:
        while True:
            yield self.script.popleft() if self.script else 1e9

    def _take_signals(self) -> list[signal.Signals]:
        taken = list(self.signals)
        self.signals.clear()
        return taken

    def run(self, *script: Callable[[], Any] | float) -> AttemptResult:
        """Each step is done when its turn comes; a number lets so many seconds pass."""
        self.script.extend(script)
        return self.supervisor.run()

    def at(self, act: Callable[[], Any]) -> Callable[[], None]:
        """A step that notes its time, for `since`, and then acts."""

        def step() -> None:
            self.noted = self.world.clock.now
            act()

        return step

    @property
    def since(self) -> float:
        return self.world.clock.now - self.noted

    def sent(self, number: signal.Signals, answer: SlurmAnswer | None = None) -> Callable[[], None]:
        """A step in which the supervisor gets a signal, and Slurm has another answer from then on."""

        def step() -> None:
            self.answer = answer or self.answer
            self.signals.append(number)

        return step

    def newest(self) -> RoundRecord:
        record = self.world.newest()
        assert record is not None
        return record

    def done(self) -> None:
        """All agents that run say that their workers have ended with 0."""
        record = self.newest()
        for agent in self.agents.of.values():
            agent.participant.claims.report_done(record.round)

    def saved(self) -> None:
        """All agents that run say where their workers stand, and that they have saved."""
        record = self.newest()
        for agent in self.agents.of.values():
            agent.participant.claims.report_noted(record.round, PreemptionStatus(heeds=True, step=7, rate=1.0))
            agent.participant.claims.report_kept(record.round)

    def launch_nothing(
        self, code: int | None = None, *, started: bool = True, detail: str = "", ends: bool = True
    ) -> None:
        """What the launcher starts never becomes an agent; with `ends`, it ends at once."""

        def launch() -> None:
            for node in range(self.world.settings.expected_nodes):
                self.agents.stand_in(node)
                if ends:
                    self.agents.kill(node, code, started=started, detail=detail)

        self.agents.launch = launch  # type: ignore[method-assign]

    def names(self, wanted: str) -> list[dict[str, Any]]:
        return [fields for event, fields in self.events if event == wanted]
