"""Private folders and whole-or-nothing files: how everything outside the store reaches the disk.

Every folder is 0700 and every file 0600 whatever the umask; a path of another owner, or one that is a symbolic link,
is refused: a second user of the machine must not be able to make us read or write through something that they planted.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hpc_elastic.errors import UnsafePathError


def make_private_dir(path: Path, *, exist_ok: bool = True) -> None:
    """Create the folder `path` with mode 0700, or check that the one that is there is ours alone.

    Raises:
        UnsafePathError: something at `path` is a link, no folder, or another user's.
        FileExistsError: it is there and `exist_ok` is false.
        OSError: as mkdir.
    """
    try:
        os.mkdir(path, 0o700)
        os.chmod(path, 0o700)  # a default ACL may have widened it
        return
    except FileExistsError:
        # On NFS a stale negative entry can make mkdir fail for a folder of ours: so look, whatever the reason.
        if not exist_ok:
            raise
    check_private_dir(path)


def check_private_dir(path: Path) -> None:
    """Refuse a folder that is a link, that another user owns, or that others can write to.

    Raises:
        UnsafePathError: with one line that says which.
        FileNotFoundError: nothing is there.
    """
    info = os.lstat(path)
    if stat.S_ISLNK(info.st_mode):
        raise UnsafePathError(f"{path} is a symbolic link; give the folder itself, or remove the link")
    if not stat.S_ISDIR(info.st_mode):
        raise UnsafePathError(f"{path} is not a folder; remove it or choose another path")
    if info.st_uid != os.geteuid():
        raise UnsafePathError(
            f"{path} belongs to uid {info.st_uid}, not to you (uid {os.geteuid()}); choose another path"
        )
    if info.st_mode & 0o077:
        raise UnsafePathError(
            f"{path} is open to other users (mode {stat.S_IMODE(info.st_mode):04o}); run: chmod 700 {path}"
        )


def why_replaceable(folder: Path | str, *, option: str) -> str | None:
    """Say why another user could put something else in the place of what lies in a folder; None where nobody can.

    A sticky bit holds back all but the folder's owner. The folders above are not looked at: projects' folders often
    belong to somebody who is trusted.

    Args:
        folder: The folder; links are followed.
        option: What another one is given with.

    Returns:
        What is wrong with it and the way out, to go behind its name.

    Raises:
        OSError: as stat.
    """
    info = os.stat(folder)
    if info.st_uid not in (os.geteuid(), 0):
        return f"belongs to uid {info.st_uid}, who could replace what is in it; give a folder of your own with {option}"
    if info.st_mode & stat.S_IWOTH and not info.st_mode & stat.S_ISVTX:
        is_ours = info.st_uid == os.geteuid()
        way_out = f"run: chmod o-w {folder}" if is_ours else f"give a folder of your own with {option}"
        return f"can be written by every user; {way_out}"
    return None


def open_own(path: Path | str, flags: int, mode: int = 0o600) -> int:
    """Open a regular file of this user's, or make it: not through a link, and without waiting for a FIFO's other end.

    Args:
        path: Where. Other users may be able to write into its folder.
        flags: As of ``os.open``; no O_TRUNC, since the file is judged after it was opened.
        mode: Of a new file, less the umask.

    Returns:
        A descriptor that programs started from here don't inherit.

    Raises:
        UnsafePathError: it is a link, no regular file, another user's, or to be written and has a second name (a hard
            link to a file of ours, which another user may plant).
        OSError: as open.
    """
    try:
        fd = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, mode)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise UnsafePathError(f"{path} is a symbolic link; give the file itself, or remove the link") from None
        if error.errno == errno.ENXIO:  # a FIFO that nobody reads, or a socket
            raise UnsafePathError(f"{path} is not a regular file; remove it or choose another path") from None
        raise
    info = os.fstat(fd)
    problem = ""
    if not stat.S_ISREG(info.st_mode):
        problem = "is not a regular file; remove it or choose another path"
    elif info.st_uid != os.geteuid():
        problem = f"belongs to uid {info.st_uid}, not to you (uid {os.geteuid()}); choose another path"
    elif flags & (os.O_WRONLY | os.O_RDWR) and info.st_nlink > 1:
        problem = "has a second name (a hard link); remove it or choose another path"
    if problem:
        os.close(fd)
        raise UnsafePathError(f"{path} {problem}")
    return fd


def write_private(path: Path, data: bytes | str, *, durable: bool = False, mode: int = 0o600) -> None:
    """Write a file whole or not at all (temporary file beside it, then ``os.replace``).

    Args:
        path: Where. Its folder exists.
        data: Text is written as UTF-8.
        durable: Wait until the disk has it. Not needed for others to *see* it.
        mode: Whatever the umask; another one for a file that another user is to read.

    Raises:
        OSError: the disk is full, the folder is gone …; the temporary file is removed first.
    """
    raw = data.encode("utf-8", "surrogateescape") if isinstance(data, str) else data
    temporary = path.with_name(f".{path.name[:100]}.{os.getpid()}.{os.urandom(4).hex()}")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        try:
            os.fchmod(fd, mode)
            view = memoryview(raw)
            while view:
                view = view[os.write(fd, view) :]
            if durable:
                os.fsync(fd)
        finally:
            os.close(fd)
        os.replace(temporary, path)
    except BaseException:
        try:
            os.unlink(temporary)
        except OSError:
            pass  # the first error is the one to tell
        raise


def write_json(path: Path, value: Mapping[str, Any], *, durable: bool = False) -> None:
    """`write_private` of `value` as JSON, keys in the mapping's order, one line break at the end."""
    write_private(path, json_text(value, indent=1) + "\n", durable=durable)


def json_text(value: Mapping[str, Any], *, indent: int | None = None) -> str:
    """JSON that any reader decodes: readable text, but ASCII escapes where a value holds bytes that are no UTF-8.

    Python keeps such bytes (of an argument, a path, a worker's message) as lone surrogates, which UTF-8 cannot hold.
    """
    text = json.dumps(value, ensure_ascii=False, indent=indent, default=str)
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(value, indent=indent, default=str)
    return text


def read_bytes(path: Path, *, limit: int) -> bytes:
    """At most `limit` bytes from the start of a regular file. Never follows a link, never blocks on a FIFO.

    Raises:
        UnsafePathError: it is not a regular file, or another user owns it.
        OSError: as open and read.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode):
            raise UnsafePathError(f"{path} is not a regular file")
        if info.st_uid not in (os.geteuid(), 0) and os.geteuid() != 0:
            raise UnsafePathError(f"{path} belongs to uid {info.st_uid}, not to you (uid {os.geteuid()})")
        chunks: list[bytes] = []
        left = limit
        while left > 0:
            chunk = os.read(fd, min(left, 1 << 20))
            if not chunk:
                break
            chunks.append(chunk)
            left -= len(chunk)
        return b"".join(chunks)
    finally:
        os.close(fd)


def ask_about(folder: Path) -> bool:
    """Have this host's NFS client ask the server what is in a folder, and in those above where it seems to be missing.

    A client remembers up to a minute (acdirmax) what it did not find, whoever makes it meanwhile. Opening the folder
    makes it forget.

    Returns:
        Whether the folder is there, so that another look can find more.
    """
    for again in (False, True):
        try:
            os.close(os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
            return True
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ESTALE) or again or folder == folder.parent:
                return False
        if not ask_about(folder.parent):
            return False
    return False


class Unreadable(str):
    """Why a file could not be read."""

    errno: int | None = None
    """The filesystem's own word, where it was that which refused; another try may do better."""


def read_json(path: Path, *, limit: int = 16 << 20) -> dict[str, Any] | Unreadable:
    """A JSON object from a file that may be missing, torn, foreign or newer.

    Returns:
        The object, or a sentence, a `str`, that says why there is none ("missing", "unreadable: …"): readers treat
        that as a fact, not as an exception.
    """
    try:
        try:
            raw = read_bytes(path, limit=limit)
        except FileNotFoundError:
            if not ask_about(path.parent):
                return Unreadable("missing")
            raw = read_bytes(path, limit=limit)
    except FileNotFoundError:
        return Unreadable("missing")
    except (OSError, UnsafePathError) as error:
        refused = Unreadable(f"unreadable: {error}")
        refused.errno = error.errno if isinstance(error, OSError) else None
        return refused
    try:
        value = json.loads(raw.decode("utf-8", "replace"))
    except (ValueError, RecursionError) as error:
        return Unreadable(f"unreadable: {'cut off, ' if len(raw) >= limit else ''}{error}")
    if isinstance(value, dict):
        return value
    return Unreadable(f"unreadable: holds a {type(value).__name__}, not an object")
