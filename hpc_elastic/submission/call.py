"""The function that a run calls on each of its workers, and what it returned, as files of the run directory.

A file holds a line of JSON, for readers that only look, and a pickle behind it. Nothing is unpickled that another user
could have written: the file must be this user's, no link, and no copy. A copy belongs to the user who copied; so each
file holds its own inode number, which no copy has.
"""

from __future__ import annotations

import json
import os
import pickle
import runpy
import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Mapping
from io import BufferedReader
from pathlib import Path
from typing import Any

from msgspec import Struct, field

from hpc_elastic.base import codec
from hpc_elastic.base.files import Owner, ask_about, names_in, open_checked, read_again
from hpc_elastic.base.host_facts import filesystem_type
from hpc_elastic.errors import UnreadableFileError, UnsafePathError, UsageError
from hpc_elastic.run.paths import AttemptPaths, RankPaths, RunPaths, rank_index, round_index
from hpc_elastic.worker_api import heartbeat

TRUST_VARIABLE = "HPC_ELASTIC_TRUST_COPIES"
_MADE = "made"


class UnreadableObjectError(UnreadableFileError):
    """Missing, torn, of a newer version, or with objects that can't be made again here."""


def write_object(path: Path, head: Mapping[str, Any], value: object) -> int:
    """Write whole or not at all, mode 0600, without a second copy of a huge value in memory. Returns the size in bytes.

    Raises what a user's object raises when it is taken apart, or OSError.
    """
    import cloudpickle

    temporary = path.with_name(f".{path.name}.{os.getpid()}.{os.urandom(4).hex()}")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        with open(fd, "wb") as file:
            made = {"inode": os.fstat(fd).st_ino, "path": os.path.abspath(path)}
            file.write(json.dumps({"version": codec.VERSION, **head, _MADE: made}).encode() + b"\n")
            cloudpickle.dump(value, file, protocol=pickle.HIGHEST_PROTOCOL)
            size = file.tell()
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
    return size


def read_head(path: Path) -> dict[str, Any]:
    with _open(path) as file:
        return _head(path, file)


def read_object(path: Path) -> Any:
    """Raises UnreadableObjectError; UnsafePathError: another user may be its writer."""
    with _open(path) as file:
        if not _was_made_here(path, file, _head(path, file).get(_MADE)) and not os.environ.get(TRUST_VARIABLE):
            raise UnsafePathError(
                f"{path} is a copy, and is not unpickled, since another user may have written the original; "
                f"if you trust it, set {TRUST_VARIABLE}=1"
            )
        try:
            return pickle.load(file)
        except Exception as error:
            why = f"can't be unpickled: {type(error).__name__}: {error}"
            raise UnreadableObjectError(path=str(path), why=why) from error


def _open(path: Path) -> BufferedReader:
    try:
        fd = read_again(lambda: open_checked(path, owner=Owner.OWN), path.parent)
    except OSError as error:
        why = error.strerror or str(error)
        raise UnreadableObjectError(path=str(path), why=why.lower(), errno=error.errno) from None
    if os.fstat(fd).st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        os.close(fd)
        raise UnsafePathError(f"{path} can be written by other users, and is not unpickled")
    return open(fd, "rb")


def _was_made_here(path: Path, file: BufferedReader, made: object) -> bool:
    if not isinstance(made, dict):
        return False
    if made.get("inode") == os.fstat(file.fileno()).st_ino:
        return True
    # Many FUSE filesystems number their files anew on each mount (sshfs does): there the path alone is left.
    kind = filesystem_type(os.path.realpath(path)) or ""
    try:
        return kind.startswith("fuse") and os.path.samefile(str(made.get("path", "")), path)
    except (OSError, ValueError):
        return False


def _head(path: Path, file: BufferedReader) -> dict[str, Any]:
    try:
        value = json.loads(file.readline(4 << 20))
    except ValueError as error:
        raise UnreadableObjectError(path=str(path), why=f"torn: {error}") from None
    if not isinstance(value, dict) or codec.version_problem(value):
        raise UnreadableObjectError(path=str(path), why="is of a version that this program does not know")
    return value


class CallTerms(Struct, frozen=True, kw_only=True):
    """A call's terms besides the function itself. Travels as JSON."""

    name: str
    folder: str
    timeout_min: float = 0.0
    """The time limit of one attempt, minutes; 0: unknown."""
    timeouts_left: int = 3
    """Number of further requeues because the job's time was over."""
    stderr_to_stdout: bool = False
    exceptions_are_final: bool = False
    """An exception of the function ends the run: no restart, no requeue."""
    sys_path: tuple[str, ...] = ()
    """The submitting program's module folders, beyond its interpreter's own."""


def is_timed_out(ran: float, *, limit: float) -> bool:
    """submitit's rule: after four fifths of the limit (0: none), or up to ten minutes before its end."""
    return limit > 0 and ran >= min(limit * 0.8, limit - 600)


class Call(Struct, frozen=True):
    """``function(*args, **kwargs)``."""

    function: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self) -> Any:
        return self.function(*self.args, **self.kwargs)

    @property
    def checkpoint(self) -> Callable[..., Any] | None:
        """The callable's own way to go on elsewhere, by submitit's protocol; None: it has none."""
        found = getattr(self.function, "__submitit_checkpoint__", None) or getattr(self.function, "checkpoint", None)
        return found if callable(found) else None


def function_name(function: object) -> str:
    function = getattr(function, "func", function)  # of a functools.partial
    name = getattr(function, "__qualname__", None) or type(function).__qualname__
    return str(name).replace("<locals>.", "")


def write_call(path: Path, call: Call, terms: CallTerms) -> int:
    """Raises UsageError: the function or an argument can't be handed to another process."""
    try:
        return write_object(path, codec.to_json(terms), (call.function, call.args, dict(call.kwargs)))
    except OSError:
        raise
    except Exception as error:
        raise UsageError(
            f"the function {terms.name}, or one of its arguments, can't be handed to another process: {error}; "
            "open files, locks and connections must be made inside of it"
        ) from error


def read_terms(path: Path) -> CallTerms:
    head = read_head(path)
    try:
        return codec.from_json(CallTerms, head)
    except codec.UnreadableRecordError as error:
        raise UnreadableObjectError(path=str(path), why=f"torn: {error}") from None


def read_call(path: Path) -> Call:
    function, args, kwargs = read_object(path)
    return Call(function, tuple(args), dict(kwargs))


def own_sys_path() -> tuple[str, ...]:
    """The workers' interpreter may be another one, whose standard library is elsewhere."""
    own = {os.path.realpath(prefix) for prefix in (sys.prefix, sys.base_prefix, sys.exec_prefix)}
    found = []
    for entry in sys.path:
        path = os.path.abspath(entry)
        real = os.path.realpath(path)
        # /usr holds homes of some clusters: of it, only lib is the interpreter's.
        if real not in own and not any(f"{real}/".startswith(os.path.join(prefix, "lib", "")) for prefix in own):
            found.append(path)
    return tuple(dict.fromkeys(found))


class _Program:
    """A program that runs as ``__main__`` in the worker itself. Its exceptions, and an exit code other than 0, fail it.
    After a restart or a requeue it begins anew, and goes on from its own checkpoint.
    """

    __qualname__: str

    def _run(self, arguments: list[str]) -> None:
        raise NotImplementedError

    def __call__(self, *args: object) -> None:
        before = sys.argv, sys.path
        try:
            self._run([*map(str, args)])
        except SystemExit as leave:
            # Only the program's own: what leaves because of a notice is of another class.
            if type(leave) is not SystemExit or leave.code not in (None, 0):
                raise
        finally:
            sys.argv, sys.path = before

    @property
    def checkpoint(self) -> Callable[..., Any] | None:
        return None if heartbeat.reporter.asks_for_notices else self._again

    def _again(self, *args: object) -> Any:
        try:
            from submitit.core.utils import DelayedSubmission
        except ImportError:  # a worker needs no submitit
            return Call(self, args)
        return DelayedSubmission(self, *args)


class Script(_Program):
    """``executor.submit(Script("train.py"), "--epochs", 90)``: what ``hpc-elastic submit train.py --epochs 90`` runs.

    ``__name__`` is ``"__main__"``, ``sys.argv`` and ``sys.path`` are as under ``python train.py``.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Take a file that all nodes see. Raises UsageError: there is none."""
        self.path = os.path.abspath(path)
        if not os.path.isfile(self.path):
            raise UsageError(f"there is no script {self.path}")
        self.__qualname__ = os.path.basename(self.path)

    def _run(self, arguments: list[str]) -> None:
        sys.argv = [self.path, *arguments]
        sys.path = [os.path.dirname(self.path), *sys.path]
        runpy.run_path(self.path, run_name="__main__")


class Module(_Program):
    """``executor.submit(Module("package.train"), "--epochs", 90)``: as ``python -m package.train --epochs 90``."""

    def __init__(self, name: str) -> None:
        """`name` must be importable in the workers."""
        self.name = name
        self.__qualname__ = name.rpartition(".")[2] or name

    def _run(self, arguments: list[str]) -> None:
        sys.argv = [self.name, *arguments]
        sys.path = ["", *sys.path]
        runpy.run_module(self.name, run_name="__main__", alter_sys=True)


class Command(_Program):
    """A command and its first arguments: a child of each worker, whose exit code or signal becomes the worker's."""

    def __init__(self, *argv: str) -> None:
        self.argv = argv
        self.__qualname__ = os.path.basename(argv[0])

    @property
    def checkpoint(self) -> None:
        """The child hears of a notice itself: it asks for it, or has a handler for the signal."""
        return None

    def _run(self, arguments: list[str]) -> None:
        # Without a handler of this process' own, the agent signals the descendant that has one.
        before = signal.signal(signal.SIGUSR2, signal.SIG_DFL)
        try:
            code = subprocess.run([*self.argv, *arguments], check=False).returncode
        finally:
            signal.signal(signal.SIGUSR2, before)
        if code < 0:
            signal.signal(-code, signal.SIG_DFL)
            os.kill(os.getpid(), -code)
        sys.exit(code)


def rounds(attempt: AttemptPaths) -> list[int]:
    return sorted(number for name in _names(attempt.root) if (number := round_index(name)) is not None)


def ranks(folder: Path) -> list[int]:
    names = (name.removesuffix(".pkl") for name in _names(folder))
    return sorted(rank for name in names if (rank := rank_index(name)) is not None)


class RoundPlace(Struct, frozen=True, kw_only=True):
    attempt: AttemptPaths
    round: int

    def rank(self, rank: int) -> RankPaths:
        return self.attempt.rank(self.round, rank)


def newest_round(paths: RunPaths) -> RoundPlace | None:
    for attempt in reversed(paths.begun_attempts()):
        found = rounds(attempt)
        if found:
            return RoundPlace(attempt=attempt, round=found[-1])
    return None


def _names(folder: Path) -> list[str]:
    ask_about(folder)
    try:
        return names_in(folder)
    except OSError:
        return []


FOLDER_VARIABLE = "SUBMITIT_FOLDER"
JOB_VARIABLE = "HPC_ELASTIC_JOB_ID"
"""Names the job in a submitted function's worker, as `ElasticJob.job_id` has it."""


class WorkerPlace(Struct, frozen=True, kw_only=True):
    run_dir: Path
    attempt: int
    round: int
    rank: int
    world_size: int

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> WorkerPlace:
        """Raises UsageError where this is no worker of a run."""
        try:
            return cls(
                run_dir=Path(env["HPC_ELASTIC_RUN_DIR"]),
                attempt=int(env["HPC_ELASTIC_ATTEMPT"]),
                round=int(env["TORCHELASTIC_RESTART_COUNT"]),
                rank=int(env["RANK"]),
                world_size=int(env["WORLD_SIZE"]),
            )
        except (KeyError, ValueError) as error:
            raise UsageError(f"this is no worker of a run ({error}): an agent starts hpc_elastic's workers") from None


def submitit_variables(env: Mapping[str, str], place: WorkerPlace, terms: CallTerms) -> dict[str, str]:
    array, task = env.get("SLURM_ARRAY_JOB_ID"), env.get("SLURM_ARRAY_TASK_ID")
    job_id = f"{array}_{task}" if array and task else env.get("SLURM_JOB_ID") or place.run_dir.name
    return {"SUBMITIT_EXECUTOR": "elastic", FOLDER_VARIABLE: terms.folder, JOB_VARIABLE: job_id}
