"""``hpc-elastic hangs FILES…``: which rank the others wait for, by dumps of torch's flight recorder. Needs no run."""

from __future__ import annotations

import json
import os
import re
import resource
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace

import click
from msgspec import to_builtins

from hpc_elastic.base.text import plural, ranks_text
from hpc_elastic.cli.run_argument import find_run_dir
from hpc_elastic.errors import UsageError
from hpc_elastic.failures.flight_analysis import Analysis, GroupState, analyse
from hpc_elastic.failures.flight_dump import MOST_BYTES, RankDump, UnreadableDumpError, rank_of_name, read_dump
from hpc_elastic.output.terminal import one_line

_MOST_GROUPS = 20
_OTHER = re.compile(r"/attempt-\d+/(?!round-)")

PARAMETERS = (
    click.Argument(["files"], metavar="FILES...", nargs=-1, required=True, type=click.Path()),
    click.Option(["--json"], is_flag=True, help="as JSON, with all facts"),
)
NOTE = "FILES: dumps, JSON or pickle, or folders or runs with them; the rank is the number at the end of a file's name"


def run(args: SimpleNamespace) -> int:
    with _limited_memory():
        found = _without_older(_read_all(_files(args.files)))
    dumps = [dump for _, dump in found if isinstance(dump, RankDump)]
    unreadable = [(name, why) for name, why in found if isinstance(why, str)]
    if not dumps:
        name, why = unreadable[0] if unreadable else (args.files[0], "no dump of the flight recorder is in it")
        raise UsageError(f"{name}: {why}")
    analysis = analyse(dumps)
    if args.json:
        document = {
            "schema": 1,
            "ranks": sorted({dump.rank for dump in dumps}),
            "suspects": analysis.suspects,
            "says": analysis.says,
            "groups": analysis.groups,
            "unreadable": [{"file": name, "why": why} for name, why in unreadable],
        }
        print(json.dumps(to_builtins(document), separators=(",", ":")))
    else:
        print("\n".join(one_line(line) for line in _lines(analysis, dumps, unreadable)))
    return 0


@contextmanager
def _limited_memory() -> Iterator[None]:
    """Ten bytes of a pickle can ask for all memory of the machine; a thousand real dumps take 140 MB."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (min(each for each in (8 << 30, soft, hard) if each >= 0), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _files(given: Sequence[str]) -> list[Path]:
    """Each once, those of folders (or runs) and of the folders in them by their names; of a run those of its ranks."""
    found: dict[Path, None] = {}
    for text in given:
        path = Path(text)
        if not os.path.lexists(text):
            with suppress(UsageError):
                path = find_run_dir(text, None)
        if path.is_dir():
            folders = ((root, names) for root, _, names in os.walk(path) if not _OTHER.search(os.path.abspath(root)))
            within = (Path(root, name) for root, names in folders for name in names)
            found |= dict.fromkeys(sorted(each for each in within if _may_be_dump(each)))
        else:
            found[path] = None
    return list(found)


def _may_be_dump(path: Path) -> bool:
    if rank_of_name(path.name) is None or not path.is_file():
        return False
    try:
        with path.open("rb") as file:
            return file.read(1) in (b"", b"{", b"\x80")
    except OSError:
        return True


def _without_older(found: Sequence[tuple[str, RankDump | str]]) -> list[tuple[str, RankDump | str]]:
    """Keep the newest of several dumps of one rank with the same groups: two failures leave two."""
    newest: dict[tuple[int, str, str], tuple[float, int]] = {}
    chosen: list[tuple[str, RankDump | str]] = list(found)
    for place, (name, dump) in enumerate(found):
        if not isinstance(dump, RankDump):
            continue
        at = os.stat(name).st_mtime
        keys = [(dump.rank, *key) for key in (*dump.collectives, *dump.transfers)]
        others = {newest[key] for key in keys if key in newest}
        if any(at < when for when, _ in others):
            chosen[place] = name, f"rank {dump.rank} has a newer dump"
            continue
        for _, other in others:
            chosen[other] = found[other][0], f"rank {dump.rank} has a newer dump"
        newest |= dict.fromkeys(keys, (at, place))
    return chosen


def _read_all(files: Sequence[Path]) -> list[tuple[str, RankDump | str]]:
    processes = min(8, len(os.sched_getaffinity(0)))
    if len(files) <= 64 or processes == 1:
        return [_read(path) for path in files]
    import multiprocessing

    with multiprocessing.get_context("fork").Pool(processes) as pool:
        return pool.map(_read, files, chunksize=32)


def _read(path: Path) -> tuple[str, RankDump | str]:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # waits for no pipe's writer
        with open(fd, "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                return str(path), "no regular file"
            raw = file.read(MOST_BYTES + 1)
        return str(path), read_dump(raw, rank=rank_of_name(path.name))
    except UnreadableDumpError as error:
        return str(path), str(error)
    except OSError as error:
        return str(path), error.strerror or str(error)


def _lines(analysis: Analysis, dumps: Sequence[RankDump], unreadable: Sequence[tuple[str, str]]) -> list[str]:
    ranks = sorted({dump.rank for dump in dumps})
    lines = [f"{plural(len(dumps), 'dump')}, of {ranks_text(ranks, limit=80)}"]
    lines += [f"rank {suspect.rank} {suspect.reason}" for suspect in analysis.suspects]
    lines += [analysis.says] if analysis.says else []
    lines += [_group_line(group) for group in analysis.groups[:_MOST_GROUPS]]
    if len(analysis.groups) > _MOST_GROUPS:
        lines.append(f"... and {len(analysis.groups) - _MOST_GROUPS} groups more; --json has all")
    lines += [f"unreadable: {name}: {why}" for name, why in unreadable]
    return lines


def _group_line(group: GroupState) -> str:
    all_of_them = f"all have completed #{group.completed}" if group.completed >= 0 else "none is completed by all"
    at: dict[int, list[int]] = {}
    for rank, number in group.waiting:
        at.setdefault(number, []).append(rank)
    parts = [f"in #{number}: {ranks_text(who, limit=60)}" for number, who in sorted(at.items())[:4]]
    backend = f" ({group.backend})" if group.backend else ""
    return "; ".join([f"group {group.group}{backend}, {ranks_text(group.members, limit=60)}: {all_of_them}", *parts])
