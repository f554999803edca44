"""When workers write files, as the kernel reports it: to stop them while they save. Linux's inotify, on one host."""

from __future__ import annotations

import ctypes
import os
import re
import secrets
import shutil
import struct
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from msgspec import Struct, field
from msgspec.structs import replace

_ACCESS, _MODIFY, _CLOSE_WRITE, _CLOSE_NOWRITE = 0x1, 0x2, 0x8, 0x10
_MOVED_FROM, _MOVED_TO, _CREATE, _DELETE = 0x40, 0x80, 0x100, 0x200
_IS_DIR, _OVERFLOW = 0x40000000, 0x4000
_WANTED = _ACCESS | _MODIFY | _CLOSE_WRITE | _CLOSE_NOWRITE | _MOVED_FROM | _MOVED_TO | _CREATE | _DELETE
_EVENT = struct.Struct("iIII")
_MOST_FOLDERS = 500
_MOST_RECENT = 1000
_SAVE_SECONDS = 1.0
"""What was written in so short a time belongs to one save."""
_NOT_CHECKPOINTS = frozenset((".git", "__pycache__", ".venv", "node_modules"))


class FileEvent(Struct, frozen=True, kw_only=True):
    """One thing that was done to a file."""

    path: Path
    is_written: bool = False
    """Data was written into it."""
    is_closed: bool = False
    """A writer has closed it."""
    is_moved_here: bool = False
    """It got this name when it was whole."""
    is_moved_away: bool = False
    is_removed: bool = False
    is_read: bool = False
    """It was read, or a reader has closed it."""
    is_save: bool = False
    """It may be a checkpoint that is written: not a file that only grows, as a log does."""


class WrittenNames(Struct, kw_only=True):
    """How files of each name are written, digits aside: as logs, which only grow, or anew each time."""

    grown: dict[str, int] = field(default_factory=dict)
    replaced: set[str] = field(default_factory=set)

    def note(self, name: str, *, size: int, before: int | None, is_moved_here: bool) -> None:
        """A writer has closed the file, or given it this name."""
        if before is not None and size > before and not is_moved_here:
            self.grown[name] = self.grown.get(name, 0) + 1
        elif before is not None:
            self.replaced.add(name)

    def learn(self, other: WrittenNames) -> None:
        """What was seen on another machine holds here, too."""
        self.replaced |= other.replaced
        for name, count in other.grown.items():
            self.grown[name] = max(count, self.grown.get(name, 0))

    def is_log(self, name: str) -> bool:
        return self.grown.get(name, 0) >= 2 and name not in self.replaced


class FileVersions:
    """Of files that are renamed into their places: the version before the one that is there, as a hard link to it."""

    def __init__(self, folder: Path) -> None:
        """Args:
        folder: For the links; made when it is needed. Files on another filesystem have none.
        """
        self._folder = folder
        self._count = 0
        self._now: dict[Path, Path] = {}
        """A link to what is there."""
        self._before: dict[Path, Path | None] = {}
        """A link to what was there before; None: nothing was. What is not here is not known."""

    def came(self, path: Path, *, is_new: bool) -> None:
        """A file got this name; `is_new`: there was none of this name."""
        had = self._now.pop(path, None)
        self._remove(self._before.pop(path, None))
        self._count += 1
        link = self._folder / str(self._count)
        try:
            self._folder.mkdir(mode=0o700, exist_ok=True)
            os.link(path, link, follow_symlinks=False)
        except OSError:
            self._remove(had)
            return
        self._now[path] = link
        if had is not None and not os.path.samefile(had, link):
            self._before[path] = had
            return
        self._remove(had)  # a version came and went unseen
        if had is None and is_new:
            self._before[path] = None

    def went(self, path: Path) -> None:
        """The file is gone, or has another name."""
        for links in (self._now, self._before):
            self._remove(links.pop(path, None))

    def undo(self, source: Path, path: Path) -> bool:
        """Undo the last rename, from `source` to `path`. Returns whether it was possible."""
        try:
            if path not in self._before or not os.path.samefile(self._now[path], path):
                return False
            before = self._before[path]
            os.rename(path, source)
            if before is not None:
                os.link(before, path)
        except OSError:
            return False
        return True

    def close(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)

    def _remove(self, link: Path | None) -> None:
        if link is not None:
            link.unlink(missing_ok=True)


VERSIONS = ".versions-"
"""What the name of a folder with links begins with, beside the first folder that is watched."""


class SaveWatch:
    """Sees what is written below some folders. For one thread."""

    def __init__(self, folders: Iterable[Path], names: WrittenNames) -> None:
        """Args:
            folders: They, and what is below them.
            names: What is known of files' names; it learns from this watch.

        Raises:
            OSError: the kernel does not watch, or not so much.
        """
        self._libc = ctypes.CDLL(None, use_errno=True)
        self.fd = self._libc.inotify_init1(os.O_CLOEXEC | os.O_NONBLOCK)
        if self.fd < 0:
            raise OSError(ctypes.get_errno(), "inotify_init1")
        self._folders: dict[int, Path] = {}
        self._roots = tuple(folders)
        self._names = names
        self._sizes: dict[Path, int] = {}
        """Of files when a writer closed them last."""
        self._before: dict[Path, int] = {}
        """The same, of the time before that."""
        self._recent: deque[tuple[float, FileEvent]] = deque(maxlen=_MOST_RECENT)
        beside = self._roots[0].parent if self._roots else Path()
        self._versions = FileVersions(beside / f"{VERSIONS}{secrets.token_hex(4)}")
        for folder in self._roots:
            self._add(folder)

    def close(self) -> None:
        os.close(self.fd)
        self._versions.close()

    def _add(self, folder: Path) -> None:
        if len(self._folders) >= _MOST_FOLDERS or folder.name in _NOT_CHECKPOINTS:
            return
        number = self._libc.inotify_add_watch(self.fd, os.fsencode(folder), ctypes.c_uint32(_WANTED))
        if number < 0 or number in self._folders:
            return
        self._folders[number] = folder
        try:
            with os.scandir(folder) as entries:
                found = list(entries)
            below = [Path(entry.path) for entry in found if entry.is_dir(follow_symlinks=False)]
            self._sizes |= {
                Path(entry.path): entry.stat().st_size for entry in found if entry.is_file(follow_symlinks=False)
            }
        except OSError:
            return
        for path in below:
            self._add(path)

    def read(self) -> list[FileEvent]:
        """What was done since the last call, in its order; of readings the first of each file."""
        found, were_read = [], set()
        for event in list(self._read()):
            if event.is_read and event.path in were_read:
                continue
            if event.is_read:
                were_read.add(event.path)
            found.append(replace(event, is_save=True) if self._is_save(event) else event)
        self._recent += [(time.monotonic(), event) for event in found]
        return found

    def _read(self) -> Iterator[FileEvent]:
        while True:
            try:
                data = os.read(self.fd, 1 << 16)
            except BlockingIOError:
                return
            at = 0
            while at < len(data):
                number, mask, _, length = _EVENT.unpack_from(data, at)
                at += _EVENT.size
                name = data[at : at + length].rstrip(b"\0")
                at += length
                folder = self._folders.get(number)
                if folder is None or mask & _OVERFLOW:
                    continue
                path = folder / os.fsdecode(name) if name else folder
                if mask & _IS_DIR:
                    if mask & (_CREATE | _MOVED_TO):
                        self._add(path)
                    continue
                event = FileEvent(
                    path=path,
                    is_written=bool(mask & _MODIFY),
                    is_closed=bool(mask & _CLOSE_WRITE),
                    is_moved_here=bool(mask & _MOVED_TO),
                    is_moved_away=bool(mask & _MOVED_FROM),
                    is_removed=bool(mask & _DELETE),
                    is_read=bool(mask & (_ACCESS | _CLOSE_NOWRITE)),
                )
                self._note(event)
                yield event

    def _note(self, event: FileEvent) -> None:
        if event.is_moved_away or event.is_removed:
            self._sizes.pop(event.path, None)
            self._versions.went(event.path)
        if event.is_moved_here:
            self._versions.came(event.path, is_new=event.path not in self._sizes)
        if not (event.is_closed or event.is_moved_here):
            return
        try:
            size = event.path.stat().st_size
        except OSError:
            return
        before = self._sizes.get(event.path)
        self._names.note(self._name_of(event.path), size=size, before=before, is_moved_here=event.is_moved_here)
        self._before[event.path] = before or 0
        self._sizes[event.path] = size

    def _name_of(self, path: Path) -> str:
        """``w/step-12.pt`` and ``w/step-18.pt`` alike, and the same in any folder that is watched."""
        root = next((root for root in self._roots if path.is_relative_to(root)), None)
        return re.sub(r"\d+", "#", str(path if root is None else path.relative_to(root)))

    def _is_save(self, event: FileEvent) -> bool:
        return (event.is_written or event.is_moved_here) and not self._names.is_log(self._name_of(event.path))

    def tear(self) -> str:
        """Leave the file that was written last as a kill in it leaves it, half written; its writers are stopped.

        Returns:
            What was left so; empty where the last thing that was done was whole in itself.
        """
        events, closed = self._last_save()
        known = {event.path: self._before if event.path in closed else self._sizes for event in events}
        torn = tear(events, {path: sizes.get(path, 0) for path, sizes in known.items()})
        return "" if torn is None else f"{torn.name}, half written"

    def undo_rename(self) -> str:
        """Leave a save of several files as a kill just before the last rename leaves it; its writers are stopped.

        Returns:
            What was left so; empty where it is whole.
        """
        undone = undo_rename(self._last_save()[0], self._versions)
        return "" if undone is None else f"before {undone.name} had its name"

    def _last_save(self) -> tuple[list[FileEvent], set[Path]]:
        """What was done to files in the save that was seen last; which files a writer has closed in it."""
        since = time.monotonic() - _SAVE_SECONDS
        recent = [event for at, event in self._recent if at >= since]
        events = [event for event in recent if event.is_save or event.is_moved_away or event.is_removed]
        return events, {event.path for event in recent if event.is_closed}


def tear(events: Iterable[FileEvent], sizes: dict[Path, int]) -> Path | None:
    """Bring the file that was written last into a state that it was in while it was written: half of it is there.

    A writer that is killed leaves such a file. It is found too late to kill it just then, so the state is brought back;
    only where nothing was done to any file since, as otherwise there was never such a moment.

    Args:
        events: What was done to files in this save, in order; its writers are stopped.
        sizes: Of files that were there before the save.

    Returns:
        The file; None: the last thing that was done was whole in itself, as a rename is.
    """
    last: Path | None = None
    for event in events:
        if event.is_written:
            last = event.path
        elif event.is_moved_here or (event.is_moved_away and event.path == last):
            last = None
    if last is None:
        return None
    try:
        size = last.stat().st_size
        before = sizes.get(last, 0)
        os.truncate(last, before + (size - before) // 2 if size > before else size // 2)
    except OSError:
        return None
    return last


def undo_rename(events: Sequence[FileEvent], versions: FileVersions) -> Path | None:
    """Bring back the moment before the last file of several that are saved together got its name.

    Ranks that save at the same time, or one that saves two files, are never killed just between: that is over before
    it is seen.

    Args:
        events: What was done to files in this save, in order; its writers are stopped.
        versions: Of the files that were there.

    Returns:
        The file; None: it was saved alone, or something else was done since.
    """
    if len(events) < 3:
        return None
    *earlier, source, last = events
    is_rename = source.is_moved_away and last.is_moved_here
    if not is_rename or all(event.path in (source.path, last.path) for event in earlier):
        return None
    return last.path if versions.undo(source.path, last.path) else None
