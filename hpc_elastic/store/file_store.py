"""The store, as files: the few operations that hold on every shared filesystem.

Keys are ``folder/name`` or ``folder/sub/name``; no key is ever used again for another value, so nobody can mistake an
old value for a new one. Values are text of at least one character.

As files these are exclusive creation of names that are never used twice, listings, and cells rewritten in place: the
only operations that held on ext4, GlusterFS, MooseFS, CephFS, NFSv3 and sshfs alike; what did not (locks, O_APPEND,
replacing a file by rename, comparing times) is not used.

- A value is a symbolic link whose target text is the value: one operation on the server, whole or not there, no fsync.
  A longer value, or a filesystem without symlinks, takes a hard link to a temporary file; where there are no hard links
  either, an exclusively created file. A checksum shows that a file is half-written.
- The return code of a create is not trusted: a reply can be lost after the server did the work.
"""

from __future__ import annotations

import builtins
import contextlib
import errno
import os
import stat
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from hpc_elastic.base.clock import Clock, pause
from hpc_elastic.base.files import check_private_dir, make_private_dir, names_in, read_bytes
from hpc_elastic.base.loop import FULL, is_refusal
from hpc_elastic.errors import HpcElasticError


class StoreError(HpcElasticError):
    """The store can't do what was asked, and trying again won't help."""

    template = "store {root}: {why}"


class StoreFullError(StoreError):
    """A disk or a quota is full: nothing was written, and nothing can be until there is room."""


class StoreRefusedError(StoreError):
    """The filesystem has refused every access for longer than anything waits for it."""

    template = "the filesystem of the run directory has refused for {seconds:.0f} s: {why}"


class StoreWipedError(StoreError):
    """The store that this participant joined is gone or was replaced: going on could contradict what others read."""

    template = (
        "the run's store {root} {why} while the run was in progress, and it can't continue without it; "
        "start the run again, and exclude this folder from automatic clean-up"
    )


class Store(Protocol):
    """Values that are written once, cells that one owner rewrites, and listings.

    Any method may raise OSError for a passing fault of the filesystem; the caller tries again at its next step.
    """

    def put_if_absent(self, key: str, value: str) -> bool:
        """Give `key` its value, once and for good.

        Returns whether `key` now holds `value`: true also when an earlier try of the same caller had worked although it
        looked like a failure (a lost reply). Where StoreFullError or StoreError is raised, nothing was written.
        """

    def get(self, key: str) -> str | None:
        """The value of `key`, or None where there is none yet (or it can't be read whole yet).

        Of a cell: maybe an older value, and on GlusterFS for as long as it is not rewritten once more; `version` tells.
        """

    def list(self, folder: str) -> list[str]:
        """The names in `folder`, in no order, fresh from the server; empty where the folder is not there.

        On a server whose times are coarse, what changed within one tick (up to a second) of the last look may be missed
        until the next change; a client that caches by time alone (sshfs) shows what others changed that much later:
        `invalidate` before what must not be missed.
        """

    def version(self, key: str) -> str | None:
        """A value that changes with each `overwrite` of a cell, also with one that found no room; None: no cell."""

    def overwrite(self, key: str, value: str) -> None:
        """Rewrite a cell of one's own. One writer per cell; readers may see the old value for a while."""

    def delete(self, key: str) -> None:
        """Remove a key that nobody will look for again, or an empty folder; one that is not empty stays."""

    def invalidate(self, folder: str) -> None:
        """Make caches of `folder` expire: this client's at once, all others' when the server's clock has ticked.

        Called before a decision that depends on something's absence, and now and then while waiting for something.
        """

    def make_folder(self, folder: str) -> None:
        """Create a folder before anybody looks into it: one that is missing is asked for again and again."""

    def get_many(self, keys: Sequence[str]) -> builtins.list[str | None]:
        """`get` for each of `keys`; several at a time where many round trips cost more than one."""
        return [self.get(key) for key in keys]


LONGEST_SYMLINK = 900
"""Bytes of a value that still goes into a symlink: XFS takes 1,023 bytes with the checksum."""
LANES = 16
"""Reads at a time, where many are needed."""
SETTLE_SECONDS = 5.0
"""Seconds for which a name that a failed create may have left behind is looked for before the create is tried again."""
REFUSED_SECONDS = 0.5
"""The same where the looks are refused too: the caller tries again later."""

_HOPELESS = {errno.ENAMETOOLONG, errno.EROFS, errno.EMLINK}
_NO_SUCH_KIND = {errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.EXDEV}
_GONE = {errno.ENOENT, errno.ESTALE, errno.ENOTDIR}


class FileStore(Store):
    """Files under `root`, which belongs to this user alone (0700)."""

    def __init__(self, root: Path, *, clock: Clock, largest: int | None = None) -> None:
        """Open, or create, the store; `root`'s parent exists.

        `largest`: bytes of an entry, for a reader of what anybody may have prepared; a larger one is refused. Raises
        UnsafePathError: the folder is a link, another user's, or open to others.
        """
        make_private_dir(root)
        self.root = os.fspath(root)
        self._clock = clock
        self._largest = largest
        self._folders: set[str] = set()
        self._symlinks = True
        self._hard_links = True

    def put_if_absent(self, key: str, value: str) -> bool:
        path = self._path(key)
        raw = _encode(value)
        failure: OSError | None = None
        for _ in range(20):
            try:
                self._create(path, raw)
                return True
            except OSError as error:
                if error.errno in FULL:
                    raise StoreFullError(root=self.root, why=f"can't create {key}: {error.strerror}") from error
                if error.errno in _HOPELESS:
                    raise StoreError(root=self.root, why=f"can't create {key}: {error.strerror}") from error
                failure = error
                if error.errno == errno.ENOENT:
                    self._folders.discard(os.path.dirname(key))
                    self.make_folder(os.path.dirname(key))
                    continue
            found = self._settle(key)
            if found is not None:
                return found == value
        if self._is_full():
            raise StoreFullError(root=self.root, why=f"can't create {key}: {os.strerror(errno.ENOSPC)}")
        assert failure is not None
        raise failure

    def _create(self, path: str, raw: bytes) -> None:
        # That a way is not offered here is only remembered once another has worked: sshfs says EPERM to everything, to
        # a lost race and a full disk too.
        symlinks, hard_links = self._symlinks, self._hard_links
        # sshfs 3.7 refuses to read a link with ".." in it (EPERM).
        if symlinks and len(raw) <= LONGEST_SYMLINK and b".." not in raw and b"\0" not in raw:
            try:
                os.symlink(raw, os.fsencode(path))  # bytes: the text must not depend on this node's locale
                return
            except OSError as error:
                if not _may_be_no_such_kind(error, path):
                    raise
                symlinks = False
        if hard_links:
            temporary = os.path.join(os.path.dirname(path), f".{os.urandom(8).hex()}")
            _write_new(temporary, raw)
            try:
                os.link(temporary, path)
                self._symlinks = symlinks
                return
            except OSError as error:
                if not _may_be_no_such_kind(error, path):
                    raise
                hard_links = False
            finally:
                os.unlink(temporary)
        _write_new(path, raw)
        self._symlinks, self._hard_links = symlinks, hard_links

    def _is_full(self) -> bool:
        """Return whether there is no room, for filesystems that give no reason when they refuse (sshfs)."""
        try:
            room = os.statvfs(self.root)
        except OSError:
            return False
        return room.f_bavail == 0 or (room.f_files > 0 and room.f_favail == 0)

    def _settle(self, key: str) -> str | None:
        """Read the value behind a refused create, until it is visible, or five seconds have passed. OSError: the looks
        are refused too."""
        began = self._clock.monotonic()
        deadline = began + SETTLE_SECONDS
        folder, _, name = key.rpartition("/")
        delay = 0.01
        while True:
            found = None
            try:
                found = self.get(key)
                if found is None and name not in self.list(folder):
                    return None
            except OSError as error:  # a passing fault: look again until the deadline
                if is_refusal(error) and self._clock.monotonic() - began >= REFUSED_SECONDS:
                    raise
            if found is not None or self._clock.monotonic() >= deadline:
                return found
            pause(self._clock, delay)
            delay = min(0.2, delay * 2)

    def get_many(self, keys: Sequence[str]) -> builtins.list[str | None]:
        if len(keys) < 4:
            return [self.get(key) for key in keys]
        from concurrent.futures import ThreadPoolExecutor  # no agent of a small run ever needs it

        with ThreadPoolExecutor(min(LANES, len(keys)), thread_name_prefix="store") as pool:
            return list(pool.map(self.get, keys))

    def get(self, key: str) -> str | None:
        path = self._path(key)
        found = self._get(path)
        if found is None and self._ask_about(os.path.dirname(path)):
            found = self._get(path)
        return found

    def _get(self, path: str) -> str | None:
        try:
            return _decode(os.readlink(os.fsencode(path)))
        except OSError as error:
            if error.errno in _GONE:
                return None
            if error.errno != errno.EINVAL:
                raise
        found = self._read_file(path)
        return _decode(found[0]) if found else None

    def version(self, key: str) -> str | None:
        # The time too, for the owner that could only touch it: compared with this file's own former time, never with a
        # clock.
        path = self._path(key)
        found = self._read_file(path)
        if found is None and self._ask_about(os.path.dirname(path)):
            found = self._read_file(path)
        return f"{found[1]} {found[0].decode('utf-8', 'replace')}" if found else None

    def _ask_about(self, folder: str) -> bool:
        """Make the client ask the server for changes of a folder in which it found no such name.

        An NFS client remembers what it did not find, up to a minute (acdirmax), though it is created meanwhile. Opening
        the folder makes it ask, and forget; where the folder itself is missing, the one above has to be opened first.
        Returns whether the folder is there, so that another look can find more.
        """
        for again in (False, True):
            try:
                os.close(os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
                return True
            except OSError as error:
                if error.errno not in _GONE:
                    raise
                is_stale_root = error.errno == errno.ESTALE and folder == self.root
            if is_stale_root:
                _ask_mount(folder)
            if again or folder == self.root or not self._ask_about(os.path.dirname(folder)):
                break
        return False

    def _read_file(self, path: str) -> tuple[bytes, int] | None:
        """The whole file and its time in nanoseconds; None where it is gone or not there yet."""
        # Opened anew for each read: only open() makes an NFS client ask the server (close-to-open).
        fd = -1
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            info = os.fstat(fd)
            if not stat.S_ISREG(info.st_mode) or info.st_uid != os.geteuid():
                raise StoreError(root=self.root, why=f"{path} is not a file of ours")
            if self._largest is not None and info.st_size > self._largest:
                why = f"{path} has {info.st_size} bytes; no entry has more than {self._largest}"
                raise StoreError(root=self.root, why=why)
            chunks = []
            while chunk := os.read(fd, 1 << 20):
                chunks.append(chunk)
            return b"".join(chunks), info.st_mtime_ns
        except OSError as error:
            if error.errno in _GONE:
                return None
            raise
        finally:
            if fd >= 0:
                os.close(fd)

    def list(self, folder: str) -> list[str]:
        path = self._path(folder)
        found = self._list(path)
        if found is None and self._ask_about(path):
            found = self._list(path)
        return found or []

    @staticmethod
    def _list(path: str) -> builtins.list[str] | None:
        try:
            return [name for name in os.listdir(path) if name[0] != "."]
        except OSError as error:
            if error.errno in _GONE:
                return None
            raise

    def overwrite(self, key: str, value: str) -> None:
        raw = _encode(value)
        path = self._path(key)
        flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            fd = os.open(path, flags, 0o600)
        except FileNotFoundError:
            self._folders.discard(os.path.dirname(key))
            self.make_folder(os.path.dirname(key))
            fd = os.open(path, flags, 0o600)
        try:
            os.pwrite(fd, raw, 0)
            if os.fstat(fd).st_size != len(raw):
                os.ftruncate(fd, len(raw))
        except OSError as error:
            if error.errno not in FULL:
                raise
            os.utime(path)  # no room to rewrite it: a new time is a change too
        finally:
            os.close(fd)

    def delete(self, key: str) -> None:
        path = self._path(key)
        try:
            os.unlink(path)
            return
        except OSError as error:
            if error.errno in _GONE:
                return
            if error.errno not in (errno.EISDIR, errno.EPERM) or not stat.S_ISDIR(os.lstat(path).st_mode):
                raise
        self._folders.discard(key)
        try:
            os.rmdir(path)
        except OSError as error:
            # Not empty: another process's .nfsXXXX, or a claim that was just made.
            if error.errno not in (*_GONE, errno.ENOTEMPTY, errno.EEXIST, errno.EBUSY):
                raise

    def invalidate(self, folder: str) -> None:
        # What a client knows of a folder stays valid while the folder's time does not change; times tick by up to a
        # second. A client that changes the folder itself forgets what it knew; the others do when the tick is over.
        path = self._path(folder)
        missing = not self._invalidate(path)
        while missing and path != self.root:
            path = os.path.dirname(path)
            missing = not self._invalidate(path)

    def _invalidate(self, path: str) -> bool:
        name = f"{path}/.{os.urandom(8).hex()}"
        try:
            if self._symlinks:
                os.symlink("stir", name)
            else:
                os.close(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))
        except OSError as error:
            if error.errno in _GONE:
                return False  # any other is no matter: it only makes a cache fresher
        with contextlib.suppress(OSError):
            os.unlink(name)  # also after an error: the reply may have been lost
        return True

    def check(self) -> None:
        """Refuse to go on over a store that was put in this one's place: UnsafePathError, FileNotFoundError."""
        check_private_dir(Path(self.root))

    def _path(self, key: str) -> str:
        return f"{self.root}/{key}"

    def make_folder(self, folder: str) -> None:
        if not folder or folder in self._folders:
            return
        at = self.root
        for part in folder.split("/"):
            at = f"{at}/{part}"
            with contextlib.suppress(FileExistsError):
                os.mkdir(at, 0o700)  # also with a stale negative entry on NFS: the look-up said that it is not there
        self._folders.add(folder)


class FoldedStore(FileStore):
    """The store of a run that is over, to be read where its values were folded (`run.fold`). It is never created."""

    def __init__(self, root: Path, *, clock: Clock, largest: int) -> None:
        self.root = os.fspath(root)
        self._clock = clock
        self._largest = largest

    def get(self, key: str) -> str | None:
        path = self._path(key)
        try:
            return self._get(path) or _decode(read_bytes(Path(path), limit=self._largest or 0))
        except FileNotFoundError:
            return None

    def list(self, folder: str) -> builtins.list[str]:
        try:
            return [name for name in names_in(self._path(folder)) if name[0] != "."]
        except FileNotFoundError:
            return []


def _encode(value: str) -> bytes:
    text = value.encode("utf-8", "surrogateescape")
    return b"%08x %b" % (zlib.crc32(text), text)


def _decode(raw: bytes) -> str | None:
    """None where the checksum says that the value is not whole."""
    checksum, _, text = raw.partition(b" ")
    return text.decode("utf-8", "surrogateescape") if checksum == b"%08x" % zlib.crc32(text) else None


def _ask_mount(path: str) -> None:
    """Raise OSError where the filesystem as a whole answers no more (its export was withdrawn), and not only a folder
    is gone."""
    point = "/"
    with open("/proc/self/mounts", "rb") as mounts:
        for line in mounts:
            at = os.fsdecode(line.split(b" ")[1].decode("unicode_escape").encode("latin-1"))
            if len(at) > len(point) and (path == at or path.startswith(f"{at}/")):
                point = at
    os.close(os.open(point, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))


def _may_be_no_such_kind(error: OSError, path: str) -> bool:
    """A refused create may say that the filesystem has no such thing, not that another process was first."""
    return error.errno in _NO_SUCH_KIND or (error.errno == errno.EPERM and not os.path.lexists(path))


def _write_new(path: str, raw: bytes) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        view = memoryview(raw)
        while view:
            view = view[os.write(fd, view) :]
        os.fsync(fd)  # others build on it: it must not turn out empty after this node's power is lost
    except BaseException:
        os.unlink(path)
        raise
    finally:
        os.close(fd)
