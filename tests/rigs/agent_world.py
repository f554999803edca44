"""Whole agents over one memory store and one fake clock: the real `NodeAgent`, the real participant, and workers that
are a list.

An agent has two threads, its loop and its coordination; the world steps them one by one, in any order. Each effect, on
the store or on workers, passes a gate where a test can end the agent: then its workers go on until its guardian has
ended them, or a new agent of that node has. After every step the invariants are checked.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from msgspec.structs import replace

from hpc_elastic.agent import local_workers, node_agent, rounds
from hpc_elastic.agent.heartbeat_watch import HeartbeatWatch
from hpc_elastic.agent.heartbeats import HeartbeatFolder, RankBeat
from hpc_elastic.agent.node_agent import NodeAgent
from hpc_elastic.agent.part import Condemned, GroupSite, Part
from hpc_elastic.agent.restart_policy import RestartPolicy
from hpc_elastic.agent.supervision import Phase
from hpc_elastic.agent.worker_reports import CheckpointWatch, PreemptionWatch
from hpc_elastic.failures.worker_failure import WorkerFailure
from hpc_elastic.rendezvous.participant import Participant
from hpc_elastic.rendezvous.proposals import RankLayout
from hpc_elastic.rendezvous.schedule import Lease
from hpc_elastic.rendezvous.state import RoundRecord, Status
from hpc_elastic.run.events import RunEvent
from hpc_elastic.run.option_values import SectionTimeouts
from hpc_elastic.run.paths import Outcome
from hpc_elastic.run.spec import RendezvousSettings
from hpc_elastic.workers.stop import Stopped
from tests.rigs.agent_site import make_site
from tests.rigs.event_pairs import log_into
from tests.rigs.fake_workers import FakeWorkers, failure
from tests.rigs.rendezvous_world import Crash, Node, World
from tests.rigs.specs import make_attempt, make_spec

LOOKS_TO_STOP = 2


@dataclass(eq=False)
class Worker:
    agent: str
    """Uid of the one that started it."""
    node: int
    round: int
    rank: int
    world_size: int
    master: str


class ListedWorkers(FakeWorkers):
    """Their processes are in a list that outlives the agent, and each effect passes a gate."""

    looks_to_stop = LOOKS_TO_STOP
    started = False

    def __init__(self, node: AgentNode, round_index: int, layout: RankLayout) -> None:
        super().__init__(round_index, layout)
        self._node, self._started_at = node, node.world.clock.now

    @property
    def seconds(self) -> float:
        return self._node.world.clock.now - self._started_at

    @property
    def pids(self) -> list[int]:
        return [4000 + worker.rank for worker in self.mine()]

    @property
    def running(self) -> list[int]:
        return [] if self.succeeded else list(range(self.layout.local_world_size))

    def mine(self) -> list[Worker]:
        processes = self._node.agents.processes
        return [p for p in processes if p.agent == self._node.info.uid and p.round == self.round]

    def start(self, argv: list[str], environment: Callable[[int, str], Mapping[str, str]], **_how: object) -> None:
        self._node._gate(f"before workers of round {self.round}")
        for local_rank in range(self.layout.local_world_size):
            env = environment(local_rank, "error")
            self._node.agents.processes.append(
                Worker(
                    agent=self._node.info.uid,
                    node=self._node.index,
                    round=int(env["TORCHELASTIC_RESTART_COUNT"]),
                    rank=int(env["RANK"]),
                    world_size=int(env["WORLD_SIZE"]),
                    master=f"{env['MASTER_ADDR']} {env['MASTER_PORT']}",
                )
            )
            self._node._gate(f"worker {local_rank} of round {self.round}")
        self.started = True
        self._node.lease.begin(self.round, self._node.show_lease)

    def exit_summary(self) -> str:
        return self.failures[0].message if self.failures else ""

    def begin_stop(self, *, grace: float, at_once: bool = False) -> None:
        self._node._gate("SIGTERM")
        if not self.stopping:
            self.stopping, self.looks_to_stop = True, LOOKS_TO_STOP

    def step_stop(self) -> Stopped | float:
        if self.looks_to_stop > 0:
            self.looks_to_stop -= 1
            return 0.1
        for worker in self.mine():
            self._node.agents.processes.remove(worker)
            self._node._gate(f"end of rank {worker.rank}")
        self.stopping = False
        return Stopped(exits={}, killed=0, left=(), seconds=0.2)

    def describe_failures(self) -> list[WorkerFailure]:
        self._node._gate("evidence")
        return self.failures

    def condemn_unstarted(self, error: Exception) -> Condemned:
        raise AssertionError(f"the workers can always be started, and yet: {error}")

    # -- what happens to them ------------------------------------------------------------------------------------

    def break_down(self, message: str = "boom") -> None:
        if not (self.failed or self.succeeded or self.stopping):
            self.fall(failure(self.layout.first_rank, message=message, fingerprint=message))

    def finish(self) -> None:
        if not (self.failed or self.succeeded or self.stopping):
            super().finish()
            for worker in self.mine():
                self._node.agents.processes.remove(worker)


class FakeWatch(HeartbeatWatch):
    """Reads no files: the checkpoints are counted by the test."""

    def __init__(self, node: AgentNode) -> None:
        super().__init__(
            folder=HeartbeatFolder(None),
            timeouts=SectionTimeouts(),
            clock=node.world.clock,
            files=SimpleNamespace(post=lambda job: None),  # type: ignore[arg-type]
            lease=node.lease,
        )
        self._node = node

    def read(self) -> list[RankBeat]:
        saved = self._node.saved_at
        beat = RankBeat(rank=0, local_rank=0, section="step", at=0.0, checkpoints=len(saved))
        return [replace(beat, saved_at=saved[-1]) if saved else beat]


class FakeCoordination:
    """Stands for `Coordination`, whose thread the world steps."""

    refusal = None

    def lasting_refusal(self) -> None:
        return None

    def __init__(self, node: AgentNode) -> None:
        self._node = node
        self.commands: deque[Callable[[Participant], None]] = deque()
        self.notices: deque[Any] = deque()

    def start(self) -> None:
        pass

    def ask(self, command: Callable[[Participant], None]) -> None:
        self.commands.append(command)

    def take(self) -> list[Any]:
        taken = list(self.notices)
        self.notices.clear()
        return taken

    def stop(self, *, within: float) -> bool:
        self.step()
        return True

    def step(self) -> float:
        while self.commands:
            self.commands.popleft()(self._node.participant)
        return self._node.participant.step()


class FakeServer(Part):
    """Stands for the TCPStore's host."""

    failure = ""
    guard = None

    def __init__(self) -> None:
        self._port = 29500

    def bind(self, address: str, port: int | None, *, guarded: bool = False) -> tuple[str, int]:
        self._port += 1
        return address, self._port

    def serve(self) -> None:
        pass

    release = close = serve


class FakeHealth(Part):
    """Every node is fit, and says so a little later."""

    def __init__(self, looks: int) -> None:
        self._looks = looks
        self._begun = 0

    def on_join(self, last_round: int) -> None:
        self._begun = self._looks - 1

    def look(self, agent: NodeAgent) -> None:
        self._begun -= 1

    def holds_join(self, agent: NodeAgent) -> bool:
        return self._begun > 0


@dataclass
class AgentNode(Node):
    """An agent: two threads that the world steps."""

    agent: NodeAgent = field(init=False)
    coordination: FakeCoordination = field(init=False)
    code: int | None = None
    """What it ended with."""
    saved_at: list[float] = field(default_factory=list)
    """When its workers completed checkpoints."""
    told: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    lease: Lease = field(init=False)
    lease_until: float = 0.0
    """What its workers see."""

    def show_lease(self, until_ns: int, looked_ns: int) -> None:
        self.lease_until = until_ns / 1e9

    @property
    def agents(self) -> AgentWorld:
        assert isinstance(self.world, AgentWorld)
        return self.world

    @property
    def workers(self) -> ListedWorkers | None:
        return self.agent.workers  # type: ignore[return-value]

    def is_settled(self, round_index: int) -> bool:
        """Whether its workers run in that round and nothing is to come, or have ended with 0, whatever it did since."""
        if self.workers is None or self.workers.round != round_index or self.workers.failed:
            return False
        runs = self.alive and not self.frozen and self.running_round == round_index
        return runs or self.agent.phase is Phase.DONE

    def enter(self) -> None:
        world = self.agents
        self.coordination = FakeCoordination(self)
        self.lease = Lease(world.clock, uid=self.info.uid, node=self.index)
        self.lease.set_intervals(self.participant.intervals, has_beats=False)
        site = make_site(
            spec=world.spec,
            attempt=make_attempt(
                cluster="local",
                nodes=tuple(f"n{node}" for node in range(world.settings.expected_nodes)),
                batch_host="n0",
            ),
            info=self.info,
            clock=world.clock,
            coordination=self.coordination,
            store_server=(server := FakeServer()),
            events=log_into(self.told),
            watch=FakeWatch(self),
        )
        self.agent = NodeAgent(
            site,
            [
                CheckpointWatch(site),
                PreemptionWatch(site),
                FakeHealth(world.looks_to_health),
                server,
            ],
            signals=SimpleNamespace(take=list, sender=lambda number: "", holds=lambda numbers: False),  # type: ignore[arg-type]
            crash=SimpleNamespace(check=lambda: None),  # type: ignore[arg-type]
        )
        self.agent.begin()

    def on_record(self, record: RoundRecord) -> None:
        self.lease.note(record)
        self.coordination.notices.append(record)
        if record.status is Status.FINAL and record.member(self.info.uid) is not None:
            self.finals.append(record)

    def on_event(self, event: RunEvent) -> None:
        super().on_event(event)
        self.coordination.notices.append(event)

    def step(self, *, notified: bool = True) -> float:
        """Both threads, in an order of the world's choice."""
        joined = self.world.joined_before_a_step()
        try:
            for thread in self.agents.order((self.step_loop, self.step_coordination)):
                if self.alive:
                    thread()
        except Crash:
            pass
        finally:
            self.world.check_freeze(joined)
        return 0.0

    def step_coordination(self) -> None:
        if self.lease.wants_look():
            began = self.world.clock.now
            self.participant.look_past_caches()
            self.lease.looked(began)
        self.coordination.step()
        self.lease.stepped(renews=True)

    def step_loop(self) -> None:
        self.agent.step()
        workers = self.workers
        runs = workers is not None and workers.started and self.agent.phase is Phase.RUNNING
        self.running_round = workers.round if workers is not None and runs else None
        if self.agent.phase is Phase.ENDED:
            self.code = self.agent.leave()
            self.alive = False


class AgentWorld(World):
    """`settings` and `grow` as for a run; `rng` mixes the order of threads, and how soon a guardian works."""

    def __init__(
        self,
        settings: RendezvousSettings,
        *,
        rng: random.Random | None = None,
        max_restarts: int = 3,
        sizes: Mapping[int, int] | None = None,
        patch: Callable[[object, str, object], None],
    ) -> None:
        """Args:
        settings: Of all participants.
        rng: None: everything in order, and guardians at once.
        max_restarts: The budget.
        sizes: Node → how many workers it brings; 1 where it is not said.
        patch: Sets an attribute for the time of the test: (object, name, value).
        """
        policy = RestartPolicy(max_restarts=max_restarts, max_same_failures=0)
        super().__init__(settings)
        self.decide_restart = policy.decide_restart
        self._rng = rng
        self.max_restarts = max_restarts
        self.sizes = dict(sizes or {})
        self.processes: list[Worker] = []
        self.has_spares = True
        self.looks_to_health = 2
        self.spec = make_spec(
            run_id="model",
            max_restarts=max_restarts,
            min_nodes=settings.min_nodes,
            max_nodes=settings.max_nodes,
            grow=settings.grow,
        )
        patch(local_workers, "LocalWorkers", self._make_workers)
        patch(rounds, "torch_available", lambda python: True)
        patch(node_agent, "reap_orphans", lambda known: [])

    def _make_workers(self, site: GroupSite, **_: object) -> ListedWorkers:
        node = next(node for node in reversed(self.nodes) if node.index == site.node)
        assert isinstance(node, AgentNode)
        return ListedWorkers(node, site.round, site.layout)

    @property
    def agents(self) -> list[AgentNode]:
        return [node for node in self.nodes if isinstance(node, AgentNode)]

    def order(self, threads: Collection[Callable[[], None]]) -> list[Callable[[], None]]:
        if self._rng is None:
            return list(threads)
        return self._rng.choices(list(threads), k=self._rng.randint(1, 3))

    def start(self, index: int) -> AgentNode:
        """A new agent; before anything else it ends what another one of its node left running."""
        self.processes = [worker for worker in self.processes if worker.node != index]
        node = AgentNode(self, index)
        self.nodes.append(node)
        return node

    def newest_agent(self, index: int) -> AgentNode:
        return next(node for node in reversed(self.agents) if node.index == index)

    def check(self) -> None:
        super().check()
        self._guard()
        self._check_workers()

    def _guard(self) -> None:
        """The guardians of dead agents end their workers, sooner or later."""
        if self._rng is not None and self._rng.random() < 0.5:
            return
        living = {node.info.uid for node in self.agents if node.alive}
        self.processes = [worker for worker in self.processes if worker.agent in living]

    def _check_workers(self) -> None:
        groups: dict[int, set[tuple[str, int]]] = {}
        for worker in self.processes:
            groups.setdefault(worker.node, set()).add((worker.agent, worker.round))
        for node, found in groups.items():
            assert len(found) == 1, f"on node {node} workers of several rounds run: {found}"
        finals = {record.round: record for record in self.history.values() if record.status is Status.FINAL}
        leases = {node.info.uid: node.lease_until for node in self.agents if node.alive}
        for worker in self.processes:
            holds = leases.get(worker.agent, 0.0) >= self.clock.now
            assert not (holds and worker.round < max(finals)), f"{worker} may save, and a later round runs"
            record = finals.get(worker.round)
            assert record is not None, f"round {worker.round} was never final, and has workers"
            sizes = [member.local_world_size for member in record.members]
            rank = record.rank(worker.agent)
            assert rank is not None, f"{worker.agent} has workers in round {worker.round}, and is no member"
            first = sum(sizes[:rank])
            assert worker.rank in range(first, first + sizes[rank]), "ranks as the record says"
            assert worker.world_size == sum(sizes)
            assert record.master.startswith(worker.master), "one master for all"
        for node in self.agents:
            if node.alive and node.agent.phase in (Phase.JOINING, Phase.READY, Phase.ENDED):
                mine = [worker for worker in self.processes if worker.agent == node.info.uid]
                assert not mine, f"{node.info.uid} is {node.agent.phase.value}, and its workers run"
            if not node.alive and node.code is not None:
                assert not any(worker.agent == node.info.uid for worker in self.processes), "it left workers behind"
        assert all(record.restarts_used <= self.max_restarts for record in self.history.values())

    # -- what tests wait for -------------------------------------------------------------------------------------

    def everybody_runs(self, *, least: int = 1) -> bool:
        """All living agents that are members run the newest round, and it has that many members at least."""
        record = self.newest()
        return (
            record is not None
            and len(record.members) >= least
            and self.all_running_in_one_round()
            and not any(node.workers is not None and node.workers.failed for node in self.agents if node.alive)
        )

    def is_settled(self) -> bool:
        """Every member of the newest round lives and its workers run in that round, or they have ended with 0."""
        record = self.newest()
        if record is None or record.status is not Status.FINAL:
            return False
        return all(node.is_settled(record.round) for node in self.agents if record.member(node.info.uid) is not None)

    def is_over(self) -> bool:
        record = self.newest()
        return record is not None and record.status is Status.CLOSED and not any(node.alive for node in self.nodes)

    def finish(self) -> None:
        for node in self.agents:
            if node.alive and node.workers is not None and node.workers.started and node.agent.phase is Phase.RUNNING:
                node.workers.finish()

    def succeeded(self) -> bool:
        record = self.newest()
        return record is not None and record.outcome is Outcome.SUCCEEDED
