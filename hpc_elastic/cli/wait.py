"""``submit --wait`` and ``--follow``: a job is followed to the end of its run, by what Slurm says of it."""

from __future__ import annotations

import shlex
import sys
from collections import Counter
from contextlib import suppress

from hpc_elastic.base.clock import Clock
from hpc_elastic.cli.follow import RunEnd, show_to_end
from hpc_elastic.cli.screen import is_terminal, print_note
from hpc_elastic.launch.run_directory import job_now
from hpc_elastic.launch.run_status import FORGOTTEN_SECONDS
from hpc_elastic.output.log_reader import OutputReader
from hpc_elastic.output.terminal import harmless
from hpc_elastic.run.index import array_tasks
from hpc_elastic.run.paths import ExitCode, RunPaths, load_newest_result
from hpc_elastic.slurm.client import SlurmClient
from hpc_elastic.slurm.commands import JobId, SlurmError, scancel
from hpc_elastic.slurm.job_state import JobPhase, JobState
from hpc_elastic.slurm.notation import names_text

ASK_SLURM_EVERY = 2.0
_LOOK_AT_LOG_EVERY = 0.5
_SETTLE = 10.0
"""A requeued job may be on its way back into the queue, and a shared filesystem may show its result late."""
_MOST_REPORTS = 3


def how_it_ended(states: tuple[JobState, ...], result: int | None) -> RunEnd:
    """The run's exit code, by the `newest_result` and by what Slurm last said of the job (nothing: it forgot it)."""
    if result is not None and result != ExitCode.REQUEUED:
        return RunEnd(code=result, why=f"exit code {result}")
    if not states:
        return RunEnd(code=1, why="Slurm no longer knows the job, and its last attempt wrote no result")
    worst = max(states, key=lambda state: state.code)
    reason = f" ({worst.reason})" if worst.reason else ""
    return RunEnd(code=worst.code, why=f"{worst.state.lower()}{reason} by Slurm, exit code {worst.code}")


def newest_result(paths: RunPaths) -> int | None:
    """The exit code that the newest attempt stored, of an array the worst once all have ended; None: there is none."""
    if tasks := array_tasks(paths):
        codes = [newest_result(paths.task(task)) for task in tasks]
        known = [code for code in codes if code is not None and code != ExitCode.REQUEUED]
        return max(known) if len(known) == len(codes) else None
    stored = load_newest_result(paths)
    return None if stored is None else stored.exit_code


def follow(client: SlurmClient, job: JobId, paths: RunPaths, *, clock: Clock, show_log: bool) -> int:
    """Wait for the run's end. Returns its exit code; 1: the job never starts; 130: Ctrl-C ended the waiting alone."""
    watch = SlurmWatch(client, job, paths, clock=clock)
    log = OutputReader(paths.job_log) if show_log else None
    on_terminal = is_terminal(sys.stdout)

    def show(*, is_over: bool = False) -> float:
        if log is None:
            return ASK_SLURM_EVERY
        while (lines := log.read() or (log.rest() if is_over else None)) is not None:
            sys.stdout.buffer.write(harmless(lines.data) if on_terminal else lines.data)
        sys.stdout.buffer.flush()
        return _LOOK_AT_LOG_EVERY

    try:
        end = show_to_end(show, watch.end, clock=clock)
        show(is_over=True)
    except KeyboardInterrupt:
        return leave(watch.job, paths)
    if end.has_ended:
        print_note(f"run {paths.run_id} ended: {end.why}; {where_to_look(job, paths)}")
    else:
        print_note(f"run {paths.run_id} is no longer waited for: {end.why}")
    return end.code


def leave(job: JobId, paths: RunPaths) -> int:
    again = f"hpc-elastic logs {job} --follow (or, for its exit code, hpc-elastic report {job} --follow)"
    if array_tasks(paths):
        again = f"hpc-elastic status {job} --watch"
    print_note(f"job {job} continues; to end it: {shlex.join(scancel(job))}; to follow it again: {again}")
    return int(ExitCode.INTERRUPTED)


def where_to_look(job: JobId, paths: RunPaths) -> str:
    """The commands that say more about a run that has ended; of an array about its tasks that began, and failed."""
    tasks = array_tasks(paths)
    if not tasks:
        return f"report: hpc-elastic report {job}"
    failed = [task for task in tasks if paths.task(task).begun_attempts() and newest_result(paths.task(task)) != 0]
    base = job.number.partition("_")[0]
    reports = [f"hpc-elastic report {base}_{task}" for task in failed[:_MOST_REPORTS]]
    if len(failed) > _MOST_REPORTS:
        reports.append(f"{len(failed) - _MOST_REPORTS} more failed")
    first = f"reports: {'; '.join(reports)}; " if reports else ""
    return f"{first}all its runs: hpc-elastic status {base}"


class SlurmWatch:
    def __init__(self, client: SlurmClient, job: JobId, paths: RunPaths, *, clock: Clock) -> None:
        self.job = job
        """The run's job now: a run may go on in a follow-on job."""
        self._client = client
        self._paths = paths
        self._clock = clock
        self._ask_at = clock.monotonic()
        self._said = ""
        self._waived: set[int] = set()
        """Restarts of the job for which it was tried that they need not wait; one try each."""
        self._ended_since: float | None = None

    def end(self) -> RunEnd | None:
        if self._clock.monotonic() < self._ask_at:
            return None
        self._ask_at = self._clock.monotonic() + ASK_SLURM_EVERY
        return self._look()

    def _look(self) -> RunEnd | None:
        try:
            states = self._client.job_states(self.job)
        except SlurmError as error:
            self._print(f"has no known state, since Slurm does not answer: {error.why}; trying again")
            return None
        self._print(_describe(states))
        self._waive_delay(states)
        left = [state for state in states if state.phase is not JobPhase.FINISHED]
        if not left:
            return self._when_finished(states)
        self._ended_since = None
        if all(state.never_starts for state in left):
            return RunEnd(code=1, why=f"{left[0].reason}: {left[0].way_out}", has_ended=False)
        return None

    def _waive_delay(self, states: tuple[JobState, ...]) -> None:
        """Slurm begins the delay anew where the earlier attempt's nodes took long to be done with it."""
        from hpc_elastic.launch.requeue import back_off  # it brings the agent's decisions with it

        if len(states) != 1 or states[0].phase is not JobPhase.PENDING or states[0].reason != "BeginTime":
            return
        restarts, stored = states[0].restarts, load_newest_result(self._paths)
        if stored is None or stored.exit_code != ExitCode.REQUEUED or back_off(stored.idle):
            return  # the attempt has asked for a delay of its own
        if not restarts or restarts in self._waived:
            return
        self._waived.add(restarts)
        with suppress(SlurmError):  # then it begins after the delay
            self._client.start_now(self.job)

    def _when_finished(self, states: tuple[JobState, ...]) -> RunEnd | None:
        following = job_now(self._paths)
        if following is not None and following.number != self.job.number:
            print_note(f"the run continues in job {following}")
            self.job, self._said, self._ended_since = following, "", None
            return self._look()
        now, result = self._clock.monotonic(), newest_result(self._paths)
        self._ended_since = now if self._ended_since is None else self._ended_since
        is_final = result is not None and result != ExitCode.REQUEUED
        cancelled = all(state.state == "CANCELLED" for state in states) and bool(states)
        if is_final or cancelled or now - self._ended_since >= _SETTLE:
            with suppress(SlurmError):
                states = states or self._client.accounted([self.job])
            if states or is_final or now - self._ended_since >= FORGOTTEN_SECONDS:
                return how_it_ended(states, result)
        return None

    def _print(self, line: str) -> None:
        if line != self._said:
            print_note(f"job {self.job} {line}")
            self._said = line


def _describe(states: tuple[JobState, ...]) -> str:
    if not states:
        return "is no longer known to Slurm"
    if len(states) > 1:
        counts = Counter(state.state.lower() for state in states)
        text = "has " + ", ".join(f"{count} {word}" for word, count in sorted(counts.items()))
        waiting = [state for state in states if state.phase is JobPhase.PENDING and state.reason]
        reasons = ", ".join(dict.fromkeys(state.reason for state in waiting))
        stuck = next((f"; {state.way_out}" for state in waiting if state.way_out), "")
        return f"{text}{f' ({reasons})' if reasons else ''}{stuck}"
    state = states[0]
    if state.phase is JobPhase.PENDING:
        again = f" again (restart {state.restarts})" if state.restarts else ""
        begin = f", not before {state.start_time}" if state.reason == "BeginTime" and state.start_time else ""
        stuck = f"; {state.way_out}" if state.way_out else ""
        return f"is pending{again}: {state.reason or 'not looked at yet'}{begin}{stuck}"
    if state.phase is JobPhase.RUNNING:
        return f"is {state.state.lower()}" + (f" on {names_text(state.nodes)}" if state.nodes else "")
    return f"is {state.state.lower()}{f' ({state.reason})' if state.reason else ''}"
