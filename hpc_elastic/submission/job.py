"""`ElasticJob`: a submitit job whose truth is the run's directory; and Slurm's view of all jobs of a program."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

from submitit.core.core import InfoWatcher, Job
from submitit.core.utils import DelayedSubmission

from hpc_elastic.base.clock import SystemClock
from hpc_elastic.base.files import read_bytes, sole_owner
from hpc_elastic.errors import UnsafePathError, UsageError
from hpc_elastic.launch.run_directory import job_now
from hpc_elastic.launch.run_status import FORGOTTEN_SECONDS, job_of_run, silent_for
from hpc_elastic.run.index import jobs_of
from hpc_elastic.run.paths import Outcome, RunPaths, StoredResult
from hpc_elastic.run.spec import RunSpec, UnreadableRunError, load_run_spec
from hpc_elastic.slurm.client import SlurmClient, SubprocessRunner, query_job_states
from hpc_elastic.slurm.commands import JobId, SlurmError
from hpc_elastic.slurm.job_state import JobPhase, JobState
from hpc_elastic.submission import local_process
from hpc_elastic.submission.call import UnreadableObjectError, read_call, read_terms
from hpc_elastic.submission.environment import (
    ElasticJobFailedError,
    ElasticJobPaths,
    ElasticJobUncompletedError,
    as_cause,
    find_end,
    output,
    read_exception,
    read_result,
    report_text,
    results_count,
    state_of,
    world_size,
)

SLURM_SECONDS = 30.0
FORGOTTEN = "UNKNOWN"
"""Slurm does not know the job (any more), or could not be asked."""
_WITHOUT_A_START = ("CANCELLED", "DEADLINE", "REVOKED")
"""A job in one of these states, of which nothing else is known, has never run."""


def slurm_client() -> SlurmClient:
    return SlurmClient(SubprocessRunner(os.environ), SystemClock(), timeout=SLURM_SECONDS)


class ElasticWatcher(InfoWatcher):  # type: ignore[misc]
    """One for all jobs of a program, each named ``9`` or, with its cluster, ``9;B``.

    Asks 2 s, 4 s, 8 s … after the last submission, then once a minute.
    """

    def __init__(self, delay_s: int = 60) -> None:
        super().__init__(delay_s)
        self._asked_about: dict[str, int] = {}

    def update(self) -> None:
        wanted = {job: JobId(*job.split(";")) for job in sorted(self._registered - self._finished)}
        if not wanted:
            return
        self._num_calls += 1
        found = query_job_states(slurm_client(), list(wanted.values()), warn=lambda sentence: None)
        self._last_status_check = time.time()
        for name, job in wanted.items():
            if job not in found or ((state := found[job]) is not None and state.phase is JobPhase.UNKNOWN):
                continue  # the controller restarts, say: what was known holds, and the next look asks again
            self._asked_about[name] = self._asked_about.get(name, 0) + 1
            self._info_dict[name] = info = {"JobID": str(job), "State": FORGOTTEN}
            if state is not None:
                info |= {"State": state.state, "NodeList": ",".join(state.nodes), "Reason": state.reason}
            if state is not None and state.phase is JobPhase.FINISHED:
                self._finished.add(name)

    def get_state(self, job_id: str, mode: str = "standard") -> str:
        return str(self.get_info(job_id, mode=mode).get("State") or FORGOTTEN)

    def answers_about(self, job_id: str) -> int:
        return self._asked_about.get(job_id, 0)

    def look_again_at(self, job_id: str) -> None:
        self._finished.discard(job_id)


R = TypeVar("R", covariant=True)

_SETTLE_SECONDS = 15.0
_REPORT_SECONDS = 30.0
_FIRST_LOOK = 0.05
_SLOWEST_LOOK = 1.0


class ElasticJob(Job[R], Generic[R]):  # type: ignore[misc]
    """One submitted call. `result` is rank 0's value, `results` all ranks'; `task` gives one rank's view of it."""

    watcher = ElasticWatcher()

    def __init__(
        self,
        folder: Path | str,
        job_id: str,
        tasks: Sequence[int] = (0,),
        *,
        run_dir: Path | None = None,
        rank: int | None = None,
    ) -> None:
        """Args:
        job_id: Slurm's, or on this machine the run's id.
        tasks: submitit's; not used.
        run_dir: None: found by the job's id in `folder`.
        rank: The rank of this view; None: the whole job's.
        """
        self._rank = rank
        self._cluster = ""
        self._over_since: float | None = None
        paths = ElasticJobPaths(folder, job_id, rank, run_dir=run_dir)
        self._run_dir = paths.run_dir
        if not RunPaths(self._run_dir).run_json.is_file():
            raise UsageError(f"no run of job {job_id} is known in {folder}")
        owner = os.stat(self._run_dir).st_uid
        if owner != os.geteuid():  # none of its files would be read: `result` would wait for ever
            raise UnsafePathError(f"{self._run_dir}, the run of job {job_id}, belongs to uid {owner}, not to you")
        sole_owner(self._run_dir)
        super().__init__(folder, job_id, (0,))
        self._paths = paths

    def _register_in_watcher(self) -> None:
        if self.cluster == "slurm":
            self.watcher.register_job(self._watched)

    # -- what it is -------------------------------------------------------------------------------------------------

    @property
    def paths(self) -> ElasticJobPaths:
        return self._paths

    @property
    def run_dir(self) -> Path:
        """The folder of everything about it."""
        return self._run_dir

    @property
    def cluster(self) -> str:
        """``slurm`` or ``local``."""
        if not self._cluster:
            spec = self._spec()
            self._cluster = spec.cluster if spec is not None else "slurm"
        return self._cluster

    @property
    def num_tasks(self) -> int:
        """Ranks of the newest round; before the first, the planned ones."""
        if self._rank is not None:
            return 1
        if begun := world_size(self._run):
            return begun
        spec = self._spec()
        if spec is None:
            return 1
        return spec.max_nodes * (int(spec.nproc_per_node) if spec.nproc_per_node.isdigit() else 1)

    @property
    def task_id(self) -> int | None:
        """The rank of this view; 0 for a job with one."""
        if self._rank is not None:
            return self._rank
        return None if self.num_tasks > 1 else 0

    def task(self, task_id: int) -> ElasticJob[R]:
        """The view of `task_id`, a global rank: its result, its output."""
        if self._rank is not None:
            if task_id == 0:
                return self
            raise ValueError("task_id must be 0: this is one rank's view already")
        if not 0 <= task_id < self.num_tasks:
            raise ValueError(f"task_id {task_id} must be between 0 and {self.num_tasks - 1}")
        if self.num_tasks == 1:
            return self
        return type(self)(self.paths._folder, self.job_id, run_dir=self.run_dir, rank=task_id)

    def submission(self) -> DelayedSubmission:
        """The submitted call, with `function`, `args` and `kwargs`."""
        call = read_call(self._run.call_pickle)
        return DelayedSubmission(call.function, *call.args, **call.kwargs)

    # -- what becomes of it -----------------------------------------------------------------------------------------

    @property
    def state(self) -> str:
        """Slurm's name of the state, on this machine too: ``PENDING``, ``RUNNING``, ``COMPLETED``, ``FAILED`` …"""
        end = find_end(self._run)
        if end is not None:
            return state_of(end)
        if self.cluster != "slurm":
            if local_process.lives(self._run):
                return "RUNNING" if self._run.begun_attempts() else "PENDING"
            return "NODE_FAIL" if self._run.begun_attempts() else "CANCELLED"
        return self.watcher.get_state(self._watched, mode="standard")

    def get_info(self, mode: str = "force") -> dict[str, str]:
        """``JobID``, ``State`` and, under Slurm, ``NodeList``."""
        if self.cluster != "slurm":
            return {"JobID": self.job_id, "State": self.state}
        info = dict(self.watcher.get_info(self._watched, mode=mode))
        end = find_end(self._run)
        return info if end is None else {**info, "JobID": self.job_id, "State": state_of(end)}

    def done(self, force_check: bool = False) -> bool:
        """Return whether it has ended, once and for all: a job that is about to come back has not.

        Without `force_check` Slurm is asked seldom, and the run's files are looked at.
        """
        if find_end(self._run) is not None:
            return True
        if not self._is_over_elsewhere(force=force_check):
            self._over_since = None
            return False
        now = time.monotonic()
        self._over_since = now if self._over_since is None else self._over_since
        # Files of a job that did begin may be seen here only later.
        if not self._run.begun_attempts() and (
            self.cluster != "slurm" or self.watcher.get_state(self._watched, mode="cache") in _WITHOUT_A_START
        ):
            return True
        if now - self._over_since < _SETTLE_SECONDS:
            return False
        # Slurm is asked seldom, and may have the job in its queue again.
        answers = self._answers()
        is_over_now = self._is_over_elsewhere(force=True)
        if find_end(self._run) is not None:
            return True
        if is_over_now:
            # Where it did not answer, all that is known is what it said before: the next look asks again.
            return self.cluster != "slurm" or self._answers() > answers
        self._over_since = None
        return False

    def _is_over_elsewhere(self, *, force: bool) -> bool:
        if self.cluster != "slurm":
            return not local_process.lives(self._run)
        job_id = self._watched
        if self._over_since is not None:
            self.watcher.look_again_at(job_id)  # it may be requeued at this moment
        state = self.watcher.get_state(job_id, mode="force" if force else "standard")
        if state != FORGOTTEN:
            return JobState(job_id="", state=state, reason="").phase is JobPhase.FINISHED
        begun = self._run.begun_attempts()
        silent = silent_for(self._run, begun[-1].number if begun else None, now_ns=time.time_ns())
        return self.watcher.answers_about(job_id) > 0 and (silent is None or silent >= FORGOTTEN_SECONDS)

    def _answers(self) -> int:
        return self.watcher.answers_about(self._watched) if self.cluster == "slurm" else 0

    def wait(self) -> None:
        """Return when it is `done`."""
        pause = _FIRST_LOOK
        while not self.done():
            time.sleep(pause)
            pause = min(_SLOWEST_LOOK, pause * 1.3)

    def result(self) -> R:
        """Wait for the function's value on rank 0 (of a rank's view: on that one).

        Raises:
            ElasticJobFailedError: it failed; the cause is the worker's exception.
            ElasticJobUncompletedError: it was cancelled, or ended without a result.
        """
        return self._value(self._rank or 0)

    def results(self) -> list[R]:
        """Wait for the function's values, in the order of ranks. Raises as `result` does."""
        if self._rank is not None:
            return [self.result()]
        first = self.result()
        count = results_count(self._run) or self.num_tasks
        return [first, *(self._value(rank) for rank in range(1, count))]

    def exception(self) -> ElasticJobFailedError | ElasticJobUncompletedError | None:
        """Wait for the exception that `result` would raise, or None."""
        self.wait()
        end = find_end(self._run)
        if end is not None and end.outcome == Outcome.SUCCEEDED.value:
            return None
        return self._failure(end)

    def _value(self, rank: int) -> R:
        if (failure := self.exception()) is not None:
            raise failure
        try:
            return cast(R, self._awaited_result(rank))
        except (UnreadableObjectError, UnsafePathError) as error:
            raise ElasticJobUncompletedError(job_id=self.job_id, why=str(error), report=self._where()) from error

    def _awaited_result(self, rank: int) -> Any:
        """Read a result; another node's disk cache may show it after the file that shows the run's end."""
        deadline = time.monotonic() + (_SETTLE_SECONDS if self.cluster == "slurm" else 0.0)
        while True:
            try:
                return read_result(self._run, rank)
            except UnreadableObjectError as error:
                if error.errno is None or time.monotonic() >= deadline:
                    raise
            time.sleep(_FIRST_LOOK)

    def _failure(self, end: StoredResult | None) -> ElasticJobFailedError | ElasticJobUncompletedError:
        text = self._awaited_report()
        raised = read_exception(self._run)
        if not text and raised is not None:
            text = str(raised[1].get("traceback", ""))  # the process that writes the report was too slow, or is gone
        report = "\n".join(filter(None, (text, self._where())))
        error: ElasticJobFailedError | ElasticJobUncompletedError
        if end is not None and (raised is not None or state_of(end) == "FAILED"):
            if raised is not None and raised[1].get("type") == "JobNotRequeuedError":
                report = f"{raised[1].get('message')}\n{report}"
            error = ElasticJobFailedError(job_id=self.job_id, report=report)
        else:
            why = f"it ended as {self.state}" + (f": {end.decision}" if end is not None else "")
            error = ElasticJobUncompletedError(job_id=self.job_id, why=why, report=report)
        if raised is not None:
            error.__cause__ = as_cause(*raised)
        return error

    def _awaited_report(self) -> str:
        deadline = time.monotonic() + (_REPORT_SECONDS if self._run.begun_attempts() else 0.0)
        while not (text := report_text(self._run)) and time.monotonic() < deadline:
            if self.cluster != "slurm" and not local_process.lives(self._run):
                return report_text(self._run)
            time.sleep(_FIRST_LOOK)
        return text

    def _where(self) -> str:
        return f"run directory: {self.run_dir}"

    # -- what it said -----------------------------------------------------------------------------------------------

    def stdout(self) -> str | None:
        """The ranks' output, one after the other; None: none has begun."""
        return self._output("stdout")

    def stderr(self) -> str | None:
        """The ranks' standard error; None where that goes to stdout."""
        with suppress(UnreadableObjectError):  # not begun yet, or removed
            if read_terms(self._run.call_pickle).stderr_to_stdout:
                return None
        printed = self._output("stderr")
        return "" if printed is None and self._output("stdout") is not None else printed  # no file: nothing printed

    def _output(self, stream: str) -> str | None:
        ranks = range(world_size(self._run) or 0) if self._rank is None else (self._rank,)
        texts = [output(self._run, rank, stream) for rank in ranks]
        found = [text for text in texts if text is not None]
        return "\n".join(filter(None, found)) if found else None

    def log(self) -> str:
        """The job log: the batch host's output, in all attempts."""
        try:
            return read_bytes(self._run.job_log, limit=sys.maxsize).decode("utf-8", "replace")
        except (OSError, UnsafePathError):
            return ""

    def report(self) -> str:
        """The report of the newest attempt that has ended: who failed first and why; empty: none yet."""
        return report_text(self._run)

    # -- what can be done to it -------------------------------------------------------------------------------------

    def cancel(self, check: bool = True) -> None:
        """End it; it does not come back. With `check`, raise where Slurm does not take it."""
        if self.cluster != "slurm":
            local_process.send(self._run, signal.SIGTERM)
            return

        try:
            client = slurm_client()
            job_of_run(client, self._job_now, self._run)
            client.cancel(self._job_now)
        except SlurmError:
            if check:
                raise

    def _interrupt(self, timeout: bool = False) -> None:
        """`timeout` is submitit's; whether it counts as a timeout is decided by the time that it has run."""
        if self.cluster == "slurm":
            client = slurm_client()
            job_of_run(client, self._job_now, self._run)
            client.notify(self._job_now)
        elif not local_process.send(self._run, signal.SIGUSR2):
            raise UsageError(f"job {self.job_id} is not running on {os.uname().nodename}")

    def __del__(self) -> None:
        if self.__dict__.get("_cancel_at_deletion") and find_end(self._run) is None:
            self.cancel(check=False)

    # -- inside -----------------------------------------------------------------------------------------------------

    @property
    def _run(self) -> RunPaths:
        return RunPaths(self.run_dir)

    @property
    def _job_now(self) -> JobId:
        """Slurm's id of it: another than `job_id` where it goes on in a follow-on job."""
        if (now := job_now(self._run)) is not None and now.cluster:
            return now
        if "_slurm_cluster" not in self.__dict__:
            known = [entry.cluster for entry in jobs_of(str(self.run_dir)) if entry.job_id == self.job_id]
            self._slurm_cluster = known[0] if known else ""
        return JobId(now.number if now is not None else self.job_id, self._slurm_cluster or None)

    @property
    def _watched(self) -> str:
        job = self._job_now
        return f"{job.number};{job.cluster}" if job.cluster else job.number

    def _spec(self) -> RunSpec | None:
        try:
            return load_run_spec(self._run.run_json)
        except UnreadableRunError:
            return None

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._register_in_watcher()
