"""The files that outlive a run in the account's folder, and the index of runs there: finds a run by path, id or job id.

Job ids come back, so an entry is keyed by cluster, job id and submit time, and the newest wins. A home that can't be
written never stops a submission. Each entry is a file of its own, written whole and never changed: no lock is needed.
"""

from __future__ import annotations

import os
import pwd
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from hpc_elastic.base import codec
from hpc_elastic.base.files import make_private_dir, read_json
from hpc_elastic.base.text import first_of
from hpc_elastic.errors import UsageError
from hpc_elastic.run.paths import RunPaths, is_job_id, task_index


def account_folder(name: str, env: Mapping[str, str] | None = None) -> Path | None:
    """The folder `name` below ``$XDG_STATE_HOME`` of `env`; None where the account has no home.

    As root, a state folder that is not root's alone is replaced by the one in root's own home: ``sudo`` may keep the
    user's HOME, where root's files would be in the user's way, and the user's files must not lead root.
    """
    env = os.environ if env is None else env
    state = env.get("XDG_STATE_HOME", "")
    if not state.startswith("/"):
        home = env.get("HOME", "")
        if not home.startswith("/"):
            return None
        state = home + "/.local/state"
    if os.geteuid() == 0 and not _is_roots(Path(state)):
        state = pwd.getpwuid(0).pw_dir + "/.local/state"
    return Path(state) / "hpc_elastic" / name


def make_account_folder(name: str, env: Mapping[str, str] | None = None) -> Path:
    """The same folder, made for this user alone. Raises UsageError (no home, or another user's folder) or OSError."""
    folder = account_folder(name, env)
    if folder is None:
        raise UsageError("neither XDG_STATE_HOME nor HOME is set")
    for above in reversed(folder.parent.parents):
        above.mkdir(mode=0o700, exist_ok=True)
    make_private_dir(folder.parent)
    make_private_dir(folder)
    return folder


def _is_roots(path: Path) -> bool:
    try:
        return all(not os.path.lexists(above) or os.lstat(above).st_uid == 0 for above in (path, *path.parents))
    except OSError:  # NFS refuses root
        return False


DEFAULT_RUNS_DIR = "runs"
_TASK_OF = re.compile(r"(.+)_(\d{1,10})\Z", re.ASCII)
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]")


class JobEntry(Struct, frozen=True, kw_only=True):
    cluster: str
    job_id: str
    submitted_ns: int
    run_dir: Path


def record(
    *, cluster: str, job_id: str, submitted_ns: int, run_dir: Path, env: Mapping[str, str] | None = None
) -> str | None:
    """Save a job's run directory, under `submitted_ns` of this host's wall clock. Returns None, or why that failed."""
    try:
        folder = make_account_folder("jobs", env)
        name = f"{_UNSAFE.sub('-', cluster) or '-'}-{_UNSAFE.sub('-', job_id)}-{submitted_ns}.json"
        codec.save(folder / name, JobEntry(cluster=cluster, job_id=job_id, submitted_ns=submitted_ns, run_dir=run_dir))
        return None
    except (OSError, UsageError) as error:
        return str(error)


def entries(job_id: str, *, cluster: str | None = None, env: Mapping[str, str] | None = None) -> list[JobEntry]:
    """The entries of a job, newest first; ids of other clusters too unless `cluster` is given."""
    known = known_jobs(env=env, part_of_name=f"-{_UNSAFE.sub('-', job_id)}-")
    clusters = None if cluster is None else (cluster, "")
    return [entry for entry in known if entry.job_id == job_id and (clusters is None or entry.cluster in clusters)]


def jobs_of(run_dir: str, *, known: Sequence[JobEntry] | None = None) -> list[JobEntry]:
    """The jobs that were submitted with this absolute run directory, newest first: one, but for a copy of a home.

    An array's task has ``ARRAYJOB_TASK``. `known`, from `known_jobs`, saves reading it for each of many runs.
    """
    known = known_jobs() if known is None else known
    task = task_index(os.path.basename(run_dir))
    if task is not None:
        arrays = jobs_of(os.path.dirname(run_dir), known=known)
        own = [entry for entry in arrays if entry.job_id.partition("_")[2] in ("", str(task))]  # 81_3: a follow-on job
        ids = (entry.job_id if "_" in entry.job_id else f"{entry.job_id}_{task}" for entry in own)
        return [replace(entry, job_id=job_id, run_dir=Path(run_dir)) for entry, job_id in zip(own, ids, strict=True)]
    return [entry for entry in known if str(entry.run_dir) == run_dir]


def known_jobs(*, env: Mapping[str, str] | None = None, part_of_name: str = "") -> list[JobEntry]:
    """Every known job, newest first; with `part_of_name` only of entries whose file's name has that part."""
    folder = account_folder("jobs", env)
    try:
        names = os.listdir(folder) if folder is not None else []
    except OSError:
        names = []
    found: list[JobEntry] = []
    for name in names:
        value = read_json(folder / name) if folder and name.endswith(".json") and part_of_name in name else ""
        if isinstance(value, dict) and is_job_id(value.get("job_id")):
            found += codec.readable_items(JobEntry, [value])
    return sorted(found, key=lambda entry: entry.submitted_ns, reverse=True)


class UnknownRunError(UsageError):
    """The user's argument matches no run."""


def find(
    text: str,
    runs_dir: Path | None = None,
    *,
    env: Mapping[str, str] | None = None,
    cluster_here: Callable[[], str] = lambda: "",
) -> Path:
    """Find the run directory for `text`: a path to it or into it, a run id (or its beginning), or a job id.

    The ids of an array's task are the array's and ``_TASK``. Run ids are searched in `runs_dir` (``./runs``).
    `cluster_here` returns this host's cluster, whose job is meant where several clusters have one of that id. The path
    that is returned is absolute. Raises UnknownRunError, or UsageError: several matches, or the directory is gone.
    """
    given = Path(os.path.abspath(text))
    for folder in (given, *given.parents[:4]) if given.exists() else ():
        if RunPaths(folder).run_json.is_file():
            return folder
    runs = Path(os.path.abspath(runs_dir or DEFAULT_RUNS_DIR))
    if "/" not in text and text not in ("", ".", ".."):
        found = _by_run_id(text, runs) or _by_task_of_run(text, runs)
        if found is not None:
            return found
    if is_job_id(text):
        array, _, task = text.partition("_")
        known = []
        for entry in entries(text, env=env):
            if task and array_tasks(RunPaths(entry.run_dir)):  # a follow-on job of one task
                known.append((entry, RunPaths(entry.run_dir).task(int(task)).root))
            else:
                known.append((entry, entry.run_dir))
        if task:
            known += [(entry, RunPaths(entry.run_dir).task(int(task)).root) for entry in entries(array, env=env)]
        if len({entry.cluster for entry, _ in known}) > 1:
            here = cluster_here()
            known.sort(key=lambda job: job[0].cluster != here)
        for _, run_dir in known:
            if RunPaths(run_dir).run_json.is_file():
                return run_dir
        for entry, run_dir in known:
            if run_dir != entry.run_dir and RunPaths(entry.run_dir).run_json.is_file():
                raise UsageError(f"job {array} has no task {task}: hpc-elastic status {array} shows which it has")
        if known:
            cluster = known[0][0].cluster
            where = f"-M {cluster} " if cluster and cluster != cluster_here() else ""
            way_out = f"to end the job: scancel {where}{text}"
            raise UsageError(f"the run directory of job {text} no longer exists: {known[0][1]}; {way_out}")
        if "/" not in text:
            found = _by_run_id(text, runs, digits=True)  # a run id begins with digits, too
            if found is not None:
                return found
        raise UnknownRunError(f"job {text}: no such run (searched this account's runs); give its run directory")
    raise UnknownRunError(
        f"{text or repr(text)}: no such run (searched run directories, run ids in {runs} (--runs-dir), and job ids)"
    )


def last_run(runs_dir: Path | None) -> Path | None:
    """The newest run in the runs folder (``./runs``); where that is empty, the newest that this account submitted."""
    made: list[tuple[int, Path]] = []
    try:
        with os.scandir(os.path.abspath(runs_dir or DEFAULT_RUNS_DIR)) as folders:
            for folder in folders:
                try:
                    made.append((RunPaths(Path(folder.path)).run_json.stat().st_mtime_ns, Path(folder.path)))
                except OSError:
                    continue  # no run, or it is being removed
    except OSError:
        pass
    if made:
        return max(made)[1]
    return next(iter(account_runs()), None)


def account_runs() -> list[Path]:
    """The existing run directories of this account's jobs, the last submitted one first."""
    folders = dict.fromkeys(entry.run_dir for entry in known_jobs())
    return [folder for folder in folders if RunPaths(folder).run_json.is_file()]


def array_tasks(paths: RunPaths) -> tuple[int, ...]:
    """The tasks of the array of runs at `paths`, ascending; empty for a single run, or an unreadable one."""
    try:
        found = map(task_index, os.listdir(paths.root))
    except OSError:
        return ()
    return tuple(sorted(index for index in found if index is not None))


def _by_task_of_run(text: str, runs: Path) -> Path | None:
    match = _TASK_OF.match(text)
    if match is None or is_job_id(text) or (array := _by_run_id(match.group(1), runs)) is None:
        return None
    task = RunPaths(array).task(int(match.group(2)))
    return task.root if task.run_json.is_file() else None


def _by_run_id(text: str, runs: Path, *, digits: bool = False) -> Path | None:
    if RunPaths(runs / text).run_json.is_file():
        return runs / text
    if is_job_id(text) and not digits:
        return None
    try:
        names = sorted(name for name in os.listdir(runs) if name.startswith(text))
    except OSError:
        return None
    matches = [runs / name for name in names if RunPaths(runs / name).run_json.is_file()]
    if len(matches) > 1:
        shown = first_of([match.name for match in matches], 5)
        raise UsageError(f"{text} begins {len(matches)} runs in {runs}; give more of one of {shown}")
    return matches[0] if matches else None
