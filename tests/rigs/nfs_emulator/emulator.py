"""What tests use: several mounts over one folder, started, controlled and taken away."""

from __future__ import annotations

import ctypes.util
import functools
import importlib.util
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tests.rigs.nfs_emulator.settings import MountSettings, settings_to_json
from tests.rigs.requirements import require

ROOT = Path(__file__).resolve().parents[3]
START_SECONDS = 180.0


@functools.lru_cache(maxsize=1)
def unavailable() -> str | None:
    """Why there can be no emulator here, in one line."""
    if sys.platform != "linux" or not os.path.exists("/dev/fuse"):
        return "this machine has no FUSE (/dev/fuse)"
    if os.geteuid() != 0:
        return "mounts that others may enter need root"
    if importlib.util.find_spec("mfusepy") is None:
        return "the Python package mfusepy is missing (pip install mfusepy)"
    if ctypes.util.find_library("fuse3") is None or shutil.which("fusermount3") is None:
        return "FUSE's library is missing (apt-get install fuse3)"
    try:
        os.close(os.open("/dev/fuse", os.O_RDWR))
    except OSError as error:
        return f"/dev/fuse can't be opened: {error.strerror}"
    return None


def require_fuse() -> None:
    require("the NFS emulator", unavailable())


def remove_leftovers() -> None:
    """Unmount what emulators left whose processes are gone (kill -9)."""
    from tests.rigs.nfs_emulator.mount import FILESYSTEM_TYPE, unmount

    with open("/proc/self/mountinfo") as mounts:
        lines = mounts.read().splitlines()
    for line in lines:
        before, _, after = line.partition(" - ")
        kind, source = after.split(" ")[:2]
        pid = source.rpartition("-")[2]
        if kind == f"fuse.{FILESYSTEM_TYPE}" and not os.path.exists(f"/proc/{pid}"):
            unmount(before.split(" ")[4].replace("\\040", " "))


def tell(control: Path, command: Mapping[str, Any]) -> dict[str, Any]:
    """Give the mount whose socket is `control` a command. Its answer."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(90)
        connection.connect(str(control))
        with connection.makefile("rw") as stream:
            stream.write(json.dumps(command) + "\n")
            stream.flush()
            answer: dict[str, Any] = json.loads(stream.readline())
    if "error" in answer:
        raise RuntimeError(f"{command}: {answer['error']}")
    return answer


class NfsEmulator:
    """`mounts` clients of one server, in a ``with``.

    Everything is taken away at the end, whatever state the mounts' processes are in. Where this process is killed, they
    notice and unmount themselves; where they are killed too, the next emulator unmounts what they left.
    """

    def __init__(self, backing: Path, *, mounts: int = 2, settings: MountSettings | None = None) -> None:
        self.backing = backing
        self._settings = settings or MountSettings()
        self._count = mounts
        self._folder: Path | None = None
        self._processes: list[subprocess.Popen[bytes]] = []
        self.paths: list[Path] = []
        """Where the clients are mounted."""

    def __enter__(self) -> NfsEmulator:
        require_fuse()
        remove_leftovers()
        # Not under the test's own folder: a socket's path may have 107 characters.
        self._folder = Path(tempfile.mkdtemp(prefix="nfs-emulator-"))
        os.chmod(self._folder, 0o755)
        try:
            for number in range(self._count):
                self._start(number)
            for number in range(self._count):
                self._wait_until_mounted(number)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        from tests.rigs.nfs_emulator.mount import unmount

        for path in self.paths:
            unmount(str(path))
        for process in self._processes:
            process.kill()  # a frozen one does not go by itself
            process.wait()
            for stream in (process.stdin, process.stderr):
                if stream is not None:
                    stream.close()
        for path in self.paths:
            unmount(str(path))  # one that was just mounting
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _start(self, number: int) -> None:
        assert self._folder is not None
        path = self._folder / f"client-{number}"
        path.mkdir()
        self.paths.append(path)
        argv = [sys.executable, "-m", "tests.rigs.nfs_emulator", str(self.backing), str(path), "--until-stdin-closes"]
        argv += ["--control", str(self._socket(number)), "--settings", settings_to_json(self._settings)]
        process = subprocess.Popen(
            argv, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        )
        self._processes.append(process)

    def _wait_until_mounted(self, number: int) -> None:
        path, process = self.paths[number], self._processes[number]
        deadline = time.monotonic() + START_SECONDS
        while not os.path.ismount(path) or not self._socket(number).exists():
            if process.poll() is not None:
                assert process.stderr is not None
                told = process.stderr.read().decode(errors="replace").strip()
                raise RuntimeError(f"the emulated client ended with {process.returncode}: {told[-2000:]}")
            if time.monotonic() > deadline:
                raise TimeoutError(f"{path} was not mounted within {START_SECONDS:g} s")
            time.sleep(0.01)

    def _socket(self, number: int) -> Path:
        assert self._folder is not None
        return self._folder / f"control-{number}"

    def pid(self, mount: int) -> int:
        return self._processes[mount].pid

    def control(self, command: str, mount: int | None = None, **arguments: Any) -> list[dict[str, Any]]:
        """Give one mount, or all of them, a command: change, fail, heal, freeze, thaw, drop_caches, counters,
        reset_counters. Their answers."""
        return [self._tell(number, {"command": command, **arguments}) for number in self._mounts(mount)]

    def _mounts(self, mount: int | None) -> Iterable[int]:
        return range(self._count) if mount is None else (mount,)

    def _tell(self, number: int, command: dict[str, Any]) -> dict[str, Any]:
        return tell(self._socket(number), command)

    def change(self, mount: int | None = None, **settings: Any) -> None:
        """Set `MountSettings` anew."""
        self.control("change", mount, **settings)

    def fail(self, error: str, operation: str = "*", mount: int | None = None, **how: Any) -> None:
        """Let operations on the server go wrong: see `Fault`."""
        self.control("fail", mount, error=error, operation=operation, **how)

    def heal(self, mount: int | None = None) -> None:
        self.control("heal", mount)

    def freeze(self, mount: int | None = None) -> None:
        """Operations on the server wait, and with them everything else on the mount, until `thaw`."""
        self.control("freeze", mount)

    def thaw(self, mount: int | None = None) -> None:
        self.control("thaw", mount)

    def drop_caches(self, mount: int | None = None) -> None:
        self.control("drop_caches", mount)

    def counters(self, mount: int | None = None) -> Counter[str]:
        """Operations on the server by kind, of one client or of all, since the last `reset_counters`."""
        found: Counter[str] = Counter()
        for answer in self.control("counters", mount):
            found.update(answer["counters"])
        return found

    def reset_counters(self, mount: int | None = None) -> None:
        self.control("reset_counters", mount)
