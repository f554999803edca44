"""Reads the small files of an attempt that is over from the two files into which `run.fold` has put them.

``output.log`` holds what the workers printed, ``records.log`` everything else. Each part is a line ``==> PATH: SIZE
bytes <==``, with PATH relative to the attempt's folder, then the bytes, then a line end. ``records.log`` is put into
place last, and before any of the files is removed: so a file is looked for first where it was written, and then here.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from hpc_elastic.base.files import Owner, open_checked
from hpc_elastic.errors import UnsafePathError

OUTPUT = "output.log"
RECORDS = "records.log"
OF_RUN = ("nodes.json", "preload.json")
"""Files beside the attempts that are folded with the newest one, under their bare names."""
LARGEST_PART = 64 << 20
_MOST_PARTS = 1 << 20
_LONGEST_HEAD = 4 << 10
_HEAD = re.compile(rb"==> ([^\n]{1,1000}): (\d{1,15}) bytes <==\n")
_ATTEMPT = re.compile(r"attempt-\d{3,}\Z")

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
        if _ATTEMPT.match(attempt.name):
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
    parts: dict[str, tuple[int, int]] = {}
    at = 0
    while at < size and len(parts) < _MOST_PARTS:
        match = _HEAD.match(os.pread(fd, _LONGEST_HEAD, at))
        if match is None:
            break
        begin, length = at + match.end(), int(match[2])
        if length > LARGEST_PART or begin + length > size:
            break
        parts[os.fsdecode(match[1])] = begin, length
        at = begin + length + 1
    return parts
