"""The one way to a Slurm job: its run directory, its script, its nodes, sbatch; and nothing left where that fails.

The script is made by pure functions: nothing reaches a shell unquoted, and nothing is run. The nodes that a submission
may have are checked first: whether they are enough without those that the user leaves out.
"""

from __future__ import annotations

import getpass
import os
import re
import shlex
import signal
import textwrap
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from msgspec import Struct, field
from msgspec.structs import replace

from hpc_elastic.base.clock import Clock, pause
from hpc_elastic.base.files import write_private
from hpc_elastic.base.host_facts import own_command
from hpc_elastic.errors import UsageError
from hpc_elastic.launch.run_directory import NewRun, check_checkpoint_dir, create_run, create_tasks, why_not_shared
from hpc_elastic.options.run_request import SlurmJob
from hpc_elastic.options.sbatch import (
    COMMENT_MARK,
    SbatchOptions,
    ScriptLines,
    parse_nodes,
    sbatch_arguments,
    sbatch_line,
)
from hpc_elastic.run import index
from hpc_elastic.run.paths import RunPaths
from hpc_elastic.slurm.client import PartitionNodes, SlurmClient, SubprocessRunner
from hpc_elastic.slurm.commands import (
    SHAPE_VARIABLES,
    JobId,
    MaybeSubmittedError,
    SlurmError,
    SlurmMissingError,
    SubmissionRefusedError,
    sbatch,
)
from hpc_elastic.slurm.job_environment import RUN_VARIABLES, WORKER_VARIABLES, HostlistError, expand

_PLACEHOLDER = re.compile(r"@([A-Z_]+)@")
_RUN = 'exec "${supervisor[@]}"\n'
_WITH_END = """\
# Slurm's signals are for the supervisor, and this shell stays for what comes after it.
run_pid='' run_early='' run_code=0
run_relay() { if [[ -n $run_pid ]]; then kill "-$1" "$run_pid"; else run_early+=" -$1"; fi; }
trap 'run_relay USR2' USR2
trap 'run_relay TERM' TERM
(
  trap '' USR2
  exec "${supervisor[@]}"
) &
run_pid=$!
for run_signal in $run_early; do kill "$run_signal" "$run_pid"; done
# Not by wait: a signal that comes just before it is heard when the run has ended. This read has never anything to read.
exec {run_tick}<> <(:)
while kill -0 "$run_pid" 2>/dev/null; do read -r -t 0.2 -u "$run_tick" || :; done
trap '' USR2 TERM
wait "$run_pid" && run_code=0 || run_code=$?
"""


def render_script(
    options: SbatchOptions,
    *,
    run_dir: str,
    command: Sequence[str],
    template: str | None = None,
    lines: ScriptLines | None = None,
) -> str:
    """Render the batch script, which becomes `command`, an absolute interpreter first.

    Without `output` both streams go to job.log in the run directory, or in each task's.

    Raises:
        UsageError: a value that can't be given to sbatch, with its option's name; lines for which a template of the
            user's has no place.
    """
    arguments = sbatch_arguments(options)
    if options.output is None:
        if options.array and "\\" in run_dir:
            raise UsageError(f"--array: sbatch can't number the logs in {run_dir}, for its backslash; give --output")
        log = literal_path(run_dir) + ("/task-%a/job.log" if options.array else "/job.log")
        arguments.append(f"--output={log}")
    values = {
        "SBATCH_LINES": "\n".join(map(sbatch_line, arguments)),
        "SHAPE_VARIABLES": _variable_lines(SHAPE_VARIABLES),
        "RUN_VARIABLES": _variable_lines((*RUN_VARIABLES, *WORKER_VARIABLES)),
        "RUN_DIR": _literal(run_dir),
        "COMMAND": " ".join(map(_literal, command)),
    }
    script = _PLACEHOLDER.sub(lambda match: values[match.group(1)], template or load_template())
    return _with_lines(script, lines) if lines else script


def _variable_lines(variables: Sequence[str]) -> str:
    return " \\\n  ".join(textwrap.wrap(" ".join(variables), 112))


def literal_path(path: str) -> str:
    """``%%`` is a percent sign; but where a path has a backslash, only backslashes quote (tried on 22.05)."""
    return path.replace("\\", "\\\\") if "\\" in path else path.replace("%", "%%")


def load_template() -> str:
    package = Path(__file__).resolve().parents[1]
    for folder in (package, package.parent):
        path = folder / "sbatch_templates" / "elastic.sbatch"
        if path.is_file():
            return path.read_text(encoding="utf-8")
    raise FileNotFoundError(
        f"sbatch_templates/elastic.sbatch is neither in {package} nor beside it: reinstall hpc_elastic"
    )


def _with_lines(script: str, lines: ScriptLines) -> str:
    before, run, after = script.rpartition(_RUN)
    if not run or after.strip():
        raise UsageError("setup and teardown have no place in this template: write them into it")
    if lines.setup:
        before += "".join(f"{line}\n" for line in ("# setup", *lines.setup, ""))
    if not lines.teardown:
        return before + run
    return before + _WITH_END + "".join(f"{line}\n" for line in ("", "# teardown", *lines.teardown, 'exit "$run_code"'))


def _literal(word: str) -> str:
    """Quote for bash. Always: in an array a bare ``a,b`` or ``a=b`` looks like a mistake to shellcheck."""
    return "'" + word.replace("'", "'\\''") + "'"


Log = Callable[[str], None]


class Submission(Struct, frozen=True, kw_only=True):
    job: SlurmJob
    runs_dir: Path
    lines: ScriptLines = field(default_factory=ScriptLines)
    another_folder: str = "give a shared folder with --runs-dir (or --allow-local-runs-dir where they can)"
    """A way out for messages, as `this_machine`, in the terms of the caller's user."""
    this_machine: str = "--cluster local"

    @property
    def paths(self) -> RunPaths:
        return RunPaths(self.runs_dir / self.job.spec.run_id)

    @property
    def places(self) -> tuple[RunPaths, ...]:
        return tuple(map(self.paths.task, self.job.tasks)) or (self.paths,)

    @property
    def script(self) -> str:
        """Raises UsageError: an option that can't be given to sbatch."""
        options, run_dir = self.job.options, str(self.paths.root)
        if options.comment is None:  # by which support staff find the run
            options = replace(options, comment=f"{COMMENT_MARK}{run_dir}")
        command = own_command("batch", run_dir)
        return render_script(
            options, run_dir=run_dir, command=command, template=self.job.template, lines=self.lines or None
        )


def submission_client(submission: Submission, env: Mapping[str, str], clock: Clock, log: Log) -> SlurmClient:
    overruled = submission.job.options.overruled_variables()
    return SlurmClient(SubprocessRunner(env, overruled=overruled), clock, log=log)


def dry_run(submission: Submission) -> str:
    _check_folder(submission)
    check_checkpoint_dir(submission.job.spec)
    _log_folders(submission.job)
    return f"{submission.script}\n# {shlex.join(sbatch(str(submission.paths.script)))}\n"


def submit_job(
    submission: Submission,
    client: SlurmClient,
    *,
    clock: Clock,
    env: Mapping[str, str],
    log: Log,
    fill: Callable[[], None] = lambda: None,
) -> JobId:
    """Make the run directory, submit its script, and remember the job.

    Args:
        log: Gets remarks for the user.
        fill: Writes more into the run's `places`, which exist by then.

    Raises:
        UsageError: it can't be submitted as asked.
        MaybeSubmittedError: the run directory stays.
        SlurmError: Slurm did not take it.
        Exception: what `fill` raises. Nothing is left of it otherwise.
    """
    _check_folder(submission)
    job, script = submission.job, submission.script
    folders = _log_folders(job)
    partitions = eligible_partitions(client, job.options, env)
    remark = check_node_count(job, partitions, users_excluded(job.options, env))
    if remark is not None:
        log(remark)
    for folder in folders:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"the job log's folder {folder} can't be made: {error.strerror}") from None
    run = create_run(job.spec, submission.runs_dir)
    with _leaving_nothing(run, submission.this_machine):
        create_tasks(run.paths, job.spec, job.tasks)
        fill()
    now_ns = clock.time_ns()
    with _interrupts_deferred():
        with _leaving_nothing(run, submission.this_machine):
            write_private(run.paths.script, script)
            if not job.tasks:
                write_private(run.paths.job_log, "")  # Slurm appends to it, and would make it with the job's umask
            number = _submit(client, submission, env, clock, log)
        try:
            cluster = number.cluster or client.config().cluster  # sbatch names it only on request
        except SlurmError:
            cluster = env.get("SLURM_CLUSTER_NAME", "")
        problem = index.record(
            cluster=cluster,
            job_id=number.number,
            submitted_ns=now_ns,
            run_dir=run.paths.root,
            env=env,
        )
        if problem is not None:
            log(f"the run can't be found by its job id later, only by its directory: {problem}")
    return number


def _submit(client: SlurmClient, submission: Submission, env: Mapping[str, str], clock: Clock, log: Log) -> JobId:
    run_dir = str(submission.paths.root)
    try:
        return client.submit(str(submission.paths.script))
    except SlurmMissingError:
        raise
    except SlurmError as error:
        if "connect failure" in str(error):
            raise
        is_refused = isinstance(error, SubmissionRefusedError)
        clusters = _clusters(submission.job.options, env)
        for wait in (0.0,) if is_refused else (0.0, 3.0, 6.0):  # a busy controller may still take it
            pause(clock, wait)
            try:
                found = client.find_submitted(run_dir, clusters=clusters)
            except SlurmMissingError:
                raise error from None
            except SlurmError:
                break
            if found is not None:
                log(f"{error}; the job is in the queue all the same, as {found}")
                return found
        if is_refused:
            raise
        where = f" -M {clusters}" if clusters else ""
        look = f"squeue --me{where} -o '%i %k' | grep {shlex.quote(run_dir)}"
        why = f"{error.facts['why']}; the job may be queued: {look} shows it; the run directory is kept for it"
        raise MaybeSubmittedError(**{**error.facts, "why": why}) from None


def _clusters(options: SbatchOptions, env: Mapping[str, str]) -> str:
    given = [match[1] for argument in options.extra if (match := re.match(r"(?:-M|--clusters=)(.+)", argument))]
    return (given or [env.get("SBATCH_CLUSTERS") or env.get("SLURM_CLUSTERS") or ""])[-1]


def _log_folders(job: SlurmJob) -> list[Path]:
    """The folders of ``--output`` and ``--error``: Slurm makes none, and a job without one never begins."""
    folders = []
    for name, value in (("--output", job.options.output), ("--error", job.options.error)):
        text = value or ""
        if "\\" in text:  # nothing is replaced
            folder, number = os.path.dirname(re.sub(r"\\(.)", r"\1", text)), None
        else:
            folder = os.path.dirname(text.replace("%x", job.options.job_name or "").replace("%u", getpass.getuser()))
            number = re.search(r"(?<!%)(?:%%)*%\d*[jJA]", folder)
        if number:
            raise UsageError(f"{name} {value}: Slurm makes no folders; write {number[0]} into the file's name alone")
        if folder and not re.search(r"%\d*[a-zA-Z]", folder.replace("%%", "")):
            folders.append(Path(job.spec.cwd, folder.replace("%%", "%")))
    return folders


def _check_folder(submission: Submission) -> None:
    why = None if submission.job.shared else why_not_shared(submission.runs_dir)
    if why is not None:
        raise UsageError(f"the nodes can't see {submission.runs_dir}: {why}; {submission.another_folder}")


@contextmanager
def _leaving_nothing(run: NewRun, this_machine: str) -> Iterator[None]:
    try:
        yield
    except SlurmMissingError as error:
        run.discard()
        raise UsageError(f"{error.why}; run on this machine with {this_machine}") from None
    except OSError as error:
        run.discard()
        raise UsageError(f"can't write {run.paths.root}: {error.strerror}") from None
    except MaybeSubmittedError:
        raise
    except BaseException:
        run.discard()
        raise


@contextmanager
def _interrupts_deferred() -> Iterator[None]:
    """A Ctrl-C between sbatch and its answer would leave an unknown job.

    Blocked, it does not reach sbatch, which inherits that; a handler holds back what comes in through another thread.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    waiting = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    came: list[int] = []
    # Handlers that are not Python's could not be put back.
    ours = [number for number in waiting if signal.getsignal(number) is not None]
    handlers = {number: signal.signal(number, lambda number, _: came.append(number)) for number in ours}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, waiting)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        if came:
            signal.raise_signal(came[0])


def eligible_partitions(
    client: SlurmClient, options: SbatchOptions, env: Mapping[str, str]
) -> tuple[PartitionNodes, ...]:
    if _clusters(options, env):
        return ()
    names = options.partition or env.get("SBATCH_PARTITION")
    try:
        found = client.partitions(names)
    except SlurmError:
        return ()  # sbatch's own message is better
    wanted = names.split(",") if names else []
    return tuple(part for part in found if (part.name in wanted if wanted else part.default))


def users_excluded(options: SbatchOptions, env: Mapping[str, str]) -> frozenset[str]:
    given = [word.partition("=")[2] for word in options.extra if word.startswith("--exclude=")]
    try:
        return frozenset(expand((given or [options.exclude or env.get("SBATCH_EXCLUDE") or ""])[-1]))
    except HostlistError:
        return frozenset()


def check_node_count(job: SlurmJob, partitions: Sequence[PartitionNodes], users: frozenset[str]) -> str | None:
    """Slurm (20.11, 22.05, 26.05) accepts more nodes than there are, and the job pends for ever. Returns a remark."""
    least = parse_nodes(job.options.nodes or "1")[0]
    largest = max(partitions, key=lambda part: len(part.names - users), default=None)
    if largest is None:
        return None
    total, left, up = len(largest.names), len(largest.names - users), len(largest.usable_names - users)
    if left < least:
        spares = f" and {job.spec.spares} spare{'s' if job.spec.spares > 1 else ''}" if job.spec.spares else ""
        less = f", {total - left} of them excluded" if left < total else ""
        raise UsageError(
            f"{job.asked_nodes}{spares}: partition {largest.name} has {total} nodes{less}; the job would never start"
        )
    if up < least:
        those = " that are not excluded" if left < total else ""
        return f"only {up} of the {left} nodes of partition {largest.name}{those} are up now"
    return None
