"""``hpc-elastic logs -f``: the workers' output as it grows, through rounds and requeues, to the run's end."""

from __future__ import annotations

from hpc_elastic.base.clock import Clock
from hpc_elastic.cli.logs import LogChoice, LogPrinter, has_anything
from hpc_elastic.cli.run_argument import AskedRun
from hpc_elastic.cli.screen import print_note
from hpc_elastic.output import log_streams
from hpc_elastic.output.log_reader import Chunk, FollowedFiles, OutputReader
from hpc_elastic.report.clocks import read_offsets_ns
from hpc_elastic.run.paths import AttemptPaths

_LOOK_INTO_ROUND_S = 15.0
"""Between two looks for ranks that are new in a round that has lasted for a while: all are there at its beginning."""
_DROP_AFTER_S = 30.0
"""So long after a newer round began the output of an older one is watched on."""


class LogFollower:
    def __init__(
        self, asked: AskedRun, choice: LogChoice, printer: LogPrinter, *, tail: int | None, clock: Clock
    ) -> None:
        """`tail`: how many lines of what is there already; None: all."""
        self._asked = asked
        self._choice = choice
        self._printer = printer
        self._tail = tail
        self._clock = clock
        self._files: FollowedFiles[log_streams.LogStream, Chunk] = FollowedFiles(self._find_files, clock=clock)
        self._seen: dict[tuple[int, int], float] = {}
        self._round_at: dict[tuple[int, int], float] = {}
        self._known: set[log_streams.LogStream] = set()
        self._shown: tuple[int, int] | None = None
        self._has_begun = False

    def look(self, *, everything: bool = False) -> float:
        if not self._has_begun:
            self._has_begun = True
            self._begin()
        if everything:
            self._round_at.clear()
        for stream, chunk in self._files.look(everything=everything):
            self._show(log_streams.StreamPiece(stream, self._clock.time_ns() // 1000, chunk.data, chunk.after_gap))
        self._printer.flush()
        return self._files.seconds_until_due()

    def finish(self) -> None:
        for stream, chunk in self._files.rests():
            self._show(log_streams.StreamPiece(stream, None, chunk.data, chunk.after_gap))
        self._printer.flush()

    def _begin(self) -> None:
        """Show what is there, in time order, the last lines of all together; the same readers go on from there."""
        self._files.find()
        if not self._seen:
            print_note(f"run {self._asked.paths.run_id} has started no worker yet; waiting")
        elif not any(has_anything(stream) for stream in self._files.followed()):
            print_note(f"no worker of run {self._asked.paths.run_id} has printed anything yet; waiting")
        attempt = self._asked.shown_attempt()
        streams = self._files.followed()
        if attempt is None or not streams:
            return
        index = max(stream.round for stream in streams)
        streams = [stream for stream in streams if stream.round == index]
        readers = log_streams.readers_of_last(streams, self._tail)
        marks = log_streams.read_round_marks(attempt.round_dir(index), offsets_ns=read_offsets_ns(attempt))
        for piece in log_streams.last_of(log_streams.merged(readers, marks, is_over=False), self._tail):
            self._show(piece)
        for stream, reader in readers.items():
            self._files.add(stream, reader)

    def _find_files(self) -> None:
        now = self._clock.monotonic()
        # Those between the one that was the newest at first and today's: some are short.
        for attempt, index in self._rounds():
            place = (attempt.number, index)
            if now < self._round_at.get(place, now):
                continue
            age = now - self._seen.setdefault(place, now)
            if age > _DROP_AFTER_S and place != max(self._seen):
                continue
            self._round_at[place] = now + (_LOOK_INTO_ROUND_S if age > _DROP_AFTER_S else 0.0)
            for stream in self._choice.streams_in(attempt, index):
                if stream not in self._known:
                    self._known.add(stream)
                    self._files.add(stream, OutputReader(stream.path))
        newest = max(self._seen, default=None)
        if newest is not None and now - self._seen[newest] > _DROP_AFTER_S:
            for stream in self._files.followed():
                if (stream.attempt, stream.round) < newest:
                    self._files.drop(stream)

    def _rounds(self) -> list[tuple[AttemptPaths, int]]:
        first = min(self._seen, default=None)
        if first is None:
            attempt = self._asked.shown_attempt()
            return [] if attempt is None else [(attempt, index) for index in self._choice.rounds_of(attempt)]
        found = []
        for number in self._asked.attempts():
            attempt = self._asked.paths.attempt(number)
            wanted = self._choice.rounds
            for index in log_streams.round_numbers(attempt) if number >= first[0] else []:
                if (number, index) >= first and (wanted is None or index in wanted):
                    found.append((attempt, index))
        return found

    def _show(self, piece: log_streams.StreamPiece) -> None:
        place = (piece.stream.attempt, piece.stream.round)
        if self._shown is not None and place > self._shown:
            self._printer.title(f"attempt {place[0]}, round {place[1]}")
        self._shown = place if self._shown is None else max(place, self._shown)
        self._printer.show(piece)
