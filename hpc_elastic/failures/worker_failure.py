"""The two words that every failure gets: whose it is, and who has to do something about it.

One worker's failure, as its agent saw it: what goes into error.json and comes out of it again.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any

from msgspec import Struct

from hpc_elastic.failures.traceback_text import clean_text, cut_end, summary_line


class FailureClass(str, Enum):
    """Whose failure it is."""

    ROOT = "root"
    SYMPTOM = "symptom"
    STOPPED_BY_US = "stopped_by_us"
    HANG = "hang"
    """It gave no sign of life any more, and was ended for that. Never by `classify`: its end alone does not say so."""
    INFRASTRUCTURE = "infrastructure"


class Category(str, Enum):
    """Who has to do something about it."""

    INPUT = "input"
    """The user's call or environment: a script that can't be compiled, a wrong option, a module that isn't there."""
    WORKER = "worker"
    """The user's code, while it ran."""
    PLATFORM = "platform"
    """This package: its agent or supervisor failed."""
    INFRASTRUCTURE = "infrastructure"
    """The node, the network, the filesystem, the memory limit."""


VERSION = 1


class EvidenceSource(str, Enum):
    """Where the words about the failure come from, best first."""

    ERROR_FILE = "error_file"
    """The worker's own error file (torch's ``@record`` or ours)."""
    STDERR = "stderr"
    """Found in what it printed: a traceback, faulthandler's dump, a C++ termination."""
    EXIT = "exit"
    """Only the exit code or the signal is known."""
    EVENT = "event"
    """Only the agent's event tells of it: error.json was not written or has gone."""


class ExitFacts(Struct, frozen=True, kw_only=True):
    """What the agent knows when a worker ended badly."""

    attempt: int
    round: int
    host: str
    node: int
    """Index of the node in Slurm's order."""
    local_rank: int
    global_rank: int
    pid: int
    exitcode: int
    """Negative for a signal, like subprocess."""
    ended_ns: int
    """The agent's wall clock when it learned of the end, nanoseconds since the epoch."""
    ended_uptime_ns: int = 0
    """The same moment by the host's clock that nobody sets (`hpc_elastic.base.clock.uptime_ns`); 0: no agent saw it."""
    oom_kills: int = 0
    """By how much the cgroup's counter rose since the workers started (`cgroup.oom_kill_count`)."""
    core_dumped: bool = False
    stopped_by_agent: bool = False
    """The agent had sent it a signal before it ended."""
    last_step: int | None = None
    """The last step that the worker reported."""


class WorkerFailure(Struct, frozen=True, kw_only=True):
    """A worker's bad end with its evidence. All texts are bounded and free of control characters."""

    attempt: int = 0
    round: int = 0
    host: str = ""
    node: int = -1
    local_rank: int = -1
    global_rank: int = -1
    pid: int = 0
    exitcode: int = 1
    signal: str = ""
    """``SIGSEGV``; empty where no signal ended it."""
    ended_ns: int = 0
    """By the clock of `host`: shown, and compared with other hosts only within the clocks' bounds."""
    ended_uptime_ns: int = 0
    """The same moment by the host's clock that nobody sets: what failures are ordered by. 0: no agent saw it."""
    message: str = ""
    """``ValueError: bad batch``, or ``Signal 9 (SIGKILL) received by PID 4711``."""
    exception_type: str = ""
    traceback: str = ""
    stderr_tail: str = ""
    fingerprint: str = ""
    category: Category = Category.WORKER
    failure_class: FailureClass = FailureClass.ROOT
    reason: str = ""
    """Why it is of that class."""
    retryable: bool = True
    node_suspect: bool = False
    """Whether its words tell of a part of its node that is likely broken."""
    oom_kills: int = 0
    core_dumped: bool = False
    stopped_by_agent: bool = False
    last_step: int | None = None
    source: EvidenceSource = EvidenceSource.EXIT
    error_file: str = ""
    """Path of error.json, where there is one."""
    problem: str = ""
    """What was wrong with the evidence: ``torn: …``; empty where nothing was."""

    def to_json(self) -> dict[str, Any]:
        """As JSON values, with ``version``."""
        value: dict[str, Any] = {"version": VERSION}
        for name in WorkerFailure.__struct_fields__:
            content = getattr(self, name)
            value[name] = content.value if isinstance(content, Enum) else content
        return value

    @classmethod
    def from_json(cls, value: Mapping[str, Any], **overrides: Any) -> WorkerFailure:
        """Read a failure of any version: a key that is missing, unknown or of the wrong type leaves the default.

        Args:
            value: The object under ``hpc_elastic`` in error.json.
            overrides: Fields that the caller knows better (where the file lies tells its round).
        """
        chosen: dict[str, Any] = {}
        for name, default in _DEFAULTS.items():
            if name not in value:
                continue
            content = value[name]
            if name in _ENUMS:
                try:
                    chosen[name] = _ENUMS[name](content)
                except ValueError:
                    pass  # a newer version's word
            elif name == "last_step":
                chosen[name] = content if isinstance(content, int) and not isinstance(content, bool) else None
            elif type(content) is type(default):
                chosen[name] = cut_end(clean_text(content), _TEXT_LIMIT) if isinstance(content, str) else content
        return cls(**{**chosen, **overrides})

    @property
    def headline(self) -> str:
        """The message's line that says what happened."""
        return summary_line(self.message)


_ENUMS: dict[str, type[Enum]] = {"category": Category, "failure_class": FailureClass, "source": EvidenceSource}
_TEXT_LIMIT = 128 << 10


_DEFAULTS: dict[str, Any] = {name: getattr(WorkerFailure(), name) for name in WorkerFailure.__struct_fields__}
