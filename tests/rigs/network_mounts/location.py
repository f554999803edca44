"""Where one rig lives, and how its daemons are started and waited for: the keeper's tools."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

FORCE = 1
"""MNT_FORCE: who waits for an answer there is told that none will come, also where nothing else ends the wait."""
DETACH = 2
"""MNT_DETACH: also where somebody has it open, or its daemon does not answer."""


class RigError(RuntimeError):
    """The rig can't do it; says what and why."""


class Site:
    """The folder of one rig: ``client-<n>`` the mounts, ``server`` the server's disk, ``logs``."""

    def __init__(self, folder: Path, *, mounts: int) -> None:
        self.folder = folder
        self.server = folder / "server"
        self.logs = folder / "logs"
        self.mounts = [folder / f"client-{number}" for number in range(mounts)]
        self.servers: list[subprocess.Popen[bytes]] = []
        self.clients: list[subprocess.Popen[bytes]] = []
        self.other_server_pids: list[int] = []
        """Of servers that clients started."""
        for path in (self.server, self.logs, *self.mounts):
            path.mkdir(exist_ok=True)

    def write(self, name: str, text: str, *, mode: int = 0o644) -> Path:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(mode)
        return path

    def spawn(
        self, name: str, argv: Sequence[str | Path], *, env: Mapping[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        """Start a daemon that stays in the foreground."""
        with open(self.logs / f"{name}.log", "ab") as log:
            return subprocess.Popen(
                [os.fspath(word) for word in argv],
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env={**os.environ, **(env or {})},
            )

    def serve(self, name: str, argv: Sequence[str | Path]) -> subprocess.Popen[bytes]:
        self.servers.append(self.spawn(name, argv))
        return self.servers[-1]

    def connect(self, number: int, argv: Sequence[str | Path]) -> None:
        """Start the daemon behind mount `number`, the next one."""
        assert number == len(self.clients)
        self.clients.append(self.spawn(f"client-{number}", argv))

    def server_pids(self) -> list[int]:
        """What `freeze` stops."""
        return [*(server.pid for server in self.servers), *self.other_server_pids]

    def call(self, argv: Sequence[str | Path], *, seconds: float = 120.0) -> str:
        done = subprocess.run(
            [os.fspath(word) for word in argv],
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
        if done.returncode != 0:
            raise RigError(f"{argv[0]} ended with {done.returncode}: {(done.stderr or done.stdout).strip()[-1000:]}")
        return done.stdout

    def wait(self, condition: Callable[[], bool], what: str, *, seconds: float = 180.0) -> None:
        """Wait until `condition`, which may raise OSError for "not yet"; a server that ends meanwhile is an error."""
        deadline = time.monotonic() + seconds
        while True:
            why = ""
            try:
                if condition():
                    return
            except OSError as error:
                why = f" ({error})"
            ended = [server.args for server in self.servers if server.poll() is not None]
            if ended or time.monotonic() > deadline:
                raise RigError(f"{what} did not come{why}; ended: {ended}\n{self.log_tails()}")
            time.sleep(0.02)

    def wait_mounted(self) -> None:
        self.wait(lambda: all(os.path.ismount(path) for path in self.mounts), "the mounts")

    def wait_usable(self) -> None:
        """Until each client can write, and write again."""
        for number, path in enumerate(self.mounts):
            probe = path / f".probe-{number}"

            def writes(probe: Path = probe) -> bool:
                for _ in range(2):
                    fd = os.open(probe, os.O_RDWR | os.O_CREAT, 0o600)
                    try:
                        os.write(fd, b"x")
                        os.fsync(fd)
                    finally:
                        os.close(fd)
                os.unlink(probe)
                return True

            self.wait(writes, f"a first write on {path}")

    def log_tails(self) -> str:
        lines = []
        for path in sorted(self.logs.iterdir()):
            lines += [f"== {path.name}", *path.read_text(errors="replace").splitlines()[-8:]]
        return "\n".join(lines)

    def mount_disk(self, megabytes: int) -> None:
        """Give the server a disk of its own, in memory, so that it can be full."""
        self.call(["mount", "-t", "tmpfs", "-o", f"size={megabytes}m,mode=755", "tmpfs", self.server])


def mounts_below(folder: Path) -> list[str]:
    """The paths mounted there, innermost first."""
    found = []
    with open("/proc/self/mountinfo") as file:
        for line in file:
            path = line.split(" ")[4].replace("\\040", " ")
            if path.startswith(f"{folder}/"):
                found.append(path)
    return sorted(found, key=len, reverse=True)


def cut(paths: Sequence[str | Path]) -> None:
    """Unmount, whatever goes on there."""
    libc = ctypes.CDLL(None, use_errno=True)
    for path in paths:
        libc.umount2(os.fsencode(path), FORCE | DETACH)


def remove(folder: Path) -> None:
    """Take a rig's mounts and folder away, whatever state its processes are in."""
    cut(mounts_below(folder))
    if not mounts_below(folder):  # never into a filesystem that could not be unmounted
        shutil.rmtree(folder, ignore_errors=True)
