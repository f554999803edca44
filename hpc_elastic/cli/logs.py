"""``hpc-elastic logs RUN``: what the workers printed, of all ranks in one, while the run goes on or after it ended."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence

from hpc_elastic.cli.log_around import LINES, SECONDS, first_failure, nearest_lines
from hpc_elastic.cli.log_choice import ALL_STREAMS, LogChoice
from hpc_elastic.cli.log_printer import LogPrinter, LogStyle
from hpc_elastic.cli.rank_set import parse_numbers
from hpc_elastic.cli.run_argument import AskedRun, add_run_arguments, asked_run, whole_number
from hpc_elastic.cli.screen import RED, is_terminal, print_note, wants_colour
from hpc_elastic.errors import UsageError
from hpc_elastic.log_times import STDERR, STDOUT
from hpc_elastic.reading.clocks import clock_offsets_us
from hpc_elastic.reading.log_merge import Piece, last_of, merged, readers_around, readers_of, readers_of_last
from hpc_elastic.reading.log_streams import LogStream
from hpc_elastic.reading.stream_marks import RoundMarks, read_round_marks
from hpc_elastic.report.fold import rank_ranges
from hpc_elastic.run_paths import AttemptPaths

_FOLLOWED_LINES = 10
_ALL = "all"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The subcommand's arguments."""
    add_run_arguments(parser, attempt_help="of the N-th execution of the job (default: the newest)")
    parser.add_argument(
        "-f",
        "--follow",
        action="store_true",
        help="go on with what comes, through restarts and requeues, to the run's end; exit with the run's code",
    )
    what = parser.add_argument_group("what")
    what.add_argument("--rank", metavar="RANKS", help="of these global ranks alone, as in 0-3,7")
    what.add_argument("--node", metavar="NODES", help="of these nodes alone: names as in n[1-3], or indices")
    streams = what.add_mutually_exclusive_group()
    streams.add_argument("--stdout", action="store_true", help="without stderr")
    streams.add_argument("--stderr", action="store_true", help="without stdout")
    what.add_argument("--round", metavar="ROUNDS", help="of these rounds, as in 0-2, or all (default: the newest)")
    what.add_argument(
        "-n",
        "--tail",
        metavar="N",
        help=f"the last N lines of all together, or all (default: all; with --follow {_FOLLOWED_LINES})",
    )
    what.add_argument(
        "--around-failure",
        action="store_true",
        help="what all ranks printed around the first failure, as the report names it",
    )
    what.add_argument(
        "--seconds",
        type=whole_number,
        metavar="S",
        help=f"with --around-failure: so many before and after it (default: {SECONDS})",
    )
    what.add_argument(
        "--lines",
        type=whole_number,
        metavar="N",
        help=f"with --around-failure: at most so many of each output before and after it (default: {LINES})",
    )
    how = parser.add_argument_group("how")
    how.add_argument("-T", "--timestamps", action="store_true", help="with the time at which it was printed")
    how.add_argument("--no-prefix", action="store_true", help="without [rank N] before each line")
    how.add_argument(
        "--raw",
        action="store_true",
        help="every byte as it is, on a terminal too (default there: without what steers it, but for colours)",
    )


def run(args: argparse.Namespace) -> int:
    """Print. Returns 0, or with ``--follow`` the run's exit code.

    Raises:
        UsageError: RUN means no run, or nothing of what was asked for is there.
    """
    choice = _choice(args)
    tail = _tail(args)
    asked = asked_run(args)
    printer = LogPrinter(
        sys.stdout.buffer,
        LogStyle(
            clean=is_terminal(sys.stdout) and not args.raw,
            prefix=not args.no_prefix,
            times=args.timestamps,
            colours=wants_colour(sys.stdout, os.environ) and not args.raw,
        ),
    )
    if args.around_failure:
        return _around(args, asked, choice, printer)
    attempt = asked.shown_attempt()
    if attempt is None and not args.follow:
        raise UsageError(f"run {asked.paths.run_id} has no attempt yet; hpc-elastic logs --follow waits for one")
    rounds = choice.rounds_of(attempt) if attempt is not None else []
    if attempt is not None:
        choice.check(attempt, rounds)
    if args.follow:
        from hpc_elastic.cli.log_follow import LogFollower
        from hpc_elastic.clock import SystemClock

        end = LogFollower(asked, choice, printer, tail=tail, clock=SystemClock()).run()
        print_note(f"run {asked.paths.run_id} ended: {end.why}")
        return end.code
    assert attempt is not None
    if not rounds:
        print_note(f"attempt {attempt.number} of run {asked.paths.run_id} has no round yet: no worker was started")
    _print(attempt, rounds, choice, printer, tail)
    return 0


def _choice(args: argparse.Namespace) -> LogChoice:
    all_rounds = args.round == _ALL
    if all_rounds and args.follow:
        raise UsageError("--round all: with --follow, later rounds are shown as they come; leave it out")
    return LogChoice(
        ranks=parse_numbers(args.rank, option="--rank") if args.rank is not None else None,
        nodes=args.node,
        rounds=parse_numbers(args.round, option="--round") if args.round is not None and not all_rounds else None,
        all_rounds=all_rounds,
        streams=(STDOUT,) if args.stdout else (STDERR,) if args.stderr else ALL_STREAMS,
    )


def _tail(args: argparse.Namespace) -> int | None:
    """How many lines; None: all."""
    text = args.tail
    if args.around_failure:
        for option, given in (("--tail", text), ("--follow", args.follow or None), ("--round", args.round)):
            if given is not None:
                raise UsageError(f"{option} does not go with --around-failure, which chooses by itself what it shows")
    for option, given in (("--seconds", args.seconds), ("--lines", args.lines)):
        if given is not None and not args.around_failure:
            raise UsageError(f"{option} {given} goes with --around-failure; to see the end: --tail N")
    if text is None:
        return _FOLLOWED_LINES if args.follow else None
    if text == _ALL:
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise UsageError(f"--tail {text}: give a number of lines, or all")
    return int(text)


def _print(
    attempt: AttemptPaths, rounds: Sequence[int], choice: LogChoice, printer: LogPrinter, tail: int | None
) -> None:
    pieces = _pieces(attempt, rounds, choice, tail)
    before: LogStream | None = None
    for piece in pieces if tail is None else last_of(pieces, tail):
        if len(rounds) > 1 and (before is None or before.round != piece.stream.round):
            printer.title(f"attempt {attempt.number}, round {piece.stream.round}")
        before = piece.stream
        printer.lines(piece.stream, piece.block.data, piece.block.time_us, after_gap=piece.block.after_gap)
    printer.flush()


def _pieces(attempt: AttemptPaths, rounds: Sequence[int], choice: LogChoice, tail: int | None) -> Iterator[Piece]:
    offsets = clock_offsets_us(attempt)
    for index in rounds:
        streams = choice.streams_in(attempt, index)
        marks = read_round_marks(attempt.round_dir(index), offsets_us=offsets)
        _warn_without_times(streams, marks)
        yield from merged(readers_of(streams) if tail is None else readers_of_last(streams, tail), marks)


def _around(args: argparse.Namespace, asked: AskedRun, choice: LogChoice, printer: LogPrinter) -> int:
    from hpc_elastic.report.collect import collect_run

    asked.shown_attempt()  # whether it is there
    moment = first_failure(collect_run(asked.paths.root), attempt=asked.attempt)
    attempt = asked.paths.attempt(moment.attempt)
    choice.check(attempt, [moment.round])
    offsets = clock_offsets_us(attempt)
    streams = choice.streams_in(attempt, moment.round)
    marks = read_round_marks(attempt.round_dir(moment.round), offsets_us=offsets)
    _warn_without_times(streams, marks)
    seconds = SECONDS if args.seconds is None else args.seconds
    lines = LINES if args.lines is None else args.lines
    at_us = moment.time_ns // 1000 - offsets.get(moment.node, 0)
    window = (at_us - seconds * 1_000_000, at_us + seconds * 1_000_000)
    readers = readers_around(streams, marks, since_us=window[0], without_times=lines)
    pieces = merged(readers, marks, window=window)
    before, after = nearest_lines(pieces, at_us=at_us, count=lines, ended=moment.rank)
    printer.title(f"attempt {moment.attempt}, round {moment.round}, {seconds} s before and after the first failure")
    _show(before, printer)
    printer.note(f"--- {moment.caption} ---", RED)
    printer.note(f"--- {moment.evidence} ---", RED)
    _show(after, printer)
    quiet = sorted({one.rank for one in streams} - {piece.stream.rank for piece in (*before, *after)})
    if quiet:
        printer.note(f"--- nothing of rank{'s' if len(quiet) > 1 else ''} {rank_ranges(quiet)} in that time ---")
    printer.flush()
    return 0


def _show(pieces: Sequence[Piece], printer: LogPrinter) -> None:
    for piece in pieces:
        printer.lines(piece.stream, piece.block.data, piece.block.time_us, after_gap=piece.block.after_gap)


def _warn_without_times(streams: Sequence[LogStream], marks: RoundMarks) -> None:
    """Say so where the order can't be known."""
    found = []
    for one in streams if len(streams) > 1 else ():
        if marks.of(one.rank, one.stream).first_us is None and _has_anything(one):
            found.append(one.rank)
    if found:
        ranks = sorted(set(found))
        print_note(
            f"no times are kept for rank{'s' if len(ranks) > 1 else ''} {rank_ranges(ranks)}: one after the other"
        )


def _has_anything(stream: LogStream) -> bool:
    try:
        return os.stat(stream.path).st_size > 0
    except OSError:
        return False
