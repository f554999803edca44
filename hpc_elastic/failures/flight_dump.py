"""One rank's dump of torch's flight recorder: its last collectives, read from JSON or pickle into columns. Pure.

Formats 1.x (torch 2.3) to 2.10 (torch 2.13), of NCCL and of gloo, as FlightRecorder.cpp and `_dump_fr_trace_json` write
them. What they have in common is read; what one of them lacks is left empty. A pickle may hold plain containers only:
one that names a class or a function is refused before anything of it is made. What NCCL's watchdog prints is the end of
such a dump.
"""

from __future__ import annotations

import gc
import io
import marshal
import pickle
import re
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from itertools import groupby
from operator import attrgetter
from typing import Any, NoReturn

import msgspec
from msgspec import Struct, field
from msgspec.structs import replace

from hpc_elastic.base.text import RangeReader, ranges, size_text
from hpc_elastic.errors import HpcElasticError
from hpc_elastic.run.progress import AwaitedCall, FlightTail, TailTrack

MOST_BYTES = 256 << 20
"""Some hundred thousand entries."""
MOST_KEPT = 48
_MOST_RANKS = 1 << 20
"""A run's; and all its groups' together, each once."""
_MOST_ELEMENTS = 1 << 62
GLOO = "gloo"
_COALESCED = "coalesced"
COALESCED = f"{_COALESCED} "
"""The beginning of a call's name that is several, put together."""
_P2P = re.compile(r"(send|recv)\b(?: (\d{1,9})(->|<-)(\d{1,9}))?")
# torch's names of types (ScalarType.h), their short names, and the bytes of one element.
_TYPES: Mapping[str, tuple[str, int]] = {
    "Float": ("fp32", 4), "Half": ("fp16", 2), "BFloat16": ("bf16", 2), "Double": ("fp64", 8), "Byte": ("uint8", 1),
    "Char": ("int8", 1), "Short": ("int16", 2), "Int": ("int32", 4), "Long": ("int64", 8), "Bool": ("bool", 1),
    "Float8_e4m3fn": ("fp8", 1), "Float8_e5m2": ("fp8", 1), "ComplexFloat": ("complex64", 8),
    "ComplexDouble": ("complex128", 16),
}  # fmt: skip


class UnreadableDumpError(HpcElasticError):
    template = "no dump of the flight recorder: {why}"


class Track(Struct, kw_only=True):
    """The calls of one rank in one process group, in their order: one column for each fact."""

    sequences: array[int] = field(default_factory=lambda: array("q"))
    """The number of each collective; of sends and receives one, too, counted apart."""
    calls: array[int] = field(default_factory=lambda: array("I"))
    """Each a place in `RankDump.calls`."""
    done: bytearray = field(default_factory=bytearray)
    """1 for what is completed. gloo marks one that failed in the same way."""
    started: int = -1
    """The last number of those that its device has begun and not completed; -1: none, or not known."""


class RankDump(Struct, kw_only=True):
    rank: int
    version: str = ""
    calls: list[AwaitedCall] = field(default_factory=list)
    collectives: dict[tuple[str, str], Track] = field(default_factory=dict)
    transfers: dict[tuple[str, str], Track] = field(default_factory=dict)
    members: dict[str, tuple[int, ...]] = field(default_factory=dict)


def numel_of(call: AwaitedCall) -> tuple[int, int]:
    return sum(map(_elements, call.inputs)), sum(map(_elements, call.outputs))


def _elements(shape: Iterable[int]) -> int:
    """Not more than any tensor can have, whatever is said of its shape."""
    found = 1
    for size in shape:
        found = min(found * size, _MOST_ELEMENTS)
    return found


def size_of(call: AwaitedCall) -> str:
    """``4.0 MiB bf16``; empty for one without a tensor, or where no sizes were recorded."""
    shapes = call.inputs or call.outputs
    if not shapes:
        return ""
    kind = call.types[0] if call.types else ""
    short, each = _TYPES.get(kind, (kind, 0))
    count = sum(map(_elements, shapes))
    return f"{size_text(count * each)} {short}" if each else " ".join(filter(None, [f"{count} elements", short]))


def shape_of(call: AwaitedCall) -> str:
    shapes = ", ".join(str(list(shape)) for shape in (call.inputs or call.outputs)[:3])
    kind = call.types[0] if call.types else ""
    return " ".join(filter(None, [shapes, _TYPES.get(kind, (kind, 0))[0]])) if shapes else ""


class _Entry(Struct, gc=False):
    profiling_name: Any = ""
    process_group: Any = None
    input_sizes: Any = None
    output_sizes: Any = None
    input_dtypes: Any = None
    is_p2p: Any = False
    pg_name: Any = ""
    state: Any = ""
    retired: Any = False
    collective_seq_id: Any = None
    p2p_seq_id: Any = None
    seq_id: Any = -1


class _Document(Struct):
    entries: list[_Entry]
    version: Any = ""
    rank: Any = None
    pg_config: Any = None


_JSON = msgspec.json.Decoder(_Document)
_KIND = attrgetter(*_Entry.__struct_fields__[:7])
"""The part that many entries of a dump share; as bytes it is a key, however the lists in it are nested."""


def tail_of(dumps: Iterable[RankDump], *, most: int = MOST_KEPT) -> FlightTail:
    calls: list[AwaitedCall] = []
    tracks: list[TailTrack] = []
    members: dict[str, str] = {}
    for dump in dumps:
        places: dict[int, int] = {}
        for is_transfer, found in ((False, dump.collectives), (True, dump.transfers)):
            for (backend, group), track in found.items():
                for at in track.calls[-most:]:
                    if at not in places:
                        places[at] = len(calls)
                        calls.append(dump.calls[at])
                tracks.append(
                    TailTrack(
                        group=group,
                        backend=backend,
                        is_transfer=is_transfer,
                        sequences=tuple(track.sequences[-most:]),
                        calls=tuple(places[at] for at in track.calls[-most:]),
                        done=tuple(track.done[-most:]),
                        started=track.started,
                    )
                )
        members |= {name: ranges(ranks) for name, ranks in dump.members.items()}
    return FlightTail(calls=tuple(calls), tracks=tuple(tracks), members=tuple(members.items()))


def dump_of(rank: int, tail: FlightTail, members: RangeReader) -> RankDump:
    """The dump again, as far as it was kept. What does not fit together is left out: an event may be another's."""
    dump = RankDump(rank=rank, calls=list(tail.calls), members={})
    for name, text in tail.members:
        if (ranks := members.read(text)) is not None:
            dump.members[name] = ranks
    for one in tail.tracks:
        count = min(len(one.sequences), len(one.calls), len(one.done))
        if count and all(0 <= at < len(tail.calls) for at in one.calls):
            (dump.transfers if one.is_transfer else dump.collectives)[one.backend, one.group] = Track(
                sequences=array("q", one.sequences[:count]),
                calls=array("I", one.calls[:count]),
                done=bytearray(1 if done else 0 for done in one.done[:count]),
                started=one.started,
            )
    return dump


def dumps_of(tails: Mapping[int, FlightTail]) -> list[RankDump]:
    """Make the dumps again. Beside dumps, what a watchdog printed has numbers alone, and no types to compare."""
    has_dump = any(not tail.is_of_words for tail in tails.values())
    members, found = RangeReader(most=_MOST_RANKS), []
    for rank, tail in tails.items():
        if has_dump and tail.is_of_words:
            calls = (replace(call, name="", inputs=(), outputs=(), types=(), peers=None) for call in tail.calls)
            tail = replace(tail, calls=tuple(calls))
        found.append(dump_of(rank, tail, members))
    return found


class _PlainUnpickler(pickle.Unpickler):
    """Numbers, texts, lists, tuples, dictionaries: nothing that is looked up by a name."""

    def find_class(self, module_name: str, global_name: str) -> NoReturn:
        raise UnreadableDumpError(why=f"a pickle that names {module_name}.{global_name}, and was not loaded")

    def persistent_load(self, pid: Any) -> NoReturn:
        raise UnreadableDumpError(why="a pickle that refers to something outside of it, and was not loaded")


def rank_of_name(name: str) -> int | None:
    found = re.search(r"(\d+)(?:\.[A-Za-z]+)*\Z", name)
    return int(found[1]) if found is not None and len(found[1]) < 8 else None


def read_dump(raw: bytes, *, rank: int | None = None) -> RankDump:
    """Read a dump, JSON or pickle; raises `UnreadableDumpError`. `rank`: where the dump does not hold it."""
    if len(raw) > MOST_BYTES:
        raise UnreadableDumpError(why=f"{size_text(len(raw))}, which is more than any dump has")
    # A dump is a hundred thousand objects without a circle: looking for one takes longer than to read it.
    collects = gc.isenabled()
    gc.disable()
    try:
        return _read(_unpickled(raw) if raw[:1] == b"\x80" else _JSON.decode(raw), rank)
    except UnreadableDumpError:
        raise
    except msgspec.DecodeError as error:
        raise UnreadableDumpError(why=f"{error}" if raw.strip() else "it is empty") from None
    except Exception as error:  # a foreign pickle may fail in any way
        raise UnreadableDumpError(why=f"{type(error).__name__}: {error}"[:200]) from None
    finally:
        if collects:
            gc.enable()


def _unpickled(raw: bytes) -> _Document:
    # A BytesIO has no peek: the unpickler would read it byte by byte.
    document = _PlainUnpickler(io.BufferedReader(io.BytesIO(raw), 1 << 16)).load()
    if not isinstance(document, dict) or "entries" not in document:
        raise UnreadableDumpError(why="a pickle without entries")
    return msgspec.convert(document, _Document)


def _read(document: _Document, rank: int | None) -> RankDump:
    members = dict(_members(document.pg_config))
    dump = RankDump(rank=_rank(document.rank, rank), version=_text(document.version), members=members)
    places: dict[bytes, _Place] = {}
    for entry in document.entries:
        kind = _KIND(entry)
        key = marshal.dumps(kind)
        place = places.get(key)
        if place is None:
            place = places[key] = _place(dump, key, kind)
        is_transfer, trusts, call, track, add_sequence, add_call, add_done = place
        number = entry.p2p_seq_id if is_transfer else entry.collective_seq_id
        add_sequence(_number(entry.seq_id if number is None else number))
        add_call(call)
        if entry.state == "completed":
            add_done(1)
        else:
            add_done(1 if trusts and entry.retired else 0)
            if entry.state == "started":
                track.started = track.sequences[-1]
    _finish(dump)
    return dump


def _rank(held: object, given: int | None) -> int:
    if isinstance(held, str) and held.isdecimal():
        held = int(held)
    rank = held if isinstance(held, int) and not isinstance(held, bool) else given
    if rank is None or not 0 <= rank < _MOST_RANKS:
        raise UnreadableDumpError(why="it does not hold its rank: let the file's name end with it")
    return rank


_Add = Callable[[int], None]
_Place = tuple[bool, bool, int, Track, _Add, _Add, _Add]
"""Transfer or not; "retired" means done or not; the call and its track; the columns' own methods, for speed."""


def _place(dump: RankDump, key: bytes, kind: tuple[Any, ...]) -> _Place:
    name, group, inputs, outputs, types, is_p2p, older = kind
    call = _SEEN.get(key)
    if call is None:
        if len(_SEEN) >= _MOST_SEEN:
            _SEEN.clear()
        call = _SEEN[key] = _call(name or "", group or older, inputs, outputs, types)
    dump.calls.append(call)
    is_transfer = bool(is_p2p) or call.name in ("send", "recv")
    tracks = dump.transfers if is_transfer else dump.collectives
    track = tracks.setdefault((call.backend, call.group), Track())
    # A device's watchdog retires what it has seen fail, too, and leaves its state; gloo has no state but this.
    trusts = call.backend in ("", GLOO)
    columns = track.sequences.append, track.calls.append, track.done.append
    return is_transfer, trusts, len(dump.calls) - 1, track, *columns


def _finish(dump: RankDump) -> None:
    for (backend, _), track in dump.collectives.items():
        if backend == GLOO:  # it loses the mark of some: what came after them is marked
            at = track.done.rfind(1)
            track.done[:at] = b"\1" * max(0, at)
        if len(set(track.sequences)) < len(track.sequences):
            _fold(dump, track)
    calls = dump.calls
    for track in dump.transfers.values():
        # Those that were put together are completed when the entry at their end is.
        rows = list(zip(track.sequences, track.calls, track.done, strict=True))
        ends = {number: done for number, at, done in rows if calls[at].name.endswith(_COALESCED)}
        if ends:
            track.done = bytearray(ends.get(number, done) for number, _, done in rows)


def _fold(dump: RankDump, track: Track) -> None:
    """Entries with one number are one call: what `coalescing_manager` or an uneven collective puts together. Their
    own entries have no state; the one at their end has."""
    calls = dump.calls
    found = Track(started=track.started)
    folded: dict[tuple[int, ...], int] = {}
    place = 0
    for number, entries in groupby(track.sequences):
        end = place + len(list(entries))
        parts = tuple(track.calls[place:end])
        is_cut = place == 0 and number > 1 and end < len(track.sequences)  # the ring has lost the first of them
        if len(parts) > 1 and parts not in folded:
            folded[parts] = len(calls)
            calls.append(_coalesced([calls[at] for at in parts]))
        if len(parts) == 1 or not is_cut:
            found.sequences.append(number)
            found.calls.append(parts[0] if len(parts) == 1 else folded[parts])
            found.done.append(track.done[end - 1])
        place = end
    track.sequences, track.calls, track.done = found.sequences, found.calls, found.done


_SEEN: dict[bytes, AwaitedCall] = {}
"""Calls of the dumps before: those of a job's ranks have the same."""
_MOST_SEEN = 4096


def _call(profiling_name: object, group: object, inputs: object, outputs: object, types: object) -> AwaitedCall:
    backend, _, name = _text(profiling_name).rpartition(":")
    parts = [_text(part) for part in group] if isinstance(group, list | tuple) else [_text(group)]
    named = types if isinstance(types, list | tuple) else [types] if isinstance(types, str) and types else ()
    found = _P2P.match(name)
    peers = None
    if found is not None and found[2] is not None:
        ends = int(found[2]), int(found[4])
        peers = ends if found[3] == "->" else ends[::-1]
    return AwaitedCall(
        name=found[1] if found is not None else name,
        group=parts[0] if parts else "",
        description=parts[1] if len(parts) > 1 and parts[1] != "undefined" else "",
        backend=backend,
        inputs=_shapes(inputs),
        outputs=_shapes(outputs),
        types=tuple(map(_text, named)),
        peers=peers,
    )


def _coalesced(parts: list[AwaitedCall]) -> AwaitedCall:
    end = parts[-1]
    inner = parts[:-1] if end.name.endswith(_COALESCED) else parts
    names = Counter(part.name for part in inner)
    (name, *more) = names
    return AwaitedCall(
        name=COALESCED + (name if not more else ", ".join(f"{count} {each}" for each, count in names.items())),
        group=end.group,
        description=end.description,
        backend=end.backend,
        inputs=tuple(shape for part in inner for shape in part.inputs),
        outputs=tuple(shape for part in inner for shape in part.outputs),
        types=tuple(kind for part in inner for kind in part.types),
    )


def _text(value: object) -> str:
    """A text, or a number as one. Nothing else: a list in lists may take for ever to be written out."""
    return value if isinstance(value, str) else str(_number(value)) if isinstance(value, int) else ""


def _number(value: object) -> int:
    number = int(value) if isinstance(value, int | float | str) else None
    if number is None or not -1 <= number <= _MOST_ELEMENTS:
        raise UnreadableDumpError(why="what should be a count in it is none")
    return number


def _shapes(sizes: object) -> tuple[tuple[int, ...], ...]:
    shapes = sizes if isinstance(sizes, list | tuple) else ()
    return tuple(tuple(map(_number, each if isinstance(each, list | tuple) else (each,))) for each in shapes)


def _members(config: object) -> Iterable[tuple[str, tuple[int, ...]]]:
    """The groups' ranks: ``{"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1]"}}``, the ranks as a text or a
    list; older formats have the list alone."""
    groups = config.items() if isinstance(config, dict) else ()
    for name, group in groups:
        ranks = group.get("ranks") if isinstance(group, dict) else group
        members = _listed(ranks) if isinstance(ranks, str) else ranks
        if isinstance(members, list | tuple) and members and all(isinstance(rank, int) for rank in members):
            yield _text(name), tuple(members)


@lru_cache(maxsize=64)
def _listed(ranks: str) -> tuple[int, ...]:
    try:
        return msgspec.json.decode(ranks, type=tuple[int, ...])
    except msgspec.DecodeError:
        return ()


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
