"""Decides a failure's kind, what that means for the next step, and whether it is one of a node's. Pure.

A *symptom* is what a healthy rank says when another one is gone: an exception is one where torch, gloo or NCCL raised
it, and the first exception of a chain decides for all of it.

Wrong calls: what libraries print was captured from argparse (Python 3.11), click 8.5, rich-click 1.9, typer 0.29, fire
0.7, absl 2.5, hydra 1.3.8, jsonargparse 4.53, tyro 1.0, cyclopts 5.4, docopt 0.6, plumbum 2.0, draccus 0.11 and
omegaconf 2.4.

Nodes are contrasted: the same failure on all workers of some nodes, and on none elsewhere. What is missing on one node
raises the same exception in every worker there; the same on all nodes is the user's mistake. Whether the workers
elsewhere would have failed a moment later shows only where they got that moment, or had come to a collective, and
failed in it when the peer was gone.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

from hpc_elastic.base.text import size_text
from hpc_elastic.failures.failure_text import RaisedException
from hpc_elastic.failures.origin import explain_chain, explain_text
from hpc_elastic.failures.patterns import IMAGE_MISSING, MEMORY_FULL, FailurePattern, symptom_kind
from hpc_elastic.failures.ranking import Category, FailureClass

if TYPE_CHECKING:
    from hpc_elastic.failures.worker_failure import WorkerFailure  # a worker's error handler does without it

NOT_OURS = "not sent by hpc-elastic"
FROM_SLURM = "probably Slurm (cancel, limit, preemption) or a manual kill"
FROM_ITSELF = "sent to this process alone, so not by Slurm: by itself (a thread, os.kill) or by hand"
NOT_RETRYABLE_EXIT_CODE = 93


_OOM_IN_TEXT = re.compile(r"killed by signal: Killed|terminated abruptly|exited unexpectedly", re.IGNORECASE)
_ASKED_TO_END = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP})
_CRASHES = frozenset(
    {signal.SIGSEGV, signal.SIGABRT, signal.SIGFPE, signal.SIGILL, signal.SIGTRAP, signal.SIGSYS, signal.SIGBUS}
)
_END_REQUESTED_TYPES = frozenset({"", "SystemExit", "KeyboardInterrupt"})


def category_of(failure_class: FailureClass, exitcode: int, *, wrong_call: bool) -> tuple[Category, bool]:
    if exitcode == NOT_RETRYABLE_EXIT_CODE:
        return Category.WORKER, False
    if failure_class is FailureClass.ROOT and (wrong_call or exitcode in (126, 127)):
        return Category.INPUT, False
    return Category.INFRASTRUCTURE if failure_class is FailureClass.INFRASTRUCTURE else Category.WORKER, True


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
    if not number:
        return ""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def classify(
    facts: WorkerFailure,
    *,
    chain: Sequence[RaisedException] = (),
    message: str = "",
    node_bytes: int = 0,
    stderr_tail: str = "",
    printed_tail: str = "",
    is_said: bool = False,
    overcommits: bool = False,
) -> WorkerFailure:
    """Give `facts` the class of a worker's end, its reason, and what they mean for the next step.

    `chain`: the exception that ended it and those before it, the last one first; the texts count only where there is
    none. `printed_tail`: of stdout, where that explains the end. `is_said`: the process printed `message` right before
    its end. `node_bytes`: 0 for not known. `overcommits`: the kernel refuses no size that the node has.
    """
    number = signal_of(facts.exitcode)
    exception_type = chain[0].exception_type if chain else ""
    name = exception_type.rsplit(".", 1)[-1]
    wrong_call = False
    words = _NOTHING_KNOWN
    if facts.stopped_by_agent and (name in _END_REQUESTED_TYPES or is_stop_noise(chain)):
        failure_class, reason = (
            FailureClass.STOPPED_BY_US,
            f"stopped by hpc-elastic ({signal_name(number) or 'asked to stop'})",
        )
    elif number == signal.SIGKILL and facts.oom_kills > 0 and not facts.stopped_by_agent:
        limit = (
            "out of memory, by an OOM kill on its node" if facts.is_nodes_oom else "the job's memory limit was reached"
        )
        failure_class, reason = FailureClass.INFRASTRUCTURE, f"killed by the kernel: {limit}"
    else:
        text = ""
        if exception_type:
            text = "\n".join(raised.headline for raised in chain)
            words = explain_chain(chain, rank=facts.global_rank) or _NOTHING_KNOWN
            words = limit_of_process(text, words, overcommits=overcommits)
            sizes = (judge_size(raised.message, node_bytes=node_bytes) for raised in chain)
            words = next((row for row in sizes if row is not None), words)
        elif number == signal.SIGTERM:
            words = explain_text(message) or _NOTHING_KNOWN
        elif number not in (signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS):
            text = f"{message}\n{stderr_tail}"
            words = explain_text(text) or _NOTHING_KNOWN
        if (
            facts.oom_kills > 0
            and not facts.is_nodes_oom
            and _OOM_IN_TEXT.search(text)
            and words.failure_class is not FailureClass.INFRASTRUCTURE
        ):
            words = _CHILD_KILLED
        if words.says:
            failure_class, reason = words.failure_class, words.says
        elif not exception_type and number in _ASKED_TO_END and not is_said:
            failure_class = FailureClass.INFRASTRUCTURE
            reason = f"{signal_name(number)} {NOT_OURS}: {FROM_SLURM}"
        else:
            failure_class = FailureClass.ROOT
            said = f"{message}\n{printed_tail or stderr_tail}"
            wrong_call = facts.last_step is None and is_wrong_call(exception_type, facts.exitcode, said)
            reason = _root_reason(facts.exitcode, number, exception_type, wrong_call=wrong_call)
    category, retryable = category_of(failure_class, facts.exitcode, wrong_call=wrong_call)
    return replace(
        facts,
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


def _root_reason(exitcode: int, number: int, exception_type: str, *, wrong_call: bool) -> str:
    if exitcode == NOT_RETRYABLE_EXIT_CODE:
        return f"ended with {exitcode}: not to be started again"
    if exitcode in (126, 127):
        return "the command could not be run"
    if wrong_call:
        return "the script could not start"
    if exception_type == "KeyboardInterrupt" and number == signal.SIGINT:
        return "interrupted: by `_thread.interrupt_main()` in the script, or by SIGINT from outside"
    if exception_type and exception_type not in ("SystemExit", "KeyboardInterrupt"):
        return "uncaught exception"
    if number == signal.SIGKILL:
        return "SIGKILL not sent by hpc-elastic: probably the OOM killer (check dmesg) or a manual kill"
    if number == signal.SIGBUS:
        return "a bus error: often a full /dev/shm, or a mapped file that was cut"
    if number == signal.SIGTERM:
        return "SIGTERM not sent by hpc-elastic, right after it printed this: probably by itself"
    if number:
        return f"{'crashed' if number in _CRASHES else 'a signal that it does not handle'} ({signal_name(number)})"
    return f"ended itself with exit code {exitcode}"


def wording_of(failure: WorkerFailure) -> tuple[str, str, int]:
    """Equal for failures with the same text but for numbers, addresses and paths, of one class and exit code."""
    return failure.fingerprint or failure.headline, failure.failure_class.value, failure.exitcode


def kind_of(failure: WorkerFailure) -> tuple[str, str, int]:
    """Equal for one entry of a report: symptoms by what they show, since which rank words it how is chance."""
    if failure.failure_class is not FailureClass.SYMPTOM or not failure.reason:
        return wording_of(failure)
    # How such a rank ends (an exception, std::terminate) shows nothing of what happened either.
    return symptom_kind(failure.reason), failure.failure_class.value, 0


def is_same_failure(one: WorkerFailure, other: WorkerFailure) -> bool:
    return one.fingerprint == other.fingerprint or kind_of(one) == kind_of(other)


_ASKED = re.compile(
    r"tried to allocate (\d+)( )bytes|(?:tried|unable) to allocate ([\d.]+) ?([KMGTPE]i?B)\b", re.IGNORECASE
)
_GPU_HAS = re.compile(r"total capacity of ([\d.]+) ?([KMGTPE]i?B)\b")
_POWER = {letter: 10 * at for at, letter in enumerate("KMGTPE", 1)}


def asked_bytes(text: str) -> int | None:
    match = _ASKED.search(text) if "to allocate " in text.lower() else None
    if match is None:
        return None
    return int(match[1]) if match[1] else _bytes(match[3], match[4])


def judge_size(text: str, *, node_bytes: int) -> FailurePattern | None:
    """Judge a request for more memory than the node, or the GPU that the text names, has: a bug, and no full memory."""
    asked = asked_bytes(text)
    if asked is None:
        return None
    gpu = _GPU_HAS.search(text)
    has, whose = (_bytes(gpu[1], gpu[2]), "the whole GPU") if gpu is not None else (node_bytes, "the whole node")
    if not has or asked <= has:
        return None
    return FailurePattern(
        FailureClass.ROOT, f"one allocation of {size_text(asked)}, and {whose} has {size_text(has)}: a wrong size", ()
    )


def limit_of_process(text: str, row: FailurePattern, *, overcommits: bool) -> FailurePattern:
    """Judge a failed allocation of a size that the node has, where the kernel gives what there is, full or not."""
    asked = asked_bytes(text) if overcommits and row is MEMORY_FULL else None
    if asked is None:
        return row
    return FailurePattern(
        FailureClass.ROOT, f"an allocation of {size_text(asked)} was refused: a limit of the process (ulimit -v)", ()
    )


def _bytes(number: str, unit: str) -> int:
    return int(float(number.rstrip(".")) * (1 << _POWER[unit[0].upper()]))


_TYPE = (
    r"(?:SystemExit|KeyboardInterrupt|GeneratorExit|CancelledError)\Z"
    r"|.*(?:SIGTERM|SIGINT|Signal|Preempt|Terminat|GracefulExit|GracefulShutdown|ShutdownRequest|Interrupt)"
)
_TEXT = (
    r"\bSIG(?:TERM|INT|HUP|KILL)\b|\bsignal (?:15|2|9)\b|is killed by signal: (?:Terminated|Killed|Interrupt|Hangup)"
    r"|(?:exit(?:ed)?(?: with)?(?: status| code)?|exitcode) -?(?:15|9|143|137)\b"
)
_HANDLER = r"(?i)handl|signal|sigterm|\bon_|term|stop|shutdown|preempt|interrupt|quit|exit"


def is_stop_noise(chain: Sequence[RaisedException]) -> bool:
    """Tell whether an exception, in a worker that its agent ended, came of that: a handler of SIGTERM may raise, as
    Lightning's does; what then unwinds may fail again; the worker's own children get the agent's signal too.
    """
    if not chain:
        return False
    first = chain[-1]
    if re.match(_TYPE, first.exception_type.rsplit(".", 1)[-1]) or re.search(_TEXT, first.message):
        return True
    if len(first.frames) < 2 or not first.caller:
        return False
    function = first.frames[-1].function  # of a handler: the line that seems to call it does not name it
    return re.search(_HANDLER, function) is not None and function not in first.caller


_EXIT_USAGE = 2
"""The exit code of all of them but absl, hydra and docopt."""
_TYPES = frozenset({"SyntaxError", "IndentationError", "TabError", "ImportError", "ModuleNotFoundError"})
_RAISED = re.compile(
    r"(?:argparse\.Argument|getopt\.Getopt)Error\Z|click\.exceptions\.(?:UsageError|Bad|Missing|No)"
    r"|absl\.(?:app\.UsageError|flags\._exceptions\.(?:CantOpen|Illegal|Unrecognized|Validation))"
    r"|hydra\.errors\.(?:OverrideParse|ConfigComposition|SearchPath|MissingConfig)Exception\Z"
    r"|draccus\.utils\.(?:Decoding|Parsing)Error\Z|omegaconf\.errors\."
)
"""The same raised: with HYDRA_FULL_ERROR=1, click's ``standalone_mode=False``, argparse's ``exit_on_error=False``."""
_SAID = re.compile(
    r"^usage: .*^\S.*: error: |can't open file '|: No module named \S+\s*\Z|^error: unrecognized arguments"
    r"|can't find '__main__' module|^(?:\S+: )?[Ee]rror: (?:No such (?:option|command)|Missing (?:option|argument)"
    r"|Invalid value for |Got unexpected extra argument|unrecognized arguments|the following arguments are required"
    r"|argument \S+: )|^FATAL Flags parsing error:",
    re.MULTILINE | re.DOTALL,
)
_USAGE = re.compile(
    r"^\s*usage:(?:\s+[^\s\d]|\Z)|[╭┌+][─-]+ (?:[\w ]+ )?(?:error|options) [─-]+|\S --help\b", re.I | re.M
)
"""A usage text, or a box of typer, tyro or cyclopts. With their exit code nothing more is needed."""
_USAGE_OF_SCRIPT = re.compile(r"^\s*usage:\s+(?:python\S*\s+(?:-\w\s+)*)?\S+\.py\b", re.IGNORECASE | re.MULTILINE)
_ERROR = re.compile(r"^error: ", re.IGNORECASE | re.MULTILINE)
_HYDRA = re.compile(r"^Set the environment variable HYDRA_FULL_ERROR=1 ", re.MULTILINE)
_HYDRA_RAN = re.compile(r"^Error executing job with overrides: |^Traceback \(most recent", re.MULTILINE)
"""hydra ends with 1: without this line the configuration could not be put together, and no job began."""


def is_wrong_call(exception_type: str, exitcode: int, said: str) -> bool:
    name = exception_type.rsplit(".", 1)[-1]
    if name in _TYPES or _RAISED.match(exception_type):
        return True
    if name not in ("", "SystemExit", "DocoptExit") or exitcode not in (1, _EXIT_USAGE):
        return False
    if _SAID.search(said) or (_USAGE_OF_SCRIPT.search(said) and not _ERROR.search(said)):
        return True
    if exitcode == _EXIT_USAGE and _USAGE.search(said):
        return True
    return bool(_HYDRA.search(said)) and not _HYDRA_RAN.search(said)


MOMENT_SECONDS = 1.0
"""So long the other workers may go on, so that those which would fail in the same way do; see `moment_after`."""
_LONGEST_MOMENT_SECONDS = 5.0
_START_SECONDS = 120.0
"""Imports from a cold network filesystem have been seen to take more than a minute."""
_ENOUGH = 0.8
_MISSING_TYPES = frozenset(
    {"ImportError", "ModuleNotFoundError", "FileNotFoundError", "NotADirectoryError", "PermissionError"}
)
"""Python raises them where a package, a file or the right to read it is missing."""
_MISSING_TEXTS = re.compile(
    r"cannot open shared object file|error while loading shared libraries|version `\w+_[\d.]+' not found"
    r"|command not found|can't open file '|no such file or directory|no cuda gpus are available"
    r"|driver on your system is too old|driver version is insufficient",
    re.IGNORECASE,
)
_CANNOT_RUN = (126, 127)


class NodeFailures(Struct, frozen=True, kw_only=True):
    node: int
    workers: int
    alike: int = 0
    fingerprint: str = ""
    """A failure that may be the node's; empty where there is none."""
    waited: float = 0.0
    """Seconds for which the workers elsewhere were let go on after that."""
    passed: bool = False
    """Its workers had come further: one of them lost a peer in a collective."""


_READ_ONLY = re.compile(r"read-only file system", re.IGNORECASE)


def wrong_input(failure: WorkerFailure) -> str:
    """Name the wrong input behind an infrastructure failure that is no single node's; empty for any other failure."""
    if failure.failure_class is FailureClass.INFRASTRUCTURE and _READ_ONLY.search(failure.headline):
        return "it wrote to a path whose filesystem is read-only"
    return "the container's image does not exist, or can't be fetched" if failure.reason == IMAGE_MISSING else ""


def may_be_of_node(failure: WorkerFailure) -> bool:
    if wrong_input(failure):
        return True
    if failure.failure_class is not FailureClass.ROOT:
        return False
    name = failure.exception_type.rsplit(".", 1)[-1]
    if name in _MISSING_TYPES or failure.exitcode in _CANNOT_RUN:
        return True
    return bool(_MISSING_TEXTS.search(failure.headline) or (not name and _MISSING_TEXTS.search(failure.stderr_tail)))


def sum_up_node(failures: Sequence[WorkerFailure], *, node: int, workers: int) -> NodeFailures:
    by_itself = [one for one in failures if not one.stopped_by_agent]
    # One that the stop overtook had failed in the same way, and shows that it is not another node's alone.
    own = [one for one in failures if may_be_of_node(one)]
    if not own:
        passed = any(one.failure_class is FailureClass.SYMPTOM for one in by_itself)
        return NodeFailures(node=node, workers=workers, passed=passed)
    first = min(own, key=lambda one: (one.stopped_by_agent, one.ended_uptime_ns, one.global_rank))
    alike = [one for one in by_itself if is_same_failure(one, first)]
    waited = max((one.waited for one in alike), default=0.0)
    return NodeFailures(node=node, workers=workers, alike=len(alike), fingerprint=first.fingerprint, waited=waited)


def nodes_apart(nodes: Iterable[NodeFailures]) -> tuple[int, ...]:
    """Find the nodes on which all workers failed alike, where no worker of the others did; none where that is most."""
    found = list(nodes)
    whole: dict[str, list[NodeFailures]] = {}
    for one in found:
        if one.fingerprint and 0 < one.workers <= one.alike:
            whole.setdefault(one.fingerprint, []).append(one)
    apart: list[int] = []
    for fingerprint, those in whole.items():
        elsewhere = [one for one in found if one not in those]
        had_time = max(one.waited for one in those) >= _ENOUGH * MOMENT_SECONDS
        if not elsewhere or any(one.fingerprint == fingerprint for one in elsewhere):
            continue
        if had_time or all(one.passed for one in elsewhere):
            apart += [one.node for one in those]
    return tuple(sorted(apart)) if 2 * len(apart) <= len(found) else ()


def apart_in_round(failures: Sequence[WorkerFailure], workers: Mapping[int, int]) -> tuple[int, ...]:
    if len(workers) < 2:
        return ()
    return nodes_apart(
        sum_up_node([one for one in failures if one.node == node], node=node, workers=count)
        for node, count in workers.items()
    )


def moment_after(age: float) -> float:
    """Give the seconds that the other workers get after one failed at `age`: where starts take long, as long again."""
    return max(MOMENT_SECONDS, min(age, _LONGEST_MOMENT_SECONDS)) if age <= _START_SECONDS else MOMENT_SECONDS
