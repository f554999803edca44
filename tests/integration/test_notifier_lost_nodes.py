"""A node that dies is out soon; one that only lost its network, or one direction of it, stays in while its files move.

With the settings that a run has by default, unless a test says otherwise. How soon it is: tests/bench.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hpc_elastic.report.collect import collect_run
from hpc_elastic.report.document import Document
from hpc_elastic.report.render_text import render_text
from tests.rigs.network_nodes import NetworkRun
from tests.rigs.network_nodes.nodes import seconds_to_stop

NODES = 8
LATEST = 40.0
"""Seconds from a node's death until eight agents run their workers again, on two busy cores: about 8 on idle ones."""
LEASE = {"heartbeat_ttl": "90"}
"""Where it is the notifier that is to tell of a death: without it, it would take longer than that."""
HOLD = 10.0
"""Seconds: more than three times the silence (3 s) after which a node is asked, and than that and the answer take."""


def test_nodes_that_die_are_out_and_the_others_run_again(tmp_path: Path) -> None:
    """A member, the coordinator, and one that is cut off from network and files at once; one after the other."""
    with NetworkRun(tmp_path, nodes=NODES, caches=60.0, conf=LEASE) as run:
        index, left = run.wait_round(count=NODES), set(range(NODES))
        for what in ("a member", "the coordinator", "one cut off"):
            leader = run.coordinator()
            lost = leader if what == "the coordinator" else max(left - {leader})
            began = time.monotonic()
            if what == "one cut off":
                run.network.set_link(lost, up=False)
                run.emulator.freeze(lost)
            else:
                run.kill_node(lost)
            left.remove(lost)
            index = run.wait_round(count=len(left), after=index, within=80)
            took = time.monotonic() - began
            print(f"{what}: the others run again after {took:.2f} s")
            assert set(run.started(index).values()) == left
            assert took <= LATEST
        run.until(lambda: len(run.events("node_lost")) == 3, "the events of three lost nodes")


def test_without_the_notifier_a_dead_coordinator_is_out_after_its_leases_time(tmp_path: Path) -> None:
    """By default 20 s and then the polls' time; here 4 s."""
    conf = {"doorbell": "off", "heartbeat_ttl": "4", "poll_interval": "0.5"}
    with NetworkRun(tmp_path, nodes=NODES, caches=60.0, conf=conf) as run:
        index = run.wait_round(count=NODES)
        lost = run.coordinator()
        began = time.monotonic()
        run.kill_node(lost)
        index = run.wait_round(count=NODES - 1, after=index)
        took = time.monotonic() - began
        print(f"no notifier, lease of 4 s: the others run again after {took:.2f} s")
        assert took > 4.0 - 0.8, "the coordinator's lease (and, begun anew by its successor, a member's)"
        assert set(run.started(index).values()) == set(range(NODES)) - {lost}


def _of_members(run: NetworkRun) -> None:
    """One neither hears nor is heard, one sends in vain, one hears nothing; all have a link, and the files."""
    run.network.lose_from(3)
    run.network.lose_to(3)
    run.network.lose_from(4)
    run.network.lose_to(5)


def _from_the_coordinator(run: NetworkRun) -> None:
    run.network.lose_from(run.coordinator())


def _to_the_coordinator(run: NetworkRun) -> None:
    run.network.lose_to(run.coordinator())


@pytest.mark.parametrize(
    "disturb", [_of_members, _from_the_coordinator, pytest.param(_to_the_coordinator, marks=pytest.mark.slow)]
)
def test_who_lost_packets_alone_stays_in(tmp_path: Path, disturb: Callable[[NetworkRun], None]) -> None:
    """The silence is noticed, the nodes are asked through the files, and answer: no round ends."""
    with NetworkRun(tmp_path, nodes=NODES, caches=3.0) as run:
        index = run.wait_round(count=NODES)
        disturb(run)
        until = time.monotonic() + HOLD
        while time.monotonic() < until:
            assert run.newest_round() == index, run.logs()
            time.sleep(0.1)
        asked = [event["reason"] for event in run.events("nodes_asked")]
        assert asked, "the silence was noticed"
        assert not run.events("node_lost")
        record = run.newest_record()
        assert (record["status"], record["lost"]) == ("final", [])
        # What happens next still reaches everybody: by polling where no packet does.
        took = seconds_to_stop(run, index, 6, within=20)
        print(f"{disturb.__name__}: all others ended {took:.2f} s after a worker's death")
        assert took < 15.0
        run.wait_round(count=NODES, after=index)
        assert not run.events("node_lost")


def test_a_link_that_comes_and_goes_is_told_with_its_number_and_its_time(tmp_path: Path) -> None:
    with NetworkRun(tmp_path, nodes=3) as run:
        index = run.wait_round(count=3)
        flapping = next(node for node in range(3) if node != run.coordinator())
        for number in range(2):
            run.network.set_link(flapping, up=False)
            run.until(lambda: run.newest_record()["suspects"], "a suspect")
            run.until(lambda: not run.newest_record()["suspects"], "its answer through the files")
            run.network.set_link(flapping, up=True)
            run.until(lambda number=number: len(run.events("link_lost")) == number + 1, "word of the link")
        assert {(one["node"], one["over"]) for one in run.events("link_lost")} == {(flapping, True)}
        assert all(3.0 < one["seconds"] < 30.0 for one in run.events("link_lost"))
        assert run.newest_round() == index
        assert not run.events("node_lost")
        text = render_text(Document(collect_run(run.attempt.root.parent)))
        assert f"n{flapping}: network link lost 2 times, " in text
        run.let_workers_end()
        run.wait_for_ends(range(3))


@pytest.mark.slow
def test_a_slow_file_server_loses_nobody(tmp_path: Path) -> None:
    """Each operation takes 0.2 s, with the settings that a run has by default: a restart takes its time."""
    with NetworkRun(tmp_path, nodes=3, caches=30.0) as run:
        index = run.wait_round(count=3)
        run.emulator.change(latency=0.2)
        run.kill_worker(run.workers(index)[1])
        run.wait_round(count=3, after=index)
        assert not run.events("node_lost")
        run.emulator.change(latency=0.0)
        run.let_workers_end()
        run.wait_for_ends(range(3))


def test_a_node_whose_files_hang_while_its_worker_has_died_holds_the_others_up_for_no_more_than_the_lease(
    tmp_path: Path,
) -> None:
    """Its beats go on, from a thread that no hung mount stops. When the mount answers again, it comes back."""
    with NetworkRun(tmp_path, nodes=3, conf={"heartbeat_ttl": "8"}) as run:
        index = run.wait_round(count=3)
        leader = run.coordinator()
        hung = next(node for node in range(3) if node != leader)
        workers = run.workers(index)
        run.emulator.freeze(hung)
        run.kill_worker(workers[hung])
        began = run.kill_worker(workers[leader])
        index = run.wait_round(count=2, after=index, within=60.0)
        took = time.monotonic() - began
        print(f"files hang, lease of 8 s: the others run again after {took:.2f} s")
        assert took < 30.0, "3 + 4 + 8 s, and the workers' start"
        assert hung not in run.started(index).values()
        (lost,) = run.until(lambda: run.events("node_lost"), "the event")
        assert (lost["node"], lost["reason"].partition(",")[0]) == (hung, "its files hang: its beats come")
        run.emulator.thaw(hung)
        run.wait_round(count=3, after=index)
