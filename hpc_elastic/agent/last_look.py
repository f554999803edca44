"""Give silent ranks a short delay to fail by themselves before they are ended, then look at where they stand.

Where every failure so far is a symptom, the rank behind it has not failed yet: it is about to (its exception still
unwinds), or it is stuck outside of the collective that the others lost. So the group gets `DELAY_SECONDS`, unless all
of it ends sooner or a cause shows, and the ranks that are silent then are asked for their stacks. Where a cause is
known, none of this happens.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from msgspec import Struct
from msgspec.structs import replace

from hpc_elastic.agent.hang_stop import StacksThenStop
from hpc_elastic.base.clock import Clock
from hpc_elastic.failures.collectives import activity_of_failure, activity_of_stack
from hpc_elastic.failures.failure_text import Frame, user_frames
from hpc_elastic.failures.ranking import FailureClass
from hpc_elastic.failures.stacks import ProcessState, StackDump, find_dump, forked_frames
from hpc_elastic.failures.traceback_text import find_python_traceback
from hpc_elastic.failures.worker_failure import WorkerFailure
from hpc_elastic.run.activities import Activity, Doing
from hpc_elastic.workers.stop import GroupStopper, Stopped

DELAY_SECONDS = 1.0
JUDGE_SECONDS = 0.1
"""How long the last output of a worker that has failed is waited for, before its failure counts as a known cause."""
_SOURCE_BYTES = 1 << 20
_MOST_CHILDREN = 3
_POLLS = ("poll", "ppoll", "select", "pselect6", "epoll_wait", "epoll_pwait")
_LOOK_SECONDS = 0.02


class DelayedStop(Struct, kw_only=True):
    """Has the shape of the `Stopper` that it goes before."""

    is_over: Callable[[], bool]
    """Asked all the time."""
    then: Callable[[float], Stopper]
    """Makes what ends the workers, from the grace."""
    grace: float
    clock: Clock
    seconds: float = DELAY_SECONDS
    deadline: float = 0.0
    stopper: Stopper | None = None

    @property
    def sent_kill(self) -> bool:
        return self.stopper is not None and self.stopper.sent_kill

    def begin(self) -> None:
        self.deadline = self.clock.monotonic() + self.seconds

    def end_delay(self) -> None:
        self.deadline = self.clock.monotonic()

    def kill_now(self) -> None:
        self.stopper = self.stopper or self.then(0.0)
        self.stopper.kill_now()

    def shorten(self, grace: float) -> None:
        if self.stopper is not None:
            self.stopper.shorten(grace)
        elif grace < self.grace:
            self.grace = grace
            self.end_delay()  # less time than was known

    def step(self) -> Stopped | float:
        if self.stopper is None:
            if not self.is_over() and self.clock.monotonic() < self.deadline:
                return _LOOK_SECONDS
            self.stopper = self.then(self.grace)
            self.stopper.begin()
        return self.stopper.step()


Stopper = GroupStopper | StacksThenStop | DelayedStop


def observe_failure(failure: WorkerFailure, *, latest_ns: int) -> Activity | None:
    """A lost peer that it prints after `latest_ns` may be another agent's doing."""
    if failure.failure_class is not FailureClass.SYMPTOM:
        return None
    found, dump = find_python_traceback(failure.traceback), find_dump(failure.traceback)
    frames = found.frames if found is not None else dump.main if dump is not None else ()
    text = "\n".join((failure.message, failure.traceback, failure.stderr_tail))
    mine = user_frames(frames)
    found_activity = activity_of_failure(failure.global_rank, frames, text, line=_source(mine[-1]) if mine else "")
    return found_activity if (failure.printed_ns or failure.ended_ns) <= latest_ns else replace(found_activity, peer="")


def observe_silent(rank: int, state: ProcessState | None, dump: StackDump | None) -> Activity:
    """`state` is from before the rank was asked. Reads a line of its script."""
    frames = dump.main if dump is not None else ()
    if state is not None and state.is_stopped:
        return replace(activity_of_stack(rank, frames), doing=Doing.STOPPED, call="")
    syscall = state.threads[0].syscall if state is not None and state.threads else ""
    mine = user_frames(frames)
    is_ending = dump is not None and any(thread.is_main and not thread.frames for thread in dump.threads)
    line = _source(mine[-1]) if mine else ""
    found = activity_of_stack(rank, frames, syscall=syscall, line=line, is_ending=is_ending)
    inside = [user_frames(forked_frames(child) or ()) for child in dump.children] if dump is not None else []
    places = [f"{os.path.basename(at.file)}:{at.line} {at.function}" for *_, at in filter(None, inside)]
    busy = tuple(f"its child process: {place}" for place in dict.fromkeys(places))
    if busy:
        return replace(found, children=busy[:_MOST_CHILDREN])
    if state is None or found.doing not in (Doing.LOADER, Doing.CHILD):
        return found
    # A worker of a DataLoader that has nothing to do polls for its next batch: it comes last.
    children = sorted(state.children, key=lambda child: (not child.is_stuck, child.syscall in _POLLS))
    shown = tuple(f"its child process {child.pid}: {child.describe()}" for child in children[:_MOST_CHILDREN])
    return replace(found, children=shown)


def _source(frame: Frame) -> str:
    try:
        with open(frame.file, "rb") as file:
            lines = file.read(_SOURCE_BYTES).split(b"\n")
    except (OSError, ValueError):
        return ""
    return lines[frame.line - 1].decode("utf-8", "replace").strip() if 0 < frame.line <= len(lines) else ""
