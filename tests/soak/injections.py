"""Does the faults to the rig, and undoes those that last."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from hpc_elastic.rehearsal.injector import NotNow
from hpc_elastic.rehearsal.journal import Place
from tests.rigs.slurm_cluster import RigError, SlurmCluster
from tests.rigs.slurm_runs import Run
from tests.soak.faults import Fault, Kind
from tests.soak.journal import Began, Journal

PREEMPTING = "soakhigh"
"""A partition above the run's."""
PLANTED_SECONDS = 30.0


@dataclass(kw_only=True)
class Injection:
    """A fault that was done. Times in seconds by this machine's wall clock."""

    fault: Fault
    at: float
    before: Place
    """The round that trained."""
    node: str = ""
    """Whom it hit; empty: nobody alone."""
    pid: int = 0
    """The worker that it hit, as its node numbers it."""
    host_dead: bool = False
    """Whether the batch host, and so the supervisor, was gone already."""
    undone: threading.Event = field(default_factory=threading.Event)
    undone_at: float | None = None
    """None: it does not last."""
    undo_failed: str = ""
    trained_at: float | None = None
    """When the training went on after it."""
    after: Place | None = None
    explained: str = ""
    """What the run says of it; empty: nothing."""

    @property
    def seconds(self) -> float | None:
        return None if self.trained_at is None else max(0.0, self.trained_at - self.at)


class RunInjector:
    """What reaches into the rig."""

    def __init__(self, cluster: SlurmCluster, run: Run, journal: Journal, folder: Path) -> None:
        self.cluster = cluster
        self.run = run
        self.journal = journal
        self._folder = folder
        self._threads: list[threading.Thread] = []
        self._does: dict[Kind, Callable[[Injection], None]] = {
            Kind.WORKER_KILLED: self._kill_worker,
            Kind.WORKER_SEGFAULT: lambda injection: self._plant(injection, "segfault"),
            Kind.WORKER_EXCEPTION: lambda injection: self._plant(injection, "exception"),
            Kind.WORKER_HANG: lambda injection: self._plant(injection, "hang"),
            Kind.AGENT_KILLED: self._kill_agent,
            Kind.SRUN_KILLED: self._kill_srun,
            Kind.NODE_OFF: self._node_off,
            Kind.BATCH_HOST_OFF: self._batch_host_off,
            Kind.LINK_CUT: self._cut,
            Kind.BLINK: self._cut,
            Kind.FREEZE: self._freeze,
            Kind.HICCUP: self._freeze,
            Kind.SLURMD_STOPPED: self._stop_slurmd,
            Kind.SLURMCTLD_STOPPED: self._stop_slurmctld,
            Kind.STEPD_KILLED: self._kill_stepd,
            Kind.TIME_LIMIT: self._notice,
            Kind.REQUEUE: self._requeue,
            Kind.PREEMPTION: self._preempt,
            Kind.DISK_FULL: self._fill_disk,
        }

    def can_do(self, kind: Kind) -> bool:
        if kind is Kind.DISK_FULL:
            return self.cluster.settings.fs is not None
        if kind is Kind.PREEMPTION:
            return any(PREEMPTING in line for line in self.cluster.settings.extra_lines)
        return True

    def do(self, fault: Fault) -> Injection:
        """Do it now.

        Raises:
            NotNow: The run is not as the fault needs it.
        """
        last = self.journal.last
        assert last is not None
        injection = Injection(fault=fault, at=time.time(), before=last.place, host_dead=not self.has_supervisor())
        self._does[fault.kind](injection)
        if not self._threads or not any(t.name == str(fault.number) for t in self._threads):
            injection.undone.set()
        return injection

    def finish(self) -> None:
        for thread in self._threads:
            thread.join()

    # -- whom ------------------------------------------------------------------------------------

    def batch_host(self) -> str:
        return self.cluster.job_info(self.run.job).get("BatchHost", "")

    def has_supervisor(self) -> bool:
        host = self.batch_host()
        return any("batch" in line and "hpc" in line for _, line in self._of_user(host)) if host else False

    def _member(self, injection: Injection) -> Began:
        members = list(self.journal.members())
        if not members:
            raise NotNow("nobody trains whom it could hit")
        return members[int(injection.fault.pick * len(members))]

    def _node(self, injection: Injection) -> str:
        """A node of the job, spares included."""
        nodes = sorted(name for name in self.cluster.node_names if self._agents(name))
        host = self.batch_host()
        nodes = [name for name in nodes if name != host]
        if not nodes:
            raise NotNow("the job has no node but the batch host")
        return nodes[int(injection.fault.pick * len(nodes))]

    def _of_user(self, node: str) -> list[tuple[int, str]]:
        return self.cluster.node_pids(node, user=self.run.runs.user)

    def _agents(self, node: str) -> list[int]:
        found = re.compile(r"\A\S*python\S* (?:-P )?-c .*hpc_elastic.* agent ")
        return [pid for pid, line in self._of_user(node) if found.search(line)]

    def workers(self, node: str) -> list[int]:
        """The trainers on a node, as numbered outside."""
        return [pid for pid, line in self._of_user(node) if re.search(r"\A\S*python\S* (-\S+ )*\S*trainer\.py ", line)]

    # -- the injections ------------------------------------------------------------------------------------

    def _kill_worker(self, injection: Injection) -> None:
        member = self._member(injection)
        pids = [pid for pid in self.workers(member.node) if inner_pid(pid) == member.pid]
        if not pids:
            raise NotNow(f"the worker {member.pid} on {member.node} is gone")
        injection.node, injection.pid, injection.at = member.node, member.pid, time.time()
        self.cluster.kill_process(member.node, pids[0], signal.SIGKILL)

    def _plant(self, injection: Injection, what: str) -> None:
        member = self._member(injection)
        path = self._folder / "plant" / str(member.rank)
        path.with_suffix(".new").write_text(what)
        os.replace(path.with_suffix(".new"), path)
        path.parent.chmod(0o777)
        deadline = time.monotonic() + PLANTED_SECONDS
        while True:
            self.journal.read()
            for line in self.journal.planted:
                if line["t"] >= injection.at and line["planted"] == what:
                    injection.node, injection.pid, injection.at = line["node"], line["pid"], line["t"]
                    return
            if time.monotonic() > deadline:
                path.unlink(missing_ok=True)
                raise NotNow(f"rank {member.rank} did not take it in {PLANTED_SECONDS:g} s")
            time.sleep(0.05)

    def _kill_agent(self, injection: Injection) -> None:
        injection.node = self._member(injection).node
        injection.at = time.time()
        self.run.kill_agent(injection.node)

    def _kill_srun(self, injection: Injection) -> None:
        host = self.batch_host()
        if injection.host_dead:
            raise NotNow("the batch host is gone, and its sruns with it")
        try:
            self.cluster.kill_process(host, r"\Asrun -N[2-9]", signal.SIGKILL)
        except RigError:
            raise NotNow("no srun of several nodes is left") from None
        injection.node = host

    def _node_off(self, injection: Injection) -> None:
        injection.node = self._node(injection)
        self._power_off(injection)

    def _batch_host_off(self, injection: Injection) -> None:
        if injection.host_dead:
            raise NotNow("it is gone already")
        injection.node = self.batch_host()
        self._power_off(injection)

    def _power_off(self, injection: Injection) -> None:
        injection.at = time.time()
        self.cluster.kill_node(injection.node)
        self._later(injection, lambda: self.cluster.start_node(injection.node, wait=False))

    def _cut(self, injection: Injection) -> None:
        injection.node = self._node(injection)
        injection.at = time.time()
        self.cluster.cut_link(injection.node)
        self._later(injection, lambda: self.cluster.heal_link(injection.node))

    def _freeze(self, injection: Injection) -> None:
        injection.node = self._node(injection)
        injection.at = time.time()
        self.cluster.freeze_node(injection.node)
        self._later(injection, lambda: self.cluster.thaw_node(injection.node))

    def _stop_slurmd(self, injection: Injection) -> None:
        injection.node = self._node(injection)
        self.cluster.kill_process(injection.node, r"\A(\S*/)?slurmd\b", signal.SIGKILL)
        self._later(injection, lambda: self.cluster.start_node(injection.node, booted=False, wait=False))

    def _stop_slurmctld(self, injection: Injection) -> None:
        self.cluster.stop_slurmctld()
        self._later(injection, self.cluster.start_slurmctld)

    def _kill_stepd(self, injection: Injection) -> None:
        injection.node = self._node(injection)
        try:
            self.cluster.kill_process(injection.node, r"slurmstepd: \[\d+\.\d+\]", signal.SIGKILL)
        except RigError:
            raise NotNow(f"{injection.node} has none any more") from None

    def _notice(self, injection: Injection) -> None:
        if injection.host_dead:
            raise NotNow("the batch script that would hear it is gone")
        self._as_user("scancel", "--signal=USR2", "--batch", self.run.job)

    def _requeue(self, injection: Injection) -> None:
        self._as_user("scontrol", "requeue", self.run.job)

    def _preempt(self, injection: Injection) -> None:
        seconds = f"{injection.fault.seconds:g}"
        argv = ["sbatch", "-p", PREEMPTING, f"-N{len(self.cluster.node_names)}", "--exclusive", "-t", "5"]
        argv += ["-o", "/dev/null", f"--wrap=sleep {seconds}"]
        self.cluster.run(argv, user="mallory", check=True)

    def _fill_disk(self, injection: Injection) -> None:
        hosts = self.cluster.node_names
        for host in hosts:
            self._tell(host, "fail", error="ENOSPC", operation="write")
        self._later(injection, lambda: [self._tell(host, "heal") for host in hosts] and None)

    def _tell(self, host: str, command: str, **arguments: object) -> None:
        try:
            self.cluster.tell_client(host, command, **arguments)
        except (RigError, OSError):
            return  # it is off

    def _as_user(self, *argv: str) -> None:
        done = self.cluster.run(list(argv), user=self.run.runs.user)
        if done.returncode != 0:
            raise NotNow(f"{' '.join(argv)}: {done.stderr.strip()}")

    def _later(self, injection: Injection, undo: Callable[[], None]) -> None:
        def wait_and_undo() -> None:
            time.sleep(injection.fault.seconds)
            try:
                undo()
            except Exception as error:
                injection.undo_failed = f"{error!r}"
            injection.undone_at = time.time()
            injection.undone.set()

        thread = threading.Thread(target=wait_and_undo, name=str(injection.fault.number), daemon=True)
        self._threads.append(thread)
        thread.start()


def inner_pid(pid: int) -> int:
    """A process' number on its own host; 0 where it is gone."""
    try:
        with open(f"/proc/{pid}/status") as status:
            return next(int(line.split()[-1]) for line in status if line.startswith("NSpid:"))
    except (OSError, StopIteration):
        return 0
