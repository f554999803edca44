"""Who runs a rig: a lock that its owner's death releases, so that a left-over rig is told from one in use."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from pathlib import Path

from .layout import RIGS_FOLDER, RigError


class RigLock:
    """An exclusive claim on a rig's name, for as long as this process lives or until it is released."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._path = RIGS_FOLDER / f"{name}.lock"
        RIGS_FOLDER.mkdir(mode=0o755, parents=True, exist_ok=True)
        while True:
            self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = os.read(self._file, 32).decode().strip() or "unknown"
                os.close(self._file)
                raise RigError(f"rig {name!r} is in use by process {holder}; stop that, or use another name") from None
            if self._is_current():
                break
            os.close(self._file)  # its last holder removed the file between our open and our lock
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, f"{os.getpid()}\n".encode(), 0)

    def _is_current(self) -> bool:
        try:
            return os.path.samestat(os.stat(self._path), os.fstat(self._file))
        except FileNotFoundError:
            return False

    def release(self) -> None:
        self._path.unlink(missing_ok=True)
        os.close(self._file)


def lock_free_name(prefix: str, *, wanted: Callable[[Path], bool]) -> RigLock:
    """Lock the first of ``<prefix>1``, ``<prefix>2`` … that nobody holds.

    Low numbers are taken again and again, so whoever takes one finds and removes what a killed owner left there.

    Args:
        prefix: Of the name.
        wanted: Asked with the rig's folder once its name is locked; a name that is refused is left alone.
    """
    for number in range(1, 100):
        try:
            lock = RigLock(f"{prefix}{number}")
        except RigError:
            continue
        if wanted(RIGS_FOLDER / lock.name):
            return lock
        lock.release()
    raise RigError(f"rigs {prefix}1 to {prefix}99 are all in use")
