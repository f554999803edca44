"""Compares what each rank was doing when a round broke, and finds the rank that differs from the others. Pure.

A collective that fails shows that *some* rank did not come to it; the ranks' `Activity` together shows which one.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from hpc_elastic.base.text import cut_end, plural, ranks_text
from hpc_elastic.failures.failure_text import Frame, user_frames
from hpc_elastic.failures.flight_analysis import Analysis, Reason, analyse
from hpc_elastic.failures.flight_dump import dumps_of, tail_of_words
from hpc_elastic.failures.peers import find_peer
from hpc_elastic.failures.ranking import Suspect
from hpc_elastic.failures.traceback_text import find_python_traceback
from hpc_elastic.run.progress import MOST_NAMED, Activity, Doing

MOST_SUSPECTS = 8
_SAYS_LIMIT = 400
_POINT_TO_POINT = ("recv", "irecv", "send", "isend", "batch_isend_irecv", "recv_object_list", "send_object_list")
_PARTNER = re.compile(r"\b(?:src|dst)\s*=\s*(\d+)\b")
_ROOTED = ("gather", "gather_object", "reduce", "broadcast", "broadcast_object_list", "scatter", "scatter_object_list")
"""Collectives that one rank leaves later than the others, by their nature."""
_COLLECTS = ("gather", "gather_object", "reduce")
WAITS_FOR_RANKS = (Doing.COLLECTIVE, Doing.STORE, Doing.BACKWARD)
_C10D = "/torch/distributed/distributed_c10d.py"
_OF_PROCESS_GROUP = re.compile(r"/torch/distributed/(?!elastic/|run\.py|launch)|/torch/nn/parallel/distributed\.py\Z")
_LEAVES = ("destroy_process_group", "_shutdown_backend", "abort_process_group")
_STORE_CALLS = ("_create_c10d_store", "_store_based_barrier", "store_timeout", "barrier_store")
# File (its end) and function of a library's frame → what it waits for.
_LIBRARY_CALLS: tuple[tuple[str, str, Doing, str], ...] = (
    ("/torch/utils/data/dataloader.py", "", Doing.LOADER, "DataLoader"),
    ("/torch/autograd/graph.py", "_engine_run_backward", Doing.BACKWARD, "backward"),
    ("/subprocess.py", "", Doing.CHILD, "subprocess"),
    ("/multiprocessing/popen_fork.py", "", Doing.CHILD, "multiprocessing"),
    ("/multiprocessing/process.py", "join", Doing.CHILD, "multiprocessing"),
    ("/threading.py", "_shutdown", Doing.LEAVING, "the end of its threads"),
    ("/threading.py", "", Doing.LOCK, "threading"),
    ("/queue.py", "", Doing.LOCK, "queue"),
    ("/multiprocessing/queues.py", "", Doing.LOCK, "multiprocessing queue"),
    ("/multiprocessing/connection.py", "", Doing.IO, "multiprocessing connection"),
    ("/selectors.py", "", Doing.IO, "select"),
    ("/socket.py", "", Doing.IO, "socket"),
    ("/ssl.py", "", Doing.IO, "socket"),
)
_SYSCALLS: Mapping[str, Doing] = {
    **dict.fromkeys(("clock_nanosleep", "nanosleep"), Doing.SLEEP),
    **dict.fromkeys(("wait4", "waitid"), Doing.CHILD),
    "futex": Doing.LOCK,
    **dict.fromkeys(
        ("read", "pread64", "readv", "write", "pwrite64", "writev", "poll", "ppoll", "select", "pselect6", "recvfrom",
         "recvmsg", "sendto", "sendmsg", "epoll_wait", "epoll_pwait", "connect", "accept", "accept4", "flock", "fcntl",
         "openat", "fsync", "fdatasync", "statx", "newfstatat", "getdents64"),
        Doing.IO,
    ),
}  # fmt: skip


def activity_of_stack(
    rank: int, frames: Sequence[Frame], *, syscall: str = "", line: str = "", is_ending: bool = False
) -> Activity:
    """Say where a rank stood that was asked for its stack; `frames` are its main thread's, outermost call first.

    `syscall`: its main thread's before it was asked. `line`: the source of the innermost frame of the user's code.
    `is_ending`: it left its stacks, and its main thread had no Python in it any more.
    """
    if not frames and is_ending:
        return Activity(rank=rank, doing=Doing.LEAVING, call="the interpreter's end")
    if not frames:
        return Activity(rank=rank, doing=_SYSCALLS.get(syscall, Doing.UNKNOWN), call=syscall)
    doing, call = _call_of(frames)
    if doing is Doing.CODE and frames[-1] in user_frames(frames[-1:]):
        # A call into C has no frame of its own: time.sleep, a lock's acquire, input, work.wait.
        doing, call = _SYSCALLS.get(syscall, Doing.CODE), syscall if syscall in _SYSCALLS else ""
    shown = "" if doing in (Doing.COLLECTIVE, Doing.BACKWARD) else cut_end(line.strip(), 100)
    return Activity(rank=rank, doing=doing, call=call, at=_at(frames), line=shown, awaits=_partner(call, line))


def activity_of_failure(rank: int, frames: Sequence[Frame], text: str, *, line: str = "") -> Activity:
    doing, call = _call_of(frames)
    if doing is Doing.CODE:
        doing, call = Doing.COLLECTIVE, ""  # a symptom is raised in a call of torch, which has no frame of its own
    said = _read_messages(rank, text)
    if said["key"] or said["clients"]:
        doing = Doing.STORE
    return Activity(
        rank=rank,
        doing=doing,
        call=call or said["operation"].partition(" ")[0].lower(),
        at=_at(frames),
        failed=True,
        peer=find_peer(text),
        awaits=_partner(call, line),
        flight=tail_of_words(text),
        **said,
    )


def _partner(call: str, text: str) -> int | None:
    found = _PARTNER.search(text) if call in _POINT_TO_POINT else None
    return int(found[1]) if found is not None else None


def _call_of(frames: Sequence[Frame]) -> tuple[Doing, str]:
    at = len(frames)
    while at > 0 and not user_frames(frames[at - 1 : at]):
        at -= 1
    below = frames[at:]
    public = [frame.function for frame in below if frame.file.endswith(_C10D) and not frame.function.startswith("_")]
    if any(frame.function in _LEAVES for frame in below):
        return Doing.LEAVING, "destroy_process_group"
    if any(frame.function in _STORE_CALLS for frame in below):
        return Doing.STORE, public[0] if public else "store"
    if public:
        return Doing.COLLECTIVE, public[0]
    for frame in below:
        for end, function, doing, call in _LIBRARY_CALLS:
            if frame.file.endswith(end) and (not function or frame.function == function):
                return doing, call
    inside = [frame for frame in below if _OF_PROCESS_GROUP.search(frame.file)]
    if inside:
        return Doing.COLLECTIVE, inside[-1].function.strip("_")
    return Doing.CODE, ""


def _at(frames: Sequence[Frame]) -> str:
    mine = user_frames(frames)
    if not mine:
        return ""
    frame = mine[-1]
    return f"{frame.file.rsplit('/', 1)[-1]}:{frame.line} {frame.function}".removesuffix(" <module>")


# What torch 2.2 to 2.13 print: ProcessGroupGloo.cpp, ProcessGroupNCCL.cpp, ProcessGroupWrapper.cpp, TCPStore.cpp.
_BARRIER = re.compile(r"Ranks? ([\d, ]+) failed to pass monitoredBarrier")
_BARRIER_FIRST = re.compile(r"\[Rank \d+\]: Rank (\d+) failed to pass monitoredBarrier")
_CHECKPOINT = re.compile(r"CheckpointException ranks:dict_keys\(\[([\d, ]+)\]\)")
"""torch.distributed.checkpoint raises on all ranks what some of them raised, and quotes that."""
_ENQUEUED = re.compile(r"last enqueued(?: NCCL)? work: (-?\d+)")
_WORK = re.compile(r"WorkNCCL\(SeqNum=(\d+), OpType=(\w+), NumelIn=(\d+), NumelOut=(\d+)")
_FINGERPRINT = re.compile(
    r"[Rr]ank (\d+) is running (?:collective: )?(CollectiveFingerPrint\([^)]*\)|inconsistent \S+)"
)
_SEQUENCE = re.compile(r"SequenceNumber=(\d+),? ?")
_KEYS = re.compile(r"wait timeout after \d+ms, keys: (\S+)")
_PEER_KEY = re.compile(r"default_pg/\d+//(?:cpu|gloo)\w*//\d+/(\d+)\Z")
"""gloo writes it for each rank of the default group: the last number is the rank."""
_CLIENTS = re.compile(r"(\d+)/(\d+) clients joined")
_SIZES = re.compile(r"op\.preamble\.(?:length|nbytes) <= op\.nbytes\. (\d+) vs (\d+)")


def _read_messages(rank: int, text: str) -> dict[str, Any]:
    sequence, operation, peer = None, "", None
    if works := _WORK.findall(text):
        number, kind, into, out = works[-1]
        sequence, operation = int(number), f"{kind} of {into} to {out} elements"
    if enqueued := _ENQUEUED.findall(text):
        sequence = int(enqueued[-1])
    for whose, prints in _FINGERPRINT.findall(text):
        if int(whose) == rank:
            found = _SEQUENCE.search(prints)
            sequence = int(found[1]) if found else sequence
            operation = _operation(prints)
        else:
            peer = int(whose), cut_end(_operation(prints), _SAYS_LIMIT)
    named: dict[int, None] = {}
    for numbers in (*_BARRIER.findall(text), *_BARRIER_FIRST.findall(text)):
        named |= dict.fromkeys(int(number) for number in re.findall(r"\d+", numbers))
    reports = ""
    if checkpoint := _CHECKPOINT.search(text):
        named |= dict.fromkeys(int(number) for number in re.findall(r"\d+", checkpoint[1]))
        found_text = find_python_traceback(text)
        quoted = [raised for raised in found_text.earlier if raised.rank is not None] if found_text is not None else []
        reports = cut_end(quoted[0].headline, _SAYS_LIMIT) if quoted else ""
    keys, clients, sizes = _KEYS.search(text), _CLIENTS.search(text), _SIZES.search(text)
    return {
        "sequence": sequence,
        "operation": cut_end(operation, _SAYS_LIMIT),
        "peer_operation": peer,
        "names": tuple(sorted(named))[:MOST_NAMED],
        "reports": reports,
        "key": cut_end(keys[1], 100).removeprefix("/") if keys else "",
        "clients": (int(clients[1]), int(clients[2])) if clients else None,
        "sizes": (int(sizes[1]), int(sizes[2])) if sizes else None,
    }


def _operation(prints: str) -> str:
    # Torch 2.13 prints no comma between the number and the type of one without a tensor.
    kind = re.search(r"OpType=(\w+)", prints)
    shape = re.search(r"TensorShape=(\[[^\]]*\])", prints)
    types = re.search(r"TensorDtypes=([^,()]+)", prints)
    parts = [f"of {shape[1]}" if shape else "", types[1].strip() if types else ""]
    return " ".join(filter(None, [kind[1] if kind else prints, *parts]))


class RankComparison(Struct, frozen=True, kw_only=True):
    suspects: tuple[Suspect, ...] = ()
    """The ranks that differ, the likeliest first; empty: none does, or too many do."""
    says: str = ""
    is_open: bool = False
    """The suspects wait, and the others do something else: either may be at fault."""
    is_of_all: bool = False
    """`says` is all that is known: the script gives wrong numbers to all, or ranks wait for each other."""


_WRONG_SIZE = "the world size that the script gives is too large"


def is_with_the_others(activity: Activity, activities: Sequence[Activity]) -> bool:
    return activity.doing in WAITS_FOR_RANKS and any(
        other.failed and other.call == activity.call for other in activities if other.doing in WAITS_FOR_RANKS
    )


def compare_ranks(activities: Sequence[Activity], *, hosts: Mapping[int, str] | None = None) -> RankComparison:
    known = {activity.rank: activity for activity in activities}
    where = hosts or {}
    workers = len(where) or len(known)
    dumps = dumps_of({activity.rank: activity.flight for activity in activities if activity.flight is not None})
    recorded = analyse(dumps, world_size=workers) if dumps else Analysis()
    for find in (
        _named,
        partial(_by_flight_recorder, recorded=recorded),
        _by_operation,
        _by_sequence,
        partial(_by_store, workers=workers),
        _by_peer,
        _outside,
        _by_call,
        _by_place,
        _by_size,
    ):
        found = find(known)
        if found is not None:
            suspects = (
                replace(suspect, host=where.get(suspect.rank, "")) for suspect in found.suspects[:MOST_SUSPECTS]
            )
            return replace(found, suspects=tuple(suspects))
    if recorded.suspects:  # they left no dump
        ranks = ranks_text([one.rank for one in recorded.suspects])
        return RankComparison(says=f"{ranks} {recorded.suspects[0].reason}")
    return RankComparison(says=recorded.says if any(group.waiting for group in recorded.groups) else "")


def _blame(whys: Mapping[int, str], says: str = "") -> RankComparison:
    return RankComparison(suspects=tuple(Suspect(rank=rank, why=why) for rank, why in whys.items()), says=says)


def _named(known: Mapping[int, Activity]) -> RankComparison | None:
    """`monitored_barrier` names those that did not come, a checkpoint's exception those that raised it."""
    by = {rank: activity for activity in known.values() for rank in activity.names}
    if not by:
        return None
    whys = {}
    for rank in sorted(by):
        activity = known.get(rank)
        does = f"; it was {activity.where}" if activity is not None and activity.doing is not Doing.UNKNOWN else ""
        if by[rank].reports:
            whys[rank] = f"rank {by[rank].rank} reports of it: {by[rank].reports}{does}"
        else:
            whys[rank] = f"rank {by[rank].rank} waited for it in monitored_barrier in vain{does}"
    return _blame(whys)


def _by_flight_recorder(known: Mapping[int, Activity], *, recorded: Analysis) -> RankComparison | None:
    """A rank without a dump shows less than its activity."""
    whys = {one.rank: f"it {one.reason}" for one in recorded.suspects if one.kind is not Reason.NO_DUMP}
    for rank in whys.keys() & known.keys():
        if (activity := known[rank]).doing is not Doing.UNKNOWN and not activity.failed:
            whys[rank] += f"; it was {activity.where}"
    is_open = any(one.kind is Reason.ALONE for one in recorded.suspects)
    if is_open and (other := next((one for rank, one in known.items() if rank not in whys), None)) is not None:
        whys = {rank: f"{why}, and the others were {other.where}" for rank, why in whys.items()}
    return replace(_blame(whys), is_open=is_open) if whys else None


def _by_operation(known: Mapping[int, Activity]) -> RankComparison | None:
    peers = dict(activity.peer_operation for activity in known.values() if activity.peer_operation is not None)
    operations = {**peers, **{rank: activity.operation for rank, activity in known.items() if activity.operation}}
    found = _minority(operations)
    if found is None:
        return None
    most, odd = found
    whys = {rank: f"its collective was {operations[rank]}, the others' {most}" for rank in odd}
    return _blame(whys, _differ(operations))


def _by_sequence(known: Mapping[int, Activity]) -> RankComparison | None:
    numbers = {rank: activity.sequence for rank, activity in known.items() if activity.sequence is not None}
    if len(set(numbers.values())) < 2:
        return None
    least, most = min(numbers.values()), max(numbers.values())
    behind = [rank for rank, number in sorted(numbers.items()) if number == least]
    if 2 * len(behind) >= len(numbers):
        return None
    return _blame(dict.fromkeys(behind, f"it had come to collective {least}, the others to {most}"))


def _by_store(known: Mapping[int, Activity], *, workers: int) -> RankComparison | None:
    """A key that no rank wrote, or a rank that never came: only what the waiting ranks say is known."""
    clients = next((activity.clients for activity in known.values() if activity.clients is not None), None)
    if clients is not None:
        came, wanted = clients
        says = f"{came} of {plural(wanted, 'rank')} had connected to the store"
        if wanted > workers:
            return RankComparison(says=f"{says}, and {plural(workers, 'worker')} run: {_WRONG_SIZE}", is_of_all=True)
        return RankComparison(says=says)
    keys = {rank: activity.key for rank, activity in known.items() if activity.key}
    if not keys:
        return None
    most = Counter(keys.values()).most_common(1)[0][0]
    waiting = sorted(rank for rank, key in keys.items() if key == most)
    are = "waits" if len(waiting) == 1 else "wait"
    if peer := _PEER_KEY.search(most):
        rank = int(peer[1])
        come = f"{ranks_text(waiting)} {are} for rank {rank} to join the process group"
        if rank >= workers:
            return RankComparison(says=f"{come}, and {plural(workers, 'worker')} run: {_WRONG_SIZE}", is_of_all=True)
        if rank in waiting:
            why = "the ranks that the script gives are not this job's"
            return RankComparison(says=f"{come}, rank {rank} of this job too: {why}", is_of_all=True)
        does = f"; it was {known[rank].where}" if rank in known and known[rank].doing is not Doing.UNKNOWN else ""
        return _blame({rank: f"{ranks_text(waiting)} waited for it to join the process group in vain{does}"})
    others = {
        rank: f"it was {activity.where} while {ranks_text(waiting)} waited for the key {most!r} of the store"
        for rank, activity in sorted(known.items())
        if rank not in waiting and not activity.failed
    }
    says = f"{ranks_text(waiting)} {are} for the key {most!r} of the store, which no rank has written"
    return _blame(others if 2 * len(others) <= len(known) else {}, says)


def _by_peer(known: Mapping[int, Activity]) -> RankComparison | None:
    """The ranks that a send or receive waits for: those that wait for no other one so, where there are any."""
    waits = {rank: activity for rank, activity in known.items() if activity.awaits is not None}
    ends = {
        activity.awaits: f"rank {rank} waited for it, {activity.where}"
        for rank, activity in waits.items()
        if activity.awaits is not None and activity.awaits not in waits and activity.awaits != rank
    }
    for rank in ends.keys() & known.keys():
        ends[rank] += f"; it was {known[rank].where}"
    return _blame(ends) if ends else None


def _outside(known: Mapping[int, Activity]) -> RankComparison | None:
    inside = {rank: activity for rank, activity in known.items() if activity.doing in WAITS_FOR_RANKS}
    outside = {
        rank: activity
        for rank, activity in sorted(known.items())
        if activity.doing not in (*WAITS_FOR_RANKS, Doing.UNKNOWN) and not activity.failed
    }
    if not inside or not outside:
        return None
    if all(activity.call in _POINT_TO_POINT for activity in inside.values()) and len(outside) >= len(inside):
        # Two ranks may wait for each other, and the others have no part in it.
        says = _differ({rank: known[rank].where for rank in {**inside, **outside}}, verbs=("was", "were"))
        return RankComparison(says=says, is_of_all=True)
    calls = Counter(activity.call or "a collective" for activity in inside.values())
    name = calls.most_common(1)[0][0]
    if len(inside) < len(outside):
        # A collective that most ranks never come to: one below `if rank == 0`.
        where = next(iter(outside.values())).where
        whys = {rank: f"it was {each.where}, and the others were {where}" for rank, each in inside.items()}
        return replace(_blame(whys), is_open=True)
    others = "the others" if len(inside) > 1 else f"rank {next(iter(inside))}"
    return _blame({rank: f"it was {each.where} while {others} waited in {name}" for rank, each in outside.items()})


def _by_call(known: Mapping[int, Activity]) -> RankComparison | None:
    inside = {rank: activity for rank, activity in known.items() if activity.doing in WAITS_FOR_RANKS}
    calls = {rank: activity.call for rank, activity in inside.items() if activity.call}
    places = {rank: activity.at for rank, activity in inside.items() if activity.at and (activity.call or not calls)}
    uneven = {rank for rank, call in calls.items() if call in (*_POINT_TO_POINT, *_ROOTED)}
    for values in (calls, places):
        found = _minority(values)
        # Where most ranks are in one that all leave together, another call is the odd one; but a root that still
        # collects what the others have sent, and left behind, waits for one of them.
        if found is not None and not uneven - {rank for rank in found[1] if calls.get(rank) not in _COLLECTS}:
            most, odd = found
            other = next(inside[rank].where for rank, value in values.items() if value == most)
            return _blame({rank: f"it was {inside[rank].where} while the others were {other}" for rank in odd})
        if len(set(values.values())) > 1:
            return RankComparison(says=_differ({rank: inside[rank].where for rank in values}, verbs=("was", "were")))
    return None


def _by_place(known: Mapping[int, Activity]) -> RankComparison | None:
    places = {rank: activity.at for rank, activity in known.items() if activity.at and not activity.failed}
    found = _minority(places)
    if found is None:
        return None
    most, odd = found
    other = next(known[rank].where for rank, value in places.items() if value == most)
    return _blame({rank: f"it was {known[rank].where} while the others were {other}" for rank in odd})


def _by_size(known: Mapping[int, Activity]) -> RankComparison | None:
    """gloo compares sizes only: which of two ranks was wrong, they do not show."""
    for activity in known.values():
        if activity.sizes is not None:
            came, expected = activity.sizes
            name = activity.call or "a collective"
            return RankComparison(
                says=f"the ranks' tensors differ in shape or type: in {name} {came} bytes came to rank {activity.rank} "
                f"from a peer where it expected at most {expected}"
            )
    return None


def _minority(values: Mapping[int, str]) -> tuple[str, list[int]] | None:
    if len(set(values.values())) < 2:
        return None
    most, count = Counter(values.values()).most_common(1)[0]
    if 2 * count <= len(values):
        return None
    return most, sorted(rank for rank, value in values.items() if value != most)


def _differ(values: Mapping[int, str], *, verbs: tuple[str, str] = ("ran", "ran")) -> str:
    groups: dict[str, list[int]] = {}
    for rank, value in sorted(values.items()):
        groups.setdefault(value, []).append(rank)
    parts = [f"{ranks_text(ranks)} {verbs[len(ranks) > 1]} {value}" for value, ranks in list(groups.items())[:4]]
    return "; ".join(parts)
