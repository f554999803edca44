"""Private folders and whole-or-nothing files: how everything outside the store reaches the disk.

Every folder is 0700 and every file 0600 whatever the umask; a path of another owner, or one that is a symbolic link,
is refused: a second user of the machine must not be able to make us read or write through something that they planted.
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
import struct
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


DECEPTIVE = (
    "\x7f-\x9f"  # controls of eight bits, which steer a terminal as an escape does
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # the direction of writing
    "\u2028\u2029"  # line ends
    "\u00ad\u180e\u200b\u2060-\u2064\u206a-\u206f\ufeff\ufff9-\ufffb\U000e0000-\U000e007f"  # not to be seen
)
"""Characters, as the inside of a pattern's brackets, with which a text shows something that is not there."""
_DECEPTIVE = re.compile(f"[{DECEPTIVE}]")


def escaped(char: str) -> str:
    """A character as JSON and Python escape it."""
    return "".join(f"\\u{unit:04x}" for (unit,) in struct.iter_unpack(">H", char.encode("utf-16-be", "surrogatepass")))


def json_text(value: Mapping[str, Any], *, indent: int | None = None) -> str:
    """JSON that any reader decodes and any terminal may show.

    Readable text, but escapes for what is deceptive, and ASCII where a value holds bytes that are no UTF-8: Python
    keeps such bytes (of an argument, a path, a worker's message) as lone surrogates, which UTF-8 cannot hold.
    """
    text = json.dumps(value, ensure_ascii=False, indent=indent, default=str)
    if text.isascii() and "\x7f" not in text:
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(value, indent=indent, default=str)
    return _DECEPTIVE.sub(lambda found: escaped(found[0]), text)


def read_bytes(path: Path, *, limit: int) -> bytes:
    """At most `limit` bytes from the start of a regular file. Never follows a link, never blocks on a FIFO.

    Raises:
        UnsafePathError: it is not a regular file, or another user owns it.
        OSError: as open and read.
    """
    fd = open_regular(path)
    try:
        info = os.fstat(fd)
        if info.st_uid not in (os.geteuid(), 0) and os.geteuid() != 0:
            raise UnsafePathError(f"{path} belongs to uid {info.st_uid}, not to you (uid {os.geteuid()})")
        return _read(fd, limit)
    finally:
        os.close(fd)


OPEN_TO_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
"""How a file is opened that another user may have planted: no link is followed, and no FIFO is waited for."""


def open_regular(path: Path) -> int:
    """A descriptor of a regular file, for reading.

    Raises:
        UnsafePathError: it is not a regular file.
        OSError: as open; ELOOP where it is a link.
    """
    fd = os.open(path, OPEN_TO_READ)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise UnsafePathError(f"{path} is not a regular file")
    except BaseException:
        os.close(fd)
        raise
    return fd


def _read(fd: int, limit: int) -> bytes:
    chunks: list[bytes] = []
    left = limit
    while left > 0:
        chunk = os.read(fd, min(left, 1 << 20))
        if not chunk:
            break
        chunks.append(chunk)
        left -= len(chunk)
    return b"".join(chunks)


def is_trusted_owner(uid: int) -> bool:
    """Whether what `uid` wrote may decide what is executed here: this process' own user, or root."""
    return uid in (0, os.geteuid())


class TrustedFile:
    """A file that decides what is executed, opened once: it is judged and read by one descriptor.

    By path, another file could come in between the two. A context manager.
    """

    def __init__(self, path: Path, *, any_owner: bool = False) -> None:
        """Open it. Nothing is read, and no FIFO is waited for.

        Args:
            path: May be a link, or a chain of links, of trusted owners.
            any_owner: The user has named this file, and trusts it whosever it is.

        Raises:
            UnsafePathError: it is not a regular file, or a link of another user leads to it.
            OSError: as open.
        """
        self._path, self._any_owner = path, any_owner
        self._fd = _open_through_links(path, any_owner=any_owner)

    def __enter__(self) -> TrustedFile:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)

    def check(self) -> None:
        """Refuse what another user wrote, or could have written.

        Raises:
            UnsafePathError: with one line that says why.
        """
        info = os.fstat(self._fd)
        if self._any_owner:
            return
        if not is_trusted_owner(info.st_uid):
            raise UnsafePathError(
                f"{self._path} belongs to uid {info.st_uid}, not to you (uid {os.geteuid()})", owner=info.st_uid
            )
        if info.st_mode & stat.S_IWOTH:
            # Who may write to a file of root's may also link it to another name.
            raise UnsafePathError(f"{self._path} can be written by every user; run: chmod o-w {self._path}")

    def read(self, *, limit: int) -> bytes:
        """At most `limit` bytes.

        Raises:
            UnsafePathError: the kernel makes the content up as it is read, as in /proc: in a file of root's may stand
                what another user chose (the arguments of a process).
            OSError: as read.
        """
        os.lseek(self._fd, 0, os.SEEK_SET)
        data = _read(self._fd, limit)
        if len(data) > os.fstat(self._fd).st_size:
            raise UnsafePathError(f"{self._path} is made up by the kernel, and no file on a disk")
        return data


_MOST_LINKS = 8


def _open_through_links(path: Path, *, any_owner: bool) -> int:
    """`open_regular` of what a chain of links leads to, each of a trusted owner."""
    here = path
    for _ in range(_MOST_LINKS):
        try:
            return open_regular(here)
        except UnsafePathError:
            raise UnsafePathError(f"{path} is not a regular file") from None
        except OSError as error:
            if error.errno != errno.ELOOP:
                raise
        # The link itself, opened: its owner and its target are of one descriptor, too.
        link = os.open(here, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            info = os.fstat(link)
            if stat.S_ISLNK(info.st_mode):
                if not (any_owner or is_trusted_owner(info.st_uid)):
                    raise UnsafePathError(
                        f"{here} is a symbolic link that belongs to uid {info.st_uid}, not to you (uid {os.geteuid()})",
                        owner=info.st_uid,
                    )
                here = here.parent / os.readlink("", dir_fd=link)
        finally:
            os.close(link)
    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))


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
