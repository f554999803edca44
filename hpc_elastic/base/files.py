"""Private folders and whole-or-nothing files, the way to disk for everything outside the store.

Every folder is 0700 and every file 0600 whatever the umask; a path of another owner, or one that is a symbolic link,
is refused: a second user of the machine must not be able to make us read or write through something that they planted.

The small files of an attempt that is over are read from the two files into which `run.fold` has put them.
``output.log`` holds what the workers printed, ``records.log`` everything else. Each part is a line ``==> PATH: SIZE
bytes <==``, with PATH relative to the attempt's folder, then the bytes, then a line end. ``records.log`` is put into
place last, and before any of the files is removed: so a file is looked for first where it was written, and then there.
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
import struct
from collections.abc import Callable, Mapping
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

from hpc_elastic.errors import UnsafePathError

T = TypeVar("T")


def make_private_dir(path: Path, *, exist_ok: bool = True) -> None:
    """Create the folder `path` with mode 0700, or check that an existing one is ours alone.

    Raises UnsafePathError (something else is at `path`), FileExistsError (without `exist_ok`), or mkdir's OSError.
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
    """Raise UnsafePathError for a folder that is a link, that another user owns, or that others can write to."""
    info = os.lstat(path)
    if stat.S_ISLNK(info.st_mode):
        raise UnsafePathError(f"{path} is a symbolic link; give the folder itself, or remove the link")
    if not stat.S_ISDIR(info.st_mode):
        raise UnsafePathError(f"{path} is not a folder; remove it or choose another path")
    if info.st_uid != os.geteuid():
        raise UnsafePathError(f"{path} {_of_another(info)}; choose another path")
    if info.st_mode & 0o077:
        raise UnsafePathError(
            f"{path} is open to other users (mode {stat.S_IMODE(info.st_mode):04o}); run: chmod 700 {path}"
        )


def why_replaceable(folder: Path | str, *, option: str) -> str | None:
    """Say why another user could replace the contents of a folder, and the way out; None: no other user could.

    A sticky bit holds back all but the folder's owner. The folders above are not checked: projects' folders often
    belong to a user that is trusted. Links are followed. `option` is the one to give another folder with.
    """
    info = os.stat(folder)
    if info.st_uid not in (os.geteuid(), 0):
        return f"belongs to uid {info.st_uid}, who could replace what is in it; give a folder of your own with {option}"
    if info.st_mode & stat.S_IWOTH and not info.st_mode & stat.S_ISVTX:
        is_ours = info.st_uid == os.geteuid()
        way_out = f"run: chmod o-w {folder}" if is_ours else f"give a folder of your own with {option}"
        return f"can be written by every user; {way_out}"
    return None


def sole_owner(folder: Path) -> int:
    """The user who alone can have written the contents of a folder, before acting on them; showing them needs no check.

    The folder and the one above it may be links, but no other user's: theirs could lead anywhere. It is this user, who
    may have to trust root; to root, any one user. Raises UnsafePathError: another user wrote them, or could.
    """
    info, me = os.stat(folder), os.geteuid()
    if me != 0 and info.st_uid not in (me, 0):
        raise UnsafePathError(f"{folder} {_of_another(info)}", owner=info.st_uid)
    if info.st_mode & 0o022:
        mode = stat.S_IMODE(info.st_mode)
        raise UnsafePathError(f"{folder} can be written by other users (mode {mode:04o}); run: chmod go-w {folder}")
    given = Path(os.path.abspath(folder))
    for path in (given, given.parent):
        link = os.lstat(path)
        if stat.S_ISLNK(link.st_mode) and link.st_uid not in (info.st_uid, me, 0):
            raise UnsafePathError(f"{path} is a symbolic link of uid {link.st_uid}; give the folder itself")
    return info.st_uid


class Owner(Enum):
    OWN = "own"
    TRUSTED = "trusted"
    ANY = "any"


def open_checked(path: Path | str, flags: int = os.O_RDONLY, *, owner: Owner, links: Owner | None = None) -> int:
    """Open a regular file, or make it, where other users may have planted something: the one way to do that.

    The opened file is judged, not the path: another file could come in between the two. No FIFO's other end is waited
    for. A user who may write to a file may also link it to another name, so a file of ours to be written has one name.

    Args:
        path: Other users may be able to write into its folder.
        flags: No O_TRUNC, since the file is judged after it was opened.
        owner: Accepted owners of the file.
        links: Accepted owners of links on the way; None: no link is followed.

    Raises:
        UnsafePathError: it is a link, no regular file, another user's, or has a second name.
        OSError: open's.
    """
    here = Path(path)
    for _ in range(8):  # links
        try:
            fd = os.open(here, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC, 0o600)
            break
        except OSError as error:
            if error.errno == errno.ENXIO:  # a FIFO without a reader, or a socket
                raise UnsafePathError(f"{path} is not a regular file; remove it or choose another path") from None
            if error.errno != errno.ELOOP:
                raise
            if links is None:
                raise UnsafePathError(f"{path} is a symbolic link; give the file itself, or remove the link") from None
        here = _target(here, links)
    else:
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
    try:
        _judge(path, os.fstat(fd), owner, writes=bool(flags & (os.O_WRONLY | os.O_RDWR)))
    except BaseException:
        os.close(fd)
        raise
    return fd


def _target(link: Path, owner: Owner) -> Path:
    # The link's owner and its target are read from one descriptor.
    fd = os.open(link, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        info = os.fstat(fd)
        if not stat.S_ISLNK(info.st_mode):
            return link
        if not _is_of(owner, info):
            raise UnsafePathError(f"{link} is a symbolic link that {_of_another(info)}", owner=info.st_uid)
        return link.parent / os.readlink("", dir_fd=fd)
    finally:
        os.close(fd)


def _judge(path: Path | str, info: os.stat_result, owner: Owner, *, writes: bool) -> None:
    if not stat.S_ISREG(info.st_mode):
        raise UnsafePathError(f"{path} is not a regular file; remove it or choose another path")
    if not _is_of(owner, info):
        way_out = "; choose another path" if owner is Owner.OWN else ""
        raise UnsafePathError(f"{path} {_of_another(info)}{way_out}", owner=info.st_uid)
    if owner is Owner.OWN and writes and info.st_nlink > 1:
        raise UnsafePathError(f"{path} has a second name (a hard link); remove it or choose another path")


def _is_of(owner: Owner, info: os.stat_result) -> bool:
    return owner is Owner.ANY or info.st_uid == os.geteuid() or (owner is Owner.TRUSTED and info.st_uid == 0)


def _of_another(info: os.stat_result) -> str:
    return f"belongs to uid {info.st_uid}, not to you (uid {os.geteuid()})"


def write_private(path: Path, data: bytes | str, *, durable: bool = False, mode: int = 0o600) -> None:
    """Write a file whole or not at all (temporary file beside it, then ``os.replace``). Its folder exists.

    Text is written as UTF-8. `durable` waits for the disk, which is not needed for others to *see* the file. `mode`
    holds whatever the umask. Raises OSError, after the temporary file was removed.
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
            pass  # the first error is the one that is raised
        raise


def write_json(path: Path, value: Mapping[str, Any], *, durable: bool = False) -> None:
    write_private(path, json_text(value, indent=1) + "\n", durable=durable)


DECEPTIVE = (
    "\x7f-\x9f"  # controls of eight bits, which steer a terminal as an escape does
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # the direction of writing
    "\u2028\u2029"  # line ends
    "\u00ad\u180e\u200b\u2060-\u2064\u206a-\u206f\ufeff\ufff9-\ufffb\U000e0000-\U000e007f"  # not to be seen
)
"""Characters, as the inside of a pattern's brackets, with which a text shows something false."""
_DECEPTIVE = re.compile(f"[{DECEPTIVE}]")


def escaped(char: str) -> str:
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
    """Read at most `limit` bytes from the start of a file, as `open_checked` opens it: no link, never a FIFO."""
    fd = open_file(path, owner=Owner.TRUSTED if os.geteuid() else Owner.ANY)
    try:
        return read_from(fd, limit)
    finally:
        os.close(fd)


def read_from(fd: int, limit: int) -> bytes:
    chunks: list[bytes] = []
    while limit > 0 and (chunk := os.read(fd, min(limit, 1 << 20))):
        chunks.append(chunk)
        limit -= len(chunk)
    return b"".join(chunks)


def ask_about(folder: Path) -> bool:
    """Make this host's NFS client ask the server for the contents of a folder, and of those above if it seems missing.

    A client remembers for up to a minute (acdirmax) that a name was missing, although another host makes it meanwhile.
    Opening the folder makes it forget. Returns whether the folder is there, so that another look can find more.
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


def read_again(read: Callable[[], T], folder: Path) -> T:
    """Do `read`, and once more where it missed a file, and the server still has its `folder`."""
    try:
        return read()
    except FileNotFoundError:
        if not ask_about(folder):
            raise
        return read()


class Unreadable(str):
    errno: int | None = None
    """Set where the filesystem refused; another try may do better."""


_MOST = (1 << 63) - 1
_DIGITS_AS_0 = bytes(ord("0") if chr(byte).isascii() and chr(byte).isdigit() else byte for byte in range(256))


def has_long_number(raw: bytes | str) -> bool:
    """Check whether a JSON text may hold an integer of more than 64 bits."""
    if isinstance(raw, bytes):  # a tenth of the time that the regular expression takes, which was a sixth of a report's
        return raw.translate(_DIGITS_AS_0).rfind(b"0" * 20) >= 0  # from the end: a quarter of the time
    return re.search(r"[0-9]{20}", raw) is not None


def parse_json(raw: bytes | str) -> Any:
    """Decode JSON that another host, version or user may have written. Raises ValueError or RecursionError.

    Integers are clamped to 64 bits: no larger one is converted to a float, a time or a text.
    """
    text = raw.decode("utf-8", "replace") if isinstance(raw, bytes) else raw
    return json.loads(text, parse_int=_within_64_bits if has_long_number(raw) else None)


def _within_64_bits(digits: str) -> int:
    if len(digits) < 20:
        return int(digits)
    return -_MOST if digits[0] == "-" else _MOST


def read_json(path: Path, *, limit: int = 16 << 20) -> dict[str, Any] | Unreadable:
    """A JSON object from a file that may be missing, torn, foreign or newer, or why it is unreadable ("missing",
    "unreadable: …")."""
    try:
        raw = read_again(lambda: read_bytes(path, limit=limit), path.parent)
    except FileNotFoundError:
        return Unreadable("missing")
    except (OSError, UnsafePathError) as error:
        refused = Unreadable(f"unreadable: {error}")
        refused.errno = error.errno if isinstance(error, OSError) else None
        return refused
    try:
        value = parse_json(raw)
    except (ValueError, RecursionError) as error:
        return Unreadable(f"unreadable: {'cut off, ' if len(raw) >= limit else ''}{error}")
    if isinstance(value, dict):
        return value
    return Unreadable(f"unreadable: holds a {type(value).__name__}, not an object")


OUTPUT = "output.log"
RECORDS = "records.log"
OF_RUN = ("nodes.json", "preload.json")
"""Files beside the attempts that are folded with the newest one, under their bare names."""
LARGEST_PART = 64 << 20
_MOST_PARTS = 1 << 20
_LONGEST_HEAD = 4 << 10

Parts = Mapping[str, tuple[int, int]]
"""Path within the attempt → where its bytes begin, and how many there are."""
_known: dict[tuple[int, ...], Parts] = {}
_MOST_KNOWN = 64


def head(name: str, size: int) -> bytes:
    return b"==> %b: %d bytes <==\n" % (os.fsencode(name), size)


def open_file(path: Path | str, *, owner: Owner | None = None) -> int:
    """Open a file to be read, no link and no FIFO; one that was folded as a copy in memory, which has no link count.

    `owner`: judge the file as `open_checked` does. Raises OSError, with `owner` UnsafePathError.
    """
    try:
        if owner is not None:
            return open_checked(path, owner=owner)
        return os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        fd = _open_part(path, owner or Owner.ANY)
        if fd is None:
            raise
        return fd


def _open_part(path: Path | str, owner: Owner) -> int | None:
    for file, parts, name in _folds(path, owner):
        if name not in parts:
            continue
        at, size = parts[name]
        try:
            source = open_checked(file, owner=owner)
        except UnsafePathError:
            return None
        try:
            copy = os.memfd_create(name[-200:].replace("/", "-"))
            while size > 0 and (data := os.pread(source, min(size, 1 << 20), at)):
                os.write(copy, data)
                at, size = at + len(data), size - len(data)
        finally:
            os.close(source)
        os.lseek(copy, 0, os.SEEK_SET)
        return copy
    return None


def names_in(folder: Path | str) -> list[str]:
    """The names in a folder, folded ones included. Raises OSError: it can't be listed, or is missing and not folded."""
    try:
        found, missing = set(os.listdir(folder)), None
    except (FileNotFoundError, NotADirectoryError) as error:
        found, missing = set(), error
    for _, parts, name in _folds(folder, Owner.ANY):
        below = f"{name}/" if name != "." else ""
        found |= {part[len(below) :].partition("/")[0] for part in parts if part.startswith(below)}
    if missing is not None and not found:
        raise missing
    return list(found)


def size_of(path: Path | str) -> int | None:
    try:
        return os.stat(path, follow_symlinks=False).st_size
    except OSError:
        return next((parts[name][1] for _, parts, name in _folds(path, Owner.ANY) if name in parts), None)


def read_parts(file: Path, *, owner: Owner = Owner.ANY) -> Parts:
    try:
        fd = open_checked(file, owner=owner)
    except (OSError, UnsafePathError):
        return {}
    try:
        info = os.fstat(fd)
        key = (info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns)
        if key not in _known:
            if len(_known) >= _MOST_KNOWN:
                _known.clear()
            _known[key] = _find_parts(fd, info.st_size)
        return _known[key]
    except OSError:
        return {}
    finally:
        os.close(fd)


def _folds(path: Path | str, owner: Owner) -> list[tuple[Path, Parts, str]]:
    whole = Path(os.path.abspath(path))
    for attempt in (whole, *whole.parents[:4]):
        number = attempt.name.removeprefix("attempt-")
        if number != attempt.name and len(number) >= 3 and number.isdecimal():
            name = os.path.relpath(whole, attempt)
            records = read_parts(attempt / RECORDS, owner=owner)
            if not records:
                return []
            output = attempt / OUTPUT
            return [(attempt / RECORDS, records, name), (output, read_parts(output, owner=owner), name)]
    if whole.name in OF_RUN:
        for attempt in sorted(whole.parent.glob("attempt-*"), key=lambda one: (len(one.name), one.name), reverse=True):
            if whole.name in (records := read_parts(attempt / RECORDS, owner=owner)):
                return [(attempt / RECORDS, records, whole.name)]
    return []


def _find_parts(fd: int, size: int) -> Parts:
    of_part = re.compile(rb"==> ([^\n]{1,1000}): (\d{1,15}) bytes <==\n")  # not at every agent's start
    parts: dict[str, tuple[int, int]] = {}
    at = 0
    while at < size and len(parts) < _MOST_PARTS:
        match = of_part.match(os.pread(fd, _LONGEST_HEAD, at))
        if match is None:
            break
        begin, length = at + match.end(), int(match[2])
        if length > LARGEST_PART or begin + length > size:
            break
        parts[os.fsdecode(match[1])] = begin, length
        at = begin + length + 1
    return parts
