"""Runs a command of the user's own in bounded time: health checks, ``--setup``, hooks and notifications.

It is started in the main thread, as a worker is (a session of its own, killed when this process dies), and attended by
another thread: nothing waits for it that has anything else to do. When it has ended, or its time is over, all that it
has started is ended too. The end of what it printed is kept.
"""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from msgspec import Struct

from hpc_elastic.base.clock import Clock
from hpc_elastic.base.loop import start_thread, wait_readable
from hpc_elastic.workers import spawn, tree
from hpc_elastic.workers.spawn import EnvironmentChange, Inherited, WorkerProcess, find_program, start_worker
from hpc_elastic.workers.tree import JOB_VARIABLE

TOKEN_VARIABLE = "HPC_ELASTIC_COMMAND_TOKEN"
"""Marks a command's process and all that it starts; another value each time."""
EXEC_SECONDS = 0.5
END_SECONDS = 2.0
KEPT_OUTPUT = 65536
_LOOK_SECONDS = 0.05
_PIPE = 65536
_BASH = "/bin/bash"
_SHELL_NAME = "hpc-elastic"
_OWN_PLACE = re.compile(rf"^{_SHELL_NAME}: (?:eval: )?line \d+: ")
"""The place in the text that bash was given, in front of its own messages: it is not the user's."""


class CommandEnd(Struct, frozen=True, kw_only=True):
    exitcode: int
    """-9 where its time was over; else as `subprocess` has it."""
    stdout: bytes = b""
    stderr: bytes = b""
    seconds: float = 0.0
    is_late: bool = False
    """It was ended since its time was over."""


class UserCommand:
    def __init__(
        self, process: WorkerProcess, env: Mapping[str, str], *, cancelled: threading.Event, kept: int = KEPT_OUTPUT
    ) -> None:
        self._process = process
        self._marks = {name: env.get(name) for name in (TOKEN_VARIABLE, JOB_VARIABLE)}
        self._cancelled = cancelled
        self._kept = kept
        self.is_gone = False

    @classmethod
    def start(
        cls,
        argv: Sequence[str],
        *,
        environ: Mapping[str, str],
        cwd: str,
        inherited: Inherited,
        clock: Clock,
        stdin: bytes | None = None,
        cancelled: threading.Event | None = None,
        kept: int = KEPT_OUTPUT,
    ) -> UserCommand:
        """Main thread alone; raises `WorkerStartError`. `cancelled`: set when no one wants its end any more;
        None: `kill` does the same. `kept`: bytes of each stream that are kept, the last ones.
        """
        env = {**environ, TOKEN_VARIABLE: os.urandom(8).hex()}
        fd = None
        if stdin is not None:  # a file, so that no one has to write while it is read
            fd = os.memfd_create("hpc-elastic-input", os.MFD_CLOEXEC)
            view = memoryview(stdin)
            while view:
                view = view[os.write(fd, view) :]
            os.lseek(fd, 0, os.SEEK_SET)
        try:
            process = start_worker(
                argv=argv, env=env, cwd=cwd, inherited=inherited, clock=clock, pipe_bytes=0, exec_wait=EXEC_SECONDS,
                stdin=fd,
            )  # fmt: skip
        finally:
            if fd is not None:
                os.close(fd)
        return cls(process, env, cancelled=cancelled or threading.Event(), kept=kept)

    @property
    def pid(self) -> int:
        return self._process.pid

    def kill(self) -> None:
        self._process.signal_group(signal.SIGKILL)

    def attend(self, seconds: float, on_end: Callable[[CommandEnd], None]) -> None:
        start_thread(lambda: on_end(self.run(seconds)))

    def run(self, seconds: float) -> CommandEnd:
        """Attend it to its end, or end it with all that it started. Never longer than `seconds` and a little."""
        process = self._process
        stdout_fd, stderr_fd = process.take_output()
        kept = {stdout_fd: bytearray(), stderr_fd: bytearray()}
        open_fds = set(kept)
        began = time.monotonic()
        while process.poll() is None and time.monotonic() < began + seconds and not self._cancelled.is_set():
            self._read_some(kept, open_fds, process.pidfd, _LOOK_SECONDS)
        status = process.poll()
        ended = time.monotonic()
        self._end_all()
        self._read_some(kept, open_fds, None, 0.0)
        process.release()
        self.is_gone = True
        for fd in (stdout_fd, stderr_fd):
            os.close(fd)
        return CommandEnd(
            exitcode=status.exitcode if status else -int(signal.SIGKILL),
            stdout=bytes(kept[stdout_fd]),
            stderr=bytes(kept[stderr_fd]),
            seconds=ended - began,
            is_late=status is None,
        )

    def _end_all(self) -> None:
        deadline = time.monotonic() + END_SECONDS
        self.kill()
        while time.monotonic() < deadline:
            # The token alone is not enough: a job that the command submits inherits it.
            left = tree.own_processes_where(
                lambda _, environ: all(environ.get(name) == value for name, value in self._marks.items())
            )
            if not left and self._process.poll() is not None:
                return
            for proc in left:
                tree.kill_safely(proc, signal.SIGKILL)
            time.sleep(_LOOK_SECONDS / 5)

    def _read_some(self, kept: Mapping[int, bytearray], open_fds: set[int], pidfd: int | None, seconds: float) -> None:
        for fd in open_fds & wait_readable([*open_fds, -1 if pidfd is None else pidfd], seconds):
            try:
                data = os.read(fd, _PIPE)
            except OSError:
                data = b""
            if not data:
                open_fds.discard(fd)
            kept[fd].extend(data)
            del kept[fd][: -self._kept]


def shell_command(line: str, *arguments: str) -> list[str]:
    return [_BASH if os.path.exists(_BASH) else "bash", "-c", line, _SHELL_NAME, *arguments]


def describe_end(end: CommandEnd) -> str:
    if end.is_late:
        return f"it had not ended after {end.seconds:.0f} s"
    return spawn.describe_exitcode(end.exitcode) if end.exitcode else ""


def last_lines(output: bytes, most: int) -> list[str]:
    printed = output.decode("utf-8", "replace").splitlines()
    lines = [_OWN_PLACE.sub("", line.rstrip()) for line in printed if line.strip()][-most:]
    return ["".join(char if char.isprintable() or char == "\t" else "?" for char in line)[:300] for line in lines]


_SHELLS_OWN = ("_", "SHLVL", "PWD", "OLDPWD")
_OURS = ("HPC_ELASTIC_", "SLURM_JOB_ID")
_PYTHONS = ("python", "python3")
KEPT_ENVIRONMENT = 8 << 20

_SHELL = r"""
exec 3>&1 1>&2
if [ "$(type -t module)" != function ]; then
  for __file in "${LMOD_PKG:-/}/init/bash" "${MODULESHOME:-/}/init/bash" /etc/profile.d/{lmod,z00_lmod,modules}.sh; do
    if [ -r "$__file" ]; then . "$__file"; break; fi
  done
fi
if [ "$(type -t conda)" != function ] && type -P "${CONDA_EXE:-conda}" >/dev/null; then
  conda() {
    unset -f conda
    eval "$(command "${CONDA_EXE:-conda}" shell.bash hook)" && conda "$@"
  }
fi
unset __file
__setup=$1 __depth=$2 __env=$(type -P env) __done=
set --
trap '__status=$?; trap - ERR; [ -n "$__done" ] || [ $__status -ne 0 ] || "$__env" -0 >&3' EXIT
trap '__status=$? __line=$LINENO; if [ ${#BASH_SOURCE[@]} -le $__depth ]; then
  [ ${#BASH_SOURCE[@]} -gt 0 ] || __line=; printf "\1%s\0%s\0" "$__line" "$BASH_COMMAND" >&3; exit $__status
fi' ERR
eval "$__setup"
__done=1
"$__env" -0 >&3
"""
"""Carries out `$1`. The first command that fails ends it, as under ``set -e``: of those in `$1` and, where `$2` is 1,
in a file that it sources. `module` and `conda activate` work where site and conda are set up for login shells alone.
A file that is sourced without arguments sees those of its caller: it has none (oneAPI's setvars.sh refuses others). The
EXIT trap is for ``exit 0``, and may be replaced."""


def setup_command(setup: str) -> list[str]:
    depth = 1 if re.match(r"source (?:'[^']*'|[^\s;&|<>()$`'\"]+)+$", setup) else 0
    return shell_command(_SHELL, setup, str(depth))


def read_change(end: CommandEnd, base: Mapping[str, str]) -> EnvironmentChange | str:
    printed = end.stdout.decode("utf-8", "surrogateescape")
    if why := describe_end(end):
        _, failed, where = printed.rpartition("\1")  # on success it may be in a value: PS1 has it around colours
        if failed:
            line, command = where.split("\0")[:2]
            what = "" if command.startswith("eval ") else f" from '{' '.join(command.split())[:200]}'"
            why = f"{why}{what}{f' (line {line})' if line else ''}"
        said = last_lines(end.stderr, 1)
        return f"{why}: {said[0].strip()}" if said else why
    entries = (entry.partition("=") for entry in printed.split("\0") if entry)
    after = {name: value for name, _, value in entries}
    if "PATH" not in after:
        return "it has ended before its environment could be read"
    put = {name: value for name, value in after.items() if base.get(name) != value and not _is_kept(name)}
    unset = frozenset(name for name in base if name not in after and not _is_kept(name))
    before, now = (next(filter(None, (find_program(name, env) for name in _PYTHONS)), None) for env in (base, after))
    return EnvironmentChange(put=put, unset=unset, python=now if now and now != before else "")


def _is_kept(name: str) -> bool:
    return name in _SHELLS_OWN or name.startswith((*_OURS, "__"))
