"""What an agent does about the run's end where the supervisor can't: see `rendezvous.ending` and `launch.finish`."""

from __future__ import annotations

import logging
import signal
from collections.abc import Mapping, Sequence

from hpc_elastic.agent.context import AgentContext
from hpc_elastic.agent.health import HealthVerdict
from hpc_elastic.clock import Clock
from hpc_elastic.errors import HpcElasticError
from hpc_elastic.outcome import REFUSED_CODE, STORE_LOST_CODE, UNCONFIRMED_CODE, UNHEALTHY_CODE, ExitCode, Outcome
from hpc_elastic.readable import wait_readable
from hpc_elastic.rendezvous.coordination import Coordination
from hpc_elastic.rendezvous.ending import END_ASKED, END_TURN, END_UNCONFIRMED
from hpc_elastic.rendezvous.participant import Participant
from hpc_elastic.rendezvous.state import Member, RoundRecord, Status
from hpc_elastic.self_command import own_command
from hpc_elastic.store.base import StoreRefusedError, StoreWipedError

logger = logging.getLogger(__name__)

FINISH_SECONDS = 2400.0
"""For what the supervisor would have done: the patience with a controller that is down, and the report."""
_SPARE_SECONDS = 5.0


def is_unclaimed(
    coordination: Coordination, members: Sequence[Member], uid: str, clock: Clock, *, confirmed: bool
) -> bool:
    """Wait until a process claims the duty to finish the closed attempt, or this agent's turn to do it has come.

    Args:
        coordination: This agent's.
        members: The last round's: their order is the order of turns.
        uid: This agent's.
        clock: For the deadline.
        confirmed: Whether Slurm would be asked first; else this is the last resort, which waits longer.

    Returns:
        Whether it is this agent's turn. False too where the store does not answer in time.
    """
    uids = [member.uid for member in members]
    turn = uids.index(uid) if uid in uids else len(uids)
    coordination.ask(lambda participant: participant.await_end(turn, confirmed=confirmed))
    deadline = clock.monotonic() + (END_ASKED if confirmed else END_UNCONFIRMED) + END_TURN * turn + _SPARE_SECONDS
    while (left := deadline - clock.monotonic()) > 0:
        wait_readable([coordination], left)
        for notice in coordination.take():
            if isinstance(notice, Exception) or (isinstance(notice, tuple) and notice[0] == "end_claimed"):
                return False
            if isinstance(notice, tuple) and notice[0] == "end_unclaimed":
                return True
    return False


def exit_code(
    *,
    ended_by: signal.Signals | None,
    failure: Exception | None,
    unfit: HealthVerdict | None,
    record: RoundRecord | None,
) -> int:
    """The agent's exit code.

    Args:
        ended_by: The signal that ended it.
        failure: What ended it otherwise.
        unfit: Why its node took itself out, where a health check failed.
        record: The newest one.
    """
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
        return UNHEALTHY_CODE
    if record is not None and record.outcome in (Outcome.SUCCEEDED, Outcome.PREEMPTED):
        return ExitCode.OK
    return ExitCode.WORKERS_FAILED


def leave_run(participant: Participant, reason: str) -> None:
    """This node takes itself out, of the round that is open and of one that opens meanwhile."""
    index = participant.record.round if participant.record is not None else 0
    participant.leave(index, reason)
    participant.leave(index + 1, reason)


def finish_if_unclaimed(context: AgentContext, record: RoundRecord | None, *, is_closing: bool = False) -> None:
    """Make sure that a process writes the verdict and gives the allocation back.

    When the batch host dies, Slurm keeps the job running without its script (20.11 to 26.05, under --no-kill), and
    nothing would ever end it. The same holds where the batch host lives and Slurm has given it up.

    Args:
        context: The agent's.
        record: The newest one; nothing is done where it does not close the run, and where a later attempt has
            superseded this one, which then finishes it too.
        is_closing: This agent has just asked for the run to be closed: the record that does so may not be here yet.
    """
    if record is None or (record.status is not Status.CLOSED and not is_closing):
        return
    if record.outcome is Outcome.SUPERSEDED:
        return
    for confirmed in (True, False):
        if not is_unclaimed(context.coordination, record.members, context.info.uid, context.clock, confirmed=confirmed):
            return
        logger.warning("the supervisor on %s has not finished the attempt; trying it here", context.attempt.batch_host)
        code = finish_attempt(context.run_dir, context.attempt.number, context.info.uid, context.environ, confirmed)
        if code != UNCONFIRMED_CODE:
            return


def finish_attempt(run_dir: str, attempt: int, uid: str, environ: Mapping[str, str], confirmed: bool) -> int | None:
    """Have the supervisor's last duties done, in a process of their own: an agent runs none of Slurm's commands.

    Returns:
        Its exit code, `UNCONFIRMED_CODE` where it claimed nothing since Slurm did not confirm that this node belongs
        to the job; None where it could not be run to its end.
    """
    import subprocess

    how = "--finish" if confirmed else "--finish-unconfirmed"
    argv = own_command("batch", how, str(attempt), uid, run_dir)
    try:
        process = subprocess.Popen(argv, env=dict(environ), stdin=subprocess.DEVNULL)
        try:
            return process.wait(FINISH_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()  # and not waited for: a hung mount holds it whatever it is sent
            raise
    except (OSError, subprocess.TimeoutExpired) as error:
        logger.error("finishing the attempt failed: %s", error)
        return None
