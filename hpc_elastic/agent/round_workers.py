"""The worker group of a final round: put together, started, and the events of its start and of its end."""

from __future__ import annotations

import logging
from collections.abc import Callable, Set
from typing import TYPE_CHECKING

from hpc_elastic.agent.local_workers import LocalWorkers
from hpc_elastic.agent.worker_environment import round_facts, worker_command, worker_environment
from hpc_elastic.base.text import ranges
from hpc_elastic.rendezvous.ranks import rank_layout
from hpc_elastic.rendezvous.state import RoundRecord
from hpc_elastic.run.agent_events import WorkersStarted, WorkersStopped
from hpc_elastic.workers.stop import Stopped

if TYPE_CHECKING:
    from hpc_elastic.agent.context import AgentContext

logger = logging.getLogger(__name__)


class RoundWorkers:
    """This node's part of the final round `record`, in which it is a member."""

    def __init__(self, context: AgentContext, record: RoundRecord) -> None:
        self._context = context
        self.layout = rank_layout(record.members, context.info.uid)
        self.facts = round_facts(
            record,
            self.layout,
            spec=context.spec,
            run_dir=context.run_dir,
            attempt=context.attempt.number,
            tag=context.tag,
        )

    @property
    def serves_store(self) -> bool:
        """Whether this agent serves the workers' TCPStore."""
        return self.layout.group_rank == 0 and self.facts.agent_store

    def group(self, *, excluding: Callable[[], Set[int]], is_ending: Callable[[], bool]) -> LocalWorkers:
        """Put the group together; `start` starts it."""
        context = self._context
        return LocalWorkers(
            context.place,
            round_index=self.facts.round,
            layout=self.layout,
            inherited=context.inherited,
            pump=context.pump,
            clock=context.clock,
            shown=context.shown,
            excluding=excluding,
            files=context.files,
            is_ending=is_ending,
            watch=context.watch,
            fork_server=context.fork_server,
            were_ended=context.were_workers_ended,
        )

    def start(self, group: LocalWorkers) -> None:
        """Start every worker.

        Raises:
            WorkerStartError, OSError: one could not be started.
        """
        context, facts = self._context, self.facts
        environ = context.setup.change.apply(context.environ)
        group.start(
            worker_command(context.spec, context.setup.change),
            lambda local_rank, error_file: worker_environment(
                environ, facts, local_rank=local_rank, error_file=error_file
            ),
            cwd=context.spec.cwd,
            container=context.spec.container,
            cpus=context.cpus,
            is_wrapped=bool(context.spec.worker_prefix),
        )


def log_started(
    context: AgentContext,
    group: LocalWorkers,
    *,
    rendezvous_seconds: float | None,
    start_seconds: float | None,
    restart_seconds: float | None,
) -> None:
    """Every worker of the group runs."""
    context.events.write(
        WorkersStarted(
            round=group.round,
            pids=tuple(group.pids),
            rendezvous_seconds=rendezvous_seconds,
            start_seconds=start_seconds,
            restart_seconds=restart_seconds,
            started_fresh=context.fork_server.why_fresh,
            cpus=tuple(ranges(sorted(own)) for own in context.cpus),
        )
    )


def log_stopped(context: AgentContext, group: LocalWorkers, result: Stopped) -> None:
    """The group has ended, but for what `result` has left."""
    context.events.write(
        WorkersStopped(
            round=group.round,
            seconds=round(result.seconds, 3),
            killed=result.killed,
            left=tuple(survivor.pid for survivor in result.left),
            ends=group.own_ends,
            progress=context.watch.progress(),
            orphans=result.orphans,
        )
    )
    if result.orphans:
        logger.warning(
            "ended what outlived its worker: %s (a script should end what it starts)", ", ".join(result.orphans)
        )
    for survivor in result.left:
        logger.error("process %d (%s) is still there: %s", survivor.pid, survivor.name, survivor.why)
