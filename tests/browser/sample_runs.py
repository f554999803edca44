"""Run directories whose pages are looked at: written by `run_builder`, but for those that a real run leaves."""

from __future__ import annotations

import random
from pathlib import Path

import msgspec

from hpc_elastic.failures.ranking import FailureClass
from hpc_elastic.failures.worker_failure import WorkerFailure
from hpc_elastic.run.progress import Activity, AwaitedCall, FlightTail, TailTrack
from tests.rigs.run_builder import GLOO, RunBuilder, make_failure

HOSTILE = "\"'><script>document.title='OWNED'</script><img src=x onerror=\"document.title='OWNED'\">&amp;</pre></style>"
"""Breaks out of an element, of an attribute in either quotes, and of a style sheet."""


def agents(builder: RunBuilder, attempt: int, *, at: float, end: float | None = None) -> None:
    """The first, and perhaps the last, word of every node's agent."""
    for node in range(builder.nodes):
        builder.event(attempt, "agent", node, at + 0.05 * (node % 7), "agent_started", pid=1, version="0.1.0")
    if end is not None:
        for node in range(builder.nodes):
            builder.event(attempt, "agent", node, end, "agent_ended", reason="end", code=0)


def requeued_run(root: Path) -> RunBuilder:
    """4 nodes of 2 ranks: a bug twice, a lost node, an hour in the queue, and success."""
    builder = RunBuilder(root, nodes=4, per_node=2)
    builder.attempt(0)
    agents(builder, 0, at=4)
    builder.round(0, 0, at=9)
    _fail_one(builder, 5, at=640, round_index=0, last_step=1310)
    builder.stopped(0, 0, at=643)
    builder.round(0, 1, at=652, reason="restart 1 of 3 (2 left) after: rank 5: ValueError: bad batch 17")
    builder.event(0, "agent", 3, 1230, "node_lost", round=1, age=30.0)
    builder.stopped(0, 1, at=1233, reason="n4 stopped its heartbeat", without=(3,))
    builder.round(0, 2, at=1245, without=(3,), reason="n4 stopped its heartbeat; without n4")
    _fail_one(builder, 1, at=1800, round_index=2, last_step=3004, exitcode=-9)
    builder.stopped(0, 2, at=1805, without=(3,))
    builder.end(0, at=1812, outcome="failed", code=75, decision="requeue: requeue 1 of 3 (2 left): too few nodes")
    builder.attempt(1, at=5400, job_id="4243")
    agents(builder, 1, at=5406, end=7990)
    builder.round(1, 0, at=5415)
    builder.succeeded(1, 0, at=7980)
    builder.end(1, at=7992, outcome="succeeded", code=0, reason="all workers ended with 0")
    return builder


def _fail_one(
    builder: RunBuilder, rank: int, *, at: float, round_index: int, last_step: int, exitcode: int = 1
) -> None:
    exception = "ValueError: bad batch 17: expected 4096 tokens, got 4095" if exitcode == 1 else ""
    builder.fail(
        make_failure(
            rank,
            at=at,
            exception=exception,
            exitcode=exitcode,
            per_node=2,
            round_index=round_index,
            last_step=last_step,
        )
    )
    for other in range(6):
        if other // 2 != rank // 2:
            text = f"RuntimeError: {GLOO.format(rank=other)}"
            failure = make_failure(other, at=at + 0.2 + other / 50, exception=text, per_node=2, round_index=round_index)
            builder.fail(failure)


def many_nodes_run(root: Path, *, nodes: int = 512, rounds: int = 5) -> RunBuilder:
    """As many rows: in each round one rank fails, its peers lose it, and one node is lost on the way."""
    chance = random.Random(7)
    builder = RunBuilder(root, nodes=nodes)
    builder.attempt(0)
    agents(builder, 0, at=3)
    lost = nodes // 3
    gone: tuple[int, ...] = ()
    for index in range(rounds):
        start = 10 + 700 * index
        builder.round(0, index, at=start, without=gone, reason=f"restart {index} of 9" if index else "")
        culprit = chance.randrange(nodes - 1)
        for node in range(nodes):
            if node in gone or (chance.random() < 0.5 and node != culprit):
                continue
            text = "ValueError: bad batch 17" if node == culprit else f"RuntimeError: {GLOO.format(rank=node % 250)}"
            at = start + 600 + (0 if node == culprit else 0.3 + node / 1000)
            builder.fail(make_failure(node, at=at, exception=text, round_index=index, last_step=90 * index + 80))
        if index == rounds // 2:
            builder.event(0, "agent", lost, start + 620, "node_lost", round=index, age=8.0)
            gone = (lost,)
        builder.stopped(0, index, at=start + 640, without=gone)
    builder.event(0, "agent", 0, 10 + 700 * rounds, "closed", outcome="failed", reason="restarts exhausted (9 of 9)")
    builder.end(0, at=20 + 700 * rounds, outcome="failed", code=1, decision="end: 3 of 3 requeues used")
    return builder


def hung_run(root: Path) -> RunBuilder:
    """8 ranks, of which one hangs in the data loader, and the others in the collective."""
    builder = RunBuilder(root, nodes=4, per_node=2)
    builder.attempt(0)
    agents(builder, 0, at=2)
    builder.round(0, 0, at=4)
    for rank in range(8):
        place = "queue.py:171 get" if rank == 3 else "distributed_c10d.py:2810 all_reduce"
        builder.event(
            0,
            "agent",
            rank // 2,
            400 + rank / 100,
            "stacks_taken",
            round=0,
            groups=[{"ranks": [rank], "stack": ["/home/ann/train.py:88 main", f"/home/ann/lib/{place}"]}],
            silent=[],
            beats=[
                {
                    "rank": rank,
                    "local_rank": rank % 2,
                    "step": 70 + (rank != 3),
                    "section": "step",
                    "age": 60.0,
                    "count": 9,
                }
            ],
        )
        builder.fail(_hang(rank, at=401 + rank / 100))
    builder.stopped(0, 0, at=403, reason="rank 3 hangs")
    builder.end(0, at=410, outcome="hang", code=124, decision="end: 3 of 3 requeues used")
    return builder


def collectives_run(root: Path) -> RunBuilder:
    """All wait in an all_reduce; one rank never entered it, one called a broadcast, and one left no dump."""
    builder = RunBuilder(root, nodes=1, per_node=4)
    builder.attempt(0)
    agents(builder, 0, at=2)
    builder.round(0, 0, at=4)
    all_reduce = AwaitedCall(
        name="all_reduce", group="0", description="default_pg", backend="nccl", inputs=((1024, 2048),),
        outputs=((1024, 2048),), types=("BFloat16",),
    )  # fmt: skip
    calls = (all_reduce, AwaitedCall(name="broadcast", group="0", backend="nccl"))
    found = []
    for rank in range(4):
        numbers = tuple(range(20, 40 if rank == 2 else 41))
        track = TailTrack(
            group="0",
            backend="nccl",
            sequences=numbers,
            calls=tuple(int(n == 40 and rank == 1) for n in numbers),
            done=tuple(int(n < 40) for n in numbers),
        )
        flight = FlightTail(calls=calls, tracks=(track,), members=(("0", "0-3"),))
        found.append(Activity(rank=rank, failed=rank != 2, flight=flight if rank != 3 else None))
        if rank != 2:
            text = f"RuntimeError: {GLOO.format(rank=rank)}"
            builder.fail(make_failure(rank, at=400 + rank / 1000, exception=text, per_node=4))
    builder.event(0, "agent", 0, 401, "ranks_observed", round=0, ranks=msgspec.to_builtins(found), total=4)
    builder.stopped(0, 0, at=403)
    builder.end(0, at=410, outcome="failed", code=1, decision="end: 3 of 3 requeues used")
    return builder


def _hang(rank: int, *, at: float) -> WorkerFailure:
    from msgspec.structs import replace

    failure = make_failure(rank, at=at, exitcode=-6, per_node=2, last_step=70 + (rank != 3), stopped_by_agent=True)
    kind = FailureClass.HANG if rank == 3 else FailureClass.STOPPED_BY_US
    return replace(failure, failure_class=kind, reason="no heartbeat for 60 s")


def hostile_run(root: Path) -> RunBuilder:
    """Markup wherever somebody else's words may stand."""
    builder = RunBuilder(root, nodes=3)
    builder.attempt(0, job_id=HOSTILE)
    agents(builder, 0, at=1, end=100)
    builder.round(0, 0, at=2, reason=HOSTILE)
    for rank in range(3):
        failure = make_failure(rank, at=20 + rank, exception=f"ValueError: {HOSTILE}", host=f"n{HOSTILE}", last_step=3)
        builder.fail(failure)
    builder.event(0, "agent", 1, 30, "node_lost", round=0, age=1.0, host=HOSTILE)
    builder.event(
        0, "agent", 1, 30, "stacks_taken", round=0, groups=[{"ranks": [0], "stack": [HOSTILE]}], silent=[1], beats=[]
    )
    builder.stopped(0, 0, at=40, reason=HOSTILE)
    builder.round(0, 1, at=50, reason=HOSTILE)
    builder.stopped(0, 1, at=90, reason=HOSTILE)
    builder.end(0, at=100, outcome=HOSTILE, code=1, decision=f"requeue: {HOSTILE}", reason=HOSTILE)
    return builder
