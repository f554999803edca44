"""One run of the script, in its own folder: started, watched, restarted, removed; and the members of that run.

It runs on this machine, or as a job of Slurm's: submitted as any other, reached by steps of its owner's, requeued.
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from msgspec import Struct, field
from msgspec.structs import replace

from hpc_elastic.base.clock import SystemClock
from hpc_elastic.base.host_facts import module_command
from hpc_elastic.errors import UsageError
from hpc_elastic.launch.run_directory import create_run, job_now
from hpc_elastic.launch.submit_job import Submission, submission_client, submit_job
from hpc_elastic.options.run_request import SlurmJob
from hpc_elastic.rehearsal.injector import FileNames, Injector, NotNow, RemoteInjector, SavedFiles, signal_all
from hpc_elastic.rehearsal.journal import LossSource, Place, RunJournal
from hpc_elastic.rehearsal.judge import Kind
from hpc_elastic.run.event_reader import EventFile, event_files
from hpc_elastic.run.paths import (
    ExitCode,
    RunPaths,
    StoredResult,
    UnreadableAttemptError,
    load_attempt,
    load_newest_result,
)
from hpc_elastic.run.spec import RunSpec, new_run_id
from hpc_elastic.slurm.commands import JobId, SlurmError
from hpc_elastic.slurm.job_state import JobPhase
from hpc_elastic.worker_api.heartbeat import JOURNAL_VARIABLE

PLANTED = "an exception that hpc-elastic rehearse has planted"
PLANT_SIGNAL = signal.SIGRTMIN + 9
_HOOK = f'''\
"""Makes a signal an exception, in the workers of a rehearsed run; then loads the sitecustomize that this one hides."""
import _thread, os, signal, sys, time


def _raise(number, frame):
    name = frame.f_code.co_filename
    if not name.startswith(os.path.dirname(os.__file__)) or "site-packages" in name:
        raise RuntimeError({PLANTED!r})
    # Python drops an exception in a callback of its own, as of a fork: a moment later.
    _thread.start_new_thread(lambda: (time.sleep(0.05), os.kill(os.getpid(), number)), ())


signal.signal({int(PLANT_SIGNAL)}, _raise)
_own, _folder = sys.modules.pop("sitecustomize", None), os.path.dirname(os.path.abspath(__file__))
sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry) != _folder]
try:
    import sitecustomize
except ImportError:
    sys.modules["sitecustomize"] = _own
'''
_END_SECONDS = 10.0
_LEFT_SECONDS = 10.0
"""Longest time until a run's processes are gone after its end."""
LOOK_SECONDS = 0.02


class RehearsalOptions(Struct, frozen=True, kw_only=True):
    spec: RunSpec
    folder: Path
    kinds: tuple[Kind, ...]
    tolerance: float
    source: LossSource
    patience: float
    """Seconds without a step after which the run counts as stuck."""
    inputs: tuple[Path, ...] = ()
    """Paths that are linked into each run's working directory."""
    watched: tuple[Path, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    job: SlurmJob | None = None
    """Each run's job on the cluster; None: they run here."""


class RunWorker(Struct, frozen=True, kw_only=True):
    rank: int
    node: int
    """The node's index in the attempt."""
    host: str
    pid: int


class RunMembers:
    def __init__(self, paths: RunPaths) -> None:
        self.paths = paths
        self._files: dict[Path, EventFile] = {}
        self._ranks: dict[tuple[Place, int], tuple[int, ...]] = {}
        self._pids: dict[tuple[Place, int], tuple[str, tuple[int, ...]]] = {}

    def read(self) -> None:
        for attempt in self.paths.begun_attempts():
            for path in event_files(attempt.events):
                if path not in self._files:
                    self._files[path] = EventFile(path, attempt=attempt.number)
                for line in self._files[path].read() or ():
                    value, node = line.value, line.writer
                    if line.name == "round_final":
                        self._ranks[(line.attempt, value["round"]), node] = tuple(value.get("ranks", ()))
                    if line.name == "workers_started":
                        self._pids[(line.attempt, value["round"]), node] = (line.host, tuple(value.get("pids", ())))

    @property
    def place(self) -> Place | None:
        """The newest round whose workers have been started."""
        return max((place for place, _ in self._pids), default=None)

    def workers(self) -> list[RunWorker]:
        place, found = self.place, []
        for (where, node), (host, pids) in self._pids.items():
            if where == place:
                ranks = self._ranks.get((where, node), ())
                found += [
                    RunWorker(rank=rank, node=node, host=host, pid=pid) for rank, pid in zip(ranks, pids, strict=False)
                ]
        return sorted(found, key=lambda worker: worker.rank)


class LiveRun(ABC):
    """A run, from its start to its end. For one thread."""

    def __init__(self, options: RehearsalOptions, spec: RunSpec, name: str, names: FileNames) -> None:
        """Make its folders. The run gets its own id, working directory and arguments; `names` learns from it."""
        self.options = options
        folder = self.folder = options.folder / name
        self.work = folder / "work"
        self.names = names
        journals, hook = folder / "journal", folder / "hook"
        for path in (self.work, journals, hook):
            path.mkdir(parents=True)
        (hook / "sitecustomize.py").write_text(_HOOK)
        for path in options.inputs:
            (self.work / path.name).symlink_to(path)
        arguments = tuple(word.replace("{folder}", str(self.work)) for word in spec.entrypoint.args)
        self.spec = replace(
            spec,
            uid=secrets.token_hex(16),
            run_id=new_run_id(spec.name),
            cwd=str(self.work),
            entrypoint=replace(spec.entrypoint, args=arguments),
        )
        self.runs_dir = folder / "runs"
        self.paths = RunPaths(self.runs_dir / self.spec.run_id)
        python_path = os.pathsep.join(filter(None, (str(hook), options.env.get("PYTHONPATH"))))
        self.env = {**options.env, JOURNAL_VARIABLE: str(journals), "PYTHONPATH": python_path}
        self.journal = RunJournal(journals, paths=self.paths, work=self.work, source=options.source)
        self.members = RunMembers(self.paths)
        self.log = folder / "job.log"
        self.is_queued = False
        self.code: int | None = None
        """Its exit code, after its last look; None: it got stuck."""
        self.started = 0.0
        self.folders = (self.work, *options.watched)
        self.saved_at: list[float] = []
        """Times at which this process saw a written file that may be a checkpoint."""
        self._files = SavedFiles(self.folders, names)

    @abstractmethod
    def start(self) -> None: ...

    @abstractmethod
    def poll(self) -> int | None: ...

    @abstractmethod
    def injectors(self) -> Sequence[Injector | RemoteInjector]: ...

    @abstractmethod
    def injector_of(self, node: int) -> Injector | RemoteInjector: ...

    @abstractmethod
    def notice(self) -> None:
        """Announce the end of the job's time, as Slurm does by a signal to its batch script."""

    @abstractmethod
    def restart(self) -> None: ...

    @abstractmethod
    def end(self) -> None: ...

    @abstractmethod
    def leftovers(self) -> list[str]:
        """Find and end its remains a while after its end."""

    def looks(self) -> Iterator[None]:
        """Watch it until it is over (`code`), or has done no step for too long."""
        seen, quiet_since = 0, time.monotonic()
        while (code := self.poll()) is None:
            if len(self.journal.steps) > seen or self.is_queued:
                seen, quiet_since = len(self.journal.steps), time.monotonic()
            if time.monotonic() - quiet_since > self.options.patience:
                return
            yield
            time.sleep(LOOK_SECONDS)
        self.poll()
        self.code = code

    def read(self) -> None:
        self.members.read()
        self.journal.read()
        if self._files.look():
            self.saved_at.append(time.time())

    def is_in_attempt(self, number: int) -> bool:
        """Check that this attempt is the newest one, and has not ended."""
        begun = self.paths.begun_attempts()
        return bool(begun) and begun[-1].number == number and not begun[-1].result_json.exists()

    def result(self) -> StoredResult | None:
        return load_newest_result(self.paths)


class LocalRun(LiveRun):
    def __init__(self, options: RehearsalOptions, spec: RunSpec, name: str, names: FileNames) -> None:
        super().__init__(options, spec, name, names)
        create_run(self.spec, self.runs_dir)
        self._injector = Injector(self.spec.uid, self.folders)
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self.started = time.time()
        with open(self.log, "ab") as log:
            self._process = subprocess.Popen(
                [*module_command("hpc_elastic.launch.local", "main"), str(self.paths.root)],
                cwd=self.work,
                env=self.env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def poll(self) -> int | None:
        code = self._process.poll() if self._process is not None else None
        self.read()
        return code

    def injectors(self) -> Sequence[Injector]:
        return (self._injector,)

    def injector_of(self, node: int) -> Injector:
        return self._injector

    def notice(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGUSR2)

    def restart(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        for _ in range(3):  # a process may be started while the others are looked for
            signal_all(self._injector.processes(), signal.SIGKILL)
        self.start()

    def end(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(_END_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            signal_all(self._injector.processes(), signal.SIGKILL)

    def leftovers(self) -> list[str]:
        deadline = time.monotonic() + _LEFT_SECONDS
        while left := self._injector.processes():
            if time.monotonic() > deadline:
                signal_all(left, signal.SIGKILL)
                return [f"process {proc.pid} ({proc.name}) of {self.spec.run_id}" for proc in left]
            time.sleep(LOOK_SECONDS)
        return []


_ASK_SECONDS = 2.0
_SETTLE_SECONDS = 15.0
"""An ended job without a final result may be on its way back into the queue, and a result may be seen late."""
_JOB_LEFT_SECONDS = 60.0
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
        begun = self.paths.begun_attempts()
        if begun and begun[-1].number != self._attempt:
            with suppress(UnreadableAttemptError):  # it is just being written
                attempt = load_attempt(begun[-1].attempt_json)
                self._attempt, self._nodes, self.started = attempt.number, attempt.nodes, time.time()
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
            return [] if self._is_gone(_JOB_LEFT_SECONDS) else [f"job {self._job}, which has not ended"]
        except SlurmError:
            return []
