"""What NCCL's RAS (2.24 and newer) answers: how often each rank of each communicator has launched each collective.

The forms are those of NCCL's src/ras/client_support.cc, 2.24 to 2.31: JSON from 2.28.7 on, which has every rank's
counts, and before that a text for people, which has counts only where ranks differ. The counts grow when a rank
launches, not when it completes; sends and receives may differ between ranks that are in order.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
from msgspec import Struct, field

from hpc_elastic.base.text import plural
from hpc_elastic.errors import HpcElasticError

_TRANSFERS = frozenset({"SendRecv", "Send", "Recv"})
_ANY_COLLECTIVE = "collective"
"""NCCL before 2.26 counts all kinds together."""
_UNANSWERED = "does not answer NCCL's RAS: its process is stopped or gone"


class UnreadableReportError(HpcElasticError):
    """What came is no report of RAS, or not a whole one."""

    template = "NCCL's RAS sent {what}"


class Level(Struct, frozen=True):
    """Ranks of a communicator that have launched a kind of collective equally often."""

    launched: int
    count: int
    """How many ranks they are."""
    ranks: tuple[int, ...] = ()
    """Which; empty: the text does not name them."""


class Communicator(Struct, frozen=True, kw_only=True):
    """One of NCCL's, as all ranks that answered show it."""

    name: str
    """Its hash."""
    size: int
    levels: Mapping[str, tuple[Level, ...]] = field(default_factory=dict)
    """Kind of collective → its levels, the highest first; of a text where the ranks differ alone."""
    missing: tuple[int, ...] = ()
    """Ranks whose processes did not answer."""
    is_settled: bool = True
    """Whether none of its ranks is being made or destroyed: till then they differ rightly."""
    processes: Mapping[int, tuple[str, int]] = field(default_factory=dict)
    """Rank → the address of its host, and its pid there."""

    @property
    def differing(self) -> dict[str, tuple[Level, ...]]:
        """The kinds of collectives that ranks have launched unequally often."""
        if not self.is_settled:
            return {}
        return {kind: found for kind, found in self.levels.items() if len(found) > 1 and kind not in _TRANSFERS}

    @property
    def trouble(self) -> object:
        """Equal for two reports where nothing has changed that may hold it up; false where nothing does."""
        found = tuple(sorted(self.differing.items()))
        return (found, self.missing) if found or self.missing else ()


class RasReport(Struct, frozen=True, kw_only=True):
    """One answer, for all processes of the job."""

    version: str = ""
    """NCCL's."""
    communicators: tuple[Communicator, ...] = ()
    has_all_counts: bool = False
    """Whether it shows if anything is launched at all; a text does not where the ranks are even."""

    @property
    def progress(self) -> object:
        """Equal for two reports between which nothing was launched."""
        return tuple((each.name, tuple(sorted(each.levels.items()))) for each in self.communicators)

    @property
    def launches(self) -> int:
        """Of all ranks together."""
        levels = [level for each in self.communicators for found in each.levels.values() for level in found]
        return sum(level.launched * level.count for level in levels)


# -- JSON --------------------------------------------------------------------------------------------------------------


_LACKING_COMMA = r'("nvml_dev": *-?\d+)(\s+"status")'
"""Of each missing rank, as 2.28.9 writes it."""
_SILENT = ("unresponsive", "considered_dead")
_CHANGING = ("init_state", "finalize_called", "destroy_flag", "abort_flag")
"""What is not 0 or false of a rank whose communicator is made or destroyed."""


def parse_json(text: str) -> RasReport:
    """Read the answer in JSON.

    Raises:
        UnreadableReportError: it is something else, or broken.
    """
    text = re.sub(_LACKING_COMMA, r"\1,\2", text[text.find("{") :])
    try:
        document = msgspec.json.decode(text)
        found = [_of_json(each) for each in document["communicators"] if each["ranks"]]
        version = str(document.get("nccl_version", ""))
    except (msgspec.DecodeError, RecursionError, LookupError, TypeError, ValueError, AttributeError) as error:
        raise UnreadableReportError(what=f"what is no report in JSON ({str(error)[:200]})") from None
    return RasReport(version=version, communicators=tuple(found), has_all_counts=True)


def _of_json(found: Mapping[str, Any]) -> Communicator:
    launched: dict[str, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    # RAS has given memory that was never written: ranks that no communicator has (nccl issue 1762, 2.27.3).
    ranks = [rank for rank in found["ranks"] if 0 <= int(rank["rank"]) < int(found["size"])]
    for rank in ranks:
        for kind, count in rank.get("collective_counts", {}).items():
            launched[kind][int(count)].append(rank["rank"])
    missing = [rank for rank in found.get("missing_ranks", ()) if 0 <= int(rank["rank"]) < int(found["size"])]
    silent = [rank["rank"] for rank in missing if any(rank.get("status", {}).get(name) for name in _SILENT)]
    changes = any(rank.get("status", {}).get(name) for rank in ranks for name in _CHANGING)
    return Communicator(
        name=f"{found.get('hash', '')} {found.get('secondary_hash', '')}",
        size=int(found["size"]),
        levels={
            kind: tuple(Level(count, len(who), tuple(sorted(who))) for count, who in sorted(by.items(), reverse=True))
            for kind, by in launched.items()
        },
        missing=tuple(sorted(silent)),
        is_settled=not changes and len(silent) == len(missing),
        processes={rank["rank"]: (str(rank.get("host", "")), int(rank.get("pid", -1))) for rank in (*ranks, *missing)},
    )


# -- text --------------------------------------------------------------------------------------------------------------

# Strings, which `re` compiles and keeps when they are first used: most runs never do.
_VERSION = r"(?m)^NCCL version (\S+)"
_WHOLE = r"(?m)^Warnings\n=+$"
_ROW = r"(?m)^ *(\d+) +\d+ +\d+ +[\d-]+ +(\d+) +\d+ +([A-Z]+) +[A-Z,]+ *$"
_PART = r"(?m)^#(\d+)-\d+ \((\w+)\) ([A-Z]+)\n((?:(?: .*)?\n)*)"
_KIND = r"  Communicator ranks have different (\w+) operation counts"
_LEVEL = r"  (\d+) ranks have (?:launched up to operation (\d+)|not launched any operations)"
_ALONE = r"  Rank (\d+) has (?:launched up to operation (\d+)|not launched any operations)(.*)"
_NAMED = r"  Rank (\d+) --(.*)"
_PROCESS = r"managed by process (\d+) on node (\S+)"
_MISSING = r"  The missing ranks?: ([\d, ]+)"


def parse_text(text: str) -> RasReport:
    """Read the answer in the form for people.

    Raises:
        UnreadableReportError: it is something else, or ends early.
    """
    text = text.replace("\r\n", "\n")
    version = re.search(_VERSION, text)
    if version is None or "\nCommunicators..." not in text:
        raise UnreadableReportError(what=f"what is no report: {text[:80]!r}")
    if not re.search(_WHOLE, text) or not text.endswith("\n"):
        raise UnreadableReportError(what=f"half a report, of {len(text)} characters")
    rows = {int(group): (int(size), status) for group, size, status in re.findall(_ROW, text)}
    found: dict[str, Communicator] = {}
    for group, name, _, lines in re.findall(_PART, text):
        size, status = rows.get(int(group), (0, ""))
        before = found.get(name) or Communicator(name=name, size=size, is_settled=status == "RUNNING")
        found[name] = _with_lines(before, lines.splitlines())
    return RasReport(version=version[1], communicators=tuple(each for each in found.values() if each.size))


def _with_lines(known: Communicator, lines: Iterable[str]) -> Communicator:
    """What one part of the text adds."""
    kind = ""
    levels: dict[str, list[tuple[int, int, list[int]]]] = {}
    missing, processes = list(known.missing), dict(known.processes)
    for line in lines:
        if match := re.match(_KIND, line):
            kind = match[1]
            levels[kind] = []
        elif line.startswith("  Communicator ranks have different"):
            kind = _ANY_COLLECTIVE if "collective operation counts" in line else "?"
            levels[kind] = []
        elif match := re.match(_LEVEL, line):
            if kind:
                levels[kind].append((int(match[2] or 0), int(match[1]), []))
        elif match := re.match(_ALONE, line):
            if kind:
                levels[kind].append((int(match[2] or 0), 1, [int(match[1])]))
            processes |= _process_of(int(match[1]), match[3])
        elif match := re.match(_MISSING, line):
            missing += [int(number) for number in re.findall(r"\d+", match[1])]
        elif match := re.match(_NAMED, line):
            rank = int(match[1])
            processes |= _process_of(rank, match[2])
            if not kind:
                missing.append(rank)
            elif levels.get(kind):
                levels[kind][-1][2].append(rank)
    everyone = set(range(known.size))
    return msgspec.structs.replace(
        known,
        levels={
            **known.levels,
            **{name: _levels(rows, everyone - set(missing)) for name, rows in levels.items() if name != "?"},
        },
        missing=tuple(sorted(everyone & set(missing))),
        processes=processes,
    )


def _process_of(rank: int, text: str) -> dict[int, tuple[str, int]]:
    found = re.search(_PROCESS, text)
    return {rank: (found[2], int(found[1]))} if found else {}


def _levels(rows: list[tuple[int, int, list[int]]], everyone: set[int]) -> tuple[Level, ...]:
    """Where all but one level name their ranks, that one has the others."""
    unnamed = [row for row in rows if not row[2]]
    if len(unnamed) == 1:
        others = everyone - {rank for row in rows for rank in row[2]}
        if len(others) == unnamed[0][1]:
            unnamed[0][2].extend(others)
    return tuple(Level(launched, count, tuple(sorted(ranks))) for launched, count, ranks in sorted(rows, reverse=True))


# -- what follows ------------------------------------------------------------------------------------------------------


def find_culprits(communicator: Communicator) -> dict[int, str]:
    """Which of its ranks hold up the others, and why: they don't answer, have launched less, or something else.

    Where more than two thirds of the ranks have launched less than a few, these few are ahead: they wait in what the
    others never call.
    """
    found = dict.fromkeys(communicator.missing, _UNANSWERED)
    behind: dict[int, tuple[str, int, int, int]] = {}
    ahead: dict[int, tuple[str, int, int, int]] = {}
    for kind, levels in communicator.differing.items():
        most = max(levels, key=lambda level: (level.count, level.launched))
        usual = most if 3 * most.count > 2 * communicator.size else levels[0]
        for level in levels:
            place = behind if level.launched < usual.launched else ahead
            if level is not usual:
                place |= dict.fromkeys(level.ranks, (kind, level.launched, usual.count, usual.launched))
    for rank in sorted(behind.keys() | ahead.keys()):
        if rank in behind and rank in ahead:
            more, less = ahead[rank], behind[rank]
            why = f"launched {more[0]} #{more[1]} where {plural(less[2], 'other')} launched {less[0]} #{less[3]}"
        elif rank in behind:
            kind, launched, count, usually = behind[rank]
            why = f"has launched {_upto(kind, launched)}, {plural(count, 'other')} up to #{usually}"
        else:
            kind, launched, count, _ = ahead[rank]
            why = f"waits in {kind} #{launched}, which {plural(count, 'other')} never launched"
        found.setdefault(rank, why)
    return dict(sorted(found.items()))


def _upto(kind: str, launched: int) -> str:
    return f"{kind} up to #{launched}" if launched else f"no {kind}"
