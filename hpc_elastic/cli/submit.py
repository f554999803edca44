"""``hpc-elastic submit``: a run directory, a batch script, and sbatch; or the same run on this machine."""

from __future__ import annotations

import os
import shlex
import sys
import threading
from collections import Counter
from collections.abc import Mapping, Sequence

from hpc_elastic.base.clock import Clock, SystemClock
from hpc_elastic.base.outcome import ExitCode
from hpc_elastic.cli.config import read_command_line
from hpc_elastic.cli.follow import RunEnd
from hpc_elastic.cli.screen import is_terminal, print_note
from hpc_elastic.doctor.saved import saved_notes
from hpc_elastic.launch.run_directory import job_now
from hpc_elastic.launch.run_status import FORGOTTEN_SECONDS
from hpc_elastic.launch.submit_job import Submission, dry_run, submission_client, submit_job
from hpc_elastic.options import job_options
from hpc_elastic.options.command_line import Help
from hpc_elastic.options.remarks import plan_text, remarks
from hpc_elastic.options.run_request import ALL_OPTIONS, cluster_here, runs_directory, slurm_job, working_directory
from hpc_elastic.options.sbatch import SbatchOptions
from hpc_elastic.options.table import Parsed, explaining
from hpc_elastic.output.log_reader import OutputReader
from hpc_elastic.output.terminal import each_line, harmless
from hpc_elastic.run.attempt import load_newest_result
from hpc_elastic.run.index import array_tasks
from hpc_elastic.run.paths import RunPaths
from hpc_elastic.slurm.client import SlurmClient
from hpc_elastic.slurm.commands import JobId, scancel
from hpc_elastic.slurm.errors import SlurmError
from hpc_elastic.slurm.job_state import JobPhase, JobState
from hpc_elastic.slurm.notation import names_text

HELP = Help(
    usage="hpc-elastic submit [options] SCRIPT [script arguments...]",
    description="Creates a run directory with a batch script and submits it to Slurm. Script arguments go after the "
    "script. On a machine without Slurm the run is executed at once, with all agents on this machine.",
    examples=(
        ("hpc-elastic submit --nodes 4 --gpus-per-node 8 -t 720 train.py --lr 0.1", "4 nodes with 8 GPUs each"),
        (
            "hpc-elastic submit --nodes 3-4 --spares 1 --follow train.py",
            "continue with 3 nodes when one is lost and the spare is used up; print the job log",
        ),
        (
            "hpc-elastic submit --cluster local --nodes 2 --nproc-per-node 2 train.py",
            "try it on this machine: 2 agents with 2 workers each",
        ),
    ),
)
_ASK_SLURM_EVERY = 2.0
_LOOK_AT_LOG_EVERY = 0.5
_SETTLE = 10.0
"""An ended job whose last attempt said "requeued", or nothing yet, may be on its way back into the queue, and a shared
filesystem may show its result late: so long it is watched on. (Not a cancelled one: that is final.)"""
_MOST_REPORTS = 3


def main(argv: Sequence[str]) -> int:
    """Submit, or run here. Returns 0, or with --wait, --follow and on this machine the run's exit code."""
    env = os.environ
    parsed = read_command_line(argv, subcommand="submit", help_=HELP, env=env)
    if parsed is None:
        return 0
    with explaining(parsed):
        asked = job_options.asked_cluster(parsed)
        if cluster_here(asked, env) == "local":
            if asked == "auto":
                print_note("no sbatch here: running on this machine (--cluster local)")
            from hpc_elastic.cli.run import run_here

            return run_here(parsed, env, dry_run=parsed.flag("dry_run"))
        return _submit(parsed, env)


def _submit(parsed: Parsed, env: Mapping[str, str]) -> int:
    runs_dir = runs_directory(parsed, working_directory(parsed, env))
    submission = Submission(job=slurm_job(parsed, env), runs_dir=runs_dir)
    for line in remarks(parsed, submission.job.spec, ALL_OPTIONS, env=env):
        print_note(line)
    spec, options = submission.job.spec, submission.job.options
    for line in saved_notes(
        env, partition=options.partition or env.get("SBATCH_PARTITION", ""), nodes=spec.max_nodes + spec.spares,
        account=options.account or env.get("SBATCH_ACCOUNT", ""), qos=options.qos or env.get("SBATCH_QOS", ""),
        shutdown_timeout=spec.shutdown_timeout, grace=spec.signal_grace,
    ):  # fmt: skip
        print_note(f"hpc-elastic doctor found: {line}")
    if parsed.flag("dry_run"):
        text = dry_run(submission)
        # On stderr: what comes from stdout is a batch script as it stands.
        sys.stderr.write(
            each_line(plan_text(submission.job.spec, submission.paths.root, submission.job.options)) + "\n"
        )
        sys.stderr.flush()
        sys.stdout.write(each_line(text) if is_terminal(sys.stdout) else text)
        return 0
    clock = SystemClock()
    client = submission_client(submission, env, clock, print_note)
    job = submit_job(submission, client, clock=clock, env=env, log=print_note)
    options, tasks = submission.job.options, submission.job.tasks
    try:
        _print_where(job, submission.paths, options)
        if not (parsed.flag("wait") or parsed.flag("follow")):
            return 0
        if parsed.flag("follow") and tasks:
            print_note(f"each task of an array has its own log, as in: hpc-elastic logs --follow {job}_{tasks[0]}")
        shows_log = parsed.flag("follow") and options.output is None and not tasks
        return follow(client, job, submission.paths, clock=clock, show_log=shows_log)
    except KeyboardInterrupt:
        return leave(job, submission.paths)


def _print_where(job: JobId, paths: RunPaths, options: SbatchOptions) -> None:
    task = "task-*/" if options.array else ""
    log = options.output or f"{paths.root}/{task}job.log"
    text = (
        f"job             {job}{f' on cluster {job.cluster}' if job.cluster else ''}\n"
        f"run directory   {paths.root}\n"
        f"job log         {log}\n"
        f"workers' logs   {paths.root}/{task}attempt-*/round-*/rank-*/\n"
        f"report          hpc-elastic report {job}{'_TASK' if options.array else ''}\n"
        f"cancel          {shlex.join(scancel(job))}\n"
    )
    sys.stdout.write(each_line(text))
    sys.stdout.flush()


def how_it_ended(states: tuple[JobState, ...], result: int | None) -> RunEnd:
    """The run's exit code.

    Args:
        states: What Slurm last said of the job; empty where it has forgotten it.
        result: The exit code that the newest attempt stored; None where it stored none.
    """
    if result is not None and result != ExitCode.REQUEUED:
        return RunEnd(code=result, why=f"exit code {result}")
    if not states:
        return RunEnd(code=1, why="Slurm no longer knows the job, and its last attempt wrote no result")
    codes = [state.code for state in states]
    worst = max(range(len(states)), key=lambda index: codes[index])
    state = states[worst]
    reason = f" ({state.reason})" if state.reason else ""
    return RunEnd(code=codes[worst], why=f"{state.state.lower()}{reason} by Slurm, exit code {codes[worst]}")


def newest_result(paths: RunPaths) -> int | None:
    """The exit code that the newest attempt stored; None where it stored none (yet). Of an array the worst one, once
    all have ended."""
    tasks = array_tasks(paths)
    if tasks:
        codes = [newest_result(paths.task(task)) for task in tasks]
        known = [code for code in codes if code is not None and code != ExitCode.REQUEUED]
        return max(known) if len(known) == len(codes) else None
    stored = load_newest_result(paths)
    return None if stored is None else stored.exit_code


def follow(client: SlurmClient, job: JobId, paths: RunPaths, *, clock: Clock, show_log: bool) -> int:
    """Wait for the run's end; Ctrl-C ends the waiting alone.

    Returns:
        The run's exit code; 1 for a job that never starts; 130 after Ctrl-C.
    """
    waiting = Waiting(client, job, paths, clock=clock, log=OutputReader(paths.job_log) if show_log else None)
    try:
        end = waiting.run()
    except KeyboardInterrupt:
        return leave(waiting.job, paths)
    if end.has_ended:
        print_note(f"run {paths.run_id} ended: {end.why}; {where_to_look(job, paths)}")
    else:
        print_note(f"run {paths.run_id} is no longer waited for: {end.why}")
    return end.code


def leave(job: JobId, paths: RunPaths) -> int:
    """Say what becomes of a job whose follower got Ctrl-C. Returns the exit code."""
    again = (
        f"hpc-elastic status {job} --watch"
        if array_tasks(paths)
        else f"hpc-elastic logs {job} --follow (or, for its exit code, hpc-elastic report {job} --follow)"
    )
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


class Waiting:
    """Follows a job to the end of its run, and prints what Slurm says of it when that changes."""

    def __init__(
        self, client: SlurmClient, job: JobId, paths: RunPaths, *, clock: Clock, log: OutputReader | None = None
    ) -> None:
        self.job = job
        """The run's job now: a run may go on in a follow-on job."""
        self._client = client
        self._paths = paths
        self._clock = clock
        self._log = log
        self._is_terminal = is_terminal(sys.stdout)
        self._said = ""
        self._waived: set[int] = set()
        """Restarts of the job for which it was tried that they need not wait; one try each."""
        self._ended_since: float | None = None

    def run(self) -> RunEnd:
        """Wait. Returns how the run ended, or that it never begins."""
        stop = threading.Event()  # never set: waiting ends by the job's end or by Ctrl-C
        next_question = self._clock.monotonic()
        while True:
            self._show_log()
            if self._clock.monotonic() >= next_question:
                end = self._look()
                if end is not None:
                    self._show_log(is_over=True)
                    return end
                next_question = self._clock.monotonic() + _ASK_SLURM_EVERY
            self._clock.wait(stop, _ASK_SLURM_EVERY if self._log is None else _LOOK_AT_LOG_EVERY)

    def _show_log(self, *, is_over: bool = False) -> None:
        """Write what is new in the job log to stdout: on a terminal without what steers it."""
        if self._log is None:
            return
        while (lines := self._log.read() or (self._log.rest() if is_over else None)) is not None:
            sys.stdout.buffer.write(harmless(lines.data) if self._is_terminal else lines.data)
        sys.stdout.buffer.flush()

    def _look(self) -> RunEnd | None:
        """Ask Slurm once. Returns how the run ended; None: it goes on, or nobody knows."""
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
        """Let a requeued job begin that waits for nothing but Slurm's own delay.

        The attempt that had it requeued did so as well, but Slurm begins the delay anew where that attempt's nodes took
        long to be done with it (one of them was lost, say).
        """
        from hpc_elastic.launch.requeue import back_off  # it brings the agent's decisions with it

        if len(states) != 1 or states[0].phase is not JobPhase.PENDING or states[0].reason != "BeginTime":
            return
        restarts, stored = states[0].restarts, load_newest_result(self._paths)
        if stored is None or stored.exit_code != ExitCode.REQUEUED or back_off(stored.idle):
            return  # the attempt has asked for a delay of its own
        if not restarts or restarts in self._waived:
            return
        self._waived.add(restarts)
        try:
            self._client.start_now(self.job)
        except SlurmError:
            pass  # then it begins after the delay

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
            states = states or self._accounted()
            if states or is_final or now - self._ended_since >= FORGOTTEN_SECONDS:
                return how_it_ended(states, result)
        return None

    def _accounted(self) -> tuple[JobState, ...]:
        try:
            return self._client.accounted([self.job])
        except SlurmError:
            return ()

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
