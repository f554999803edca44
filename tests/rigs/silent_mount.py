"""A FUSE mount with one file that never answers who reads it: such a reader can't be killed, in no way and by nobody.

``python -m tests.rigs.silent_mount FOLDER`` serves it. What has been asked is in the server's hands then, and the
kernel waits for its answer uninterruptibly (a request that no server has taken yet can still be given up).
"""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

FILE = "never"


class SilentMount:
    """For a ``with``; its end lets go of all who wait."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.file = folder / FILE
        self._server: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> SilentMount:
        self.folder.mkdir()
        root = Path(__file__).resolve().parents[2]
        self._server = subprocess.Popen([sys.executable, "-m", "tests.rigs.silent_mount", str(self.folder)], cwd=root)
        deadline = time.monotonic() + 30
        while not os.path.ismount(self.folder):
            if self._server.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError("the silent mount does not come")
            time.sleep(0.01)
        return self

    @property
    def was_asked(self) -> bool:
        """Whether somebody waits by now, whom nothing ends."""
        return Path(f"{self.folder}.asked").exists()

    def release(self) -> None:
        """End the mount: who waits for it gets an error, and can be killed again."""
        if self._server is not None:
            self._server.kill()
            self._server.wait()
            self._server = None
            from tests.rigs.nfs_emulator.mount import unmount

            unmount(str(self.folder))

    def __exit__(self, *_: object) -> None:
        self.release()


def _serve(folder: str) -> None:
    from tests.rigs.nfs_emulator.fuse_library import mfusepy

    class Silent(mfusepy.Operations):  # type: ignore[misc]
        use_ns = True

        def getattr(self, path: str, fh: int | None = None) -> dict[str, int]:
            if path == "/":
                return {"st_mode": stat.S_IFDIR | 0o755, "st_nlink": 2}
            return {"st_mode": stat.S_IFREG | 0o755, "st_nlink": 1, "st_size": 1 << 20}

        def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
            Path(f"{folder}.asked").touch()
            threading.Event().wait()
            raise AssertionError

    # Through the page cache, one would wait for a page, killably, and not for the server.
    mfusepy.FUSE(Silent(), folder, foreground=True, direct_io=True, max_threads=10, fsname="silent", subtype="silent")


if __name__ == "__main__":
    _serve(sys.argv[1])
