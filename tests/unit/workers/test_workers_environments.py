from __future__ import annotations

import threading

import pytest

from hpc_elastic.workers.tree import read_environments


def test_what_can_be_read_is() -> None:
    assert read_environments([1, 2, 3], lambda pid: None if pid == 2 else b"%d" % pid) == {1: b"1", 3: b"3"}
    assert read_environments([], lambda _: b"x") == {}


def test_those_that_never_answer_hold_nobody_up() -> None:
    never = threading.Event()

    def read(pid: int) -> bytes:
        if pid in (2, 5):
            never.wait(30)
        return b"%d" % pid

    try:
        assert read_environments([1, 2, 3, 4, 5], read, patience=0.05) == {1: b"1", 3: b"3", 4: b"4"}
    finally:
        never.set()


def test_what_reading_raises_is_raised() -> None:
    def read(pid: int) -> bytes:
        raise OSError(24, "too many open files")

    with pytest.raises(OSError, match="too many"):
        read_environments([1], read)
