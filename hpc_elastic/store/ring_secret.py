"""The file with the run's secret, by which rings are authenticated: only its owner may ever have read it."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from hpc_elastic.atomic_file import read_bytes
from hpc_elastic.errors import UnsafePathError, UsageError

_LEAST_BYTES = 16


def read_secret(path: Path) -> bytes:
    """The run's secret.

    Raises:
        UnsafePathError: it is a link or no regular file, another user owns it, or others may read or write it.
        UsageError: it is missing, or too short to be one.
        OSError: a passing fault of the filesystem.
    """
    anew = "submit the run anew"
    try:
        info = os.lstat(path)
    except FileNotFoundError:
        raise UsageError(
            f"the run's secret {path} is missing; the run directory is damaged: submit the run anew"
        ) from None
    if not stat.S_ISREG(info.st_mode):
        raise UnsafePathError(f"the run's secret {path} is not a regular file; {anew}")
    if info.st_uid != os.geteuid():
        raise UnsafePathError(
            f"the run's secret {path} belongs to uid {info.st_uid}, not to you (uid {os.geteuid()}); {anew}"
        )
    if info.st_mode & 0o077:
        raise UnsafePathError(
            f"the run's secret {path} is open to other users (mode {stat.S_IMODE(info.st_mode):04o}): "
            f"whoever has read it can forge packets of this run; {anew}"
        )
    secret = read_bytes(path, limit=4096).strip()
    if len(secret) < _LEAST_BYTES:
        raise UsageError(f"the run's secret {path} holds {len(secret)} bytes, less than {_LEAST_BYTES}; {anew}")
    return secret
