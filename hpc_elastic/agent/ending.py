"""How an agent ends: by a signal or by a crash; and the supervisor's duties where no supervisor is in reach.

When a preemption's grace time begins Slurm sends SIGTERM to the tasks, and nothing to the batch script; but a SIGTERM
may as well be a cancel. `HeardSignals` reports it through the rendezvous, and the supervisor finds out what it means.
"""

from __future__ import annotations

import logging
import signal
import subprocess
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, NoReturn

from hpc_elastic.agent.part import HealthVerdict, Part
from hpc_elastic.agent.rounds import log_coordination
from hpc_elastic.base.clock import Clock
from hpc_elastic.base.host_facts import own_command
from hpc_elastic.base.loop import wait_readable
from hpc_elastic.errors import HpcElasticError, describe_error
from hpc_elastic.rendezvous.coordination import Coordination
from hpc_elastic.rendezvous.participant import Participant
from hpc_elastic.rendezvous.state import Member, RoundRecord, RunNotice, Status, seconds_to_save
from hpc_elastic.rendezvous.succession import (
    END_ASKED,
    END_TURN,
    END_UNCONFIRMED,
    EndClaimed,
    EndUnclaimed,
    NodesCutOff,
)
from hpc_elastic.run.control_events import NodeGivenUp
from hpc_elastic.run.events import RunEvent
from hpc_elastic.run.paths import REFUSED_CODE, STORE_LOST_CODE, UNCONFIRMED_CODE, UNHEALTHY_CODE, ExitCode, Outcome
from hpc_elastic.store.file_store import StoreRefusedError, StoreWipedError
from hpc_elastic.workers.linux import SignalQueue, leave_hung_threads, signals_unblocked

if TYPE_CHECKING:
    from _typeshed import FileDescriptorLike

    from hpc_elastic.agent.node_agent import NodeAgent
    from hpc_elastic.agent.part import AgentSite


ANSWER_SECONDS = 4.0
"""How long the supervisor's answer is waited for at most: it asks Slurm for 2 s."""
KILL_RESERVE = 2.0
"""Seconds kept of what Slurm leaves for writing evidence, and for the requeue, after the workers have ended."""
KILL_WAIT_SHARE = 0.2
"""The same as a share of KillWait, where that is more: on a crowded node two seconds were not enough for the report."""
LEAST_GRACE = 0.5
LAST_COMMANDS_SECONDS = 5.0
"""How long an agent that ends waits for the shared filesystem to take what it has to report."""
HUNG_SECONDS = 1.0
_ENDING_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class HeardSignals:
    def __init__(self, site: AgentSite, signals: SignalQueue) -> None:
        self._site = site
        self._signals = signals
        self.ended_by: signal.Signals | None = None
        self.due: float | None = None
        self._asked: signal.Signals | None = None
        self._notice: RunNotice | None = None
        self._kill_from: float | None = None
        """When Slurm's KillWait has begun, where a SIGTERM was its beginning."""
        self._ends_at: float | None = None

    def hear(self, number: signal.Signals) -> bool:
        """Returns whether it ends this node now. Slurm sends it twice at a limit, and at both ends of a preemption's
        grace."""
        is_slurm = self._site.me.attempt.cluster == "slurm"
        if number is signal.SIGUSR2:
            if is_slurm:
                self._ask(number)
            else:
                self._give_notice(number)
            return False
        if number not in _ENDING_SIGNALS or self.ended_by is not None:
            return False
        if number is signal.SIGTERM and is_slurm:
            self._kill_from = self._site.clock.monotonic()
            self._ask(number)
            return False
        self._end(number)
        return True

    def on_record(self, record: RoundRecord) -> None:
        notice = record.notice
        is_new = notice is not None and not notice.is_given_as(self._notice)
        if record.status is not Status.CLOSED and not is_new:
            return
        self.due = None
        if record.status is Status.CLOSED and self._kill_from is not None:
            self.ended_by = self.ended_by or signal.SIGTERM  # Slurm ends the job
        if notice is not None and is_new:
            self._notice = notice
            self._kill_from = None  # it was the notice: what comes after it is the end
            if notice.left is not None:
                ends_at = self._site.clock.monotonic() + notice.left
                self._ends_at = ends_at if self._ends_at is None else min(self._ends_at, ends_at)

    def overdue(self) -> signal.Signals | None:
        if self.due is None or self._site.clock.monotonic() < self.due:
            return None
        self.due, number = None, self._asked
        if number is signal.SIGUSR2:
            self._give_notice(number)
            return None
        assert number is not None
        self._end(number)
        return number

    def is_ending(self) -> bool:
        return self.ended_by is not None or self._signals.holds(_ENDING_SIGNALS)

    def grace(self) -> float:
        """Seconds from the workers' SIGTERM to their SIGKILL; never more than Slurm leaves where it ends the job."""
        left, grace = self.left(), self._site.me.spec.shutdown_timeout
        return grace if left is None else min(grace, left)

    def left(self) -> float | None:
        """Seconds that the job has; None: it is not ended from outside."""
        now, kill_wait, found = self._site.clock.monotonic(), self._site.me.attempt.kill_wait, []
        if self._kill_from is not None and kill_wait is not None:
            found.append(self._kill_from + kill_wait - now - max(KILL_RESERVE, KILL_WAIT_SHARE * kill_wait))
        if self._ends_at is not None:
            found.append(self._ends_at - now - KILL_RESERVE)
        if not found and self.ended_by is not None:
            return self._site.me.spec.shutdown_timeout
        return max(LEAST_GRACE, min(found)) if found else None

    def _ask(self, number: signal.Signals) -> None:
        """Slurm sends SIGTERM when a preemption begins, whatever notice there is, and again when its grace is over."""
        if self._asked in (number, signal.SIGTERM) or (self._notice is not None and number is not signal.SIGTERM):
            return
        if self._asked is None and self._notice is None:
            kill_wait = self._site.me.attempt.kill_wait
            patience = ANSWER_SECONDS if kill_wait is None else min(ANSWER_SECONDS, kill_wait / 2)
            self.due = self._site.clock.monotonic() + patience
        self._asked = number
        what = f"{number.name} on {self._site.me.host} {self._signals.sender(number)}".rstrip()
        self._site.coordination.ask(lambda participant: participant.to_all.heard(what))

    def _give_notice(self, number: signal.Signals) -> None:
        spec = self._site.me.spec  # the agent received a signal itself: how much time is left is not known
        seconds = seconds_to_save(spec.signal_grace, shutdown_timeout=spec.shutdown_timeout)
        notice = RunNotice(f"{number.name} on {self._site.me.host}", seconds)
        self._site.coordination.ask(lambda participant: participant.to_all.give_notice(notice))

    def _end(self, number: signal.Signals) -> None:
        self.ended_by = number
        reason = f"{number.name} on {self._site.me.host}"
        self._site.coordination.ask(lambda participant: participant.to_all.close(Outcome.CANCELLED, reason))


logger = logging.getLogger(__name__)

FINISH_SECONDS = 2400.0
"""The supervisor's patience with a controller that is down, and the report."""
_SPARE_SECONDS = 5.0


def is_unclaimed(
    coordination: Coordination, members: Sequence[Member], uid: str, clock: Clock, *, confirmed: bool
) -> bool:
    """Wait until a process claims the end of the closed attempt, or it is this agent's turn to finish it, in the order
    of `members`. False too where the store does not answer in time. Not `confirmed`: the last resort, which waits
    longer."""
    uids = [member.uid for member in members]
    turn = uids.index(uid) if uid in uids else len(uids)
    coordination.ask(lambda participant: participant.ending.begin(turn, confirmed=confirmed))
    deadline = clock.monotonic() + (END_ASKED if confirmed else END_UNCONFIRMED) + END_TURN * turn + _SPARE_SECONDS
    while (left := deadline - clock.monotonic()) > 0:
        wait_readable([coordination], left)
        for message in coordination.take():
            if isinstance(message, (Exception, EndClaimed)):
                return False
            if isinstance(message, EndUnclaimed):
                return True
    return False


def exit_code(
    *,
    ended_by: signal.Signals | None,
    failure: Exception | None,
    unfit: HealthVerdict | None,
    record: RoundRecord | None,
) -> int:
    if ended_by is not None:
        return 128 + ended_by
    if isinstance(failure, StoreWipedError):
        return STORE_LOST_CODE
    if isinstance(failure, StoreRefusedError) or (failure is None and unfit is not None and unfit.is_refusal):
        return REFUSED_CODE
    if failure is not None:
        if not isinstance(failure, HpcElasticError):
            logger.error("internal error: %r", failure)
        return ExitCode.WORKERS_FAILED
    if unfit is not None:
        return ExitCode.USAGE if unfit.is_usage else UNHEALTHY_CODE
    if record is not None and record.outcome in (Outcome.SUCCEEDED, Outcome.PREEMPTED):
        return ExitCode.OK
    return ExitCode.WORKERS_FAILED


def leave_run(participant: Participant, reason: str) -> None:
    index = participant.record.round if participant.record is not None else 0
    participant.leave(index, reason)
    participant.leave(index + 1, reason)


def deregister(site: AgentSite) -> bool:
    """Returns whether the store took it in time; if not, a thread may wait for the filesystem forever."""
    coordination = site.coordination
    coordination.ask(lambda participant: participant.claims.deregister())
    is_done = coordination.stop(within=HUNG_SECONDS)
    if not is_done and site.files.stuck_for() < HUNG_SECONDS:
        is_done = coordination.stop(within=LAST_COMMANDS_SECONDS - HUNG_SECONDS)
    if not is_done:
        refusal = coordination.refusal
        how = "does not answer" if refusal is None else f"refuses: {refusal}"
        logger.warning("%s %s; leaving without it", site.me.run.root, how)
    for message in [*coordination.take(), coordination.lasting_refusal()]:
        if isinstance(message, RunEvent):  # what was decided meanwhile: that the run is closed, for one
            log_coordination(site.events, message, nodes=site.me.attempt.nodes)
    return is_done


def finish_if_unclaimed(site: AgentSite, record: RoundRecord | None, *, ended_by: signal.Signals | None) -> None:
    """Make sure that a process writes the verdict and gives the allocation back.

    When the batch host dies, or Slurm gives it up, the job runs on without its script (20.11 to 26.05, under
    --no-kill), and nothing would ever end it. `ended_by` is SIGTERM where Slurm has killed the script (scancel
    --batch): the record that closes the run may not be here yet.
    """
    if ended_by not in (None, signal.SIGTERM) or site.me.attempt.cluster != "slurm":
        return
    if record is None or record.outcome is Outcome.SUPERSEDED:
        return
    if record.status is not Status.CLOSED and ended_by is None:
        return
    for confirmed in (True, False):
        if not is_unclaimed(site.coordination, record.members, site.info.uid, site.clock, confirmed=confirmed):
            return
        logger.warning("the supervisor on %s has not finished the attempt; trying it here", site.me.attempt.batch_host)
        code = finish_attempt(str(site.me.run.root), site.me.attempt.number, site.info.uid, site.environ, confirmed)
        if code != UNCONFIRMED_CODE:
            return


def finish_attempt(run_dir: str, attempt: int, uid: str, environ: Mapping[str, str], confirmed: bool) -> int | None:
    """An agent runs none of Slurm's commands: another process finishes it. Returns its exit code, `UNCONFIRMED_CODE`
    where Slurm did not confirm that this node belongs to the job; None where it could not be run to its end."""
    how = "--finish" if confirmed else "--finish-unconfirmed"
    argv = own_command("batch", how, str(attempt), uid, run_dir)
    try:
        with signals_unblocked():
            process = subprocess.Popen(argv, env=dict(environ), stdin=subprocess.DEVNULL)
        try:
            return process.wait(FINISH_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()  # and not waited for: a hung mount holds it whatever it is sent
            raise
    except (OSError, subprocess.TimeoutExpired) as error:
        logger.error("finishing the attempt failed: %s", error)
        return None


_RESERVE_BYTES = 4 << 20
_NEVER_END = frozenset({"coordination", "beats", "files", "log-pump", "log-files", "job-log"})


class ThreadFailedError(HpcElasticError):
    template = "the agent's thread {thread!r} failed: {error}"


class CrashGuard:
    def __init__(self) -> None:
        self._reserve: bytes | None = bytes(_RESERVE_BYTES)  # never touched, and so not resident: a bytearray would be
        self._threads: set[threading.Thread] = set()

    def watch_threads(self, on_failure: Callable[[ThreadFailedError], None]) -> None:
        """An exception that ends a thread is reported from now on; `on_failure` is called in that thread, and must not
        wait."""

        def failed(args: threading.ExceptHookArgs) -> None:
            self._reserve = None
            if args.exc_type is not SystemExit:
                name = args.thread.name if args.thread is not None else "?"
                on_failure(ThreadFailedError(thread=name, error=describe_error(args.exc_value or args.exc_type())))

        threading.excepthook = failed

    def check(self) -> None:
        """A thread may have ended unreported: without memory, not even that works. Raises `ThreadFailedError`."""
        for thread in self._threads:
            if not thread.is_alive():
                raise ThreadFailedError(thread=thread.name, error="it ended without a message (out of memory?)")
        self._threads.update(thread for thread in threading.enumerate() if thread.name in _NEVER_END)

    def end(self, steps: Sequence[Callable[[], object]], pipes: Sequence[int]) -> NoReturn:
        self._reserve = None
        try:
            for step in steps:
                try:
                    step()
                except Exception:
                    continue  # one that fails for the same reason; the next may be smaller
        finally:
            leave_hung_threads(ExitCode.WORKERS_FAILED, pipes)


GIVEN_UP = "Slurm gave the node up (node failure), and the supervisor is out of reach"


class JobNodes(Part):
    """Asks Slurm for the job's nodes where the supervisor can't: its own host is out of reach.

    Such a node lives, as the files show; Slurm gives it up, and the supervisor does not learn that.
    """

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
