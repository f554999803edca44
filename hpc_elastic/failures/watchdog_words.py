"""What NCCL's watchdog printed of one rank's collectives, as the end of a dump that there is none of. Pure.

Forms of ProcessGroupNCCL.cpp, torch 2.1 to 2.13. The line of the work that timed out has its type and size, and not its
group; those of the group's status have the numbers of the last work that was enqueued and completed. A rank that has
enqueued nothing prints that status, too, when another one's timeout makes it dump.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from hpc_elastic.run.flight_tail import Call, FlightTail, TailTrack

_WORK = re.compile(r"WorkNCCL\(SeqNum=(\d+), OpType=(\w+)(?:, NumelIn=(\d+), NumelOut=(\d+))?")
_STATUS = re.compile(
    r"\[PG (?:ID \d+ PG GUID )?([^\s(\]]+) ?(?:\(([^)\]]*)\) )?Rank \d+\]"
    r"[^\n]{0,300}?\blast enqueued(?: NCCL)? work: (-?\d+),? last completed(?: NCCL)? work: (-?\d+)",
    re.IGNORECASE,
)
_AT_WORK = re.compile(r"\bat (?:NCCL )?work(?: sequence id)?: (\d+)")
_NAMES: Mapping[str, str] = {
    "ALLREDUCE": "all_reduce", "ALLREDUCE_COALESCED": "allreduce_coalesced", "ALLGATHER": "all_gather",
    "_ALLGATHER_BASE": "_all_gather_base", "ALLGATHER_COALESCED": "all_gather_into_tensor_coalesced",
    "REDUCE_SCATTER": "reduce_scatter", "_REDUCE_SCATTER_BASE": "_reduce_scatter_base", "ALLTOALL": "all_to_all",
    "ALLTOALL_BASE": "all_to_all",
}  # fmt: skip
"""As the flight recorder calls them; others are the same in small letters."""
_TRANSFERS = ("SEND", "RECV", "RECVANYSOURCE", "COALESCED")
"""Their numbers may be those of sends and receives, which are counted apart."""


def tail_of_words(text: str) -> FlightTail | None:
    """The last collectives in each group of which `text` has the status; None where it has none.

    Args:
        text: What one rank printed.
    """
    works = {int(number): (kind, into, out) for number, kind, into, out in _WORK.findall(text)}
    statuses: dict[str, tuple[str, int, int, int | None]] = {}
    for found in _STATUS.finditer(text):
        name, description, enqueued, completed = found.groups()
        at = _AT_WORK.search(found[0])
        before = statuses.get(name)
        waits = int(at[1]) if at is not None else before[3] if before is not None else None
        statuses[name] = description or "", int(enqueued), int(completed), waits
    calls: list[Call] = []
    tracks: list[TailTrack] = []
    for name, (description, enqueued, completed, waits) in statuses.items():
        kind, into, out = works.get(waits, ("", "", "")) if waits is not None else ("", "", "")
        if enqueued < 0 or kind in _TRANSFERS:
            continue
        first = completed + 1 if waits is None else waits
        numbers = sorted({number for number in (completed, first, enqueued) if 0 <= number <= enqueued})
        nameless = Call(name="", group=name, description=description, backend="nccl")
        named = Call(
            name=_NAMES.get(kind, kind.lower()),
            group=name,
            description=description,
            backend="nccl",
            inputs=((int(into),),) if into else (),
            outputs=((int(out),),) if out else (),
        )
        at_call = len(calls)
        calls += [nameless, named]
        tracks.append(
            TailTrack(
                group=name,
                backend="nccl",
                sequences=tuple(numbers),
                calls=tuple(at_call + int(number == waits and bool(kind)) for number in numbers),
                done=tuple(int(number <= completed) for number in numbers),
            )
        )
    return FlightTail(calls=tuple(calls), tracks=tuple(tracks), is_of_words=True) if tracks else None
