"""Starting workers, and learning how they ended.

A worker leads its own session, gets SIGKILL when the agent dies, and finds signals, umask and core limit as the user's
shell left them. An ended worker stays a zombie until `WorkerProcess.release`: that keeps its pid, and so the number of
its process group, from being reused while signals are still sent to the group.
"""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from contextlib import suppress
from typing import NoReturn

from msgspec import Struct

from hpc_elastic.base.clock import Clock, uptime_ns
from hpc_elastic.base.loop import wait_readable
from hpc_elastic.errors import HpcElasticError
from hpc_elastic.workers import linux, tree
from hpc_elastic.workers.linux import SPARE

_F_SETPIPE_SZ = 1031  # fcntl.F_SETPIPE_SZ, which some builds lack
_DEFAULT_PIPE = 64 << 10
_LARGEST_PIPE = 1 << 20
# A user without privileges may hold 64 MiB of pipes (fs.pipe-user-pages-soft); past that, *every* new pipe of theirs
# has one page, the training script's own included. So an agent takes a quarter of it at most.
_ALL_PIPES = 16 << 20
EXEC_WAIT_S = 5.0
_LOST_STATUS = 255
_CPUS = "its CPUs"
"""Reported in place of a path."""


class Inherited(Struct, frozen=True, kw_only=True):
    umask: int
    core_limit: tuple[int, int]
    """Soft and hard, as of `file_limit`."""
    subreaper: bool
    """Orphaned descendants come to this process. False in a sandbox that refuses it."""
    file_limit: tuple[int, int] | None = None
    """Soft and hard RLIMIT_NOFILE; None: as they are."""


class EnvironmentChange(Struct, frozen=True, kw_only=True):
    put: Mapping[str, str] = {}
    unset: frozenset[str] = frozenset()
    python: str = ""
    """The interpreter that it has put first on PATH; empty: the one that was first still is."""

    def command(self, argv: Sequence[str]) -> list[str]:
        """`argv` by that interpreter where it would be by this process' own, which no one has chosen."""
        return [self.python, *argv[1:]] if self.python and argv[0] == sys.executable else list(argv)

    def apply(self, env: Mapping[str, str]) -> dict[str, str]:
        return {**{name: value for name, value in env.items() if name not in self.unset}, **self.put}


NO_CHANGE = EnvironmentChange()


class ExitStatus(Struct, frozen=True, kw_only=True):
    exitcode: int
    """0–255, or minus the signal's number, as `subprocess` has it."""
    core_dumped: bool
    observed_ns: int
    """This host's wall clock, nanoseconds since the epoch, when its end was seen."""
    observed_uptime_ns: int
    """The same moment by the clock that nobody sets (`hpc_elastic.base.clock.uptime_ns`)."""
    lost: bool = False
    """Another part of this process took the status; `exitcode` is 255 then: an unknown end is no success."""


def exit_status_now(exitcode: int, clock: Clock, *, core_dumped: bool = False, lost: bool = False) -> ExitStatus:
    return ExitStatus(
        exitcode=exitcode,
        core_dumped=core_dumped,
        observed_ns=clock.time_ns(),
        observed_uptime_ns=uptime_ns(clock),
        lost=lost,
    )


class WorkerProcess:
    """`pidfd` is readable once it has ended; None on an old kernel: go by SIGCHLD then."""

    def __init__(self, *, pid: int, pidfd: int | None, stdout_fd: int, stderr_fd: int, clock: Clock) -> None:
        self.pid = pid
        self.pidfd = pidfd
        self.stdout_fd = stdout_fd
        self.stderr_fd = stderr_fd
        self.exit_status: ExitStatus | None = None
        self.is_released = False
        self._clock = clock

    def poll(self) -> ExitStatus | None:
        """None while it runs. Leaves the zombie; may be called any number of times."""
        if self.exit_status is None:
            try:
                info = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                self.is_released = True
                self.exit_status = exit_status_now(_LOST_STATUS, self._clock, lost=True)
            else:
                if info is not None:
                    code = info.si_status if info.si_code == os.CLD_EXITED else -info.si_status
                    is_dumped = info.si_code == os.CLD_DUMPED
                    self.exit_status = exit_status_now(code, self._clock, core_dumped=is_dumped)
        return self.exit_status

    def signal_group(self, signal_number: int) -> None:
        """Nothing happens after `release`: the group's number could be another's then."""
        if self.is_released:
            return
        with suppress(ProcessLookupError, PermissionError):  # no process left in it, or only set-user-id programs
            os.killpg(self.pid, signal_number)

    def take_output(self) -> tuple[int, int]:
        taken = self.stdout_fd, self.stderr_fd
        self.stdout_fd = self.stderr_fd = -1
        return taken

    def release(self) -> ExitStatus | None:
        """Let the kernel forget it, once its group needs no more signals. None where it still runs."""
        status = self.poll()
        if status is None:
            return None
        if not self.is_released:
            self.is_released = True
            with suppress(ChildProcessError):
                os.waitpid(self.pid, 0)
        self.close()
        return status

    def close(self) -> None:
        """Close our descriptors, and leave the process alone (one that sits in D state cannot be released)."""
        for fd in (self.pidfd, *self.take_output()):
            if fd is not None and fd >= 0:
                os.close(fd)
        self.pidfd = None


def prepare_agent_process() -> Inherited:
    """Make this process fit to be an agent. First thing in the main thread, before any other thread.

    It creates files for its user alone, dumps no core (its memory holds the run's secret), and has descriptors 0 to 2
    open, so that no pipe ever gets one of these numbers. Each worker takes five of the files that it may open.
    """
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            os.set_inheritable(os.open("/dev/null", os.O_RDWR), True)  # the lowest free number: this one
    if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # ignored, the kernel would throw every exit status away
    try:
        linux.set_child_subreaper()
        subreaper = True
    except OSError:
        subreaper = False
    core_limit = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, core_limit[1]))
    file_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):  # a sandbox: then it is as it is
        resource.setrlimit(resource.RLIMIT_NOFILE, (file_limit[1], file_limit[1]))
    SPARE.hold()
    return Inherited(umask=os.umask(0o077), core_limit=core_limit, subreaper=subreaper, file_limit=file_limit)


def pipe_bytes_for(workers: int) -> int:
    share = _ALL_PIPES // (2 * max(1, workers))
    return max(_DEFAULT_PIPE, min(_LARGEST_PIPE, 1 << (share.bit_length() - 1)))


def start_worker(
    *,
    argv: Sequence[str],
    env: Mapping[str, str],
    cwd: str,
    inherited: Inherited,
    clock: Clock,
    pipe_bytes: int = _LARGEST_PIPE,
    exec_wait: float = EXEC_WAIT_S,
    cpus: Collection[int] = (),
    stdin: int | None = None,
) -> WorkerProcess:
    """Start one worker; raises `WorkerStartError`.

    Call it from the main thread: the parent-death signal comes when the *forking thread* ends. `exec_wait`: seconds for
    the program to be there; one on a mount that hangs counts as started then. `stdin` stays the caller's.
    """
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError("start_worker must be called from the main thread: its end would kill the workers")
    opened: list[int] = []
    try:
        try:
            stdout_r, stdout_w, stderr_r, stderr_w = output_pipes(opened, pipe_bytes)
            error_r, error_w = os.pipe()
            opened += (error_r, error_w)
            own, paths, parent = dict(env), candidates(argv[0], env), os.getpid()
            ends = stdout_w, stderr_w, error_w
            pid = _fork(lambda: _become_worker(argv, own, cwd, inherited, paths, parent, ends, cpus, stdin))
        except OSError as error:
            raise WorkerStartError(command=argv[0], reason=_shortage(error), errno=error.errno) from None
        for fd in (stdout_w, stderr_w, error_w):
            opened.remove(fd)
            os.close(fd)
        _check_started(error_r, pid, argv[0], cwd, exec_wait)
        opened.remove(error_r)
        os.close(error_r)
        try:
            pidfd = linux.pidfd_open(pid)
        except OSError as error:  # out of descriptors: a worker that can't be watched must not run
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            reason = f"pidfd: {_shortage(error)}"
            raise WorkerStartError(command=argv[0], reason=reason, errno=error.errno) from None
        opened.clear()
    finally:
        for fd in opened:
            os.close(fd)
    return WorkerProcess(pid=pid, pidfd=pidfd, stdout_fd=stdout_r, stderr_fd=stderr_r, clock=clock)


def reap_orphans(known: Container[int]) -> list[int]:
    """Returns the pids of ended processes that came to this subreaper. Never takes a status that is waited for
    elsewhere: neither that of a pid in `known`, nor that of a `subprocess` child, which is in the agent's own session.
    """
    own_session = os.getsid(0)
    reaped = []
    for pid in tree.children(os.getpid()):
        if pid in known:
            continue
        proc = tree.look_at(pid)
        if proc is None or not proc.is_dead or proc.sid == own_session:
            continue
        with suppress(ChildProcessError):
            if os.waitpid(pid, os.WNOHANG)[0] == pid:
                reaped.append(pid)
    return reaped


def _shortage(error: OSError) -> str:
    if error.errno == errno.EMFILE:
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return f"{error.strerror}: an agent may have {limit} (ulimit -Hn), and needs five for each worker"
    if error.errno == errno.EAGAIN:
        limit = resource.getrlimit(resource.RLIMIT_NPROC)[0]
        most = "any number" if limit == resource.RLIM_INFINITY else str(limit)
        return f"{error.strerror}: this user may have {most} of processes and threads (ulimit -u), a cgroup maybe fewer"
    return f"{error.strerror} (too many processes or open files?)"


def output_pipes(opened: list[int], pipe_bytes: int) -> tuple[int, int, int, int]:
    fds: list[int] = []
    for _ in range(2):
        read_end, write_end = os.pipe()
        opened += (read_end, write_end)
        fds += (read_end, write_end)
        os.set_blocking(read_end, False)  # the write end, another open file, goes on blocking
        if pipe_bytes > _DEFAULT_PIPE:
            with suppress(OSError):  # over the user's share: it works at its usual size too
                fcntl.fcntl(write_end, _F_SETPIPE_SZ, pipe_bytes)
    return fds[0], fds[1], fds[2], fds[3]


def _fork(become: Callable[[], NoReturn]) -> int:
    """`become` raises nothing: it would go on as a second agent."""
    # Blocked across the fork: a handler of ours must not run in the child, where it would write into our wake-up pipe.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        with warnings.catch_warnings():
            if sys.version_info >= (3, 12):
                # "multi-threaded, fork may deadlock": the child below calls nothing that takes another thread's lock.
                warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if pid == 0:
            become()
        return pid
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _become_worker(
    argv: Sequence[str],
    env: dict[str, str],
    cwd: str,
    inherited: Inherited,
    paths: list[str],
    parent: int,
    fds: tuple[int, int, int],
    cpus: Collection[int],
    stdin: int | None,
) -> NoReturn:
    path, error_w = cwd, fds[2]
    try:
        os.setsid()
        linux.set_parent_death_signal(signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(127)  # the agent died before the line above
        os.chdir(cwd)
        path = _CPUS
        if cpus:
            os.sched_setaffinity(0, cpus)
        path = paths[0]
        os.dup2(os.open("/dev/null", os.O_RDONLY) if stdin is None else stdin, 0)
        os.dup2(fds[0], 1)
        os.dup2(fds[1], 2)
        if error_w != 3:
            os.dup2(error_w, 3, inheritable=False)
            error_w = 3
        linux.close_from(4)
        os.umask(inherited.umask)
        resource.setrlimit(resource.RLIMIT_CORE, inherited.core_limit)
        if inherited.file_limit is not None:
            hard = min(inherited.file_limit[1], resource.getrlimit(resource.RLIMIT_NOFILE)[1])  # lowered meanwhile?
            resource.setrlimit(resource.RLIMIT_NOFILE, (min(inherited.file_limit[0], hard), hard))
        linux.reset_signals()
        code, path = _exec_first(paths, argv, env)
    except OSError as error:
        code = error.errno or errno.EIO
    except BaseException:
        code = errno.EINVAL
    try:
        os.write(error_w, f"{code} {path}".encode("utf-8", "surrogateescape"))
    finally:
        os._exit(127)


def _exec_first(paths: list[str], argv: Sequence[str], env: dict[str, str]) -> tuple[int, str]:
    """Run the first of `paths` that can be. Returns, with the errno and path to report, only where none can."""
    reported = (errno.ENOENT, paths[-1])
    for path in paths:
        try:
            os.execve(path, list(argv), env)
        except OSError as error:
            code = error.errno or errno.EIO
            if code == errno.EACCES:
                reported = (code, path)  # found, but not executable: says more than "not found in the last folder"
            elif code not in (errno.ENOENT, errno.ENOTDIR):
                return code, path
    return reported


def _check_started(error_r: int, pid: int, command: str, cwd: str, exec_wait: float) -> None:
    # The pipe closes itself when the program is executed. A program on a hung mount would keep us here: after a while
    # the worker counts as started, and is watched like any other.
    if not wait_readable([error_r], exec_wait):
        return
    raw = os.read(error_r, 65536)
    if not raw:
        return
    os.waitpid(pid, 0)
    code, _, path = raw.decode("utf-8", "surrogateescape").partition(" ")
    there = os.path.exists(os.path.join(cwd, path))
    raise exec_failure(command=command, cwd=cwd, path=path, code=int(code), path_exists=there)


def describe_exitcode(exitcode: int) -> str:
    if exitcode >= 0:
        return f"exit code {exitcode}"
    try:
        return signal.Signals(-exitcode).name
    except ValueError:
        return f"signal {-exitcode}"


class WorkerStartError(HpcElasticError):
    """A worker's process could not be started. `errno` is the system's code; `command` is what was to run."""

    template = "cannot start {command!r}: {reason}"

    @property
    def is_passing(self) -> bool:
        """A shortage, of which there may be none at the next try."""
        return self.errno in (errno.EAGAIN, errno.ENOMEM, errno.ENFILE, errno.EMFILE)


def candidates(command: str, env: Mapping[str, str]) -> list[str]:
    """The paths to try for `command`, in order, as execvp does; relative ones mean: from the working directory."""
    if "/" in command:
        return [command]
    return [os.path.join(folder or ".", command) for folder in env.get("PATH", os.defpath).split(":")]


def find_program(command: str, env: Mapping[str, str] | None = None) -> str | None:
    for path in candidates(command, os.environ if env is None else env):
        if os.access(path, os.X_OK) and not os.path.isdir(path):
            return path
    return None


def exec_failure(*, command: str, cwd: str, path: str, code: int, path_exists: bool) -> WorkerStartError:
    if code == errno.EACCES and "/" not in command and not path_exists:
        code = errno.ENOENT  # not that file is forbidden, but a folder in PATH is closed to us
    text = os.strerror(code)
    if path == _CPUS:
        reason = f"it can't be bound to the CPUs that it was to have: {text}"
    elif path == cwd:
        reason = f"its working directory {cwd!r} cannot be entered: {text}"
    elif code == errno.ENOENT and path_exists:
        reason = f"{path!r} is there, but the interpreter that its first line ('#!') names is not"
    elif code in (errno.ENOENT, errno.ENOTDIR) and "/" not in command:
        reason = "no such command in PATH; give its path, or load the module or environment that has it"
    elif code in (errno.ENOENT, errno.ENOTDIR):
        reason = f"there is no such file (looked from {cwd!r})"
    elif code == errno.EACCES:
        reason = f"{path!r} may not be executed: {text}; run: chmod +x {path}"
    elif code == errno.ENOEXEC:
        reason = f"{path!r} is not a program: no '#!' in its first line, or built for another machine"
    elif code == errno.E2BIG:
        reason = "its arguments and environment are longer than this system allows together"
    else:
        reason = f"{path}: {text}"
    return WorkerStartError(command=command, reason=reason, errno=code)
