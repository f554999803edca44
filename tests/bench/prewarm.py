"""What ``--prewarm`` saves on a first start from a filesystem that answers slowly, with cold caches.

::

    python -m tests.bench.prewarm        three starts, each on a mount of its own; prints a line of Markdown for each

The mount is FUSE over this interpreter's site-packages: each request waits, reads also by their size, and the kernel
caches what it got, as on NFS. It is no NFS: the kernel's NFS client is not to be had on every machine.
"""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hpc_elastic.workers import prewarm
from tests.rigs.nfs_emulator.fuse_library import mfusepy
from tests.rigs.nfs_emulator.mount import unmount

REQUEST_SECONDS = 0.002
"""Of each request: a round trip to a busy server."""
BYTES_PER_SECOND = 300e6
STARTS = "import sys, torch, torch.distributed, torch._dynamo; print(torch.__file__)"
_KEPT = 600


class SlowFiles(mfusepy.Operations):  # type: ignore[misc]
    """A folder, read only, behind a slow link that all requests share."""

    use_ns = True

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._link = threading.Lock()
        self.bytes = self.requests = 0

    def _wait(self, size: int = 0) -> None:
        self.requests += 1
        self.bytes += size
        time.sleep(REQUEST_SECONDS)
        if size:
            with self._link:
                time.sleep(size / BYTES_PER_SECOND)

    def getattr(self, path: str, fh: int | None = None) -> dict[str, Any]:
        self._wait()
        try:
            found = os.lstat(self._folder + path)
        except OSError as error:
            raise mfusepy.FuseOSError(error.errno or errno.EIO) from None
        names = ("st_mode", "st_nlink", "st_uid", "st_gid", "st_size", "st_ino")
        times = {f"st_{which}time": getattr(found, f"st_{which}time_ns") for which in "amc"}
        return {**{name: getattr(found, name) for name in names}, **times}

    def readdir(self, path: str, fh: int) -> list[str]:
        self._wait()
        return [".", "..", *os.listdir(self._folder + path)]

    def readlink(self, path: str) -> str:
        self._wait()
        return os.readlink(self._folder + path)

    def open(self, path: str, flags: int) -> int:
        self._wait()
        return os.open(self._folder + path, os.O_RDONLY)

    def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
        found = os.pread(fh, size, offset)
        self._wait(len(found))
        return found

    def release(self, path: str, fh: int) -> None:
        os.close(fh)


@contextmanager
def cold_mount() -> Iterator[str]:
    """This interpreter's site-packages on a mount of which nothing is cached."""
    where = tempfile.mkdtemp()
    process = subprocess.Popen([sys.executable, "-m", "tests.bench.prewarm", where], stdin=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 30
        while not os.path.ismount(where):
            assert time.monotonic() < deadline, "no mount: is FUSE there?"
            time.sleep(0.02)
        yield where
    finally:
        unmount(where)
        process.wait(30)
        os.rmdir(where)


def start_seconds(where: str, *, ahead: float | None, again: bool = False) -> tuple[float, dict[str, Any]]:
    """Seconds of a start of torch from the mount.

    Args:
        where: The mount.
        ahead: How many seconds the prewarming begins before it, as long as a rendezvous takes; None: there is none.
        again: Start twice, and measure the second one.
    """
    env = {**os.environ, "PYTHONPATH": where, "PYTHONDONTWRITEBYTECODE": "1"}
    plan = {"agent": os.getpid(), "roots": ["torch", "numpy"], "folder": "/", "bytes": 8 << 30, "seconds": 600}
    reader = None
    if ahead is not None:
        command = [sys.executable, "-c", Path(prewarm.__file__).read_text(), json.dumps(plan)]
        reader = subprocess.Popen(command, env=env, stdout=subprocess.PIPE)
        time.sleep(ahead)
    for _ in range(2 if again else 1):
        began = time.monotonic()
        out = subprocess.run([sys.executable, "-c", STARTS], env=env, stdout=subprocess.PIPE, check=True).stdout
        seconds = time.monotonic() - began
    assert out.decode().startswith(where), out
    said = json.loads(reader.communicate()[0]) if reader is not None else {}
    return seconds, said


def main(argv: list[str]) -> int:
    """Entry point; with a folder: serve the mount there."""
    if argv:
        options = {"entry_timeout": _KEPT, "attr_timeout": _KEPT, "negative_timeout": _KEPT, "kernel_cache": True}
        mfusepy.FUSE(SlowFiles(sysconfig.get_path("purelib")), argv[0], foreground=True, ro=True, **options)
        return 0
    rows: list[tuple[str, float | None, bool]] = [
        ("without", None, False),
        ("`--prewarm`, the nodes meet at once", 0.0, False),
        ("`--prewarm`, the nodes meet within 5 s", 5.0, False),
        ("`--prewarm`, the nodes meet within 20 s", 20.0, False),
        ("all is in the page cache", None, True),
    ]
    for name, ahead, again in rows:
        with cold_mount() as where:
            seconds, said = start_seconds(where, ahead=ahead, again=again)
        read = f"{said['files']} files, {said['bytes'] >> 20} MiB in {said['seconds']:.1f} s" if said else ""
        print(f"| {name} | {seconds:.1f} s | {read} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
