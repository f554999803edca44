"""Carries a schedule out on a cluster: disturbs it, waits for its recovery after each burst, and sees to its end."""

from __future__ import annotations

import heapq
import itertools
import json
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from hpc_elastic.rendezvous.state import Status
from hpc_elastic.workers import tree
from hpc_elastic.workers.guardian import GUARDIAN_NAME
from hpc_elastic.workers.tree import Proc
from tests.rigs.chaos.clusters import AgentCluster, Cluster, HandlerCluster
from tests.rigs.chaos.evidence import Evidence, Injection, Recorder, host_node, now, read_journals, told_records
from tests.rigs.chaos.judge import complaints
from tests.rigs.chaos.places import Place
from tests.rigs.chaos.schedule import COORDINATOR, Action, Kind, Schedule, told
from tests.rigs.folded_run import unfold

RECOVERY_SECONDS = 150.0
"""Progress: after a burst all nodes work in one round again within this. Far above what it takes; see `recoveries`."""
END_SECONDS = 150.0
LEFT_SECONDS = 30.0
HUNG_SECONDS = 90.0
"""A look at the run's files that takes so long would take for ever: the filesystem hangs."""
STALL_SECONDS = 1.0
"""A short sleep that takes so long: others on this machine have kept all processors."""
QUIET_SECONDS = 0.3
"""After an injection: what is written later was not written by somebody who was just being killed."""
_LOOK = 0.05

_DURING = (Kind.STOP_AGENT, Kind.STOP_NODE, Kind.FREEZE_ALL, Kind.FREEZE_ONE, Kind.FAULTS, Kind.FULL)


class Chaos:
    """One chaotic run. `run` returns what is wrong with it."""

    def __init__(
        self, schedule: Schedule, cluster: Cluster, place: Place, *, say: Callable[[str], None] = lambda _: None
    ) -> None:
        self.evidence = Evidence(schedule=schedule)
        self._schedule = schedule
        self._plan = schedule.plan
        self._cluster = cluster
        self._place = place
        self._say = say
        self._recorder: Recorder | None = None
        self._due: list[tuple[float, int, Injection, Sequence[Proc]]] = []
        self._serial = itertools.count()
        self._lost: set[int] = set()
        self._starts: dict[Path, tuple[int, int]] = {}
        self._quiet_since = time.time()
        self._complaints: list[str] = []

    def run(self) -> list[str]:
        """Returns: complaints; none where all held."""
        try:
            for node, offset in enumerate(self._schedule.clocks):
                self._cluster.set_clock(node, offset)
            self._cluster.start()
            self._recorder = Recorder(self._cluster.store())
            self._decide_restart("the start")
            for number, burst in enumerate(self._schedule.bursts):
                for action in burst:
                    self._wait(action.after)
                    self._do(action)
                while self._due:
                    self._wait(_LOOK)
                self._quiet_since = time.time()
                self._decide_restart(f"burst {number}")
            self._end()
        except Stuck as stuck:
            self._complaints.append(str(stuck))
        finally:
            self._undo_all()
            with self._cut_if_hung():
                self._gather()
            with self._cut_if_hung():
                self._cluster.kill_all()
        return self._complaints + complaints(self.evidence)

    def report(self) -> str:
        """For a person: what was done, and what the run's records say."""
        lines = [told(self._schedule), "injections:", *(f"  {injection}" for injection in self.evidence.injections)]
        lines += [
            "records:",
            told_records(self.evidence.records[-80:]),
            "log:",
            _without_units(self._cluster.log())[-6000:],
        ]
        return "\n".join(lines)

    # -- time ----------------------------------------------------------------------------------------------------

    def _wait(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        slept_from = 0.0
        while True:
            if slept_from and now() - slept_from > STALL_SECONDS:
                self.evidence.stalls.append((slept_from, now()))
            self._cluster.tend()
            while self._due and self._due[0][0] <= time.monotonic():
                _, _, injection, procs = heapq.heappop(self._due)
                self._undo(injection, procs)
            left = deadline - time.monotonic()
            if left <= 0:
                return
            slept_from = now()
            time.sleep(min(left, _LOOK))

    def _decide_restart(self, what: str) -> None:
        began = time.monotonic()
        while not self._is_settled():
            if self._cluster.ended():
                raise Stuck(f"the run ended by itself after {what}")
            if time.monotonic() - began > RECOVERY_SECONDS:
                raise Stuck(f"no recovery from {what} within {RECOVERY_SECONDS:g} s: {self._why_not_settled()}")
            self._wait(_LOOK)
        self.evidence.recoveries.append(time.monotonic() - began)
        self._say(f"recovered from {what} in {self.evidence.recoveries[-1]:.1f} s")

    def _is_settled(self) -> bool:
        return not self._why_not_settled()

    def _why_not_settled(self) -> str:
        assert self._recorder is not None
        record = self._recorder.newest
        if record is None:
            return "there is no record"
        if record.status is not Status.FINAL:
            return f"round {record.round} is {record.status.value}"
        wanted = set(range(self._plan.nodes)) - self._lost
        members = {host_node(member.uid) for member in record.members}
        if members != wanted:
            return f"round {record.round} has nodes {sorted(members)}, not {sorted(wanted)}"
        at_work = self._at_work(record.round)
        if at_work != members:
            return f"the workers of round {record.round} work on nodes {sorted(at_work)} alone"
        return ""

    def _at_work(self, round_index: int) -> set[int]:
        """Nodes whose worker of this round has noted something since the last injection was over."""
        found = set()
        for path in (self._cluster.stage / "journal").iterdir():
            if path.stat().st_mtime < self._quiet_since + QUIET_SECONDS:
                continue
            if path not in self._starts or isinstance(self._cluster, HandlerCluster):
                for raw in path.read_bytes().splitlines():
                    if b'"start"' in raw:
                        line = json.loads(raw)
                        self._starts[path] = (line["node"], line["round"])
            if path in self._starts and self._starts[path][1] == round_index:
                found.add(self._starts[path][0])
        return found

    # -- injections ---------------------------------------------------------------------------------------------------

    def _do(self, action: Action) -> None:
        node = self._coordinator() if action.node == COORDINATOR else action.node
        if node is None or node in self._lost:
            return
        injection = Injection(action=action, nodes=(node,), began=now(), ended=now())
        procs = self._carry_out(action, node, injection)
        if procs is None:
            return
        self.evidence.injections.append(injection)
        self._say(str(injection))
        if action.kind in _DURING:
            injection.ended = float("inf")
            heapq.heappush(self._due, (time.monotonic() + action.seconds, next(self._serial), injection, procs))
        else:
            injection.ended = now()

    def _carry_out(self, action: Action, node: int, injection: Injection) -> list[Proc] | None:
        """Returns: the processes that were hit; None where nothing could be done."""
        cluster, place, kind = self._cluster, self._place, action.kind
        sharing = tuple(n for n in range(self._plan.nodes) if place.mount(n) == place.mount(node))
        if kind in (Kind.KILL_AGENT, Kind.STOP_AGENT):
            agent = cluster.agent(node)
            if agent is None:
                return None
            _signal([agent], signal.SIGKILL if kind is Kind.KILL_AGENT else signal.SIGSTOP)
            return [agent]
        if kind in (Kind.KILL_NODE, Kind.LOSE_NODE, Kind.STOP_NODE):
            if kind is Kind.LOSE_NODE:
                self._lost.add(node)
                cluster.lose(node)
            procs = cluster.processes(node)
            # The guardian first: with the agent gone it would begin to clear up.
            procs.sort(key=lambda proc: proc.name != GUARDIAN_NAME)
            _signal(procs, signal.SIGSTOP)
            more = [p for p in cluster.processes(node) if p.pid not in {q.pid for q in procs}]
            _signal(more, signal.SIGSTOP)  # forked meanwhile
            if kind is not Kind.STOP_NODE:
                _signal(procs + more, signal.SIGKILL)
            return procs + more
        if kind is Kind.KILL_WORKER:
            _signal(cluster.workers(node)[:1], signal.SIGKILL)
        elif kind in (Kind.FREEZE_ALL, Kind.FREEZE_ONE):
            injection.nodes = tuple(range(self._plan.nodes)) if kind is Kind.FREEZE_ALL else sharing
            place.freeze(None if kind is Kind.FREEZE_ALL else node)
        elif kind is Kind.FAULTS:
            injection.nodes = sharing
            place.fail(node, error=action.error, operation=action.operation, done=action.done, count=action.count)
        elif kind is Kind.FULL:
            injection.nodes = tuple(range(self._plan.nodes))
            place.fill()
        elif kind is Kind.CLOCK:
            cluster.set_clock(node, action.offset)
        elif kind is Kind.DROP_CACHES:
            if any(d.action.kind in (Kind.FREEZE_ALL, Kind.FREEZE_ONE) for _, _, d, _ in self._due):
                return None  # a frozen mount takes no such command
            place.drop_caches(node)
        return []

    def _undo(self, injection: Injection, procs: Sequence[Proc]) -> None:
        kind = injection.action.kind
        if kind in (Kind.STOP_AGENT, Kind.STOP_NODE):
            _signal(procs, signal.SIGCONT)
        elif kind in (Kind.FREEZE_ALL, Kind.FREEZE_ONE):
            self._place.thaw(None if kind is Kind.FREEZE_ALL else injection.nodes[0])
        elif any(d.action.kind is Kind.FULL for _, _, d, _ in self._due):
            pass  # what ends a fault would end that too
        elif kind is Kind.FULL:
            self._place.free()
        elif kind is Kind.FAULTS:
            self._place.heal(injection.nodes[0])
        injection.ended = now()

    def _undo_all(self) -> None:
        while self._due:
            _, _, injection, procs = heapq.heappop(self._due)
            self._undo(injection, procs)

    def _coordinator(self) -> int | None:
        record = self._recorder.newest if self._recorder else None
        return host_node(record.leader) if record is not None else None

    # -- the end -------------------------------------------------------------------------------------------------

    def _end(self) -> None:
        if self._schedule.too_few:
            left = [node for node in range(self._plan.nodes) if node not in self._lost]
            for node in left[self._plan.min_nodes - 1 :]:
                self._do(Action(after=0.0, kind=Kind.LOSE_NODE, node=node))
        else:
            self.evidence.finish_said = now()
            self._cluster.finish()
        began = time.monotonic()
        while not self._cluster.ended():
            if time.monotonic() - began > END_SECONDS:
                raise Stuck(f"the run does not end within {END_SECONDS:g} s")
            self._wait(_LOOK)
        self.evidence.ended = True
        self._say(f"ended in {time.monotonic() - began:.1f} s")
        with self._cut_if_hung():
            self._complaints += self._cluster.end_complaints(too_few=self._schedule.too_few)
        deadline = time.monotonic() + LEFT_SECONDS
        while (left_over := self._cluster.left()) and time.monotonic() < deadline:
            time.sleep(_LOOK)
        self._complaints += [f"process {proc.pid} ({proc.name}) is left" for proc in left_over]

    @contextmanager
    def _cut_if_hung(self) -> Iterator[None]:
        """What looks at the run's files waits in the kernel, where nothing but the end of the mount wakes it."""
        timer = threading.Timer(HUNG_SECONDS, self._place.cut)
        timer.daemon = True
        began = time.monotonic()
        timer.start()
        try:
            yield
        except OSError as error:
            self._complaints.append(f"the run's files can't be read: {error}")
        finally:
            timer.cancel()
            if time.monotonic() - began > HUNG_SECONDS:
                self._complaints.append(f"the filesystem did not answer for {HUNG_SECONDS:g} s; its mounts were cut")

    def _gather(self) -> None:
        if self._recorder is not None:
            deadline = time.monotonic() + LEFT_SECONDS
            while self.evidence.ended and not self._is_closed() and time.monotonic() < deadline:
                time.sleep(_LOOK)  # a mount that caches for seconds may hide it
            self._recorder.stop()
            self.evidence.records = self._recorder.records
        self.evidence.works = read_journals(self._cluster.stage / "journal")
        if isinstance(self._cluster, AgentCluster):
            self._gather_files(self._cluster)

    def _is_closed(self) -> bool:
        record = self._recorder.newest if self._recorder else None
        return record is not None and record.status is Status.CLOSED

    def _gather_files(self, cluster: AgentCluster) -> None:
        unfold(cluster.rounds())
        if not cluster.events().is_dir():
            return
        for path in sorted(cluster.events().glob("*.jsonl")):
            lines = self.evidence.events.setdefault(path.name, [])
            for raw in path.read_bytes().splitlines():
                try:
                    lines.append(json.loads(raw))
                except ValueError:
                    lines.append({"torn": raw.decode("utf-8", "replace")})
        for path in cluster.rounds().glob("round-*/rank-*/stdout.log"):
            key = int(path.parent.parent.name.split("-")[1]), int(path.parent.name.split("-")[1])
            self.evidence.outputs[key] = path.read_bytes()


class Stuck(Exception):
    """What was waited for has not come."""


def _without_units(log: str) -> str:
    return "\n".join(line for line in log.splitlines() if "] unit " not in line)


def _signal(procs: Sequence[Proc], number: int) -> None:
    for proc in procs:
        tree.kill_safely(proc, number)
