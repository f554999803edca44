"""Folds the small files of a run that is over into two for each attempt; `base.files` reads them there.

It may be killed at any step: the folded files are synced under other names, renamed, and only then are those removed
that are in them, so each file can be read at every moment. The next call goes on where it was interrupted.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

from msgspec import Struct

from hpc_elastic.base.files import (
    LARGEST_PART,
    OF_RUN,
    OUTPUT,
    RECORDS,
    Unreadable,
    head,
    read_json,
    read_parts,
    write_private,
)
from hpc_elastic.run.paths import AttemptPaths, RunPaths, rank_index, round_index

LARGEST_OUTPUT = 1 << 20
"""Bytes of a worker's output that is still folded; a larger one stays where it is."""
MOST_OUTPUT = 64 << 20
"""Bytes of ``output.log``, which is read with an editor."""
_RECORDS = ("events", "heartbeats", "setup", "suspicions", "slow-ranks", "checkpoints", "store")
_USELESS = ("health",)
_OUTPUT = re.compile(r"std(out|err)\.log(\.\d{3,9})?\Z")
_OF_RANK = re.compile(r"error(\.original)?\.json\Z|error-replaced-\d+\.json\Z|stacks\.txt\Z")
_LINK = re.compile(r'(attempt-\d{3,})/(round-\d{3,}/rank-\d{5,}/[\w.-]+)"')
_OF_ROUND = re.compile(r"times-node-\d+\Z")
_OF_ATTEMPT = re.compile(r"(store-host|fork-server)-\d+\.log\Z|agent-\d+\.error\.json\Z")


class _File(Struct, frozen=True):
    name: str
    size: int
    is_link: bool


def fold_run(paths: RunPaths, *, is_late: Callable[[], bool]) -> None:
    """Fold all attempts of a run to which no process writes any more, and remove ``latest`` and the best pace.

    `is_late` is asked between two files: there is no time for more. Raises OSError: no room, or the filesystem refuses;
    nothing is lost.
    """
    is_call = (paths.root / "call.pkl").exists()  # programs have the paths of its ranks' files, as of submitit's
    attempts = paths.attempts()
    for attempt in attempts:
        if attempt.result_json.exists() and not is_late():
            _fold_attempt(attempt, is_late, with_ranks=not is_call, is_newest=attempt is attempts[-1])
    for attempt in attempts:
        try:
            page = attempt.report_html.read_text(encoding="utf-8")
        except FileNotFoundError:
            continue
        if (now := relinked(page, paths.root)) != page:
            write_private(attempt.report_html, now)
    if not is_late():
        paths.pace_json.unlink(missing_ok=True)
        if paths.latest.is_symlink():
            paths.latest.unlink()


def relinked(page: str, root: Path) -> str:
    """The page of a report with its links to folded files led to where they are now."""

    def place(link: re.Match[str]) -> str:
        attempt, name = root / link[1], link[2]
        found = (folded for folded in (OUTPUT, RECORDS) if name in read_parts(attempt / folded))
        return link[0] if (attempt / name).exists() else f'{link[1]}/{next(found, name)}"'

    return _LINK.sub(place, page)


def _fold_attempt(attempt: AttemptPaths, is_late: Callable[[], bool], *, with_ranks: bool, is_newest: bool) -> None:
    root = attempt.root
    if not (root / RECORDS).exists():
        cause = _error_file_of_cause(attempt)
        files = [file for file in _small_files(root, with_ranks=with_ranks) if root / file.name != cause]
        if is_newest:
            files += [file for entry in _entries(root.parent) if entry.name in OF_RUN for file in _file(entry, "")]
        outputs = sorted((file for file in files if _is_output(file)), key=lambda file: file.size)
        total, chosen = 0, []
        for file in outputs:
            total += file.size
            if file.size <= LARGEST_OUTPUT and total <= MOST_OUTPUT:
                chosen.append(file)
        chosen.sort(key=lambda file: file.name)
        records = [file for file in files if not _is_output(file) and file.size <= LARGEST_PART]
        for name, some in ((OUTPUT, chosen), (RECORDS, records)):
            if (some or name == RECORDS) and not _write(root, name, some, is_late):
                return
    for name in (OUTPUT, RECORDS):
        parts = read_parts(root / name)
        # The log last, its newest record at the end: until then the store shows that the run is closed.
        for part in sorted(parts, key=lambda part: (part.startswith("store/log/"), part)):
            if is_late():
                return
            if is_newest or part not in OF_RUN:  # the run's own are those of a later attempt
                _remove(_place(root, part), parts[part][1])
    _remove_folders(root)


def _place(root: Path, name: str) -> Path:
    return (root.parent if name in OF_RUN else root) / name


def _error_file_of_cause(attempt: AttemptPaths) -> Path | None:
    """The file that the report names, for programs that look there as they do after torchrun."""
    report = read_json(attempt.report_json)
    verdict = report.get("verdict") if not isinstance(report, Unreadable) else None
    try:
        return attempt.rank(int(verdict["round"]), int(verdict["failure"]["global_rank"])).error_file  # type: ignore[index]
    except (KeyError, TypeError, ValueError):
        return None


def _is_output(file: _File) -> bool:
    return _OUTPUT.match(os.path.basename(file.name)) is not None


def _small_files(root: Path, *, with_ranks: bool) -> Iterator[_File]:
    for top in _entries(root):
        name = top.name
        if name in _RECORDS:
            yield from _below(root, name)
        elif _OF_ATTEMPT.match(name):
            yield from _file(top, "")
        elif round_index(name) is not None:
            for entry in _entries(root / name):
                if _OF_ROUND.match(entry.name):
                    yield from _file(entry, name)
                elif with_ranks and rank_index(entry.name) is not None and entry.is_dir(follow_symlinks=False):
                    yield from _of_rank(root / name / entry.name, f"{name}/{entry.name}")


def _of_rank(folder: Path, name: str) -> Iterator[_File]:
    """A folder that holds anything else, such as a dump of the flight recorder, stays whole."""
    entries = _entries(folder)
    if all(_OUTPUT.match(entry.name) or _OF_RANK.match(entry.name) for entry in entries):
        for entry in entries:
            yield from _file(entry, name)


def _below(root: Path, name: str) -> Iterator[_File]:
    for entry in _entries(root / name):
        if entry.is_dir(follow_symlinks=False):
            yield from _below(root, f"{name}/{entry.name}")
        elif not entry.name.startswith("."):
            yield from _file(entry, name, may_be_link=name.startswith("store"))


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    with os.scandir(folder) as entries:
        return sorted(entries, key=lambda entry: entry.name)


def _file(entry: os.DirEntry[str], folder: str, *, may_be_link: bool = False) -> Iterator[_File]:
    info = entry.stat(follow_symlinks=False)
    is_link = stat.S_ISLNK(info.st_mode)
    is_file = stat.S_ISREG(info.st_mode) or (is_link and may_be_link)
    if is_file and info.st_uid == os.geteuid() and "\n" not in entry.name:
        yield _File(f"{folder}/{entry.name}" if folder else entry.name, info.st_size, is_link)


def _write(root: Path, name: str, files: Collection[_File], is_late: Callable[[], bool]) -> bool:
    temporary = root / f".{name}"
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        with open(os.open(temporary, flags, 0o600), "wb") as to:
            for file in files:
                if is_late():
                    temporary.unlink()
                    return False
                data = _content(_place(root, file.name), file)
                to.write(head(file.name, len(data)) + data + b"\n")
            to.flush()
            os.fsync(to.fileno())
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    os.replace(temporary, root / name)
    folder = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
    return True


def _content(path: Path, file: _File) -> bytes:
    if file.is_link:
        return os.readlink(os.fsencode(path))
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as source:
        return source.read(file.size)


def _remove(path: Path, size: int | None = None) -> None:
    """Remove a file, unless it has another size than when it was folded."""
    try:
        if size in (None, os.lstat(path).st_size):
            path.unlink()
    except OSError:
        pass  # an earlier call removed it; what refuses is read from where it is


def _remove_folders(root: Path) -> None:
    """Remove the folders that are empty now; the rest of `_USELESS`, and of killed processes, with them."""
    for name in os.listdir(root):
        if name in (*_RECORDS, *_USELESS) or round_index(name) is not None:
            for folder, _, names in os.walk(root / name, topdown=False):
                for left in names:
                    if name in _USELESS or (name == "store" and left.startswith(".") and not left.startswith(".nfs")):
                        _remove(Path(folder, left))
                try:
                    os.rmdir(folder)
                except OSError:
                    pass  # something stays in it
