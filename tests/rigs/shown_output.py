"""The output that the documentation shows, held to what the program prints.

A block of output stands below a mark that names the session that printed it::

    <!-- output: first-run -->
    ```text
    [node0:0] epoch 3/10: loss=0.394039 accuracy=0.9222
    ```

Every line of a block must be a line of that session, and the lines of one source (``[node0]``, ``[node0:0]``, the
report) stand in its order; a block may leave lines out. Ids, times, durations, pids, ports and versions are normalised,
and so is which of two true lines a race printed (`RACES`). A block marked ``<!-- output: convert, whole -->`` shows all
lines. In a block of commands the lines after ``$ `` are output. A line that is longer than `WIDTH` goes on below, after
``↪``.

``--update-docs`` has the test write the lines anew: a line that was not printed is replaced by the most similar one.
"""

from __future__ import annotations

import difflib
import re
import socket
import textwrap
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.rigs.golden_report import normalise

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
GENERATED = {ROOT / "docs" / "reference" / "cli.md"}
"""Its blocks are written by docs/generate.py, and compared there."""

WIDTH = 88
"""Characters of a code block's line that a page has room for."""
_GOES_ON = "    ↪ "

_FENCE = re.compile(
    r"(?:^(?P<indent> *)<!-- output: (?P<session>[\w-]+)(?P<whole>, whole)? -->\n)?"
    r"^ *```(?P<language>\w*)\n(?P<text>.*?)^ *```$",
    re.MULTILINE | re.DOTALL,
)
_SOURCE = re.compile(r"\[[\w:-]+\] |\S*")
_LEAST_ALIKE = 0.5
_RULES = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\b(hpc_elastic|python|torch|Slurm) \d+\.[\w.+]+", r"\1 <VERSION>"),
        (r"\b\d+\.\d{3,}\b", "<FIGURE>"),
        (r"\bstep \d+\b", "step <N>"),
        (r"\b\d+(?:\.\d+)? of <N> s\b", "<N> of <N> s"),
        (r"\bjob( +)\d+\b|\breport \d+\b", "job <JOB>"),
        (r" \(\+\d+ more\)$", ""),
        (r" +", " "),
    )
)
RACES = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        # Whether a rank saw its peer's connection closed before its agent ended it.
        (
            r"^ verdict : (?:first of 4; the others were stopped within <N> ms"
            r"|the only failure that is not a consequence of another one; "
            r"(?:1 other is a consequence|\d others are consequences))$",
            "  verdict  : <FIRST, OR WITH CONSEQUENCES>",
        ),
        (r"^( +round 0: .*: Signal 9 \(SIGKILL\)) re.*$", r"\1 <WITH OR WITHOUT CONSEQUENCES>"),
        # Whether the coordinator heard of the failure by a packet, or read the failure itself, with what followed it.
        (
            r"^(\[node0\] round opened \(round 1\)): (?:rank 2 ended with SIGKILL on node2"
            r"|rank 2: Signal 9 \(SIGKILL\) received by PID <PID> on node2)$",
            r"\1: <RANK 2, OR ITS FAILURE>",
        ),
    )
)
"""Lines of which a race decides the words: each of them is true, and any may be shown."""


@dataclass(frozen=True, kw_only=True)
class Block:
    page: Path
    session: str
    """Empty where no mark stands above it."""
    whole: bool
    language: str
    text: str
    span: tuple[int, int]
    """Where its text stands in the page."""

    @property
    def shown(self) -> list[str]:
        text = (
            re.sub(r"^\s*\$ (?:.*\\\n)*.*$", "", self.text, flags=re.MULTILINE)
            if self.language == "console"
            else self.text
        )
        return [line for line in text.splitlines() if line.strip() and line.strip() != "…"]

    @property
    def where(self) -> str:
        return f"{self.page.relative_to(ROOT)}: {next(iter(self.shown), '')}"


def blocks() -> Iterator[Block]:
    """Every fence of the documentation, but those of generated pages."""
    for page in PAGES:
        if page not in GENERATED:
            yield from blocks_of(page)


def blocks_of(page: Path) -> Iterator[Block]:
    for match in _FENCE.finditer(page.read_text(encoding="utf-8")):
        yield Block(
            page=page,
            session=match["session"] or "",
            whole=match["whole"] is not None,
            language=match["language"],
            text=re.sub(rf"\n{_GOES_ON}", " ", match["text"]),
            span=match.span("text"),
        )


def has_output(block: Block) -> bool:
    """Whether a fence shows what a program prints: it says so, has lines that are no commands, or says nothing."""
    return block.language in ("", "text") or (block.language == "console" and bool(block.shown))


@dataclass(frozen=True, kw_only=True)
class Session:
    output: str
    folder: Path
    """Everything lay below it."""
    shown_as: str = ""
    """What the documentation shows in its place."""

    def lines(self) -> list[str]:
        """As the documentation may show them."""
        text = self.output.replace(str(self.folder), self.shown_as).replace(f"{ROOT}/.venv/bin/", "")
        text = re.sub(rf"\b{re.escape(socket.gethostname())}\b", "workstation", text)
        return [line.rstrip() for line in text.splitlines()]

    def problems(self, block: Block) -> list[str]:
        """The lines of a block that this session did not print, and those in another order."""
        printed: dict[str, list[str]] = defaultdict(list)
        for line in self.lines():
            printed[_source(line)].append(self.key(line))
        if block.whole:
            here, there = [self.key(line) for line in block.shown], [self.key(line) for line in self.lines() if line]
            return [] if here == there else list(difflib.unified_diff(here, there, "shown", "printed", lineterm=""))
        found, reached = [], defaultdict(int)
        for line in block.shown:
            source, key = _source(line), self.key(line)
            try:
                reached[source] = printed[source].index(key, reached[source]) + 1
            except ValueError:
                alike = max(printed[source], key=lambda other: self._alike(line, other), default="nothing")
                found.append(f"{line}\n        the nearest: {alike}")
        return found

    def updated(self, block: Block) -> str:
        """A block's text with this session's lines."""
        if block.whole:
            return "".join(f"{fitted(line)}\n" for line in self.lines() if line)
        shown, printed, reached, found = block.shown, self.lines(), defaultdict(int), []
        for line in block.text.splitlines():
            if line not in shown:
                found.append(fitted(line))
                continue
            source = _source(line)
            rest = [
                (number, other) for number, other in enumerate(printed)
                if _source(other) == source and number >= reached[source]
            ]  # fmt: skip
            alike = [(self._alike(line, other), -number, other) for number, other in rest]
            ratio, number, other = max(alike, default=(0.0, 0, ""))
            assert ratio >= _LEAST_ALIKE, f"{block.where}: nothing like this line was printed: {line}"
            reached[source] = 1 - number
            found.append(fitted(other))
        return "".join(f"{line}\n" for line in found)

    def _alike(self, one: str, other: str) -> float:
        return difflib.SequenceMatcher(None, self.key(one), self.key(other)).ratio()

    def key(self, line: str) -> str:
        """A line without what changes from run to run."""
        key = normalise(line.rstrip(), folder=self.folder)
        for pattern, replacement in (*_RULES, *RACES):
            key = pattern.sub(replacement, key)
        return key


def fitted(line: str) -> str:
    """A line as a page shows it; an option of a command stays with its value."""
    kept = re.sub(r"(?<= )(-\S+) (?=[^-\s])", "\\1\xa0", line) if line.endswith("\\") else line
    return textwrap.fill(
        kept, WIDTH, subsequent_indent=_GOES_ON, break_long_words=False, break_on_hyphens=False, expand_tabs=False
    ).replace("\xa0", " ")


def _source(line: str) -> str:
    match = _SOURCE.match(line)
    return match[0] if match is not None and match[0].startswith("[") else ""


class ShownOutput:
    """The blocks of the documentation, by session."""

    def __init__(self, *, update: bool) -> None:
        self._update = update

    def check(self, name: str, session: Session) -> None:
        """Compare all blocks of a session with what it printed, or write them anew."""
        marked = [block for block in blocks() if block.session == name]
        assert marked, f"no page shows {name}"
        wrong = {block.where: problems for block in marked if (problems := session.problems(block))}
        if wrong and self._update:
            self._write(marked, session)
            return
        told = "\n".join(f"{where}\n    " + "\n    ".join(lines) for where, lines in wrong.items())
        assert not wrong, f"not printed by {name} (pytest --update-docs writes the lines anew):\n{told}"

    @staticmethod
    def _write(marked: Sequence[Block], session: Session) -> None:
        for block in sorted(marked, key=lambda block: -block.span[0]):
            text = block.page.read_text(encoding="utf-8")
            begin, end = block.span
            block.page.write_text(text[:begin] + session.updated(block) + text[end:], encoding="utf-8")
