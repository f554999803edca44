"""The fork server of one node, seen from its agent: started, heard, asked for workers, and replaced where it ends.

It imports while the rendezvous is under way; `handle` is called when it is readable, and at `due`. What it does is in
`hpc_elastic.workers.fork_server`. Whatever becomes of it costs a fresh start at most: `why_fresh` holds the reason. The
next server is begun at once, without the module that was at fault, or it is given up (`why_given_up`).
"""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import subprocess
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from hpc_elastic.agent.fork_server_process import (
    Launch,
    PendingFork,
    late_settings,
    script_text,
    start_process,
    top_level_imports,
)
from hpc_elastic.agent.part import END_SECONDS, ProcessPart
from hpc_elastic.agent.worker_environment import shared_environment
from hpc_elastic.base.clock import Clock
from hpc_elastic.base.loop import FileExecutor, wait_readable
from hpc_elastic.rendezvous.state import Status
from hpc_elastic.run.events import Note
from hpc_elastic.run.spec import EntryKind, Preload, load_preload, preload_for
from hpc_elastic.workers.linux import oom_kill_count
from hpc_elastic.workers.spawn import NO_CHANGE, EnvironmentChange, WorkerProcess, describe_exitcode, pipe_bytes_for

if TYPE_CHECKING:
    from hpc_elastic.agent.node_agent import NodeAgent
    from hpc_elastic.agent.part import AgentSite

logger = logging.getLogger(__name__)

IMPORT_SECONDS = 120.0
"""One module's, and the start's: a cold import of torch from Lustre has been reported to take 44 to 78 s."""
FORK_SECONDS = 2.0
"""All workers of a node: each of torch's size takes 0.03 s."""
_MODULES_IN_ONE = 1000
_SCRIPT_SECONDS = 2.0
_FIRST_LOOK_SECONDS, _LONGEST_LOOK_SECONDS = 5.0, 60.0


MOST_STARTS = 8


class ServerState(str, Enum):
    OFF = "off"
    IMPORTING = "importing"
    READY = "ready"
    FAILED = "failed"


def why_given_up(preload: Preload, *, starts: int) -> str:
    """Empty where another server is begun. `starts`: servers so far since one has last forked a worker."""
    if not any(name in preload.wanted for name in preload.modules):
        left = "; ".join(f"{name}: {why}" for name, why in preload.left_out.items() if name in preload.modules)
        return f"nothing is left to preload: {left}"
    if starts >= MOST_STARTS:
        return f"{starts} fork servers in a row have ended"
    return ""


class ForkServer(ProcessPart):
    @classmethod
    def for_agent(cls, site: AgentSite) -> ForkServer:
        me, spec, size = site.me, site.me.spec, site.info.local_world_size
        run_dir = me.run.root
        shared, watched = shared_environment(
            site.environ,
            spec=spec,
            local_world_size=size,
            run_dir=str(run_dir),
            attempt=me.attempt.number,
            tag=str(me.tag),
        )
        refusal = "the Python of the workers is in a container's image" if spec.container is not None else ""
        if spec.entrypoint.kind is EntryKind.COMMAND:
            refusal = "the workers run a command, not a Python script"
        launch = Launch(
            argv=spec.entrypoint.argv(),
            environ=shared,
            watched=sorted(watched),
            cwd=spec.cwd,
            inherited=me.inherited,
            folder=site.watch.pages.path,
            log_path=me.paths.root / f"fork-server-{me.node:05d}.log",
            pipe_bytes=pipe_bytes_for(size),
            preload_path=me.run.preload,
            refusal=refusal,
        )
        preload = preload_for(spec.preload, me.run.preload)
        return cls(launch, preload, clock=site.clock, files=site.files, write_event=site.events.write)

    def __init__(
        self,
        launch: Launch,
        preload: Preload,
        *,
        clock: Clock,
        files: FileExecutor,
        write_event: Callable[[Note], object],
        import_seconds: float = IMPORT_SECONDS,
    ) -> None:
        super().__init__()
        self._launch = launch
        self.preload = preload
        self._clock = clock
        self._files = files
        self._write_event = write_event
        self._import_seconds = import_seconds
        self.state = ServerState.OFF
        self.why_fresh = ""
        self._module = ""
        self._since = 0.0
        self._began = 0.0
        self._starts = 0
        self._has_failed_start = False
        self._refusal = launch.refusal
        self._oom_kills = 0
        self._has_remarked = False
        self._keeps_learned: bool | None = None
        """One node writes down what is learned, that of group rank 0. `None`: it had no workers yet."""
        self._look_seconds = _FIRST_LOOK_SECONDS
        self._looks_at = clock.monotonic() + _FIRST_LOOK_SECONDS
        self._found: deque[Preload] = deque()

    @property
    def due(self) -> float | None:
        if self.state is ServerState.IMPORTING:
            return self._since + self._limit
        return self._looks_at if self._is_spare else None

    @property
    def _is_spare(self) -> bool:
        """It waits for its first worker, and the workers elsewhere find out what is to be imported."""
        is_first_to_come = self._keeps_learned is None and self._launch.preload_path is not None
        return self.state is ServerState.READY and self.preload.is_auto and is_first_to_come

    @property
    def _limit(self) -> float:
        return self._import_seconds if self._module else IMPORT_SECONDS

    @property
    def holds_start(self) -> bool:
        """Workers wait for an import, but not after a server that has failed."""
        return self.state is ServerState.IMPORTING and not self._has_failed_start

    def holds_join(self, agent: NodeAgent) -> bool:
        """A round elsewhere would be ended for workers that then wait for the import."""
        goes_on = agent.record is not None and agent.record.status is Status.FINAL and not agent.has_run
        return goes_on and self.holds_start

    def on_setup(self, change: EnvironmentChange) -> None:
        self.start(change)

    def start(self, change: EnvironmentChange = NO_CHANGE) -> None:
        launch = self._launch
        self._launch = replace(launch, argv=change.command(launch.argv), environ=change.apply(launch.environ))
        why = self._refusal or why_given_up(self.preload, starts=self._starts)
        if why:
            pass
        elif self._launch.folder is None:
            why = "no folder on this node can be written"
        elif not self._launch.inherited.subreaper:
            why = "this system refuses to make the agent the parent of its orphaned descendants"
        if not why:
            try:
                self._process, self._control = start_process(self._launch, self._files)
                self._oom_kills = oom_kill_count() or 0
            except OSError as error:
                why = f"it can't be started: {error}"
        if why:
            self.state = ServerState.FAILED
            self.why_fresh = f"there is no fork server: {why}"
            logger.warning("no fork server any more, workers are started fresh: %s", why)
            text = "no fork server any more: workers are started fresh"
            self._write_event(Note(subject="fork_server_gave_up", text=text, reason=why))
            return
        self.state = ServerState.IMPORTING
        self._since = self._began = self._clock.monotonic()
        self._module = ""
        self._starts += 1
        self._ask_for_imports(self.preload.wanted, is_first=True)

    def _ask_for_imports(self, names: Sequence[str], *, is_first: bool = False) -> None:
        for start in range(0, len(names), _MODULES_IN_ONE):
            has_all = is_first and not start
            self._send(
                {
                    "do": "import",
                    "modules": names[start : start + _MODULES_IN_ONE],
                    "watched": list(self._launch.watched) if has_all else [],
                    "left_out": list(self.preload.left_out) if has_all else [],
                    "given": list(self.preload.modules),
                    "auto": self.preload.is_auto,
                    "roots": top_level_imports(self._script()) if self.preload.is_auto and has_all else [],
                }
            )

    def look(self, agent: NodeAgent) -> None:
        self.handle()

    def handle(self) -> None:
        self._receive()
        if self._is_spare:
            self._look_elsewhere()
        elif self.due is not None and self._clock.monotonic() >= self.due:
            what = f"the import of {self._module}" if self._module else "its start"
            self._replace(f"{what} has taken {self._limit:g} s", has_failed=True)

    def _look_elsewhere(self) -> None:
        path, now = self._launch.preload_path, self._clock.monotonic()
        while self._found:
            merged = self.preload.merged(self._found.popleft())
            fresh = [name for name in merged.wanted if name not in self.preload.wanted]
            self.preload = merged
            if fresh:
                self._look_seconds = _FIRST_LOOK_SECONDS
                self._ask_for_imports(fresh)
        if now < self._looks_at or path is None:
            return

        def read() -> None:
            if (found := load_preload(path)) is not None:
                self._found.append(found)

        self._looks_at = now + self._look_seconds
        self._look_seconds = min(_LONGEST_LOOK_SECONDS, self._look_seconds * 1.5)
        self._files.post(read)

    def _heard(self, message: dict[str, Any]) -> None:
        what = message["is"]
        if what == "importing":
            self._module, self._since = str(message["module"]), self._clock.monotonic()
            self.state = ServerState.IMPORTING
        elif what == "ready":
            self._is_ready(message)
        elif what == "unfit":
            module, why = str(message["module"]), str(message["why"])
            if module:
                logger.info("the fork server starts anew without %s: %s", module, why)
                text = f"the fork server does without {module}"
                self._write_event(Note(subject="preload_left_out", text=text, reason=why))
            else:
                self._refusal = why
            self._replace("", leave_out=(module, why) if module else None)
        elif what == "stale":
            self._replace(f"{message['path']} has changed since it was imported")
        elif what == "learned":
            self._keep(self.preload.with_learned([str(name) for name in message["modules"]]))

    def _is_ready(self, message: Mapping[str, Any]) -> None:
        is_first = not self.why_fresh and self.state is ServerState.IMPORTING
        self.state = ServerState.READY
        self._module, self.why_fresh, self._has_failed_start = "", "", False
        seconds = self._clock.monotonic() - self._began
        if is_first:
            logger.info("the fork server is ready: %d modules, %.2f s", message["modules"], seconds)
        for name, why in message["failed"].items():
            if name in self.preload.modules:
                logger.warning("--preload: %s can't be imported: %s", name, why)
        if not self._has_remarked:
            self._has_remarked = True
            for line in late_settings(self._script(), imported=message["imported"], reads=message["reads"]):
                logger.warning("%s: %s", self._launch.argv[2], line)
        size = f"{message['modules']} modules, {message['rss'] / 2**20:.0f} MiB"
        text = f"the fork server is ready after {seconds:.2f} s: {size}"
        self._write_event(Note(subject="fork_server_ready", text=text))

    def _lost(self) -> None:
        code = None
        if self._process is not None:
            try:
                code = self._process.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                pass
        how = "" if code is None else f" with {describe_exitcode(code)}"
        if code == -signal.SIGKILL and (oom_kill_count() or 0) > self._oom_kills:
            how += ", killed by the kernel for the memory limit"
        while_importing = f" while it imported {self._module}" if self._module else ""
        self._replace(f"the fork server ended{how}{while_importing}", has_failed=True)

    def _replace(self, why: str, *, has_failed: bool = False, leave_out: tuple[str, str] | None = None) -> None:
        was_importing = self.state is ServerState.IMPORTING
        self.state = ServerState.OFF
        self._end()
        if has_failed and was_importing:
            self._has_failed_start = True
            if self._module:
                leave_out = (self._module, why)
            else:
                self._refusal = why  # not even a start
        if leave_out is not None:
            self._keep(self.preload.without(*leave_out))
        if why:
            self.why_fresh = why
            logger.warning("%s; a new one is started", why)
            self._write_event(Note(subject="fork_server_ended", text="another fork server is started", reason=why))
        self.start()

    def _script(self) -> str:
        try:
            return self._files.do(lambda: script_text(self._launch.argv, self._launch.cwd), within=_SCRIPT_SECONDS)
        except OSError:
            return ""

    def _keep(self, preload: Preload) -> None:
        self.preload, path = preload, self._launch.preload_path
        if self._keeps_learned and path is not None:
            self._files.post(lambda: preload.save(path))

    def _kill(self, process: subprocess.Popen[bytes]) -> None:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)  # with what its imports have started; workers are in no group

    def close(self) -> None:
        self._end()

    def _send(self, message: Mapping[str, Any], fds: Sequence[int] = ()) -> None:
        assert self._control is not None
        try:
            socket.send_fds(self._control, [json.dumps(message).encode()], list(fds))
        except (BrokenPipeError, ConnectionResetError):
            pass  # it has ended: `handle` finds out

    def fork_workers(
        self, environments: Sequence[Mapping[str, str]], cpus: Sequence[frozenset[int]] = ()
    ) -> list[WorkerProcess | None]:
        had_kept = self._keeps_learned
        self._keeps_learned = bool(environments) and environments[0].get("GROUP_RANK") == "0"
        if self._keeps_learned and not had_kept:
            self._keep(self.preload)
        found = self._fork(environments, cpus)
        if self.why_fresh:
            logger.warning("workers are started fresh: %s", self.why_fresh)
        return found

    def _fork(
        self, environments: Sequence[Mapping[str, str]], cpus: Sequence[frozenset[int]]
    ) -> list[WorkerProcess | None]:
        self.handle()
        if self.state is not ServerState.READY:
            self.why_fresh = self.why_fresh or "the fork server is not ready yet"
            return [None] * len(environments)
        pending = [
            PendingFork(env, cpus[i] if cpus else frozenset(), self._launch.pipe_bytes, self._clock)
            for i, env in enumerate(environments)
        ]
        try:
            for each in pending:
                self._ask(each, learn=each is pending[0] and self.preload.is_auto)
            found = self._gather(pending)
        finally:
            for each in pending:
                each.close()
        if any(process is not None for process in found):
            self._starts = 0
        return found

    def _ask(self, each: PendingFork, *, learn: bool) -> None:
        base = self._launch.environ
        message = {
            "do": "fork",
            "set": {name: value for name, value in each.env.items() if base.get(name) != value},
            "unset": [name for name in base if name not in each.env],
            "learn": learn,
        }
        try:
            each.open()
            self._send(message, each.theirs)
        except OSError as error:
            each.why = f"the fork server can't be asked: {error.strerror}"
        each.close_theirs()

    def _gather(self, pending: Sequence[PendingFork]) -> list[WorkerProcess | None]:
        deadline = self._clock.monotonic() + FORK_SECONDS
        waiting = {each.gate.fileno(): each for each in pending if each.gate is not None and not each.why}
        while waiting and (left := deadline - self._clock.monotonic()) > 0:
            for fd in wait_readable(waiting, left):
                waiting.pop(fd).hear()
        for each in waiting.values():
            each.why = f"the fork server has not answered for {FORK_SECONDS:g} s"
        found = [each.take() for each in pending]
        self.why_fresh = next((each.why for each in pending if each.why), "")
        self.handle()
        if waiting and self.state is ServerState.READY:
            self._replace(self.why_fresh, has_failed=True)
        return found
