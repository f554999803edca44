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

from tests.rigs.slurm_cluster import RigError, SlurmCluster
from tests.rigs.slurm_runs import Run
from tests.soak.faults import Fault, Kind
from tests.soak.journal import Began, Journal, Place

PREEMPTING = "soakhigh"
"""A partition above the run's."""
PLANTED_SECONDS = 30.0


class NotNow(Exception):
    """The fault can't be done to the run as it is; why."""


@dataclass(kw_only=True)
class Deed:
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
    undo_failed: str = ""
    trained_at: float | None = None
    """When the training went on after it."""
    after: Place | None = None
    explained: str = ""
    """What the run says of it; empty: nothing."""

    @property
    def seconds(self) -> float | None:
        return None if self.trained_at is None else max(0.0, self.trained_at - self.at)


class Hands:
    """What reaches into the rig."""

    def __init__(self, cluster: SlurmCluster, run: Run, journal: Journal, folder: Path) -> None:
        self.cluster = cluster
        self.run = run
        self.journal = journal
        self._folder = folder
        self._threads: list[threading.Thread] = []
        self._does: dict[Kind, Callable[[Deed], None]] = {
            Kind.WORKER_KILLED: self._kill_worker,
            Kind.WORKER_SEGFAULT: lambda deed: self._plant(deed, "segfault"),
            Kind.WORKER_EXCEPTION: lambda deed: self._plant(deed, "exception"),
            Kind.WORKER_HANG: lambda deed: self._plant(deed, "hang"),
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
            Kind.NOTICE: self._notice,
            Kind.REQUEUE: self._requeue,
            Kind.PREEMPTION: self._preempt,
            Kind.DISK_FULL: self._fill_disk,
        }

    def can_do(self, kind: Kind) -> bool:
        """Whether this rig can."""
        if kind is Kind.DISK_FULL:
            return self.cluster.settings.fs is not None
        if kind is Kind.PREEMPTION:
            return any(PREEMPTING in line for line in self.cluster.settings.extra_lines)
        return True

    def do(self, fault: Fault) -> Deed:
        """Do it now.

        Raises:
            NotNow: The run is not as the fault needs it.
        """
        last = self.journal.last
        assert last is not None
        deed = Deed(fault=fault, at=time.time(), before=last.place, host_dead=not self.has_supervisor())
        self._does[fault.kind](deed)
        if not self._threads or not any(t.name == str(fault.number) for t in self._threads):
            deed.undone.set()
        return deed

    def finish(self) -> None:
        """Wait until all that lasts is undone."""
        for thread in self._threads:
            thread.join()

    # -- whom ------------------------------------------------------------------------------------

    def batch_host(self) -> str:
        return self.cluster.job_info(self.run.job).get("BatchHost", "")

    def has_supervisor(self) -> bool:
        """Whether the batch script's process lives."""
        host = self.batch_host()
        return any("batch" in line and "hpc" in line for _, line in self._of_user(host)) if host else False

    def _member(self, deed: Deed, *, among: Callable[[Began], bool] = lambda _: True) -> Began:
        members = [began for began in self.journal.members() if among(began)]
        if not members:
            raise NotNow("nobody trains whom it could hit")
        return members[int(deed.fault.pick * len(members))]

    def _node(self, deed: Deed) -> str:
        """A node of the job, spares included."""
        nodes = sorted(name for name in self.cluster.node_names if self._agents(name))
        host = self.batch_host()
        nodes = [name for name in nodes if name != host]
        if not nodes:
            raise NotNow("the job has no node but the batch host")
        return nodes[int(deed.fault.pick * len(nodes))]

    def _of_user(self, node: str) -> list[tuple[int, str]]:
        return self.cluster.node_pids(node, user=self.run.runs.user)

    def _agents(self, node: str) -> list[int]:
        found = re.compile(r"\A\S*python\S* -c .*hpc_elastic.* agent ")
        return [pid for pid, line in self._of_user(node) if found.search(line)]

    def workers(self, node: str) -> list[int]:
        """The trainers on a node, as numbered outside."""
        return [pid for pid, line in self._of_user(node) if re.search(r"\A\S*python\S* (-\S+ )*\S*trainer\.py ", line)]

    # -- the deeds ------------------------------------------------------------------------------------

    def _kill_worker(self, deed: Deed) -> None:
        member = self._member(deed)
        pids = [pid for pid in self.workers(member.node) if inner_pid(pid) == member.pid]
        if not pids:
            raise NotNow(f"the worker {member.pid} on {member.node} is gone")
        deed.node, deed.pid, deed.at = member.node, member.pid, time.time()
        self.cluster.kill_process(member.node, pids[0], signal.SIGKILL)

    def _plant(self, deed: Deed, what: str) -> None:
        member = self._member(deed)
        path = self._folder / "plant" / str(member.rank)
        path.with_suffix(".new").write_text(what)
        os.replace(path.with_suffix(".new"), path)
        path.parent.chmod(0o777)
        deadline = time.monotonic() + PLANTED_SECONDS
        while True:
            self.journal.read()
            for line in self.journal.planted:
                if line["t"] >= deed.at and line["planted"] == what:
                    deed.node, deed.pid, deed.at = line["node"], line["pid"], line["t"]
                    return
            if time.monotonic() > deadline:
                path.unlink(missing_ok=True)
                raise NotNow(f"rank {member.rank} did not take it in {PLANTED_SECONDS:g} s")
            time.sleep(0.05)

    def _kill_agent(self, deed: Deed) -> None:
        deed.node = self._member(deed).node
        deed.at = time.time()
        self.run.kill_agent(deed.node)

    def _kill_srun(self, deed: Deed) -> None:
        host = self.batch_host()
        if deed.host_dead:
            raise NotNow("the batch host is gone, and its sruns with it")
        try:
            self.cluster.kill_process(host, r"\Asrun -N[2-9]", signal.SIGKILL)
        except RigError:
            raise NotNow("no srun of several nodes is left") from None
        deed.node = host

    def _node_off(self, deed: Deed) -> None:
        deed.node = self._node(deed)
        self._power_off(deed)

    def _batch_host_off(self, deed: Deed) -> None:
        if deed.host_dead:
            raise NotNow("it is gone already")
        deed.node = self.batch_host()
        self._power_off(deed)

    def _power_off(self, deed: Deed) -> None:
        deed.at = time.time()
        self.cluster.kill_node(deed.node)
        self._later(deed, lambda: self.cluster.start_node(deed.node, wait=False))

    def _cut(self, deed: Deed) -> None:
        deed.node = self._node(deed)
        deed.at = time.time()
        self.cluster.cut_link(deed.node)
        self._later(deed, lambda: self.cluster.heal_link(deed.node))

    def _freeze(self, deed: Deed) -> None:
        deed.node = self._node(deed)
        deed.at = time.time()
        self.cluster.freeze_node(deed.node)
        self._later(deed, lambda: self.cluster.thaw_node(deed.node))

    def _stop_slurmd(self, deed: Deed) -> None:
        deed.node = self._node(deed)
        self.cluster.kill_process(deed.node, r"\A(\S*/)?slurmd\b", signal.SIGKILL)
        self._later(deed, lambda: self.cluster.start_node(deed.node, booted=False, wait=False))

    def _stop_slurmctld(self, deed: Deed) -> None:
        self.cluster.stop_slurmctld()
        self._later(deed, self.cluster.start_slurmctld)

    def _kill_stepd(self, deed: Deed) -> None:
        deed.node = self._node(deed)
        try:
            self.cluster.kill_process(deed.node, r"slurmstepd: \[\d+\.\d+\]", signal.SIGKILL)
        except RigError:
            raise NotNow(f"{deed.node} has none any more") from None

    def _notice(self, deed: Deed) -> None:
        if deed.host_dead:
            raise NotNow("the batch script that would hear it is gone")
        self._as_user("scancel", "--signal=USR2", "--batch", self.run.job)

    def _requeue(self, deed: Deed) -> None:
        self._as_user("scontrol", "requeue", self.run.job)

    def _preempt(self, deed: Deed) -> None:
        seconds = f"{deed.fault.seconds:g}"
        argv = ["sbatch", "-p", PREEMPTING, f"-N{len(self.cluster.node_names)}", "--exclusive", "-t", "5"]
        argv += ["-o", "/dev/null", f"--wrap=sleep {seconds}"]
        self.cluster.run(argv, user="mallory", check=True)

    def _fill_disk(self, deed: Deed) -> None:
        hosts = self.cluster.node_names
        for host in hosts:
            self._tell(host, "fail", error="ENOSPC", operation="write")
        self._later(deed, lambda: [self._tell(host, "heal") for host in hosts] and None)

    def _tell(self, host: str, command: str, **arguments: object) -> None:
        try:
            self.cluster.tell_client(host, command, **arguments)
        except (RigError, OSError):
            return  # it is off

    def _as_user(self, *argv: str) -> None:
        done = self.cluster.run(list(argv), user=self.run.runs.user)
        if done.returncode != 0:
            raise NotNow(f"{' '.join(argv)}: {done.stderr.strip()}")

    def _later(self, deed: Deed, undo: Callable[[], None]) -> None:
        def wait_and_undo() -> None:
            time.sleep(deed.fault.seconds)
            try:
                undo()
            except Exception as error:
                deed.undo_failed = f"{error!r}"
            deed.undone.set()

        thread = threading.Thread(target=wait_and_undo, name=str(deed.fault.number), daemon=True)
        self._threads.append(thread)
        thread.start()


def inner_pid(pid: int) -> int:
    """A process' number on its own host; 0 where it is gone."""
    try:
        with open(f"/proc/{pid}/status") as status:
            return next(int(line.split()[-1]) for line in status if line.startswith("NSpid:"))
    except (OSError, StopIteration):
        return 0
