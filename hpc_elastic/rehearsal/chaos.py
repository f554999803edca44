"""Faults in a run that is going on: done to its processes, here or on its nodes, and recorded among its events."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping, Sequence

from hpc_elastic.base.clock import RunClock
from hpc_elastic.errors import UsageError
from hpc_elastic.launch.run_status import RunState, read_status
from hpc_elastic.rehearsal.faults import Fault, Kind
from hpc_elastic.rehearsal.injections import send
from hpc_elastic.rehearsal.injector import Injector, NotNow
from hpc_elastic.rehearsal.members import RunMembers, Worker
from hpc_elastic.rehearsal.remote_injector import RemoteInjector
from hpc_elastic.rehearsal.saves import WrittenNames
from hpc_elastic.rendezvous.state import new_uid
from hpc_elastic.run.attempt import AttemptInfo, UnreadableAttemptError, load_attempt
from hpc_elastic.run.events import EventLog
from hpc_elastic.run.operator_events import FaultPlanted
from hpc_elastic.run.paths import RunPaths
from hpc_elastic.run.spec import load_run_spec
from hpc_elastic.slurm.client import SlurmClient
from hpc_elastic.slurm.commands import JobId
from hpc_elastic.slurm.errors import SlurmError

KINDS = (
    Kind.WORKER_KILLED,
    Kind.WORKER_SEGFAULT,
    Kind.WORKER_HANG,
    Kind.AGENT_KILLED,
    Kind.NODE_KILLED,
    Kind.PREEMPTION,
)
"""What can be done to a run that was started without a thought of faults."""


class Chaos:
    """A run that is going on, and the record of what is done to it."""

    def __init__(self, paths: RunPaths, *, rank: int | None, client: SlurmClient, env: Mapping[str, str]) -> None:
        """Args:
        paths: The run.
        rank: The one that is hit; None: each fault picks one.
        client: Of the run's cluster, where it is a job.
        env: For srun.

        Raises:
            UsageError: it is not one's own, does not train, or has no process that can be reached from here.
        """
        owner = paths.root.stat().st_uid
        if owner != os.geteuid():
            raise UsageError(f"run {paths.run_id} belongs to uid {owner}: faults are done to runs of your own alone")
        self._paths = paths
        self._rank = rank
        self._client = client
        self._env = env
        self._spec = load_run_spec(paths.run_json)
        self._members = RunMembers(paths)
        self._here = Injector(self._spec.uid, (), WrittenNames())
        if not self.is_running():
            raise UsageError(f"run {paths.run_id} does not train now; hpc-elastic status {paths.run_id}")
        self._members.read()
        if self._attempt().job_id is None and not self._here.all():
            raise UsageError(
                f"run {paths.run_id} has no process on this machine and is not a Slurm job: call chaos on the machine "
                "where the run was started"
            )

    def is_running(self) -> bool:
        """Whether its workers train."""
        return read_status(self._paths, clock=RunClock()).state is RunState.TRAINING

    def do(self, fault: Fault) -> str:
        """Do one. Returns what was done, in words."""
        self._members.read()
        workers = [worker for worker in self._within_reach() if self._rank in (None, worker.rank)]
        if not workers:
            which = "" if self._rank is None else f" of rank {self._rank}"
            raise UsageError(f"no worker{which} runs{'' if self._attempt().job_id else ' on this machine'}")
        worker = workers[int(fault.pick * len(workers))]
        try:
            if fault.kind is Kind.PREEMPTION:
                self._record(fault, None)
                self._notify()
                return f"{fault.title}: the job"
            return f"{fault.title}: {self._send(fault, worker)}"
        except NotNow as reason:
            raise UsageError(f"{fault.title}: {reason}") from None

    def _send(self, fault: Fault, worker: Worker) -> str:
        injector = self._injector_of(worker)
        try:
            self._record(fault, worker)
            return send(fault.kind, worker, injector, agents=self._members.agents(), cluster=self._spec.cluster)
        finally:
            if isinstance(injector, RemoteInjector):
                injector.close()

    def _record(self, fault: Fault, worker: Worker | None) -> None:
        """Before the fault: its report may be written at once."""
        place = self._members.place
        assert place is not None
        is_alone = fault.kind not in (Kind.AGENT_KILLED, Kind.NODE_KILLED)
        event = FaultPlanted(
            round=place[1],
            fault=fault.kind.value,
            node=-1 if worker is None else worker.node,
            host="" if worker is None else worker.host,
            rank=worker.rank if worker is not None and is_alone else -1,
            pid=worker.pid if worker is not None and is_alone else 0,
            what=fault.title,
        )
        log = EventLog(
            self._paths.attempt(place[0]).events,
            role="operator",
            host=os.uname().nodename,
            node=-1,
            uid=new_uid(-1, os.uname().nodename, RunClock()),
            clock=RunClock(),
        )
        log.write(event)
        log.close()

    # -- whom it can hit -------------------------------------------------------------------------------------------

    def _attempt(self) -> AttemptInfo:
        place = self._members.place
        try:
            return load_attempt(self._paths.attempt(place[0] if place is not None else 0).attempt_json)
        except UnreadableAttemptError as error:
            raise UsageError(str(error)) from None

    def _within_reach(self) -> Sequence[Worker]:
        workers = self._members.workers()
        if self._attempt().job_id is not None:
            return workers
        own = {proc.pid for proc in self._here.of_workers()}
        return [worker for worker in workers if worker.pid in own]

    def _injector_of(self, worker: Worker) -> Injector | RemoteInjector:
        attempt = self._attempt()
        if attempt.job_id is None or worker.node >= len(attempt.nodes):
            return self._here
        injector = RemoteInjector(JobId(attempt.job_id), attempt.nodes[worker.node], self._spec.uid, env=self._env)
        injector.check()
        return injector

    def _notify(self) -> None:
        job_id, supervisor = self._attempt().job_id, self._members.supervisor()
        if job_id is not None:
            try:
                self._client.notify(JobId(job_id))
            except SlurmError as error:
                raise NotNow(error.why) from None
        elif supervisor is None:
            raise NotNow("its supervisor is gone")
        else:
            os.kill(supervisor, signal.SIGUSR2)
