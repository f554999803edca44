"""One worker's failure: the one record that goes from its agent through error.json and the event to the report.

The agent makes it of what it saw when the worker ended; `describe_failure` adds what the worker wrote and printed, and
the failure's class. The agent writes it whole into error.json and without its texts into the event ``worker_failed``,
and sums it up for the coordinator. The report reads it back from either.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import Enum
from typing import Any

from msgspec import field

from hpc_elastic.base import codec
from hpc_elastic.base.text import clean_text, cut_end
from hpc_elastic.failures.failure_text import summary_line
from hpc_elastic.failures.ranking import Category, FailureClass, Standing
from hpc_elastic.run.agent_events import WorkerFailed

LOGGED_BEFORE = "logged just before: "
"""Stands in the message of an exception before what may have led to it."""


class EvidenceSource(str, Enum):
    """The place where the evidence of the failure comes from, best first."""

    ERROR_FILE = "error_file"
    STDERR = "stderr"
    """Found in what it printed: a traceback, faulthandler's dump, a C++ termination."""
    STDOUT = "stdout"
    """Found there, since stderr says nothing: ``2>&1 | tee log``."""
    EXIT = "exit"
    EVENT = "event"
    """The agent's event alone: error.json was not written or is gone."""


class WorkerFailure(WorkerFailed, frozen=True, kw_only=True, tag=False):
    """The event's fields, and what stands in error.json alone. All texts are bounded and free of control characters."""

    attempt: int = 0
    round: int = 0
    host: str = ""
    node: int = -1
    global_rank: int = field(default=-1, name="global_rank")
    exception_type: str = ""
    traceback: str = ""
    stderr_tail: str = ""
    category: Category = Category.WORKER
    failure_class: FailureClass = FailureClass.ROOT
    oom_kills: int = 0
    """The cgroup's counter rose by so much since the workers started (`cgroup.oom_kill_count`)."""
    is_nodes_oom: bool = False
    """The counter is the node's: the worker's container has a cgroup of its own."""
    core_dumped: bool = False
    stopped_by_agent: bool = False
    source: EvidenceSource = EvidenceSource.EXIT
    problem: str = ""
    """A fault of the evidence: ``torn: …``; empty where there was none."""

    def to_json(self) -> dict[str, Any]:
        value = codec.to_json(self)
        return {"version": codec.VERSION, **{name: value[name] for name in _PLACE}, **value}

    @classmethod
    def from_json(cls, value: Mapping[str, Any], **overrides: Any) -> WorkerFailure:
        """Read any version: a key that is missing, unknown or of a wrong type leaves the default. `overrides` hold."""
        return cls._of({**codec.readable_fields(cls, value), **overrides})

    @classmethod
    def _of(cls, found: Mapping[str, Any]) -> WorkerFailure:
        texts = {name: cut_end(clean_text(text), _TEXT_LIMIT) for name, text in found.items() if type(text) is str}
        return cls(**{**found, **texts})

    def to_event(self) -> WorkerFailed:
        fields = {name: getattr(self, name) for name in WorkerFailed.__struct_fields__}
        return WorkerFailed(**{**fields, "message": self.headline})

    @classmethod
    def from_event(cls, event: WorkerFailed, **overrides: Any) -> WorkerFailure:
        known = {name: getattr(event, name) for name in WorkerFailed.__struct_fields__}
        enums = codec.readable_fields(cls, {name: known.pop(name) for name in ("category", "failure_class")})
        return cls._of({**known, **enums, "source": EvidenceSource.EVENT, **overrides})

    @property
    def headline(self) -> str:
        return summary_line(self.message)

    @property
    def is_of_logged(self) -> bool:
        """Something else was logged right before its exception, which may follow from that."""
        return f" ({LOGGED_BEFORE}" in self.headline

    @property
    def is_stopped(self) -> bool:
        return self.stopped_by_agent or self.stopped_ns > 0

    @property
    def may_follow_stop(self) -> bool:
        """Its agent ended it, and what it had printed may come from that, or had ended nothing."""
        if self.failure_class is FailureClass.HANG:
            return False  # it was found to hang before it was ended
        return self.is_stopped and (self.is_caught or not 0 < self.printed_ns <= self.stopped_ns)

    @property
    def is_own_cause(self) -> bool:
        """It is known to have failed by itself, whatever its agent did then, and not for another rank."""
        own = (FailureClass.ROOT, FailureClass.HANG, FailureClass.INFRASTRUCTURE)
        return self.failure_class in own and not self.may_follow_stop

    @property
    def is_stop_noise(self) -> bool:
        """It printed its exception at once when its agent ended it: a signal handler that raises, a cleanup."""
        return self.stopped_ns > 0 and self.stopped_ns < self.printed_ns <= self.stopped_ns + _PROVOKED_NS

    def standing(self, at_ns: int | None = None, printed_ns: int | None = None) -> Standing:
        """Stand for `ranking.Ranking`; times by a clock that all ranked failures share, else their one host's."""
        return Standing(
            FailureClass.STOPPED_BY_US if self.is_stop_noise else self.failure_class,
            self.ended_ns if at_ns is None else at_ns,
            rank=self.global_rank,
            step=-1 if self.last_step is None else self.last_step,
            raised=bool(self.exception_type),
            printed_ns=self.printed_ns if printed_ns is None else printed_ns,
            stopped=self.is_stopped,
            may_follow_stop=self.may_follow_stop,
            signal=self.signal,
            lost_connection=self.failure_class is FailureClass.ROOT
            and _LOST_CONNECTION.search(self.headline) is not None,
            fingerprint=self.fingerprint,
        )


_LOST_CONNECTION = re.compile(
    r"Connection(?:Reset|Refused|Aborted)?Error|BrokenPipeError|RemoteDisconnected|IncompleteReadError|ServerDisconnected"
    r"|\A(?:\w+\.)*EOFError|Errno (?:104|111|32)\b|[Cc]onnection (?:reset|refused|aborted|closed|lost)"
)
_PLACE = ("attempt", "round", "host", "node", "local_rank", "global_rank")
_PROVOKED_NS = 500_000_000
"""A stop provokes it within that time; a worker that goes on for longer has not felt it."""
_TEXT_LIMIT = 128 << 10
