"""Which process of a worker's is sent the signal that asks it to save."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Sequence
from typing import Any

import pytest

from hpc_elastic.workers.stop import (
    Inside,
    SignalMasks,
    acts_on,
    choose_rank_processes,
    choose_receivers,
    read_masks,
    send_to_handler,
)
from hpc_elastic.workers.tree import Proc

USR1 = signal.SIGUSR1


def proc(pid: int, parent: int, state: str = "S") -> Proc:
    return Proc(pid=pid, starttime=1, ppid=parent, pgid=1, sid=1, state=state, name="x")


@pytest.mark.parametrize(
    ("below", "catching", "speaker", "ended", "receivers"),
    [
        ({2: 1}, {1: 1, 2: 2}, 2, (), [1]),  # the worker itself where it catches it
        # Behind a wrapper the script, and not what it forked.
        ({2: 1, 3: 2, 4: 3, 5: 4}, {3: 3, 4: 4, 5: 5}, 0, (), [3]),
        ({2: 1, 3: 1, 4: 3}, {2: 2, 4: 4}, 0, (), [2, 4]),  # two branches
        # The process that sends the heartbeats before a launcher above it.
        ({2: 1, 3: 2}, {2: 2, 3: 3}, 3, (), [3]),
        ({2: 1, 3: 2}, {2: 2, 3: 7}, 7, (), [3]),  # in a pid namespace of its own
        ({2: 1, 3: 2}, {2: 2}, 3, (), [2]),  # which has no handler
        # None catches it.
        ({2: 1, 3: 2}, {}, 3, (), []),
        ({2: 1}, {2: 2}, 0, (2,), []),
    ],
)
def test_who_is_sent_the_signal(
    below: dict[int, int], catching: dict[int, int], speaker: int, ended: tuple[int, ...], receivers: list[int]
) -> None:
    """`below`: pid → parent; `catching`: pid → the pid that it sees itself; the root is 1."""
    bit = 1 << (USR1 - 1)
    masks = {
        pid: SignalMasks(
            caught=bit if pid in catching else 1 << (signal.SIGCHLD - 1),
            ignored=0,
            blocked=0,
            inner_pid=catching.get(pid, pid),
        )
        for pid in (1, *below)
    }
    found = [proc(pid, parent, "Z" if pid in ended else "S") for pid, parent in below.items()]
    chosen = choose_receivers(proc(1, 0), found, masks, number=USR1, speaker=speaker)
    assert [each.pid for each in chosen] == receivers


def test_a_signal_that_is_blocked_is_waited_for_in_some_other_way() -> None:
    masks = {1: SignalMasks(caught=0, ignored=0, blocked=1 << (USR1 - 1), inner_pid=1)}
    assert [each.pid for each in choose_receivers(proc(1, 0), [], masks, number=USR1, speaker=0)] == [1]


@pytest.mark.parametrize(
    ("below", "catching", "pythons", "speaker", "first"),
    [
        ({2: 1, 3: 1}, (1, 2, 3), (1, 2, 3), 0, [1]),
        # A data loader's workers have a handler, the script has none.
        ({2: 1, 3: 1}, (2, 3), (1, 2, 3), 0, [1]),
        ({2: 1, 3: 1}, (2, 3), (1, 2, 3), 1, [1]),
        ({}, (), (1,), 0, [1]),
        # Behind a shell or a launcher the script.
        ({2: 1, 3: 2}, (), (2, 3), 0, [2]),
        ({2: 1, 3: 2}, (1,), (2, 3), 0, [1, 2]),  # and the shell's own trap
        ({2: 1, 3: 2}, (), (1, 2, 3), 2, [2]),  # below a launcher
        ({2: 1, 3: 2}, (1,), (1, 2, 3), 2, [1]),  # which hands it on
        ({2: 1, 3: 1}, (3,), (2,), 0, [2, 3]),
        ({2: 1}, (), (), 0, []),  # none is known to be the script
    ],
)
def test_a_rank_gets_its_end_before_what_it_has_started(
    below: dict[int, int], catching: tuple[int, ...], pythons: tuple[int, ...], speaker: int, first: list[int]
) -> None:
    term = 1 << (signal.SIGTERM - 1)
    masks = {
        pid: SignalMasks(caught=term if pid in catching else 0, ignored=0, blocked=0, inner_pid=pid)
        for pid in (1, *below)
    }
    found = [proc(pid, parent) for pid, parent in below.items()]
    rank = choose_rank_processes(proc(1, 0), found, masks, speaker=speaker, pythons=pythons)
    assert [each.pid for each in rank] == first


def test_a_process_that_has_ended_did_not_get_the_signal() -> None:
    """It ended by itself: its exit code 0 is no answer to a notice."""
    with subprocess.Popen(["true"]) as process:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # not yet reaped
        assert not send_to_handler(process.pid, signal.SIGUSR1, speaker=process.pid)
    assert not send_to_handler(process.pid, signal.SIGUSR1, speaker=process.pid)


@pytest.mark.parametrize(
    ("handler", "catches", "acts"),
    [(lambda *_: None, True, True), (signal.SIG_IGN, False, True), (signal.SIG_DFL, False, False)],
    ids=["it catches it", "it ignores it", "it dies of it"],
)
def test_the_kernel_says_what_a_process_does_about_a_signal(handler: Any, catches: bool, acts: bool) -> None:
    before = signal.signal(USR1, handler)
    try:
        masks = read_masks(os.getpid())
        assert (masks.catches(USR1), masks.inner_pid) == (catches, os.getpid())
        assert acts_on(USR1, os.getpid()) is acts
    finally:
        signal.signal(USR1, before)
    assert read_masks(2**22 + 1) is None
    assert acts_on(USR1, 2**22 + 1), "not known"


def test_what_is_inside_a_container_is_known_by_its_mark_and_by_what_started_it() -> None:
    environments = {10: b"RANK=3\0", 11: b"PATH=/\0", 12: b"RANK=3\0HPC_ELASTIC_INSIDE=1\0", 13: b""}
    asked: list[list[int]] = []

    def read(pids: Sequence[int]) -> dict[int, bytes]:
        asked.append(list(pids))
        return {pid: environments[pid] for pid in pids}

    processes = [proc(10, 1), proc(11, 1), proc(12, 11), proc(13, 12)]  # podman, conmon, the script, its child
    inside = Inside(read)
    assert inside.find(processes) == {12: 1, 13: 1}
    assert {rank: each.pid for rank, each in inside.scripts(processes).items()} == {1: 12}
    assert asked[1] == [10, 11], "what is known is not read again"
    orphan = proc(13, 1)
    assert inside.find([proc(10, 1), orphan]) == {13: 1}, "it had cleared its environment, and its parent has ended"


def test_a_process_that_the_runtime_prepares_is_inside_when_it_has_become_the_script() -> None:
    environments = {12: b"_LIBCONTAINER_INITPIPE=3\0"}
    inside = Inside(lambda pids: {pid: environments[pid] for pid in pids})
    assert inside.find([proc(12, 11)]) == {}
    environments[12] = b"HPC_ELASTIC_INSIDE=0\0"
    assert inside.find([proc(12, 11)]) == {12: 0}
    assert not inside.has_ended(0), "not seen as a script"
    inside.scripts([proc(12, 11)])
    assert inside.has_ended(0), "another process has this pid, or none"
