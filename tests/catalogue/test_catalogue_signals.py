"""Workers that a signal ends, their own or somebody else's."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.rigs.failure_catalogue import MEET, Catalogue, Told
from tests.rigs.memory_limit import memory_limit


def told(cause: str, **changes: Any) -> Told:
    """A crash of rank 1 on node 1."""
    values: dict[str, Any] = {
        "exit_code": 1,
        "cause": cause,
        "rank": 1,
        "host": "node1",
        "failure_class": "root",
        "category": "worker",
        "retryable": True,
        "confidence": "high",
        "evidence": "first of 2; the other was stopped within <N> ms",
    }
    return Told(**{**values, **changes})


_CRASHES = {
    "segmentation-fault": (
        "ctypes.string_at(0)",
        "Fatal Python error: Segmentation fault (SIGSEGV)",
        "crashed (SIGSEGV)",
    ),
    "abort": (
        "os.abort()",
        "Fatal Python error: Aborted (SIGABRT)",
        "crashed (SIGABRT)",
    ),
    "bus-error": (
        "read_a_mapped_file_that_was_cut()",
        "Fatal Python error: Bus error (SIGBUS)",
        "a bus error: often a full /dev/shm, or a mapped file that was cut",
    ),
}


@pytest.mark.parametrize("name", _CRASHES)
def test_a_crash(catalogue: Catalogue, name: str) -> None:
    crash, cause, kind = _CRASHES[name]
    script = f"""
    {MEET}
    import ctypes, mmap

    def read_a_mapped_file_that_was_cut():
        file = open("samples.bin", "w+b")
        file.truncate(8192)
        mapped = mmap.mmap(file.fileno(), 8192)
        file.truncate(0)
        return mapped[4096]

    def train_one_step():
        {crash}

    if RANK == 1:
        train_one_step()
    wait_for("never")
    """
    with catalogue.run(script) as run:
        run.finish()
        catalogue.check(run, name, told(cause, kind=kind))


def test_a_stack_overflow_in_c(catalogue: Catalogue) -> None:
    script = f"""
    {MEET}
    def deepest(tree):
        return max([tree], key=deepest)

    if RANK == 1:
        sys.setrecursionlimit(10**9)
        deepest(None)
    wait_for("never")
    """
    with catalogue.run(script) as run:
        run.finish()
        cause = "Fatal Python error: Segmentation fault (a stack overflow?) (SIGSEGV)"
        catalogue.check(run, "stack-overflow", told(cause, kind="crashed (SIGSEGV)"))


def test_killed_from_outside(catalogue: Catalogue) -> None:
    with catalogue.run(MEET + 'wait_for("never")\n') as run:
        run.wait_moments("here", count=2)
        run.kill_worker(1, round_index=0)
        run.finish()
        expected = told(
            "Signal 9 (SIGKILL) received by PID <PID>",
            kind="SIGKILL not sent by hpc-elastic: probably the OOM killer (check dmesg) or a manual kill",
        )
        catalogue.check(run, "killed-from-outside", expected)


def test_out_of_memory(catalogue: Catalogue) -> None:
    """A real kill by the kernel: supervisor, agents and workers all are in one cgroup, as below Slurm."""
    script = f"""
    {MEET}
    def load_everything():
        cache = []
        while True:
            cache.append(b"x" * (8 << 20))

    if RANK == 1:
        load_everything()
    wait_for("never")
    """
    run = catalogue.run(script)
    with memory_limit(256 << 20, run):
        run.finish()
    run.check_nothing_left(within=15)
    expected = told(
        "Out of memory: Signal 9 (SIGKILL) received by PID <PID>; the OOM killer struck in its cgroup",
        failure_class="infrastructure",
        category="infrastructure",
        kind="killed by the kernel: the job's memory limit was reached",
    )
    catalogue.check(run, "out-of-memory", expected)


def test_two_failures_within_one_tick_of_the_clock(catalogue: Catalogue) -> None:
    """The agent is stopped while both end: it sees both in one look, and can't tell which was first."""
    script = f"""
    {MEET}
    wait_for("the-end")
    os._exit(5 + RANK)
    """
    with catalogue.run(script, nodes=1, nproc=2) as run:
        pids = [here["pid"] for here in run.wait_moments("here", count=2)]
        agent = run.agent(0).pid
        os.kill(agent, signal.SIGSTOP)
        run.say("the-end")
        run.until(lambda: all(_is_zombie(pid) for pid in pids), "end of both workers")
        os.kill(agent, signal.SIGCONT)
        run.finish()
        expected = told(
            "Process failed with exitcode 5",
            rank=0,
            host="node0",
            confidence="tie",
            evidence="not certain: rank 1 on node0 failed too, in another way, within the clocks' resolution "
            "(2 ms on one host)",
            kind="ended itself with exit code 5",
        )
        catalogue.check(run, "two-failures-at-once", expected)


def _is_zombie(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
