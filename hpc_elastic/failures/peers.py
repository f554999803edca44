"""Finds whose address a symptom names, and where the chain of lost connections begins. Pure.

"Connection closed by peer [10.0.0.7]:41234" says that the owner of that socket went away first, or was gone by itself
through another one. Where the agents knew which rank owned it, each symptom points to a rank, and the chain of them to
the one that no symptom explains. NCCL's watchdog names no address: its lines are the end of a flight recorder's dump.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from hpc_elastic.base.text import cut_end, range_bounds
from hpc_elastic.failures.ranking import Suspect
from hpc_elastic.run.activities import Activity, AwaitedCall, FlightTail, TailTrack
from hpc_elastic.run.agent_events import RanksObserved

_GLOO = re.compile(r"\[(\d+(?:\.\d+){3}|[0-9a-fA-F:]*:[0-9a-fA-F.:]*)\]:(\d+)")
_NCCL = re.compile(r"(?<=\s)(\w[\w.-]*)<(\d{2,5})>(?=\W|\Z)")
_LOOPBACK = ("127.", "::1")
_LIMIT = 100


class Peer(Struct, frozen=True, kw_only=True):
    of: int
    rank: int
    address: str


def find_peer(text: str) -> str:
    found = _GLOO.search(text) or _NCCL.search(text)
    return cut_end(found[0], _LIMIT) if found else ""


def resolve_peers(
    activities: Iterable[Activity], sockets: Sequence[RanksObserved], *, hosts: Mapping[int, str] | None = None
) -> list[Peer]:
    """Find the ranks behind the addresses in the ranks' messages, as far as each is one rank's alone."""
    networks = {one.rank: part.network for part in sockets for one in part.sockets}
    owners: dict[str, list[tuple[int, int, int]]] = {}  # first port, last port, rank
    for part in sockets:
        for one in part.sockets:
            for ip, ports in one.ends:
                owners.setdefault(ip, []).extend((*bounds, one.rank) for bounds in range_bounds(ports) or ())
    found = []
    for activity in activities:
        ranks = set()
        for host, port in _readings(activity.peer):
            known = {rank for first, last, rank in owners.get(host, ()) if first <= port <= last}
            known = known or {
                rank
                for ends in owners.values()
                for first, last, rank in ends
                if first <= port <= last
                and (hosts or {}).get(rank, "").partition(".")[0] == host.partition(".")[0] != ""
            }
            if host.startswith(_LOOPBACK):
                known = {rank for rank in known if networks[rank] and networks[rank] == networks.get(activity.rank)}
            ranks |= known
        ranks.discard(activity.rank)
        if len(ranks) == 1:
            found.append(Peer(of=activity.rank, rank=ranks.pop(), address=activity.peer))
    return found


def chain_ends(peers: Sequence[Peer], *, failed: Container[int]) -> list[Peer]:
    """The peers with which the chains of lost connections begin: one of `failed` that names no peer is no beginning."""
    points = {peer.of: peer for peer in peers}
    ends: dict[int, Peer] = {}
    for start in peers:
        peer, seen = start, {start.of}
        while peer.rank in points and peer.rank not in seen:
            seen.add(peer.rank)
            peer = points[peer.rank]
        if peer.rank not in seen and peer.rank not in failed:
            ends.setdefault(peer.rank, peer)
    return [ends[rank] for rank in sorted(ends)]


def with_peers(suspects: Sequence[Suspect], ends: Sequence[Peer], *, hosts: Mapping[int, str]) -> tuple[Suspect, ...]:
    known = {suspect.rank: suspect for suspect in suspects}
    first = []
    for peer in ends:
        lost = f"rank {peer.of} lost the connection to it ({peer.address})"
        suspect = known.pop(peer.rank, None)
        if suspect is None:
            first.append(Suspect(rank=peer.rank, host=hosts.get(peer.rank, ""), why=lost))
        else:
            first.append(replace(suspect, why=f"{suspect.why}; {lost}"))
    return (*first, *known.values())


def describe_peers(peers: Sequence[Peer], *, hosts: Mapping[int, str]) -> str:
    """``the peer [10.0.0.7]:41234 of rank 0 is rank 2 (n1)``, of the first one; empty where there is none."""
    if not peers:
        return ""
    peer = peers[0]
    host = f" ({hosts[peer.rank]})" if peer.rank in hosts else ""
    return f"the peer {peer.address} of rank {peer.of} is rank {peer.rank}{host}"


def _readings(address: str) -> list[tuple[str, int]]:
    """The addresses that a printed one may mean: gloo prints the port as it is on the wire (torch 2.2 to 2.13)."""
    if gloo := _GLOO.fullmatch(address):
        port = int(gloo[2])
        swapped = (port & 0xFF) << 8 | port >> 8
        return [(gloo[1], port), (gloo[1], swapped)] if port < 1 << 16 and swapped != port else [(gloo[1], port)]
    host, _, number = address.removesuffix(">").partition("<")
    return [(host, int(number))] if number.isdecimal() else []


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
"""Named as the flight recorder has them; others are the same in small letters."""
_TRANSFERS = ("SEND", "RECV", "RECVANYSOURCE", "COALESCED")
"""Their numbers may be those of sends and receives, which are counted apart."""


def tail_of_words(text: str) -> FlightTail | None:
    works = {int(number): (kind, into, out) for number, kind, into, out in _WORK.findall(text)}
    statuses: dict[str, tuple[str, int, int, int | None]] = {}
    for found in _STATUS.finditer(text):
        name, description, enqueued, completed = found.groups()
        at = _AT_WORK.search(found[0])
        before = statuses.get(name)
        waits = int(at[1]) if at is not None else before[3] if before is not None else None
        statuses[name] = description or "", int(enqueued), int(completed), waits
    calls: list[AwaitedCall] = []
    tracks: list[TailTrack] = []
    for name, (description, enqueued, completed, waits) in statuses.items():
        kind, into, out = works.get(waits, ("", "", "")) if waits is not None else ("", "", "")
        if enqueued < 0 or kind in _TRANSFERS:
            continue
        first = completed + 1 if waits is None else waits
        numbers = sorted({number for number in (completed, first, enqueued) if 0 <= number <= enqueued})
        nameless = AwaitedCall(name="", group=name, description=description, backend="nccl")
        named = replace(
            nameless,
            name=_NAMES.get(kind, kind.lower()),
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
