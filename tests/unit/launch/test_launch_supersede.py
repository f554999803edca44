"""What an earlier attempt's agents come to, and how a new supervisor ends them."""

from __future__ import annotations

import errno
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hpc_elastic.base.loop import FileExecutor, is_refusal
from hpc_elastic.launch.run_directory import claim_attempt
from hpc_elastic.launch.site import AttemptContext
from hpc_elastic.launch.supersede import (
    END_SECONDS,
    AgentState,
    EarlierAttemptRunsError,
    EarlierAttempts,
    StartInterruptedError,
    agent_state,
)
from hpc_elastic.rendezvous.claims import goodbye_key
from hpc_elastic.rendezvous.failure_detector import Heartbeat
from hpc_elastic.rendezvous.membership import NodeInfo, Peers, RoundLog
from hpc_elastic.rendezvous.state import RoundRecord, Status
from hpc_elastic.rendezvous.succession import claim_end, close_run
from hpc_elastic.run.paths import AttemptInfo, Outcome, RunPaths, load_result
from hpc_elastic.store.file_store import FileStore
from tests.rigs.event_pairs import log_into
from tests.rigs.fake_clock import FakeClock
from tests.rigs.specs import make_attempt, make_spec, store_result

ANSWER, LEASE = 4.4, 20.0
SPEC = make_spec(run_id="r", max_nodes=2, rdzv_conf={"doorbell": False}, shutdown_timeout=30.0)


@pytest.mark.parametrize(
    ("ended", "answered", "up", "silent", "state"),
    [
        (True, False, False, 99.0, AgentState.ENDED),
        (False, False, True, ANSWER - 0.1, AgentState.AWAITED),
        (False, False, True, ANSWER, AgentState.SILENT),
        (False, False, False, LEASE - 0.1, AgentState.AWAITED),
        (False, False, False, LEASE, AgentState.SILENT),
        (False, True, True, ANSWER, AgentState.ALIVE),
        (False, True, False, LEASE - 0.1, AgentState.ALIVE),
        (False, True, True, LEASE, AgentState.SILENT),
    ],
)
def test_what_an_agents_signs_come_to(ended: bool, answered: bool, up: bool, silent: float, state: AgentState) -> None:
    signs = {"has_ended": ended, "has_answered": answered, "is_node_up": up}
    assert agent_state(**signs, silent_for=silent, answer=ANSWER, lease=LEASE) is state


class Stage:
    """A run directory with one attempt whose agents are the test's."""

    def __init__(self, root: Path, *, up: frozenset[str] = frozenset()) -> None:
        self.paths = RunPaths(root)
        self.clock = FakeClock()
        self.events: list[tuple[str, Mapping[str, Any]]] = []
        self.up = up

    def begin(self, *nodes: str) -> AttemptInfo:
        claimed = claim_attempt(self.paths)
        info = make_attempt(number=claimed.number, nodes=nodes, batch_host=nodes[0], job_id="7")
        info.save(claimed.attempt_json)
        return info

    def store(self, number: int = 0) -> FileStore:
        return FileStore(self.paths.attempt(number).store, clock=self.clock)

    def train(self, nodes: int, number: int = 0) -> list[str]:
        """Agents on so many nodes that have met. Returns their uids."""
        store = self.store(number)
        uids = [f"{node:05d}-n{node + 1}-{number + 1:016x}-0000" for node in range(nodes)]
        for node, uid in enumerate(uids):
            own = NodeInfo(uid=uid, node=node, host=f"n{node + 1}", local_world_size=1, addresses=(), port=0)
            Peers(store, own, None).announce()
            Heartbeat(store, uid).beat(0)
        record = RoundRecord(number=1, epoch="e", term=1, leader=uids[0], round=0, status=Status.JOINABLE)
        store.put_if_absent("epoch/id", "e")
        assert RoundLog(store, "r").append(record)
        return uids

    def earlier(self, mine: AttemptInfo) -> EarlierAttempts:
        context = AttemptContext(
            paths=self.paths,
            spec=SPEC,
            attempt=mine,
            site=SimpleNamespace(nodes_up=lambda: self.up),  # type: ignore[arg-type]
            events=log_into(self.events),  # type: ignore[arg-type]
            clock=self.clock,
        )
        return EarlierAttempts(context, "99999-boss-0000000000000001-0000")

    def outcome(self, number: int = 0) -> Outcome | None:
        record = RoundLog(self.store(number), "r").latest()
        assert record is not None
        assert record.status is Status.CLOSED
        return record.outcome

    def leave(self, uid: str, number: int = 0) -> None:
        self.store(number).put_if_absent(goodbye_key(uid), "bye")


def one_earlier(root: Path) -> tuple[Stage, str, EarlierAttempts]:
    """An attempt on n1 whose agent has met, its uid, and what the next attempt, on n2, looks at."""
    stage = Stage(root)
    stage.begin("n1")
    [uid] = stage.train(1)
    return stage, uid, stage.earlier(stage.begin("n2"))


def test_an_attempt_whose_agents_have_all_deregistered_is_not_waited_for(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    stage.begin("n1", "n2")
    for uid in stage.train(2):
        stage.leave(uid)
    close_run(stage.store(), "r", Outcome.PREEMPTED, "notice")
    result = store_result(stage.paths.attempt(0), 75, outcome="preempted", action="requeue")
    assert stage.earlier(stage.begin("n1", "n2")).supersede()
    assert stage.outcome() is Outcome.PREEMPTED
    assert load_result(stage.paths.attempt(0).result_json) == result, "what it wrote about its end stays"
    assert stage.events == []


def test_a_living_attempt_is_closed_and_waited_for_until_its_agents_have_ended(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    stage.begin("n1", "n2")
    first, second = stage.train(2)
    earlier = stage.earlier(stage.begin("n3", "n4"))
    assert not earlier.supersede()
    assert stage.outcome() is Outcome.SUPERSEDED
    assert not claim_end(stage.store(), first), "none of its agents finishes it: the job is the new attempt's"
    stored = load_result(stage.paths.attempt(0).result_json)
    assert stored is not None
    assert stored.outcome == "superseded"
    stage.leave(first)
    beat = Heartbeat(stage.store(), second)
    for _ in range(120):
        stage.clock.now += 0.25
        beat.beat(stage.clock.now)
        assert not earlier.look(), "it answers: its workers may still run"
    assert earlier.awaited_nodes == ["n2"]
    stage.leave(second)
    assert earlier.look()
    [(name, fields)] = stage.events
    assert name == "attempt_superseded"
    assert fields["text"] == "attempt 0 was superseded; it has ended on n1, n2"


@pytest.mark.parametrize(("up", "least", "most"), [(frozenset({"n1"}), 4.0, 6.0), (frozenset(), 19.0, 21.0)])
def test_an_agent_that_can_not_be_heard_of_is_waited_for_by_what_slurm_says_of_its_node(
    tmp_path: Path, up: frozenset[str], least: float, most: float
) -> None:
    stage = Stage(tmp_path, up=up)
    stage.begin("n1")
    stage.train(1)
    earlier = stage.earlier(stage.begin("n2"))
    over, began = earlier.supersede(), stage.clock.now
    while not over:
        stage.clock.now += 0.25
        over = earlier.look()
    assert least <= stage.clock.now - began <= most
    [(_, fields)] = stage.events
    assert fields["text"] == "attempt 0 was superseded; not heard from: n1"
    reached = "Slurm reaches n1, and has ended the job's processes there"
    assert (reached if up else "n1 has not answered through the files for 20 s") in fields["reason"]
    assert (reached in fields["reason"]) is bool(up)


def test_nobody_was_silent_while_this_process_was_held_up(tmp_path: Path) -> None:
    stage, uid, earlier = one_earlier(tmp_path)
    assert not earlier.supersede()
    stage.clock.now += 300  # a filesystem that hung, for the agent too
    assert not earlier.look()
    stage.leave(uid)
    assert earlier.look()


def test_an_agent_that_lives_and_does_not_end_keeps_the_next_attempt_from_starting(tmp_path: Path) -> None:
    stage, uid, earlier = one_earlier(tmp_path)
    earlier.supersede()
    beat = Heartbeat(stage.store(), uid)
    began = stage.clock.now
    with pytest.raises(EarlierAttemptRunsError, match="attempt 0 of this run still runs on n1") as caught:
        while stage.clock.now < began + 500:
            stage.clock.now += 0.25
            beat.beat(stage.clock.now)
            earlier.look()
    assert stage.clock.now - began == pytest.approx(SPEC.shutdown_timeout + END_SECONDS, abs=0.5)
    assert "pkill" in str(caught.value)


def test_one_that_began_nothing_is_closed_and_the_one_before_it_too(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its supervisor may have been stopped between its claim and its agents' start: they end as soon as they look."""
    stage = Stage(tmp_path)
    stage.begin("n1")
    [uid] = stage.train(1)
    stage.begin("n2")
    earlier = stage.earlier(stage.begin("n3"))
    assert not earlier.supersede()
    assert (stage.outcome(0), stage.outcome(1)) == (Outcome.SUPERSEDED, Outcome.SUPERSEDED)
    assert "attempt 0 may still run on n1:" in caplog.text
    assert "attempt 1 may still run" not in caplog.text, "it has no agents"
    stage.leave(uid)
    assert earlier.look()


def test_a_node_that_the_attempt_itself_had_lost_is_not_waited_for(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    stage.begin("n1", "n2")
    first, _ = stage.train(2)
    log = RoundLog(stage.store(), "r")
    record = log.latest()
    assert record is not None
    assert log.append(record.successor(lost=(1,)))
    stage.leave(first)
    assert stage.earlier(stage.begin("n3")).supersede()


def test_an_attempt_whose_log_can_not_be_understood_keeps_none_from_starting(tmp_path: Path) -> None:
    """Its agents can't read it either, and end."""
    stage, _, earlier = one_earlier(tmp_path)
    stage.store().put_if_absent(f"log/{2:016d}", '{"v": 99}')
    assert earlier.supersede()


def test_a_filesystem_that_refuses_is_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stage, uid, earlier = one_earlier(tmp_path)
    stage.leave(uid)
    refusals = [OSError(errno.EACCES, "refused")] * 3
    listing = FileStore.list

    def refuse(store: FileStore, folder: str) -> list[str]:
        if refusals:
            raise refusals.pop()
        return listing(store, folder)

    monkeypatch.setattr(FileStore, "list", refuse)
    files = FileExecutor()
    earlier.end(lambda action: files.do(action, within=60, again=is_refusal), is_interrupted=lambda: False)
    assert not refusals
    assert stage.outcome() is Outcome.SUPERSEDED


def test_a_run_directory_that_was_removed_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stage, _, earlier = one_earlier(tmp_path)

    def is_gone(store: FileStore, folder: str) -> list[str]:
        raise FileNotFoundError(errno.ENOENT, "No such file or directory", folder)

    monkeypatch.setattr(FileStore, "list", is_gone)
    files = FileExecutor()
    with pytest.raises(FileNotFoundError):
        earlier.end(
            lambda action: files.do(action, within=60, again=is_refusal),
            is_interrupted=lambda: stage.clock.now > 5000,
        )


def test_a_signal_ends_the_wait_and_nothing_was_started(tmp_path: Path) -> None:
    stage, _, earlier = one_earlier(tmp_path)
    with pytest.raises(StartInterruptedError, match="ending on n1"):
        earlier.end(lambda action: action(), is_interrupted=lambda: stage.clock.now > 1003)


def test_of_thousands_of_nodes_the_pause_between_two_looks_is_no_excuse_for_silence(tmp_path: Path) -> None:
    """They are looked at more rarely; that this process waits between two looks does not mean that it was held up."""
    stage = Stage(tmp_path)
    nodes = [f"n{index}" for index in range(8192)]
    stage.begin(*nodes)
    stage.train(1)
    earlier = stage.earlier(stage.begin(*nodes))
    over, began = earlier.supersede(), stage.clock.now
    while not over and stage.clock.now < began + 3000:
        stage.clock.now += earlier.look_seconds
        over = earlier.look()
    assert over
