"""What the user runs on each node around the workers: ``--node-prolog``, ``--setup``, ``--node-epilog``.

An agent joins the run when prolog and setup have succeeded, in this order. Both run once where an agent takes the place
of one that was killed: files in the attempt's directory say what has been done on the node. (The environment that setup
makes is in no file: it is made again.) The epilog is run by the agent when its workers have ended and it is about to
leave; for an agent that was killed, the supervisor starts another one for that alone (``agent --epilog 1``), or the
guardian does where no supervisor is left.
"""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path

from msgspec import Struct

from hpc_elastic.base.clock import Clock
from hpc_elastic.base.file_executor import FileExecutor
from hpc_elastic.base.files import make_private_dir, write_private
from hpc_elastic.base.waking import Waker, wait_readable
from hpc_elastic.errors import HpcElasticError
from hpc_elastic.run.agent_events import UserCommandEnded
from hpc_elastic.run.event_types import AgentEvent
from hpc_elastic.run.hooks import Hook, HookFiles
from hpc_elastic.run.spec import RunSpec
from hpc_elastic.workers.environment_change import (
    KEPT_ENVIRONMENT,
    NO_CHANGE,
    EnvironmentChange,
    read_change,
    setup_command,
)
from hpc_elastic.workers.spawn import Inherited, WorkerStartError
from hpc_elastic.workers.user_command import (
    END_SECONDS,
    KEPT_OUTPUT,
    CommandEnd,
    UserCommand,
    describe_end,
    last_lines,
    shell_command,
)

logger = logging.getLogger(__name__)

MARK_SECONDS = 10.0
"""How long the filesystem is waited for that says what has been done on this node."""
_MOST_LINES = 20
_HUNG = 1.0


class CommandSite(Struct, frozen=True, kw_only=True):
    """Where the commands run, and who hears of them."""

    environ: Mapping[str, str]
    cwd: str
    inherited: Inherited
    files: HookFiles
    """This node's."""
    clock: Clock
    executor: FileExecutor
    write_event: Callable[[AgentEvent], object]


class NoNodeCommands:
    """What an agent has where nothing is to be run, and what it needs of one that runs something."""

    change: EnvironmentChange = NO_CHANGE
    """What setup has made of the environment."""
    is_ready = True
    """Whether the workers may be started as far as the commands go."""

    @property
    def pids(self) -> frozenset[int]:
        """Of processes whose ends are waited for here."""
        return frozenset()

    def fileno(self) -> int:
        """Readable when there is something to `take`; -1: never."""
        return -1

    def begin(self) -> None:
        """Start prolog and setup."""

    def take(self) -> str | None:
        """Why this node can't be used, once; empty: it can; None: nothing new."""
        return None

    def run_epilog(self, within: float | None) -> None:
        """Run the epilog to its end, in `within` seconds where they are fewer than it has anyway."""

    def close(self) -> None:
        """End what still runs."""


class NodeCommands(NoNodeCommands):
    """One agent's. All methods are for its main thread; none waits but `run_epilog`, and `begin` for `MARK_SECONDS`."""

    def __init__(self, spec: RunSpec, site: CommandSite) -> None:
        self._spec = spec
        self._site = site
        self._waker = Waker()
        self._ends: deque[CommandEnd | WorkerStartError] = deque()
        self._todo: list[Hook] = []
        self._command: UserCommand | None = None
        self.change = NO_CHANGE
        self.is_ready = False

    @property
    def pids(self) -> frozenset[int]:
        return frozenset() if self._command is None or self._command.is_gone else frozenset({self._command.pid})

    def fileno(self) -> int:
        return self._waker.fileno()

    def begin(self) -> None:
        done = self._begin_files()
        wanted = ((Hook.PROLOG, self._spec.node_prolog), (Hook.SETUP, self._spec.setup))
        self._todo = [hook for hook, line in wanted if line and hook not in done]
        self._start_next()

    def take(self) -> str | None:
        self._waker.drain()
        if not self._ends or not self._todo:
            return None
        hook, end = self._todo.pop(0), self._ends.popleft()
        self._command = None
        if why := self._judge(hook, end):
            self._todo = []
            return f"--{hook.value} failed: {why}"
        if hook is Hook.PROLOG:
            mark = self._site.files.mark(hook)
            self._site.executor.post(mark.touch)
        self._start_next()
        return "" if self.is_ready else None

    def close(self) -> None:
        if self._command is not None and not self._command.is_gone:
            self._command.kill()
            wait_readable([self._waker], END_SECONDS)

    def run_epilog(self, within: float | None) -> None:
        self._todo = []
        self.close()
        if not self._spec.node_epilog or not self._claim_epilog():
            return
        self._waker.drain()
        self._ends.clear()
        seconds = self._spec.hook_timeout if within is None else min(within, self._spec.hook_timeout)
        self._start(Hook.EPILOG, seconds)
        if not self._ends:
            wait_readable([self._waker], seconds + 2 * END_SECONDS)
        if self._ends:
            self._judge(Hook.EPILOG, self._ends.popleft())

    # -- one command ---------------------------------------------------------------------------------------------

    def _start_next(self) -> None:
        if not self._todo:
            self.is_ready = True
            self._waker.wake()
            return
        hook = self._todo[0]
        self._start(hook, self._spec.setup_timeout if hook is Hook.SETUP else self._spec.hook_timeout)

    def _start(self, hook: Hook, seconds: float) -> None:
        site, spec = self._site, self._spec
        lines = {Hook.PROLOG: spec.node_prolog, Hook.EPILOG: spec.node_epilog}
        is_setup = hook is Hook.SETUP
        try:
            self._command = UserCommand.start(
                setup_command(spec.setup) if is_setup else shell_command(f"exec 2>&1\n{lines[hook]}"),
                environ=site.environ,
                cwd=site.cwd,
                inherited=site.inherited,
                clock=site.clock,
                kept=KEPT_ENVIRONMENT if is_setup else KEPT_OUTPUT,
            )
        except WorkerStartError as error:
            self._post(error)
            return
        self._command.attend(seconds, self._post)

    def _post(self, end: CommandEnd | WorkerStartError) -> None:
        self._ends.append(end)
        self._waker.wake()

    def _judge(self, hook: Hook, end: CommandEnd | WorkerStartError) -> str:
        """Report how a command has ended. Returns why it has failed; empty where it has not."""
        if isinstance(end, WorkerStartError):
            end = CommandEnd(exitcode=127, stderr=str(end).encode())
        output = end.stderr if hook is Hook.SETUP else end.stdout or end.stderr
        shown = last_lines(output, _MOST_LINES)
        if hook is Hook.SETUP:
            found = read_change(end, self._site.environ)
            why = found if isinstance(found, str) else ""
            self.change = found if isinstance(found, EnvironmentChange) else NO_CHANGE
        else:
            why = describe_end(end)
            why = f"{why}: {shown[-1].strip()}" if why and shown else why
        log = self._site.files.log(hook)
        if output.strip():
            self._site.executor.post(lambda: self._keep(log, output))
        self._site.write_event(
            UserCommandEnded(
                command=hook.value,
                reason=why,
                code=end.exitcode,
                seconds=round(end.seconds, 3),
                output=tuple(shown) if why else (),
                log=str(log) if output.strip() else "",
                set=tuple(sorted(self.change.put)) if hook is Hook.SETUP else (),
                unset=tuple(sorted(self.change.unset)) if hook is Hook.SETUP else (),
            )
        )
        if why:
            for line in shown:
                logger.error("--%s: %s", hook.value, line)
            if hook is Hook.EPILOG:  # else this node leaves, and says why
                logger.error("--%s failed: %s", hook.value, why)
        else:
            python = self.change.python if hook is Hook.SETUP else ""
            logger.info("--%s: %.1f s%s", hook.value, end.seconds, f", python is {python}" if python else "")
        return why

    def _keep(self, log: Path, output: bytes) -> None:
        make_private_dir(log.parent)
        write_private(log, output)

    # -- what has been done on this node -------------------------------------------------------------------------

    def _begin_files(self) -> set[Hook]:
        """Note that this node is used. Returns which hooks need not run again."""
        if not (self._spec.node_prolog or self._spec.node_epilog):
            return set()
        files = self._site.files

        def begin() -> set[Hook]:
            make_private_dir(files.folder)
            if files.mark(Hook.EPILOG).exists():  # an agent that had left is started again
                for hook in (Hook.PROLOG, Hook.EPILOG):
                    files.mark(hook).unlink(missing_ok=True)
            files.begun.touch()
            return {Hook.PROLOG} if files.mark(Hook.PROLOG).exists() else set()

        try:
            return self._site.executor.do(begin, within=MARK_SECONDS)
        except (OSError, HpcElasticError) as error:
            logger.warning("what has been done on this node can't be read (%s); running all of it", error)
            return set()

    def _claim_epilog(self) -> bool:
        """Whether the epilog is this process' to run: it was not begun, and the node was used."""
        files = self._site.files

        def claim() -> bool:
            if not files.begun.exists():
                return False
            try:
                os.close(os.open(files.mark(Hook.EPILOG), os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600))
            except FileExistsError:
                return False
            return True

        try:
            return self._site.executor.do(claim, within=_HUNG if self._site.executor.stuck_for() else MARK_SECONDS)
        except (OSError, HpcElasticError) as error:
            logger.error("--node-epilog was not run: %s", error)
            return False


def node_commands(spec: RunSpec, site: CommandSite) -> NoNodeCommands:
    """Those of a run's node."""
    return NodeCommands(spec, site) if spec.setup or spec.node_prolog or spec.node_epilog else NoNodeCommands()
