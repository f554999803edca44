"""A run directory: its layout, and the two records of each execution of the job; its outcomes, and their exit codes.

attempt.json is written before the agents start, result.json at the end. docs/reference/files.md has the whole layout,
docs/reference/exit-codes.md all codes.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from enum import Enum, IntEnum
from functools import partial
from pathlib import Path
from typing import TypeGuard

from msgspec import Struct, field
from msgspec.structs import replace

from hpc_elastic.base import codec
from hpc_elastic.base.files import Unreadable
from hpc_elastic.errors import UnreadableFileError

RUN_ID = "[A-Za-z0-9][A-Za-z0-9._-]{0,99}"
"""A pattern of Python's and of POSIX: the whole text of a run's id, which is a folder's name, and no shell's syntax."""


def _number(pattern: re.Pattern[str], name: str) -> int | None:
    match = pattern.match(name)
    return int(match.group(1)) if match else None


# ``attempt-007`` → 7; None for any other name.
attempt_number = partial(_number, re.compile(r"attempt-(\d{3,})\Z"))
round_index = partial(_number, re.compile(r"round-(\d{3,})\Z"))
task_index = partial(_number, re.compile(r"task-(\d+)\Z", re.ASCII))
rank_index = partial(_number, re.compile(r"rank-(\d{5,})\Z"))


class _File:
    """A path below `root`, as an attribute of the folder's type."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, folder: RankPaths | AttemptPaths | RunPaths, kind: type | None = None) -> Path:
        return folder.root / self._name


class RankPaths(Struct, frozen=True):
    root: Path

    stdout = _File("stdout.log")
    stderr = _File("stderr.log")
    error_file = _File("error.json")
    stacks = _File("stacks.txt")
    result_pickle = _File("result.pkl")
    exception_pickle = _File("exception.pkl")


class AttemptPaths(Struct, frozen=True):
    root: Path

    attempt_json = _File("attempt.json")
    store = _File("store")
    output = _File("output.log")
    records = _File("records.log")
    events = _File("events")
    result_json = _File("result.json")
    report_json = _File("report.json")
    report_text = _File("report.txt")
    report_html = _File("report.html")
    supervisor_error_file = _File("supervisor.error.json")
    suspicions = _File("suspicions")
    slow_ranks = _File("slow-ranks")
    requeue_asked = _File("requeue-asked.json")
    checkpoint = _File("checkpoint")
    checkpoints = _File("checkpoints")

    @property
    def number(self) -> int:
        return attempt_number(self.root.name) or 0

    def agent_error_file(self, node: int) -> Path:
        return self.root / f"agent-{node:05d}.error.json"

    def heartbeats(self, node: int) -> Path:
        return self.root / "heartbeats" / f"node-{node:05d}.json"

    def setup_log(self, node: int) -> Path:
        return self.root / "setup" / f"node-{node:05d}.log"

    def health_probe(self, node: int, uid: str) -> Path:
        return self.root / "health" / f"node-{node:05d}-{uid}"

    def round_dir(self, round_index: int) -> Path:
        return self.root / f"round-{round_index:03d}"

    def rank_checkpoint(self, global_rank: int) -> Path:
        return self.checkpoint / f"rank-{global_rank:05d}.pkl"

    def rank(self, round_index: int, global_rank: int) -> RankPaths:
        return RankPaths(self.round_dir(round_index) / f"rank-{global_rank:05d}")


class RunPaths(Struct, frozen=True):
    """The files of one run. `root` is absolute."""

    root: Path

    run_json = _File("run.json")
    preload = _File("preload.json")
    secret = _File("secret")
    script = _File("job.sbatch")
    job_log = _File("job.log")
    nodes_json = _File("nodes.json")
    pace_json = _File("pace.json")
    call_pickle = _File("call.pkl")
    launcher_json = _File("launcher.json")
    latest = _File("latest")

    @property
    def run_id(self) -> str:
        """The folder's name; for an array's task ``<the array's>_<k>``, Slurm's notation of such jobs."""
        task = task_index(self.root.name)
        return self.root.name if task is None else f"{self.root.parent.name}_{task}"

    def task(self, index: int) -> RunPaths:
        return RunPaths(self.root / f"task-{index}")

    def attempt(self, number: int) -> AttemptPaths:
        return AttemptPaths(self.root / f"attempt-{number:03d}")

    def attempts(self) -> list[AttemptPaths]:
        """The attempts that have begun, the newest last. Raises OSError: the run directory can't be listed."""
        numbers = [number for name in os.listdir(self.root) if (number := attempt_number(name)) is not None]
        return [self.attempt(number) for number in sorted(numbers)]

    def begun_attempts(self) -> list[AttemptPaths]:
        """The same; empty where the run directory can't be listed."""
        try:
            return self.attempts()
        except OSError:
            return []


class Outcome(str, Enum):
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    """Its workers failed, and it gave up."""
    TOO_FEW_NODES = "too_few_nodes"
    CANCELLED = "cancelled"
    PREEMPTED = "preempted"
    """Notice was given: preemption, or the time limit is near."""
    TIMED_OUT = "timed_out"
    SUPERSEDED = "superseded"
    """A later attempt took the run over while this one could not be reached (`launch.supersede`)."""


_NOTICES = {"(time limit)": "near time limit", "(requeue)": "asked to requeue"}


def outcome_text(outcome: str, reason: str = "") -> str:
    """The outcome for people: only a preemption preempts a run, whatever else made it save and end."""
    other = next((text for meaning, text in _NOTICES.items() if meaning in reason), "")
    return other if other and outcome == Outcome.PREEMPTED.value else outcome.replace("_", " ")


# Exit codes between agents, supervisor and guardian.
STORE_LOST_CODE = 94
"""An agent's: the run's store is gone or was replaced, and another agent in its place could do no better."""
UNHEALTHY_CODE = 95
"""An agent's: its node failed a health check and has left the run; another agent there would find the same."""
REFUSED_CODE = 96
"""An agent's: the run directory has refused it, or not answered, for longer than an agent waits. The other agents'
ends show whether that is its node's fault."""
UNCONFIRMED_CODE = 97
"""A finisher's (an agent's process that would end the attempt): Slurm did not confirm that the job has this node."""


class GivenUp(str, Enum):
    """Why the supervisor starts no further agent on a node: `cause` of its event ``node_given_up``."""

    NOT_STARTED = "not_started"
    COULD_NOT_RUN = "could_not_run"
    """The process there ended before it was an agent: no interpreter, no run directory, a failing TaskProlog."""
    DIED = "died"
    """Its agents took part and ended, too often; or in a way that another one would repeat."""
    UNHEALTHY = "unhealthy"
    STORE_LOST = "store_lost"
    REFUSED = "refused"
    """The run directory's filesystem refused its agent, or did not answer, for longer than an agent waits."""


class ExitCode(IntEnum):
    """The exit codes of every command that ends with a run's end. A run that a signal ended: 128 + the signal's
    number."""

    OK = 0
    WORKERS_FAILED = 1
    USAGE = 2
    REQUEUED = 75
    NOT_RETRYABLE = 93
    """Also returned by a worker to forbid a retry."""
    HANG = 124
    INTERRUPTED = 130
    TERMINATED = 143


WITHOUT_VERDICT = "ended without a verdict: "
"""The end that Slurm reports of an attempt whose supervisor could not write its own begins with this."""
_JOB_ID = re.compile(r"[1-9][0-9]{0,9}(?:[_+][0-9]{1,10})?\Z")


def is_job_id(value: object) -> TypeGuard[str]:
    """Check for a Slurm job's id: ``70``, an array's task ``70_3``, a component of a het job ``70+1``.

    Files that another user may have prepared hold ids, which go to Slurm's commands, where ``--user=root`` would be an
    option.
    """
    return isinstance(value, str) and _JOB_ID.match(value) is not None


class UnreadableAttemptError(UnreadableFileError):
    """attempt.json is missing, torn, or of another version."""


class LocalSupervisor(Struct, frozen=True, kw_only=True):
    """The process that a local run is signalled by."""

    pid: int
    starttime: int
    """Clock ticks since the boot of its host: another process with this pid has another one."""
    run_dir: str
    """The run's own directory: a copy of it names the same process."""


class AttemptInfo(Struct, frozen=True, kw_only=True):
    number: int
    cluster: str
    """``slurm`` or ``local``."""
    nodes: tuple[str, ...]
    """Node names in Slurm's order; the index is the node index everywhere."""
    batch_host: str
    started_ns: int
    """The batch host's wall clock."""
    job_id: str | None = None
    """Slurm's notation: ``70_1`` for an array task."""
    slurm_cluster: str = ""
    slurm_job_ids: tuple[str, ...] = ()
    """SLURM_JOB_ID of this attempt and of those before it, each once, the newest first: a follow-on job has its own."""
    restart_count: int = 0
    requeue_armed: bool = False
    requeue_reason: str = ""
    requeue_way: str = "requeue"
    """``requeue``, or ``chain`` for a follow-on job."""
    kill_wait: float | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    supervisor: LocalSupervisor | None = None
    """Set for a run on one machine."""

    def save(self, path: Path) -> None:
        codec.save(path, self, durable=True)


def load_attempt(path: Path) -> AttemptInfo:
    found = codec.load(path, AttemptInfo)
    if isinstance(found, Unreadable):
        raise UnreadableAttemptError(path=str(path), why=found, errno=found.errno)
    if not (found.job_id is None or is_job_id(found.job_id)):
        raise UnreadableAttemptError(path=str(path), why=f"unreadable: job_id {found.job_id!r} is not a job id")
    return found


class StoredResult(Struct, frozen=True, kw_only=True):
    outcome: str
    reason: str
    exit_code: int
    action: str
    decision: str
    fingerprint: str = ""
    step: int = -1
    idle: int = 0
    """Number of attempts in a row, this one included, that ended by a failure without progress."""
    next_job: str = ""
    """The follow-on job's id, where the next attempt is another job's."""
    notice: str = ""
    """The notice after which the workers were asked to save and end: ``preemption``, ``time limit``, ``requeue``."""

    def save(self, path: Path) -> None:
        codec.save(path, self, durable=True)


def load_result(path: Path) -> StoredResult | None:
    found = codec.load(path, StoredResult)
    if isinstance(found, Unreadable):
        return None
    return found if is_job_id(found.next_job) else replace(found, next_job="")


def load_newest_result(paths: RunPaths) -> StoredResult | None:
    begun = paths.begun_attempts()
    return load_result(begun[-1].result_json) if begun else None
