"""Tables of what libraries, the CUDA driver and the kernel print when they fail, and what it means.

To know one more text is to add one row, and an excerpt of it to tests/data/failures. The texts of gloo and the stores
were produced with torch 2.13; those of NCCL, CUDA and the driver are from public issue threads (expected.json there
says which). The first row that fits holds, so a row about a part that is broken stands before one about what follows
from it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from msgspec import Struct

from hpc_elastic.failures.ranking import Category, FailureClass

_GAP = 200
IMAGE_MISSING = "the container's image is not on this node, and can't be fetched"
_ROOT, _SYMPTOM, _INFRASTRUCTURE = FailureClass.ROOT, FailureClass.SYMPTOM, FailureClass.INFRASTRUCTURE


class FailurePattern(Struct, frozen=True):
    """One row.

    Attributes:
        any_of: Lower-case texts of which one must occur; ``*`` stands for at most 200 characters of one line.
        retryable: Another start may help. The same failure again with no progress between ends the run anyway.
        category: None: by class and exit code.
        is_common: Others may say the same of something else. Such a text of a symptom counts where the process group
            said it; another one in a message of the script only with the system's error number.
    """

    failure_class: FailureClass
    says: str
    any_of: tuple[str, ...]
    retryable: bool = True
    node_suspect: bool = False
    category: Category | None = None
    is_common: bool = False


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
          ("machine check exception", "hardware error"), node_suspect=True, is_common=True),
    FailurePattern(_INFRASTRUCTURE, "the network adapter of this node failed",
          ("local catastrophic error", "async event*port error", "async fatal event*port error",
           "ibv_*failed with error no such device"), node_suspect=True),
    # -- the runtime of a container ------------------------------------------------------------------------------
    FailurePattern(_ROOT, "the container's image has no such program",
          ("ch-run[*]: error: can't execve", "executable file not found in $path", "executable file `*` not found",
           "attempted to invoke a command that was not found"),
          retryable=False, category=Category.INPUT),
    FailurePattern(_ROOT, "the container's image has no such folder: make it in the image",
          ("ch-run[*]: error: can't mkdir:*read-only file system", "ch-run[*]: error: can't cd to",
           "destination*doesn't exist in container"),
          retryable=False, category=Category.INPUT),
    FailurePattern(_INFRASTRUCTURE, IMAGE_MISSING,
          ("error: initializing source docker://", "error: short-name * did not resolve",
           "fatal:   could not open image", "[error] no such file or directory: *.sqsh",
           "ch-run[*]: error: can't stat:")),
    FailurePattern(_ROOT, "the container's runtime does not take these options",
          ("see 'podman run --help'", "try `ch-run --help'"), retryable=False, category=Category.INPUT),
    FailurePattern(_INFRASTRUCTURE, "the container's runtime failed on this node",
          ("ch-run[*]: error:", "error: statfs *no such file or directory",
           "fatal:   ", "error: crun:", "error: runc:", "oci runtime error",
           "oci permission denied"),
          node_suspect=True),
    # -- something that the node offers has run out, or does not answer ------------------------------------------
    FailurePattern(_INFRASTRUCTURE, "/dev/shm is full",
          ("while creating shared memory segment*no space left", "failed to extend /dev/shm/",
           "posix_fallocate failed*no space left", "insufficient shared memory (shm)", "out of shared memory",
           "unable to write to file </torch_", "unable to allocate shared memory(shm)",
           "no space left on device: '/dev/shm",
           "unable to open shared memory object", "killed by signal: bus error"), is_common=True),
    FailurePattern(_INFRASTRUCTURE, "a disk or a quota is full",
          ("no space left on device", "disk quota exceeded", "enospc", "edquot"), is_common=True),
    FailurePattern(_INFRASTRUCTURE, "a file could not be written: a full disk or quota, or a filesystem that failed",
          ("basic_ios::clear: iostream error", "inline_container.cc*unexpected pos",
           "pytorchstreamwriter failed writing", "file write failed",
           "requested and * written")),
    FailurePattern(_INFRASTRUCTURE, "a filesystem failed",
          ("stale file handle", "stale nfs file handle", "transport endpoint is not connected", "input/output error",
           "remote i/o error", "read-only file system", "host is down", "transport endpoint shutdown"), is_common=True),
    FailurePattern(_INFRASTRUCTURE, "NCCL could not register memory: a limit of locked memory (ulimit -l)",
          ("ibv_*cannot allocate memory",)),
    FailurePattern(_INFRASTRUCTURE, "the node's memory is full",
          ("cannot allocate memory", "defaultcpuallocator: can't allocate memory",
           "defaultcpuallocator: not enough memory", "std::bad_alloc", "unable to allocate*for an array with shape"),
          is_common=True),
    FailurePattern(_ROOT, "the process may open no more files (ulimit -n): a leak, or a limit that is too low",
          ("too many open files", "emfile", "received 0 items of ancdata"), is_common=True),
    FailurePattern(_INFRASTRUCTURE, "a port was taken", ("eaddrinuse", "address already in use"),
          is_common=True),
    FailurePattern(_INFRASTRUCTURE, "the network failed",
          ("temporary failure in name resolution", "no route to host", "network is unreachable",
           "local access violation work queue error", "invalid request local work queue error",
           "got completion from peer*with error 4,", "got completion from peer*with status=4 ",
           "ibv_modify_qp failed"), is_common=True),
    # -- this worker's own use of the GPU, of NCCL or of the process group ----------------------------------------
    FailurePattern(_ROOT, "the GPU's memory is full",
          ("cuda out of memory", "hip out of memory", "cuda error: out of memory", "cuda failure*out of memory",
           "cuda driver error: out of memory", "[cuda]: out of memory",
           "cuda runtime error (2)", "cublas_status_alloc_failed", "hsa_status_error_out_of_resources")),
    FailurePattern(_ROOT, "a check in a GPU kernel failed: an index or a value in the data, or the code",
          ("device-side assert triggered", "cudaerrorassert", "block: [*assertion `*` failed")),
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
    FailurePattern(_ROOT,
          "its NCCL watchdog was stuck: a GPU call that does not return, or a thread that keeps the GIL",
          ("watchdog got stuck for", "heartbeat monitor timed out")),
    # -- what a healthy rank says when another one is gone --------------------------------------------------------
    FailurePattern(_SYMPTOM, "a collective waited for a peer until its timeout",
          ("timed out waiting*ms for recv operation", "timed out waiting*ms for send operation",
           "time out waiting*ms for recv operation", "time out waiting*ms for send operation",
           "failed to pass monitoredbarrier", "reached monitoredbarrier, but received errors",
           "watchdog caught collective operation timeout",
           "milliseconds before timing out", "collective operation timed out", "collective operation timeout",
           "watchdog detected operation timeout", "nccl operation timed out",
           "timed out waiting for*barrier"), is_common=True),
    # Every rank prints it, also those whose collective is the right one: which one differs, the ranks show together.
    FailurePattern(_SYMPTOM, "the ranks ran different collectives",
          ("detected mismatch between collectives on ranks",)),
    FailurePattern(_SYMPTOM, "the ranks called a collective with different sizes",
          ("op.preamble.length <= op.nbytes", "received data size doesn't match expected size")),
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
          ("of the remote worker before reporting an error", "caused by a remote worker crashing",
           "connection closed by peer", "connection closed by remote peer", "connection reset by peer",
           "socket closed", "socketprogress", "connection was likely closed", "peer closed connection",
           "gloo*read error", "gloo*write error", "gloo*broken pipe"), is_common=True),
    FailurePattern(_SYMPTOM, "the store of the process group went away or a peer never came to it",
          ("diststoreerror", "tcpstore*timed out", "tcpstore*time out", "tcpstore*timeout", "tcpstore*failed",
           "tcpstore*closed", "on tcpstore, (maybe", "wait timeout after*ms, keys", "failed to recv, got",
           "failed to send, got", "sendbytes failed", "recvvalue failed", "recvvaluewithtimeout failed",
           "client socket has timed out", "client socket has failed", "waiting for clients.*clients joined",
           "store*is closed"), is_common=True),
    FailurePattern(_SYMPTOM, "gloo could not connect to a peer",
          ("connectfullmesh failed", "gloo connect*failed", "gloo connect*timeout", "so_error: connection refused",
           "so_error: connection reset"), is_common=True),
    FailurePattern(_SYMPTOM, "the connection to a peer broke", ("broken pipe",), is_common=True),
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
"""Exceptions that show, where torch's process group raised them, that a peer is gone → what happened."""

SHM_FULL = next(row for row in PATTERNS if row.says == "/dev/shm is full")
KERNEL_CHECK = next(row for row in PATTERNS if "cudaerrorassert" in row.any_of)
MEMORY_FULL = next(row for row in PATTERNS if row.says == "the node's memory is full")
DISK_FULL = next(row for row in PATTERNS if row.says == "a disk or a quota is full")

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
"""Healthy ranks say one of these when one and the same peer is gone, by the call that each was in, to the microsecond.
A timeout, or a network that failed, shows something else."""

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


_OTHER_XID = (_INFRASTRUCTURE, False, "an error of the GPU or its driver")


def find_pattern(text: str, accept: Callable[[FailurePattern, str], bool] | None = None) -> FailurePattern | None:
    """Find a text's most telling Xid, else the first row of `PATTERNS` that fits.

    `accept` decides whether a row may hold for the line, in lower case, in which its text occurs.
    """
    lowered = text.lower()
    if "xid (" in lowered:
        numbers = [int(match[1]) for match in _XID.finditer(lowered)]
        for wanted in (_INFRASTRUCTURE, _ROOT, _SYMPTOM):
            for number in numbers:
                kind, is_suspect, what = XIDS.get(number, _OTHER_XID)
                if kind is wanted:
                    says = f"the GPU driver reported Xid {number}: {what}"
                    return FailurePattern(kind, says, (), node_suspect=is_suspect)
    for row in PATTERNS:
        for pattern in row.any_of:
            if pattern.partition("*")[0] not in lowered:
                continue  # as nearly all
            if any(accept is None or accept(row, line) for line in _lines_with(pattern, lowered)):
                return row
    return None


def symptom_kind(says: str) -> str:
    """Name what a symptom shows, whatever its wording: equal for those that one event may cause side by side."""
    return LOST_PEER if says in ONE_LOSS else says


def _lines_with(pattern: str, text: str) -> Iterator[str]:
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
            until = text.find("\n", end)
            yield text[text.rfind("\n", 0, at) + 1 : until if until >= 0 else len(text)]
        at = text.find(head, at + 1)
