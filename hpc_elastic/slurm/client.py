"""Runs Slurm's commands, and turns their output into facts, the site's setup too, and typed errors.

Every call is one process. Without a controller a command takes 9 to 18 s to say so (SlurmUnavailableError).
"""

from __future__ import annotations

import logging
import os
import re
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from msgspec import Struct
from msgspec.structs import replace

from hpc_elastic.base.clock import Clock
from hpc_elastic.errors import UsageError
from hpc_elastic.options.sbatch import parse_array
from hpc_elastic.slurm import commands
from hpc_elastic.slurm.commands import (
    JobId,
    SlurmError,
    SlurmMissingError,
    SlurmUnavailableError,
    SubmissionRefusedError,
    UnknownJobError,
    classify,
    one_line,
)
from hpc_elastic.slurm.job_environment import compress, local_time
from hpc_elastic.slurm.job_state import (
    JobPhase,
    JobState,
    parse_dependents,
    parse_own_jobs,
    parse_sacct,
    parse_show_job,
    parse_squeue,
    parse_submitted,
)

_LINE = re.compile(r"(\S+)\s+= (.*)\Z")
_LEADING_NUMBER = re.compile(r"\d{1,9}", re.ASCII)
# sinfo adds a mark to a state: * not responding, ~ powered down, # powering up, $ reserved, @ to reboot, - planned.
_UNUSABLE = ("down", "drained", "draining", "drain", "fail", "failing", "error", "unknown", "inval", "maint", "future")


class SlurmConfig(Struct, frozen=True, kw_only=True):
    """Times in seconds."""

    version: tuple[int, ...]
    """``(22, 5, 8)``; empty: unknown."""
    kill_wait: int
    """Seconds from SIGTERM to SIGKILL on cancel, time limit and requeue."""
    slurmd_timeout: int
    """A node silent for longer is declared down; 0: never."""
    job_requeue: bool
    has_epilog: bool = False
    """The site runs a program on a node after each job, which may take its time."""
    cluster: str = ""
    now: float | None = None
    """The controller's time when it answered, seconds since the epoch; None: unknown."""

    @property
    def version_text(self) -> str:
        return ".".join(f"{part:02d}" if index == 1 else str(part) for index, part in enumerate(self.version))


def config_fields(text: str) -> dict[str, str]:
    fields: dict[str, str] = {}
    for line in text.splitlines():
        match = _LINE.match(line)
        if match:
            fields.setdefault(match.group(1), match.group(2).strip())
    return fields


def parse_show_config(text: str) -> SlurmConfig:
    fields = config_fields(text)
    return SlurmConfig(
        version=tuple(int(part) for part in re.findall(r"\d{1,9}", fields.get("SLURM_VERSION", ""))[:3]),
        kill_wait=_seconds(fields.get("KillWait"), 30),
        slurmd_timeout=_seconds(fields.get("SlurmdTimeout"), 300),
        job_requeue=fields.get("JobRequeue", "1").startswith("1"),
        cluster=fields.get("ClusterName", ""),
        now=local_time(text.partition("\n")[0].rpartition(" ")[2]),  # Configuration data as of 2026-11-21T02:15:51
        has_epilog=any(fields.get(key, "(null)") not in ("", "(null)", "N/A") for key in ("Epilog", "Epilog[0]")),
    )


def _seconds(value: str | None, default: int) -> int:
    match = _LEADING_NUMBER.match(value or "")
    return int(match.group()) if match else default


class PartitionNodes(Struct, frozen=True, kw_only=True):
    name: str
    default: bool
    names: frozenset[str]
    usable_names: frozenset[str]
    """Not down, drained or failing: busy ones count."""


def parse_sinfo_nodes(text: str) -> tuple[PartitionNodes, ...]:
    nodes: dict[str, dict[str, bool]] = {}
    for line in text.splitlines():
        cells = line.split("|", 4)
        if len(cells) < 3 or not cells[0]:
            continue
        host, partition, state = cells[:3]
        usable = not state.rstrip("*~#!%$@^-+").lower().startswith(_UNUSABLE) and not state.endswith("*")
        nodes.setdefault(partition, {})[host] = usable
    return tuple(
        PartitionNodes(
            name=name.rstrip("*"),
            default=name.endswith("*"),
            names=frozenset(hosts),
            usable_names=frozenset(host for host, is_usable in hosts.items() if is_usable),
        )
        for name, hosts in nodes.items()
    )


logger = logging.getLogger(__name__)


class CommandResult(Struct, frozen=True, kw_only=True):
    rc: int
    stdout: str = ""
    stderr: str = ""


CommandRunner = Callable[..., CommandResult]
"""``runner(argv, timeout=SECONDS)`` runs one command to its end, with the exceptions of `subprocess.run`."""
_JOBS_AT_ONCE = 500
ASKED_AGAIN = 3
"""Slurm signals all processes of a batch script that it ends (seen on 22.05): the command that asks why, too."""


class SubprocessRunner:
    """Runs commands on this host, in a session of their own: a Ctrl-C at our terminal must not cut one in half."""

    def __init__(self, env: Mapping[str, str], *, overruled: Sequence[str] = ()) -> None:
        self._command_env = commands.command_environment(env)
        self._submission_env = commands.submission_environment(env, overruled=overruled)

    def __call__(self, argv: Sequence[str], *, timeout: float) -> CommandResult:
        env = self._submission_env if argv[0] == "sbatch" else self._command_env
        done = subprocess.run(
            list(argv), stdin=subprocess.DEVNULL, capture_output=True, timeout=timeout, env=env,
            start_new_session=True, check=False, encoding="utf-8", errors="surrogateescape",
        )  # fmt: skip
        return CommandResult(rc=done.returncode, stdout=done.stdout, stderr=done.stderr)


class SlurmClient(Struct, eq=False):
    """Slurm's commands as methods. Every one may raise SlurmUnavailableError and SlurmMissingError."""

    runner: CommandRunner
    clock: Clock
    timeout: float = 60.0
    on_answer: Callable[[SlurmUnavailableError | None], None] = lambda error: None
    """Called after each: with the error where the controller did not answer, else with None."""
    log: Callable[[str], object] = logger.info
    _cluster_here: str | None = None

    def submit(self, script: str, *, extra: Sequence[str] = ()) -> JobId:
        argv = commands.sbatch(script, extra=extra)
        try:
            result = self._run("sbatch", argv)
        except SlurmMissingError:
            raise
        except SlurmError as error:
            if (job := parse_submitted(error.facts["stdout"])) is not None:
                self.log(f"sbatch: {error.facts['why']}")
                return job
            if isinstance(error, SlurmUnavailableError):
                raise
            raise SubmissionRefusedError(**error.facts) from None
        job = parse_submitted(result.stdout)
        if job is None:
            why = f"printed {(result.stdout.strip().splitlines() or [''])[-1]!r} instead of a job id"
            raise _failure(SlurmError, what="sbatch", why=why, argv=argv, result=result)
        if note := one_line(result.stderr):
            self.log(f"sbatch: {note}")
        return job

    def find_submitted(self, run_dir: str, *, clusters: str = "") -> JobId | None:
        where = ["-M", clusters] if clusters else []
        argv = ["squeue", *where, "-u", str(os.getuid()), "-h", "-t", "all", "-o", "%F|%k|%o"]
        return parse_own_jobs(self._run("looking for the job", argv).stdout, run_dir)

    def job_state(self, job: JobId) -> JobState | None:
        """The job (of an array: its first record); None: Slurm does not know it (any more)."""
        states = self.job_states(job)
        return next((state for state in states if state.job_id == job.number), states[0] if states else None)

    def job_states(self, job: JobId) -> tuple[JobState, ...]:
        """All records of a job: the tasks of an array. Empty: Slurm does not know it."""
        # Not with -o: so each free text (name, comment, command line) ends its own line, and is taken for no field.
        argv = commands.scontrol(job, "show", "job", str(job))
        try:
            result = self._run(f"looking up job {job}", argv, tries=ASKED_AGAIN)
        except UnknownJobError:
            return ()
        states = self._placed(parse_show_job(result.stdout), job)
        if not states:
            why = "scontrol's answer holds no job"
            raise _failure(SlurmError, what=f"looking up job {job}", why=why, argv=argv, result=result)
        return states

    def queue_states(self, jobs: Sequence[JobId]) -> tuple[JobState, ...]:
        """Jobs of one cluster that Slurm still knows, ended ones included, in one cheap call."""
        try:
            return self._placed(parse_squeue(self._run("looking up jobs", commands.squeue(jobs)).stdout), jobs[0])
        except UnknownJobError:
            return ()

    def accounted(self, jobs: Sequence[JobId]) -> tuple[JobState, ...]:
        """Jobs that the accounting knows, with state and exit code alone; empty: no accounting."""
        try:
            return parse_sacct(self._run("looking up ended jobs", commands.sacct(jobs)).stdout)
        except (SlurmUnavailableError, SlurmMissingError):
            raise
        except SlurmError:
            return ()  # "Slurm accounting storage is disabled"

    def config(self) -> SlurmConfig:
        return parse_show_config(self._run("reading Slurm's configuration", ["scontrol", "show", "config"]).stdout)

    def elsewhere(self, job: JobId) -> str | None:
        if job.cluster and self._cluster_here is None:
            try:
                self._cluster_here = self.config().cluster
            except SlurmMissingError:
                self._cluster_here = ""  # squeue may be there without scontrol: it names the cluster then
        return job.cluster if job.cluster != self._cluster_here else None

    def _placed(self, states: tuple[JobState, ...], job: JobId) -> tuple[JobState, ...]:
        cluster = self.elsewhere(job)
        return states if cluster is None else tuple(replace(state, cluster=cluster) for state in states)

    def requeue(self, job: JobId) -> None:
        self._run(f"requeueing job {job}", commands.scontrol(job, "requeue", str(job)))

    def allow_requeue(self, job: JobId) -> None:
        """Set Requeue=1, which the owner of a --no-requeue job may do."""
        self._run(f"setting Requeue=1 of job {job}", commands.update(job, Requeue="1"))

    def start_now(self, job: JobId, *, delay: float = 0.0) -> None:
        """Waive a pending job's begin time, as after a requeue: it may start in two seconds, or `delay` later."""
        when = f"in {delay:.0f} s" if delay else "now"
        now = None if self.elsewhere(job) else self.config().now
        self._run(f"starting job {job} {when}", commands.update(job, StartTime=commands.soon(delay, now=now)))

    def would_run(self, script: str, *, extra: Sequence[str] = ()) -> str | None:
        """The reason why Slurm would refuse a batch script, or never have nodes for it; None: it would run."""
        try:
            self._run("asking whether the script could run", ["sbatch", "--test-only", *extra, script])
        except (SlurmUnavailableError, SlurmMissingError):
            raise
        except SlurmError as error:
            return str(error.facts["why"])
        return None

    def dependents(self, job: JobId, *, uid: int) -> tuple[str, ...]:
        argv = ["squeue", "-u", str(uid), "-h", "-t", "PENDING", "-o", "%i|%E"]
        found = self._run(f"looking for jobs that wait for {job}", argv)
        return parse_dependents(found.stdout, job.number)

    def exclude_nodes(self, job: JobId, nodes: Sequence[str]) -> None:
        listed = compress(nodes)
        self._run(f"excluding {listed or 'no node'} from job {job}", commands.update(job, ExcNodeList=listed))

    def set_num_nodes(self, job: JobId, least: int, most: int) -> None:
        """Set a pending job's node range (20.11 and 22.05 ask for the shrunk number after a requeue)."""
        wanted = f"{least}-{most}"
        self._run(f"setting the nodes of job {job} to {wanted}", commands.update(job, NumNodes=wanted))

    def cancel(self, job: JobId) -> None:
        """No error for a job that is unknown or has ended; SlurmPermissionError for another user's."""
        with suppress(UnknownJobError):  # some versions are silent about it, and it is what was wanted
            self._run(f"cancelling job {job}", commands.scancel(job))

    def notify(self, job: JobId) -> None:
        """Send the batch script SIGUSR2, as at the time limit: the job is about to end. No effect where none runs."""
        state = self.job_state(job)
        if state is None or state.phase in (JobPhase.PENDING, JobPhase.FINISHED):
            return  # there is no script: scancel would try again for a minute and a half (22.05)
        with suppress(UnknownJobError):  # as in `cancel`
            self._run(f"giving job {job} notice", commands.scancel(job, signal="USR2", batch=True))

    def partitions(self, names: str | None = None) -> tuple[PartitionNodes, ...]:
        argv = ["sinfo", "-N", "-h", "-o", commands.SINFO_FORMAT, *(["-p", names] if names else [])]
        return parse_sinfo_nodes(self._run("counting nodes", argv).stdout)

    def _run(self, what: str, argv: list[str], *, tries: int = 1) -> CommandResult:
        if argv[1] == "-M" and not self.elsewhere(JobId("0", argv[2])):
            del argv[1:3]  # -M takes an accounting that answers, and not every site has one
        try:
            result = self._run_quietly(what, argv, tries=tries)
        except SlurmMissingError:
            raise
        except SlurmError as error:
            self.on_answer(error if isinstance(error, SlurmUnavailableError) else None)
            raise
        self.on_answer(None)
        return result

    def _run_quietly(self, what: str, argv: list[str], *, tries: int) -> CommandResult:
        began = self.clock.monotonic()
        try:
            for _ in range(tries):
                result = self.runner(argv, timeout=self.timeout)
                if result.rc >= 0:
                    break
        except (FileNotFoundError, PermissionError):
            raise SlurmMissingError(
                what=what, why=f"{argv[0]} is not on PATH: no Slurm here, or a container without it", argv=tuple(argv)
            ) from None
        except subprocess.TimeoutExpired:
            seconds = self.clock.monotonic() - began
            raise SlurmUnavailableError(
                what=what, why=f"{argv[0]} did not answer in {seconds:.0f} s", argv=tuple(argv)
            ) from None
        text = result.stderr if result.stderr.strip() else result.stdout
        error = classify(text)
        if result.rc == 0:
            # A question may get only an error, with any exit code; squeue -M prints the cluster's name before.
            asks = argv[0] in ("squeue", "sacct", "sinfo") or "show" in argv
            answer = [line for line in result.stdout.splitlines() if line.strip() and not line.startswith("CLUSTER: ")]
            if not asks or answer or not re.search(r"\b(?:error|fatal):", result.stderr):
                return result
            error = SlurmUnavailableError if error is SlurmError else error
        why = one_line(text) or f"{argv[0]} exited with {result.rc} and printed nothing"
        if error is SlurmUnavailableError:
            why += f" (after {self.clock.monotonic() - began:.0f} s)"
        raise _failure(error, what=what, why=why, argv=argv, result=result)


def _failure(error: type[SlurmError], *, what: str, why: str, argv: Sequence[str], result: CommandResult) -> SlurmError:
    return error(what=what, why=why, argv=tuple(argv), rc=result.rc, stdout=result.stdout, stderr=result.stderr)


def query_job_states(
    client: SlurmClient, jobs: Sequence[JobId], *, warn: Callable[[str], None]
) -> dict[JobId, JobState | None]:
    """Ask each job's controller, and the accounting about jobs that it has forgotten.

    `warn` gets a sentence where Slurm can't be asked.

    Returns:
        None for a job that neither knows. A job that could not be asked about is missing; on another cluster that can't
        be asked, its state is ``UNKNOWN``.
    """
    found: dict[JobId, JobState | None] = {}
    groups: dict[str | None, dict[str, list[JobId]]] = {}
    for job in jobs:
        groups.setdefault(job.cluster, {}).setdefault(job.number.partition("_")[0], []).append(job)
    for cluster, arrays in groups.items():
        # An array is asked about as one.
        all_asked = [(some[0] if len(some) == 1 else JobId(base, cluster), some) for base, some in arrays.items()]
        for begin in range(0, len(all_asked), _JOBS_AT_ONCE):
            asked = all_asked[begin : begin + _JOBS_AT_ONCE]
            some = [job for _, group in asked for job in group]
            try:
                here = _by_job(client.queue_states([job for job, _ in asked]), some)
                forgotten = [job for job, group in asked if any(one not in here for one in group)]
                if forgotten:
                    here = _by_job(client.accounted(forgotten), some) | here
            except SlurmMissingError:
                break
            except SlurmError as error:
                if cluster is None or "-M" not in error.facts["argv"]:
                    warn(f"Slurm does not answer: {error}")
                    return found
                why = f"on cluster {cluster}, not asked here"
                warn(f"job {some[0]} is {why}: {error.why}")
                found |= {job: JobState(job_id=str(job), state="UNKNOWN", reason=why, cluster=cluster) for job in some}
                break
            found |= {job: here.get(job) for job in some}
    return found


def _by_job(states: Sequence[JobState], jobs: Sequence[JobId]) -> dict[JobId, JobState]:
    of_base: dict[str, list[JobState]] = {}
    for state in states:
        base = state.array_job_id or state.job_id.partition("+")[0]  # 70+0: of a het job
        of_base.setdefault(base, []).append(state)
    found: dict[JobId, JobState] = {}
    for job in jobs:
        base, _, task = job.number.partition("_")
        own = of_base.get(base, [])
        # Of a long list of tasks that wait an older squeue shows the beginning alone.
        rest = next((one for one in own if (one.array_task_id or "").rstrip("]").endswith("...")), None)
        match = states_by_task(own).get(int(task), rest) if task.isdecimal() else next(iter(own), None)
        if match is None and len(jobs) == 1 and own:
            match = own[0]
        if match is not None:
            found[job] = match
    return found


def states_by_task(states: Sequence[JobState]) -> dict[int, JobState]:
    """States of an array's tasks; waiting ones have one line for all, as in ``70_[3-5,7%2]``."""
    found: dict[int, JobState] = {}
    for state in states:
        try:
            tasks = parse_array((state.array_task_id or "").strip("[]"))
        except UsageError:
            continue  # a long list is cut: "[0-7,…]"
        found.update(dict.fromkeys(tasks, state))
    return found
