"""The supervisor itself has failed, by a defect or for want of memory: the attempt ends all the same, with its report.

Were the exception just let go, the batch script would end, and Slurm the job with it: no verdict, no report, no
requeue.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from hpc_elastic.attempt import AttemptInfo
from hpc_elastic.clock import Clock
from hpc_elastic.errors import HpcElasticError, describe_error, where_raised
from hpc_elastic.events import EventLog
from hpc_elastic.failures.own_failure import write_own_failure
from hpc_elastic.file_thread import FileThread
from hpc_elastic.launch.last_files import HUNG_SECONDS
from hpc_elastic.launch.launcher import Launcher
from hpc_elastic.launch.supervisor import END_RESERVE, Supervisor
from hpc_elastic.outcome import Outcome
from hpc_elastic.rendezvous.coordination import Coordination
from hpc_elastic.run_paths import AttemptPaths

logger = logging.getLogger(__name__)


class SupervisorFailedError(HpcElasticError):
    """What it raised, with the place."""

    template = "the supervisor itself failed: {error} ({where})"


def end_after(
    error: Exception,
    supervisor: Supervisor,
    *,
    attempt: AttemptInfo,
    paths: AttemptPaths,
    launcher: Launcher,
    coordination: Coordination,
    events: EventLog,
    files: FileThread,
    clock: Clock,
    shutdown_timeout: float,
) -> None:
    """Leave evidence, and have the agents end their workers. Then `supervisor.result` tells the rest. Never raises.

    Args:
        error: What ended `supervisor.run`.
        supervisor: The one that failed.
        attempt: The attempt.
        paths: Its files.
        launcher: Ends the agents.
        coordination: Closes the run, if it still can.
        events: The supervisor's.
        files: Touches the files.
        clock: For the error file's time.
        shutdown_timeout: The workers' grace, in seconds.
    """
    failure = SupervisorFailedError(error=describe_error(error), where=where_raised(error))
    supervisor.failure = failure
    logger.error("%s; the workers are ended", failure, exc_info=error)
    host = attempt.batch_host
    node = attempt.nodes.index(host) if host in attempt.nodes else 0

    index = supervisor.record.round if supervisor.record is not None else 0

    def keep() -> None:
        path = paths.supervisor_error_file
        write_own_failure(path, error, role="supervisor", host=host, now_ns=clock.time_ns())

    steps: list[Callable[[], object]] = [
        lambda: events.write("platform_failure", round=index, node=node, host=host, reason=str(failure)),
        lambda: coordination.ask(lambda participant: participant.close(Outcome.FAILED, str(failure))),
        lambda: files.do(keep, within=HUNG_SECONDS),
        lambda: launcher.end(within=shutdown_timeout + END_RESERVE),
        lambda: coordination.stop(within=HUNG_SECONDS),
    ]
    for step in steps:
        try:
            step()
        except Exception as problem:  # it may fail for the same reason; the next one may not
            logger.error("after that: %s", problem)
