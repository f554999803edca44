"""``--setup``: what the user runs once on each node before the workers start, and what it makes of their environment.

An agent joins the run when it has succeeded. An agent that takes the place of a killed one runs it again: the
environment that it makes is in no file.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

from hpc_elastic.agent.part import HealthVerdict, Part
from hpc_elastic.agent.supervision import Phase
from hpc_elastic.base.files import make_private_dir, write_private
from hpc_elastic.base.loop import Inbox, wait_readable
from hpc_elastic.run.agent_events import UserCommandEnded
from hpc_elastic.workers import user_command
from hpc_elastic.workers.spawn import NO_CHANGE, EnvironmentChange, WorkerStartError
from hpc_elastic.workers.user_command import CommandEnd, UserCommand

if TYPE_CHECKING:
    from _typeshed import FileDescriptorLike

    from hpc_elastic.agent.node_agent import NodeAgent
    from hpc_elastic.agent.part import AgentSite

logger = logging.getLogger(__name__)

_MOST_LINES = 20


class Setup(Part):
    def __init__(self, site: AgentSite) -> None:
        self._site = site
        self._environ = site.me.command_environment(site.environ)
        self._ends = Inbox[CommandEnd]()
        self._command: UserCommand | None = None
        self.is_ready = False

    @property
    def pids(self) -> Collection[int]:
        return frozenset() if self._command is None or self._command.is_gone else frozenset({self._command.pid})

    def watched(self) -> Collection[FileDescriptorLike]:
        return (self._ends,)

    def begin(self) -> None:
        site = self._site
        try:
            self._command = UserCommand.start(
                user_command.setup_command(site.me.spec.setup),
                environ=self._environ,
                cwd=site.me.spec.cwd,
                inherited=site.me.inherited,
                clock=site.clock,
                kept=user_command.KEPT_ENVIRONMENT,
            )
        except WorkerStartError as error:
            self._ends.put(CommandEnd(exitcode=127, stderr=str(error).encode()))
            return
        self._command.attend(site.me.spec.setup_timeout, self._ends.put)

    def look(self, agent: NodeAgent) -> None:
        if not (ends := self._ends.take()):
            return
        self._command = None
        found = self._judge(ends[0])
        self.is_ready = isinstance(found, EnvironmentChange)
        if agent.phase is not Phase.JOINING:
            return
        if isinstance(found, EnvironmentChange):
            agent.begin_joining(found)
        else:
            agent.on_health(HealthVerdict(reason=f"--setup failed: {found}", is_usage=True))

    def close(self) -> None:
        if self._command is not None and not self._command.is_gone:
            self._command.kill()
            wait_readable([self._ends], user_command.END_SECONDS)

    def _judge(self, end: CommandEnd) -> EnvironmentChange | str:
        found = user_command.read_change(end, self._environ)
        why, change = (found, NO_CHANGE) if isinstance(found, str) else ("", found)
        output, log = end.stderr, self._site.me.paths.setup_log(self._site.me.node)
        shown = user_command.last_lines(output, _MOST_LINES)
        if output.strip():
            self._site.files.post(lambda: self._keep(log, output))
        self._site.events.write(
            UserCommandEnded(
                command="setup",
                reason=why,
                code=end.exitcode,
                seconds=round(end.seconds, 3),
                output=tuple(shown) if why else (),
                log=str(log) if output.strip() else "",
                set=tuple(sorted(change.put)),
                unset=tuple(sorted(change.unset)),
            )
        )
        if why:
            for line in shown:
                logger.error("--setup: %s", line)
        else:
            python = change.python
            logger.info("--setup: %.1f s%s", end.seconds, f", python is {python}" if python else "")
        return found

    def _keep(self, log: Path, output: bytes) -> None:
        make_private_dir(log.parent)
        write_private(log, output)
