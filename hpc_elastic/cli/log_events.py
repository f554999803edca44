"""``hpc-elastic logs RUN --events``: what every part of a run did and decided, with the reasons, in time order.

Each event is one readable line: what happened, where, and why.
"""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from msgspec import Struct

from hpc_elastic.base.clock import Clock, SystemClock
from hpc_elastic.base.text import clean_text, fit, plural, ranks_text, time_text
from hpc_elastic.cli.follow import follow_to_end
from hpc_elastic.cli.main import BOLD, DIM, RED, is_terminal, painted, print_note, wants_colour
from hpc_elastic.cli.run_argument import AskedRun, asked_nodes
from hpc_elastic.errors import UsageError
from hpc_elastic.output.log_reader import FollowedFiles
from hpc_elastic.output.terminal import harmless
from hpc_elastic.report.clocks import read_offsets_ns
from hpc_elastic.run import agent_events as of_agent
from hpc_elastic.run import control_events
from hpc_elastic.run.event_reader import EVENTS, EventFile, EventLine, event_files, merged_events
from hpc_elastic.run.events import NOTES, Note, RunEvent, name_of
from hpc_elastic.run.paths import AttemptPaths

_BAD = (
    of_agent.WorkerFailed, of_agent.HangFound, of_agent.HangSuspected, of_agent.SlowRankFound, of_agent.RunSlowed,
    of_agent.AgentFailed, of_agent.HealthCheckFailed, of_agent.OutputLost,
    of_agent.FilesystemRefused, control_events.NodeLost,
)  # fmt: skip
_DECISIONS = (
    control_events.AttemptStarted, control_events.RequeueDecided, control_events.VerdictReached,
    control_events.RoundFrozen, control_events.RunClosed,
)  # fmt: skip
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
    known = {*EVENTS, *NOTES}
    for name in names:
        if name not in known:
            from difflib import get_close_matches

            near = get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(sorted(known))}"
            raise UsageError(f"--event {name}: no event has this name; {hint}")
    return frozenset({*names, *(NOTES if name_of(Note) in names else ())})


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
        mark = RED if kind in _BAD or event.name == "events_dropped" else BOLD if kind in _DECISIONS else ""
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


_HEAD = ("v", "t", "n", "host", "node", "role", "event")
_LONGEST_VALUE = 203


def describe_event(line: EventLine) -> str:
    event: Any = line.event
    kind, fields, text = type(event), line.value, ""
    if kind in _OF_ROUND:
        text = _OF_ROUND[kind](event)
        text = f"round {event.round}: {text}" if text else ""
    elif kind in _OF_NODE:
        text = _OF_NODE[kind](event, line.host or f"node {line.node}")
    elif kind in _SENTENCES:
        text = _SENTENCES[kind](event)
    if not text:
        left = {key: value for key, value in fields.items() if key not in (*_HEAD, "reason")}
        text = " ".join(f"{key}={fit(str(value), _LONGEST_VALUE)}" for key, value in left.items())
    # Of a failure it says how that is judged, not why it happened.
    reason = "" if isinstance(event, of_agent.WorkerFailed) else fields.get("reason")
    if isinstance(reason, str) and reason and reason not in text:
        text = f"{text}: {reason}" if text else reason
    return clean_text(text).replace("\n", " ").replace("\t", " ")


def _words(name: str) -> str:
    return name.replace("_", " ")


def _silence(event: control_events.NodeLost | control_events.SpareLost) -> str:
    return "" if event.reason else f": no heartbeat for {event.age:.1f} s"


def _to_the_end(over: bool) -> str:
    return "" if over else ", to the end"


def _attempt_started(event: control_events.AttemptStarted) -> str:
    job = f", job {event.job_id}" if event.job_id else ""
    armed = "enabled" if event.requeue_armed else f"not enabled: {event.requeue_reason or 'no reason'}"
    return f"attempt {event.attempt}{job}, {plural(len(event.nodes), 'node')}; requeue {armed}"


def _agent_process_ended(event: control_events.AgentProcessEnded) -> str:
    code = f"exit code {event.code}"
    detail = f" ({event.detail})" if event.detail not in ("", code) else ""
    return f"the agent on {event.name or f'node {event.node}'} ended, {code}{detail}"


def _signal_decided(event: control_events.SignalDecided) -> str:
    until = f"the workers may save, it ends in {event.seconds:.0f} s"
    ends = until if event.saves else "all processes are killed now"
    return f"{event.meaning}, received by the {event.heard_by}; the job {event.slurm}: {ends}"


def _command_ended(event: of_agent.UserCommandEnded) -> str:
    about = f" ({event.about})" if event.about else ""
    return f"--{event.command}{about}: {'failed after ' if event.reason else ''}{event.seconds:.1f} s"


def _not_committed(event: of_agent.CheckpointNotCommitted) -> str:
    which = "checkpoints are" if event.step is None else f"step {event.step} is"
    last = "none" if event.last_step is None else f"step {event.last_step}"
    return f"{which} not copied: {event.reason}; the last one that is committed: {last}"


def _output_lost(event: of_agent.OutputLost) -> str:
    whose = f" of {ranks_text([one.rank for one in event.streams])}" if event.streams else ""
    return f"{event.not_in_files} bytes{whose} are in no file, {event.not_in_job_log} not in the job log"


def _workers_stopped(event: of_agent.WorkersStopped) -> str:
    killed = f", {event.killed} by SIGKILL" if event.killed else ""
    left = f", left: {', '.join(map(str, event.left))}" if event.left else ""
    orphans = f", with what outlived its worker: {', '.join(event.orphans)}" if event.orphans else ""
    return f"workers stopped in {event.seconds:.1f} s{killed}{left}{orphans}"


_Table = Mapping[type[RunEvent], Callable[[Any], str]]
_SENTENCES: _Table = {
    control_events.AttemptStarted: _attempt_started,
    control_events.AgentProcessEnded: _agent_process_ended,
    control_events.AgentRelaunched: lambda e: f"the agent on {e.name} is started again",
    control_events.NodeGivenUp: lambda e: f"{e.name or f'node {e.node}'} is given up ({_words(e.cause)})",
    control_events.SignalReceived: lambda e: (
        f"{e.signal}{e.sender and ' ' + e.sender}: the end of the run is asked for"
    ),
    control_events.SignalDecided: _signal_decided,
    control_events.VerdictReached: lambda e: _words(e.outcome),
    control_events.RequeueDecided: lambda e: {"requeue": "the job is requeued", "end": "the job ends"}.get(
        e.action, e.action
    ),
    control_events.NodesCompared: lambda e: (
        f"Slurm and the run {'disagree' if e.taken or e.kept else 'agree'} about the nodes"
    ),
    control_events.AttemptRequeued: lambda e: "the next attempt is queued",
    control_events.AttemptEnded: lambda e: f"{_words(e.outcome)}, exit code {e.exit_code}",
    control_events.EndTakenOver: lambda e: f"this node finishes the attempt, for agent {e.by}",
    of_agent.AgentStarted: lambda e: f"pid {e.pid}, version {e.version}",
    of_agent.AgentEnded: lambda e: f"ended, exit code {e.code}",
    of_agent.AgentFailed: lambda e: f"the agent itself failed: {e.error} at {e.where}",
    of_agent.HealthCheckFailed: lambda e: f"this node leaves the run ({', '.join(e.checks)})",
    of_agent.UserCommandEnded: _command_ended,
    of_agent.CheckpointCommitted: lambda e: (
        f"step {e.step} is committed{' at the end' if e.at_end else ''}: {e.size} bytes"
    ),
    of_agent.CheckpointNotCommitted: _not_committed,
    of_agent.ClockCompared: lambda e: (
        f"this node's clock since its boot is {e.offset_ns / 1e6:.3f} ms ahead of node {e.reference}'s, "
        f"give or take {e.bound_ns / 1e6:.3f} ms"
    ),
    of_agent.OutputLost: _output_lost,
    of_agent.FilesystemRefused: lambda e: (
        f"the shared filesystem refused for {e.seconds:.0f} s{_to_the_end(e.over)}: {e.error}"
        f"{f' ({e.path})' if e.path else ''}"
    ),
    of_agent.HangSuspected: lambda e: f"the run seems to hang: {e.reason}",
    of_agent.SlowRankFound: lambda e: str(e.slow),
    of_agent.RunSlowed: lambda e: str(e.pace),
    control_events.RoundOpened: lambda e: f"round {e.round} opened",
    Note: lambda e: e.text,
    control_events.NodeMissing: lambda e: f"round {e.round} begins without node {e.node}",
    control_events.RunClosed: lambda e: f"the run is closed in round {e.round}: {_words(e.outcome)}",
}
_OF_ROUND: _Table = {
    of_agent.RoundFinal: lambda e: (
        f"{ranks_text(e.ranks)} of {e.world_size}, node {e.group_rank} of {e.group_world_size}, "
        f"master {e.master}, {e.restarts_used} of {e.max_restarts} restarts used"
    ),
    of_agent.CheckpointChosen: lambda e: (
        "no checkpoint"
        if e.step is None
        else f"continue from step {e.step}, {'on the nodes' if e.is_local else 'on the shared filesystem'}"
    ),
    of_agent.WorkersStarted: lambda e: (
        f"{plural(len(e.pids), 'worker')} started{f'; fresh, since {e.started_fresh}' if e.started_fresh else ''}"
    ),
    of_agent.WorkerFailed: lambda e: (
        f"rank {e.global_rank} failed, {'signal' if e.exitcode < 0 else 'exit code'} {abs(e.exitcode)} "
        f"({_words(e.failure_class)}): {e.message}"
    ),
    of_agent.WorkerReplaced: lambda e: f"a fresh process ({e.pid}) takes the place of rank {e.rank}; the others stay",
    of_agent.InProcessRestarted: lambda e: (
        f"the function starts again in its processes (iteration {e.iteration}, {e.seconds:.2f} s after the fault, "
        f"{e.active_world_size} of {e.world_size} ranks active)"
    ),
    of_agent.InProcessGaveUp: lambda e: f"the in-process restart group gives up on rank {e.rank}",
    of_agent.PlatformFailure: lambda e: "a part of hpc-elastic itself failed",
    of_agent.SlowRankEnded: lambda e: f"rank {e.slow.rank} on {e.slow.host} was slow for {e.seconds:.0f} s",
    of_agent.RunSlowEnded: lambda e: f"the run was slower than in its best hour for {e.seconds:.0f} s",
    of_agent.HangFound: lambda e: f"no heartbeat for {e.limit} s",
    of_agent.StacksTaken: lambda e: (
        f"stacks of {ranks_text([rank for group in e.groups for rank in group.ranks])} taken"
        f"{f', none of {ranks_text(e.silent)}' if e.silent else ''}"
    ),
    of_agent.RanksObserved: lambda e: "; ".join(
        f"rank {one.rank} {'failed ' if one.failed else ''}{one.where}" for one in e.ranks
    ),
    of_agent.WorkersStopping: lambda e: "workers are being stopped",
    of_agent.WorkersStopped: _workers_stopped,
    of_agent.WorkersSucceeded: lambda e: "all workers here ended with 0",
    control_events.RoundFrozen: lambda e: plural(len(e.nodes), "node"),
}
"""Behind the round's number."""
_OF_NODE: Mapping[type[RunEvent], Callable[[Any, str], str]] = {
    control_events.NodeLost: lambda e, name: f"{name} is taken out of round {e.round}{_silence(e)}",
    control_events.NodeLeft: lambda e, name: f"{name} left",
    control_events.SpareLost: lambda e, name: f"{name}, which waited for a place, had died{_silence(e)}",
    control_events.NodeReplaced: lambda e, name: (
        f"round {e.round}: {name} took the place of {e.replaces_host or f'node {e.replaces_node}'} "
        f"(node {e.group_rank} of the round)"
    ),
    control_events.LinkLost: lambda e, name: (
        f"the network link to {name} was lost for {e.seconds:.0f} s{_to_the_end(e.over)}"
    ),
}
