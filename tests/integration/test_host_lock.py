"""Two processes of one user on one host that change the same file of the account."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpc_elastic.base import host_lock as module
from hpc_elastic.base.clock import SystemClock
from hpc_elastic.base.host_lock import host_lock, host_lock_path
from hpc_elastic.launch import node_claims
from hpc_elastic.launch.node_claims import NodeWish, open_claims
from hpc_elastic.run import node_records
from hpc_elastic.run.node_records import account_evidence, forget, remember
from hpc_elastic.run.node_score import Evidence, EvidenceKind

NOW = 1_800_000_000 * 10**9
EVIDENCE = [Evidence(node=node, kind=EvidenceKind.LOST, at_ns=NOW, why="lost") for node in ("n1", "n2", "n3")]
FORK = multiprocessing.get_context("fork")
DEADLINE_SECONDS = 60


@pytest.fixture(autouse=True)
def lock_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "shm"
    folder.mkdir()
    monkeypatch.setattr(module, "BASES", (folder,))
    return folder


def in_two_processes(action: Callable[[int], None]) -> None:
    children = [FORK.Process(target=action, args=(index,)) for index in range(2)]
    for child in children:
        child.start()
    for child in children:
        child.join(DEADLINE_SECONDS)
    assert [child.exitcode for child in children] == [0, 0]


def test_two_that_forget_at_once_bring_nothing_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the lock both read the file before either writes it: who writes last restores the other's node."""
    env = {"XDG_STATE_HOME": str(tmp_path)}
    remember(EVIDENCE, cluster="c", run_id="r", attempt=0, now_ns=NOW, env=env)
    both_have_read = FORK.Barrier(2)
    read = node_records.read_json

    def read_and_meet(*args: Any, **more: Any) -> Any:
        value = read(*args, **more)
        try:
            both_have_read.wait(1.0)  # the other one has the file to itself first where there is a lock
        except threading.BrokenBarrierError:
            pass
        return value

    with monkeypatch.context() as patched:
        patched.setattr(node_records, "read_json", read_and_meet)
        in_two_processes(lambda index: None if forget(env, [f"n{index + 1}"]) == 1 else exit(1))
    assert [item.node for item in account_evidence(env)] == ["n3"]


def test_a_lock_that_is_never_released_is_waited_for_and_then_done_without(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = host_lock_path("test")
    assert path is not None
    held, released = FORK.Event(), FORK.Event()

    def hold() -> None:
        with host_lock(path, seconds=0.0) as has_lock:
            assert has_lock
            held.set()
            released.wait(DEADLINE_SECONDS)

    holder = FORK.Process(target=hold)
    holder.start()
    try:
        assert held.wait(DEADLINE_SECONDS)
        with host_lock(path, seconds=0.1) as has_lock:
            assert not has_lock
        assert str(path) in caplog.text
    finally:
        holder.kill()  # a lock ends with its process, however that ends
        holder.join()
    with host_lock(path, seconds=0.0) as has_lock:
        assert has_lock


def test_two_runs_that_choose_at_once_both_get_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the lock one finds all nodes in the hands of the other, which keeps two of the four."""
    both_choose = FORK.Barrier(2)
    choose = node_claims.choose_nodes

    def meet_and_choose(*args: Any) -> Any:
        try:
            both_choose.wait(1.0)
        except threading.BrokenBarrierError:
            pass
        return choose(*args)

    def claim(_: int) -> None:
        claims = open_claims("7", 0, iter([tmp_path]), clock=SystemClock())
        chosen = claims.claim(("n1", "n2", "n3", "n4"), NodeWish(least=2, most=2))
        (tmp_path / chosen[0]).write_text(" ".join(chosen))
        both_have_chosen.wait(DEADLINE_SECONDS)  # a claim ends with its process

    both_have_chosen = FORK.Barrier(2)
    with monkeypatch.context() as patched:
        patched.setattr(node_claims, "choose_nodes", meet_and_choose)
        in_two_processes(claim)
    assert [(tmp_path / first).read_text() for first in ("n1", "n3")] == ["n1 n2", "n3 n4"]
