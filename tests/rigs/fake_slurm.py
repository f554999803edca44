"""A Slurm for tests of what calls Slurm: a `CommandRunner` that answers with what a real one of that version printed.

It knows jobs that run until they are cancelled, hold, requeue and updates, on nodes n1..n4 and the recording's
partitions. It passes the same contract suite as the commands of a real Slurm.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from msgspec.structs import replace

from hpc_elastic.slurm.client import CommandResult
from hpc_elastic.slurm.commands import SINFO_FORMAT, SQUEUE_FORMAT
from tests.rigs.captures import captured

PARTITIONS = ("main", "short", "lowr", "lowc", "high")
NODES = ("n1", "n2", "n3", "n4")
_ALLOWED_WHILE_RUNNING = {"Requeue", "Comment", "Nice", "JobName"}
# What scontrol says, in all four versions, where no recording holds it (the table of owner's updates).
_NOT_PENDING = "Job is no longer pending execution for job {job}\n"
_BAD_NODE = "Invalid node name specified for job {job}\n"


@dataclass
class FakeJob:
    """One job. `state` is the name of the recording that shows it."""

    number: str
    state: str = "running"
    requeue: int = 1
    restarts: int = 0
    name: str = "job"
    script: str = ""
    dependency: str = ""
    fields: dict[str, str] = field(default_factory=dict)


class FakeSlurm:
    """Call it as a `CommandRunner`; it answers as `version` did."""

    def __init__(self, version: str = "22.05.8") -> None:
        self.version = version
        self.calls: list[list[str]] = []
        self.jobs: dict[str, FakeJob] = {}
        self.reachable = True
        self.hangs = False
        self.missing: set[str] = set()
        self.note = ""
        self.clusters: dict[str, FakeSlurm] = {}
        self.name = "rig"
        self._next = 1000

    def __call__(self, argv: Sequence[str], *, timeout: float) -> CommandResult:
        self.calls.append(list(argv))
        if argv[0] in self.missing:
            raise FileNotFoundError(2, "No such file or directory", argv[0])
        if self.hangs:
            raise subprocess.TimeoutExpired(list(argv), timeout)
        if argv[1] == "-M":
            return self._elsewhere(argv, timeout)
        if not self.reachable:
            return self._no_controller(argv)
        handlers: dict[str, Callable[[Sequence[str]], CommandResult]] = {
            "sbatch": self._sbatch,
            "squeue": self._squeue,
            "scontrol": self._scontrol,
            "scancel": self._scancel,
            "sinfo": self._sinfo,
            "sacct": lambda argv: CommandResult(rc=0),  # nothing has ended long ago
        }
        return handlers[argv[0]](argv[1:])

    # -- commands

    def _elsewhere(self, argv: Sequence[str], timeout: float) -> CommandResult:
        other = self.clusters.get(argv[2])
        if other is None:  # 22.05's words, by its source
            why = f"'{argv[2]}' can't be reached now, or it is an invalid entry for --cluster.  Use 'sacctmgr list"
            return CommandResult(rc=1, stderr=f"{argv[0]}: error: {why} clusters' to see available clusters.\n")
        answer = other([argv[0], *argv[3:]], timeout=timeout)
        # Of a cluster whose controller is down squeue says so, and exits with 0.
        return replace(answer, rc=0) if argv[0] == "squeue" and not other.reachable else answer

    def _sbatch(self, argv: Sequence[str]) -> CommandResult:
        if argv[0] == "--test-only":
            return self._try(argv[1:])
        assert argv[0] == "--parsable", argv
        script = Path(argv[-1])
        if not script.exists():
            return self._answer("err-sbatch-no-such-file", {"nosuch.sh": str(script)})
        text = script.read_text()
        options = [*re.findall(r"^#SBATCH (.*)$", text, re.MULTILINE), *argv[1:-1]]
        job = FakeJob(str(self._next), script=str(script))
        for option in options:
            name, _, value = option.partition("=")
            if name in ("--partition", "-p") and value not in PARTITIONS:
                return self._answer("err-sbatch-bad-partition", {"nosuch": value})
            if name == "--hold":
                job.state = "pending-held"
            elif name == "--no-requeue":
                job.requeue = 0
            elif name == "--dependency":
                job.dependency = value
            elif name == "--job-name":
                job.name = value
        self._next += 1
        self.jobs[job.number] = job
        answer = self._answer("sbatch-parsable", {captured(self.version, "sbatch-parsable")[1].strip(): job.number})
        return replace(answer, stderr=answer.stderr + self.note)

    def _try(self, argv: Sequence[str]) -> CommandResult:
        for option in argv[:-1]:
            name, _, value = option.partition("=")
            if name == "--partition" and value not in PARTITIONS:
                return self._answer("err-sbatch-bad-partition", {"nosuch": value})
        return self._answer("sbatch-test-only")

    def _squeue(self, argv: Sequence[str]) -> CommandResult:
        if "%i|%E" in argv:  # not recorded: the dependency in scontrol's words, as squeue gave it on 22.05
            jobs = [job for job in self.jobs.values() if job.dependency]
            return CommandResult(rc=0, stdout="".join(f"{job.number}|{job.dependency}(unfulfilled)\n" for job in jobs))
        if "%F|%k|%o" in argv:  # not recorded: array's number, comment, script, as tried on 22.05
            return CommandResult(rc=0, stdout="".join(f"{job.number}||{job.script}\n" for job in self.jobs.values()))
        assert argv[argv.index("-o") + 1] == SQUEUE_FORMAT
        wanted = argv[argv.index("-j") + 1].split(",")
        known = [self.jobs[number] for number in wanted if number in self.jobs]
        if not known and len(wanted) == 1:
            return self._answer("err-squeue-unknown-job")
        return CommandResult(rc=0, stdout="".join(self._queue_line(job) for job in known))

    def _scontrol(self, argv: Sequence[str]) -> CommandResult:
        verb = argv[0]
        if argv == ["show", "config"]:
            return self._answer("scontrol-show-config", {"= rig\n": f"= {self.name}\n"})
        if argv[:2] == ["show", "job"]:
            job = self.jobs.get(argv[2])
            if job is None:
                return self._answer("err-scontrol-show-job-unknown")
            return CommandResult(rc=0, stdout=self._job_text(job))
        if verb == "requeue":
            return self._requeue(argv[1])
        assert verb == "update", argv
        keys = dict(item.split("=", 1) for item in argv[1:])
        return self._update(keys.pop("JobId"), keys)

    def _requeue(self, number: str) -> CommandResult:
        job = self.jobs.get(number)
        if job is None:
            return self._answer("err-scontrol-requeue-unknown-job", {"99999": number})
        if not job.requeue:
            return self._answer("err-scontrol-requeue-norequeue-job", {r"re:job \d+": f"job {number}"})
        job.state = "requeued-begintime"
        job.restarts += 1
        return CommandResult(rc=0)

    def _update(self, number: str, keys: dict[str, str]) -> CommandResult:
        job = self.jobs.get(number)
        if job is None:
            return self._answer("err-scontrol-update-unknown-job", {"99999": number})
        if job.state == "cancelled":
            return self._answer("err-scontrol-update-completed-job", {r"re:job \d+": f"job {number}"})
        pending = job.state not in ("running", "restarted-running")
        if not pending and not set(keys) <= _ALLOWED_WHILE_RUNNING:
            return CommandResult(rc=1, stderr=_NOT_PENDING.format(job=number))
        if "ExcNodeList" in keys and not keys["ExcNodeList"]:
            keys["ExcNodeList"] = "(null)"
        elif not set(filter(None, keys.get("ExcNodeList", "").split(","))) <= {*NODES, "n[1-2]", "n[3-4]"}:
            return CommandResult(rc=1, stderr=_BAD_NODE.format(job=number))
        if "Requeue" in keys:
            job.requeue = int(keys["Requeue"])
        if "StartTime" in keys and not job.state.endswith("held"):
            job.state = "restarted-running"
        job.fields.update({key: value for key, value in keys.items() if key in ("ExcNodeList", "NumNodes", "Comment")})
        return CommandResult(rc=0)

    def _scancel(self, argv: Sequence[str]) -> CommandResult:
        job = self.jobs.get(argv[-1])
        if job is not None and not any(flag.startswith("--signal") for flag in argv):
            job.state = "cancelled" if job.state.endswith("running") else "cancelled-pending"
        return self._answer("err-scancel-unknown-job")  # silent, rc 0, for a known one too

    def _sinfo(self, argv: Sequence[str]) -> CommandResult:
        assert argv[argv.index("-o") + 1] == SINFO_FORMAT
        answer = self._answer("sinfo-N-o-drained")
        if "-p" in argv:
            wanted = argv[argv.index("-p") + 1].split(",")
            lines = answer.stdout.splitlines(keepends=True)
            return CommandResult(rc=0, stdout="".join(x for x in lines if x.split("|")[1].rstrip("*") in wanted))
        return answer

    # -- answers

    def _answer(self, name: str, replaced: dict[str, str] | None = None) -> CommandResult:
        rc, out, err = captured(self.version, name)
        for old, new in (replaced or {}).items():
            pattern = old[3:] if old.startswith("re:") else re.escape(old)
            out, err = re.sub(pattern, lambda _, new=new: new, out), re.sub(pattern, lambda _, new=new: new, err)
        return CommandResult(rc=rc, stdout=out, stderr=err)

    def _job_text(self, job: FakeJob) -> str:
        text = captured(self.version, f"scontrol-show-job-{job.state}")[1]
        fields = {
            "JobId": job.number,
            "JobName": job.name,
            "Requeue": str(job.requeue),
            "Restarts": str(job.restarts),
            "Command": job.script,
            **job.fields,
        }
        if "Comment" in fields and not re.search(r"^ *Comment=", text, re.MULTILINE):
            text = f"{text.rstrip()}\n   Comment=\n\n"  # a job without one has no such line
        for key, value in fields.items():
            rest = ".*" if key == "Comment" else r"\S*"  # a text of the user's goes on to the line's end
            text = re.sub(rf"\b{key}={rest}", lambda _, key=key, value=value: f"{key}={value}", text, count=1)
        return text

    def _queue_line(self, job: FakeJob) -> str:
        if job.state.startswith("cancelled"):
            recorded = captured("22.05.8", "squeue-nodefail")[1].replace("NODE_FAIL", "CANCELLED")
        else:
            name = "running" if job.state == "restarted-running" else job.state
            recorded = captured(self.version, f"squeue-{name}")[1]
        return re.sub(r"\A\d+", job.number, recorded)

    def _no_controller(self, argv: Sequence[str]) -> CommandResult:
        version = "24.11.5" if self.version == "26.05.5" else self.version  # not recorded on 26.05
        names = {
            "sbatch": "err-sbatch-no-controller",
            "squeue": "err-squeue-no-controller",
            "scancel": "err-scancel-no-controller",
            "scontrol": "err-scontrol-requeue-no-controller",
            "sinfo": "err-squeue-no-controller",  # not recorded on 20.11; the same words
        }
        rc, out, err = captured(version, names[argv[0]])
        return CommandResult(rc=rc, stdout=out, stderr=err)
