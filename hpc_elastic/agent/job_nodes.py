"""Asks Slurm for the job's nodes where the supervisor can't: its own host is out of reach.

Such a node lives, as the files show, and no packet of it comes through: what its workers talk about stands still until
their own time-out. Slurm gives it up, and the supervisor does not learn that. The question is the supervisor's own, in
another process: an agent runs none of Slurm's commands.
"""

from __future__ import annotations

import logging
import subprocess
from collections.abc import Collection
from typing import TYPE_CHECKING

from hpc_elastic.agent.part import Part
from hpc_elastic.base.self_command import own_command
from hpc_elastic.rendezvous.state import RoundRecord
from hpc_elastic.rendezvous.succession import NodesCutOff
from hpc_elastic.run.supervisor_events import NodeGivenUp

if TYPE_CHECKING:
    from _typeshed import FileDescriptorLike

    from hpc_elastic.agent.node_agent import NodeAgent
    from hpc_elastic.agent.part import AgentSite

logger = logging.getLogger(__name__)

GIVEN_UP = "Slurm gave the node up (node failure), and the supervisor is out of reach"


class JobNodes(Part):
    def __init__(self, site: AgentSite) -> None:
        self._site = site
        self._process: subprocess.Popen[str] | None = None
        self._about: tuple[int, ...] = ()

    @property
    def pids(self) -> Collection[int]:
        return frozenset([self._process.pid] if self._process is not None else [])

    def watched(self) -> Collection[FileDescriptorLike]:
        return () if self._process is None or self._process.stdout is None else (self._process.stdout,)

    def on_cut_off(self, found: NodesCutOff, record: RoundRecord) -> None:
        site, attempt = self._site, self._site.me.attempt
        away = [attempt.nodes[node] for node in (*found.nodes, *record.lost)]
        if self._process is not None or attempt.cluster != "slurm" or attempt.batch_host not in away:
            return
        argv, self._about = own_command("batch", "--job-nodes", str(site.me.run.root)), found.nodes
        try:
            self._process = subprocess.Popen(
                argv, env=dict(site.environ), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True
            )
        except OSError as error:
            logger.warning("Slurm can't be asked for the job's nodes: %s", error)

    def look(self, agent: NodeAgent) -> None:
        process, site = self._process, self._site
        if process is None or process.poll() is None:
            return
        job, self._process = process.communicate()[0].split(), None
        for node in self._about if job else ():
            name = site.me.attempt.nodes[node]
            if name not in job:
                logger.warning("%s: %s", name, GIVEN_UP)
                site.events.write(NodeGivenUp(node=node, name=name, cause="not_started", reason=GIVEN_UP))
                site.coordination.ask(lambda participant, node=node: participant.claims.give_up_node(node))  # type: ignore[misc]
