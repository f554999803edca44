"""What kind of failure it is, and what that means for the next step. Pure tables over text and numbers.

A *symptom* is what a healthy rank says when another one is gone; ordering by class before time is what keeps 511 of
them from hiding the one that matters. The words that tell are a table of their own, `failure_patterns`.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence

from hpc_elastic.failures.failure_patterns import SYMPTOM_TYPES, FailurePattern, find_pattern
from hpc_elastic.failures.kinds import Category, FailureClass
from hpc_elastic.light_dataclasses import dataclass

__all__ = [
    "CATEGORY_TABLE",
    "NOT_RETRYABLE_EXIT_CODE",
    "Category",
    "Classification",
    "FailureClass",
    "category_of",
    "classify",
    "signal_name",
    "signal_of",
]

NOT_RETRYABLE_EXIT_CODE = 93
"""A worker that ends with this says: don't start me again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Classification:
    """A failure's place, with the reason in words for the report."""

    failure_class: FailureClass
    category: Category
    retryable: bool
    reason: str
    node_suspect: bool = False
    """Whether the words tell of a part of this node that is likely broken: a GPU's memory, a link, an adapter."""


_INPUT_TYPES = frozenset({"SyntaxError", "IndentationError", "TabError", "ImportError", "ModuleNotFoundError"})
_INPUT_TEXT = re.compile(
    r"^usage: .*^\S.*: error: |can't open file '|: No module named \S+\s*\Z|^error: unrecognized arguments"
    r"|can't find '__main__' module",
    re.MULTILINE | re.DOTALL,
)
_OOM_IN_TEXT = re.compile(r"killed by signal: Killed|terminated abruptly|exited unexpectedly", re.IGNORECASE)
_ASKED_TO_END = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP})
# What the agent sends to end a worker: TERM, ABRT (for a dump of its stacks), KILL.
_SENT_BY_AGENT = frozenset({signal.SIGTERM, signal.SIGABRT, signal.SIGKILL, signal.SIGINT})
# Who talks to a service outside the job; "connection reset by peer" is no word about another rank then.
_OTHER_SERVICES = (
    "requests.", "urllib", "http", "aiohttp.", "boto", "huggingface_hub.", "wandb.", "google.", "azure.", "s3fs.",
    "gcsfs.", "openai.", "grpc.", "redis.", "psycopg", "sqlalchemy.", "pymongo.",
)  # fmt: skip
_END_REQUESTED_TYPES = frozenset({"", "SystemExit", "KeyboardInterrupt"})

_ANY_CODE: frozenset[int] = frozenset()

# Class and exit code → category and whether another start may help; the first row that fits holds.
# (class or None, exit codes or any, looks like a wrong call) → (category, retryable)
CATEGORY_TABLE: tuple[tuple[FailureClass | None, frozenset[int], bool | None, Category, bool], ...] = (
    (None, frozenset({NOT_RETRYABLE_EXIT_CODE}), None, Category.WORKER, False),
    (FailureClass.INFRASTRUCTURE, _ANY_CODE, None, Category.INFRASTRUCTURE, True),
    (FailureClass.STOPPED_BY_US, _ANY_CODE, None, Category.WORKER, True),
    (FailureClass.SYMPTOM, _ANY_CODE, None, Category.WORKER, True),
    (FailureClass.ROOT, frozenset({126, 127}), None, Category.INPUT, False),
    (FailureClass.ROOT, _ANY_CODE, True, Category.INPUT, False),
    (None, _ANY_CODE, None, Category.WORKER, True),
)


def category_of(failure_class: FailureClass, exitcode: int, *, wrong_call: bool) -> tuple[Category, bool]:
    """Look up `CATEGORY_TABLE`: the category, and whether another start may help."""
    for row_class, codes, row_wrong_call, category, retryable in CATEGORY_TABLE:
        if row_class not in (None, failure_class) or (codes and exitcode not in codes):
            continue
        if row_wrong_call in (None, wrong_call):
            return category, retryable
    raise AssertionError("the table's last row fits everything")


def signal_of(exitcode: int) -> int:
    """The signal that ended the process, 0 for none. A shell in between reports signal N as 128 + N."""
    if exitcode < 0:
        return -exitcode
    if 128 < exitcode <= 128 + 64 and exitcode - 128 in _SHELL_SIGNALS:
        return exitcode - 128
    return 0


_SHELL_SIGNALS = frozenset(
    {signal.SIGINT, signal.SIGILL, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGKILL, signal.SIGSEGV,
     signal.SIGPIPE, signal.SIGTERM}
)  # fmt: skip


def signal_name(number: int) -> str:
    """``SIGSEGV``; ``signal 40`` for one without a name; empty for 0."""
    if not number:
        return ""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def classify(
    *,
    exitcode: int,
    exception_type: str = "",
    message: str = "",
    causes: Sequence[str] = (),
    stderr_tail: str = "",
    stopped_by_agent: bool = False,
    oom_kills: int = 0,
    last_step: int | None = None,
) -> Classification:
    """Say what kind of failure a worker's end was.

    Args:
        exitcode: As subprocess gives it: negative for a signal.
        exception_type: As the traceback names it; empty where none is known.
        message: The exception's text.
        causes: ``Type: message`` of the exceptions that it was raised from.
        stderr_tail: The last lines of stderr: looked at only where no exception is known.
        stopped_by_agent: The agent had sent this worker a signal before it ended.
        oom_kills: By how much the cgroup's counter of OOM kills rose while the worker ran.
        last_step: The last step that the worker reported; None where it reported none.
    """
    number = signal_of(exitcode)
    name = exception_type.rsplit(".", 1)[-1]
    wrong_call = False
    words = _NOTHING_KNOWN
    if stopped_by_agent and (number in _SENT_BY_AGENT or name in _END_REQUESTED_TYPES):
        failure_class, reason = (
            FailureClass.STOPPED_BY_US,
            f"ended by this job's agent ({signal_name(number) or 'asked to stop'})",
        )
    elif number == signal.SIGKILL and oom_kills > 0:
        failure_class, reason = FailureClass.INFRASTRUCTURE, "killed by the kernel: the job's memory limit was reached"
    else:
        text = "\n".join([_ends(f"{exception_type}: {message}"), *causes]) if exception_type else ""
        if not exception_type and number not in (signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV, signal.SIGBUS):
            text = _ends(f"{message}\n{stderr_tail}")
        words = _known(text, exception_type)
        if oom_kills > 0 and _OOM_IN_TEXT.search(text) and words.failure_class is not FailureClass.INFRASTRUCTURE:
            words = _CHILD_KILLED
        if words.says:
            failure_class, reason = words.failure_class, words.says
        elif name in SYMPTOM_TYPES and not exception_type.startswith(_OTHER_SERVICES):
            failure_class, reason = FailureClass.SYMPTOM, SYMPTOM_TYPES[name]
        elif not exception_type and number in _ASKED_TO_END:
            failure_class = FailureClass.INFRASTRUCTURE
            came = f"{signal_name(number)} came from outside this job's agent"
            reason = f"{came}: Slurm (cancel, limit, preemption) or a person"
        else:
            failure_class = FailureClass.ROOT
            wrong_call = last_step is None and _is_wrong_call(name, exitcode, stderr_tail)
            reason = _root_reason(exitcode, number, exception_type, wrong_call=wrong_call)
    category, retryable = category_of(failure_class, exitcode, wrong_call=wrong_call)
    return Classification(
        failure_class=failure_class,
        category=words.category or category,
        retryable=retryable and words.retryable,
        reason=reason,
        node_suspect=words.node_suspect,
    )


_NOTHING_KNOWN = FailurePattern(FailureClass.ROOT, "", ())
_CHILD_KILLED = FailurePattern(
    FailureClass.INFRASTRUCTURE, "a child of it was killed: the job's memory limit was reached", ()
)


def _known(text: str, exception_type: str) -> FailurePattern:
    words = find_pattern(text) if text else None
    if words is None or (words.failure_class is FailureClass.SYMPTOM and exception_type.startswith(_OTHER_SERVICES)):
        return _NOTHING_KNOWN
    return words


def _ends(text: str) -> str:
    """The parts of a long text where it says what it is."""
    return text if len(text) <= 4000 else f"{text[:2500]}\n{text[-1500:]}"


def _is_wrong_call(name: str, exitcode: int, stderr_tail: str) -> bool:
    if name in _INPUT_TYPES:
        return True
    return name in ("", "SystemExit") and exitcode in (1, 2) and bool(_INPUT_TEXT.search(stderr_tail))


def _root_reason(exitcode: int, number: int, exception_type: str, *, wrong_call: bool) -> str:
    if exitcode == NOT_RETRYABLE_EXIT_CODE:
        return f"ended with {exitcode}: not to be started again"
    if exitcode in (126, 127):
        return "the command could not be run"
    if wrong_call:
        return "the script could not start"
    if exception_type and exception_type not in ("SystemExit", "KeyboardInterrupt"):
        return "an exception that nothing caught"
    if number == signal.SIGKILL:
        return "killed from outside, not by this job's agent: by a person, or for the node's memory (dmesg tells)"
    if number == signal.SIGBUS:
        return "a bus error: often a full /dev/shm, or a mapped file that was cut"
    if number:
        return f"crashed ({signal_name(number)})"
    return f"ended itself with exit code {exitcode}"
