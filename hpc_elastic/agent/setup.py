"""``--setup``: what the user runs once on each node before the workers start, and what it makes of their environment.

An agent joins the run when it has succeeded. An agent that takes the place of a killed one runs it again: the
environment that it makes is in no file.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path

from msgspec import Struct

from hpc_elastic.base.clock import Clock
from hpc_elastic.base.file_executor import FileExecutor
from hpc_elastic.base.files import make_private_dir, write_private
from hpc_elastic.base.waking import Waker, wait_readable
from hpc_elastic.run.agent_events import UserCommandEnded
from hpc_elastic.run.event_types import AgentEvent
from hpc_elastic.run.spec import RunSpec
from hpc_elastic.workers.spawn import Inherited, WorkerStartError
from hpc_elastic.workers.user_command import (
    END_SECONDS,
    KEPT_ENVIRONMENT,
    NO_CHANGE,
    CommandEnd,
    EnvironmentChange,
    UserCommand,
    last_lines,
    read_change,
    setup_command,
)

logger = logging.getLogger(__name__)

_MOST_LINES = 20


class SetupSite(Struct, frozen=True, kw_only=True):
    """Where setup runs, and who hears of its end."""

    environ: Mapping[str, str]
    cwd: str
    inherited: Inherited
    log: Path
    """The file for the end of what it prints."""
    clock: Clock
    executor: FileExecutor
    write_event: Callable[[AgentEvent], object]


class NoSetup:
    """What an agent has where there is no setup, and what it needs of one."""

    change: EnvironmentChange = NO_CHANGE
    """What setup has made of the environment."""
    is_ready = True
    """Whether the workers may be started as far as setup goes."""

    @property
    def pids(self) -> frozenset[int]:
        """Of processes whose ends are waited for here."""
        return frozenset()

    def fileno(self) -> int:
        """Readable when there is something to `take`; -1: never."""
        return -1

    def begin(self) -> None:
        """Start it."""

    def take(self) -> str | None:
        """Why this node can't be used, once; empty: it can; None: nothing new."""
        return None

    def close(self) -> None:
        """End it where it still runs."""


class Setup(NoSetup):
    """One agent's. All methods are for its main thread; none waits."""

    def __init__(self, spec: RunSpec, site: SetupSite) -> None:
        self._spec = spec
        self._site = site
        self._waker = Waker()
        self._ends: deque[CommandEnd] = deque()
        self._command: UserCommand | None = None
        self.change = NO_CHANGE
        self.is_ready = False

    @property
    def pids(self) -> frozenset[int]:
        return frozenset() if self._command is None or self._command.is_gone else frozenset({self._command.pid})

    def fileno(self) -> int:
        return self._waker.fileno()

    def begin(self) -> None:
        site = self._site
        try:
            self._command = UserCommand.start(
                setup_command(self._spec.setup),
                environ=site.environ,
                cwd=site.cwd,
                inherited=site.inherited,
                clock=site.clock,
                kept=KEPT_ENVIRONMENT,
            )
        except WorkerStartError as error:
            self._post(CommandEnd(exitcode=127, stderr=str(error).encode()))
            return
        self._command.attend(self._spec.setup_timeout, self._post)

    def take(self) -> str | None:
        self._waker.drain()
        if not self._ends:
            return None
        self._command = None
        if why := self._judge(self._ends.popleft()):
            return f"--setup failed: {why}"
        self.is_ready = True
        return ""

    def close(self) -> None:
        if self._command is not None and not self._command.is_gone:
            self._command.kill()
            wait_readable([self._waker], END_SECONDS)

    def _post(self, end: CommandEnd) -> None:
        self._ends.append(end)
        self._waker.wake()

    def _judge(self, end: CommandEnd) -> str:
        """Report how it has ended. Returns why it has failed; empty where it has not."""
        found = read_change(end, self._site.environ)
        why = found if isinstance(found, str) else ""
        self.change = found if isinstance(found, EnvironmentChange) else NO_CHANGE
        output, log = end.stderr, self._site.log
        shown = last_lines(output, _MOST_LINES)
        if output.strip():
            self._site.executor.post(lambda: self._keep(log, output))
        self._site.write_event(
            UserCommandEnded(
                command="setup",
                reason=why,
                code=end.exitcode,
                seconds=round(end.seconds, 3),
                output=tuple(shown) if why else (),
                log=str(log) if output.strip() else "",
                set=tuple(sorted(self.change.put)),
                unset=tuple(sorted(self.change.unset)),
            )
        )
        if why:
            for line in shown:
                logger.error("--setup: %s", line)
        else:
            python = self.change.python
            logger.info("--setup: %.1f s%s", end.seconds, f", python is {python}" if python else "")
        return why

    def _keep(self, log: Path, output: bytes) -> None:
        make_private_dir(log.parent)
        write_private(log, output)
