"""Finds in what a process printed last the lines that say why it ended, where it left no exception, or beside one.

Progress bars, loggers' lines, warnings and dumps say nothing. Of what is left the last line that speaks of an error
counts, else the last line of all, unless it is one of a row of alike lines: those are the program's progress.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from msgspec import Struct

from hpc_elastic.base.text import cut_end
from hpc_elastic.failures.failure_text import HEADER

_NEAR = 12
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
    near = spoken[-_NEAR:]
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
    for at, line in enumerate(lines):
        if line.endswith(HEADER):
            inside, warned = True, False
        elif inside:
            inside = line.startswith("  ") or not line.strip()
        elif warned and line.startswith("  "):
            warned = False
        elif not re.match(_SILENT, line) and not line.startswith('  File "'):
            match = re.match(_BOX, line)
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
        if any(after.startswith(_HYDRA_END) for after in lines[at : at + _NEAR]):
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
