"""Finds the files that a script writes, and when; how they were written before shows which are checkpoints."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from msgspec import Struct, field

_MOST_FOLDERS = 500
_LOOK_SECONDS = 0.2
_SMALL = 0.1
"""A file below this share of the largest one is no checkpoint, but a pointer to it, or metrics."""
_NOT_CHECKPOINTS = frozenset((".git", "__pycache__", ".venv", "node_modules"))


class FileNames(Struct, kw_only=True):
    """How files of each name are written, digits aside. It is learned from all runs of a rehearsal."""

    sizes: dict[str, int] = field(default_factory=dict)
    grown: dict[str, float] = field(default_factory=dict)
    """Seconds for which a file of the name grew: a log does for long, a checkpoint while it is written."""
    replaced: set[str] = field(default_factory=set)
    seconds: float = 0.0

    def is_checkpoint(self, name: str) -> bool:
        """An unknown file may be one: one still to be renamed mostly has the final name with more behind it."""
        known = [one for one in self.sizes if name.startswith(one)]
        largest = max((size for one, size in self.sizes.items() if not self._is_log(one)), default=0)
        return not known or any(self.sizes[one] >= _SMALL * largest and not self._is_log(one) for one in known)

    def _is_log(self, name: str) -> bool:
        return self.grown.get(name, 0.0) > 0.3 * self.seconds and name not in self.replaced


class SavedFiles:
    def __init__(self, folders: Sequence[Path], names: FileNames) -> None:
        self._folders = folders
        self._names = names
        self._seen: dict[Path, os.stat_result] = {}
        self._first: dict[Path, float] = {}
        self._next = 0.0
        self._began = time.monotonic()

    def is_checkpoint(self, path: Path) -> bool:
        name = self._name_of(path)
        return name is not None and self._names.is_checkpoint(name)

    def look(self) -> bool:
        """Look a few times a second; returns whether a file that may be a checkpoint was written since."""
        now = time.monotonic()
        if now < self._next:
            return False
        found = False
        self._names.seconds = max(self._names.seconds, now - self._began)
        for entry in (one for _, entries in folders_below(self._folders) for one in entries):
            with suppress(OSError):  # renamed meanwhile
                if entry.is_file(follow_symlinks=False):
                    found |= self._look_at(Path(entry.path), entry.stat(follow_symlinks=False), now)
        self._next = time.monotonic() + max(_LOOK_SECONDS, 10 * (time.monotonic() - now))
        return found

    def _look_at(self, path: Path, info: os.stat_result, now: float) -> bool:
        before, name = self._seen.get(path), self._name_of(path)
        if before is not None and _signs(before) == _signs(info):
            return False
        self._seen[path] = info
        if name is None:
            return False
        age = now - self._first.setdefault(path, now)
        self._names.sizes[name] = max(info.st_size, self._names.sizes.get(name, 0))
        if before is not None and before.st_ino == info.st_ino and info.st_size > before.st_size:
            self._names.grown[name] = max(age, self._names.grown.get(name, 0.0))
        elif before is not None:
            self._names.replaced.add(name)
        return self._names.is_checkpoint(name)

    def _name_of(self, path: Path) -> str | None:
        """``w/step-12.pt`` and ``w/step-18.pt`` alike, and the same in the folder of each run."""
        root = next((folder for folder in self._folders if path.is_relative_to(folder)), None)
        return None if root is None else re.sub(r"\d+", "#", str(path.relative_to(root)))


def folders_below(folders: Sequence[Path]) -> Iterator[tuple[Path, list[os.DirEntry[str]]]]:
    """These folders and those below, some hundred at most, with their entries."""
    waiting, count = list(folders), 0
    while waiting and count < _MOST_FOLDERS:
        folder, count = waiting.pop(), count + 1
        try:
            with os.scandir(folder) as entries:
                found = list(entries)
            below = [Path(one.path) for one in found if one.is_dir(follow_symlinks=False)]
        except OSError:
            continue
        yield folder, found
        waiting += [path for path in below if path.name not in _NOT_CHECKPOINTS]


def _signs(info: os.stat_result) -> tuple[int, int, int]:
    return info.st_ino, info.st_size, info.st_mtime_ns
