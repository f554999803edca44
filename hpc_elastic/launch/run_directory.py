"""Folders of runs and attempts: made, claimed, found again, and removed where a submission fails."""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from hpc_elastic.base.clock import Clock, pause
from hpc_elastic.base.files import make_private_dir, sole_owner, why_replaceable, write_private
from hpc_elastic.base.host_facts import filesystem_type
from hpc_elastic.errors import HpcElasticError, UnsafePathError, UsageError
from hpc_elastic.run import index
from hpc_elastic.run.paths import (
    AttemptInfo,
    AttemptPaths,
    ExitCode,
    RunPaths,
    UnreadableAttemptError,
    load_attempt,
    load_result,
)
from hpc_elastic.run.spec import RunSpec, UnreadableRunError, load_run_spec
from hpc_elastic.slurm.commands import JobId
from hpc_elastic.slurm.job_environment import JobEnvironment

_LEAST_FREE = 1 << 20
"""Bytes that a small run writes; with less it would begin, and wait for room to record its end."""
_FULL = (errno.ENOSPC, errno.EDQUOT)
# Filesystems that no other node can see.
_LOCAL_TYPES = ("tmpfs", "ramfs", "devtmpfs", "proc", "sysfs", "devpts")
_LOCAL_PLACES = ("/tmp", "/var/tmp", "/dev/shm", "/run")


class NewRun(Struct, frozen=True):
    paths: RunPaths
    made: tuple[Path, ...]

    def discard(self) -> None:
        shutil.rmtree(self.paths.root, ignore_errors=True)
        _remove_empty(self.made)


def create_run(spec: RunSpec, runs_dir: Path) -> NewRun:
    """Make ``<runs_dir>/<run id>`` (0700) with its secret (0600) and run.json. Raises UsageError: nothing is left."""
    check_checkpoint_dir(spec)
    runs = Path(os.path.abspath(runs_dir))
    paths = RunPaths(runs / spec.run_id)
    run, is_ours = NewRun(paths, make_runs_dir(runs)), False
    try:
        make_private_dir(paths.root, exist_ok=False)
        is_ours = True
        write_private(paths.secret, secrets.token_hex(32) + "\n", durable=True)
        spec.save(paths.run_json)
    except BaseException as error:
        if is_ours:
            shutil.rmtree(paths.root, ignore_errors=True)
        _remove_empty(run.made)
        if isinstance(error, FileExistsError) and not is_ours:
            what = "a symbolic link" if paths.root.is_symlink() else "there already"
            raise UsageError(
                f"the run directory {paths.root} is {what}; choose another --run-id, or remove it"
            ) from None
        if isinstance(error, OSError):
            raise _failed(paths.root, error) from None
        raise
    return run


def make_runs_dir(runs_dir: Path) -> tuple[Path, ...]:
    """Make the folder of run directories, or check an existing one; before anything is made, or believed, in it.

    Returns the folders that were made, outermost first. Raises UsageError (another user could replace our run directory
    there, or it can't be made): nothing is left.
    """
    runs = Path(os.path.abspath(runs_dir))
    made: list[Path] = []
    try:
        for folder in reversed([above for above in (runs, *runs.parents) if not os.path.lexists(above)]):
            try:
                os.mkdir(folder, 0o700)
            except FileExistsError:
                continue  # another node's task made it
            made.append(folder)
        _check_runs_dir(runs)
    except BaseException as error:
        _remove_empty(made)
        if isinstance(error, OSError):
            raise _failed(runs, error) from None
        raise
    return tuple(made)


def check_checkpoint_dir(spec: RunSpec) -> None:
    """Raises UsageError: this machine sees the place of ``--checkpoint-dir``, and nothing can be made there."""
    if not spec.checkpoint_dir:
        return
    folder = Path(spec.checkpoint_dir)
    while not os.path.lexists(folder):
        folder = folder.parent
    if folder == Path("/") and spec.cluster != "local":
        return  # nodes may mount a filesystem there that this host does not: nothing that it can make would show it
    try:
        with tempfile.TemporaryDirectory(prefix=".hpc-elastic-", dir=folder):
            pass
    except OSError as error:
        raise UsageError(
            f"--checkpoint-dir {spec.checkpoint_dir}: nothing can be made in {folder}: {error.strerror or error}; "
            "give a shared folder that you may write to"
        ) from None


def create_tasks(array: RunPaths, spec: RunSpec, tasks: Iterable[int]) -> None:
    for task in tasks:
        paths = array.task(task)
        try:
            make_private_dir(paths.root, exist_ok=False)
            write_private(paths.secret, secrets.token_hex(32) + "\n")
            own = replace(spec, run_id=paths.run_id, uid=secrets.token_hex(16), array="")
            if spec.checkpoint_dir:  # no task goes on from another one's
                own = replace(own, checkpoint_dir=os.path.join(spec.checkpoint_dir, paths.root.name))
            own.save(paths.run_json, durable=False)
            write_private(paths.job_log, "")
        except OSError as error:
            raise _failed(paths.root, error) from None


def why_not_shared(path: Path, *, mountinfo: str = "/proc/self/mountinfo") -> str | None:
    """The reason why other nodes can't see `path` (which need not exist yet); None: none known."""
    real = os.path.realpath(path)
    for place in _LOCAL_PLACES:
        if real == place or real.startswith(place + "/"):
            return f"{place} is local to each node"
    kind = filesystem_type(real, mountinfo=mountinfo)
    return f"it is on {kind}, in the memory of this machine" if kind in _LOCAL_TYPES else None


def _check_runs_dir(runs: Path) -> None:
    link = os.lstat(runs)
    if stat.S_ISLNK(link.st_mode) and link.st_uid not in (os.geteuid(), 0):
        raise UsageError(f"{runs} is a symbolic link of uid {link.st_uid}; give the folder itself with --runs-dir")
    try:
        info = os.stat(runs)
    except FileNotFoundError:
        raise UsageError(f"{runs} is a symbolic link to nothing; give another folder with --runs-dir") from None
    if not stat.S_ISDIR(info.st_mode):
        raise UsageError(f"{runs} is not a folder; give another with --runs-dir")
    problem = why_replaceable(runs, option="--runs-dir")
    if problem is not None:
        raise UsageError(f"{runs} {problem}")
    space = os.statvfs(runs)
    free = (space.f_bavail if os.geteuid() else space.f_bfree) * space.f_frsize
    if 0 < free < _LEAST_FREE:  # none: it's full, as mkdir is about to say, or counts no blocks
        raise UsageError(
            f"{runs} has {free >> 10} KiB free, too little for a run; free some, or give another folder with --runs-dir"
        )


def _failed(path: Path, error: OSError) -> UsageError:
    if error.errno in _FULL:
        why = "the disk is full, or your quota is used up"
    elif error.errno == errno.EACCES:
        why = "you may not write there"
    else:
        why = (error.strerror or str(error)).lower()
    return UsageError(f"can't make {path}: {why}; choose another folder with --runs-dir")


def _remove_empty(folders: Sequence[Path]) -> None:
    for folder in reversed(folders):
        try:
            os.rmdir(folder)
        except OSError:
            return  # another process uses it by now


YOUNG_SECONDS = 5.0
"""Time for an attempt of another job to record which job it is."""
_LOOK_SECONDS = 0.2


class RunElsewhereError(HpcElasticError):
    template = "attempt {attempt} of this run is running in job {job}; this job ends, and changes nothing"


def read_attempt(attempt: AttemptPaths) -> AttemptInfo | None:
    try:
        return load_attempt(attempt.attempt_json)
    except UnreadableAttemptError:
        return None


def claim_attempt(paths: RunPaths) -> AttemptPaths:
    before = paths.attempts()
    number = before[-1].number + 1 if before else 0
    while True:
        attempt = paths.attempt(number)
        try:
            make_private_dir(attempt.root, exist_ok=False)
        except FileExistsError:
            number += 1  # another supervisor of this run was quicker; a listing may not show it yet
            continue
        make_private_dir(attempt.events)
        _point_latest(paths.latest, attempt.root)
        return attempt


def give_way(
    paths: RunPaths,
    mine: AttemptPaths,
    *,
    job_id: str | None,
    restart_count: int = 0,
    is_running: Callable[[str], bool],
    clock: Clock,
) -> None:
    """The later one of two jobs that begin at once gives way: RunElsewhereError, and `mine` is removed.

    A batch script that begins late, on a node that Slurm has given up since, gives way to the same job's newer start.
    """
    deadline = clock.monotonic() + YOUNG_SECONDS
    for number in range(mine.number - 1, -1, -1):
        before = paths.attempt(number)
        while before.root.is_dir() and not before.attempt_json.exists() and clock.monotonic() < deadline:
            pause(clock, _LOOK_SECONDS)
        if not before.root.is_dir():
            continue  # one that gave way
        if (info := read_attempt(before)) is None:
            return
        other = info.job_id
        is_newer_start = other is not None and other == job_id and info.restart_count > restart_count
        if not is_newer_start and (
            other is None or other == job_id or before.result_json.exists() or not is_running(other)
        ):
            return
        forget_attempt(paths, mine)
        raise RunElsewhereError(attempt=number, job=other)


def forget_attempt(paths: RunPaths, attempt: AttemptPaths) -> None:
    shutil.rmtree(attempt.root, ignore_errors=True)
    begun = paths.begun_attempts()
    if begun:
        _point_latest(paths.latest, begun[-1].root)


def slurm_job_ids(paths: RunPaths, number: int, own: str) -> tuple[str, ...]:
    """`own`, and those of the attempts before `number`: the agents end what these left on their nodes."""
    found = dict.fromkeys([own] if own else [])
    for before in range(number - 1, -1, -1):
        if (info := read_attempt(paths.attempt(before))) is not None:
            found |= dict.fromkeys(info.slurm_job_ids)
            break  # it names those before it
    return tuple(found)


def _point_latest(link: Path, target: Path) -> None:
    temporary = link.with_name(f".latest.{os.getpid()}")
    with suppress(OSError):  # a convenience for people; nothing of ours reads it
        os.symlink(target.name, temporary)
        os.replace(temporary, link)


def job_now(paths: RunPaths) -> JobId | None:
    """The Slurm job that has the run now, or had it last; None: none has begun.

    Where an attempt's note of its follow-on job was lost, or is past, that job's own attempt names it.
    """
    for attempt in reversed(paths.begun_attempts()):
        stored, info = load_result(attempt.result_json), read_attempt(attempt)
        cluster = (info.slurm_cluster if info is not None else "") or None
        if stored is not None and stored.next_job and stored.exit_code == ExitCode.REQUEUED:
            return JobId(stored.next_job, cluster)
        if info is not None and info.job_id:
            return JobId(info.job_id, cluster)
    return None


_MOST = 200
"""Newest runs to look at: the index is a home's, and a node may have another home."""


def earlier_run(job: JobEnvironment, spec: RunSpec, runs_dir: Path, env: Mapping[str, str]) -> Path | None:
    """The directory of the run that this very job began, with this very command; None: there is none.

    A script may have several runs, one after the other: it was requeued from the one that has not ended.
    """
    if not job.restart_count:
        return None
    found = []
    for paths in _candidates(job, runs_dir, env):
        try:
            if sole_owner(paths.root) != os.geteuid():
                continue  # root reads other users' files, too
            before = load_run_spec(paths.run_json)
        except (OSError, UnsafePathError, UnreadableRunError):
            continue
        same = (before.entrypoint, before.cwd, before.cluster) == (spec.entrypoint, spec.cwd, spec.cluster)
        attempts = [info for begun in paths.begun_attempts() if (info := read_attempt(begun)) is not None]
        own = [info for info in attempts if info.job_id == job.requeue_id and info.restart_count < job.restart_count]
        if same and own:
            result = load_result(paths.attempt(own[-1].number).result_json)
            if result is None or result.exit_code == ExitCode.REQUEUED:
                return paths.root
            found.append(paths.root)
    return found[0] if found else None


def _candidates(job: JobEnvironment, runs_dir: Path, env: Mapping[str, str]) -> Iterator[RunPaths]:
    seen = set()
    for entry in index.entries(job.requeue_id, cluster=job.cluster, env=env):
        seen.add(entry.run_dir)
        yield RunPaths(entry.run_dir)
    try:
        names = sorted(os.listdir(runs_dir), reverse=True)  # ids begin with the time
    except OSError:
        return
    for name in names[:_MOST]:
        if runs_dir / name not in seen and not name.startswith("."):
            yield RunPaths(runs_dir / name)
