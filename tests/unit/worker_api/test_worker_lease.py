"""A worker whose agent's lease is old waits; `commit` renames only after its agent has read the record for it."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from time import CLOCK_BOOTTIME, clock_gettime_ns
from types import SimpleNamespace

import pytest

import hpc_elastic
from hpc_elastic.base.loop import wait_readable
from hpc_elastic.worker_api import heartbeat, lease, preemption
from hpc_elastic.worker_api.records import QUESTIONS, VARIABLE, lease_beside, pack_lease, read_record

HOUR = 3600 * 10**9


class Agent:
    """Answers questions, with a lease for an hour, by what `looked` says: the look's time is that of the question."""

    def __init__(self, page: Path) -> None:
        self._file = Path(lease_beside(str(page)))
        os.mkfifo(page.parent / QUESTIONS)
        self._pipe = os.open(page.parent / QUESTIONS, os.O_RDWR | os.O_NONBLOCK)
        self.questions = 0
        self.answer: Callable[[int], int] = lambda now: now
        self._thread = threading.Thread(target=self._serve)
        self._stop = False

    def write(self, until_ns: int, looked_ns: int = 0) -> None:
        offset, raw = pack_lease(until_ns, looked_ns)
        with open(self._file, "r+b", buffering=0) as file:
            file.seek(offset)
            file.write(raw)

    def start(self) -> None:
        self._thread.start()

    def _serve(self) -> None:
        while not self._stop:
            if wait_readable([self._pipe], 0.02):
                os.read(self._pipe, 4096)
                self.questions += 1
                now = clock_gettime_ns(CLOCK_BOOTTIME)
                self.write(now + HOUR, self.answer(now))

    def end(self) -> None:
        self._stop = True
        if self._thread.is_alive():
            self._thread.join()
        if self._pipe >= 0:
            os.close(self._pipe)
            self._pipe = -1


@pytest.fixture
def agent(page: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Agent]:
    monkeypatch.setattr(lease, "GONE_SECONDS", 0.05)
    monkeypatch.setattr(lease, "ASK_SECONDS", 0.02)
    found = Agent(page)
    yield found
    found.end()


def _section() -> None:
    with heartbeat.section("checkpoint"):
        pass


def _counted_step() -> None:
    heartbeat._optimizer_steps.is_off = False
    heartbeat._optimizer_steps.note(SimpleNamespace())


@pytest.mark.parametrize(
    "call",
    [
        lambda: heartbeat.heartbeat(3),
        _section,
        heartbeat.checkpoint_done,
        _counted_step,
        lambda: preemption.should_checkpoint(3),
        preemption.preemption_notice,
    ],
)
def test_progress_and_notices_wait_while_the_lease_is_old(agent: Agent, page: Path, call: Callable[[], object]) -> None:
    heartbeat.heartbeat(1)
    preemption.preemption_notice()
    before = read_record(page.read_bytes())
    agent.write(1)
    ended = threading.Event()
    caller = threading.Thread(target=lambda: (call(), ended.set()))
    caller.start()
    assert not ended.wait(0.05)
    assert read_record(page.read_bytes()) == before
    agent.start()
    assert ended.wait(10)
    caller.join()
    after = read_record(page.read_bytes())
    assert after.count > before.count or call is preemption.preemption_notice


def test_without_an_agent_a_worker_with_an_old_lease_fails(agent: Agent) -> None:
    heartbeat.heartbeat(1)
    agent.write(1)
    agent.end()
    with pytest.raises(hpc_elastic.RoundOverError, match="this node's agent is gone"):
        heartbeat.heartbeat(2)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    (tmp_path / "new").write_text("new")
    (tmp_path / "final").write_text("old")
    return tmp_path / "final"


def commit(final: Path) -> str:
    hpc_elastic.commit(final.with_name("new"), final)
    return final.read_text()


def test_commit_renames_after_a_look_that_it_asked_for(agent: Agent, checkpoint: Path) -> None:
    agent.write(clock_gettime_ns(CLOCK_BOOTTIME) + HOUR, clock_gettime_ns(CLOCK_BOOTTIME))
    looks = iter([1])
    agent.answer = lambda now: next(looks, now)  # the first one is older than the question
    agent.start()
    assert commit(checkpoint) == "new"
    assert agent.questions > 1
    assert not checkpoint.with_name("new").exists()


@pytest.mark.parametrize(
    ("is_alive", "why"), [(True, r"commit of .*final: this worker's round is over"), (False, "agent is gone")]
)
def test_commit_renames_nothing_once_the_round_is_over_or_its_agent_is_gone(
    agent: Agent, checkpoint: Path, is_alive: bool, why: str
) -> None:
    agent.write(1)
    agent.answer = lambda now: -1
    agent.start() if is_alive else agent.end()
    with pytest.raises(hpc_elastic.RoundOverError, match=why):
        commit(checkpoint)
    assert checkpoint.read_text() == "old"


def test_commit_only_renames_where_no_agent_keeps_a_lease(page: Path, checkpoint: Path) -> None:
    assert commit(checkpoint) == "new"


def test_without_the_leases_file_nothing_is_sent_and_commit_renames(
    page: Path, checkpoint: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    os.unlink(lease_beside(str(page)))
    heartbeat.heartbeat(1)
    assert read_record(page.read_bytes()) is None
    assert commit(checkpoint) == "new"
    said = capfd.readouterr().err
    assert "this worker's heartbeats and notices are off" in said
    assert "the agent can't be asked whether the round is over" in said


def test_commit_replaces_a_folder_outside_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    for name in ("new", "final"):
        (tmp_path / name / "shards").mkdir(parents=True)
        (tmp_path / name / "shards" / name).write_text(name)
    hpc_elastic.commit(tmp_path / "new", tmp_path / "final")
    assert [path.name for path in tmp_path.rglob("*")] == ["final", "shards", "new"]
