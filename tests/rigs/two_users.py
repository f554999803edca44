"""Two users of one machine, made for a session of tests: one owns runs, the other attacks them.

Root's own interpreter often lies in root's home, where they can't go: they get the rig's Python environment, the
system's interpreter with this project's source. Each command of theirs has a mount namespace, where packages are bound.
"""

from __future__ import annotations

import os
import pwd
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.rigs.processes import kill_all
from tests.rigs.slurm_cluster.processes import CROWDED, all_pids, call, wait_until
from tests.rigs.slurm_cluster.python_environment import SYSTEM_PYTHON, PythonEnvironment, python_environment

PROGRAMS = ("useradd", "userdel", "setpriv", "unshare", "mount", SYSTEM_PYTHON)
_NAME = re.compile(r"hpcsec-[av]-(\d+)")
_PATH = "/usr/local/bin:/usr/bin:/bin"


@dataclass(frozen=True, slots=True, kw_only=True)
class User:
    """A normal user, and the way to run something as them."""

    name: str
    uid: int
    gid: int
    home: Path
    environment: PythonEnvironment

    @property
    def interpreter(self) -> str:
        """A Python that this user may execute, which has the project and its dependencies."""
        return str(self.environment.python)

    def popen(
        self,
        argv: Sequence[str],
        *,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        stdin: int | None = subprocess.DEVNULL,
        stdout: int | None = subprocess.PIPE,
        stderr: int | None = subprocess.PIPE,
    ) -> subprocess.Popen[str]:
        """Start a command in a fresh login's environment plus `env`, in `cwd` (the home by default).

        The process is the command itself: its pid can be signalled. ``python`` and ``hpc-elastic`` are on its PATH.
        """
        binds = [
            f"mount --bind {shlex.quote(str(what))} {shlex.quote(str(where))}"
            for where, what in self.environment.mounts.items()
        ]
        become = f'exec setpriv --reuid {self.uid} --regid {self.gid} --init-groups -- env -C "$0" "$@"'
        login = {
            "PATH": f"{self.environment.bin}:{_PATH}",
            "HOME": str(self.home),
            "USER": self.name,
            "LOGNAME": self.name,
            "SHELL": "/bin/sh",
            "LANG": "C.UTF-8",
            "HPC_ELASTIC_SITE_CONFIG": "",
        }
        return subprocess.Popen(
            ["unshare", "--mount", "sh", "-ec", "\n".join((*binds, become)), str(cwd or self.home), *argv],
            env={**login, **(env or {})},
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            text=True,
            errors="replace",
        )

    def run(
        self,
        argv: Sequence[str],
        *,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        timeout: float = 30 * CROWDED,
        check: bool = False,
    ) -> subprocess.CompletedProcess[str]:
        with self.popen(argv, cwd=cwd, env=env) as process:
            try:
                stdout, stderr = process.communicate(timeout=timeout)
            except BaseException:
                process.kill()
                raise
        assert not check or process.returncode == 0, f"{self.name}: {shlex.join(argv)}\n{stdout}\n{stderr}"
        return subprocess.CompletedProcess(list(argv), process.returncode, stdout, stderr)

    def python(
        self, source: str, *arguments: object, check: bool = True, **how: Any
    ) -> subprocess.CompletedProcess[str]:
        """Run a piece of Python, whose ``sys.argv[1:]`` are the arguments; see `run`."""
        argv = [self.interpreter, "-c", textwrap.dedent(source), *map(str, arguments)]
        return self.run(argv, check=check, **how)

    def hpc_elastic(self, *arguments: object, **how: Any) -> subprocess.CompletedProcess[str]:
        return self.run(["hpc-elastic", *map(str, arguments)], **how)

    def pids(self) -> list[int]:
        return [pid for pid in all_pids() if _uid_of(pid) == self.uid]

    def kill_all(self) -> None:
        _kill_all(self.uid, self.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class TwoUsers:
    """Both, and a folder that both can reach and write into (mode 0777, not sticky: no kernel setting helps here)."""

    attacker: User
    victim: User
    shared: Path


def missing_prerequisites() -> tuple[str, ...]:
    """Say why there can't be two users here, one line each; nothing where there can."""
    if sys.platform != "linux":
        return ("they need Linux",)
    if os.geteuid() != 0:
        return ("not root, who alone may make users and become them",)
    missing = [program for program in PROGRAMS if shutil.which(program, path=f"/usr/sbin:/sbin:{_PATH}") is None]
    if missing:
        return (f"not installed: {' '.join(missing)}",)
    tried = subprocess.run(
        ["unshare", "--mount", "mount", "-t", "tmpfs", "x", "/tmp"], capture_output=True, text=True, check=False
    )
    return () if tried.returncode == 0 else (f"this machine refuses mount namespaces: {tried.stderr.strip()}",)


@contextmanager
def two_users() -> Iterator[TwoUsers]:
    """Make both users; at the end remove them, their processes, and every file of theirs in the usual places."""
    for entry in pwd.getpwall():  # what a killed session left
        found = _NAME.fullmatch(entry.pw_name)
        if found and not Path("/proc", found[1]).exists():
            _remove_user(entry.pw_name)
    folder = Path(tempfile.mkdtemp(prefix="hpc-elastic-users-"))
    names = {role: f"hpcsec-{role[0]}-{os.getpid()}" for role in ("attacker", "victim")}
    try:
        folder.chmod(0o755)
        environment = python_environment(folder / "python")
        users = {role: _make_user(name, folder / "home" / name, environment) for role, name in names.items()}
        shared = folder / "shared"
        shared.mkdir()
        shared.chmod(0o777)
        yield TwoUsers(attacker=users["attacker"], victim=users["victim"], shared=shared)
    finally:
        for name in names.values():
            _remove_user(name)
        call(["rm", "-rf", "--one-file-system", str(folder)])


def _make_user(name: str, home: Path, environment: PythonEnvironment) -> User:
    def is_there() -> bool:
        # Fails while another process changes the list of users.
        call(["useradd", "--user-group", "--no-create-home", "--home-dir", str(home), name], check=False)
        return any(entry.pw_name == name for entry in pwd.getpwall())

    wait_until(is_there, timeout=10, what=f"useradd makes {name}", interval=0.2)
    entry = pwd.getpwnam(name)
    home.mkdir(parents=True)
    home.chmod(0o700)
    os.chown(home, entry.pw_uid, entry.pw_gid)
    return User(name=name, uid=entry.pw_uid, gid=entry.pw_gid, home=home, environment=environment)


def _remove_user(name: str) -> None:
    try:
        uid = pwd.getpwnam(name).pw_uid
    except KeyError:
        return

    def is_gone() -> bool:
        call(["userdel", name], check=False)
        return all(entry.pw_name != name for entry in pwd.getpwall())

    _kill_all(uid, name)
    # The next user who is made may get this number.
    for place in ("/dev/shm", "/tmp", "/var/tmp"):
        for path in Path(place).iterdir():
            try:
                is_theirs = path.lstat().st_uid == uid
            except OSError:  # it went meanwhile
                continue
            if is_theirs:
                call(["rm", "-rf", "--one-file-system", str(path)], check=False)
    wait_until(is_gone, timeout=10, what=f"userdel removes {name}", interval=0.2)


def _kill_all(uid: int, name: str) -> None:
    def all_dead() -> bool:
        pids = [pid for pid in all_pids() if _uid_of(pid) == uid]
        kill_all(pids)
        return not pids

    wait_until(all_dead, timeout=10, what=f"the processes of {name} die")


def _uid_of(pid: int) -> int | None:
    """The effective uid of a living process; None for one that is gone, or a zombie."""
    try:
        text = Path("/proc", str(pid), "status").read_text()
    except OSError:
        return None
    found = re.search(r"^State:\t(\w).*^Uid:\t\d+\t(\d+)", text, re.MULTILINE | re.DOTALL)
    return int(found[2]) if found and found[1] not in "ZX" else None
