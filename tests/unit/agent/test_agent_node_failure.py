"""What a node says first of a failure."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from hpc_elastic.agent.restart_policy import early_failure


@pytest.mark.parametrize("final", [False, True])
def test_the_first_word_tells_whether_another_try_is_wanted(final: bool) -> None:
    """In a notice nobody waits for the second one."""
    workers: Any = SimpleNamespace(want_no_other_try=final, seconds=3.0)
    watch: Any = SimpleNamespace(mark=None, furthest_step=7)
    word = early_failure("rank 0 ended with exit code 93", node=1, workers=workers, watch=watch)
    assert (word.retryable, word.seconds, word.step) == (not final, 3.0, 7)
