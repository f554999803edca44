"""Starts the process of a fork server, with all that its workers have in common, and holds its forks at their gates."""

from __future__ import annotations

import ast
import json
import os
import socket
import subprocess
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

from msgspec import Struct

from hpc_elastic.base.clock import Clock
from hpc_elastic.base.host_facts import idle_arguments
from hpc_elastic.base.loop import FileExecutor
from hpc_elastic.workers import fork_server as program
from hpc_elastic.workers import import_watch, linux
from hpc_elastic.workers.spawn import Inherited, WorkerProcess, output_pipes

_LOG_SECONDS = 2.0
_LONGEST_SCRIPT = 1 << 20


class Launch(Struct, frozen=True, kw_only=True):
    argv: Sequence[str]
    """Interpreter, ``-u``, script or ``-m`` module, arguments."""
    environ: Mapping[str, str]
    """The workers' environment, without what differs between ranks or rounds."""
    watched: Sequence[str]
    """The names of the variables that do."""
    cwd: str
    inherited: Inherited
    folder: Path | None
    """Node-local, the agent's own; None: there is none, and so no server."""
    log_path: Path
    pipe_bytes: int
    preload_path: Path | None = None
    refusal: str = ""
    """Why these workers can't be forks; "" where they can."""


def start_process(launch: Launch, files: FileExecutor) -> tuple[subprocess.Popen[bytes], socket.socket]:
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
            preexec_fn=linux.reset_signals,
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
    """Empty where it can't be read, or a module is not below the working directory."""
    for path in scripts_of(argv, cwd):
        try:
            with open(path, encoding="utf-8", errors="replace") as file:
                return file.read(_LONGEST_SCRIPT)
        except OSError:
            continue
    return ""


def scripts_of(argv: Sequence[str], cwd: str) -> list[str]:
    if argv[2] != "-m":
        return [os.path.join(cwd, argv[2])]
    path = os.path.join(cwd, *argv[3].split("."))
    return [f"{path}.py", os.path.join(path, "__main__.py")]


def folder_of(argv: Sequence[str], cwd: str) -> str:
    return cwd if argv[2] == "-m" else os.path.dirname(os.path.realpath(os.path.join(cwd, argv[2])))


class PendingFork:
    def __init__(self, env: Mapping[str, str], cpus: frozenset[int], pipe_bytes: int, clock: Clock) -> None:
        self.env, self._cpus = env, cpus
        self.why = ""
        self.gate: socket.socket | None = None
        self.theirs: list[int] = []
        self._pipe_bytes = pipe_bytes
        self._clock = clock
        self._read_ends: list[int] = []
        self._pid = 0

    def open(self) -> None:
        opened: list[int] = []
        try:
            stdout_r, stdout_w, stderr_r, stderr_w = output_pipes(opened, self._pipe_bytes)
        except OSError:
            for fd in opened:
                os.close(fd)
            raise
        self._read_ends = [stdout_r, stderr_r]
        self.theirs = [stdout_w, stderr_w]
        self.gate, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.theirs.append(other.detach())

    def close_theirs(self) -> None:
        for fd in self.theirs:
            os.close(fd)
        self.theirs = []

    def hear(self) -> None:
        assert self.gate is not None
        try:
            raw = self.gate.recv(program.MESSAGE_LIMIT)
        except OSError:
            raw = b""
        message = json.loads(raw) if raw else {}
        self._pid = int(message.get("pid", 0))
        self.why = str(message.get("why", "")) or ("" if self._pid else "the fork ended before it was a worker")

    def take(self) -> WorkerProcess | None:
        if self.why or not self._pid or self.gate is None:
            return None
        try:
            # Raises where the process is not this agent's child.
            os.waitid(os.P_PID, self._pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            pidfd = linux.pidfd_open(self._pid)
        except OSError as error:
            self.why = f"the fork can't be watched: {error.strerror}"
            return None
        try:
            if self._cpus:
                os.sched_setaffinity(self._pid, self._cpus)  # at its gate it has one thread
        except OSError as error:
            self.why = f"the fork can't be bound to its CPUs: {error.strerror}"
            if pidfd is not None:
                os.close(pidfd)
            return None
        try:
            self.gate.send(b"g")
        except OSError:
            pass  # it has ended already: a worker that failed at once
        stdout, stderr = self._read_ends
        self._read_ends = []
        return WorkerProcess(pid=self._pid, pidfd=pidfd, stdout_fd=stdout, stderr_fd=stderr, clock=self._clock)

    def close(self) -> None:
        """A worker that has not been let go ends."""
        self.close_theirs()
        for fd in self._read_ends:
            os.close(fd)
        if self.gate is not None:
            self.gate.close()


_READ_BY_LIBRARIES = ("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "NUMEXPR_")


def top_level_imports(source: str) -> list[str]:
    return list(dict.fromkeys(root for statement in _statements(source) for root in _imports_of(statement)))


def late_settings(source: str, *, imported: Collection[str], reads: Mapping[str, str]) -> list[str]:
    """`imported`: modules that were imported beforehand. `reads`: variable → the module whose import has read it."""
    roots = {name.partition(".")[0] for name in imported}
    found = []
    for statement in _flat(_statements(source)):
        if roots & set(_imports_of(statement)):
            break
        found += [
            f"line {statement.lineno} sets {name}, which {reads.get(name, 'a library')} has read already, since it "
            "is preloaded; set it in the job's environment, or leave the module out of --preload"
            for name in _set_variables(statement)
            if name in reads or name.startswith(_READ_BY_LIBRARIES)
        ]
    return found


def _statements(source: str) -> list[ast.stmt]:
    try:
        return ast.parse(source).body
    except (SyntaxError, ValueError, RecursionError):
        return []


def _imports_of(statement: ast.stmt) -> list[str]:
    if isinstance(statement, ast.Import):
        return [alias.name.partition(".")[0] for alias in statement.names]
    if isinstance(statement, ast.ImportFrom) and not statement.level and statement.module:
        return [statement.module.partition(".")[0]]
    return []


def _flat(statements: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements inside if, for, try and with count, those of functions don't."""
    for statement in statements:
        yield statement
        if not isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            for name in ("body", "handlers", "orelse", "finalbody"):
                yield from _flat(getattr(statement, name, ()))


def _set_variables(statement: ast.stmt) -> list[str]:
    keys: list[ast.expr | None] = []
    if isinstance(statement, (ast.Assign, ast.Delete)):
        keys += [
            target.slice
            for target in statement.targets
            if isinstance(target, ast.Subscript) and _is_environ(target.value)
        ]
    elif (
        isinstance(statement, ast.AugAssign) and _is_environ(statement.target) and isinstance(statement.value, ast.Dict)
    ):
        keys += statement.value.keys
    elif isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        call, function = statement.value, statement.value.func
        if isinstance(function, ast.Attribute) and (function.attr == "putenv" or _is_environ(function.value)):
            if function.attr in ("putenv", "setdefault", "pop"):
                keys += call.args[:1]
            elif function.attr == "update":
                keys += [key for each in call.args if isinstance(each, ast.Dict) for key in each.keys]
                keys += [ast.Constant(keyword.arg) for keyword in call.keywords]
    return [key.value for key in keys if isinstance(key, ast.Constant) and isinstance(key.value, str)]


def _is_environ(node: ast.expr) -> bool:
    return (isinstance(node, ast.Attribute) and node.attr == "environ") or (
        isinstance(node, ast.Name) and node.id == "environ"
    )
