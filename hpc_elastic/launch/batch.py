"""The entry points of the batch side of a Slurm job: ``hpc-elastic batch RUN_DIR``, which the generated script exec's.

``hpc-elastic batch --finish N RUN_DIR`` is the last step of an attempt by an agent: under ``--no-kill`` Slurm keeps a
job running whose batch host has died, and its tasks go on (seen on 20.11 to 26.05); no process would write the verdict,
requeue the job, or ever give the allocation back.
"""

from __future__ import annotations

import logging
import os
import signal
import stat
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from msgspec.structs import replace

from hpc_elastic.base.clock import Clock, RunClock
from hpc_elastic.base.loop import FileExecutor
from hpc_elastic.errors import UsageError
from hpc_elastic.launch.conclude import conclude
from hpc_elastic.launch.hooks import BatchCommands, end_with_commands
from hpc_elastic.launch.requeue import RequeueAction, closed_result
from hpc_elastic.launch.run_attempt import load_run, log_to_stdout, run_attempt
from hpc_elastic.launch.site import Allocation, AttemptContext, supervisor_events
from hpc_elastic.launch.slurm_site import SlurmSite, own_script
from hpc_elastic.launch.step import StepRendezvous, StepSite
from hpc_elastic.rendezvous.ending import claim_end
from hpc_elastic.rendezvous.round_log import RoundLog
from hpc_elastic.rendezvous.state import OBSERVER_PLACE, Status, new_uid
from hpc_elastic.run.paths import UNCONFIRMED_CODE, ExitCode, UnreadableAttemptError, load_attempt, load_result
from hpc_elastic.run.supervisor_events import EndTakenOver
from hpc_elastic.slurm.commands import SlurmError
from hpc_elastic.store.file_store import FileStore
from hpc_elastic.workers.linux import SignalQueue, not_ignored

logger = logging.getLogger(__name__)


def run_batch(
    run_dir: Path,
    env: Mapping[str, str],
    *,
    nodes: Sequence[str] | None = None,
    keep: Sequence[int] = (),
    rendezvous: StepRendezvous | None = None,
) -> int:
    """Supervise one attempt in this job: as its batch script, or as the first task of a user's own step."""
    ending = not_ignored([signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
    signals = SignalQueue([signal.SIGUSR2, signal.SIGCHLD, *ending])
    umask = os.umask(0o077)
    log_to_stdout()
    clock = RunClock()
    write_back(1, clock)
    paths, spec = load_run(run_dir)
    site: SlurmSite
    if rendezvous is not None:
        site = StepSite(env, rendezvous=rendezvous, clock=clock, umask=umask)
    else:
        site = SlurmSite(env, clock=clock, umask=umask, script=own_script(paths), nodes=nodes, keep=keep)
    return run_attempt(paths, spec, site, clock=clock, signals=signals).exit_code


def run_of_this_job(run_dir: Path, env: Mapping[str, str]) -> Path:
    """The run directory of this job: `run_dir`, or that of this array task in it. Raises UsageError."""
    paths, spec = load_run(run_dir)
    task = env.get("SLURM_ARRAY_TASK_ID")
    if spec.array and (task is None or not task.isdecimal()):
        raise UsageError(f"{paths.root} is an array of runs ({spec.array}), and this job is no task of one")
    if not spec.array and task is not None:
        raise UsageError(
            f"{paths.root} is one run, and this job is task {task} of an array: all tasks would write to it; "
            "submit with hpc-elastic submit --array"
        )
    return paths.task(int(task)).root if spec.array and task is not None else run_dir


def finish_attempt(run_dir: Path, number: int, env: Mapping[str, str], *, agent: str, confirmed: bool) -> int:
    """Write the verdict and the report, append it to the job log, and requeue the job or end it.

    Args:
        agent: The uid of the agent that asks.
        confirmed: Act only if Slurm confirms that this node belongs to the job; else return `UNCONFIRMED_CODE`.

    Raises:
        UsageError: there is no such attempt, or it has not ended.
    """
    # Slurm may send it more than once; its SIGKILL is the end of the time.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
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
    site = SlurmSite(env, clock=clock, umask=umask, script=own_script(paths))
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
    events = supervisor_events(attempt_paths, host=host, uid=uid, clock=clock)
    events.write(EndTakenOver(by=agent, reason=why))
    result = closed_result(record, record.outcome)
    if (how := site.how_script_ended()) is not None:
        logger.warning("%s", how)
        result = replace(result, reason=f"{result.reason}; {how}")
    context = AttemptContext(paths=paths, spec=spec, site=site, attempt=attempt, events=events, clock=clock)
    decision = conclude(context, result)
    end_with_commands(BatchCommands(context), result, decision, files=FileExecutor(clock=clock))
    stored = load_result(attempt_paths.result_json)
    if decision.action is RequeueAction.END or (stored is not None and stored.next_job):
        logger.info("ending job %s, whose batch script is gone", attempt.job_id)
        events.close()
        site.end_job()
    events.close()
    return decision.exit_code


def print_job_nodes(run_dir: Path, env: Mapping[str, str]) -> int:
    paths, _ = load_run(run_dir)
    try:
        print(*SlurmSite(env, clock=RunClock(), umask=0o077, script=own_script(paths)).job_nodes())
    except SlurmError as error:
        print(f"hpc-elastic: {error}", file=sys.stderr)
        return 1
    return 0


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


def write_back(fd: int, clock: Clock, *, interval: float = 1.0) -> bool:
    """Let other hosts read the job log while the job runs: a thread asks for the open file's times again and again.

    An NFS client keeps what is written to an open file until it is half a minute old, but writes it out before it
    answers a stat (nfs_getattr, read in 6.x). Where nothing is kept back, a stat costs next to nothing, unlike an
    fsync. Only the thread waits where the mount hangs.
    """
    try:
        is_file = stat.S_ISREG(os.fstat(fd).st_mode)
    except OSError:
        return False

    def run() -> None:
        while not clock.wait(never, interval):
            with suppress(OSError):  # the next write fails too
                os.fstat(fd)

    never = threading.Event()
    if is_file:
        threading.Thread(target=run, name="write-back", daemon=True).start()
    return is_file
