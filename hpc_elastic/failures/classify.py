"""What kind of failure it is, and what that means for the next step. Pure tables over text and numbers.

A *symptom* is what a healthy rank says when another one is gone; ordering by class before time is what keeps 511 of
them from hiding the one that matters.

`PATTERNS` holds what libraries, the CUDA driver and the kernel print when they fail: to know one more text is to add
one row, and an excerpt of it to tests/data/failures. The texts of gloo and the stores were produced with torch 2.13;
those of NCCL, CUDA and the driver are from public issue threads (tests/data/failures/expected.json says which). The
first row that fits holds, so a row about a part that is broken stands before one about what follows from it: NCCL's
watchdog ends a process for an error of the GPU with the same sentence as for a peer that is gone.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from typing import TYPE_CHECKING

from msgspec import Struct

from hpc_elastic.failures.ranking import Category, FailureClass

if TYPE_CHECKING:
    from hpc_elastic.failures.worker_failure import WorkerFailure

_GAP = 200
"""How many characters ``*`` may stand for."""
_ROOT, _SYMPTOM, _INFRASTRUCTURE = FailureClass.ROOT, FailureClass.SYMPTOM, FailureClass.INFRASTRUCTURE


class FailurePattern(Struct, frozen=True):
    """One row.

    Attributes:
        failure_class: Whose failure it is.
        says: What happened, for the report.
        any_of: Lower-case texts of which one must occur; ``*`` stands for at most 200 characters of one line.
        retryable: Whether another start may help. A bug that may depend on the data is worth one: the same failure
            again with no progress between ends the run anyway.
        node_suspect: Whether a part of the node where it was said is likely broken.
        category: By whom something is to be done; None: by class and exit code.
    """

    failure_class: FailureClass
    says: str
    any_of: tuple[str, ...]
    retryable: bool = True
    node_suspect: bool = False
    category: Category | None = None


# fmt: off
PATTERNS: tuple[FailurePattern, ...] = (
    # -- a part of this node is broken ---------------------------------------------------------------------------
    FailurePattern(_INFRASTRUCTURE, "a GPU reported an uncorrectable memory (ECC) error",
          ("uncorrectable ecc", "ecc_uncorrectable", "eccuncorrectable", "double bit ecc"), node_suspect=True),
    FailurePattern(_INFRASTRUCTURE, "an NVLink error",
          ("uncorrectable nvlink", "nvlink error", "hardware nvlink", "cudaerrornvlink"), node_suspect=True),
    FailurePattern(_INFRASTRUCTURE, "a GPU is not usable on this node",
          ("fallen off the bus", "gpu is lost", "gpu has been lost", "cudaerrordevicesunavailable",
           "device(s) is/are busy or unavailable", "devices are busy or unavailable", "no cuda-capable device",
           "cuda driver initialization failed", "cuda unknown error", "cuda failure*unknown error",
           "cuda error: unknown error", "system not yet initialized", "cudaerrorsystemnotready",
           "mps client failed to connect"), node_suspect=True),
    FailurePattern(_INFRASTRUCTURE, "this node's GPU driver does not fit its libraries",
          ("unsupported display driver / cuda driver combination", "driver/library version mismatch",
           "nvml/rm version mismatch", "forward compatibility was attempted on non supported hw"), node_suspect=True),
    FailurePattern(_INFRASTRUCTURE, "a hardware error",
          ("machine check exception", "hardware error"), node_suspect=True),
    FailurePattern(_INFRASTRUCTURE, "the network adapter of this node failed",
          ("local catastrophic error", "async event*port error", "async fatal event*port error",
           "ibv_*failed with error no such device"), node_suspect=True),
    # -- something that the node offers has run out, or does not answer ------------------------------------------
    FailurePattern(_INFRASTRUCTURE, "/dev/shm is full",
          ("while creating shared memory segment*no space left", "failed to extend /dev/shm/",
           "posix_fallocate failed*no space left", "insufficient shared memory (shm)", "out of shared memory",
           "unable to write to file </torch_", "killed by signal: bus error")),
    FailurePattern(_INFRASTRUCTURE, "a disk or a quota is full",
          ("no space left on device", "disk quota exceeded", "enospc", "edquot")),
    FailurePattern(_INFRASTRUCTURE, "a filesystem failed",
          ("stale file handle", "stale nfs file handle", "transport endpoint is not connected", "input/output error",
           "remote i/o error", "read-only file system", "host is down", "transport endpoint shutdown")),
    FailurePattern(_INFRASTRUCTURE, "the node's memory is full",
          ("cannot allocate memory", "defaultcpuallocator: can't allocate memory",
           "defaultcpuallocator: not enough memory", "std::bad_alloc")),
    FailurePattern(_INFRASTRUCTURE, "a port was taken", ("eaddrinuse", "address already in use")),
    FailurePattern(_INFRASTRUCTURE, "the network failed",
          ("temporary failure in name resolution", "no route to host", "network is unreachable",
           "local access violation work queue error", "invalid request local work queue error",
           "got completion from peer*with error 4,", "got completion from peer*with status=4 ",
           "ibv_modify_qp failed")),
    # -- this worker's own use of the GPU, of NCCL or of the process group ----------------------------------------
    FailurePattern(_ROOT, "the GPU's memory is full",
          ("cuda out of memory", "hip out of memory", "cuda error: out of memory", "cuda failure*out of memory",
           "cuda driver error: out of memory", "[cuda]: out of memory",
           "cuda runtime error (2)", "cublas_status_alloc_failed", "hsa_status_error_out_of_resources")),
    FailurePattern(_ROOT, "a check in a GPU kernel failed: an index or a value in the data, or the code",
          ("device-side assert triggered", "cudaerrorassert")),
    FailurePattern(_ROOT, "a GPU kernel touched memory that is not its own: a bug in a kernel, rarely the GPU",
          ("illegal memory access", "misaligned address", "illegal address", "cudaerrorillegaladdress",
           "memory access fault by gpu")),
    FailurePattern(_ROOT, "a GPU kernel crashed: a bug in a kernel, or the GPU",
          ("unspecified launch failure", "illegal instruction was encountered", "cudaerrorlaunchfailure",
           "the launch timed out and was terminated", "cublas_status_execution_failed",
           "cudnn_status_execution_failed", "cudnn_status_mapping_error")),
    FailurePattern(_ROOT, "built for other GPUs than this node's",
          ("no kernel image is available", "hiperrornobinaryforgpu"),
          retryable=False, category=Category.INPUT),
    FailurePattern(_ROOT, "a GPU that is not there: more workers than GPUs, or a GPU is missing",
          ("invalid device ordinal",),
          category=Category.INPUT),
    FailurePattern(_ROOT, "no GPU can be seen: none was asked for, or none works",
          ("no cuda gpus are available", "no hip gpus are available", "found no nvidia driver on your system"),
          category=Category.INPUT),
    FailurePattern(_ROOT, "this node's GPU driver is too old for this torch",
          ("nvidia driver on your system is too old", "cuda driver version is insufficient"), category=Category.INPUT),
    FailurePattern(_ROOT, "two ranks were given the same GPU",
          ("duplicate gpu detected", "multiple ranks are using the same gpu"),
          retryable=False, category=Category.INPUT),
    FailurePattern(_ROOT, "NCCL was called wrongly",
          ("nccl error*invalid usage", "ncclinvalidusage", "ncclinvalidargument")),
    FailurePattern(_ROOT, "the ranks ran different collectives", ("detected mismatch between collectives on ranks",)),
    FailurePattern(_ROOT,
          "its NCCL watchdog was stuck: a GPU call that does not return, or a thread that keeps the GIL",
          ("watchdog got stuck for", "heartbeat monitor timed out")),
    # -- what a healthy rank says when another one is gone --------------------------------------------------------
    FailurePattern(_SYMPTOM, "a collective waited for a peer until its timeout",
          ("timed out waiting*ms for recv operation", "timed out waiting*ms for send operation",
           "time out waiting*ms for recv operation", "time out waiting*ms for send operation",
           "failed to pass monitoredbarrier", "watchdog caught collective operation timeout",
           "milliseconds before timing out", "collective operation timed out", "collective operation timeout",
           "watchdog detected operation timeout", "nccl operation timed out",
           "timed out waiting for*barrier")),
    FailurePattern(_SYMPTOM, "another rank's collective ran into its timeout",
          ("due to a collective timeout from", "dump signal from another rank", "dump signal from other rank")),
    FailurePattern(_SYMPTOM, "the network to a peer failed, or the peer is gone",
          ("got completion from peer", "net/ofi request*completed with error", "unresponsive receiver",
           "unreachable remote", "transport retry count exceeded", "transport retry counter exceeded",
           "socketstartconnect: connect to", "socketpollconnect", "socketfinalizeconnect")),
    FailurePattern(_SYMPTOM, "NCCL gave up after a peer was gone",
          ("nccl communicator was aborted", "aborted communicator", "ncclremoteerror", "ncclcommabort",
           "remote process exited or there was a network error", "ncclsystemerror",
           "nccl error*unhandled system error", "taking the entire process down", "proxy call to rank*failed")),
    FailurePattern(_SYMPTOM, "the connection to a peer was closed",
          ("connection closed by peer", "connection closed by remote peer", "connection reset by peer",
           "socket closed", "socketprogress", "connection was likely closed", "peer closed connection",
           "gloo*read error", "gloo*write error", "gloo*broken pipe")),
    FailurePattern(_SYMPTOM, "the store of the process group went away or a peer never came to it",
          ("diststoreerror", "tcpstore*timed out", "tcpstore*time out", "tcpstore*timeout", "tcpstore*failed",
           "tcpstore*closed", "on tcpstore, (maybe", "wait timeout after*ms, keys", "failed to recv, got",
           "failed to send, got", "sendbytes failed", "recvvalue failed", "recvvaluewithtimeout failed",
           "client socket has timed out", "client socket has failed", "waiting for clients.*clients joined",
           "store*is closed")),
    FailurePattern(_SYMPTOM, "gloo could not connect to a peer",
          ("connectfullmesh failed", "gloo connect*failed", "gloo connect*timeout", "so_error: connection refused",
           "so_error: connection reset")),
    FailurePattern(_SYMPTOM, "the connection to a peer broke", ("broken pipe",)),
    # -- what may follow from any of the above, and says no more ---------------------------------------------------
    FailurePattern(_ROOT, "the GPU's memory is full", ("failed to cuda calloc",)),
    FailurePattern(_ROOT, "a CUDA call inside NCCL failed", ("unhandled cuda error", "ncclunhandledcudaerror")),
    FailurePattern(_ROOT, "NCCL failed inside", ("ncclinternalerror",)),
    FailurePattern(_SYMPTOM, "NCCL gave up after a peer was gone",
          ("watchdog thread terminated with exception", "processgroup*aborted", "watchdog detected operation error",
           "nccl hit async error")),
)
# fmt: on

SYMPTOM_TYPES: dict[str, str] = dict.fromkeys(
    ("BrokenPipeError", "ConnectionResetError", "ConnectionAbortedError"), "the connection to a peer broke"
)
"""Exceptions whose type alone shows that a peer is gone → what happened."""

LOST_PEER = "a peer is gone"
ONE_LOSS = frozenset(
    {
        "the connection to a peer was closed",
        "the connection to a peer broke",
        "NCCL gave up after a peer was gone",
        "gloo could not connect to a peer",
        "the store of the process group went away or a peer never came to it",
    }
)
"""What healthy ranks say when one and the same peer is gone: which of these each of them says, and in which words, is a
matter of the call that it was in, to the microsecond. A timeout, or a network that failed, shows something else."""

_XID = re.compile(r"xid \((?:pci:)?[^)]{1,40}\): (\d{1,3})\b")

XIDS: dict[int, tuple[FailureClass, bool, str]] = {
    13: (_ROOT, False, "an exception in a GPU kernel"),
    31: (_ROOT, False, "a GPU kernel touched memory that is not its own"),
    43: (_ROOT, False, "a GPU kernel crashed"),
    45: (_SYMPTOM, False, "the GPU was cleared after an earlier error"),
    48: (_INFRASTRUCTURE, True, "a double-bit memory (ECC) error"),
    62: (_INFRASTRUCTURE, True, "the GPU's own controller halted"),
    63: (_INFRASTRUCTURE, True, "a part of the GPU's memory was retired"),
    64: (_INFRASTRUCTURE, True, "a part of the GPU's memory could not be retired"),
    74: (_INFRASTRUCTURE, True, "an NVLink error"),
    79: (_INFRASTRUCTURE, True, "the GPU has fallen off the bus"),
    92: (_INFRASTRUCTURE, True, "many memory (ECC) errors"),
    94: (_INFRASTRUCTURE, True, "a contained memory (ECC) error"),
    95: (_INFRASTRUCTURE, True, "an uncontained memory (ECC) error"),
    119: (_INFRASTRUCTURE, True, "the GPU's system processor does not answer"),
    120: (_INFRASTRUCTURE, True, "the GPU's system processor failed"),
    140: (_INFRASTRUCTURE, True, "an unrecovered memory (ECC) error"),
    **dict.fromkeys(range(144, 151), (_INFRASTRUCTURE, True, "an NVLink error")),
    154: (_INFRASTRUCTURE, True, "the GPU must be reset, or the node started again"),
}
"""The driver's numbers (docs.nvidia.com/deploy/xid-errors, its catalogue for A100 and later) → class, whether the node
is suspect, what happened. Others are the driver's word for something that failed, and no more."""


def find_pattern(text: str) -> FailurePattern | None:
    """What is known of a text: its most telling Xid, else the first row of `PATTERNS` that fits."""
    lowered = text.lower()
    if "xid (" in lowered:
        found = [_xid_pattern(int(match[1])) for match in _XID.finditer(lowered)]
        for wanted in (_INFRASTRUCTURE, _ROOT, _SYMPTOM):
            for words in found:
                if words.failure_class is wanted:
                    return words
    for words in PATTERNS:
        if any(_occurs(pattern, lowered) for pattern in words.any_of):
            return words
    return None


def symptom_kind(says: str) -> str:
    """What a symptom shows, whatever its wording: equal for those that one event may cause side by side.

    Args:
        says: A row's `FailurePattern.says`, as failures keep it in their ``reason``.
    """
    return LOST_PEER if says in ONE_LOSS else says


def _xid_pattern(number: int) -> FailurePattern:
    failure_class, node_suspect, what = XIDS.get(number, (_INFRASTRUCTURE, False, "an error of the GPU or its driver"))
    return FailurePattern(failure_class, f"the GPU driver reported Xid {number}: {what}", (), node_suspect=node_suspect)


def _occurs(pattern: str, text: str) -> bool:
    head, *rest = pattern.split("*")
    at = text.find(head)
    while at >= 0:
        end = at + len(head)
        for part in rest:
            found = text.find(part, end, end + _GAP + len(part))
            if found < 0 or "\n" in text[end:found]:
                break
            end = found + len(part)
        else:
            return True
        at = text.find(head, at + 1)
    return False


NOT_RETRYABLE_EXIT_CODE = 93
"""A worker that ends with this says: don't start me again."""


class Classification(Struct, frozen=True, kw_only=True):
    """A failure's place, with the reason in words for the report."""

    failure_class: FailureClass
    category: Category
    retryable: bool
    reason: str
    node_suspect: bool = False
    """Whether the text names a part of this node that is likely broken: a GPU's memory, a link, an adapter."""


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
# Libraries that call a service outside the job: their "connection reset by peer" is not about another rank.
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
            f"stopped by hpc-elastic ({signal_name(number) or 'asked to stop'})",
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
            came = f"{signal_name(number)} not sent by hpc-elastic"
            reason = f"{came}: probably Slurm (cancel, limit, preemption) or a manual kill"
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
        return "uncaught exception"
    if number == signal.SIGKILL:
        return "SIGKILL not sent by hpc-elastic: probably the OOM killer (check dmesg) or a manual kill"
    if number == signal.SIGBUS:
        return "a bus error: often a full /dev/shm, or a mapped file that was cut"
    if number:
        return f"crashed ({signal_name(number)})"
    return f"ended itself with exit code {exitcode}"


def wording_of(failure: WorkerFailure) -> tuple[str, str, int]:
    """Equal for failures with the same text but for numbers, addresses and paths, of one class and exit code."""
    return failure.fingerprint or failure.headline, failure.failure_class.value, failure.exitcode


def kind_of(failure: WorkerFailure) -> tuple[str, str, int]:
    """Equal for failures that are one entry of a report: symptoms by what they show, others by their wording.

    What healthy ranks say of a peer that is gone has many wordings, and which rank says which is chance.
    """
    if failure.failure_class is not FailureClass.SYMPTOM or not failure.reason:
        return wording_of(failure)
    # How such a rank ends (an exception, std::terminate) shows nothing of what happened either.
    return symptom_kind(failure.reason), failure.failure_class.value, 0


def is_same_failure(one: WorkerFailure, other: WorkerFailure) -> bool:
    """Whether a report may call two failures the same."""
    return one.fingerprint == other.fingerprint or kind_of(one) == kind_of(other)
