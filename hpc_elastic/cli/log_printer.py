"""Prints workers' lines: with their rank before each, and fit for where they go."""

from __future__ import annotations

from dataclasses import dataclass
from typing import BinaryIO

from hpc_elastic.cli.screen import BOLD, DIM, painted, rank_colour
from hpc_elastic.processes.log_lines import with_prefix
from hpc_elastic.reading.event_text import describe_time
from hpc_elastic.reading.log_streams import LogStream
from hpc_elastic.reading.screen_text import harmless, one_line

_NO_TIME = "-"
_TIME_WIDTH = 23


@dataclass(frozen=True, slots=True, kw_only=True)
class LogStyle:
    """How lines are printed."""

    clean: bool
    """Without what steers a terminal."""
    prefix: bool = True
    times: bool = False
    colours: bool = False


class LogPrinter:
    """Writes to one output."""

    def __init__(self, out: BinaryIO, style: LogStyle) -> None:
        self._out = out
        self._style = style
        self._prefixes: dict[int, str] = {}

    def lines(self, stream: LogStream, data: bytes, time_us: int | None, *, after_gap: bool = False) -> None:
        """Whole lines of one worker's that were printed at one time."""
        if after_gap:
            self.note(f"[rank {stream.rank}] ... what stood here was removed: see --log-max-files ...")
        if self._style.clean:
            data = harmless(data)
        self._out.write(with_prefix(data, self._prefix(stream.rank, time_us).encode()))

    def note(self, text: str, colour: str = DIM) -> None:
        """A line of our own."""
        line = painted(one_line(text), colour if self._style.colours else "")
        self._out.write(line.encode("utf-8", "replace") + b"\n")

    def title(self, text: str) -> None:
        """What follows."""
        self.note(f"--- {text} ---", BOLD)

    def flush(self) -> None:
        """Show it."""
        self._out.flush()

    def _prefix(self, rank: int, time_us: int | None) -> str:
        prefix = ""
        if self._style.times:
            prefix = f"{describe_time(time_us * 1000) if time_us is not None else _NO_TIME:<{_TIME_WIDTH}} "
        if not self._style.prefix:
            return prefix
        label = self._prefixes.get(rank)
        if label is None:
            label = painted(f"[rank {rank}]", rank_colour(rank) if self._style.colours else "") + " "
            self._prefixes[rank] = label
        return prefix + label
