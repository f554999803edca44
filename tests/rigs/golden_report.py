"""A text report without what changes from one run to the next: the one normaliser of the golden files.

What becomes of a report before it is compared (the rules below, in this order):

- the test's folder, this checkout and the folders of Python's library and of packages: ``<FOLDER>``, ``<LIB>``;
- run ids, times, durations, pids, ports, addresses in memory, the cgroup's and the interpreter's own numbers: ``<…>``;
- line numbers in other people's files;
- that the job log could not keep up with what a worker printed: left out, for a busy machine says it of 10 MB;
- the carets under a line of code, which CPython 3.10 does not print: left out;
- the words of consequences, and how many wordings there are: which of "closed", "reset", "read error" a library says
  is chance. What they tell, and whose they are, `failure_catalogue.Told.consequences` has;
- a line that the report cut at its width is cut earlier, as is a round's line that another time may be: where it
  ends depends on the lengths of the above.

What is *not* touched: the order of lines, their number, ranks, node names, signals, exit codes, steps and all words.
"""

from __future__ import annotations

import re
import sys
import sysconfig
from pathlib import Path

from hpc_elastic.report.render_text import DEFAULT_WIDTH

ROOT = Path(__file__).resolve().parents[2]
_CUT, _CUT_SHORT = 90, 60
_MORE = 10
"""By so much longer a round's line may be another time: its seconds and pids."""
_ROUND = re.compile(r" +rounds? \d")

_LEFT_OUT = re.compile(r"^ *[~^]+ *$|^  output lost  : .* not in the job log: the job log could not keep up$")
_RULES: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        # Folders of libraries, however they are reached or shortened, and line numbers in them.
        (r'File "[^"]*?/(?:site|dist)-packages/([^"]+)", line \d+', r'File "<LIB>/\1", line <N>'),
        (r'File "[^"]*?/lib/python3\.\d+/([^"]+)", line \d+', r'File "<LIB>/\1", line <N>'),
        (r'File "<ROOT>/([^"]+)", line \d+', r'File "<LIB>/\1", line <N>'),
        (r"\(threading\.py:\d+\)", "(threading.py:<N>)"),
        (r'File "<frozen ([\w.]+)>", line \d+', r'File "<frozen \1>", line <N>'),
        (r"('127\.0\.0\.1', )\d+", r"\1<PORT>"),
        (r"\b\d{8}-\d{6}-(\w+)-[0-9a-f]{4}\b", r"<RUN>-\1"),
        (r"\b\d{4}-\d\d-\d\d[_T]\d\d:\d\d:\d\d(?:\.\d+)?", "<TIME>"),
        (r"\b\d\d:\d\d:\d\d\.\d{3}\b", "<TIME>"),
        (r"\(pid: \d+\)", "(pid: <PID>)"),
        (r"\b(PID|pid) \d+", r"\1 <PID>"),
        (r"\b0x[0-9a-f]+\b", "<ADDRESS>"),
        (r"(\[?(?:127\.0\.0\.1|::1|localhost|::ffff:127\.0\.0\.1)\]?:)\d+", r"\1<PORT>"),
        (r"\b(port:?) \d+", r"\1 <PORT>"),
        (r"(?<![\w.])\d+(?:\.\d+)?(?:(?:-| to )\d+(?:\.\d+)?)? s\b", "<N> s"),
        (r"^(Goodput|Uptime): .*", r"\1: <N> %"),  # what is under a twentieth of a second is not told
        (r"\b([Pp]rogress): kernel\b", r"\1: unknown"),  # it took 5 s, on a slow machine
        (r"\b\d+ min \d+ s\b", "<N> s"),
        (r"\bstopped within (?:\d+ ms|<N> s)", "stopped within <N> ms"),
        (r"\bknown to within \d+(?:\.\d+)? ms\b", "known to within <N> ms"),
        (r"\b\d+ bytes of the output", "<N> bytes of the output"),
        (r"(\[(?:consequence|the same failure))(?:, in \d+ wordings)?\]", r"\1]"),
        (r"(\[consequence\]: ).*", r"\1<WORDS>"),
        # Of what a full disk refused, the first file that a node could not write is chance.
        (r"^( {17}\S*/attempt-\d+/)\S+$", r"\1<FILE>"),
        (r"\[\S*?(gloo/\S+?):\d+\]", r"[\1:<N>]"),
        (r"\((threading|subprocess|socket|selectors|queue)\.py:\d+\)", r"(\1.py:<N>)"),  # another one in each Python
    )
)


def normalise(text: str, *, folder: Path) -> str:
    """Take what is volatile out of a text of a run that lies below `folder`."""
    lines = (line for line in text.split("\n") if not _LEFT_OUT.match(line))
    return "\n".join(_normalise_line(line, str(folder)) for line in lines)


def _normalise_line(line: str, folder: str) -> str:
    was_cut = len(line) == DEFAULT_WIDTH and line.endswith("...") and "[consequence" not in line
    line = line.replace(folder, "<FOLDER>").replace(str(ROOT), "<ROOT>")
    for prefix in {sys.prefix, sys.base_prefix, sysconfig.get_paths()["stdlib"]}:
        line = line.replace(prefix, "<PYTHON>") if "File" not in line else line
    for pattern, replacement in _RULES:
        line = pattern.sub(replacement, line)
    if not was_cut and not (_ROUND.match(line) and len(line) > DEFAULT_WIDTH - _MORE):
        return line
    return f"{line[: _CUT if len(line) > _CUT + 3 else _CUT_SHORT].rstrip()} ..."
