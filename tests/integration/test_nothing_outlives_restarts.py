"""One agent through a hundred rounds: it holds no more at the end than at the beginning."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.rigs.many_restarts import restart

_TO_AND_FRO = 6
"""Descriptors that are open in the midst of a round and not in that of another."""


@pytest.mark.slow
def test_a_hundred_restarts_leave_an_agent_as_it_was(tmp_path: Path) -> None:
    found = restart(tmp_path, rounds=100, warm=30)
    early, late = found.early, found.late
    assert late.rounds == 100
    assert abs(late.descriptors - early.descriptors) <= _TO_AND_FRO
    assert late.threads <= early.threads + 1
    assert late.children <= 3, "guardian, worker, the store's host: no zombies"
    assert late.resident - early.resident < 1.5, "MB"
    assert found.files_each <= 10
