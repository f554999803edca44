"""The loop: one fault after the other, each waited for until the run trains again; and what must hold at the end."""

from __future__ import annotations

import itertools
import json
import math
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpc_elastic.rehearsal import judge as rehearsed
from hpc_elastic.rehearsal.injector import NotNow
from hpc_elastic.rehearsal.journal import LossCurve, StepSeen
from hpc_elastic.rehearsal.judge import (
    InjectionSeen,
    LossComparison,
    Rehearsed,
    attribute_failure,
    compare_losses,
    look_back,
)
from tests.rigs.slurm_cluster import ENDED_STATES, RigError, SlurmCluster
from tests.rigs.slurm_cluster.python_environment import PROJECT
from tests.rigs.slurm_runs import SlurmRuns
from tests.soak import checkpoints
from tests.soak.explain import Asked, Told, explanation
from tests.soak.faults import NATURES, Effect, Fault
from tests.soak.injections import Injection, RunInjector
from tests.soak.journal import Journal

PARTITION = "soaklow"
EXTRA_LINES = (
    f"PartitionName={PARTITION} Nodes=ALL MaxTime=UNLIMITED State=UP PriorityTier=1 PreemptMode=REQUEUE GraceTime=20",
    "PartitionName=soakhigh Nodes=ALL MaxTime=UNLIMITED State=UP PriorityTier=9 PreemptMode=OFF",
)
SLURM_CONF = {"PreemptType": "preempt/partition_prio", "PreemptMode": "REQUEUE"}

STUCK_SECONDS = 180.0
"""Far above what any recovery takes: a run that has not trained for so long hangs."""
CALM_SECONDS = 2.0
END_SECONDS = 120.0
_LOOK = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    partition: str = PARTITION
    """Empty: the rig's own."""
    nodes: str = "2-3"
    spares: int = 1
    pace: float = 0.1
    """Seconds between two steps."""
    ttl: float = 4.0
    hang: float = 6.0
    """Seconds without a sign of life while data is loaded that are a hang; in a step, three times as long."""
    replicas: int | None = None
    """Checkpoints go through the nodes, with so many replicas; None: rank 0 writes to the shared filesystem."""


@dataclass(kw_only=True)
class SoakResult:
    injections: list[Injection] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)
    attempts: int = 0
    rounds: int = 0
    steps: int = 0
    seconds: float = 0.0
    comparison: LossComparison = field(default_factory=LossComparison)


class Soak:
    def __init__(
        self,
        cluster: SlurmCluster,
        *,
        size: Size = Size(),
        say: Callable[[str], None] = print,
        keep: Path | None = None,
    ) -> None:
        self._cluster = cluster
        self._size = size
        self._say = say
        self._keep = keep
        self._runs = SlurmRuns(cluster)
        self._work = self._runs.folder / "work"
        self.result = SoakResult()
        self._began = time.monotonic()
        for folder in (self._work, self._work / "journal", self._work / "plant"):
            folder.mkdir()
            folder.chmod(0o777)
        self._runs.script((Path(__file__).parent / "trainer.py").read_text(), "trainer.py")
        self._submit()

    def _submit(self) -> None:
        size = self._size
        self.journal = Journal(self._work / "journal")
        self.run = self._runs.submit(
            *("--nodes", size.nodes, "--spares", str(size.spares), "-t", "120"),
            *(("-p", size.partition) if size.partition else ()),
            *("--nproc-per-node", "1", "--max-restarts", "3", "--restart-window", "5", "--max-requeues", "500"),
            *("--shutdown-timeout", "5", "--grace", "30", "--rdzv-conf", f"heartbeat_ttl={size.ttl:g}"),
            *("--section-timeouts", f"setup:120,load:{size.hang:g},step:{3 * size.hang:g}"),
            *(checkpoints.options(self._work, size.replicas) if size.replicas is not None else ()),
            *("trainer.py", str(self._work), "--pace", f"{size.pace:g}"),
            *(("--through-nodes",) if size.replicas is not None else ()),
        )
        self.injectors = RunInjector(self._cluster, self.run, self.journal, self._work)

    # -- the loop ------------------------------------------------------------------------------------

    def soak(self, faults: Iterator[Fault], *, seconds: float = math.inf) -> SoakResult:
        """Do one fault after the other until there are no more or the time is over, then end the run and judge it."""
        self._wait_trains("the start")
        for fault in faults:
            if time.monotonic() - self._began > seconds:
                break
            if not self.injectors.can_do(fault.kind):
                continue
            self._sleep(fault.gap)
            self._one(fault)
        self._end()
        self.result.seconds = time.monotonic() - self._began
        return self.result

    def _one(self, fault: Fault) -> None:
        self.journal.read()
        if not self._is_training():
            self._wait_trains(f"before {fault}")
        try:
            injection = self.injectors.do(fault)
        except (NotNow, RigError, AssertionError) as error:
            self.result.skipped.append(f"{fault}: {str(error).splitlines()[0]}")
            self._say(f"{self._clock()} {fault}: not now: {str(error).splitlines()[0]}")
            return
        self.result.injections.append(injection)
        self._say(
            f"{self._clock()} {fault} {injection.node} in attempt {injection.before[0]} round {injection.before[1]}"
        )
        if not self._settle(injection):
            self._stuck(
                f"{fault} on {injection.node or 'the job'}: the run has not trained again in {STUCK_SECONDS:g} s"
            )
            return
        self._heal_nodes()
        injection.explained = self._explain(injection, self._told())
        after = f"attempt {injection.after[0]} round {injection.after[1]}" if injection.after else "?"
        self._say(
            f"{self._clock()}   trains again after {injection.seconds:.1f} s in {after}: "
            f"{injection.explained or 'UNEXPLAINED'}"
        )
        if injection.undo_failed:
            self._complain(f"{fault}: the rig could not undo it: {injection.undo_failed}")
        self._look_for_orphans(fault)

    def _settle(self, injection: Injection) -> bool:
        """Wait until the fault is over and the run trains again, in the same round for a moment."""
        effect = NATURES[injection.fault.kind].effect
        beyond = injection.before if effect is Effect.RESTART else None
        deadline = time.monotonic() + STUCK_SECONDS + injection.fault.seconds
        while time.monotonic() < deadline:
            self._sleep(_LOOK)
            self.journal.read()
            if not injection.undone.is_set() or self._has_ended():
                continue
            last = self.journal.last
            if last is None or (beyond is not None and last.place <= beyond) or not self._is_training():
                continue
            if injection.undone_at is not None and last.at < injection.undone_at + CALM_SECONDS:
                continue  # Slurm requeues a job whose batch host is back from a reboot
            since = next(s.at for s in reversed(self.journal.steps) if s.place == last.place)
            first = next(s.at for s in self.journal.steps if s.place == last.place)
            if last.place != injection.before and last.at - first < CALM_SECONDS:
                continue
            if last.place == injection.before and since - injection.at < CALM_SECONDS + injection.fault.seconds:
                continue
            injection.after = last.place
            changed = injection.before if last.place != injection.before else None
            step = self.journal.first_after(injection.at, beyond=changed)
            injection.trained_at = step.at if step is not None else last.at
            if changed is None:
                injection.trained_at = injection.at + self._pause(injection.at)
            return True
        return False

    def _pause(self, at: float) -> float:
        """The longest time without a step since `at`, in a round that went on; 0 where it was no longer than others."""
        times = [at, *(s.at for s in self.journal.steps if s.at > at)]
        longest = max((b - a for a, b in itertools.pairwise(times)), default=0.0)
        return longest if longest > 5 * self._size.pace + 0.5 else 0.0

    # -- what is looked at ------------------------------------------------------------------------------------

    def _is_training(self) -> bool:
        last = self.journal.last
        return last is not None and time.time() - last.at < 10 * self._size.pace + 0.5

    def _has_ended(self) -> bool:
        return self.journal.final is not None

    def _wait_trains(self, what: str) -> None:
        deadline = time.monotonic() + STUCK_SECONDS
        while True:
            self.journal.read()
            if self._is_training():
                return
            if time.monotonic() > deadline:
                self._stuck(f"{what}: the run does not train after {STUCK_SECONDS:g} s")
                return
            self._sleep(_LOOK)

    def _stuck(self, complaint: str) -> None:
        """Write down all that is known, and begin a new run from the last checkpoint."""
        state = self._cluster.job_info(self.run.job)
        words = {key: state.get(key, "") for key in ("JobState", "Reason", "NodeList", "BatchHost", "Restarts")}
        self._complain(f"{complaint}; {words}; log: {self.run.log[-1500:]}")
        if self._keep is not None:
            with suppress(shutil.Error):  # the run goes on: files come and go
                shutil.copytree(self.run.root, self._keep / f"stuck-{len(self.result.complaints)}", symlinks=True)
            (self._keep / f"stuck-{len(self.result.complaints)}" / "slurm.txt").write_text(self._cluster.logs())
        self._close_books()
        self.injectors.finish()
        self._cluster.heal()
        os.rename(self._work / "journal", self._work / f"journal-{len(self.result.complaints)}")
        (self._work / "journal").mkdir()
        (self._work / "journal").chmod(0o777)
        self._submit()
        self._wait_trains("a new start")

    def _heal_nodes(self) -> None:
        """What a fault has done to Slurm's view of nodes: nobody would come and set them right."""
        for name, state in self._cluster.node_states().items():
            if state.rstrip("*") in ("down", "drained", "draining", "drng", "drain") and not state.endswith("*"):
                self._cluster.undrain(name)

    def _told(self) -> Told:
        done = self._runs.hpc_elastic("report", str(self.run.root), "--format", "json")
        if done.returncode != 0:
            self._complain(f"no report: {done.stderr.strip()[-500:]}")
            return Told(report={"attempts": []}, events=())
        report: dict[str, Any] = json.loads(done.stdout)
        events = [event for number in range(len(report["attempts"])) for event in self.run.events(number)]
        return Told(report=report, events=events)

    def _explain(self, injection: Injection, told: Told) -> str:
        assert injection.trained_at is not None
        asked = Asked(
            fault=injection.fault,
            node=injection.node,
            pid=injection.pid,
            at=injection.at,
            until=injection.trained_at + injection.fault.seconds,
            went_on=injection.after == injection.before,
            host_dead=injection.host_dead,
        )
        return explanation(asked, told)

    def _look_for_orphans(self, fault: Fault) -> None:
        """More trainers on a node than one, or one where nobody trains, and that for a while."""
        deadline = time.monotonic() + 30.0
        while True:
            self.journal.read()
            nodes = {began.node for began in self.journal.members()}
            found = {node: self.injectors.workers(node) for node in self._cluster.node_names}
            too_many = {n: pids for n, pids in found.items() if len(pids) > (1 if n in nodes else 0)}
            if not too_many or not self._is_training():
                return
            if time.monotonic() > deadline:
                self._complain(f"{fault}: workers that belong to no round: {too_many}, and {sorted(nodes)} train")
                return
            self._sleep(0.5)

    # -- the end ------------------------------------------------------------------------------------

    def _end(self) -> None:
        self.injectors.finish()
        self._wait_trains("before the end")
        (self._work / "end").touch()
        try:
            state = self._cluster.wait_job(self.run.job, ENDED_STATES, timeout=END_SECONDS)
            self._say(f"{self._clock()} job {self.run.job} has ended: {state}")
        except RigError as error:
            self._complain(f"a zombie allocation: {error}")
        self._close_books()
        outcome = self.run.result(self.result_attempt())["outcome"]
        if outcome != "succeeded":
            self._complain(f"the run ended as {outcome}")
        self.judge_losses()
        self._wait_nobody_is_left()
        if self._size.replicas is not None:
            self._judge_checkpoints()
        left = self._cluster.run(["squeue", "--noheader"], user="root").stdout.strip()
        if left:
            self._complain(f"jobs are left: {left}")

    def result_attempt(self) -> int:
        return max(int(p.parent.name.partition("-")[2]) for p in self.run.root.glob("attempt-*/result.json"))

    def _close_books(self) -> None:
        """What the run says of itself now holds: is every fault in it?"""
        self.journal.read()
        told = self._told()
        for injection in self.result.injections:
            if injection.trained_at is not None and not injection.explained:
                injection.explained = self._explain(injection, told)
            if not injection.explained:
                self._complain(
                    f"not explained: {injection.fault} {injection.node} pid {injection.pid} "
                    f"at {_clock_of(injection.at)}"
                )
        self.result.attempts += len(told.report["attempts"])
        self.result.rounds += sum(len(attempt["rounds"]) for attempt in told.report["attempts"])
        self.result.steps = self.journal.last.position[0] if self.journal.last else self.result.steps
        for text in self.journal.overlaps()[1:]:
            self._complain(f"two trainings at once: {text}")
        for text in self._uncalled(told):
            self._complain(text)

    def _uncalled(self, told: Told) -> Iterator[str]:
        """Failures of workers at a time when nothing was done to the run."""
        spans = [(d.at - 1.0, max(d.trained_at or math.inf, d.undone_at or 0.0) + 2.0) for d in self.result.injections]
        for attempt in told.report["attempts"]:
            for part in attempt["rounds"]:
                for failure in part["failures"]:
                    at = min(member["ended_ns"] for member in failure["members"]) / 1e9
                    kind = failure["first"]["failure_class"]
                    if kind in ("stopped_by_us", "symptom") or any(a <= at <= b for a, b in spans):
                        continue
                    where = f"attempt {attempt['number']} round {part['index']} ranks {failure['ranks']}"
                    yield f"nobody's fault: {where} at {_clock_of(at)}: {kind}, {failure['first']['message']}"

    def _judge_checkpoints(self) -> None:
        final = self.journal.final
        found = [self.run.events(number) for number in range(self.result_attempt() + 1)]
        for text in (
            *checkpoints.wrong_choices(found, self.journal.began),
            *checkpoints.wrong_folder(self._work / "saved", found, last=final["final"] if final is not None else 0),
            *(f"left on {name}" for name in self.run.checkpoints_on_nodes()),
        ):
            self._complain(text)

    def judge_losses(self) -> None:
        """Complain where a loss is not that of a training that nobody disturbs."""
        final = self.journal.final
        if final is None:
            self._complain("the training has not come to its end")
            return
        self.result.steps = final["final"]
        expected = undisturbed(self.result.steps, self._runs.folder / "undisturbed")
        self.result.comparison = compare_losses(expected, {1: self.journal.steps}, tolerance=1e-9)
        course = LossCurve(expected, started=expected[0].at)
        began = self.journal.steps[0].at
        found = Rehearsed(
            comparison=self.result.comparison,
            injections=tuple(
                _seen(injection, self.journal, course)
                for injection in self.result.injections
                if injection.at >= began  # not of a run that was stuck, and ended
            ),
            first=course.first,
            steps=self.result.steps,
        )
        for finding in attribute_failure(found):
            self._complain(finding.text)
        if not math.isclose(final["loss_sum"], total := sum(step.loss or 0.0 for step in expected), rel_tol=1e-9):
            self._complain(f"the losses in the checkpoint add up to {final['loss_sum']!r}, undisturbed to {total!r}")

    def _wait_nobody_is_left(self) -> None:
        deadline = time.monotonic() + 30
        while left := self.run.left_on_nodes():
            if time.monotonic() > deadline:
                self._complain(f"processes are left: {left}")
                return
            self._sleep(0.5)

    # -- small things ------------------------------------------------------------------------------------

    def _sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def _complain(self, text: str) -> None:
        self.result.complaints.append(text)
        self._say(f"{self._clock()} WRONG: {text}")

    def _clock(self) -> str:
        return f"[{time.monotonic() - self._began:6.1f} s]"


def _seen(injection: Injection, journal: Journal, course: LossCurve) -> InjectionSeen:
    """What the judge of rehearsals finds."""
    fault, nature = injection.fault, NATURES[injection.fault.kind]
    kind = rehearsed.Kind(
        name=fault.kind.value,
        title=nature.title,
        restarts=nature.effect is Effect.RESTART,
        gives_notice=nature.gives_notice,
    )
    done = rehearsed.PlannedFault(number=fault.number, kind=kind, seconds=fault.seconds)
    seen = InjectionSeen(run=1, fault=done, what=injection.node, at=injection.at, before=injection.before)
    return look_back(seen, journal, (), course)


def _clock_of(at: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(at))


def undisturbed(steps: int, folder: Path) -> list[StepSeen]:
    """So many steps with their losses, by the same script in one process that nobody disturbs."""
    for path in (folder, folder / "journal", folder / "plant"):
        path.mkdir(exist_ok=True)
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "RANK": "0", "WORLD_SIZE": "1"}
    argv = [sys.executable, str(Path(__file__).parent / "trainer.py"), str(folder), "--pace", "0", "--last", str(steps)]
    environ = {**os.environ, **address, "PYTHONPATH": str(PROJECT), "GLOO_SOCKET_IFNAME": "lo"}
    subprocess.run(argv, env=environ, capture_output=True, text=True, check=True, timeout=900)
    journal = Journal(folder / "journal")
    journal.read()
    return journal.steps
