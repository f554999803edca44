"""The user's own commands on the batch host: ``--notify`` and ``--after``.

Our own process posts to a URL, since nothing else bounds a name server, or a server that sends a byte a minute. What
fails is an event, a line of the job log and of the report, and never the run's failure.
"""

from __future__ import annotations

import json
import logging
import os
import resource
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import urlsplit

from hpc_elastic.agent.restart_policy import HANG_FINGERPRINT
from hpc_elastic.base.host_facts import module_command
from hpc_elastic.base.loop import FileExecutor
from hpc_elastic.errors import HpcElasticError
from hpc_elastic.launch.conclude import write_attempt_report
from hpc_elastic.launch.requeue import AttemptResult, RequeueAction, RequeueDecision
from hpc_elastic.launch.site import AttemptContext
from hpc_elastic.rendezvous.state import RoundRecord, Status
from hpc_elastic.run.agent_events import UserCommandEnded
from hpc_elastic.run.paths import Outcome
from hpc_elastic.workers.spawn import Inherited, WorkerStartError
from hpc_elastic.workers.user_command import CommandEnd, UserCommand, describe_end, last_lines, shell_command

logger = logging.getLogger(__name__)

LOOK_SECONDS = 10.0
LATE_SECONDS = 5.0
_END_SECONDS = 2.0
REPORT_SECONDS = 30.0
NOTICE_SECONDS = 10.0
URL_VARIABLE = "HPC_ELASTIC_NOTIFY_URL"
"""It may hold a secret, which a command line would show to all users of the host."""
_MOST_LINES = 20
_BAD = (Outcome.FAILED, Outcome.TOO_FEW_NODES)


class FailureNotice:
    def __init__(self) -> None:
        self.has_failed = False
        self._hung_round = -1
        self._members: set[str] = set()
        self._before: RoundRecord | None = None

    def take(self, record: RoundRecord) -> list[tuple[str, str]]:
        before, self._before = self._before, record
        restarts = before.restarts_used if before is not None else 0
        lost = set(record.lost) - set(before.lost if before is not None else ())
        gone: set[str] = set()
        if record.status is Status.FINAL:  # an agent that another has replaced, or a node that is not there any more
            now = {member.uid for member in record.members}
            gone, self._members = self._members - now, now
        ends_badly = record.status is Status.CLOSED and record.outcome in _BAD
        ends_hung = ends_badly and record.memory.fingerprint.startswith(HANG_FINGERPRINT)
        found = []
        if (record.hang is not None and record.round > self._hung_round) or ends_hung:
            self._hung_round = record.round
            found.append(("hang", record.reason))
        if not self.has_failed and (record.restarts_used > restarts or lost or gone or ends_badly):
            self.has_failed = True
            found.append(("failure", record.reason))
        return found


class BatchCommands:
    def __init__(self, context: AttemptContext) -> None:
        self.context = context
        core_limit = resource.getrlimit(resource.RLIMIT_CORE)
        self._inherited = Inherited(umask=context.site.umask, core_limit=core_limit, subreaper=False)
        self._environ = {
            **os.environ,
            "HPC_ELASTIC_RUN_DIR": str(context.paths.root),
            "HPC_ELASTIC_ATTEMPT": str(context.attempt.number),
        }
        self._is_failing = False
        self._events: deque[UserCommandEnded] = deque()
        """Waiting to be written: the supervisor's log is the main thread's."""
        self._changed = threading.Condition()
        self._running: list[UserCommand] = []
        self._failures = FailureNotice()

    def on_record(self, record: RoundRecord) -> None:
        self._write_events()
        if self.context.spec.notify:
            for what, reason in self._failures.take(record):
                self.notify(what, f"{self.context.spec.name}: {what}: {reason}", reason=reason, round=record.round)

    def notify(self, what: str, text: str, **facts: Any) -> None:
        target = self.context.spec.notify
        if not target:
            return
        notice = {
            "event": what,
            "text": text,
            "run_id": self.context.spec.run_id,
            "name": self.context.spec.name,
            "run_dir": str(self.context.paths.root),
            "attempt": self.context.attempt.number,
            "job_id": self.context.attempt.job_id,
            "host": self.context.attempt.batch_host,
            "time": round(self.context.clock.time_ns() / 1e9, 3),
            **facts,
        }
        is_url = target.startswith(("http://", "https://"))
        argv = module_command(__name__, "post") if is_url else shell_command(f"exec 2>&1\n{target}")
        environ = {**self._environ, URL_VARIABLE: target} if is_url else self._environ
        self._start("notify", argv, environ, NOTICE_SECONDS, about=what, stdin=json.dumps(notice).encode() + b"\n")

    def run_last(
        self, result: AttemptResult, decision: RequeueDecision, *, files: FileExecutor, is_hurried: Callable[[], bool]
    ) -> bool:
        """Returns whether a command of this attempt has failed, so that the report should be written again."""
        spec, outcome = self.context.spec, result.outcome.value
        if not (spec.notify or spec.after):
            return False
        requeued = decision.action is RequeueAction.REQUEUE
        cause = self._read_cause(files)
        facts = {"outcome": outcome, "exit_code": decision.exit_code, "reason": result.reason, "root_cause": cause}
        why = f": {cause or result.reason}" if result.outcome is not Outcome.SUCCEEDED else ""
        if result.outcome in _BAD and not self._failures.has_failed:
            self.notify("failure", f"{spec.name}: failure{why}", **facts)
        what = "requeue" if requeued else "end"
        text = f"{spec.name} {'is requeued' if requeued else outcome} (exit code {decision.exit_code}){why}"
        self.notify(what, text, **facts, decision=decision.reason)
        within = LATE_SECONDS if result.signal_number is not None and self.context.attempt.cluster == "slurm" else None
        if spec.after and not requeued:
            seconds = spec.hook_timeout if within is None else min(within, spec.hook_timeout)
            result_env = {
                **self._environ,
                "HPC_ELASTIC_OUTCOME": outcome,
                "HPC_ELASTIC_EXIT_CODE": str(decision.exit_code),
                "HPC_ELASTIC_REASON": result.reason,
                "HPC_ELASTIC_ROOT_CAUSE": cause,
                "HPC_ELASTIC_REPORT": str(self.context.folder.report_json),
            }
            self._start("after", shell_command(f"exec 2>&1\n{spec.after}"), result_env, seconds)
            self._wait(seconds + _END_SECONDS, is_hurried)
        self._wait(NOTICE_SECONDS + _END_SECONDS, is_hurried)
        return self._is_failing

    def _read_cause(self, files: FileExecutor) -> str:
        try:
            report = json.loads(files.do(self.context.folder.report_json.read_bytes, within=LOOK_SECONDS))
            return str(report["verdict"]["summary"] or "") if report["verdict"]["cause"] != "none" else ""
        except (OSError, ValueError, LookupError, TypeError, HpcElasticError):
            return ""

    def _wait(self, seconds: float, is_hurried: Callable[[], bool]) -> None:
        deadline = time.monotonic() + seconds
        with self._changed:
            while self._running and time.monotonic() < deadline and not is_hurried():
                self._changed.wait(0.1)
            for command in self._running:
                command.kill()
        self._write_events()

    def _write_events(self) -> None:
        while self._events:
            self.context.events.write(self._events.popleft())

    def _start(
        self,
        name: str,
        argv: list[str],
        environ: Mapping[str, str],
        seconds: float,
        *,
        about: str = "",
        stdin: bytes | None = None,
    ) -> None:
        try:
            command = UserCommand.start(
                argv,
                environ=environ,
                cwd=self.context.spec.cwd,
                inherited=self._inherited,
                clock=self.context.clock,
                stdin=stdin,
            )
        except WorkerStartError as error:
            self._report(name, about, CommandEnd(exitcode=127, stderr=str(error).encode()))
            return
        with self._changed:
            self._running.append(command)

        def ended(end: CommandEnd) -> None:
            self._report(name, about, end)
            with self._changed:
                self._running.remove(command)
                self._changed.notify_all()

        command.attend(seconds, ended)

    def _report(self, name: str, about: str, end: CommandEnd) -> None:
        shown = last_lines(end.stdout or end.stderr, _MOST_LINES)
        why = describe_end(end)
        why = f"{why}: {shown[-1].strip()}" if why and shown else why
        self._events.append(
            UserCommandEnded(
                command=name,
                about=about,
                reason=why,
                code=end.exitcode,
                seconds=round(end.seconds, 3),
                output=tuple(shown) if why else (),
            )
        )
        of = f" ({about})" if about else ""
        if why:
            self._is_failing = True
            logger.error("--%s%s failed: %s", name, of, why)
        elif name == "after":
            for line in shown:
                logger.info("--after: %s", line)


def end_with_commands(
    commands: BatchCommands,
    result: AttemptResult,
    decision: RequeueDecision,
    *,
    files: FileExecutor,
    is_hurried: Callable[[], bool] = lambda: False,
) -> None:
    try:
        if commands.run_last(result, decision, files=files, is_hurried=is_hurried):
            files.do(lambda: write_attempt_report(commands.context, result, decision), within=REPORT_SECONDS)
    except Exception as error:
        logger.exception("the commands after the run: %s", error)


def post() -> None:
    """Post stdin to the URL, in a process of its own. Its last line says what failed, without the URL's path."""
    import urllib.error
    import urllib.request

    url = os.environ.pop(URL_VARIABLE, "")
    host = urlsplit(url).hostname
    request = urllib.request.Request(
        url, sys.stdin.buffer.read(), {"Content-Type": "application/json", "User-Agent": "hpc-elastic"}, method="POST"
    )
    try:
        with urllib.request.urlopen(request, timeout=NOTICE_SECONDS) as answer:
            answer.read(1 << 16)
    except urllib.error.HTTPError as error:
        sys.exit(f"{host} answered {error.code} {error.reason}")
    except (OSError, ValueError) as error:
        sys.exit(f"{host} can't be reached: {getattr(error, 'reason', error)}")
