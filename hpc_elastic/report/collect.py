"""Read a run directory into a `RunHistory`. Any file may be missing, torn, newer or foreign; reads are bounded."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hpc_elastic.atomic_file import ask_about, read_json
from hpc_elastic.events import read_events
from hpc_elastic.failures.classify import Category, FailureClass, signal_name, signal_of
from hpc_elastic.failures.evidence import read_failure
from hpc_elastic.failures.worker_failure import EvidenceSource, ExitFacts, WorkerFailure
from hpc_elastic.outcome import UNHEALTHY_CODE
from hpc_elastic.report.history import (
    AgentEnd,
    AttemptHistory,
    NodeLoss,
    RankWord,
    RestartDecision,
    RoundHistory,
    RoundNode,
    RunHistory,
    StackGroup,
)
from hpc_elastic.report.output_losses import OutputLoss, read_loss
from hpc_elastic.report.timeline_times import TimesBuilder
from hpc_elastic.run_paths import AttemptPaths, RunPaths, attempt_number, rank_index, round_index

_JSON_LIMIT = 4 << 20
_TEXT_LIMIT = 4000
_FRAMES = 20


def collect_run(run_dir: Path | str) -> RunHistory:
    """Read what is there. Works while the run goes on, after it ended, and on a copy with half of the files missing.

    Raises:
        OSError: `run_dir` itself can't be listed.
    """
    root = Path(os.path.abspath(run_dir))
    paths = RunPaths(root)
    problems: list[str] = []
    spec = read_json(paths.run_json, limit=_JSON_LIMIT)
    if isinstance(spec, str):
        problems.append(f"run.json: {spec}")
        spec = {}
    entrypoint = spec.get("entrypoint")
    target = _text(entrypoint.get("target")) if isinstance(entrypoint, dict) else ""
    numbers = sorted(n for n in map(attempt_number, os.listdir(root)) if n is not None)
    return RunHistory(
        run_id=_text(spec.get("run_id")) or root.name,
        run_dir=str(root),
        name=target.rsplit("/", 1)[-1] or _text(spec.get("name")) or root.name,
        max_requeues=_integer(spec.get("max_requeues")),
        attempts=tuple(collect_attempt(paths.attempt(number)) for number in numbers),
        problems=tuple(problems),
    )


def collect_attempt(paths: AttemptPaths) -> AttemptHistory:
    """Read one attempt's folder."""
    builder = _AttemptBuilder(number=paths.number)
    info = read_json(paths.attempt_json, limit=_JSON_LIMIT)
    if isinstance(info, str):
        builder.problems.append(f"attempt.json: {info}")
    else:
        builder.job_id = _text(info.get("job_id"))
        builder.nodes = _names(info.get("nodes"))
        builder.started_ns = _integer(info.get("started_ns"))
    for event in read_events(paths.events):
        try:
            builder.take(event)
        except (TypeError, ValueError, OverflowError) as error:
            builder.problems.append(f"event {_text(event.get('event'))!r} could not be read: {error}")
    _read_failures(paths, builder)
    _read_heartbeats(paths, builder)
    return builder.build()


def _read_heartbeats(paths: AttemptPaths, builder: _AttemptBuilder) -> None:
    """Each node's last summary: it is about the round that the node took part in last."""
    folder = paths.heartbeats(0).parent
    for name in sorted(_names_in(folder)):
        value = read_json(folder / name, limit=_JSON_LIMIT)
        if isinstance(value, str):
            continue
        index, node, when = (_integer(value.get(key)) for key in ("round", "node", "written_ns"))
        if index is None or index not in builder.rounds or node is None or when is None:
            continue
        words = builder.rounds[index].words
        for word in _words(value.get("ranks"), node=node, when=when):
            words.setdefault(word.rank, word)


def _names_in(folder: Path) -> list[str]:
    try:
        return [name for name in os.listdir(folder) if name.endswith(".json") and not name.startswith(".")]
    except OSError:
        return []


def _words(value: object, *, node: int, when: int) -> list[RankWord]:
    found = []
    for item in value if isinstance(value, list) else []:
        rank = _integer(item.get("rank")) if isinstance(item, dict) else None
        if rank is None or not _integer(item.get("count")):
            continue
        age = item.get("age")
        found.append(
            RankWord(
                rank=rank,
                node=node,
                step=_integer(item.get("step")),
                section=_text(item.get("section"))[:64],
                age=float(age) if isinstance(age, (int, float)) and 0 <= age < 1e9 else 0.0,
                told_ns=when,
            )
        )
    return found


def _read_failures(paths: AttemptPaths, builder: _AttemptBuilder) -> None:
    """error.json of every rank of every round: an event that was never written hides no failure."""
    texts: dict[str, str] = {}
    for index in sorted(_indices(paths.root, round_index)):
        part = builder.round(index)
        for rank in sorted(_indices(paths.round_dir(index), rank_index)):
            error_file = paths.rank(index, rank).error_file
            facts = part.facts(paths.number, rank)
            failure = read_failure(error_file, facts=facts)
            if failure is None and rank in part.told and ask_about(error_file.parent):
                failure = read_failure(error_file, facts=facts)  # an earlier report here missed it, and NFS remembers
            if failure is None:
                continue
            # Where the file lies is the truth about its place; the same text on 500 ranks is kept once.
            part.failures[rank] = replace(
                failure,
                attempt=paths.number,
                round=index,
                global_rank=rank,
                traceback=texts.setdefault(failure.traceback, failure.traceback),
                stderr_tail=texts.setdefault(failure.stderr_tail, failure.stderr_tail),
                message=texts.setdefault(failure.message, failure.message),
                fingerprint=sys.intern(failure.fingerprint),
                host=sys.intern(failure.host),
            )


def _indices(folder: Path, parse: Any) -> Iterable[int]:
    try:
        names = os.listdir(folder)
    except OSError:
        return []
    return [number for number in map(parse, names) if number is not None]


@dataclass(slots=True)
class _RoundBuilder:
    index: int
    reason: str = ""
    started_ns: int | None = None
    seconds: float | None = None
    world_size: int | None = None
    nodes: dict[int, RoundNode] = field(default_factory=dict)
    final_ns: dict[int, int] = field(default_factory=dict)
    failures: dict[int, WorkerFailure] = field(default_factory=dict)
    told: dict[int, WorkerFailure] = field(default_factory=dict)
    lost: dict[int, NodeLoss] = field(default_factory=dict)
    left: dict[int, NodeLoss] = field(default_factory=dict)
    """Nodes that took themselves out, as the coordinator tells it."""
    succeeded: set[int] = field(default_factory=set)
    ended: set[int] = field(default_factory=set)
    """Nodes that told the end of their workers."""
    stopping: list[str] = field(default_factory=list)
    frozen_reason: str = ""
    """Why it could begin: what was decided about the failures of the round before."""
    restarts_used: int | None = None
    decision: RestartDecision | None = None
    decided_ns: int = -1
    words: dict[int, RankWord] = field(default_factory=dict)
    stacks: dict[tuple[str, ...], list[int]] = field(default_factory=dict)

    def facts(self, attempt: int, rank: int) -> ExitFacts:
        """What is known of a rank from the events: for an error file that no agent completed."""
        told = self.told.get(rank)
        node = next((node for node in self.nodes.values() if rank in node.ranks), None)
        return ExitFacts(
            attempt=attempt,
            round=self.index,
            host=told.host if told else node.host if node else "",
            node=told.node if told else node.node if node else -1,
            local_rank=told.local_rank if told else node.ranks.index(rank) if node else -1,
            global_rank=rank,
            pid=told.pid if told else 0,
            exitcode=told.exitcode if told else 1,
            ended_ns=told.ended_ns if told else 0,
        )

    def build(self) -> RoundHistory:
        failures = {**self.told, **self.failures}
        return RoundHistory(
            index=self.index,
            reason=self.reason,
            started_ns=self.started_ns,
            seconds=self.seconds,
            world_size=self.world_size,
            nodes=tuple(self.nodes[node] for node in sorted(self.nodes)),
            failures=tuple(failures[rank] for rank in sorted(failures)),
            lost_nodes=tuple(self.lost[node] for node in sorted(self.lost)),
            succeeded_nodes=frozenset(self.succeeded),
            stopping_reasons=tuple(dict.fromkeys(self.stopping)),
            decision=self.decision,
            words=tuple(self.words[rank] for rank in sorted(self.words)),
            stacks=tuple(
                StackGroup(ranks=tuple(sorted(ranks)), stack=stack)
                for stack, ranks in sorted(self.stacks.items(), key=lambda item: (len(item[1]), min(item[1])))
            ),
        )


@dataclass(slots=True)
class _AttemptBuilder:
    number: int
    job_id: str = ""
    nodes: tuple[str, ...] = ()
    started_ns: int | None = None
    ended_ns: int | None = None
    outcome: str = ""
    reason: str = ""
    exit_code: int | None = None
    decision: str = ""
    rounds: dict[int, _RoundBuilder] = field(default_factory=dict)
    agent_ends: list[AgentEnd] = field(default_factory=list)
    relaunched: list[str] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)
    output_lost: list[OutputLoss] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    closed_outcome: str = ""
    closed_reason: str = ""
    times: TimesBuilder = field(default_factory=TimesBuilder)

    def round(self, index: int) -> _RoundBuilder:
        if index not in self.rounds:
            self.rounds[index] = _RoundBuilder(index)
        return self.rounds[index]

    def take(self, event: dict[str, Any]) -> None:
        """Fill in what one event tells; an event that this version does not know tells nothing."""
        name, when = event["event"], _integer(event.get("t")) or 0
        node, host = _integer(event.get("node")), _text(event.get("host"))
        self.times.take(event)
        if name == "closed":
            self.closed_outcome, self.closed_reason = _text(event.get("outcome")), _text(event.get("reason"))
            return
        handler = _HANDLERS.get((_text(event.get("role")), name)) if isinstance(name, str) else None
        if handler is not None:
            handler(self, event, when)
            return
        index = _integer(event.get("round"))
        if index is None or index < 0 or not isinstance(name, str):
            return
        round_handler = _ROUND_HANDLERS.get(name)
        if round_handler is not None:
            round_handler(self.round(index), event, when, -1 if node is None else node, host)

    def build(self) -> AttemptHistory:
        self._tell_once_who_left()
        # A round that was opened but never became final had no workers: it is only what came after the one before.
        rounds = [part for part in (self.rounds[i].build() for i in sorted(self.rounds)) if part.nodes or part.broken]
        return AttemptHistory(
            number=self.number,
            job_id=self.job_id,
            nodes=self.nodes,
            started_ns=self.started_ns,
            ended_ns=self.ended_ns,
            outcome=self.outcome or self.closed_outcome,
            reason=self.reason or self.closed_reason,
            exit_code=self.exit_code,
            decision=self.decision,
            rounds=tuple(self._completed(part) for part in rounds),
            agent_ends=tuple(self.agent_ends),
            relaunched=tuple(self.relaunched),
            notices=tuple(dict.fromkeys(self.notices)),
            output_lost=tuple(self.output_lost),
            problems=tuple(self.problems),
            times=self.times.build(),
        )

    def _tell_once_who_left(self) -> None:
        """A node's own word stands in the round that it was in last; the coordinator's, in the one after it."""
        told = {node for part in self.rounds.values() for node, loss in part.lost.items() if loss.left}
        for part in self.rounds.values():
            for node, loss in part.left.items():
                if node not in told:
                    part.lost[node] = loss

    def _completed(self, part: RoundHistory) -> RoundHistory:
        """Add what other events tell about a round: the decision after it, its lost nodes' names and agents."""
        lost = [*(self._named(loss) for loss in part.lost_nodes), *self._dead_agents(part)]
        part = replace(part, lost_nodes=tuple(lost))
        if part.decision is not None or not part.broken:
            return part
        after = self.rounds.get(part.index + 1)
        if after is not None and (after.frozen_reason or after.nodes):
            reason = after.frozen_reason or after.reason
            action = "restart" if reason.startswith("restart") else "continue"
            decision = RestartDecision(action=action, reason=reason, restarts_used=after.restarts_used)
        elif self.closed_reason:
            decision = RestartDecision(action="close", reason=self.closed_reason)
        else:
            return part
        return replace(part, decision=decision)

    def _dead_agents(self, part: RoundHistory) -> list[NodeLoss]:
        """Agents that died in this round and were started again: no coordinator tells of them as lost nodes.

        No clocks compared: such a node took part, told no end of it, and takes part in a later round. The n-th of its
        rounds of that kind goes with the n-th bad end of its agent that the supervisor saw.
        """
        lost = []
        known = {loss.node for loss in part.lost_nodes}
        for node in part.nodes:
            cut_short = self._cut_short(node.node)
            ends = [end for end in self.agent_ends if end.node == node.node and end.code != 0]
            if node.node in known or part.index not in cut_short[: len(ends)]:
                continue
            end = ends[cut_short.index(part.index)]
            lost.append(
                NodeLoss(
                    round=part.index,
                    node=node.node,
                    host=node.host,
                    seen_ns=end.seen_ns,
                    detail=_code_text(end.code),
                    agent_only=True,
                )
            )
        return lost

    def _cut_short(self, node: int) -> list[int]:
        """Rounds of which this node told no end, though it was there again later."""
        mine = [index for index in sorted(self.rounds) if node in self.rounds[index].nodes]
        return [index for index in mine[:-1] if node not in self.rounds[index].ended]

    def _named(self, loss: NodeLoss) -> NodeLoss:
        host = loss.host or (self.nodes[loss.node] if 0 <= loss.node < len(self.nodes) else f"node {loss.node}")
        code = next((end.code for end in self.agent_ends if end.node == loss.node and end.code != 0), None)
        if code is None or loss.left:
            return replace(loss, host=host)
        return replace(loss, host=host, detail=_code_text(code))


def _code_text(code: int) -> str:
    if code == UNHEALTHY_CODE:
        return "its agent took it out: a health check failed"
    name = signal_name(signal_of(code))
    return f"its agent was ended by {name}" if name else f"its agent ended with code {code}"


def _attempt_started(builder: _AttemptBuilder, event: dict[str, Any], when: int) -> None:
    builder.started_ns = when
    builder.job_id = _text(event.get("job_id")) or builder.job_id
    builder.nodes = _names(event.get("nodes")) or builder.nodes


def _agent_ended(builder: _AttemptBuilder, event: dict[str, Any], when: int) -> None:
    code = _integer(event.get("code"))
    if code is None:
        return
    name, node = _text(event.get("name")), _integer(event.get("node"))
    if name in builder.nodes and (node is None or node < 0):
        node = builder.nodes.index(name)
    builder.agent_ends.append(AgentEnd(node=-1 if node is None else node, name=name, code=code, seen_ns=when))


def _agent_relaunched(builder: _AttemptBuilder, event: dict[str, Any], when: int) -> None:
    builder.relaunched.append(_text(event.get("name")))


def _notice(builder: _AttemptBuilder, event: dict[str, Any], when: int) -> None:
    builder.notices.append(_text(event.get("signal")))


def _verdict(builder: _AttemptBuilder, event: dict[str, Any], when: int) -> None:
    builder.outcome = builder.outcome or _text(event.get("outcome"))
    builder.reason = _text(event.get("reason"))
    if builder.exit_code is None:
        builder.exit_code = _integer(event.get("exit_code"))


def _requeue_decision(builder: _AttemptBuilder, event: dict[str, Any], when: int) -> None:
    builder.decision = f"{_text(event.get('action'))}: {_text(event.get('reason'))}"


def _attempt_ended(builder: _AttemptBuilder, event: dict[str, Any], when: int) -> None:
    builder.ended_ns = when
    builder.outcome = _text(event.get("outcome")) or builder.outcome
    builder.exit_code = _integer(event.get("exit_code"))


def _output_lost(builder: _AttemptBuilder, event: dict[str, Any], when: int) -> None:
    builder.output_lost.append(read_loss(event, when))


# The supervisor's `node` field is the node that the event is about; an agent's is its own.
_HANDLERS = {
    ("supervisor", "attempt_started"): _attempt_started,
    ("supervisor", "agent_ended"): _agent_ended,
    ("supervisor", "agent_relaunched"): _agent_relaunched,
    ("supervisor", "notice"): _notice,
    ("supervisor", "verdict"): _verdict,
    ("supervisor", "requeue_decision"): _requeue_decision,
    ("supervisor", "attempt_ended"): _attempt_ended,
    ("agent", "output_lost"): _output_lost,
}


def _round_opened(part: _RoundBuilder, event: dict[str, Any], when: int, node: int, host: str) -> None:
    part.reason = _text(event.get("reason"))


def _round_frozen(part: _RoundBuilder, event: dict[str, Any], when: int, node: int, host: str) -> None:
    part.frozen_reason = _text(event.get("reason"))
    part.restarts_used = _integer(event.get("restarts_used"))


def _round_final(part: _RoundBuilder, event: dict[str, Any], when: int, node: int, host: str) -> None:
    ranks = event.get("ranks")
    part.nodes[node] = RoundNode(
        node=node,
        host=host,
        ranks=tuple(rank for rank in ranks if isinstance(rank, int)) if isinstance(ranks, list) else (),
        group_rank=_or(_integer(event.get("group_rank")), -1),
    )
    part.final_ns[node] = when
    part.started_ns = when if part.started_ns is None else min(part.started_ns, when)
    part.world_size = _integer(event.get("world_size"))


def _worker_failed(part: _RoundBuilder, event: dict[str, Any], when: int, node: int, host: str) -> None:
    rank = _integer(event.get("rank"))
    if rank is None:
        return
    exitcode = _or(_integer(event.get("exitcode")), 1)
    try:
        failure_class = FailureClass(event.get("failure_class"))
    except ValueError:
        failure_class = FailureClass.ROOT
    infrastructure = failure_class is FailureClass.INFRASTRUCTURE
    message = _text(event.get("message"))
    part.told[rank] = WorkerFailure(
        round=part.index,
        host=host,
        node=node,
        local_rank=_or(_integer(event.get("local_rank")), -1),
        global_rank=rank,
        pid=_or(_integer(event.get("pid")), 0),
        exitcode=exitcode,
        signal=signal_name(signal_of(exitcode)),
        ended_ns=when,
        message=message,
        fingerprint=_text(event.get("fingerprint")),
        failure_class=failure_class,
        category=Category.INFRASTRUCTURE if infrastructure else Category.WORKER,
        last_step=_integer(event.get("last_step")),
        source=EvidenceSource.EVENT,
        error_file=_text(event.get("error_file")),
        problem="error.json is missing: this is what its agent's event says",
    )


def _node_lost(part: _RoundBuilder, event: dict[str, Any], when: int, node: int, host: str) -> None:
    age = event.get("age")
    # An agent's own `node` and `host` head every line: the event's fields of that name are the lost node's.
    part.lost[node] = NodeLoss(
        round=part.index,
        node=node,
        host=host,
        seen_ns=when,
        age=float(age) if isinstance(age, (int, float)) and 0 <= age < 1e9 else 0.0,
    )


def _health_check_failed(part: _RoundBuilder, event: dict[str, Any], when: int, node: int, host: str) -> None:
    part.lost[node] = NodeLoss(round=part.index, node=node, host=host, seen_ns=when, left=_text(event.get("reason")))


def _node_left(part: _RoundBuilder, event: dict[str, Any], when: int, node: int, host: str) -> None:
    why = _text(event.get("reason")) or "no reason was given"
    part.left[node] = NodeLoss(round=part.index, node=node, host=host, seen_ns=when, left=why)


def _workers_succeeded(part: _RoundBuilder, event: dict[str, Any], when: int, node: int, host: str) -> None:
    part.succeeded.add(node)
    _ended(part, when, node)


def _workers_stopping(part: _RoundBuilder, event: dict[str, Any], when: int, node: int, host: str) -> None:
    part.stopping.append(_text(event.get("reason")))


def _workers_stopped(part: _RoundBuilder, event: dict[str, Any], when: int, node: int, host: str) -> None:
    if node not in part.ended:
        _ended(part, when, node)


def _ended(part: _RoundBuilder, when: int, node: int) -> None:
    part.ended.add(node)
    begin = part.final_ns.get(node)
    if begin is not None and when >= begin:
        part.seconds = max(part.seconds or 0.0, (when - begin) / 1e9)


def _restart_decision(part: _RoundBuilder, event: dict[str, Any], when: int, node: int, host: str) -> None:
    if when >= part.decided_ns:  # a new coordinator may have decided again: the last word holds
        part.decided_ns = when
        part.decision = RestartDecision(
            action=_text(event.get("action")),
            reason=_text(event.get("reason")),
            restarts_used=_integer(event.get("restarts_used")),
            max_restarts=_integer(event.get("max_restarts")),
        )


def _stacks_taken(part: _RoundBuilder, event: dict[str, Any], when: int, node: int, host: str) -> None:
    for word in _words(event.get("beats"), node=node, when=when):
        part.words[word.rank] = word
    groups = event.get("groups")
    for group in groups if isinstance(groups, list) else []:
        if isinstance(group, dict) and (ranks := _whole_numbers(group.get("ranks"))):
            part.stacks.setdefault(_names(group.get("stack"))[-_FRAMES:], []).extend(ranks)
    if silent := _whole_numbers(event.get("silent")):
        part.stacks.setdefault((), []).extend(silent)


_ROUND_HANDLERS = {
    "stacks_taken": _stacks_taken,
    "round_opened": _round_opened,
    "round_frozen": _round_frozen,
    "round_final": _round_final,
    "worker_failed": _worker_failed,
    "node_lost": _node_lost,
    "node_left": _node_left,
    "health_check_failed": _health_check_failed,
    "workers_succeeded": _workers_succeeded,
    "workers_stopping": _workers_stopping,
    "workers_stopped": _workers_stopped,
    "restart_decision": _restart_decision,
}


def _integer(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _whole_numbers(value: object) -> list[int]:
    return [n for n in value if _integer(n) is not None] if isinstance(value, list) else []


def _or(value: int | None, default: int) -> int:
    return default if value is None else value


def _text(value: object) -> str:
    if value is None:
        return ""
    text = value if isinstance(value, str) else str(value)
    return text[:_TEXT_LIMIT]


def _names(value: object) -> tuple[str, ...]:
    return tuple(name for name in value if isinstance(name, str)) if isinstance(value, list) else ()
