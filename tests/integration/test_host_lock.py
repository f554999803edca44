"""Two processes of one user on one host that change the same thing."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpc_elastic.base.clock import SystemClock
from hpc_elastic.launch import slurm_site
from hpc_elastic.launch.slurm_site import NodeWish, host_lock, open_claims

FORK = multiprocessing.get_context("fork")
DEADLINE_SECONDS = 60


def in_two_processes(action: Callable[[int], None]) -> None:
    children = [FORK.Process(target=action, args=(index,)) for index in range(2)]
    for child in children:
        child.start()
    for child in children:
        child.join(DEADLINE_SECONDS)
    assert [child.exitcode for child in children] == [0, 0]


def test_a_lock_that_is_never_released_is_waited_for_and_then_done_without(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "test"
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
    choose = slurm_site.choose_nodes

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
        patched.setattr(slurm_site, "choose_nodes", meet_and_choose)
        in_two_processes(claim)
    assert [(tmp_path / first).read_text() for first in ("n1", "n3")] == ["n1 n2", "n3 n4"]
