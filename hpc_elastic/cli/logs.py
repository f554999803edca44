"""``hpc-elastic logs RUN``: show the output of all workers, or the run's events, while it goes on or after it ended."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, BinaryIO

import click
from msgspec import Struct

from hpc_elastic.base.clock import Clock, SystemClock
from hpc_elastic.base.files import size_of
from hpc_elastic.base.text import ranges, ranks_text, time_text
from hpc_elastic.cli.follow import follow_to_end
from hpc_elastic.cli.main import BOLD, DIM, RED, is_terminal, painted, print_note, wants_colour
from hpc_elastic.cli.run_argument import (
    LAST_HELP,
    NUMBER,
    RUN_PARAMETERS,
    AskedRun,
    NumberSet,
    asked_nodes,
    asked_run,
    check_ranks,
    check_rounds,
    parse_numbers,
)
from hpc_elastic.errors import UsageError
from hpc_elastic.output import log_streams
from hpc_elastic.output.log_files import STDERR, STDOUT
from hpc_elastic.output.log_reader import Chunk, FollowedFiles, OutputReader
from hpc_elastic.output.terminal import harmless, one_line, with_prefix
from hpc_elastic.report.clocks import read_offsets_ns
from hpc_elastic.run.paths import AttemptPaths

if TYPE_CHECKING:
    from hpc_elastic.report.history import RunHistory


ALL_STREAMS = (STDOUT, STDERR)
SECONDS = 10
LINES = 40
_FOLLOWED_LINES = 10
_ALL = "all"
_TIME_WIDTH = 23
_RANK_COLOURS = ("36", "35", "33", "34", "32", "96", "95", "94")
# Mode → the options that mean nothing in it.
_UNLIKE = {
    "around_failure": ("tail", "follow", "round"),
    "events": ("around_failure", "rank", "stdout", "stderr", "round", "timestamps", "no_prefix", "raw"),
}


class LogChoice(Struct, frozen=True, kw_only=True):
    ranks: NumberSet | None = None
    nodes: str | None = None
    rounds: NumberSet | None = None
    all_rounds: bool = False
    streams: tuple[int, ...] = ALL_STREAMS

    def rounds_of(self, attempt: AttemptPaths) -> list[int]:
        """The rounds, ascending; raises UsageError where none that was asked for is there."""
        numbers = log_streams.round_numbers(attempt)
        if self.rounds is not None:
            return check_rounds(self.rounds, numbers, attempt.number)
        return numbers if self.all_rounds else numbers[-1:]

    def check(self, attempt: AttemptPaths, rounds: Sequence[int]) -> None:
        if self.nodes is not None:
            asked_nodes(self.nodes, attempt)
        if self.ranks is None or not rounds:
            return
        layouts = log_streams.read_layouts(attempt)
        world = max((layouts[index].world_size for index in rounds if index in layouts), default=0)
        world = max([world, *(1 + rank for index in rounds for rank in log_streams.rank_numbers(attempt, index)[-1:])])
        name = f"round {rounds[-1]}" if len(rounds) == 1 else f"rounds {rounds[0]}-{rounds[-1]}"
        check_ranks(self.ranks, world, option="--rank", where=f"{name} of attempt {attempt.number}")

    def streams_in(self, attempt: AttemptPaths, round_number: int) -> list[log_streams.LogStream]:
        ranks, nodes = self.ranks, self.nodes
        layouts = log_streams.read_layouts(attempt) if nodes is not None else {}
        places = layouts[round_number].nodes if round_number in layouts else {}
        indices = asked_nodes(nodes, attempt) if nodes is not None else ()

        def wanted(rank: int) -> bool:
            return (ranks is None or rank in ranks) and (nodes is None or places.get(rank) in indices)

        return log_streams.streams_of(attempt, round_number, wanted=wanted, streams=self.streams)


class LogPrinter(Struct):
    out: BinaryIO
    clean: bool = False
    prefix: bool = True
    times: bool = False
    colours: bool = False

    def show(self, piece: log_streams.StreamPiece) -> None:
        rank = piece.stream.rank
        if piece.after_gap:
            self.note(f"[rank {rank}] ... output removed here by --log-max-files ...")
        data = harmless(piece.data) if self.clean else piece.data
        before, time_us = "", piece.time_us
        if self.times:
            before = f"{time_text(time_us * 1000, fine=True) if time_us is not None else '-':<{_TIME_WIDTH}} "
        if self.prefix:
            colour = _RANK_COLOURS[rank % len(_RANK_COLOURS)] if self.colours else ""
            before += painted(f"[rank {rank}]", colour) + " "
        self.out.write(with_prefix(data, before.encode()))

    def note(self, text: str, colour: str = DIM) -> None:
        line = painted(one_line(text), colour if self.colours else "")
        self.out.write(line.encode("utf-8", "replace") + b"\n")

    def title(self, text: str) -> None:
        self.note(f"--- {text} ---", BOLD)

    def flush(self) -> None:
        self.out.flush()


PARAMETERS = (
    *RUN_PARAMETERS,
    click.Option(["--attempt"], type=NUMBER, metavar="N", help="attempt N (default: the newest; of events all)"),
    click.Option(
        ["-f", "--follow"],
        is_flag=True,
        help="follow what comes through restarts and requeues until the run ends, and exit with its code",
    ),
    click.Option(["--rank"], metavar="RANKS", help="only these global ranks, as in 0-3,7"),
    click.Option(
        ["--node"],
        metavar="NODES",
        help="only these nodes: names, as in n[1-3], or indices; of events also batch: the batch host",
    ),
    click.Option(["--stdout"], is_flag=True, help="only stdout"),
    click.Option(["--stderr"], is_flag=True, help="only stderr"),
    click.Option(["--round"], metavar="ROUNDS", help="only these rounds, as in 0-2, or all (default: the newest)"),
    click.Option(
        ["-n", "--tail"],
        metavar="N",
        help=f"the last N lines, all ranks together, or all (default: all; of output with --follow {_FOLLOWED_LINES})",
    ),
    click.Option(
        ["--around-failure"],
        is_flag=True,
        help="output of all ranks around the first failure that the report names",
    ),
    click.Option(
        ["--seconds"],
        type=NUMBER,
        metavar="S",
        help=f"with --around-failure: seconds before and after it (default: {SECONDS})",
    ),
    click.Option(
        ["--lines"],
        type=NUMBER,
        metavar="N",
        help=f"with --around-failure: at most N lines of each output before and after it (default: {LINES})",
    ),
    click.Option(
        ["--events"],
        is_flag=True,
        help="what each part of the run did and decided, and why, instead of the output",
    ),
    click.Option(
        ["--event"], metavar="NAME", multiple=True, help="only these events, as in worker_failed,node_lost; repeatable"
    ),
    click.Option(["-T", "--timestamps"], is_flag=True, help="show when each line was printed"),
    click.Option(["--no-prefix"], is_flag=True, help="print no [rank N] before each line"),
    click.Option(
        ["--raw"],
        is_flag=True,
        help="print every byte unchanged (default on a terminal: without control sequences other than colours)",
    ),
    click.Option(["--json"], is_flag=True, help="with --events: print them as JSON, one per line"),
)
NOTE = f"RUN: {LAST_HELP}"


def run(args: SimpleNamespace) -> int:
    _check_together(args)
    choice = _choice(args)
    tail = _tail(args)
    asked = asked_run(args)
    printer = LogPrinter(
        sys.stdout.buffer,
        clean=is_terminal(sys.stdout) and not args.raw,
        prefix=not args.no_prefix,
        times=args.timestamps,
        colours=wants_colour(sys.stdout, os.environ) and not args.raw,
    )
    if args.around_failure:
        return _around(args, asked, choice, printer)
    attempt = asked.shown_attempt()
    if attempt is None and not args.follow:
        raise UsageError(f"run {asked.paths.run_id} has no attempt yet; hpc-elastic logs --follow waits for one")
    if args.events:
        from hpc_elastic.cli.log_events import show_events

        return show_events(asked, args, tail)
    rounds = choice.rounds_of(attempt) if attempt is not None else []
    if attempt is not None:
        choice.check(attempt, rounds)
    if args.follow:
        clock = SystemClock()
        return follow_to_end(asked, LogFollower(asked, choice, printer, tail=tail, clock=clock), clock=clock)
    assert attempt is not None
    if not rounds:
        print_note(f"attempt {attempt.number} of run {asked.paths.run_id} has no round yet: no worker was started")
    if not _print(attempt, rounds, choice, printer, tail) and rounds and tail != 0:
        whose = "any worker" if choice.ranks is None and choice.nodes is None else "these workers"
        what = "output" if len(choice.streams) > 1 else "stdout" if choice.streams == (STDOUT,) else "stderr"
        numbers = f"round{'' if len(rounds) == 1 else 's'} {ranges(rounds)} of attempt {attempt.number}"
        print_note(f"no {what} from {whose} in {numbers}")
    return 0


def _choice(args: SimpleNamespace) -> LogChoice:
    all_rounds = args.round == _ALL
    if all_rounds and args.follow:
        raise UsageError("--round all: --follow shows later rounds in any case; leave it out")
    return LogChoice(
        ranks=parse_numbers(args.rank, option="--rank") if args.rank is not None else None,
        nodes=args.node,
        rounds=parse_numbers(args.round, option="--round") if args.round is not None and not all_rounds else None,
        all_rounds=all_rounds,
        streams=(STDOUT,) if args.stdout else (STDERR,) if args.stderr else ALL_STREAMS,
    )


def _check_together(args: SimpleNamespace) -> None:
    args.events = args.events or bool(args.event) or args.json
    if args.stdout and args.stderr:
        raise UsageError("--stdout can't be used with --stderr; without either, both are shown")
    for mode, unlike in _UNLIKE.items():
        for name in unlike if getattr(args, mode) else ():
            if getattr(args, name) not in (None, False):
                options = [f"--{one.replace('_', '-')}" for one in (name, mode)]
                raise UsageError(f"{options[0]} can't be used with {options[1]}")
    for option, given in (("--seconds", args.seconds), ("--lines", args.lines)):
        if given is not None and not args.around_failure:
            raise UsageError(f"{option} {given} needs --around-failure; for the last lines use --tail N")


def _tail(args: SimpleNamespace) -> int | None:
    text = args.tail
    if text is None:
        return _FOLLOWED_LINES if args.follow and not args.events else None
    if text == _ALL:
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise UsageError(f"--tail {text}: give a number of lines, or all")
    return int(text)


def _print(
    attempt: AttemptPaths, rounds: Sequence[int], choice: LogChoice, printer: LogPrinter, tail: int | None
) -> bool:
    offsets = read_offsets_ns(attempt)

    def read() -> Iterator[log_streams.StreamPiece]:
        for index in rounds:
            streams = choice.streams_in(attempt, index)
            marks = log_streams.read_round_marks(attempt.round_dir(index), offsets_ns=offsets)
            _warn_without_times(streams, marks)
            yield from log_streams.merged(log_streams.readers_of_last(streams, tail), marks)

    before: log_streams.LogStream | None = None
    for piece in log_streams.last_of(read(), tail):
        if len(rounds) > 1 and (before is None or before.round != piece.stream.round):
            printer.title(f"attempt {attempt.number}, round {piece.stream.round}")
        before = piece.stream
        printer.show(piece)
    printer.flush()
    return before is not None


def _around(args: SimpleNamespace, asked: AskedRun, choice: LogChoice, printer: LogPrinter) -> int:
    from hpc_elastic.report.collect import collect_run

    asked.shown_attempt()  # whether it is there
    moment = first_failure(collect_run(asked.paths.root), attempt=asked.attempt)
    attempt = asked.paths.attempt(moment.attempt)
    choice.check(attempt, [moment.round])
    offsets = read_offsets_ns(attempt)
    streams = choice.streams_in(attempt, moment.round)
    marks = log_streams.read_round_marks(attempt.round_dir(moment.round), offsets_ns=offsets)
    _warn_without_times(streams, marks)
    seconds = SECONDS if args.seconds is None else args.seconds
    lines = LINES if args.lines is None else args.lines
    at_us = (moment.time_ns - offsets.get(moment.node, 0)) // 1000
    window = (at_us - seconds * 1_000_000, at_us + seconds * 1_000_000)
    readers = log_streams.readers_around(streams, marks, since_us=window[0], without_times=lines)
    pieces = log_streams.merged(readers, marks, window=window)
    before, after = log_streams.nearest_lines(pieces, at_us=at_us, count=lines, ended=moment.rank)
    printer.title(f"attempt {moment.attempt}, round {moment.round}, {seconds} s before and after the first failure")
    for piece in before:
        printer.show(piece)
    printer.note(f"--- {moment.caption} ---", RED)
    printer.note(f"--- {moment.evidence} ---", RED)
    for piece in after:
        printer.show(piece)
    quiet = sorted({one.rank for one in streams} - {piece.stream.rank for piece in (*before, *after)})
    if quiet:
        printer.note(f"--- nothing of {ranks_text(quiet)} in that time ---")
    printer.flush()
    return 0


class FailureMoment(Struct, frozen=True, kw_only=True):
    attempt: int
    round: int
    node: int
    """The node whose clock it is; -1: not known."""
    time_ns: int
    rank: int | None
    """Who failed; None: a node did."""
    caption: str
    evidence: str


def first_failure(history: RunHistory, *, attempt: int | None) -> FailureMoment:
    from hpc_elastic.report.document import choose_subject
    from hpc_elastic.report.verdict import Cause

    subject = choose_subject(history, attempt=attempt)
    verdict = subject.verdict
    if verdict.cause is Cause.NONE or subject.round is None or subject.attempt is None:
        where = f"attempt {attempt} of run {history.run_id}" if attempt is not None else f"run {history.run_id}"
        raise UsageError(f"--around-failure: nothing has failed in {where}; hpc-elastic logs --tail 100 shows its end")
    if verdict.lost_node is not None:
        loss = verdict.lost_node
        node, rank, when = -1, None, loss.gone_ns
        caption = loss.summary if loss.left or loss.broke else f"{loss.summary} (last heard from then)"
    elif verdict.failure is not None:
        failure = verdict.failure
        node, rank, when = failure.node, failure.global_rank, failure.ended_ns
        caption = f"rank {failure.global_rank} on {failure.host} failed: {failure.headline}"
    else:
        raise UsageError(f"--around-failure: the report of run {history.run_id} names no failure")
    return FailureMoment(
        attempt=subject.attempt.number,
        round=subject.round.index,
        node=node,
        time_ns=when,
        rank=rank,
        caption=f"{time_text(when, fine=True)} {caption}",
        evidence=verdict.evidence,
    )


def _warn_without_times(streams: Sequence[log_streams.LogStream], marks: log_streams.RoundMarks) -> None:
    found = [one.rank for one in streams if marks.of(one.rank, one.stream).first_us is None and has_anything(one)]
    if found and len(streams) > 1:
        print_note(f"no times are kept for {ranks_text(found)}: one after the other")


def has_anything(stream: log_streams.LogStream) -> bool:
    return bool(size_of(stream.path))


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
