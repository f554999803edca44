"""``hpc-elastic logs RUN --events``: what every part of a run did and decided, with the reasons, in time order."""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

from msgspec import Struct

from hpc_elastic.base.clock import Clock, SystemClock
from hpc_elastic.base.text import time_text
from hpc_elastic.cli.follow import follow_to_end
from hpc_elastic.cli.main import BOLD, DIM, RED, is_terminal, painted, print_note, wants_colour
from hpc_elastic.cli.run_argument import AskedRun, asked_nodes
from hpc_elastic.errors import UsageError
from hpc_elastic.output.log_reader import FollowedFiles
from hpc_elastic.output.terminal import harmless
from hpc_elastic.report.clocks import read_offsets_ns
from hpc_elastic.report.event_text import describe_event
from hpc_elastic.run.agent_events import (
    AgentFailed,
    EventsDropped,
    FilesystemRefused,
    HangFound,
    HangSuspected,
    HealthCheckFailed,
    OutputLost,
    RunSlowed,
    SlowRankFound,
    WorkerFailed,
)
from hpc_elastic.run.coordinator_events import NodeLost, RoundFrozen, RunClosed
from hpc_elastic.run.event_reader import EVENTS, EventFile, EventLine, event_files, merged_events
from hpc_elastic.run.paths import AttemptPaths
from hpc_elastic.run.supervisor_events import AttemptStarted, RequeueDecided, VerdictReached

_BAD = (
    WorkerFailed, HangFound, HangSuspected, SlowRankFound, RunSlowed, NodeLost, AgentFailed, HealthCheckFailed,
    OutputLost, EventsDropped, FilesystemRefused,
)  # fmt: skip
_DECISIONS = (RequeueDecided, VerdictReached, RunClosed, RoundFrozen, AttemptStarted)
_BATCH_NODE = -1


class EventChoice(Struct, frozen=True, kw_only=True):
    names: frozenset[str] | None = None
    nodes: str | None = None

    def indices_in(self, attempt: AttemptPaths) -> frozenset[int] | None:
        if self.nodes is None:
            return None
        return frozenset({_BATCH_NODE}) if self.nodes == "batch" else asked_nodes(self.nodes, attempt)


def show_events(asked: AskedRun, args: SimpleNamespace, tail: int | None) -> int:
    choice = EventChoice(names=_names(args.event) if args.event else None, nodes=args.node)
    printer = _Printer(as_json=args.json, colours=wants_colour(sys.stdout, os.environ))
    if args.follow:
        clock = SystemClock()
        return follow_to_end(asked, EventFollower(asked, choice, printer, tail=tail, clock=clock), clock=clock)
    events = _all_events(asked, choice)
    for event in events if tail is None else deque(events, maxlen=tail):
        printer.show(event)
    sys.stdout.flush()
    return 0


def _names(given: list[str]) -> frozenset[str]:
    names = [name.strip() for text in given for name in text.split(",")]
    for name in names:
        if name not in EVENTS:
            from difflib import get_close_matches

            near = get_close_matches(name, EVENTS, n=1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(sorted(EVENTS))}"
            raise UsageError(f"--event {name}: no event has this name; {hint}")
    return frozenset(names)


def _all_events(asked: AskedRun, choice: EventChoice) -> Iterator[EventLine]:
    found = False
    problem: UsageError | None = None
    for attempt in map(asked.paths.attempt, asked.attempts()):
        try:
            nodes = choice.indices_in(attempt)
        except UsageError as error:
            problem = error  # another attempt may have had that node
            continue
        found = True
        for event in merged_events(attempt, read_offsets_ns(attempt), names=choice.names, on_left_out=print_note):
            if _is_of(event, nodes):
                yield event
    if problem is not None and not found:
        raise problem


def _is_of(event: EventLine, nodes: frozenset[int] | None) -> bool:
    return nodes is None or event.writer in nodes or event.node in nodes


class _Printer(Struct, frozen=True, kw_only=True):
    as_json: bool
    colours: bool

    def show(self, event: EventLine) -> None:
        if self.as_json:
            raw = event.raw + b"\n"
            sys.stdout.buffer.write(harmless(raw) if is_terminal(sys.stdout) else raw)
            return
        host = "batch" if event.role == "supervisor" else event.host
        kind = type(event.event)
        mark = RED if kind in _BAD else BOLD if kind in _DECISIONS else ""
        colour = mark if self.colours else ""
        time = painted(time_text(event.time_ns, fine=True), DIM if self.colours else "")
        head = f"{host:<12} {event.name:<19}"
        line = f"{time} {painted(head, colour)} {describe_event(event)}".rstrip()
        sys.stdout.buffer.write(harmless((line + "\n").encode("utf-8", "backslashreplace")))


class EventFollower:
    def __init__(
        self, asked: AskedRun, choice: EventChoice, printer: _Printer, *, tail: int | None, clock: Clock
    ) -> None:
        """`tail`: how many events of what is there already; None: all."""
        self._asked = asked
        self._choice = choice
        self._printer = printer
        self._tail = tail
        self._followed: FollowedFiles[EventFile, list[EventLine]] = FollowedFiles(
            self._find_files, clock=clock, partial=False
        )
        self._files: dict[Path, EventFile] = {}
        self._nodes: dict[int, frozenset[int] | None] = {}

    def look(self, *, everything: bool = False) -> float:
        found = [event for _, events in self._followed.look(everything=everything) for event in events]
        for attempt in {event.attempt for event in found} - self._nodes.keys():
            self._nodes[attempt] = self._choice.indices_in(self._asked.paths.attempt(attempt))
        found = [event for event in found if _is_of(event, self._nodes[event.attempt])]
        found.sort(key=lambda event: (event.attempt, event.time_ns))
        tail, self._tail = self._tail, None
        for event in found if tail is None else found[max(0, len(found) - tail) :]:
            self._printer.show(event)
        sys.stdout.flush()
        return self._followed.seconds_until_due()

    def finish(self) -> None:
        for file in self._files.values():
            for sentence in file.left_out():
                print_note(sentence)

    def _find_files(self) -> None:
        numbers = self._asked.attempts()
        for number in numbers[-2:] if self._files else numbers:
            attempt = self._asked.paths.attempt(number)
            new = [path for path in event_files(attempt.events) if path not in self._files]
            offsets = read_offsets_ns(attempt) if new else {}
            for path in new:
                file = EventFile(path, attempt=number, offsets_ns=offsets, names=self._choice.names)
                self._files[path] = file
                self._followed.add(file, file)
