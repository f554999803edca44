"""Reads the answer of NCCL's RAS (2.28.7 and newer): how often each rank of each communicator launched each collective.

The form is the JSON of NCCL's src/ras/client_support.cc, 2.28.7 to 2.31. The counts grow when a rank launches, not
when it completes; sends and receives may differ between ranks that are in order.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping

import msgspec
from msgspec import Struct, field

from hpc_elastic.base.text import plural
from hpc_elastic.errors import HpcElasticError

_TRANSFERS = frozenset({"SendRecv", "Send", "Recv"})
_UNANSWERED = "does not answer NCCL's RAS: its process is stopped or gone"


class UnreadableReportError(HpcElasticError):
    template = "NCCL's RAS sent {what}"


class Launches(Struct, frozen=True):
    launched: int
    count: int
    ranks: tuple[int, ...] = ()


class Communicator(Struct, frozen=True, kw_only=True):
    name: str
    size: int
    levels: Mapping[str, tuple[Launches, ...]] = field(default_factory=dict)
    """Kind of collective → its levels, the highest first."""
    missing: tuple[int, ...] = ()
    is_settled: bool = True
    """None of its ranks is being made or destroyed: till then they differ rightly."""
    processes: Mapping[int, tuple[str, int]] = field(default_factory=dict)
    """Rank → the address of its host, and its pid there."""

    @property
    def differing(self) -> dict[str, tuple[Launches, ...]]:
        if not self.is_settled:
            return {}
        return {kind: found for kind, found in self.levels.items() if len(found) > 1 and kind not in _TRANSFERS}

    @property
    def trouble(self) -> object:
        """Equal for two reports where nothing has changed that may hold it up; false where nothing does."""
        found = tuple(sorted(self.differing.items()))
        return (found, self.missing) if found or self.missing else ()


class RasReport(Struct, frozen=True, kw_only=True):
    version: str = ""
    communicators: tuple[Communicator, ...] = ()

    @property
    def progress(self) -> object:
        """Equal for two reports between which nothing was launched."""
        return tuple((each.name, tuple(sorted(each.levels.items()))) for each in self.communicators)


_LACKING_COMMA = r'("nvml_dev": *-?\d+)(\s+"status")'
"""2.28.9 writes each missing rank so."""
_SILENT = ("unresponsive", "considered_dead")
_CHANGING = ("init_state", "finalize_called", "destroy_flag", "abort_flag")
"""Neither 0 nor false while a rank's communicator is made or destroyed."""


class _Rank(Struct):
    rank: int
    host: str = ""
    pid: int = -1
    status: dict[str, bool | int] = {}
    collective_counts: dict[str, int] = {}


class _Communicator(Struct):
    size: int
    ranks: list[_Rank]
    hash: str = ""
    secondary_hash: str = ""
    missing_ranks: list[_Rank] = []


class _Answer(Struct):
    communicators: list[_Communicator]
    nccl_version: str = ""


def parse_json(text: str) -> RasReport:
    text = re.sub(_LACKING_COMMA, r"\1,\2", text[text.find("{") :])
    try:
        found = msgspec.json.decode(text, type=_Answer)
    except (msgspec.DecodeError, RecursionError) as error:
        raise UnreadableReportError(what=f"what is no report in JSON ({str(error)[:200]})") from None
    communicators = tuple(_describe(each) for each in found.communicators if each.ranks)
    return RasReport(version=found.nccl_version, communicators=communicators)


def _describe(found: _Communicator) -> Communicator:
    launched: dict[str, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    # RAS has given memory that was never written: ranks that no communicator has (nccl issue 1762, 2.27.3).
    ranks = [rank for rank in found.ranks if 0 <= rank.rank < found.size]
    for rank in ranks:
        for kind, count in rank.collective_counts.items():
            launched[kind][count].append(rank.rank)
    missing = [rank for rank in found.missing_ranks if 0 <= rank.rank < found.size]
    silent = [rank.rank for rank in missing if any(rank.status.get(name) for name in _SILENT)]
    changes = any(rank.status.get(name) for rank in ranks for name in _CHANGING)
    return Communicator(
        name=f"{found.hash} {found.secondary_hash}",
        size=found.size,
        levels={
            kind: tuple(
                Launches(count, len(who), tuple(sorted(who))) for count, who in sorted(by.items(), reverse=True)
            )
            for kind, by in launched.items()
        },
        missing=tuple(sorted(silent)),
        is_settled=not changes and len(silent) == len(missing),
        processes={rank.rank: (rank.host, rank.pid) for rank in (*ranks, *missing)},
    )


def find_culprits(communicator: Communicator) -> dict[int, str]:
    """Name the ranks that hold up the others, and why: they don't answer, have launched less, or something else.

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
            upto = f"{kind} up to #{launched}" if launched else f"no {kind}"
            why = f"has launched {upto}, {plural(count, 'other')} up to #{usually}"
        else:
            kind, launched, count, _ = ahead[rank]
            why = f"waits in {kind} #{launched}, which {plural(count, 'other')} never launched"
        found.setdefault(rank, why)
    return dict(sorted(found.items()))
