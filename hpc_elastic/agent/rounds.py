"""A node's part in a round: it confirms the frozen one, starts the workers of the final one, and logs what happens.

This host's clock is logged beside the events: how far it is ahead of the coordinators', each with a bound, by packets
that pass between the two anyway. So the report can order what happened on different nodes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence, Set
from importlib import import_module
from typing import TYPE_CHECKING

from hpc_elastic.agent.identity import rendezvous_settings
from hpc_elastic.agent.part import GroupSite, HealthVerdict
from hpc_elastic.agent.store_server import StoreBindError, torch_available
from hpc_elastic.base.clock import Clock, Offset, uptime_ns
from hpc_elastic.base.host_facts import choose_master_address
from hpc_elastic.base.loop import FilesystemHangsError
from hpc_elastic.base.text import plural
from hpc_elastic.rendezvous.participant import Participant
from hpc_elastic.rendezvous.proposals import rank_layout
from hpc_elastic.rendezvous.state import RoundRecord, node_of
from hpc_elastic.run import agent_events, control_events
from hpc_elastic.run.agent_events import HealthCheckFailed
from hpc_elastic.run.events import EventLog, Note, RunEvent, name_of
from hpc_elastic.run.option_values import shown_in_job_log
from hpc_elastic.run.paths import Outcome
from hpc_elastic.workers.spawn import EnvironmentChange

if TYPE_CHECKING:
    from hpc_elastic.agent.local_workers import ForkWorkers, LocalWorkers
    from hpc_elastic.agent.part import AgentSite
    from hpc_elastic.agent.worker_environment import RoundFacts
    from hpc_elastic.store.notifier import Notifier
    from hpc_elastic.workers.stop import Stopped


logger = logging.getLogger(__name__)

LOAD_SECONDS = 60.0


def load() -> None:
    """Import what starts workers and describes their failures, most of what an agent imports, while the nodes meet. No
    worker starts before it: a mount that hangs later must not keep the agent from reporting what failed."""
    for name in ("local_workers", "restart_policy", "worker_environment"):
        import_module(f"hpc_elastic.agent.{name}")
    import_module("hpc_elastic.rendezvous.state")


FIND_TORCH_SECONDS = 60.0


def confirm_round(
    site: AgentSite, record: RoundRecord, *, change: EnvironmentChange, is_ending: Callable[[], bool]
) -> None:
    master, guard = "", None
    if record.members[0].uid == site.info.uid:
        try:
            master = _open_master(site, record, change, is_ending)
        except StoreBindError as error:
            reason = str(error)
            logger.error("%s", reason)
            site.coordination.ask(lambda participant: participant.to_all.close(Outcome.FAILED, reason))
            return
        guard = site.store_server.guard  # this round's, whenever `confirm` is carried out

    def confirm(participant: Participant) -> None:  # in the coordination's thread: it may read files
        if guard is not None:
            addresses = participant.peers.all_addresses([member.uid for member in record.members])
            senders = site.notifier.senders if site.notifier is not None else frozenset()
            guard.admit(None if addresses is None else addresses | senders)
        participant.claims.confirm(record.round, master)

    site.coordination.ask(confirm)


def _open_master(site: AgentSite, record: RoundRecord, change: EnvironmentChange, is_ending: Callable[[], bool]) -> str:
    """Returns ``address port 1|0``, the last for whether this agent serves it; else rank 0 does."""
    is_alone = len(record.members) == 1
    host = choose_master_address(
        given=site.me.spec.master_addr,
        reached=list(site.notifier.reached) if site.notifier and not is_alone else (),
        candidates=() if is_alone else site.info.addresses,
    )
    try:
        python = change.command([site.me.spec.host_python])[0]
        serves = site.files.do(lambda: torch_available(python), within=FIND_TORCH_SECONDS, unless=is_ending)
    except FilesystemHangsError:
        serves = False
    guarded = serves and rendezvous_settings(site.me.spec, site.me.attempt).member_filter
    address, port = site.store_server.bind(host, site.me.spec.master_port, guarded=guarded)
    return f"{address} {port} {int(serves)}"


class RoundWorkers:
    def __init__(self, site: AgentSite, record: RoundRecord, *, change: EnvironmentChange) -> None:
        from hpc_elastic.agent.worker_environment import RoundFacts

        self._site, self._change = site, change
        self.layout = rank_layout(record.members, site.info.uid)
        address, port, serves = record.master.split(" ")
        self.facts = RoundFacts(
            spec=site.me.spec,
            layout=self.layout,
            round=record.round,
            master_addr=address,
            master_port=int(port),
            agent_store=serves == "1",
            run_dir=str(site.me.run.root),
            attempt=site.me.attempt.number,
            tag=str(site.me.tag),
        )

    @property
    def serves_store(self) -> bool:
        return self.layout.group_rank == 0 and self.facts.agent_store

    def group(
        self,
        *,
        excluding: Callable[[], Set[int]],
        is_ending: Callable[[], bool],
        were_ended: Callable[[], bool],
        fork: ForkWorkers,
    ) -> LocalWorkers:
        from hpc_elastic.agent.local_workers import LocalWorkers

        site, spec = self._site, self._site.me.spec
        return LocalWorkers(
            GroupSite(
                attempt=site.me.paths,
                host=site.me.host,
                node=site.me.node,
                round=self.facts.round,
                layout=self.layout,
                clock=site.clock,
                files=site.files,
                pump=site.pump,
                watch=site.watch,
                is_ending=is_ending,
            ),
            inherited=site.me.inherited,
            shown=lambda local_rank, rank: shown_in_job_log(
                local_rank,
                rank,
                redirects=spec.redirects,
                tee=spec.tee,
                only_local_ranks=spec.local_ranks_filter,
                only_ranks=spec.job_log_ranks,
            ),
            excluding=excluding,
            fork=fork,
            were_ended=were_ended,
        )

    def start(self, group: LocalWorkers, environ: Mapping[str, str]) -> None:
        from hpc_elastic.agent.worker_environment import worker_environment

        site, facts, spec = self._site, self.facts, self._site.me.spec
        changed = self._change.apply(environ)
        group.start(
            [*spec.worker_prefix, *self._change.command(spec.entrypoint.argv())],
            lambda local_rank, error_file: worker_environment(
                changed, facts, local_rank=local_rank, error_file=error_file
            ),
            cwd=spec.cwd,
            container=spec.container,
            cpus=site.cpus,
            is_wrapped=bool(spec.worker_prefix),
        )


def log_stopped(site: AgentSite, group: LocalWorkers, result: Stopped) -> None:
    site.events.write(
        agent_events.WorkersStopped(
            round=group.round,
            seconds=round(result.seconds, 3),
            killed=result.killed,
            left=tuple(survivor.pid for survivor in result.left),
            ends=group.own_ends,
            progress=site.watch.progress(),
            orphans=result.orphans,
        )
    )
    if result.orphans:
        logger.warning(
            "ended what outlived its worker: %s (a script should end what it starts)", ", ".join(result.orphans)
        )
    for survivor in result.left:
        logger.error("process %d (%s) is still there: %s", survivor.pid, survivor.name, survivor.why)


def log_coordination(events: EventLog, event: RunEvent, *, nodes: Sequence[str]) -> None:
    events.write(event)
    what = name_of(event).replace("_", " ")
    match event:
        case control_events.NodeMissing():
            logger.warning("node %s has not joined: the round starts without it", _name(nodes, event.node))
        case control_events.NodeLost() | control_events.SpareLost():
            why = f": {event.reason}" if event.age >= 1 else ""
            logger.warning("%s %s is lost%s", what.split()[0], _name(nodes, event.node), why)
        case control_events.RunClosed():  # the report says of which failure
            logger.info("%s (round %s): %s", what, event.round, event.reason.partition(": rank ")[0])
        case control_events.RoundOpened() | Note(subject="coordinator_changed" | "nodes_waiting" | "nodes_asked"):
            logger.info("%s (round %s): %s", what, event.round, event.reason)
        case control_events.LinkLost():
            logger.warning("%s: %s", event.host or f"node {event.node}", event.reason)
        case Note(subject="signal_heard" | "notice_given" | "step_agreed"):
            logger.info("%s", event.reason)
        case control_events.NodeLeft():
            logger.warning("node %s left: %s", event.host or event.node, event.reason)
        case control_events.NodeReplaced():
            come, gone = event.host or event.node, event.replaces_host or event.replaces_node
            logger.warning("%s took the place of %s (node %s of the round)", come, gone, event.group_rank)
        case control_events.RoundFrozen() if event.reason.startswith("restart"):
            logger.info("%s", event.reason)  # "restart 1 of 3 (2 left) after: …"


def _name(nodes: Sequence[str], node: int) -> str:
    return nodes[node] if 0 <= node < len(nodes) else str(node)


def log_round(events: EventLog, facts: RoundFacts, *, restarts_used: int) -> None:
    layout = facts.layout
    ranks = tuple(layout.global_ranks)
    events.write(
        agent_events.RoundFinal(
            round=facts.round,
            group_rank=layout.group_rank,
            group_world_size=layout.group_world_size,
            world_size=layout.world_size,
            local_world_size=layout.local_world_size,
            ranks=ranks,
            master=f"{facts.master_addr}:{facts.master_port}",
            restarts_used=restarts_used,
            max_restarts=facts.spec.max_restarts,
        )
    )
    if layout.group_rank:
        return  # a line for each of a thousand nodes would say nothing that the events don't
    logger.info(
        "round %d: role %s, %s on %s, master %s:%s, %d of %d restarts used",
        facts.round,
        facts.spec.role,
        plural(layout.world_size, "rank"),
        plural(layout.group_world_size, "node"),
        facts.master_addr,
        facts.master_port,
        restarts_used,
        facts.spec.max_restarts,
    )


def log_health(events: EventLog, verdict: HealthVerdict, *, round_index: int) -> None:
    for check, text in verdict.warnings.items():
        events.write(Note(subject="health_warning", text=check, reason=text))
        logger.warning("%s", text)
    for text in verdict.notes:
        logger.info("%s", text)
    if verdict.is_usage:
        events.write(agent_events.StartRefused(reason=verdict.reason))
        logger.error("%s", verdict.reason)
    elif not verdict.is_healthy:
        events.write(HealthCheckFailed(round=round_index, checks=tuple(verdict.checks), reason=verdict.reason))
        logger.error("this node leaves the run: %s", verdict.reason)


MOST_REFERENCES = 4
"""How many recent coordinators to log clock offsets for."""
_READS = 5
STEP_NS = 1_000_000
"""The wall clock was set by this much: worth another line."""


def is_news(sample: agent_events.ClockCompared, logged: agent_events.ClockCompared | None) -> bool:
    if logged is None:
        return True
    age = sample.uptime_ns - logged.uptime_ns
    bound_ns = Offset(offset_ns=logged.offset_ns, bound_ns=logged.bound_ns).aged(age).bound_ns
    was_set = abs(sample.wall_ns - logged.wall_ns - age) > STEP_NS
    if was_set or abs(sample.offset_ns - logged.offset_ns) > sample.bound_ns + bound_ns:
        return True
    # A clock is never off from itself.
    return 0 < 2 * sample.bound_ns < bound_ns


class ClockOffsetLog:
    def __init__(self, events: EventLog, ruler: Notifier | None, *, uid: str, clock: Clock) -> None:
        self._events = events
        self._ruler = ruler
        self._uid = uid
        self._clock = clock
        self._logged: dict[str, agent_events.ClockCompared | None] = {}
        """The latest coordinator is the last one."""

    def on_leader(self, leader: str) -> None:
        self._logged[leader] = self._logged.pop(leader, None)
        if len(self._logged) > MOST_REFERENCES:
            del self._logged[next(iter(self._logged))]

    @property
    def ahead_of_leader(self) -> tuple[int, int] | None:
        """The last coordinator's node, and by how many nanoseconds this host's clock since its boot is ahead of its."""
        leader = next(reversed(self._logged), None)
        if leader is None:
            return None
        if leader == self._uid:
            return node_of(leader), 0
        offset = self._ruler.offset_to(leader) if self._ruler is not None else None
        return None if offset is None else (node_of(leader), offset.offset_ns)

    def log_first(self) -> None:
        self._log([reference for reference, logged in self._logged.items() if logged is None])

    def log_changes(self) -> None:
        self._log(list(self._logged))

    def _log(self, references: list[str]) -> None:
        if self._ruler is None:
            return
        for reference in references:
            own = reference == self._uid
            offset = Offset(offset_ns=0, bound_ns=0) if own else self._ruler.offset_to(reference)
            if offset is None:
                continue
            # The closest of several reads, so that both are of one moment.
            reads = [(uptime_ns(self._clock), self._clock.time_ns(), uptime_ns(self._clock)) for _ in range(_READS)]
            before, wall, after = min(reads, key=lambda read: read[2] - read[0])
            sample = agent_events.ClockCompared(
                reference=node_of(reference),
                offset_ns=offset.offset_ns,
                bound_ns=offset.bound_ns,
                uptime_ns=(before + after) // 2,
                wall_ns=wall,
            )
            if is_news(sample, self._logged[reference]):
                self._logged[reference] = sample
                self._events.write(sample)
