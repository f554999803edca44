"""The process of a fork server, as its agent starts it: with all that its workers have in common."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from msgspec import Struct

from hpc_elastic.base.file_executor import FileExecutor
from hpc_elastic.base.self_command import idle_arguments
from hpc_elastic.workers import fork_server as program
from hpc_elastic.workers import import_watch
from hpc_elastic.workers.spawn import Inherited

_LOG_SECONDS = 2.0
_LONGEST_SCRIPT = 1 << 20


class Launch(Struct, frozen=True, kw_only=True):
    """What a server is started with: all that its workers have in common."""

    argv: Sequence[str]
    """Of each worker: interpreter, ``-u``, script or ``-m`` module, arguments."""
    environ: Mapping[str, str]
    """Of each worker, without what differs between ranks or rounds."""
    watched: Sequence[str]
    """The names of the variables that do."""
    cwd: str
    inherited: Inherited
    folder: Path | None
    """Node-local, the agent's own; None: there is none, and so no server."""
    log_path: Path
    """For what the server itself prints."""
    pipe_bytes: int
    """Capacity of each worker's output pipes."""
    preload_path: Path | None = None
    """Where what is learned is kept."""
    refusal: str = ""
    """Why these workers can't be forks; "" where they can."""


def start_process(launch: Launch, files: FileExecutor) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start a server. Returns its process, and the agent's end of the socket to it.

    Raises:
        OSError: it can't be started.
    """
    folder, inherited = launch.folder, launch.inherited
    assert folder is not None
    (folder / "sitecustomize.py").write_bytes(Path(program.__file__).read_bytes())
    (folder / "hpc_elastic_import_watch.py").write_bytes(Path(import_watch.__file__).read_bytes())
    (folder / "__pycache__").touch()  # a file: where Python would make a folder, which nobody removes
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        log = files.do(lambda: os.open(launch.log_path, flags, 0o600), within=_LOG_SECONDS)
    except OSError:
        log = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
    limits = {"RLIMIT_CORE": inherited.core_limit}
    if inherited.file_limit is not None:
        limits["RLIMIT_NOFILE"] = inherited.file_limit
    given = launch.environ.get("PYTHONPATH")
    config = {
        "stage": 1,
        "fd": theirs.fileno(),
        "log": log,
        "agent": os.getpid(),
        "argv": list(launch.argv),
        "cwd": launch.cwd,
        "umask": inherited.umask,
        "limits": limits,
        "pythonpath": given,
        "folder": folder_of(launch.argv, launch.cwd),
    }
    pipe = os.pipe()  # as a worker's output is, until the server has its log there
    try:
        process = subprocess.Popen(
            [launch.argv[0], *idle_arguments()],
            stdin=subprocess.DEVNULL,
            stdout=pipe[1],
            stderr=pipe[1],
            pass_fds=(theirs.fileno(), log),
            env={
                **launch.environ,
                "PYTHONPATH": f"{folder}:{given}" if given else str(folder),
                program.CONFIG: json.dumps(config),
            },
            start_new_session=True,
            preexec_fn=_default_signals,
        )
    except OSError:
        ours.close()
        raise
    finally:
        theirs.close()
        for fd in (log, *pipe):
            os.close(fd)
    ours.setblocking(False)
    return process, ours


def script_text(argv: Sequence[str], cwd: str) -> str:
    """What the workers run, as a text; "" where it can't be read, or a module is not below the working directory."""
    for path in scripts_of(argv, cwd):
        try:
            with open(path, encoding="utf-8", errors="replace") as file:
                return file.read(_LONGEST_SCRIPT)
        except OSError:
            continue
    return ""


def scripts_of(argv: Sequence[str], cwd: str) -> list[str]:
    """Where the script may be; a module below the working directory."""
    if argv[2] != "-m":
        return [os.path.join(cwd, argv[2])]
    path = os.path.join(cwd, *argv[3].split("."))
    return [f"{path}.py", os.path.join(path, "__main__.py")]


def folder_of(argv: Sequence[str], cwd: str) -> str:
    """What a worker has as ``sys.path[0]``."""
    return cwd if argv[2] == "-m" else os.path.dirname(os.path.realpath(os.path.join(cwd, argv[2])))


def _default_signals() -> None:
    """Between fork and exec: what a nohup or the agent ignores is not ignored by the workers."""
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        try:
            signal.signal(number, signal.SIG_DFL)
        except (OSError, ValueError):
            continue
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
