"""A large run's directory, as its agents and its supervisor would have left it, written in seconds.

::

    python -m tests.bench.report_run DIR [NODES ROUNDS FAILURES]     1,024 nodes, 100 rounds, 100 failures in each
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from hpc_elastic.failures.evidence import write_evidence
from hpc_elastic.failures.failure_text import fingerprint
from hpc_elastic.run.paths import RunPaths
from tests.rigs.run_builder import GLOO, START_NS, UPTIME_NS, make_failure

TRAIN_SECONDS = 600.0
ROUND_SECONDS = 640.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSize:
    nodes: int = 1024
    per_node: int = 8
    rounds: int = 100
    failures: int = 100
    """In each round: one cause, the others its consequences on as many nodes."""

    @property
    def words(self) -> str:
        return f"{self.rounds * self.failures:,} failures in {self.rounds} rounds of {self.nodes:,} nodes"


LARGE = RunSize()


def write_run(root: Path, size: RunSize = LARGE) -> Path:
    """Write one attempt that restarted its workers after every round, and gave up at last."""
    names = [f"nid{1000 + node:06d}" for node in range(size.nodes)]
    paths = RunPaths(root)
    attempt = paths.attempt(0)
    attempt.events.mkdir(parents=True)
    run = {"version": 1, "run_id": root.name, "name": "train", "max_requeues": 3}
    paths.run_json.write_text(json.dumps({**run, "entrypoint": {"kind": "script", "target": "/home/ann/train.py"}}))
    attempt.attempt_json.write_text(json.dumps({"version": 1, "number": 0, "nodes": names}))
    failing = [_failing(size, index) for index in range(size.rounds)]
    for index, nodes in enumerate(failing):
        _write_error_files(paths, size, index, nodes, names)
    for node, name in enumerate(names):
        _write_agent(attempt.events, size, node, name, failing)
    supervisor = _Writer(names[0], -1, "supervisor")
    supervisor.tell(0.0, "attempt_started", attempt=0, job_id="4242", nodes=names, requeue_armed=True)
    end = 10 + size.rounds * ROUND_SECONDS
    reason = f"restarts exhausted ({size.rounds - 1} of {size.rounds - 1})"
    supervisor.tell(end, "verdict", outcome="failed", reason=reason, exit_code=1)
    supervisor.tell(end, "requeue_decision", action="end", reason="3 of 3 requeues used")
    supervisor.tell(end + 1, "attempt_ended", outcome="failed", exit_code=1)
    supervisor.save(attempt.events)
    return root


class _Writer:
    def __init__(self, host: str, node: int, role: str) -> None:
        self._head = {"host": host, "node": node, "role": role}
        self._lines: list[str] = []

    def tell(self, at: float, event: str, **fields: Any) -> None:
        line = {"v": 1, "t": START_NS + int(at * 1e9), "n": len(self._lines), **self._head, "event": event, **fields}
        self._lines.append(json.dumps(line))

    def clock(self, at: float, *, bound_ns: int) -> None:
        now = int(at * 1e9)
        known = {"reference": 0, "offset_ns": 0, "bound_ns": bound_ns}
        self.tell(at, "clock_offset", **known, uptime_ns=UPTIME_NS + now, wall_ns=START_NS + now)

    def save(self, folder: Path) -> None:
        name = f"{self._head['role']}-{self._head['node']:05d}-000118ea0e29ec93-4d88.jsonl"
        (folder / name).write_text("\n".join(self._lines) + "\n")


def _failing(size: RunSize, index: int) -> list[int]:
    """The nodes on which a rank fails, the culprit first: others in each round."""
    step = max(1, size.nodes // size.failures)
    first = index * 7919 % size.nodes
    return [(first + number * step) % size.nodes for number in range(size.failures)]


def _rank_of(size: RunSize, index: int, node: int) -> int:
    return node * size.per_node + (node + index) % size.per_node


def _moment(size: RunSize, index: int, number: int) -> float:
    return 10 + index * ROUND_SECONDS + TRAIN_SECONDS + (0.0 if number == 0 else 0.4 + number / 100)


def _message(index: int, number: int, rank: int) -> str:
    if number == 0:
        return f"ValueError: bad batch {17 + index}: expected 4096 tokens, got 4095"
    return f"RuntimeError: {GLOO.format(rank=rank % 250)}"


def _write_error_files(paths: RunPaths, size: RunSize, index: int, nodes: list[int], names: list[str]) -> None:
    attempt = paths.attempt(0)
    os.mkdir(attempt.round_dir(index))
    tail = "\n".join(f"step {1000 + line}: loss 2.{line:04d}, 4096 tokens, 1.2 s" for line in range(20))
    for number, node in enumerate(nodes):
        rank = _rank_of(size, index, node)
        failure = make_failure(
            rank, at=_moment(size, index, number), exception=_message(index, number, rank), host=names[node],
            per_node=size.per_node, round_index=index, last_step=50 * index + 40,
        )  # fmt: skip
        own = attempt.rank(index, rank)
        own.root.mkdir()
        write_evidence(replace(failure, stderr_tail=f"{tail}\n{failure.traceback}"), own.error_file)


def _write_agent(folder: Path, size: RunSize, node: int, name: str, failing: list[list[int]]) -> None:
    log = _Writer(name, node, "agent")
    log.tell(1 + node / 1000, "agent_started", pid=4000, version="0.1.0")
    world = size.nodes * size.per_node
    ranks = list(range(node * size.per_node, (node + 1) * size.per_node))
    for index in range(size.rounds):
        start = 10 + index * ROUND_SECONDS + node / 100_000
        if node == 0:
            before = _rank_of(size, index - 1, failing[index - 1][0]) if index else 0
            why = f"rank {before} ended with exit code 1" if index else "start"
            log.tell(start - 3, "round_opened", round=index, reason=why, restarts_used=index)
            log.tell(start - 2, "round_frozen", round=index, reason=f"restart {index} of 99", restarts_used=index)
            log.tell(start - 1, "note", subject="round_confirmed", text=f"round {index} confirmed by all", round=index)
        log.tell(
            start, "round_final", round=index, group_rank=node, group_world_size=size.nodes, world_size=world,
            local_world_size=size.per_node, ranks=ranks, master="nid001000:29400", restarts_used=index, max_restarts=99,
        )  # fmt: skip
        pids = [4000 + rank for rank in ranks]
        times = {"rendezvous_seconds": 0.9, "start_seconds": 0.4, "restart_seconds": 2.1 if index else None}
        if index == 0:
            log.clock(start + 0.4, bound_ns=1_000_000 if node else 0)
        log.tell(start + 0.4, "workers_started", round=index, pids=pids, **times)
        stop = 10 + index * ROUND_SECONDS + TRAIN_SECONDS + 0.2
        culprit = _rank_of(size, index, failing[index][0])
        reason = f"rank {culprit} ended with exit code 1 on nid{1000 + failing[index][0]:06d}"
        if node in failing[index]:
            log.clock(_moment(size, index, failing[index].index(node)), bound_ns=1_000_000 if node else 0)
        log.tell(stop, "workers_stopping", round=index, reason=reason)
        log.tell(stop + 3, "workers_stopped", round=index, seconds=3.0, killed=0, left=[])
        if node in failing[index]:
            number = failing[index].index(node)
            rank = _rank_of(size, index, node)
            message = _message(index, number, rank)
            kind, _, body = message.partition(": ")
            log.tell(
                _moment(size, index, number) + 3, "worker_failed", round=index, rank=rank, exitcode=1, message=message,
                local_rank=rank % size.per_node, pid=4000 + rank, failure_class="symptom" if number else "root",
                fingerprint=fingerprint(exception_type=kind, message=body, exitcode=1, signal=""),
                error_file=str(folder.parent / f"round-{index:03d}" / f"rank-{rank:05d}" / "error.json"),
                last_step=50 * index + 40, ended_ns=START_NS + int(_moment(size, index, number) * 1e9),
                ended_uptime_ns=UPTIME_NS + int(_moment(size, index, number) * 1e9),
            )  # fmt: skip
    end = 10 + size.rounds * ROUND_SECONDS
    if node == 0:
        log.tell(end - 1, "closed", round=size.rounds, outcome="failed", reason="restarts exhausted (99 of 99)")
    log.tell(end, "agent_ended", reason="restarts exhausted (99 of 99)", code=1)
    log.save(folder)


if __name__ == "__main__":
    sizes = [int(number) for number in sys.argv[2:]] or [1024, 100, 100]
    print(write_run(Path(sys.argv[1]), RunSize(nodes=sizes[0], rounds=sizes[1], failures=sizes[2])))
