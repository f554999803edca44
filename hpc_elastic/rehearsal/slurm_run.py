"""One run of the script as a job of Slurm's: submitted as any other, reached by steps of its owner's, requeued."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from msgspec.structs import replace

from hpc_elastic.base.clock import SystemClock
from hpc_elastic.errors import UsageError
from hpc_elastic.launch.run_directory import job_now
from hpc_elastic.launch.submit_job import Submission, submission_client, submit_job
from hpc_elastic.rehearsal.injector import NotNow, RemoteInjector
from hpc_elastic.rehearsal.live_run import LiveRun, RehearsalOptions
from hpc_elastic.rehearsal.saves import FileNames
from hpc_elastic.run.paths import ExitCode, UnreadableAttemptError, load_attempt
from hpc_elastic.run.spec import RunSpec
from hpc_elastic.slurm.commands import JobId, SlurmError
from hpc_elastic.slurm.job_state import JobPhase

_ASK_SECONDS = 2.0
_SETTLE_SECONDS = 15.0
"""An ended job without a final result may be on its way back into the queue, and a result may be seen late."""
_LEFT_SECONDS = 60.0
"""Limit of a job's end after that of its run: KillWait is 30 s on most sites."""


class SlurmRun(LiveRun):
    def __init__(
        self, options: RehearsalOptions, spec: RunSpec, name: str, names: FileNames, *, report: Callable[[str], None]
    ) -> None:
        assert options.job is not None
        super().__init__(options, spec, name, names)
        self._submission = Submission(job=replace(options.job, spec=self.spec), runs_dir=self.runs_dir)
        self._report = report
        self._clock = SystemClock()
        self._client = submission_client(self._submission, self.env, self._clock, report)
        self._first: JobId | None = None
        self._ask_at = 0.0
        self._ended_since: float | None = None
        self.log = self.paths.job_log
        self.is_queued = True
        self._why = ""
        self._waived: set[int] = set()
        self._attempt = -1
        self._nodes: tuple[str, ...] = ()

    @property
    def _job(self) -> JobId:
        assert self._first is not None
        return job_now(self.paths) or self._first

    def start(self) -> None:
        self.started = time.time()
        try:
            self._first = submit_job(self._submission, self._client, clock=self._clock, env=self.env, log=self._report)
        except SlurmError as error:
            # No verdict on the script: its exit code is not that of a guilty one.
            raise UsageError(f"the job can't be submitted: {error.why}") from None
        self._report(f"  job {self._first}")

    def poll(self) -> int | None:
        self._follow_attempt()
        self.read()
        result = self.result()
        if result is not None and result.exit_code != ExitCode.REQUEUED:
            return result.exit_code
        if time.monotonic() < self._ask_at:
            return None
        self._ask_at = time.monotonic() + _ASK_SECONDS
        return self._ask()

    def _ask(self) -> int | None:
        """The exit code by Slurm of a job that has ended without a result; None: it continues, or Slurm is silent."""
        job = self._job
        try:
            states = self._client.job_states(job)
            left = [state for state in states if state.phase is not JobPhase.FINISHED]
            if not left:
                now = time.monotonic()
                self._ended_since = self._ended_since or now
                is_over = now - self._ended_since >= _SETTLE_SECONDS
                return max([1, *(state.code for state in states)]) if is_over else None
            self._ended_since, self.is_queued = None, left[0].phase is JobPhase.PENDING
            if self.is_queued and left[0].reason != self._why:
                self._why = left[0].reason
                self._report(f"  job {job} waits: {self._why}" if self._why else f"  job {job} waits")
            if self.is_queued and left[0].reason == "BeginTime" and left[0].restarts not in self._waived:
                self._waived.add(left[0].restarts)
                self._client.start_now(job)
        except SlurmError:
            pass  # asked again
        return None

    def _follow_attempt(self) -> None:
        begun = self.paths.begun_attempts()
        if begun and begun[-1].number != self._attempt:
            try:
                attempt = load_attempt(begun[-1].attempt_json)
            except UnreadableAttemptError:
                return  # it is just being written
            self._attempt, self._nodes, self.started = attempt.number, attempt.nodes, time.time()

    def injectors(self) -> Sequence[RemoteInjector]:
        return [self.injector_of(node) for node in range(len(self._nodes))]

    def injector_of(self, node: int) -> RemoteInjector:
        return RemoteInjector(self._job, self._nodes[node], self.spec.uid, env=self.env, folders=self.folders)

    def notice(self) -> None:
        try:
            self._client.notify(self._job)
        except SlurmError as error:
            raise NotNow(error.why) from None

    def restart(self) -> None:
        try:
            self._client.requeue(self._job)
        except SlurmError as error:
            raise NotNow(error.why) from None

    def end(self) -> None:
        if self._first is None:
            return
        try:
            if self.result() is None or not self._is_gone(_SETTLE_SECONDS):
                self._client.cancel(self._job)
        except SlurmError as error:
            self._report(f"  job {self._job} could not be cancelled: {error.why}")

    def _is_gone(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while True:
            states = self._client.job_states(self._job)
            if all(state.phase is JobPhase.FINISHED for state in states):
                return True
            if time.monotonic() >= deadline:
                return False
            time.sleep(_ASK_SECONDS / 4)

    def leftovers(self) -> list[str]:
        if self._first is None:
            return []
        try:
            return [] if self._is_gone(_LEFT_SECONDS) else [f"job {self._job}, which has not ended"]
        except SlurmError:
            return []
