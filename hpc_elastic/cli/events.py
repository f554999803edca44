"""``hpc-elastic events RUN``: what every part of a run did and decided, with the reasons, in time order."""

from __future__ import annotations

import argparse
import os
import sys
import threading
from collections import deque
from collections.abc import Iterator
from pathlib import Path

from msgspec import Struct

from hpc_elastic.base.clock import Clock
from hpc_elastic.cli import run_job
from hpc_elastic.cli.follow import RunEnd, RunWatch
from hpc_elastic.cli.run_argument import AskedRun, add_run_arguments, asked_nodes, asked_run, node_names
from hpc_elastic.cli.screen import BOLD, DIM, RED, is_terminal, painted, print_note, wants_colour
from hpc_elastic.errors import UsageError
from hpc_elastic.output.event_files import EventParser, ReadEvent, event_files, event_reader, merged_events
from hpc_elastic.output.log_reader import FollowedFiles, OutputReader
from hpc_elastic.output.log_streams import clock_offsets_ns, read_layouts
from hpc_elastic.output.terminal import harmless
from hpc_elastic.report.event_text import KNOWN_EVENTS, describe_event, describe_time

_BAD = {
    "worker_failed",
    "hang",
    "node_lost",
    "agent_failed",
    "health_check_failed",
    "output_lost",
    "events_dropped",
    "filesystem_refused",
}
_DECISIONS = {"restart_decision", "requeue_decision", "verdict", "closed", "round_frozen", "attempt_started"}
_LOOK_FOR_FILES_S = 1.0
_LAST_WAIT_S = 0.5
_HOST_WIDTH = 12


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The subcommand's arguments."""
    add_run_arguments(parser, attempt_help="of the N-th execution of the job (default: of all)")
    parser.add_argument(
        "-f",
        "--follow",
        action="store_true",
        help="go on with what comes, through requeues, to the run's end; exit with the run's code",
    )
    parser.add_argument("--json", action="store_true", help="the lines as they were written: JSON, one event each")
    parser.add_argument(
        "--event", metavar="NAME", action="append", help="only these: worker_failed,node_lost (may be repeated)"
    )
    parser.add_argument(
        "--node",
        metavar="NODES",
        help="only what these nodes wrote, or is about them: names as in n[1-3], or indices; batch: the batch host",
    )
    parser.add_argument("-n", "--tail", metavar="N", help="the last N of what is there (default: all)")


class EventChoice(Struct, frozen=True, kw_only=True):
    """Which events somebody wants to see."""

    names: frozenset[str] | None
    nodes: str | None

    def wanted(self, event: ReadEvent, nodes: frozenset[int] | None) -> bool:
        """Whether it is of one of these nodes; `names` is for the parser."""
        if nodes is None:
            return True
        node = event.value.get("node")
        return event.writer in nodes or (isinstance(node, int) and node in nodes)


BATCH_NODE = -1


def run(args: argparse.Namespace) -> int:
    """Print. Returns 0, or with ``--follow`` the run's exit code.

    Raises:
        UsageError: RUN means no run, or an option's value nothing.
    """
    choice = EventChoice(names=_names(args.event), nodes=args.node)
    if args.tail is not None and not (args.tail.isascii() and args.tail.isdigit() and len(args.tail) < 10):
        raise UsageError(f"--tail {args.tail}: give a number of events")
    asked = asked_run(args)
    numbers = asked.attempts()
    if asked.attempt is not None:
        asked.shown_attempt()
        numbers = [asked.attempt]
    if not numbers and not args.follow:
        raise UsageError(f"run {asked.paths.run_id} has no attempt yet; hpc-elastic events --follow waits for one")
    printer = _Printer(as_json=args.json, colours=wants_colour(sys.stdout, os.environ))
    tail = int(args.tail) if args.tail is not None else None
    if args.follow:
        from hpc_elastic.base.clock import SystemClock

        end = _Follower(asked, choice, printer, tail=tail, clock=SystemClock()).run()
        print_note(f"run {asked.paths.run_id} ended: {end.why}")
        return end.code
    events = _all_events(asked, numbers, choice)
    for event in events if tail is None else deque(events, maxlen=tail):
        printer.show(event)
    sys.stdout.flush()
    return 0


def _names(given: list[str] | None) -> frozenset[str] | None:
    if given is None:
        return None
    names = [name.strip() for text in given for name in text.split(",")]
    for name in names:
        if name not in KNOWN_EVENTS:
            from difflib import get_close_matches

            near = get_close_matches(name, KNOWN_EVENTS, n=1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(sorted(KNOWN_EVENTS))}"
            raise UsageError(f"--event {name}: no event has this name; {hint}")
    return frozenset(names)


def _nodes(asked: AskedRun, number: int, choice: EventChoice) -> frozenset[int] | None:
    """The indices of the nodes that were asked for, in an attempt; None: all."""
    if choice.nodes is None:
        return None
    if choice.nodes == "batch":
        return frozenset({BATCH_NODE})
    attempt = asked.paths.attempt(number)
    hosts = dict(enumerate(node_names(attempt)))
    if not hosts:
        hosts = {node: host for part in read_layouts(attempt).values() for node, host in part.hosts.items()}
    return asked_nodes(choice.nodes, hosts)


def _all_events(asked: AskedRun, numbers: list[int], choice: EventChoice) -> Iterator[ReadEvent]:
    found = False
    problem: UsageError | None = None
    for number in numbers:
        try:
            nodes = _nodes(asked, number, choice)
        except UsageError as error:
            problem = error  # another attempt may have had that node
            continue
        found = True
        attempt = asked.paths.attempt(number)
        for event in merged_events(attempt, clock_offsets_ns(attempt), names=choice.names, tell=print_note):
            if choice.wanted(event, nodes):
                yield event
    if problem is not None and not found:
        raise problem


class _Printer:
    def __init__(self, *, as_json: bool, colours: bool) -> None:
        self._as_json = as_json
        self._colours = colours
        self._is_terminal = is_terminal(sys.stdout)

    def show(self, event: ReadEvent) -> None:
        if self._as_json:
            raw = event.raw + b"\n"
            sys.stdout.buffer.write(harmless(raw) if self._is_terminal else raw)
            return
        sys.stdout.buffer.write((self._line(event) + "\n").encode("utf-8", "backslashreplace"))

    def _line(self, event: ReadEvent) -> str:
        value = event.value
        name = str(value["event"])
        role = str(value.get("role", ""))
        host = "batch" if role == "supervisor" else str(value.get("host", ""))
        colour = "" if not self._colours else RED if name in _BAD else BOLD if name in _DECISIONS else ""
        time = painted(describe_time(event.time_ns), DIM if self._colours else "")
        head = f"{host:<{_HOST_WIDTH}} {name:<19}"
        line = f"{time} {painted(head, colour)} {describe_event(value)}".rstrip()
        return harmless((line + "\n").encode("utf-8", "backslashreplace"))[:-1].decode("utf-8", "replace")


class _Follower:
    def __init__(
        self, asked: AskedRun, choice: EventChoice, printer: _Printer, *, tail: int | None, clock: Clock
    ) -> None:
        self._asked = asked
        self._choice = choice
        self._printer = printer
        self._tail = tail
        self._clock = clock
        self._files: FollowedFiles[Path] = FollowedFiles()
        self._parsers: dict[Path, tuple[EventParser, int]] = {}
        self._readers: dict[Path, OutputReader] = {}
        self._nodes: dict[int, frozenset[int] | None] = {}
        self._files_at = clock.monotonic()

    def run(self) -> RunEnd:
        """Follow to the run's end."""
        stop = threading.Event()  # never set: Ctrl-C ends it
        client = run_job.slurm_client(timeout=run_job.SHORT_SECONDS)
        watch = RunWatch(self._asked.paths, attempt=self._asked.attempt, clock=self._clock, client=client)
        self._find_files()
        self._look(everything=True, tail=self._tail)
        while True:
            end = watch.end()
            if end is not None:
                break
            now = self._clock.monotonic()
            self._clock.wait(stop, self._files.seconds_until_due(now, most=max(0.0, self._files_at - now)))
            if self._clock.monotonic() >= self._files_at:
                self._find_files()
            self._look()
        for number in range(2):
            if number:
                self._clock.wait(stop, _LAST_WAIT_S)
            self._find_files()
            self._look(everything=True)
        for path, reader in self._readers.items():
            for sentence in self._parsers[path][0].left_out(reader):
                print_note(sentence)
        return end

    def _find_files(self) -> None:
        self._files_at = self._clock.monotonic() + max(_LOOK_FOR_FILES_S, len(self._files) / 200)
        numbers = self._asked.attempts() if self._asked.attempt is None else [self._asked.attempt]
        for number in numbers if not self._parsers else numbers[-2:]:
            attempt = self._asked.paths.attempt(number)
            offsets: dict[int, int] | None = None
            for path in event_files(attempt):
                if path not in self._parsers:
                    offsets = clock_offsets_ns(attempt) if offsets is None else offsets
                    self._parsers[path] = (EventParser(number, path, offsets, names=self._choice.names), number)
                    self._readers[path] = event_reader(path)
                    self._files.add(path, self._readers[path])

    def _look(self, *, everything: bool = False, tail: int | None = None) -> None:
        """What is new, in time order as far as it came together."""
        found: list[ReadEvent] = []
        for path, chunk in self._files.look(self._clock.monotonic(), everything=everything, partial=False):
            parser, number = self._parsers[path]
            if number not in self._nodes:
                self._nodes[number] = _nodes(self._asked, number, self._choice)
            found += [event for event in parser.events(chunk.data) if self._choice.wanted(event, self._nodes[number])]
        found.sort(key=lambda event: (event.attempt, event.time_ns))
        for event in found if tail is None else found[max(0, len(found) - tail) :]:
            self._printer.show(event)
        sys.stdout.flush()
