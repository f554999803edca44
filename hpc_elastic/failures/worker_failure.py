"""One worker's failure: the one record that goes from its agent through error.json and the event to the report. Pure.

The agent makes it of what it saw when the worker ended; `describe_failure` adds what the worker wrote and printed, and
the failure's class. The agent writes it whole into error.json and without its texts into the event ``worker_failed``,
and sums it up for the coordinator. The report reads it back from either.

An excerpt is the part of its traceback, or of its output, that a report has room for. The cause stands at the end of a
traceback, but the line to look at is the innermost one of the user's own code: where libraries' frames fill the end,
that frame is shown above them. A dump of faulthandler has the innermost call first.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from enum import Enum
from itertools import groupby
from typing import Any

from msgspec import Struct, field
from msgspec.structs import asdict

from hpc_elastic.base import codec
from hpc_elastic.base.text import clean_lines, clean_text, cut_end
from hpc_elastic.failures.failure_text import CONNECTORS, HEADER, Frame, summary_line, user_frames
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
        known = {**asdict(event), "source": EvidenceSource.EVENT, **overrides}
        for name, kind in (("category", Category), ("failure_class", FailureClass)):
            with suppress(ValueError):  # a newer version's
                known[name] = kind(known.pop(name))
        return cls._of(known)

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


_REPEATS = 3
_STACK_WANTED = 12
"""Lines of the stack that a message of many lines leaves room for, and so many of the message are shown in any case."""
_MESSAGE_LEAST = 3
_MOST_FRAME_LINES = 2
_FIRST_CALL_FIRST = "(most recent call first):"
_FRAME = re.compile(r'(?:\s*\| )*\s*File "([^"]+)", line (\d+)(?:,? in (.*))?')


class Excerpt(Struct, frozen=True, kw_only=True):
    name: str
    title: str
    """Python's own first line of a traceback, or why there is nothing; may be empty."""
    lines: tuple[str, ...]


def user_frame(failure: WorkerFailure) -> Frame | None:
    found = _user_line(failure, clean_lines(failure.traceback)) if failure.traceback else None
    return found[1] if found is not None else None


def make_excerpt(failure: WorkerFailure, *, lost: str = "", most: int | None = None) -> Excerpt | None:
    """Choose at most `most` lines, with the title; None where its signal says all. `lost`: why there are none."""
    if failure.traceback:
        body = clean_lines(failure.traceback)
        title = body.pop(0) if body and body[0] == HEADER else ""
        return Excerpt(name="traceback", title=title, lines=tuple(_shortened(failure, body, most)))
    if failure.stderr_tail:
        body = fold_repeats(clean_lines(failure.stderr_tail))
        room = len(body) if most is None else max(1, most - 2)
        return Excerpt(name="stderr", title="", lines=tuple(_end_of(body, room)))
    if lost:
        return Excerpt(name="stderr", title=lost, lines=())
    if failure.signal:
        return None
    hint = " (sys.exit(1) prints none; or the script closed or redirected it)" if failure.exitcode == 1 else ""
    return Excerpt(name="stderr", title=f"empty, so there is no traceback{hint}", lines=())


def _shortened(failure: WorkerFailure, body: list[str], most: int | None) -> list[str]:
    body = fold_repeats(body)
    if most is None or len(body) <= most - 1:
        return body
    room = max(1, most - 2)
    mine = _user_line(failure, body)
    at, frame = (mine[0], _frame_lines(body, mine[0])) if mine is not None else (None, [])
    if any(_FIRST_CALL_FIRST in line for line in body[:3]):
        if at is None or at < room:
            return [*body[:room], *_left_out(len(body) - room, "lines below")]
        kept, below = max(1, room - len(frame) - 1), len(body) - at - len(frame)
        libraries = _left_out(at - kept, "lines of libraries")
        return [*body[:kept], *libraries, *frame, *_left_out(below, "lines below")]
    start, end = _block(failure, body)
    while end > start and not body[end - 1].strip():
        end -= 1
    if start == 0 and end < len(body):  # a chain whose first exception is the cause: what follows is cut first
        body = [*body[:end], *_left_out(len(body) - end, "lines below")]
    body = _without_long_message(failure, body, room)
    if start > 0 and (chain := _with_its_first(body, room)):
        return chain
    shown = _end_of(body, room)
    if at is None or at >= len(body) - room or room <= len(frame) + 2:
        return shown
    tail = body[-(room - len(frame) - 1) :]
    between = len(body) - len(tail) - at - len(frame)
    return [*_left_out(at, "lines above"), *frame, *_left_out(between, "lines of libraries"), *tail]


def _with_its_first(body: list[str], room: int) -> list[str]:
    """The end of a chain, and above it what it began with: the user's line, and the exception. Empty: no room."""
    end = next(at for at, line in enumerate(body) if line.strip() in CONNECTORS)
    while end > 1 and not body[end - 1].strip():
        end -= 1
    mine = _user_lines(body[:end])
    frame = _frame_lines(body, mine[-1][0]) if mine else []
    first = [*frame, body[end - 1]]
    tail = body[-(room - len(first) - 2) :] if room > len(first) + 6 else []
    if not tail or len(body) - len(tail) <= end:
        return []
    above = mine[-1][0] if mine else end - 1
    return [*_left_out(above, "lines above"), *first, *_left_out(len(body) - len(tail) - end, "lines"), *tail]


def _end_of(body: list[str], room: int) -> list[str]:
    if len(body) <= room + 1:
        return body
    return [*_left_out(len(body) - room, "lines above"), *body[-room:]]


def _left_out(count: int, what: str) -> list[str]:
    return [f"... {count} {what} (--all shows them)"] if count else []


def _without_long_message(failure: WorkerFailure, body: list[str], room: int) -> list[str]:
    traceback, text, message = failure.traceback.rstrip("\n"), failure.message.rstrip("\n"), 0
    if traceback and text and HEADER not in text:  # else it quotes another's traceback
        first = traceback.split("\n")[-text.count("\n") - 1 :][0]
        is_at_end = first.rstrip().endswith(text.split("\n", 1)[0].rstrip()[-60:])
        message = text.count("\n") + 1 if is_at_end else 0
    kept = min(message, max(_MESSAGE_LEAST, room - _STACK_WANTED))
    if message - kept > 1 and room > _MESSAGE_LEAST:
        return [*body[: len(body) - message + kept], *_left_out(message - kept, "more lines")]
    return body


def _block(failure: WorkerFailure, body: list[str]) -> tuple[int, int]:
    """The lines of the exception that is the failure's, of several in a chain: `body` from the one to the other."""
    starts = [0, *(at + 1 for at, line in enumerate(body) if line.strip() in CONNECTORS)]
    ends = [*(at - 1 for at in starts[1:]), len(body)]
    name = failure.exception_type.rsplit(".", 1)[-1]
    words = failure.headline.partition(": ")[2][:40]
    for start, end in zip(starts, ends, strict=True):
        if any(name and name in line and words in line and line[:1].strip() for line in body[start:end]):
            return start, end
    return starts[-1], ends[-1]


def _user_line(failure: WorkerFailure, body: list[str]) -> tuple[int, Frame] | None:
    """The innermost frame of the user's code in the failure's own exception, else in any of the chain."""
    found = _user_lines(body)
    if not found:
        return None
    if any(_FIRST_CALL_FIRST in line for line in body[:3]):
        return found[0]
    start, end = _block(failure, body)
    return next((one for one in reversed(found) if start <= one[0] < end), found[-1])


def _user_lines(body: list[str]) -> list[tuple[int, Frame]]:
    found = []
    for at, line in enumerate(body):
        if match := _FRAME.match(line):
            frame = Frame(file=match[1], line=int(match[2]), function=match[3] or "")
            found += [(at, frame)] if user_frames([frame]) else []
    return found


def _frame_lines(body: list[str], at: int) -> list[str]:
    return [
        body[at],
        *(line for line in body[at + 1 : at + _MOST_FRAME_LINES] if not _FRAME.match(line) and line[:4].isspace()),
    ]


def fold_repeats(lines: list[str]) -> list[str]:
    folded: list[str] = []
    for line, alike in groupby(lines):
        count = len(list(alike))
        if count > _REPEATS + 1 and line.lstrip().startswith("File "):
            indent = line[: len(line) - len(line.lstrip())]
            folded += [*[line] * _REPEATS, f"{indent}[Previous line repeated {count - _REPEATS} more times]"]
        else:
            folded += [line] * count
    return folded
