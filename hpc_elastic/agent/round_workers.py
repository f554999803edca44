"""A node's part in a round: it confirms the frozen one, starts the workers of the final one, and logs their end.

The node of group rank 0 has the TCPStore's port open before it confirms.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Set
from importlib import import_module
from typing import TYPE_CHECKING

from hpc_elastic.agent.part import GroupSite
from hpc_elastic.agent.rendezvous_session import rendezvous_settings
from hpc_elastic.agent.store_server import StoreBindError, torch_available
from hpc_elastic.base.file_executor import FilesystemHangsError
from hpc_elastic.base.host_facts import choose_master_address
from hpc_elastic.base.outcome import Outcome
from hpc_elastic.rendezvous.participant import Participant
from hpc_elastic.rendezvous.ranks import rank_layout
from hpc_elastic.rendezvous.state import RoundRecord
from hpc_elastic.run.agent_events import WorkersStopped
from hpc_elastic.run.option_values import shown_in_job_log
from hpc_elastic.workers.spawn import EnvironmentChange

if TYPE_CHECKING:
    from hpc_elastic.agent.local_workers import ForkWorkers, LocalWorkers
    from hpc_elastic.agent.part import AgentSite
    from hpc_elastic.workers.stop import Stopped

logger = logging.getLogger(__name__)

LOAD_SECONDS = 60.0


def load() -> None:
    """Import what starts workers and describes their failures, in another thread, while the nodes meet.

    It is most of what an agent imports, so joining does not wait for it; but no worker starts before
    it: a mount that hangs later must not keep the agent from reporting what failed.
    """
    for name in ("local_workers", "failure_reports", "worker_environment", "address_filter"):
        import_module(f"hpc_elastic.agent.{name}")
    import_module("hpc_elastic.rendezvous.errors")


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
            addresses = participant.member_addresses([member.uid for member in record.members])
            senders = site.notifier.senders if site.notifier is not None else frozenset()
            guard.admit(None if addresses is None else addresses | senders)
        participant.claims.confirm(record.round, master)

    site.coordination.ask(confirm)


def _open_master(site: AgentSite, record: RoundRecord, change: EnvironmentChange, is_ending: Callable[[], bool]) -> str:
    """Bind the TCPStore's port on this node: on the loopback where it is alone. Raises `StoreBindError`.

    Returns ``address port 1|0``, the last for whether this agent serves it; else rank 0 does.
    """
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
        from hpc_elastic.agent.worker_environment import round_facts

        self._site, self._change = site, change
        self.layout = rank_layout(record.members, site.info.uid)
        self.facts = round_facts(
            record,
            self.layout,
            spec=site.me.spec,
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
        from hpc_elastic.agent.worker_environment import worker_command, worker_environment

        site, facts, spec = self._site, self.facts, self._site.me.spec
        changed = self._change.apply(environ)
        group.start(
            worker_command(spec, self._change),
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
        WorkersStopped(
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
