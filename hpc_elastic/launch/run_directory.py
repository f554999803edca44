"""Makes a run directory, and takes it away again where the submission fails."""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Iterable
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from hpc_elastic.base.files import make_private_dir, why_replaceable, write_private
from hpc_elastic.errors import UsageError
from hpc_elastic.run.paths import RunPaths
from hpc_elastic.run.spec import RunSpec

_LEAST_FREE = 1 << 20
"""Bytes. What a small run writes; with less it would begin, and wait for room to say that it has ended."""
_FULL = (errno.ENOSPC, errno.EDQUOT)
# Filesystems that no other node can see.
_LOCAL_TYPES = ("tmpfs", "ramfs", "devtmpfs", "proc", "sysfs", "devpts")
_LOCAL_PLACES = ("/tmp", "/var/tmp", "/dev/shm", "/run")


class NewRun(Struct, frozen=True):
    """A run directory that was just made, and that no process uses yet."""

    paths: RunPaths
    made: tuple[Path, ...]
    """The folders that were made for it, outermost first."""

    def discard(self) -> None:
        """Remove it, and the folders that were made for it if they are still empty. Never raises."""
        import shutil

        shutil.rmtree(self.paths.root, ignore_errors=True)
        for folder in reversed(self.made):
            try:
                os.rmdir(folder)
            except OSError:
                return  # another process uses it by now


def create_run(spec: RunSpec, runs_dir: Path) -> NewRun:
    """Make ``<runs_dir>/<run id>`` (0700) with its secret (0600) and run.json.

    Args:
        spec: What was asked for; names the run.
        runs_dir: Made where it is missing.

    Raises:
        UsageError: it exists, is a link, another user's, not writable, or the disk is full: one line, nothing left.
    """
    runs = Path(os.path.abspath(runs_dir))
    paths = RunPaths(runs / spec.run_id)
    made: list[Path] = []
    try:
        for folder in _missing(runs):
            os.mkdir(folder, 0o700)
            made.append(folder)
        _check_runs_dir(runs)
        _check_new(paths.root)
        make_private_dir(paths.root, exist_ok=False)
    except BaseException as error:
        _remove_empty(made)
        if isinstance(error, FileExistsError):
            raise UsageError(f"the run directory {paths.root} exists already; choose another --run-id") from None
        if isinstance(error, OSError):
            raise _failed(paths.root, error) from None
        raise
    run = NewRun(paths, tuple(made))
    try:
        write_private(paths.secret, secrets.token_hex(32) + "\n", durable=True)
        spec.save(paths.run_json)
    except OSError as error:
        run.discard()
        raise _failed(paths.root, error) from None
    except BaseException:
        run.discard()
        raise
    return run


def create_tasks(array: RunPaths, spec: RunSpec, tasks: Iterable[int]) -> None:
    """Make the run directory of each task, with its job log, in that of their array.

    Args:
        array: Just made by `create_run`.
        spec: The array's.
        tasks: Their numbers.

    Raises:
        UsageError: they can't be made; the caller discards the array.
    """
    for task in tasks:
        paths = array.task(task)
        try:
            make_private_dir(paths.root, exist_ok=False)
            write_private(paths.secret, secrets.token_hex(32) + "\n")
            own = replace(spec, run_id=paths.run_id, uid=secrets.token_hex(16), array="")
            own.save(paths.run_json, durable=False)
            write_private(paths.job_log, "")
        except OSError as error:
            raise _failed(paths.root, error) from None


def why_not_shared(path: Path, *, mountinfo: str = "/proc/self/mountinfo") -> str | None:
    """Why `path` (which may not exist yet) can't be what other nodes see, or None where nothing speaks against it."""
    real = os.path.realpath(path)
    for place in _LOCAL_PLACES:
        if real == place or real.startswith(place + "/"):
            return f"{place} is every node's own"
    kind = filesystem_type(real, mountinfo=mountinfo)
    return f"it is on {kind}, in this machine's memory" if kind in _LOCAL_TYPES else None


def _missing(folder: Path) -> list[Path]:
    missing: list[Path] = []
    while not os.path.lexists(folder):
        missing.append(folder)
        folder = folder.parent
    return missing[::-1]


def _check_runs_dir(runs: Path) -> None:
    """A user who may replace entries of the folder could put a run directory of their own in our place."""
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
            f"{runs} has {free >> 10} KiB free, too little for a run; make room, or give another folder with --runs-dir"
        )


def _check_new(path: Path) -> None:
    try:
        info = os.lstat(path)
    except FileNotFoundError:
        return
    what = "a symbolic link" if stat.S_ISLNK(info.st_mode) else "there already"
    raise UsageError(f"the run directory {path} is {what}; choose another --run-id, or remove it")


def _failed(path: Path, error: OSError) -> UsageError:
    if error.errno in _FULL:
        why = "the disk is full, or your quota is used up"
    elif error.errno == errno.EACCES:
        why = "you may not write there"
    else:
        why = (error.strerror or str(error)).lower()
    return UsageError(f"can't make the run directory {path}: {why}; choose another folder with --runs-dir")


def _remove_empty(folders: list[Path]) -> None:
    for folder in reversed(folders):
        try:
            os.rmdir(folder)
        except OSError:
            return


def filesystem_type(real: str, *, mountinfo: str = "/proc/self/mountinfo") -> str | None:
    """What `real`, a path without links, is on: the longest mount point above it, the last one mounted there."""
    best, kind = -1, None
    try:
        with open(mountinfo, encoding="utf-8", errors="surrogateescape") as file:
            for line in file:
                left, _, right = line.partition(" - ")
                cells = left.split(" ")
                if len(cells) < 5 or not right:
                    continue
                mount = _unescaped(cells[4])
                inside = real == mount or real.startswith(mount.rstrip("/") + "/")
                if inside and len(mount) >= best:
                    best, kind = len(mount), right.split(" ")[0]
    except OSError:
        return None
    return kind


def _unescaped(text: str) -> str:
    for code, char in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        text = text.replace(code, char)
    return text
