"""``hpc-elastic hangs FILES…``: which rank the others wait for, by dumps of torch's flight recorder. Needs no run."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from msgspec import Struct

from hpc_elastic.base import codec
from hpc_elastic.base.text import plural, ranks_text
from hpc_elastic.errors import UsageError
from hpc_elastic.failures.flight_analysis import Analysis, FlightSuspect, GroupState, analyse
from hpc_elastic.failures.flight_dump import MOST_BYTES, RankDump, UnreadableDumpError, rank_of_name, read_dump
from hpc_elastic.output.terminal import one_line

SCHEMA = 1
_ALONE = 64
"""So many dumps one process reads by itself."""
_MOST_PROCESSES = 8
_MOST_GROUPS = 20


class UnreadableFile(Struct, frozen=True, kw_only=True):
    """A file that is no dump."""

    file: str
    why: str


class HangsDocument(Struct, frozen=True, kw_only=True):
    """What ``--json`` prints."""

    schema: int = SCHEMA
    ranks: tuple[int, ...]
    """Of the dumps."""
    suspects: tuple[FlightSuspect, ...]
    says: str
    """What is so where there are no suspects."""
    groups: tuple[GroupState, ...]
    unreadable: tuple[UnreadableFile, ...]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "files",
        metavar="FILES",
        nargs="+",
        help="dumps, JSON or pickle, or folders of them; the rank is the number at the end of a file's name",
    )
    parser.add_argument("--json", action="store_true", help="as JSON, with all facts")


def run(args: argparse.Namespace) -> int:
    """Print. Returns 0.

    Raises:
        UsageError: none of the files is a dump.
    """
    found = _read_all(_files(args.files))
    dumps = [dump for _, dump in found if isinstance(dump, RankDump)]
    unreadable = [(name, why) for name, why in found if isinstance(why, str)]
    if not dumps:
        name, why = unreadable[0] if unreadable else (args.files[0], "an empty folder")
        raise UsageError(f"{name}: {why}")
    analysis = analyse(dumps)
    if args.json:
        document = HangsDocument(
            ranks=tuple(sorted({dump.rank for dump in dumps})),
            suspects=analysis.suspects,
            says=analysis.says,
            groups=analysis.groups,
            unreadable=tuple(UnreadableFile(file=name, why=why) for name, why in unreadable),
        )
        print(codec.dumps(document))
    else:
        print("\n".join(one_line(line) for line in _lines(analysis, dumps, unreadable)))
    return 0


def _files(given: Sequence[str]) -> list[Path]:
    found: list[Path] = []
    for path in map(Path, given):
        if path.is_dir():
            found += sorted(each for each in path.iterdir() if rank_of_name(each.name) is not None)
        else:
            found.append(path)
    return found


def _read_all(files: Sequence[Path]) -> list[tuple[str, RankDump | str]]:
    processes = min(_MOST_PROCESSES, len(os.sched_getaffinity(0)))
    if len(files) <= _ALONE or processes == 1:
        return [_read(path) for path in files]
    import multiprocessing

    with multiprocessing.get_context("fork").Pool(processes) as pool:
        return pool.map(_read, files, chunksize=8)


def _read(path: Path) -> tuple[str, RankDump | str]:
    """A dump, or why it is none."""
    try:
        with path.open("rb") as file:
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
