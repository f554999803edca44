"""Gathers the evidence of a worker that ended badly. It must be quick, and must never fail itself.

Order of trust: the worker's own error file; else what it printed at the end of its stderr.log; else the exit code.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from msgspec.structs import replace

from hpc_elastic.base.host_facts import overcommits_memory
from hpc_elastic.base.text import clean_text, cut_end
from hpc_elastic.failures.classify import FROM_ITSELF, FROM_SLURM, classify, signal_name, signal_of
from hpc_elastic.failures.error_file import OWN_KEY, ErrorFile, error_data, read_error_file, write_error_data
from hpc_elastic.failures.explanation import find_explanation, find_uncaught, reaches_top
from hpc_elastic.failures.failure_text import (
    FailureText,
    RaisedException,
    TextKind,
    fingerprint,
    summary_line,
    undecorate,
)
from hpc_elastic.failures.origin import (
    find_file_read,
    find_origin,
    find_wrapped,
    is_near,
    is_raised_by_script,
    is_wrapper,
)
from hpc_elastic.failures.ranking import Category, FailureClass
from hpc_elastic.failures.traceback_text import find_python_traceback, find_tracebacks
from hpc_elastic.failures.worker_failure import LOGGED_BEFORE, EvidenceSource, WorkerFailure
from hpc_elastic.run.log_pieces import EndReader
from hpc_elastic.worker_api.torch_import import NOTE

_TAIL = 128 << 10
"""How much of stderr.log is looked at: with faulthandler's dump of 100 threads, too."""
_STDOUT_TAIL = 32 << 10
_SCAN_BACK = 64 << 20
"""How far back a traceback's header is looked for where the tail holds none: a message may be 30 MB long."""
_FAR_PART = 192 << 10
_TAIL_LINE = 300
_HEADER = b"Traceback (most recent call last)"
_LINE_END = re.compile(rb"\r\n?|\n")
_NOT_AHEAD_NS = 1_000_000_000
"""An error file's time that is later than the end by more is by a clock that was set."""
_LIVED_ON_NS = 2_000_000_000
"""A process that ends by a signal or an exit code of its own so long after the whole second in which it recorded an
exception had handled it."""
_WHOLE_SECOND_NS = 1_000_000_000


class Output(Protocol):
    """The part of `output.log_files.LogFile` that evidence needs."""

    @property
    def unwritten(self) -> bytes: ...

    def printed_ns(self, before_end: int) -> int: ...


def describe_failure(
    *,
    facts: WorkerFailure,
    error_file: Path | str,
    stderr_log: Path | str,
    stdout_log: Path | str = "",
    output: Output | None = None,
    is_alone: bool = False,
) -> WorkerFailure:
    """Gather what is known about a worker's end. Never raises; some milliseconds. No file need be there.

    `output`: the end that a full disk refused, and when it was printed. `is_alone`: its agent got no signal, and Slurm
    signals all processes of a step.
    """
    try:
        found = _describe(facts, os.fspath(error_file), os.fspath(stderr_log), os.fspath(stdout_log), output)
        return replace(found, reason=found.reason.replace(FROM_SLURM, FROM_ITSELF)) if is_alone else found
    except Exception as error:
        failure = describe_exit(facts, f"its evidence could not be read: {error!r}")
        return replace(failure, error_file=str(error_file))


def describe_exit(facts: WorkerFailure, problem: str) -> WorkerFailure:
    return _build(facts, None, message=_exit_message(facts, None), problem=problem)


def find_logged(stderr_log: Path | str) -> str:
    """The exception that a worker had logged just before it ended with 0. Never raises; empty where there is none."""
    try:
        text = undecorate(clean_text(_read_tail(os.fspath(stderr_log))[0].decode("utf-8", "replace")))
        found = find_tracebacks(text)
        return found[-1].summary if found and is_near(found[-1], text.split("\n")) else ""
    except Exception:
        return ""


def read_failure(error_file: Path | str, *, facts: WorkerFailure) -> WorkerFailure | None:
    """Read error.json back; None where it holds no failure. `facts`: where no agent completed it (it died first)."""
    from hpc_elastic.base.files import open_file  # no agent needs it

    file = read_error_file(error_file, opener=open_file)
    if "failure_class" not in file.own:
        if not file.found:
            return None
        return _from_error_file(facts, os.fspath(error_file), file, _recorded(file))
    # The texts stand once in the file, where torch's readers look for them.
    texts = {"message": file.message, "traceback": file.traceback.rstrip("\n")}
    shared = {key: text for key, text in texts.items() if key not in file.own}
    return WorkerFailure.from_json(file.own, **shared, error_file=os.fspath(error_file))


def write_evidence(failure: WorkerFailure, error_file: Path | str) -> str:
    """Write error.json in torch's shape, or add ours to it. Never raises: returns what went wrong, or "".

    A file that was torn, foreign or cut is kept beside it as ``error.original.json``.
    """
    try:
        path = Path(error_file)
        present = read_error_file(path, seek_traceback=False)  # of a large file only its time is kept
        own = {**present.own, **failure.to_json(), "error_file": str(path)}
        if present.data and not present.problem:
            # Once in the file: torch's text ends with a line end, and the parsed one does not.
            for key, text in (("message", present.message), ("traceback", present.traceback)):
                if own[key].rstrip("\n") == text.rstrip("\n"):
                    del own[key]
            data = {**present.data, OWN_KEY: own}
            inner = data.get("message")
            if isinstance(inner, dict):  # torch does the same
                data["message"] = {**inner, "errorCode": failure.exitcode}
            elif isinstance(inner, str):
                data.setdefault("timestamp", failure.ended_ns // 1_000_000_000)
        else:
            if present.problem not in ("missing", "empty"):
                os.replace(path, path.with_name("error.original.json"))
            del own["message"]
            if failure.traceback:
                del own["traceback"]
            data = error_data(
                message=failure.message,
                traceback=failure.traceback,
                timestamp_ns=present.timestamp_ns or failure.ended_ns,
                error_code=failure.exitcode,
                own=own,
            )
        write_error_data(path, data)
    except Exception as error:
        return f"could not write {error_file}: {error}"
    return ""


def _describe(
    facts: WorkerFailure, error_file: str, stderr_log: str, stdout_log: str, output: Output | None
) -> WorkerFailure:
    raw, has_more, problem = _read_tail(stderr_log)
    cleaned = clean_text((raw + (output.unwritten if output is not None else b"")).decode("utf-8", "replace"))
    text = undecorate(cleaned)
    file = read_error_file(error_file)
    recorded = _recorded(file) if file.found else None
    if recorded is not None and not _did_not_end(recorded, file, text, facts, error_file):
        # Python prints what went up through ``@record``.
        printed_again = find_python_traceback(text, cleaned=True)
        is_same = printed_again is not None and _start(printed_again) == _start(recorded)
        span = printed_again.span if printed_again is not None and is_same else (0, 0)
        # Our own writer's time; torch's has whole seconds.
        at_ns = file.timestamp_ns if "timestamp_ns" in file.own else None
        recorded_ns = at_ns if at_ns is not None and 0 < at_ns <= facts.ended_ns + _NOT_AHEAD_NS else 0
        facts = replace(facts, printed_ns=_printed_ns(raw, span, output) or recorded_ns)
        lines = text.split("\n")
        wrapped = find_wrapped(replace(recorded, span=span if span[1] else (len(lines), len(lines))), lines)
        tail = _last_lines(cleaned, span)
        reads = find_file_read(recorded, lines[: span[0]] if span[1] else lines, _read_script)
        failure = _from_error_file(facts, error_file, file, recorded, stderr_tail=tail, wrapped=wrapped, reads=reads)
        return _blame_rendezvous(failure, text)

    def read_stdout() -> str:
        raw = _read_tail(stdout_log)[0][-_STDOUT_TAIL:] if stdout_log else b""
        return undecorate(clean_text(raw.decode("utf-8", "replace")))

    def lived_ns(found: FailureText) -> int | None:
        printed_ns = _printed_ns(raw, found.span, output)
        return facts.ended_ns - printed_ns if printed_ns else None

    found, source, printed = find_explanation(facts, text, read_stdout, lived_ns)
    if found is not None and found.kind is TextKind.LAST_LINE and source is EvidenceSource.STDOUT:
        found = found if facts.ended_ns - os.stat(stdout_log).st_mtime_ns < _LIVED_ON_NS else None  # progress
    span = found.span if found is not None and source is EvidenceSource.STDERR else (0, 0)
    # A handler printed it: what nothing catches is printed from the script's first line on.
    is_caught = found is not None and bool(found.exception_type) and not (found.is_prefixed or reaches_top(found))
    facts = replace(facts, printed_ns=_printed_ns(raw, span, output), is_caught=is_caught)
    tail = _last_lines(cleaned, span if found is not None and found.text else (0, 0))
    if (found is None or not found.exception_type) and facts.exitcode > 0 and has_more:
        found = _find_far_back(stderr_log, text, exitcode=facts.exitcode) or found
    if file.problem != "missing":
        problem = file.problem
    if recorded is not None:
        problem = f"its error file has another exception, which did not end it: {cut_end(recorded.summary, _TAIL_LINE)}"
    lines = printed.split("\n") if found is not None else []
    failure = _build(
        facts,
        found,
        message=_exit_message(facts, found),
        source=source if found is not None else EvidenceSource.EXIT,
        error_file=error_file,
        stderr_tail=tail,
        printed_tail=_last_lines(printed, (0, 0)) if source is EvidenceSource.STDOUT else "",
        problem=problem,
        wrapped=find_wrapped(found, lines) if found is not None else None,
        reads=find_file_read(found, lines, _read_script) if found is not None else "",
    )
    return _blame_rendezvous(failure, text)


def _blame_rendezvous(failure: WorkerFailure, text: str) -> WorkerFailure:
    """A hindrance to ``init_process_group`` is the cause of what reads like a peer's absence there."""
    notes = [line for line in text.split("\n") if line.startswith(NOTE)] if NOTE in text else []
    is_there = "in init_process_group" in failure.traceback
    if not notes or not is_there or failure.failure_class not in (FailureClass.SYMPTOM, FailureClass.INFRASTRUCTURE):
        return failure
    return replace(
        failure, failure_class=FailureClass.ROOT, category=Category.INPUT, reason=notes[-1].removeprefix(NOTE)
    )


def _printed_ns(raw: bytes, span: tuple[int, int], output: Output | None) -> int:
    """The time at which the first line of `span` (in `raw`, cleaned) was printed; 0: not known."""
    if output is None or not span[1]:
        return 0
    begin = 0
    for number, end in enumerate(_LINE_END.finditer(raw)):
        if number == span[0]:
            return output.printed_ns(len(raw) - begin)
        begin = end.end()
    return 0


def _recorded(file: ErrorFile) -> FailureText:
    found = find_python_traceback(file.traceback) if file.traceback else None
    declared = file.own.get("exception_type")
    name, separator, rest = file.message.partition(": ")
    # The traceback's last line names the type with its module, as stderr does; a writer may name another one.
    if found is not None and (not isinstance(declared, str) or declared in ("", found.exception_type.rsplit(".")[-1])):
        return found
    looks_like_type = bool(separator) and re.fullmatch(r"[A-Za-z_][\w.]*", name) is not None
    exception_type = declared if isinstance(declared, str) and declared else name if looks_like_type else ""
    body = rest if looks_like_type and name.rsplit(".", 1)[-1] == exception_type.rsplit(".", 1)[-1] else file.message
    return FailureText(
        kind=TextKind.PYTHON,
        text=file.traceback.rstrip("\n"),
        exception_type=exception_type,
        message=body,
        frames=found.frames if found else (),
        source=found.source if found else "",
        caller=found.caller if found else "",
        earlier=found.earlier if found else (),
    )


def _from_error_file(
    facts: WorkerFailure, error_file: str, file: ErrorFile, recorded: FailureText, **beside: Any
) -> WorkerFailure:
    return _build(
        facts,
        recorded,
        message=file.message or recorded.summary,
        source=EvidenceSource.ERROR_FILE,
        error_file=error_file,
        problem=file.problem,
        **beside,
    )


def _did_not_end(recorded: FailureText, file: ErrorFile, text: str, facts: WorkerFailure, error_file: str) -> bool:
    """The script may have handled it, and a later one, a signal or an exit code of its own came; or a child left it,
    which has the same error file. What Python printed as uncaught ended it, whatever came in its shutdown.
    """
    if not recorded.frames:
        return False
    lines = text.split("\n")
    ended = find_uncaught(text, lines, exitcode=1)
    is_certain = ended is not None and bool(ended.frames) and (ended.is_prefixed or reaches_top(ended))
    is_same = ended is not None and not {*map(_start, ended.chain)}.isdisjoint(map(_start, recorded.chain))
    if facts.exitcode == 1:
        return is_certain and not is_same
    if facts.stopped_by_agent or file.timestamp_ns is None or (is_certain and is_same):
        return False
    # torch writes whole seconds; the file's own time has the rest, where its server's clock is about right.
    rest_ns = _WHOLE_SECOND_NS
    with suppress(OSError):
        written_ns = os.stat(error_file).st_mtime_ns - file.timestamp_ns
        rest_ns = written_ns if 0 <= written_ns < _WHOLE_SECOND_NS else rest_ns
    return facts.ended_ns - file.timestamp_ns - rest_ns >= _LIVED_ON_NS - _WHOLE_SECOND_NS


def _start(raised: RaisedException) -> tuple[str, str]:
    return raised.exception_type.rsplit(".", 1)[-1], raised.message.split("\n", 1)[0][:200]


def _build(
    facts: WorkerFailure,
    found: FailureText | None,
    *,
    message: str,
    source: EvidenceSource = EvidenceSource.EXIT,
    error_file: str = "",
    stderr_tail: str = "",
    problem: str = "",
    printed_tail: str = "",
    wrapped: RaisedException | None = None,
    reads: str = "",
) -> WorkerFailure:
    number = signal_of(facts.exitcode)
    chain = found.chain if found else ()
    if wrapped is not None:
        chain = (*chain, wrapped)
    classified = classify(
        facts,
        chain=chain,
        message=found.message if found else message,
        node_bytes=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        stderr_tail=stderr_tail,
        printed_tail=printed_tail,
        is_said=found is not None and not chain,
        overcommits=overcommits_memory(),
    )
    origin = find_origin(chain)
    exception_type = origin.exception_type if origin else ""
    words = origin.message if origin else found.message if found else ""
    if origin is not None and origin is not chain[0]:
        message = f"{exception_type}: {words}" if words else exception_type
    if found is not None and wrapped is not None:
        if origin is wrapped and not wrapped.exception_type and not is_wrapper(found):
            origin, exception_type, words, message = chain[0], found.exception_type, found.message, found.summary
        outer, inner = summary_line(message), wrapped.headline
        if is_wrapper(found):
            message = f"{inner} ({outer})"
        else:
            is_own = is_raised_by_script(found) and not is_wrapper(found.chain[-1])
            message = f"{outer} ({LOGGED_BEFORE if is_own else ''}{inner})"
        if is_wrapper(found) and wrapped.exception_type:
            origin, exception_type, words = wrapped, wrapped.exception_type, wrapped.message
    if reads:
        first, separator, more = message.partition("\n")
        message = f"{first} (file: {reads}){separator}{more}"
    return replace(
        classified,
        signal=signal_name(number),
        message=message,
        exception_type=exception_type,
        traceback=found.text if found else "",
        stderr_tail=stderr_tail,
        fingerprint=fingerprint(
            # sys.exit(3), recorded: as where nobody records it, and only the code is known.
            exception_type="" if exception_type == "SystemExit" and words.isdigit() else exception_type,
            message=words,
            frames=origin.frames if origin else (),
            exitcode=facts.exitcode,
            signal=signal_name(number),
            is_said=found is not None and found.kind is TextKind.LINES,
        ),
        source=source,
        error_file=error_file,
        problem=problem,
    )


def _exit_message(facts: WorkerFailure, found: FailureText | None) -> str:
    number = signal_of(facts.exitcode)
    if found is not None and found.exception_type:
        return f"{found.exception_type}: {found.message}" if found.message else found.exception_type
    said = found.message if found is not None else ""
    if said:
        how = signal_name(number) or f"exit code {facts.exitcode}"
        _, separator, more = said.partition("\n")
        return f"{summary_line(said)} ({how}{', core dumped' if facts.core_dumped else ''}){separator}{more}"
    if facts.exitcode < 0:
        text = f"Signal {number} ({signal_name(number)}) received by PID {facts.pid}"
    else:
        text = f"Process failed with exitcode {facts.exitcode}"
        if number:
            text += f" ({signal_name(number)}, as a shell reports it)"
    if facts.oom_kills and number == 9:
        where = "on its node" if facts.is_nodes_oom else "in its cgroup"
        text = f"Out of memory: {text}; the OOM killer struck {where}"
    if facts.core_dumped:
        text += "; core dumped"
    return text


def _read_tail(path: str) -> tuple[bytes, bool, str]:
    try:
        with EndReader(path) as file:
            return file.read(_TAIL), file.has(_TAIL), ""
    except FileNotFoundError:
        return b"", False, ""  # it printed nothing
    except OSError as error:
        return b"", False, f"stderr.log is unreadable: {error}"


def _find_far_back(path: str, tail: str, *, exitcode: int) -> FailureText | None:
    step, end = 1 << 17, 0  # a message of megabytes has its header before the tail; larger buffers cost page faults
    with EndReader(path) as file:
        while end < _SCAN_BACK and file.has(end):
            overlap = min(end, len(_HEADER))
            part = file.read(step + overlap, before=end - overlap)
            at = part.rfind(_HEADER) if _HEADER[:1] in part else -1  # a tenth of the time in a long message
            if at < 0:
                end += step
                continue
            # From the lines before it on: "Exception ignored in" would stand there.
            first = end - overlap + len(part) - at + 4096
            count = min(first, _FAR_PART)
            begin = clean_text(file.read(count, before=first - count).decode("utf-8", "replace"))
            text = undecorate(begin + tail)
            found = find_uncaught(text, text.split("\n"), exitcode=exitcode)
            return replace(found, span=(0, 0), exception_at=0) if found is not None else None
    return None


def _read_script(path: str) -> list[str]:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read(1 << 20).split("\n")
    except (OSError, ValueError):
        return []


def _last_lines(text: str, without: tuple[int, int]) -> str:
    found: list[str] = []
    lines = text.split("\n")
    for at in range(len(lines) - 1, -1, -1):
        if len(found) == 20:
            break
        if not without[0] <= at < without[1] and lines[at].strip():
            found.append(cut_end(lines[at], _TAIL_LINE))
    return "\n".join(reversed(found))
