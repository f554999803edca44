"""Run directories as the agents and the supervisor write them, for tests of what reads them: no process is started."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from hpc_elastic.base.files import make_private_dir, write_json
from hpc_elastic.failures.classify import classify, signal_name, signal_of
from hpc_elastic.failures.evidence import write_evidence
from hpc_elastic.failures.failure_text import Frame, RaisedException, fingerprint
from hpc_elastic.failures.worker_failure import EvidenceSource, WorkerFailure
from hpc_elastic.report import root_cause
from hpc_elastic.report.history import RoundHistory
from hpc_elastic.report.verdict import Verdict
from hpc_elastic.run.events import EventLog
from hpc_elastic.run.paths import RunPaths
from tests.rigs.event_pairs import event_of

START_NS = 1_795_000_000_000_000_000
UPTIME_NS = 5_000_000_000_000
"""How long each host had been up by then, where a test says nothing else."""
GLOO = (
    "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.{rank}]:24496. "
    "This is typically caused by a remote worker crashing."
)
_FRAMES = (
    Frame(file="/venv/lib/python3.11/site-packages/torch/distributed/c10d_logger.py", line=83, function="wrapper"),
)
"""Where a collective raises."""


Builder = TypeVar("Builder", bound="RunBuilder")


class SetClock:
    """A clock that shows what it was set to."""

    def __init__(self) -> None:
        self.now_ns = START_NS

    def monotonic(self) -> float:
        return self.now_ns / 1e9

    def time_ns(self) -> int:
        return self.now_ns

    def wait(self, stop: threading.Event, seconds: float) -> bool:
        return stop.wait(0)


def decide_verdict(
    failures: Iterable[WorkerFailure], *, ranks: Mapping[int, str] | None = None, **known: Any
) -> Verdict:
    """The verdict on a round of which these fields are `known`."""
    part = RoundHistory(index=0, failures=tuple(failures), **known)
    return root_cause.decide_verdict(part, ranks=ranks)


def traceback_of(exception: str) -> str:
    """A traceback with two frames of the user's and one of torch's."""
    return (
        "Traceback (most recent call last):\n"
        '  File "/home/ann/train.py", line 88, in <module>\n    main()\n'
        '  File "/home/ann/train.py", line 61, in train_step\n    loss.backward()\n'
        '  File "/opt/venv/lib/python3.11/site-packages/torch/_tensor.py", line 625, in backward\n'
        "    torch.autograd.backward(\n"
        f"{exception}\n"
    )


def make_failure(
    rank: int,
    *,
    at: float,
    exception: str = "",
    exitcode: int = 1,
    host: str | None = None,
    per_node: int = 1,
    attempt: int = 0,
    round_index: int = 0,
    stopped_by_agent: bool = False,
    oom_kills: int = 0,
    stderr_tail: str = "",
    last_step: int | None = None,
) -> WorkerFailure:
    """A failure as `describe_failure` gives it; `at` is in seconds after the run's start."""
    exception_type, _, message = exception.partition(": ")
    number = signal_of(exitcode)
    signal = signal_name(number)
    kind = classify(
        WorkerFailure(exitcode=exitcode, stopped_by_agent=stopped_by_agent, oom_kills=oom_kills, last_step=last_step),
        chain=[RaisedException(exception_type=exception_type, message=message, frames=_FRAMES)] if exception else [],
        stderr_tail=stderr_tail,
    )
    pid = 4000 + rank
    text = f"Signal {number} ({signal}) received by PID {pid}" if signal else f"Process failed with exitcode {exitcode}"
    return WorkerFailure(
        attempt=attempt,
        round=round_index,
        host=host or f"n{rank // per_node + 1}",
        node=rank // per_node,
        local_rank=rank % per_node,
        global_rank=rank,
        pid=pid,
        exitcode=exitcode,
        signal=signal,
        ended_ns=START_NS + int(at * 1e9),
        ended_uptime_ns=UPTIME_NS + int(at * 1e9),
        message=exception or text,
        exception_type=exception_type,
        traceback=traceback_of(exception) if exception else "",
        stderr_tail=stderr_tail,
        fingerprint=fingerprint(exception_type=exception_type, message=message, exitcode=exitcode, signal=signal),
        category=kind.category,
        failure_class=kind.failure_class,
        reason=kind.reason,
        retryable=kind.retryable,
        oom_kills=oom_kills,
        stopped_by_agent=stopped_by_agent,
        last_step=last_step,
        source=EvidenceSource.STDERR if exception else EvidenceSource.EXIT,
    )


@dataclass
class RunBuilder:
    """Writes a run directory bit by bit; times are seconds after the run's start."""

    root: Path
    nodes: int = 4
    per_node: int = 1
    clock: SetClock = field(default_factory=SetClock)
    compares_clocks: bool = True
    """Whether the agents tell of their clocks when workers start."""

    def __post_init__(self) -> None:
        make_private_dir(self.root)
        self.paths = RunPaths(self.root)
        self._logs: dict[tuple[int, str, int], EventLog] = {}
        write_json(
            self.paths.run_json,
            {
                "version": 1,
                "run_id": self.root.name,
                "name": "train",
                "max_requeues": 3,
                "entrypoint": {"kind": "script", "target": "/home/ann/train.py"},
            },
        )

    @property
    def names(self) -> list[str]:
        return [f"n{index + 1}" for index in range(self.nodes)]

    def event(self, attempt: int, role: str, node: int, at: float, name: str, /, **fields: Any) -> None:
        """One event of the supervisor (node -1) or of a node's agent."""
        self.clock.now_ns = START_NS + int(at * 1e9)
        key = (attempt, role, node)
        if key not in self._logs:
            paths = self.paths.attempt(attempt)
            make_private_dir(paths.root)
            host = "n1" if node < 0 else f"n{node + 1}"
            self._logs[key] = EventLog(paths.events, role=role, host=host, node=node, uid="u1", clock=self.clock)
        self._logs[key].write(event_of(name, **fields))

    def attempt(self, number: int, *, at: float = 0.0, job_id: str = "4242") -> None:
        self.event(
            number,
            "supervisor",
            -1,
            at,
            "attempt_started",
            attempt=number,
            job_id=job_id,
            nodes=self.names,
            requeue_armed=True,
            requeue_reason="",
        )
        write_json(self.paths.attempt(number).attempt_json, {"version": 1, "number": number, "nodes": self.names})

    def begin(self: Builder, *, at: float = 1) -> Builder:
        """The first attempt, and its first round on all nodes."""
        self.attempt(0)
        self.round(0, 0, at=at)
        return self

    def clock_offset(self, attempt: int, node: int, *, at: float, ahead: float = 0.0, reference: int = 0) -> None:
        """What an agent tells of its clock, `ahead` seconds ahead of the reference's as the wall clock is."""
        self.event(
            attempt,
            "agent",
            node,
            at + ahead,
            "clock_offset",
            reference=reference,
            offset_ns=0,
            bound_ns=0 if node == reference else 1_000_000,
            uptime_ns=UPTIME_NS + int(at * 1e9),
            wall_ns=START_NS + int((at + ahead) * 1e9),
        )

    def round(
        self,
        attempt: int,
        index: int,
        *,
        at: float,
        without: tuple[int, ...] = (),
        reason: str = "",
        ahead: Mapping[int, float] = MappingProxyType({}),
    ) -> None:
        """A round that became final on all nodes but some; `ahead`: nodes whose wall clocks are."""
        here = [node for node in range(self.nodes) if node not in without]
        if reason:
            self.event(attempt, "agent", here[0], at, "round_frozen", round=index, reason=reason, restarts_used=index)
        for group_rank, node in enumerate(here):
            first = group_rank * self.per_node
            now = at + ahead.get(node, 0.0)
            self.event(
                attempt,
                "agent",
                node,
                now,
                "round_final",
                round=index,
                group_rank=group_rank,
                group_world_size=len(here),
                world_size=len(here) * self.per_node,
                local_world_size=self.per_node,
                ranks=list(range(first, first + self.per_node)),
                master="n1:29400",
                restarts_used=index,
                max_restarts=3,
            )
            if self.compares_clocks:
                self.clock_offset(attempt, node, at=at + 0.01, ahead=now - at)
            self.event(attempt, "agent", node, now + 0.01, "workers_started", round=index, pids=[4000 + first])

    def fail(self, failure: WorkerFailure, *, error_file: bool = True, told_at: float | None = None) -> WorkerFailure:
        """A failure with its error file and its event, which may come later."""
        paths = self.paths.attempt(failure.attempt).rank(failure.round, failure.global_rank)
        if error_file:
            for folder in (paths.root.parent.parent, paths.root.parent, paths.root):
                make_private_dir(folder)
            assert write_evidence(failure, paths.error_file) == ""
        self.event(
            failure.attempt,
            "agent",
            failure.node,
            (failure.ended_ns - START_NS) / 1e9 if told_at is None else told_at,
            "worker_failed",
            round=failure.round,
            rank=failure.global_rank,
            local_rank=failure.local_rank,
            pid=failure.pid,
            exitcode=failure.exitcode,
            failure_class=failure.failure_class.value,
            fingerprint=failure.fingerprint,
            error_file=str(paths.error_file),
            message=failure.message,
            last_step=failure.last_step,
            ended_ns=failure.ended_ns,
            ended_uptime_ns=failure.ended_uptime_ns,
        )
        return failure

    def stopped(
        self, attempt: int, index: int, *, at: float, reason: str = "a peer failed", without: tuple[int, ...] = ()
    ) -> None:
        """All nodes' workers are stopped, but some that tell nothing."""
        for node in (node for node in range(self.nodes) if node not in without):
            self.event(attempt, "agent", node, at - 0.1, "workers_stopping", round=index, reason=reason)
            self.event(attempt, "agent", node, at, "workers_stopped", round=index, seconds=0.1)

    def succeeded(self, attempt: int, index: int, *, at: float, nodes: tuple[int, ...] | None = None) -> None:
        for node in nodes if nodes is not None else range(self.nodes):
            self.event(attempt, "agent", node, at, "workers_succeeded", round=index)

    def end(self, attempt: int, *, at: float, outcome: str, code: int, decision: str = "", reason: str = "") -> None:
        self.event(attempt, "supervisor", -1, at, "verdict", outcome=outcome, reason=reason, exit_code=code)
        if decision:
            action, _, why = decision.partition(": ")
            self.event(attempt, "supervisor", -1, at, "requeue_decision", action=action, reason=why)
        self.event(attempt, "supervisor", -1, at, "attempt_ended", outcome=outcome, exit_code=code)
