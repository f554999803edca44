"""Finds what an end comes from: the exception of a chain, and what it means, or the lines that were printed last.

An exception is judged by where it was raised, then by its text. A text that speaks of a peer ("connection reset by
peer") counts only where torch, gloo or NCCL raised the exception or wrote the line, and a text of the system's error
numbers only where the script did not write it itself.

The last lines count where there is no exception, or beside one. Progress bars, loggers' lines, warnings and dumps say
nothing. Of what is left the last line that speaks of an error counts, else the last line of all, unless it is one of a
row of alike lines: those are the program's progress.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import lru_cache

from msgspec import Struct

from hpc_elastic.base.text import cut_end
from hpc_elastic.failures.failure_text import HEADER, FailureText, RaisedException, user_frames
from hpc_elastic.failures.patterns import DISK_FULL, KERNEL_CHECK, SHM_FULL, SYMPTOM_TYPES, FailurePattern, find_pattern
from hpc_elastic.failures.ranking import FailureClass
from hpc_elastic.failures.traceback_text import find_tracebacks

_NEAR_END = 12
"""The line that speaks of an error stands at most so many lines from the end."""
_LINE_LIMIT = 600
_FOLLOWING = 4
_MOST_USAGE = 40
_MOST_LINES = 200

# Texts, which `re` compiles at the first use and keeps: agents need none of them at their start, for 3 ms of it.
# Lines that say nothing about an end: loggers' below ERROR, warnings, progress, the stacks and dumps of other parts.
_SILENT = (
    r"\s*\Z|\[rank\d+\]:\[[WI]|\[?[WID]\d{4}[ \]]|\[[WID]\d* |\S+:\d+:\d+ \[\d+\] NCCL (?:INFO|TRACE)|wandb: (?!ERROR)"
    r"|slurmstepd: |srun: |\S+\.py:\d+: \w*Warning: |.{0,80}?\b\d+%\|"
    r"|\s?Try '.*' for help|\s*(?:[Uu]sage|USAGE):(?: |\Z)"
    r"|Set the environment variable |(?:Current t|T)hread 0x|Extension modules: "
    r"|frame #\d|Exception raised from |Current thread's C stack|Binary file |Abort(?:ed|) \(core dumped\)|\+ \S"
    r"|Exception ignored |--- Logging error ---|sys:1: |\*+\Z|[-=_~#*─]{4,}\Z|Fatal Python error: (?:Abort|Segm)"
    r"|could not write the error file |make(?:\[\d+\])?: \*\*\* |ninja: build stopped"
    r"|Pass --help|={4,} (?:\d+ (?:failed|passed|error)|short test summary|FAILURES|ERRORS|test session).*={4,}\Z"
    r"|_{4,} .* _{4,}\Z"
    # Stacks and dumps of other languages: C++, AddressSanitizer, Java, Rust, Go, Julia, Fortran.
    r"|\s+at \S|\s*#\d+ +0x|\s+@ |\s{2,}\d+: |\s+\.\.\. \d+ more|\s*\[\d+\] \S+\(.*\)|goroutine \d+ "
    r"|[\w/.-]+\.[\w(*).]+\((?:0x[0-9a-f]+.*|\.\.\.)?\)\Z"
    r"|\s+\S+\.go:\d+|exit status \d+\Z|(?:note|NOTE): |[Ss]tack ?(?:backtrace|trace):|Error termination\. Backtrace"
    r"|\*\*\* .{0,40}stack trace|(?:=>|  )0x[0-9a-f]+:|Shadow byte|==\d+==ABORTING"
    r"|Node\.js v\d|in expression starting at "
    r"|\s+[A-Z][\w' ]+(?: \(.*\))?: +(?:0\d|[a-f][\da-f])(?: [\da-f]{2})*\Z"
    r"|During handling of the above |The above exception was |[╭╰┌└][─-]+|Python runtime state: |Stack \(most recent"
)
_LOGGED = (
    r"(?:DEBUG|INFO|WARNING)[: ]|.{0,60}?[\s\[|:](?:DEBUG|INFO|WARNING|WARN|TRACE|SUCCESS)[\s\]|:]"
    r'|\{.*"(?:level|levelname|log_level|severity|lvl)": ?"(?i:trace|debug|info|notice|warn|warning)"'
)
_STRONG = (
    r"(?i)"
    r"error\b|\b(?:fatal|critical|panic(?:ked)?|assertion|assert|abort(?:ed|ing)?|exception|failed|failure)\b|\w\(\): "
    r"|\*\*\* |MPI_ABORT"
)
_TELLING = (
    r"(?i)"
    r"invalid|cannot|can't|could not|couldn't|unable|no such|not found|denied|unbound|corrupt|\bnan\b|\binf\b|exceed"
    r"|missing|killed|out of memory|segmentation|undefined|diverged|giv(?:e|ing) up|mismatch|unknown|unexpected|must "
    r"|not in |does not|doesn't|too (?:many|few|small|large|long)|refus|timed out|timeout|illegal|unsupported|required"
    r"|interrupt|stall|\bhung\b|\bhangs?\b|stuck|no progress|expired|exhaust|watchdog|deadline|stopping"
)
_ONLY_ENDS = (
    r"(?i)\b(?:exiting|aborting|quitting|terminating|giving up|stopping|not recoverable)\b|\b(?:see|errors?) above\b"
    r"|Error \d+\Z"
)
_NUMBER = r"\d[\d.,:e+-]*"
_TIME = r"\[?\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d(?:[.,]\d+)?Z?\]?\s*(?:[-|]\s*)?"
_BOX = r"[│|] (.*?)\s*[│|]\s*\Z"
_BOX_TOP = r"[╭┌+][─-]+ .* [─-]+[╮┐+]\s*\Z"
_USAGE = r"\s*(?:[Uu]sage|USAGE):(?: |\Z)"
_HYDRA_RAN = "Error executing job with overrides: "
_HYDRA_END = "Set the environment variable HYDRA_FULL_ERROR=1 "


class LastLines(Struct, frozen=True, kw_only=True):
    text: str
    is_telling: bool
    """It speaks of an error; else it is the last line, whatever it says."""
    at: int


def find_last_lines(lines: Sequence[str]) -> LastLines | None:
    """Find the line that tells why a process ended; None where there is none, or nothing but a row of alike ones."""
    lines = [line[: 2 * _LINE_LIMIT] for line in lines]  # a line of megabytes costs no more than another
    first = max(0, len(lines) - _MOST_LINES)
    spoken = [(first + at, line) for at, line in speaking_lines(lines[first:]) if not re.match(_LOGGED, line)]
    if not spoken:
        return _usage(lines, len(lines))
    near = spoken[-_NEAR_END:]
    for pattern in (_STRONG, _TELLING):
        for index in range(len(near) - 1, -1, -1):
            if re.search(pattern, near[index][1]) and not _is_progress(near[index][1], spoken):
                at, line = _start_of_message(lines, *near[_first_of_it(near, index)])
                return LastLines(text=_paragraph(lines, at, line), is_telling=True, at=at)
    at, line = spoken[-1]
    if _is_progress(line, spoken):
        return None
    return _usage(lines, at) or LastLines(text=_paragraph(lines, at, line), is_telling=False, at=at)


def _usage(lines: Sequence[str], end: int) -> LastLines | None:
    for at in range(end - 1, max(-1, end - _MOST_USAGE), -1):
        if match := re.match(_USAGE, lines[at]):
            text = lines[at].strip() if match.end() < len(lines[at]) else " ".join(map(str.strip, lines[at : at + 2]))
            return LastLines(text=cut_end(text, _LINE_LIMIT), is_telling=False, at=at)
    return None


def speaking_lines(lines: Sequence[str]) -> list[tuple[int, str]]:
    """The lines that may say something, with their numbers: without tracebacks, which are judged by themselves."""
    found: list[tuple[int, str]] = []
    inside = warned = False
    is_silent = re.compile(_SILENT).match
    for at, line in enumerate(lines):
        if line.endswith(HEADER):
            inside, warned = True, False
        elif inside:
            inside = line.startswith("  ") or not line.strip()
        elif warned and line.startswith("  "):
            warned = False
        elif not is_silent(line) and not line.startswith('  File "'):
            match = re.match(_BOX, line) if line.startswith(("│", "|")) else None
            found.append((at, match[1] if match else line))
        else:
            warned = "Warning: " in line
    return found


def _first_of_it(near: Sequence[tuple[int, str]], index: int) -> int:
    """The line before one that only says that it ends now: "tar: Error is not recoverable: exiting now"."""
    while index > 0 and re.search(_ONLY_ENDS, near[index][1]):
        before = near[index - 1][1]
        if not (re.search(_STRONG, before) or re.search(_TELLING, before)):
            break
        index -= 1
    return index


def _start_of_message(lines: Sequence[str], at: int, line: str) -> tuple[int, str]:
    """The first line of the message in which `line` stands: of a box, and of what hydra says of a configuration."""
    first = at
    if re.match(_BOX, lines[at]):
        while first > 0 and re.match(_BOX, lines[first - 1]):
            first -= 1
        if first > 0 and re.match(_BOX_TOP, lines[first - 1]):
            at = first
    else:
        while first > 0 and not re.match(_SILENT, lines[first - 1]) and not lines[first - 1].startswith(_HYDRA_RAN):
            first -= 1
        if any(after.startswith(_HYDRA_END) for after in lines[at : at + _NEAR_END]):
            at = first
    match = re.match(_BOX, lines[at])
    return at, match[1] if match else lines[at]


def goes_on(before: Sequence[str], after: Sequence[str]) -> bool:
    shapes = {_shape(line) for _, line in speaking_lines(after)}
    return bool(shapes) and any(_shape(line) in shapes for _, line in speaking_lines(before))


def has_progress(lines: Sequence[str]) -> bool:
    spoken = speaking_lines(lines)
    return any(_is_progress(line, spoken) for _, line in spoken[-3:])


def _is_progress(line: str, spoken: Sequence[tuple[int, str]]) -> bool:
    shape = _shape(line)
    if shape == line:  # no number in it: the same sentence again is no progress
        return False
    return sum(_shape(other) == shape for _, other in spoken) > 2


def _shape(line: str) -> str:
    return re.sub(_NUMBER, "#", line)


def _paragraph(lines: Sequence[str], at: int, line: str) -> str:
    text = [cut_end(re.sub(_TIME, "", line, count=1).strip(), _LINE_LIMIT)]
    for following in lines[at + 1 : at + 1 + _FOLLOWING]:
        if re.match(_SILENT, following) or re.match(_LOGGED, following) or following.endswith(HEADER):
            break
        match = re.match(_BOX, following)
        if match is None:
            text.append(cut_end(following.rstrip(), _LINE_LIMIT))
        else:  # a box has wrapped it
            if re.match(_SILENT, match[1]):
                break
            text[-1] = cut_end(f"{text[-1]} {match[1].strip()}", _LINE_LIMIT)
    return "\n".join(text)


_COLLECTIVE_TYPE = r"torch\.distributed\.|(?:\w+\.)*(?:C10d|Dist(?:Backend|Network|Store)?)Error\Z"
_COLLECTIVE_FILE = r"/torch/(?:distributed/|nn/parallel/|autograd/|_C)"
_SHARED_MEMORY_FILE = r"/multiprocessing/(?:shared_memory|synchronize|heap|queues)\.py\Z"
# What gloo, NCCL and c10d put into all that they say: their names, or the place in their source.
_COLLECTIVE_TEXT = (
    r"gloo|nccl|c10d|tcpstore|processgroup|torch\.distributed|monitoredbarrier|net/ofi|\bucx\b|\brank ?\d+\]"
    r"|\bdist(?:backend|network|store)?error\b|\w\.(?:cc|cpp|cu|hpp):\d+|\bpg (?:id )?\d+ |watchdog|remote worker"
)
_QUOTED_TEXT = (
    r"\w\.(?:cc|cpp|cu|hpp):\d+|nccl error|nccl\w+error\b|dist(?:backend|network|store)error"
    r"|remote worker (?:crash|before rep)"
)
"""The same in a message that the script put together: there the name of a library alone shows nothing."""
_ERROR_NUMBER = r"\berrno\b|\bos error \d|\berror (?:code|number) \d|\w\.(?:cc|cpp|cu|hpp):\d+|can't allocate"
_SYSTEM_TYPES = r"(?:OSError|IOError|\w*(?:Connection|Permission|File|Process|Pipe)\w*Error|MemoryError)\Z"
_RAISES = r"\b(?:raise|assert)\b"
# Libraries that call a service outside the job: their "connection reset by peer" is not about another rank.
_OTHER_SERVICES = (
    "requests.", "urllib", "http", "aiohttp.", "boto", "huggingface_hub.", "wandb.", "google.", "azure.", "s3fs.",
    "gcsfs.", "openai.", "grpc.", "redis.", "psycopg", "sqlalchemy.", "pymongo.",
)  # fmt: skip
_EXPECTED = frozenset(
    {"KeyError", "IndexError", "AttributeError", "StopIteration", "Empty", "Full", "FileNotFoundError", "TimeoutError",
     "FileExistsError", "ImportError", "ModuleNotFoundError", "BlockingIOError", "LookupError", "NotImplementedError"}
)  # fmt: skip
"""A script catches them in the line that raises them, as a part of its normal course."""
_CLEANS_UP = r"(?i)__a?exit__|__del__|close|clean_?up|tear_?down|shut_?down|finali[sz]e"
"""A function that runs while an exception goes up, too: what fails in it follows from that."""
_COLLECTIVE_WAIT = r"\.wait\(|\b(?:group|pg|backend)\.\w+\("
_COLLECTIVE_CALL = rf"{_COLLECTIVE_WAIT}|\bdist\.|\bdistributed\.|\.backward\("
_LIMITS_TIME = r"(?i)time ?-?out|timed out|took (?:too )?long|longer than|within \d|no progress|stall|hung|hang"

OF_ANOTHER_RANK = FailurePattern(FailureClass.SYMPTOM, "another rank's part in a checkpoint failed", ())
"""torch.distributed.checkpoint gathers what the ranks raised, and raises it on all of them."""
OWN_TIME_LIMIT = FailurePattern(FailureClass.SYMPTOM, "its own time limit struck while it waited for its peers", ())
"""A handler of SIGALRM that the script has set raised it, with a collective under it in the stack."""
OWN_WATCHDOG = FailurePattern(FailureClass.SYMPTOM, "its own watchdog ended it, since it made no progress", ())
"""A thread of the script ended the process: which rank it waited for, or that it waited for none, it did not know."""
_WATCHDOG = (
    r"(?i)\bno (?:progress|step|iteration|heartbeat)s?\b.{0,30}\b(?:for|within|in|since)\b"
    r"|\b(?:watchdog|monitor)\b.{0,60}\b(?:time ?out|timed out|expired|stall|hang|hung|stuck)"
    r"|\b(?:training|process|step|loop) (?:is|seems|appears|looks) (?:to be )?(?:hung|hanging|stalled|stuck)\b"
)


def explain_chain(chain: Sequence[RaisedException], *, rank: int = -1) -> FailurePattern | None:
    """Explain the exception of the global rank `rank` with all that it was raised from, the last one first.

    The first one decides whether it is a symptom: what is raised in the ``finally`` of a failure follows from it.
    """
    failed = {raised.rank for raised in chain if raised.rank is not None}
    if failed and rank >= 0 and rank not in failed:
        return OF_ANOTHER_RANK
    known = [explain(raised) for raised in reversed(_without_expected(chain))]
    if known and known[0] is not None and known[0].failure_class is FailureClass.SYMPTOM:
        return known[0]
    return next((row for row in known if row is not None and row.failure_class is not FailureClass.SYMPTOM), None)


def find_origin(chain: Sequence[RaisedException]) -> RaisedException | None:
    """Find the exception to name: the last one that is not a consequence of one before it."""
    kept = _without_expected(chain)
    if not kept:
        return None
    named = kept[-1]
    for raised in reversed(kept[:-1]):
        functions = (frame.function for frame in user_frames(raised.frames)) if named.while_handling else ()
        if any(re.search(_CLEANS_UP, function) for function in functions):
            return named
        row = explain(raised)
        if row is not None and row.failure_class is FailureClass.SYMPTOM:
            return named
        named = raised
    return kept[0]


def explain(raised: RaisedException) -> FailurePattern | None:
    if not raised.exception_type:
        return explain_text(raised.message)
    if _is_of_own_limit(raised):
        return OWN_TIME_LIMIT
    name = raised.exception_type.rsplit(".", 1)[-1]
    of_collective = is_of_process_group(raised)
    of_script = is_raised_by_script(raised)
    of_service = raised.exception_type.startswith(_OTHER_SERVICES)
    of_system = re.match(_SYSTEM_TYPES, name) is not None

    def accept(row: FailurePattern, line: str) -> bool:
        if row.failure_class is FailureClass.SYMPTOM:
            return of_collective or not (of_script or row.is_common or of_service)
        return not row.is_common or not of_script or of_system or re.search(_ERROR_NUMBER, line) is not None

    row = find_pattern(_ends(f"{raised.exception_type}: {raised.message}"), accept)
    if row is None and of_collective and name in SYMPTOM_TYPES:
        return FailurePattern(FailureClass.SYMPTOM, SYMPTOM_TYPES[name], ())
    if row is DISK_FULL and raised.frames and re.search(_SHARED_MEMORY_FILE, raised.frames[-1].file):
        return SHM_FULL
    return row


def explain_text(text: str) -> FailurePattern | None:
    if re.search(_WATCHDOG, text.split("\n", 1)[0]) and "nccl" not in text.lower():
        return OWN_WATCHDOG
    return find_pattern(
        _ends(text),
        lambda row, line: (
            row.failure_class is not FailureClass.SYMPTOM
            or not row.is_common
            or re.search(_COLLECTIVE_TEXT, line) is not None
        ),
    )


def is_of_process_group(raised: RaisedException) -> bool:
    """torch's process group, gloo or NCCL raised it: by its type, its innermost frame, else by its text."""
    if raised.exception_type.startswith(_OTHER_SERVICES):
        return False
    if re.match(_COLLECTIVE_TYPE, raised.exception_type) or "::" in raised.exception_type:  # a C++ library ended it
        return True
    text = raised.message.lower()
    if is_raised_by_script(raised):
        return re.search(_QUOTED_TEXT, text) is not None
    if raised.frames and re.search(_COLLECTIVE_FILE, raised.frames[-1].file):
        return True
    # A call into C++ has no frame of its own: ``work.wait()`` of the script.
    return raised.exception_type == "RuntimeError" and re.search(_COLLECTIVE_TEXT, text) is not None


def is_in_collective(raised: RaisedException) -> bool:
    """It came from a call in which a rank waits for others, or may have: by its frames and lines of code."""
    if any(re.search(_COLLECTIVE_FILE, frame.file) for frame in raised.frames):
        return True
    return re.search(_COLLECTIVE_CALL, f"{raised.caller}\n{raised.source}") is not None


def _is_of_own_limit(raised: RaisedException) -> bool:
    """The script interrupted a collective for the time that it took: a handler of a signal, or a thread."""
    if (
        raised.exception_type == "KeyboardInterrupt"
        and raised.frames
        and re.search(_COLLECTIVE_FILE, raised.frames[-1].file)
    ):
        return re.search(_WATCHDOG, raised.message) is not None  # `_thread.interrupt_main()` after a line that says why
    if (
        len(raised.frames) < 2
        or not re.search(_COLLECTIVE_FILE, raised.frames[-2].file)
        or not is_raised_by_script(raised)
    ):
        return False
    if raised.frames[-1].function in raised.caller or not re.search(_COLLECTIVE_WAIT, raised.caller):
        return False
    return "Time" in raised.exception_type or re.search(_LIMITS_TIME, raised.message) is not None


@lru_cache(maxsize=1024)
def gave_up_waiting(headline: str) -> bool:
    return re.search(_LIMITS_TIME, headline) is not None or headline.startswith("TimeoutError")


def is_raised_by_script(raised: RaisedException) -> bool:
    return bool(user_frames(raised.frames[-1:])) and re.search(_RAISES, raised.source) is not None


def _without_expected(chain: Sequence[RaisedException]) -> Sequence[RaisedException]:
    """A first exception that the script caught where it was raised, and went on, is left out: a key not in a cache."""
    first = chain[-1] if chain else None
    if first is not None and len(chain) > 1 and first.while_handling and len(first.frames) == 1:
        name = first.exception_type.rsplit(".", 1)[-1]
        if name in _EXPECTED and explain(first) is None:
            return chain[:-1]
    return chain


def _ends(text: str) -> str:
    return text if len(text) <= 4000 else f"{text[:2500]}\n{text[-1500:]}"


_WAITING = frozenset({"Empty", "TimeoutError", "CancelledError", "BrokenBarrierError", "InvalidStateError"})
"""A thread raises them for which another one's result did not come."""
_WRAPPERS = (
    r"(?:CalledProcessError|ChildFailedError|ProcessExitedException|BrokenProcessPool|SubprocessError|ExecutionError"
    r"|TerminatedWorkerError)\Z"
)
_WORKER_GONE = r"DataLoader worker \(pid.*?(?:exited unexpectedly|is killed by signal)"
_LOOKED_BACK = 400
_CHILD_LINES = 60
_NEAR = 8
"""At most so many speaking lines before its traceback the process logged what led to it."""
_DEEPEST = 4
_READS = r"(?i)\b\w*(?:load|read|restore|resume|open)\w*\("
_LITERAL = r"""["']([^"'\n]*[^"'\n/.]\.[A-Za-z]\w{0,11}|[^"'\n]*\w/\w[^"'\n]*)["']"""
"""A text in code that may be a file's name, fields of an f-string included."""
_PATH = (
    r"""(?:(?:~|\.{0,2})/[\w./@+=-]*\w|(?:[\w@+=-]+/)+[\w.@+=-]*\.(?!\d)\w{1,11}|["'][\w./@+=-]+\.(?!\d)\w{1,11}["'])"""
)
_PRINTED_PATH = rf"(?:(?<=[\s=:(\['\"])|\A){_PATH}"
_ABOVE = 40


def find_wrapped(found: FailureText, lines: Sequence[str]) -> RaisedException | None:
    """Find what an exception hides: what its child printed, or what was logged just before; a line has no type."""
    before = lines[max(0, found.span[0] - _LOOKED_BACK) : found.span[0]]
    if not before or not found.exception_type:
        return None
    if is_wrapper(found) or is_wrapper(found.chain[-1]):
        return _of_child(before)
    text = "\n".join(before)
    logged = next((one for one in reversed(find_tracebacks(text)) if is_near(one, before)), None)
    row = explain_chain(logged.chain) if logged is not None else None
    if logged is not None and row is not None and row.failure_class is FailureClass.SYMPTOM:
        return find_origin(logged.chain)  # what fails in the cleanup after a lost connection follows from that
    known = [row for raised in found.chain if (row := explain(raised)) is not None]
    waits = found.exception_type.rsplit(".", 1)[-1] in _WAITING
    if waits or (is_raised_by_script(found) and not known):
        threads = (one for one in reversed(find_tracebacks(text, threads=True)) if is_near(one, before))
        headlines = {raised.headline for raised in found.chain}
        for one in filter(None, (next(threads, None), None if waits else logged)):
            if one.headline not in headlines:
                return one
    near = [line for _, line in speaking_lines(before)[-_NEAR:]]
    for line in reversed(near):
        row = None if waits or (not known and not is_raised_by_script(found)) else explain_text(line)
        if row is None:
            continue
        # NCCL may have warned of a failure on this node, which its exception does not show.
        is_warning = " NCCL WARN " in line and row.failure_class is not FailureClass.SYMPTOM
        is_local = is_warning and bool(known) and known[0].failure_class is FailureClass.SYMPTOM
        if not known or known[0] is row is KERNEL_CHECK or is_local:
            return RaisedException(exception_type="", message=line.strip())
    return None


def is_near(found: FailureText, before: Sequence[str]) -> bool:
    after = before[found.exception_at + 1 :]
    return len(speaking_lines(after)) <= _NEAR and not has_progress(after)


def is_wrapper(raised: RaisedException) -> bool:
    name = raised.exception_type.rsplit(".", 1)[-1]
    return re.match(_WRAPPERS, name) is not None or re.match(_WORKER_GONE, raised.message) is not None


def _of_child(before: Sequence[str]) -> RaisedException | None:
    for _ in range(_DEEPEST):
        tracebacks = find_tracebacks("\n".join(before))
        if not tracebacks or len(speaking_lines(before[tracebacks[-1].span[1] :])) > _CHILD_LINES:
            break
        if not is_wrapper(tracebacks[-1]):
            return tracebacks[-1]
        before = before[: tracebacks[-1].span[0]]
    last = find_last_lines(before)
    return RaisedException(exception_type="", message=last.text) if last is not None and last.is_telling else None


def find_file_read(found: FailureText, lines: Sequence[str], read_script: Callable[[str], Sequence[str]]) -> str:
    """Name the file in whose reading an exception was raised, where its message names none; empty: not known.

    The line of the script that reads names it, else an earlier line that sets a name which stands there, else what
    the process printed last before its traceback.
    """
    frames = user_frames(found.frames)
    if not frames or not found.exception_type:
        return ""
    code = found.text.split("\n")
    places = {line.strip(): code[at + 1].strip() for at, line in enumerate(code[:-1]) if line.startswith('  File "')}
    calls = [places.get(f'File "{one.file}", line {one.line}, in {one.function}', "") for one in frames]
    is_own = frames[-1] is found.frames[-1] and is_raised_by_script(found)
    if is_own or not re.search(_READS, calls[-1]) or re.search(_PRINTED_PATH, found.message.split("\n", 1)[0]):
        return ""
    for frame, call in zip(reversed(frames), reversed(calls), strict=True):
        if literal := re.search(_LITERAL, call):
            return literal[1]
        names = "|".join(re.findall(r"[A-Za-z_]\w*", call)) or "-"
        for line in reversed(read_script(frame.file)[max(0, frame.line - 1 - _ABOVE) : frame.line - 1]):
            is_set = re.search(rf"\b(?:{names})\s*=[^=]|\bas\s+(?:{names})\s*:", line)
            if is_set and (literal := re.search(_LITERAL, line)):
                return literal[1]
    for _, line in reversed(speaking_lines(lines[max(0, found.span[0] - _LOOKED_BACK) : found.span[0]])[-_NEAR:]):
        if printed := re.findall(_PRINTED_PATH, line):
            return str(printed[-1]).strip("'\"")
    return ""
