"""What a restart costs the server of the run directory: system calls of whole agents that name or list files there."""

from __future__ import annotations

import re
import shutil
from collections import Counter
from pathlib import Path

import pytest

from tests.rigs.local_run import LocalRun

MOST_OF_COORDINATOR = 60
"""44 to 57 were measured; a poll more, on a busy machine, is four."""
MOST_OF_ANOTHER = 33
"""26 to 29 were measured: 25, and 8 for the evidence of the worker that fails there."""

_FAILS = """
print("hello", flush=True)
time.sleep(1.0)
if ROUND < 3:
    if RANK == 2:
        raise (ValueError, KeyError, IndexError)[ROUND]("bad batch")
    time.sleep(60)
"""
_CALL = re.compile(r"(\d+)\s+([\d.]+) (<\.\.\. )?(\w+)(.*)")
_STARTS = ("clone", "clone3", "fork", "vfork")


def _calls(trace: Path, root: Path) -> list[tuple[int, float]]:
    """Process and time of each call on a file below `root`; a thread's are its process'."""
    process: dict[int, int] = {}
    begins_thread: set[int] = set()
    found = []
    for match in map(_CALL.match, trace.read_text(errors="replace").splitlines()):
        if match is None:
            continue
        task, call, rest = int(match[1]), match[4], match[5]
        if call not in _STARTS:
            if not match[3] and str(root) in rest:
                found.append((process.get(task, task), float(match[2])))
            continue
        if "CLONE_THREAD" in rest:
            begins_thread.add(task)
        if "<unfinished" not in rest:
            if task in begins_thread and (child := re.search(r"= (\d+)$", rest)):
                process[int(child[1])] = process.get(task, task)
            begins_thread.discard(task)
    return found


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace")
def test_a_restart_costs_few_calls_of_each_agent(tmp_path: Path) -> None:
    """The least of three restarts counts."""
    trace = tmp_path / "trace"
    traced = ",".join(("trace=%file", "getdents64", "fchmod", "fsync", "fdatasync", *_STARTS))
    strace = ["strace", "-f", "-y", "-ttt", "-s", "300", "-o", str(trace), "-e", traced]
    with LocalRun(tmp_path, _FAILS, nproc=2, before=strace) as run:
        assert run.finish() == 0
        node_of = {event["pid"]: event["node"] for event in run.events("agent_started")}
        failed = {e["round"]: e["t"] / 1e9 for e in run.events("worker_failed") if e["rank"] == 2}
        begun = {(e["node"], e["round"]): e["t"] / 1e9 for e in run.events("workers_started")}
        (coordinator,) = {event["node"] for event in run.events("round_opened") if event["round"] == 1}
        calls: Counter[tuple[int, int]] = Counter()
        for pid, at in _calls(trace, run.paths.root):
            for index, since in failed.items():
                if pid in node_of and since - 0.2 <= at <= begun[node_of[pid], index + 1] + 0.3:
                    calls[node_of[pid], index] += 1
        least = [min(calls[node, index] for index in failed) for node in (coordinator, 1 - coordinator)]
        assert 30 < least[0] <= MOST_OF_COORDINATOR, calls
        assert 15 < least[1] <= MOST_OF_ANOTHER, calls
