"""``hpc-elastic status RUN``: where a run stands now, by its files and one question to Slurm."""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import TextWrapper
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import click
from msgspec import to_builtins

from hpc_elastic.base.clock import Clock, SystemClock, pause
from hpc_elastic.base.text import plural, ranges
from hpc_elastic.cli import run_job
from hpc_elastic.cli.main import is_terminal, output_failed, print_note, width_for
from hpc_elastic.cli.run_argument import LAST_HELP, RUN_PARAMETERS
from hpc_elastic.errors import UsageError
from hpc_elastic.launch.run_status import (
    OutputStatus,
    RunState,
    RunStatus,
    StepStatus,
    ends_by_slurm,
    read_status,
    with_slurms_log,
)
from hpc_elastic.launch.site import nodes_differ
from hpc_elastic.output.terminal import one_line
from hpc_elastic.run.index import array_tasks, jobs_of
from hpc_elastic.run.node_score import forget_in
from hpc_elastic.run.paths import RunPaths, outcome_text
from hpc_elastic.run.progress import ProgressSource
from hpc_elastic.run.spec import Preload, load_preload
from hpc_elastic.slurm.client import SlurmClient
from hpc_elastic.slurm.job_environment import HostlistError, expand, names_text
from hpc_elastic.slurm.job_state import JobPhase, JobState, seconds_until_end

if TYPE_CHECKING:
    from hpc_elastic.report.goodput import Goodput


JSON_VERSION = 1
_MOST_BEHIND = 8
WATCH_SECONDS = 5.0
"""Between two looks of ``--watch``: some file operations, and one squeue."""
_CLEAR = "\x1b[H\x1b[J"

PARAMETERS = (
    *RUN_PARAMETERS,
    click.Option(["--json"], is_flag=True, help="print one JSON object"),
    click.Option(["-w", "--watch"], is_flag=True, help=f"redraw every {WATCH_SECONDS:g} s until the run has ended"),
    click.Option(["--no-slurm"], is_flag=True, help="do not ask Slurm"),
    click.Option(
        ["--preload"],
        is_flag=True,
        help="show which modules are imported before the workers start, and which are left out and why",
    ),
    click.Option(
        ["--forget-nodes"], metavar="NODES|all", help="forget the bad nodes that the run has recorded (--bad-nodes)"
    ),
)
NOTE = f"RUN: {LAST_HELP}"


def run(args: SimpleNamespace) -> int:
    paths = run_job.find_paths(args)
    if args.forget_nodes is not None:
        try:
            nodes = None if args.forget_nodes == "all" else expand(args.forget_nodes)
        except HostlistError as error:
            wrong = f"--forget-nodes {args.forget_nodes}: give nodes, as in n3,n[5-7], or all: {error.why}"
            raise UsageError(wrong) from None
        if nodes == ():
            raise UsageError("--forget-nodes: give nodes, as in n3,n[5-7], or all")
        print(f"{plural(forget_in(paths.nodes_json, nodes), 'record')} forgotten")
        return 0
    if args.preload:
        return _show_preload(paths, as_json=args.json)
    clock = SystemClock()
    client = None if args.no_slurm else run_job.slurm_client(timeout=run_job.SHORT_SECONDS)
    while True:
        clears = args.watch and is_terminal(sys.stdout)
        try:
            if tasks := array_tasks(paths):
                has_ended = _show_array(paths, tasks, client, clock, as_json=args.json, clears=clears)
            else:
                ((status, job),) = ends_by_slurm(
                    client, [read_status(paths, clock=clock, looks_at_output=True)], clock=clock, warn=print_note
                )
                status = with_slurms_log(status, client, job) if client is not None else status
                _print(status, job, clock, as_json=args.json, clears=clears)
                has_ended = status.state is RunState.ENDED
        except OSError as error:
            if output_failed(error):
                raise
            raise UsageError(f"{error.filename or paths.root} can't be read: {error.strerror}") from None
        if not args.watch or has_ended:
            return 0
        pause(clock, WATCH_SECONDS)


def _show_preload(paths: RunPaths, *, as_json: bool) -> int:
    found = load_preload(paths.preload)
    if as_json:
        shown = to_builtins(found or Preload(modules=()))
        kept = {name: shown[name] for name in ("modules", "learned", "left_out")}
        sys.stdout.write(json.dumps({"version": JSON_VERSION, "path": str(paths.preload), **kept}) + "\n")
    elif found is None:
        print_note(
            f"{paths.preload}: nothing is kept yet; it is written with --start-method forkserver, "
            "when workers have started"
        )
    else:
        lines = ["given:", *(f"  {name}" for name in found.modules)]
        lines += [f"learned from workers ({len(found.learned)}):", *(f"  {name}" for name in found.learned)]
        lines += [f"left out ({len(found.left_out)}):", *(f"  {name}: {why}" for name, why in found.left_out.items())]
        lines += [f"kept in {paths.preload}; without this file it is learned anew"]
        sys.stdout.write("\n".join(map(one_line, lines)) + "\n")
    return 0


def _show_array(
    paths: RunPaths, tasks: Sequence[int], client: SlurmClient | None, clock: Clock, *, as_json: bool, clears: bool
) -> bool:
    before = [read_status(paths.task(task), clock=clock) for task in tasks]
    found = ends_by_slurm(client, before, clock=clock, warn=print_note)
    runs = {task: status for task, (status, _) in zip(tasks, found, strict=True)}
    jobs = {task: job for task, (_, job) in zip(tasks, found, strict=True) if job is not None}
    if as_json:
        each = {str(task): status_json(one, jobs.get(task), seconds_left=None) for task, one in runs.items()}
        head = {"version": JSON_VERSION, "run_id": paths.run_id, "run_dir": str(paths.root)}
        text = json.dumps({**head, "tasks": each})
    else:
        text = "\n".join(map(one_line, _array_lines(paths, runs, jobs)))
    sys.stdout.write((_CLEAR if clears and not as_json else "") + text + "\n")
    sys.stdout.flush()
    return all(status.state is RunState.ENDED for status in runs.values())


def seconds_left(job: JobState | None, clock: Clock) -> float | None:
    left = seconds_until_end(job, now_ns=clock.time_ns())
    return None if left is None else max(0.0, left)


def _print(status: RunStatus, job: JobState | None, clock: Clock, *, as_json: bool, clears: bool) -> None:
    left = seconds_left(job, clock)
    # Without steps it is in the report; and a screen that is redrawn every few seconds reads no events for it.
    goodput = None
    if status.steps is not None and not clears:
        goodput = read_goodput(Path(status.run_dir))
    if as_json:
        sys.stdout.write(json.dumps(status_json(status, job, seconds_left=left, goodput=goodput)) + "\n")
    else:
        found = status_lines(status, job, seconds_left=left, now_ns=clock.time_ns(), goodput=goodput)
        lines = [one_line(line) for line in found]
        if is_terminal(sys.stdout):
            wrapper = TextWrapper(
                width=width_for(sys.stdout), subsequent_indent=" " * 13, break_long_words=False, break_on_hyphens=False
            )  # a path stays whole
            lines = [wrapper.fill(line) for line in lines]
        sys.stdout.write((_CLEAR if clears else "") + "\n".join(lines) + "\n")
    sys.stdout.flush()


def read_goodput(root: Path) -> Goodput | None:
    """The goodput by the run's events, with the report's one accounting."""
    from hpc_elastic.report.collect import collect_run
    from hpc_elastic.report.goodput import goodput_of, is_worth_showing

    try:
        found = goodput_of(collect_run(root))
    except OSError:
        return None  # it is being removed, or can't be read
    return found if is_worth_showing(found) else None


def status_lines(
    status: RunStatus,
    job: JobState | None,
    *,
    seconds_left: float | None,
    now_ns: int | None = None,
    goodput: Goodput | None = None,
) -> list[str]:
    where = f", attempt {status.attempt}" if status.attempt is not None else ""
    job_id = status.job_id or (job.job_id if job is not None else None)
    where += f", job {job_id}" if job_id else ""
    where += f" on cluster {job.cluster}" if job is not None and job.cluster else ""
    ended, differ = status.state is RunState.ENDED, _differ(status, job)
    fields: list[tuple[str, str]] = [
        ("slurm", _slurm(job, seconds_left) if job is not None else ""),
        ("time", _time(status, now_ns)),
        *_end(status, job, job_id),
        ("round", _round(status)),
        ("lost", names_text(status.lost)),
        ("left out", names_text(status.bad_nodes)),
        ("differs", str(differ) if differ else ""),
        ("waiting", f"{status.waiting} nodes that want to join" if status.waiting else ""),
        ("because", status.opened_because),
    ]
    if status.steps is not None:
        name = "steps" if status.progress is not ProgressSource.COLLECTIVES else "progress"
        fields += [(name, _steps(status.steps, has_ended=ended)), ("saved", "" if ended else _saved(status.steps))]
    if goodput is not None:
        from hpc_elastic.report.goodput import goodput_text

        name, _, text = goodput_text(goodput).partition(": ")
        fields.append((name.lower(), text))
    fields += [
        ("hangs?", status.suspicion),
        *(("slow", str(slow)) for slow in status.slow_ranks),
        ("slow", str(status.slow_pace) if status.slow_pace is not None else ""),
        ("output", _output(status.output, status.resting) if status.output is not None else ""),
    ]
    if status.preload is not None:
        left_out = f"; {len(status.preload.left_out)} left out" if status.preload.left_out else ""
        learned = f"{len(status.preload.learned)} modules learned from workers"
        fields.append(("preload", f"{', '.join(status.preload.modules)}; {learned}{left_out} (--preload lists them)"))
    restarts = f"{status.restarts_used} of {status.max_restarts} restarts in this attempt"
    fields += [
        ("used", f"{restarts}, {status.requeues_used} of {status.max_requeues} requeues"),
        ("log", status.job_log),
        ("rank logs", status.rank_logs),
        ("directory", status.run_dir),
        ("problem", status.problem),
    ]
    lines = [f"  {name:<9}: {one_line(text)}" for name, text in fields if text]
    return [f"run {status.run_id}: {status.state.value}{where}", *lines]


def _end(status: RunStatus, job: JobState | None, job_id: str | None) -> list[tuple[str, str]]:
    because = f": {status.reason}" if status.reason else ""
    outcome = outcome_text(status.outcome, status.reason)
    if status.state is RunState.ENDED:
        return [("ended", f"{outcome} (exit code {status.exit_code}){because}")]
    if status.state is RunState.REQUEUED:
        is_gone = job is not None and job.phase is JobPhase.FINISHED
        way_out = f"the job has ended without its requeue; to requeue it: hpc-elastic requeue {job_id}"
        return [("requeued", f"{outcome}{because}"), ("but", way_out if is_gone else "")]
    return [("ending", status.reason if status.state is RunState.ENDING else "")]


def _round(status: RunStatus) -> str:
    if status.round is None:
        return ""
    if status.members:
        numbers = f"{len(status.members)} nodes, {status.workers} workers"
        return f"{status.round}: {numbers}: {names_text(status.members)}"
    return f"{status.round}: nodes are joining" if status.state is RunState.MEETING else ""


def status_json(
    status: RunStatus, job: JobState | None, *, seconds_left: float | None, goodput: Goodput | None = None
) -> dict[str, Any]:
    slurm: dict[str, Any] | None = None
    if job is not None:
        nodes = list(job.nodes)
        slurm = {"state": job.state, "reason": job.reason, "nodes": nodes, "seconds_left": seconds_left}
        if differ := _differ(status, job):
            slurm["differs"] = differ
    shown = {"version": JSON_VERSION, **to_builtins(status), "state": status.state.value, "slurm": slurm}
    if goodput is None:
        return shown
    from hpc_elastic.report.goodput import describe_goodput

    parts = {key: seconds for key, _, seconds in describe_goodput(goodput)}
    known = {"progress": goodput.progress.value, "steps_known": goodput.steps_known}
    return {**shown, "goodput": {**known, "share": goodput.share, "wall": goodput.wall, "parts": parts}}


def _differ(status: RunStatus, job: JobState | None) -> str:
    if job is None or job.phase is not JobPhase.RUNNING or status.state is RunState.ENDED:
        return ""
    return nodes_differ(used=status.members, lost=status.lost, job=job.nodes).reason


def elapsed_text(seconds: float) -> str:
    days, rest = divmod(int(max(0.0, seconds)), 86400)
    clock = f"{rest // 3600}:{rest % 3600 // 60:02d}:{rest % 60:02d}"
    return f"{days}-{clock:0>8}" if days else clock


def _slurm(job: JobState, seconds_left: float | None) -> str:
    text = job.state + (f" ({job.reason})" if job.reason else "")
    if job.phase is JobPhase.RUNNING and seconds_left is not None:
        text += f", {elapsed_text(seconds_left)} left"
    elif job.way_out:
        text += f", {job.way_out}"
    elif job.phase is JobPhase.PENDING and job.start_time:
        text += f", expected to start {job.start_time.replace('T', ' ')}"
    return text


def _time(status: RunStatus, now_ns: int | None) -> str:
    if status.state is RunState.ENDED:
        known = status.ended_ns and status.created_ns
        return f"{elapsed_text((status.ended_ns - status.created_ns) / 1e9)} in total" if known else ""
    if now_ns is None or not status.created_ns:
        return ""
    since_submitted = f"{elapsed_text((now_ns - status.created_ns) / 1e9)} since the run was submitted"
    if not status.started_ns or status.state is RunState.REQUEUED:
        return since_submitted
    elapsed = f"{elapsed_text((now_ns - status.started_ns) / 1e9)} elapsed"
    return f"{elapsed} in this attempt, {since_submitted}" if status.attempt else elapsed


def _steps(steps: StepStatus, *, has_ended: bool) -> str:
    text = f"{steps.least}" if steps.least == steps.most else f"{steps.least} to {steps.most}"
    if steps.source is ProgressSource.OPTIMIZER:
        text += " of this round, by the optimizer"
    if steps.source is ProgressSource.COLLECTIVES:
        text += " collectives of this round"
    if steps.total is not None:
        text += f" of {steps.total}"
    if steps.behind:
        more = ", …" if len(steps.behind) > _MOST_BEHIND else ""
        text += f" (behind: rank {ranges(steps.behind[:_MOST_BEHIND])}{more})"
    if has_ended:
        return text
    if steps.steps_per_second is not None:
        text += f", {steps.steps_per_second:.3g} {steps.source.unit}s/s"
    if steps.seconds_to_end is not None:
        text += f", {elapsed_text(steps.seconds_to_end)} to the end"
    if steps.loss is not None:
        text += f", loss {steps.loss:.4g}"
    seconds = steps.told_seconds if steps.heartbeat_seconds is None else steps.heartbeat_seconds
    last = "one" if steps.source is ProgressSource.COLLECTIVES else "heartbeat"
    return f"{text}; last {last} {_ago(seconds)} ({plural(steps.ranks, 'worker')})"


def _saved(steps: StepStatus) -> str:
    if steps.checkpoint_seconds is None:
        return "no checkpoint reported in this round"
    step = f"step {steps.checkpoint_step}, " if steps.checkpoint_step is not None else ""
    return f"last checkpoint: {step}{_ago(steps.checkpoint_seconds)}"


def _output(output: OutputStatus, resting: float | None) -> str:
    text = "progress unknown; the size of the logs: "
    if resting is not None:
        what = f"have rested for {elapsed_text(resting)}" if resting else "work"
        text = f"no steps known, by the kernel's counts the processes {what}; the size of the logs: "
    if output.silent_seconds is None:
        return f"{text}none of {output.ranks} ranks has printed anything yet"
    text += f"{output.bytes} bytes, the last {_ago(output.silent_seconds)} (rank {output.newest_rank})"
    silent = f"; {output.silent_ranks} of {output.ranks} ranks have printed nothing"
    return text + (silent if output.silent_ranks else "")


def _ago(seconds: float) -> str:
    return f"{seconds:.0f} s ago" if seconds < 120 else f"{elapsed_text(seconds)} ago"


LINE_HEAD = f"{'state':<13}  {'created':<16}  {'took':>9}  {'job':>8}  run"


def status_line(status: RunStatus, now_ns: int | None = None) -> str:
    created = time.strftime("%Y-%m-%d %H:%M", time.localtime(status.created_ns / 1e9)) if status.created_ns else "?"
    state = outcome_text(status.outcome, status.reason) if status.state is RunState.ENDED else status.state.value
    until = status.ended_ns if status.state is RunState.ENDED else now_ns
    took = elapsed_text((until - status.created_ns) / 1e9) if until and status.created_ns else "-"
    parts = [f"{state:<13}", f"{created:<16}", f"{took:>9}", f"{status.job_id or '-':>8}", status.run_id]
    if status.state is not RunState.ENDED and status.members:
        parts.append(f"{len(status.members)} nodes, round {status.round}")
    if status.steps is not None and status.state is not RunState.ENDED:
        at = status.steps.least
        is_step = status.progress is not ProgressSource.COLLECTIVES
        parts.append(f"step {at}" if is_step else plural(at, "collective"))
    reason = status.reason or status.opened_because
    if reason and status.outcome != "succeeded":
        parts.append(reason)
    return one_line("  ".join(parts))


def _array_lines(paths: RunPaths, runs: Mapping[int, RunStatus], jobs: Mapping[int, JobState]) -> list[str]:
    known = [entry.job_id for entry in jobs_of(str(paths.root)) if "_" not in entry.job_id]
    known += [status.job_id.partition("_")[0] for status in runs.values() if status.job_id]
    counts = Counter(status.state for status in runs.values())
    said = ", ".join(f"{counts[state]} {state.value}" for state in RunState if counts[state])
    lines = [f"array {paths.run_id}{f', job {known[0]}' if known else ''}: {len(runs)} runs: {said}"]
    for task, status in runs.items():
        state = jobs.get(task)
        shows = state is not None and status.state is not RunState.ENDED
        slurm = f"  [{state.state}{f': {state.reason}' if state.reason else ''}]" if shows and state else ""
        lines.append(f"  {status_line(status)}{slurm}")
    lines.append(f"  directory: {paths.root}")
    return lines
