"""The supervisor's last duties, done by an agent because the batch host is gone: ``hpc-elastic batch --finish N DIR``.

Under ``--no-kill`` Slurm keeps a job running whose batch host has died, and its tasks go on (seen on 20.11 to 26.05);
nobody would write the verdict, requeue the job, or ever give the allocation back.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

from msgspec.structs import replace

from hpc_elastic.base.clock import RunClock
from hpc_elastic.base.outcome import UNCONFIRMED_CODE, ExitCode
from hpc_elastic.errors import UsageError
from hpc_elastic.launch.attempt_result import closed_result
from hpc_elastic.launch.conclude import conclude
from hpc_elastic.launch.requeue import RequeueAction
from hpc_elastic.launch.run_attempt import load_run, log_to_stdout
from hpc_elastic.launch.site import Allocation
from hpc_elastic.launch.slurm_site import slurm_site
from hpc_elastic.rendezvous.ending import claim_end
from hpc_elastic.rendezvous.participant import OBSERVER_NODE
from hpc_elastic.rendezvous.round_log import RoundLog
from hpc_elastic.rendezvous.state import OBSERVER_PLACE, Status, new_uid
from hpc_elastic.run.attempt import UnreadableAttemptError, load_attempt
from hpc_elastic.run.events import EventLog
from hpc_elastic.run.result import load_result
from hpc_elastic.store.file_store import FileStore

logger = logging.getLogger(__name__)


def finish_attempt(run_dir: Path, number: int, env: Mapping[str, str], *, agent: str, confirmed: bool) -> int:
    """Write the verdict and the report, append it to the job log, and requeue the job or end it.

    Args:
        run_dir: The run's.
        number: The attempt's; its log is closed.
        env: Of a task of the job.
        agent: The uid of the agent for which this is done.
        confirmed: Only where Slurm confirms that this node belongs to the job.

    Returns:
        The attempt's exit code; `UNCONFIRMED_CODE` where Slurm did not confirm that, and nothing was done.

    Raises:
        UsageError: there is no such attempt, or it has not ended.
    """
    signal.signal(
        signal.SIGTERM, signal.SIG_IGN
    )  # Slurm may send it more than once; its SIGKILL is the end of the time
    umask = os.umask(0o077)
    clock = RunClock()
    paths, spec = load_run(run_dir)
    attempt_paths = paths.attempt(number)
    try:
        attempt = load_attempt(attempt_paths.attempt_json)
    except UnreadableAttemptError as error:
        raise UsageError(str(error)) from None
    store = FileStore(attempt_paths.store, clock=clock)
    record = RoundLog(store, spec.run_id).latest()
    if record is None or record.status is not Status.CLOSED or record.outcome is None:
        raise UsageError(f"attempt {number} of {paths.root} has not ended")
    site = slurm_site(env, clock, umask=umask, paths=paths)
    if confirmed and site.allocation() is not Allocation.HELD:
        return UNCONFIRMED_CODE
    if not claim_end(store, agent):
        return ExitCode.OK
    _append_to_job_log(paths.job_log)
    log_to_stdout()
    host = os.uname().nodename
    why = f"the supervisor on {attempt.batch_host} did not finish the attempt"
    logger.warning("%s; this is %s", why, host)
    uid = new_uid(OBSERVER_PLACE, f"finisher-{host}", clock)
    events = EventLog(
        attempt_paths.events, role="supervisor", host=host, node=OBSERVER_NODE, uid=uid[-21:], clock=clock
    )
    events.write("end_taken_over", by=agent, reason=why)
    result = closed_result(record, record.outcome)
    if (how := site.how_script_ended()) is not None:
        logger.warning("%s", how)
        result = replace(result, reason=f"{result.reason}; {how}")
    decision = conclude(paths, spec, site, attempt, result, events, clock=clock)
    stored = load_result(attempt_paths.result_json)
    if decision.action is RequeueAction.END or (stored is not None and stored.next_job):
        logger.info("ending job %s, whose batch script is gone", attempt.job_id)
        events.close()
        site.end_job()
    events.close()
    return decision.exit_code


def _append_to_job_log(path: Path) -> None:
    """Our own stdout ends in an srun that died with its host. The job log's other writer died there too."""
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    except OSError as error:
        logger.warning("the job log can't be written: %s", error)
        return
    sys.stdout.flush()
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)
