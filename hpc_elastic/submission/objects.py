"""Python objects as files of the run directory: a line of JSON for whoever only looks, and a pickle behind it.

Nothing is unpickled that another user could have written: the file must be this user's, and no link.
"""

from __future__ import annotations

import json
import os
import pickle
import stat
from collections.abc import Mapping
from io import BufferedReader
from pathlib import Path
from typing import Any

from hpc_elastic.atomic_file import ask_about
from hpc_elastic.errors import UnreadableFileError, UnsafePathError

VERSION = 1
_LONGEST_HEAD = 4 << 20


class UnreadableObjectError(UnreadableFileError):
    """It is missing, torn, of a newer version, or holds what can't be made again here."""


def write_object(path: Path, head: Mapping[str, Any], value: object) -> int:
    """Write whole or not at all, mode 0600, without a second copy of a huge value in memory.

    Args:
        path: Where. Its folder exists.
        head: What `read_head` gives; JSON.
        value: For cloudpickle: functions of ``__main__``, lambdas and closures go by value.

    Returns:
        The file's size in bytes.

    Raises:
        Exception: whatever a user's object raises when it is taken apart.
        OSError: the disk is full, the folder is gone …
    """
    import cloudpickle

    temporary = path.with_name(f".{path.name}.{os.getpid()}.{os.urandom(4).hex()}")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        with open(fd, "wb") as file:
            file.write(json.dumps({"version": VERSION, **head}).encode() + b"\n")
            cloudpickle.dump(value, file, protocol=pickle.HIGHEST_PROTOCOL)
            size = file.tell()
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
    return size


def read_head(path: Path) -> dict[str, Any]:
    """What `write_object` was given as `head`.

    Raises:
        UnreadableObjectError: there is no such file, or it can't be read.
    """
    with _open(path) as file:
        return _head(path, file)


def read_object(path: Path) -> Any:
    """The value.

    Raises:
        UnreadableObjectError: there is no such file, or it can't be read, or not unpickled: a module is missing here.
    """
    with _open(path) as file:
        _head(path, file)
        try:
            return pickle.load(file)
        except Exception as error:
            raise UnreadableObjectError(path=str(path), why=f"can't be unpickled: {_named(error)}") from error


def _open(path: Path) -> BufferedReader:
    for again in (False, True):
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            break
        except OSError as error:
            if isinstance(error, FileNotFoundError) and not again and ask_about(path.parent):
                continue
            why = error.strerror or str(error)
            raise UnreadableObjectError(path=str(path), why=why.lower(), errno=error.errno) from None
    info = os.fstat(fd)
    if info.st_uid != os.geteuid() or info.st_mode & 0o022 or not stat.S_ISREG(info.st_mode):
        os.close(fd)
        raise UnsafePathError(f"{path} is not a file of yours alone: nothing is unpickled from it")
    return open(fd, "rb")


def _head(path: Path, file: BufferedReader) -> dict[str, Any]:
    try:
        value = json.loads(file.readline(_LONGEST_HEAD))
    except ValueError as error:
        raise UnreadableObjectError(path=str(path), why=f"torn: {error}") from None
    if not isinstance(value, dict) or value.get("version") != VERSION:
        raise UnreadableObjectError(path=str(path), why="is of a version that this program does not know")
    return value


def _named(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
