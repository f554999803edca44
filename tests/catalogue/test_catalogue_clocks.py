"""Nodes whose clocks are an hour apart."""

from __future__ import annotations

from tests.rigs.failure_catalogue import MEET, Catalogue, Told
from tests.rigs.wrong_clocks import fail_one_after_the_other, node_0_coordinates, node_clocks

HOUR = 3600.0


def test_the_later_failure_has_the_earlier_stamp(catalogue: Catalogue) -> None:
    """Node 1 is an hour ahead and fails first, node 2 an hour behind."""
    script = (
        MEET
        + """
wait_for(f"fail-{ROUND}-{RANK}")
raise [RuntimeError("zero"), KeyError("one"), ValueError("two")][RANK]
"""
    )
    clocks = node_clocks({1: (HOUR, 5000.0), 2: (-HOUR, -10.0)})
    options = ["--rdzv-conf", "beat_silence=20", *node_0_coordinates(catalogue.folder)]
    with catalogue.run(script, options=options, nodes=3, environ=clocks, heartbeat_ttl=8.0) as run:
        run.wait_moments("here", count=3)
        fail_one_after_the_other(run, 0, [1, 2])
        run.finish()
        expected = Told(
            exit_code=1,
            cause="KeyError: 'one'",
            rank=1,
            host="node1",
            failure_class="root",
            category="worker",
            retryable=True,
            confidence="high",
            evidence="first of 2 different failures, <N> s before the next "
            "(rank 2 on node2; clocks known to within <N> ms)",
            kind="uncaught exception",
        )
        catalogue.check(run, "clocks-an-hour-apart", expected)
        at = {event["rank"]: event["ended_ns"] for event in run.events("worker_failed")}
        assert at[2] < at[1] - HOUR * 10**9
        clocks = run.report()["attempts"][0]["clocks"]
        assert clocks["reference_node"] == 0
        offsets = {item["node"]: item for item in clocks["offsets"]}
        for node, ahead in ((1, HOUR), (2, -HOUR)):
            assert abs(offsets[node]["offset_ns"] - ahead * 1e9) <= offsets[node]["bound_ns"] < 10**9
        (later,) = run.report()["verdict"]["candidates"]
        assert (later["global_rank"], later["at_ns"] > at[1] - HOUR * 1e9 - 10**9) == (2, True), (
            "by the reference's clock"
        )
