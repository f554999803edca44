"""What dumps of torch's flight recorder show: the rules one by one, and dumps that torch 2.13 wrote with gloo."""

from __future__ import annotations

import json
import os
import pickle
import resource
import tracemalloc
from pathlib import Path
from typing import Any

import msgspec
import pytest

from hpc_elastic.cli.main import main
from hpc_elastic.failures.collectives import compare_ranks
from hpc_elastic.failures.flight_analysis import Analysis, Reason, analyse
from hpc_elastic.failures.flight_dump import (
    RankDump,
    UnreadableDumpError,
    dumps_of,
    numel_of,
    rank_of_name,
    read_dump,
    size_of,
    tail_of,
)
from hpc_elastic.run.progress import Activity, AwaitedCall, Doing, FlightTail, TailTrack

DATA = Path(__file__).parents[2] / "data" / "flight_recorder"
SHAPE = ((1024, 2048), "BFloat16")


def call(name: str, sequence: int, *, group: str = "0", done: bool = True, shape: Any = SHAPE, **more: Any) -> dict:
    """One entry, as NCCL's process group writes it."""
    sizes = [] if shape is None else [list(shape[0])]
    types = [] if shape is None else [shape[1]]
    entry = {
        "pg_id": 0,
        "process_group": (group, {"0": "default_pg"}.get(group, group)),
        "collective_seq_id": sequence,
        "p2p_seq_id": 0,
        "op_id": sequence,
        "profiling_name": f"nccl:{name}",
        "input_sizes": sizes,
        "input_dtypes": types,
        "output_sizes": sizes,
        "output_dtypes": types,
        "state": "completed" if done else "started",
        "retired": done,
        "is_p2p": False,
    }
    return {**entry, **more}


def transfer(name: str, sequence: int, *, done: bool = False, **more: Any) -> dict:
    return call(name, 0, done=done, p2p_seq_id=sequence, is_p2p=True, **more)


def ran(count: int, *, first: int = 1, **more: Any) -> list[dict]:
    """Collectives that are completed."""
    return [call("all_reduce", first + number, **more) for number in range(count)]


GROUPS = {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1, 2, 3]"}}


def dump(entries: list[dict], *, version: str = "2.4", groups: Any = GROUPS, **more: Any) -> dict:
    return {"version": version, "pg_config": groups, "entries": entries, **more}


def judge(ranks: dict[int, list[dict]], *, groups: Any = GROUPS, world_size: int | None = None) -> Analysis:
    """Every case is read as a pickle and as JSON, and says the same."""
    found = [
        analyse(
            [read_dump(write(dump(entries, groups=groups)), rank=rank) for rank, entries in ranks.items()],
            world_size=world_size,
        )
        for write in (lambda document: pickle.dumps(document, 2), lambda document: json.dumps(document).encode())
    ]
    assert found[0] == found[1]
    return found[0]


def named(analysis: Analysis) -> list[tuple[int, Reason]]:
    return [(suspect.rank, suspect.kind) for suspect in analysis.suspects]


def waiting(rank_count: int, *, without: tuple[int, ...] = (), **more: Any) -> dict[int, list[dict]]:
    """All but some wait in the fourth all_reduce."""
    return {
        rank: ran(3, **more) + ([] if rank in without else [call("all_reduce", 4, done=False, **more)])
        for rank in range(rank_count)
    }


@pytest.mark.parametrize(
    ("entry", "kind", "reason"),
    [
        (
            call("broadcast", 4, done=False),
            Reason.OTHER_COLLECTIVE,
            "called broadcast #4 of group default_pg (4.0 MiB bf16) where the others called all_reduce (4.0 MiB bf16)",
        ),
        (
            call("all_reduce", 4, done=False, shape=((1024, 2047), "BFloat16")),
            Reason.OTHER_SIZE,
            "called all_reduce #4 of group default_pg with [1024, 2047] bf16 where the others gave [1024, 2048] bf16",
        ),
        (
            call("all_reduce", 4, done=False, shape=((1024, 2048), "Float")),
            Reason.OTHER_SIZE,
            "called all_reduce #4 of group default_pg with [1024, 2048] fp32 where the others gave [1024, 2048] bf16",
        ),
    ],
)
def test_a_rank_that_calls_something_else_is_named(entry: dict, kind: Reason, reason: str) -> None:
    (suspect,) = judge(waiting(4) | {2: [*ran(3), entry]}).suspects
    assert (suspect.rank, suspect.kind, suspect.reason) == (2, kind, reason)


def put_together(number: int, *parts: str, end: str = "coalesced", done: bool = False, **more: Any) -> list[dict]:
    """What a coalescing manager leaves: entries that stay as they were enqueued, and one at their end with a state."""
    inner = [call(part, number, done=False, state="scheduled", **more) for part in parts]
    return [*inner, call(end, number, done=done, shape=None)]


def all_to_all(*sizes: int) -> dict[int, list[dict]]:
    return {rank: [call("all_to_all", 1, shape=((size,), "Float"))] for rank, size in enumerate(sizes)}


def retired(backend: str) -> dict[int, list[dict]]:
    names = {"profiling_name": f"{backend}:all_reduce", "retired": True}
    return {rank: [{**entry, **names} for entry in entries] for rank, entries in waiting(4, without=(2,)).items()}


IN_4 = call("all_reduce", 4, done=False)
FLAT = call("all_reduce", 4, done=False, shape=((1 << 21,), "BFloat16"))
BROADCAST = call("broadcast", 4, done=False)
LEFT_ONE_OUT = [*ran(2), call("broadcast", 3), *ran(3, first=4), call("all_gather", 7, done=False)]
WRAPPED = [*ran(50, first=100), call("all_reduce", 150, done=False)]
BOTH = put_together(100, "broadcast", "all_reduce", done=True)
COALESCED = [*BOTH, *ran(5, first=101), call("all_reduce", 106, done=False)]


@pytest.mark.parametrize(
    ("ranks", "suspects"),
    [
        pytest.param(
            waiting(4, without=(1, 3)), [(1, Reason.NEVER_ENTERED), (3, Reason.NEVER_ENTERED)], id="two are missing"
        ),
        pytest.param(
            waiting(4, without=(3,)) | {1: [*ran(3), BROADCAST]},
            [(1, Reason.OTHER_COLLECTIVE), (3, Reason.NEVER_ENTERED)],
            id="one that is missing and one in another",
        ),
        pytest.param(  # from there on its numbers are one behind, and at the end it misses the last
            dict.fromkeys(range(4), LEFT_ONE_OUT) | {1: [*ran(5), call("all_gather", 6, done=False)]},
            [(1, Reason.OTHER_COLLECTIVE)],
            id="the first difference counts",
        ),
        pytest.param(
            waiting(4, without=(0,)) | {3: [*ran(3), FLAT]}, [(0, Reason.NEVER_ENTERED)], id="another shape is none"
        ),
        pytest.param(
            {0: [IN_4], 1: [BROADCAST]},
            [(0, Reason.OTHER_COLLECTIVE), (1, Reason.OTHER_COLLECTIVE)],
            id="no majority: each is named",
        ),
        pytest.param(
            {rank: [*entries, *([] if rank == 2 else [call("all_reduce", 2, done=False)])]
             for rank, entries in all_to_all(0, 1, 9, 3).items()},
            [(2, Reason.NEVER_ENTERED)],
            id="sizes of all_to_all may differ",
        ),
        pytest.param(
            dict.fromkeys(range(4), WRAPPED) | {2: ran(40, first=110)}, [(2, Reason.NEVER_ENTERED)], id="a wrapped ring"
        ),
        pytest.param(
            dict.fromkeys(range(4), COALESCED) | {2: [*BOTH[1:], *ran(5, first=101)]},
            [(2, Reason.NEVER_ENTERED)],
            id="a ring that has lost the first of what was put together",
        ),
        pytest.param(
            {rank: ran(4) for rank in range(4)} | {2: [*ran(3), IN_4]}, [(2, Reason.NOT_COMPLETED)], id="not completed"
        ),
        pytest.param({rank: ran(3) for rank in range(4)} | {1: [*ran(3), IN_4]}, [(1, Reason.ALONE)], id="alone"),
        *[
            pytest.param(retired(backend), [(2, Reason.NEVER_ENTERED)], id=f"{backend}'s watchdog retires what waits")
            for backend in ("nccl", "xccl", "rccl")
        ],
        pytest.param(waiting(4), [], id="all wait in the same"),
        pytest.param({rank: ran(3) for rank in range(4)}, [], id="none waits"),
    ],
)  # fmt: skip
def test_which_ranks_are_named(ranks: dict[int, list[dict]], suspects: list[tuple[int, Reason]]) -> None:
    found = judge(ranks)
    assert named(found) == suspects
    assert ranks[0] != LEFT_ONE_OUT or found.suspects[0].sequence == 3


TENSOR_PARALLEL = {
    **GROUPS,
    "3": {"name": "3", "desc": "tp_0", "ranks": "[0, 1]"},
    "4": {"name": "4", "desc": "tp_1", "ranks": "[2, 3]"},
}


def test_a_rank_that_waits_in_another_group_is_no_suspect() -> None:
    # Rank 3 is missing in tp_1; rank 2 waits for it there, and so is missing in the group of all.
    ranks = waiting(4, without=(2, 3)) | {
        2: [*ran(3), call("all_gather", 1, group="4", done=False)],
    }
    (suspect,) = judge(ranks, groups=TENSOR_PARALLEL).suspects
    assert (suspect.rank, suspect.kind) == (3, Reason.NEVER_ENTERED)
    ranks[3] = [*ran(3), call("all_gather", 1, group="4", done=False)]
    ranks[1] = ran(3)
    ranks[0] = [*ran(3), call("all_gather", 1, group="3", done=False)]
    (suspect,) = judge(ranks, groups=TENSOR_PARALLEL).suspects
    assert (suspect.rank, suspect.group) == (1, "3")
    # Groups of a subset need only their own ranks.
    ranks = {rank: ran(3) for rank in range(4)}
    ranks[2] = [*ran(3), call("all_gather", 1, group="4", done=False)]
    (suspect,) = judge(ranks, groups=TENSOR_PARALLEL).suspects
    assert suspect.rank == 3
    assert "which rank 2 waits in" in suspect.reason
    pair = {"a": {"ranks": "[0, 1]"}, "b": {"ranks": "[0, 1]"}}
    ranks = {0: [call("all_reduce", 1, group="a", done=False)], 1: [call("all_reduce", 1, group="b", done=False)]}
    analysis = judge(ranks, groups=pair)
    assert named(analysis) == [(0, Reason.EACH_OTHER), (1, Reason.EACH_OTHER)]
    assert "waits in all_reduce #1 of group a" in analysis.suspects[0].reason


def test_a_rank_without_a_dump_is_a_suspect_only_where_no_other_rank_is() -> None:
    ranks = waiting(4)
    del ranks[2]
    (suspect,) = judge(ranks).suspects
    assert (suspect.rank, suspect.kind) == (2, Reason.NO_DUMP)
    assert suspect.reason.startswith("left no dump, and the 3 others wait in all_reduce #4")
    ranks[0] = ran(3)
    assert named(judge(ranks)) == [(0, Reason.NEVER_ENTERED)]


def test_what_is_said_where_no_rank_is_named() -> None:
    assert "look at the network" in judge(waiting(4)).says
    # Seen with torch 2.13 and gloo: `retired` stays false for one of many, for good; what came after has the mark.
    ranks = {rank: ran(4, profiling_name="gloo:all_reduce", state="scheduled") for rank in range(4)}
    ranks[1][1]["retired"] = False
    assert judge(ranks).says == "no rank waits for another one in a collective"


def test_a_send_waits_for_its_receive_and_a_receive_for_its_send() -> None:
    def pair(first: list[dict], second: list[dict]) -> list[tuple[int, Reason]]:
        return named(judge({0: ran(1) + first, 1: ran(1) + second, 2: ran(1), 3: ran(1)}))

    send, receive = transfer("send 0->1", 1), transfer("recv 1<-0", 1)
    assert pair([send], []) == [(1, Reason.NEVER_ENTERED)]
    assert pair([], [receive]) == [(0, Reason.NEVER_ENTERED)]
    assert pair([send], [receive]) == []
    assert pair([send], [{**receive, "output_sizes": [[3]]}]) == [(0, Reason.OTHER_SIZE), (1, Reason.OTHER_SIZE)]
    # Both receive first: each waits for the other.
    assert pair([transfer("recv 0<-1", 1)], [receive]) == [(0, Reason.EACH_OTHER), (1, Reason.EACH_OTHER)]
    # The rank that should receive waits in a collective, which the ranks without a part in the transfer never entered.
    assert pair([send], [call("all_reduce", 2, done=False)]) == [(2, Reason.NEVER_ENTERED), (3, Reason.NEVER_ENTERED)]


def test_what_is_put_together_is_one_call_with_the_state_of_its_end() -> None:
    both = put_together(4, "broadcast", "broadcast", done=True)
    ranks = {rank: [*ran(3), *both, call("all_reduce", 5, done=False)] for rank in (0, 1, 3)}
    (suspect,) = judge(ranks | {2: [*ran(3), *both]}).suspects
    assert (suspect.rank, suspect.kind, suspect.sequence) == (2, Reason.NEVER_ENTERED, 5)
    assert suspect.reason.endswith("its last there was coalesced broadcast #4")

    waits = [*ran(3), *put_together(4, "_broadcast_oop", "_broadcast_oop", end="ALLGATHER_coalesced")]
    odd = [*waits[:-2], {**waits[-2], "input_sizes": [[3]]}, waits[-1]]
    assert named(judge({0: waits, 1: odd, 2: waits, 3: waits})) == [(1, Reason.OTHER_SIZE)]
    (suspect,) = judge({0: waits, 1: [*ran(3), waits[-3], waits[-1]], 2: waits, 3: waits}).suspects
    assert (suspect.rank, suspect.kind) == (1, Reason.OTHER_SIZE)
    other = [*ran(3), *put_together(4, "_broadcast_oop", "_reduce_oop")]
    assert named(judge({0: waits, 1: other, 2: waits, 3: waits})) == [(1, Reason.OTHER_COLLECTIVE)]


def test_sends_and_receives_that_were_put_together_end_together() -> None:
    def both(number: int, *names: str, done: bool) -> list[dict]:
        entries = [transfer(name, number, state="scheduled", op_id=9) for name in names]
        return [*entries, transfer("coalesced", number, done=done, input_sizes=[], output_sizes=[])]

    first, second = ("send 0->1", "recv 0<-1"), ("recv 1<-0", "send 1->0")
    done = {0: both(1, *first, done=True), 1: both(1, *second, done=True)[1:], 2: [], 3: []}
    assert not judge(done).suspects  # the ring of one has lost an entry of it
    ranks = {0: [*done[0], *both(2, *first, done=False)], 1: done[1], 2: [], 3: []}
    (suspect,) = judge(ranks).suspects
    assert (suspect.rank, suspect.kind, suspect.sequence) == (1, Reason.NEVER_ENTERED, 2)
    ranks[1] = [*done[1], *both(2, "recv 1<-0", done=False)]
    (suspect,) = judge(ranks).suspects
    assert (suspect.rank, suspect.reason.partition(",")[0]) == (
        1, "never entered the send for the recv from 1 to 0 #2 of group default_pg (4.0 MiB bf16)"
    )  # fmt: skip
    ranks[1] = [*done[1], *both(2, *second, done=False)]
    assert not judge(ranks).suspects


def test_a_rank_whose_device_did_not_begin_what_the_others_have_is_named() -> None:
    ranks = waiting(4) | {2: [*ran(3), call("all_reduce", 4, done=False, state="scheduled")]}
    (suspect,) = judge(ranks).suspects
    assert (suspect.rank, suspect.kind) == (2, Reason.NOT_STARTED)
    assert suspect.reason == (
        "entered all_reduce #4 of group default_pg (4.0 MiB bf16) and its device did not begin it, "
        "which the 3 others have"
    )
    # Where devices are not timed, none of them shows that it has begun.
    assert not judge({rank: [*ran(3), call("all_reduce", 4, done=False, state="scheduled")] for rank in ranks}).suspects


def test_a_rank_that_is_ahead_of_the_others_is_said_to_be() -> None:
    ranks = waiting(4) | {1: [*ran(4), call("all_reduce", 5, done=False)]}
    analysis = judge(ranks)
    (suspect,) = analysis.suspects
    assert (suspect.rank, suspect.kind, suspect.sequence) == (1, Reason.AHEAD, 4)
    assert suspect.reason == (
        "has completed all_reduce #4 of group default_pg (4.0 MiB bf16), which the 3 others wait in; "
        "its last there was all_reduce #5"
    )
    for entries in ranks.values():  # the root of a broadcast leaves it first
        entries[3]["profiling_name"] = "nccl:broadcast"
    analysis = judge({**ranks, 1: ranks[1][:4]})
    assert not analysis.suspects
    assert analysis.says == "rank 1 has completed broadcast #4 of group default_pg, which ranks 0,2-3 have not"


def test_an_all_to_all_whose_sizes_do_not_fit_together_is_said_to_be_one() -> None:
    ranks = {rank: [call("all_to_all", 1, shape=((rank,), "Float"), done=False)] for rank in range(4)}
    assert "all_to_all" in judge(ranks).says
    ranks[3][0]["output_sizes"] = [[9]]
    assert judge(ranks).says == (
        "the ranks' all_to_all #1 of group default_pg do not fit together: 6 elements go in, 12 come out"
    )


@pytest.mark.parametrize("version", ["1.5", "2.0", "2.10", "texts"])
def test_older_and_newer_formats_are_read(version: str) -> None:
    ranks = waiting(4, without=(1,))
    for entry in (entry for entries in ranks.values() for entry in entries):
        if version == "1.5":  # torch 2.3: one counter, the group by its number alone
            entry["seq_id"] = entry.pop("collective_seq_id")
            entry["pg_name"] = entry.pop("process_group")[0]
            del entry["is_p2p"], entry["retired"], entry["input_dtypes"]
        elif version == "2.0":
            del entry["is_p2p"]
        elif version == "2.10":
            entry |= {"thread_id": "1", "a_new_one": {"x": [1]}, "frames": [{"name": "f", "line": 3}]}
        else:  # as in the test data of torch's own analyser
            entry |= {name: str(entry[name]) for name in ("collective_seq_id", "p2p_seq_id")}
            entry |= {"input_dtypes": "float32", "output_dtypes": "float32"}
    found = [
        read_dump(json.dumps(dump(entries, version=version, groups=None, a_new_one=[1])).encode(), rank=rank)
        for rank, entries in ranks.items()
    ]
    assert [one.version for one in found] == [version] * 4
    (suspect,) = analyse(found).suspects
    assert (suspect.rank, suspect.kind) == (1, Reason.NEVER_ENTERED)
    assert version != "texts" or "(2097152 elements float32)" in suspect.reason


@pytest.mark.parametrize(
    ("name", "rank"), [("nccl_trace_rank_12", 12), ("d0", 0), ("7.json", 7), ("x.3.pkl", 3), ("a3b", None), ("", None)]
)
def test_the_rank_is_the_dumps_own_or_the_number_at_the_end_of_the_name(name: str, rank: int | None) -> None:
    assert rank_of_name(name) == rank
    assert read_dump(json.dumps(dump(ran(1), rank=7)).encode(), rank=rank).rank == 7
    if rank is not None:
        assert read_dump(pickle.dumps(dump(ran(1)), 2), rank=rank).rank == rank
    else:
        with pytest.raises(UnreadableDumpError, match="rank"):
            read_dump(json.dumps(dump(ran(1))).encode())


class _Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("/tmp/must-never-be",)


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        (pickle.dumps(dump(ran(1), groups=_Evil())), "names posix.mkdir"),
        (pickle.dumps(dump(ran(3)))[:-200], ""),
        (json.dumps(dump(ran(3))).encode()[:-20], "truncated"),
        (b"", "empty"),
        (b"\x80", ""),
        (b"\x80\x02]q\x00.", "without entries"),
        (pickle.dumps({"entries": [1, None]}), ""),
        (pickle.dumps({"entries": [{"collective_seq_id": "x", "profiling_name": 3}]}), ""),
        (pickle.dumps({"entries": [call("all_reduce", 1, input_sizes=[[[[]]]])]}), ""),
        (pickle.dumps({"entries": [call("all_reduce", 1, input_sizes=[[10**5000]])]}), "a count"),
        (json.dumps({"entries": [call("all_reduce", 1, input_sizes=[["9" * 5000]])]}).encode(), ""),
        (json.dumps({"entries": [call("all_reduce", 1, input_sizes=[[1e308 * 10]])]}).encode(), ""),
        (b'{"entries": [], "version": ' + b"[" * 100_000, ""),
        (b"\x80\x02c__builtin__\neval\nX\x01\x00\x00\x001\x85R.", "names __builtin__.eval"),
        (b"\x80\x04\x8c\x02os\x8c\x06system\x93.", "names os.system"),
        (b"\x80\x02X\x01\x00\x00\x00aQ.", "outside of it"),
        (b'{"entries": 3}', "entries"),
        (b"[]", ""),
        (b"Traceback (most recent call last):\n", "malformed"),
    ],
)
def test_what_is_no_dump_is_refused_with_the_reason_and_runs_nothing(raw: bytes, why: str) -> None:
    with pytest.raises(UnreadableDumpError) as caught:
        read_dump(raw, rank=0)
    assert why in str(caught.value)
    assert not os.path.exists("/tmp/must-never-be")


def real(name: str) -> list[RankDump]:
    return [read_dump(path.read_bytes(), rank=rank_of_name(path.name)) for path in sorted(DATA.glob(f"{name}_?"))]


@pytest.mark.parametrize(
    ("name", "suspects"),
    [
        ("gloo_2.13_never", [(2, Reason.NEVER_ENTERED)]),
        ("gloo_2.13_pickle", [(2, Reason.NEVER_ENTERED)]),
        ("gloo_2.13_other", [(2, Reason.OTHER_COLLECTIVE)]),
        ("gloo_2.13_shape", [(2, Reason.OTHER_SIZE)]),
    ],
)
def test_what_torch_wrote_with_gloo_names_the_rank(name: str, suspects: list[tuple[int, Reason]]) -> None:
    assert named(analyse(real(name))) == suspects


def test_the_command_names_the_rank_and_says_what_it_could_not_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "broken_9").write_text("{")
    files = [str(path) for path in sorted(DATA.glob("gloo_2.13_never_?"))]
    assert main(["hangs", *files, str(tmp_path), str(tmp_path / "none_1")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "4 dumps, of ranks 0-3"
    assert lines[1].startswith("rank 2 never entered all_reduce #6 of group default_pg (28 B fp32), which the 3 others")
    assert "group default_pg (gloo), ranks 0-3: all have completed #5; in #6: ranks 0-1,3" in lines
    assert [line.split(": ")[0] for line in lines[-2:]] == ["unreadable", "unreadable"]

    assert main(["hangs", "--json", *files]) == 0
    document = json.loads(capsys.readouterr().out)
    (suspect,) = document["suspects"]
    assert (suspect["rank"], suspect["group"], suspect["collective"]) == (2, "default_pg", "all_reduce")
    assert suspect["reason"].startswith("never entered")

    assert main(["hangs", str(tmp_path)]) == 2
    assert "no dump of the flight recorder" in capsys.readouterr().err


def test_the_command_reads_folders_of_folders_and_of_two_failures_the_later(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And only its ranks' folders in a run: a store has links whose names end as dumps' do."""
    store = tmp_path / "attempt-000" / "store" / "round"
    store.mkdir(parents=True)
    (store / "fail+00001-node1-0001-9935").symlink_to("x" * 300)
    (store / "kv12").write_text("{}")
    for number, without in (("0", 1), ("1", 3)):
        for rank, entries in waiting(4, without=(without,)).items():
            folder = tmp_path / f"round-{number}" / f"rank-{rank}"
            folder.mkdir(parents=True)
            (folder / "stdout.log.1").write_text("a line\n")
            os.mkfifo(folder / f"{rank}.pipe")
            path = folder / f"nccl_trace_rank_{rank}"
            path.write_bytes(pickle.dumps(dump(entries), 2))
            os.utime(path, (1000 + int(number), 1000))
            os.utime(path, (1000, 1000 + int(number)))
    assert main(["hangs", str(tmp_path), str(tmp_path / "round-1" / "rank-0" / "0.pipe")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "4 dumps, of ranks 0-3"
    assert lines[1].startswith("rank 3 never entered all_reduce #4")
    assert [line.rpartition(": ")[2] for line in lines[3:]] == [
        *(f"rank {rank} has a newer dump" for rank in range(4)),
        "no regular file",
    ]


def test_the_end_of_a_dump_says_the_same_as_the_dump() -> None:
    whole = real("gloo_2.13_never")
    ends = [msgspec.json.decode(msgspec.json.encode(tail_of([one])), type=FlightTail) for one in whole]
    assert analyse(dumps_of({one.rank: end for one, end in zip(whole, ends, strict=True)})) == analyse(whole)
    few = tail_of([whole[0]], most=2)
    assert {track.group: track.sequences for track in few.tracks} == {"0": (5, 6), "1": (1,)}
    torn = FlightTail(tracks=(TailTrack(group="0", sequences=(1,), calls=(3,), done=(1,)),), members=(("0", "0-x"),))
    (found,) = dumps_of({0: torn})
    assert (len(found.collectives), len(found.members)) == (0, 0), "what does not fit together is left out"


def test_gloo_marks_what_has_failed_as_done_and_that_is_no_difference() -> None:
    def gloo(ranks: dict[int, list[dict]]) -> Analysis:
        for entries in ranks.values():
            for entry in entries:
                entry |= {"profiling_name": entry["profiling_name"].replace("nccl", "gloo"), "state": "scheduled"}
        return judge(ranks)

    failed = [*ran(3), call("all_reduce", 4)]
    assert not gloo({0: waiting(1)[0], 1: failed, 2: failed, 3: failed}).suspects
    (suspect,) = gloo({0: waiting(1)[0], 1: failed, 2: ran(3), 3: failed}).suspects
    assert suspect.rank == 2
    assert "which the 3 others wait in" in suspect.reason


def doubled(times: int) -> list[object]:
    """A list that holds one list twice, which does so too …: 600 bytes, whose text would have 2**60 characters."""
    found: list[object] = []
    for _ in range(times):
        found = [found, found]
    return found


def test_a_place_in_the_memo_takes_no_more_memory_than_there_is_for_all(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "x_0").write_bytes(b"\x80\x02]r\xff\xff\xff\x7f.")  # 16 GB
    limits = resource.getrlimit(resource.RLIMIT_AS)
    assert main(["hangs", str(tmp_path)]) == 2
    assert "MemoryError" in capsys.readouterr().err
    assert resource.getrlimit(resource.RLIMIT_AS) == limits


@pytest.mark.parametrize(
    "place", ["version", "pg_config", "process_group", "profiling_name", "input_sizes", "input_dtypes", "pg_name"]
)
def test_lists_that_double_sixty_times_are_never_written_out(place: str) -> None:
    whole = dump(ran(2))
    for holder in (whole, *whole["entries"]):
        if place in holder:
            holder[place] = doubled(60)
    raw = pickle.dumps(whole)
    assert len(raw) < 10_000
    try:
        read_dump(raw, rank=0)
    except UnreadableDumpError:
        pass


def test_the_ranks_of_all_groups_have_one_limit() -> None:
    """24 kB that stand for 2 billion numbers; and many groups, each within the limit."""
    many = FlightTail(members=(("0", "0-1048575," * 2000 + "1"),))
    each = FlightTail(members=tuple((str(number), f"{number}-1000000") for number in range(1000)))
    tracemalloc.start()
    found = dumps_of({0: many, 1: each, 2: FlightTail(members=(("0", "0-3"),))})
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert not found[0].members
    assert [len(dump.members) for dump in found] == [0, 1, 1]
    assert peak < 100 << 20


def test_a_tensor_has_no_more_elements_than_can_be_counted() -> None:
    call = AwaitedCall(name="all_reduce", group="0", inputs=((1 << 61,) * 1000,), types=("Float",))
    assert numel_of(call)[0] == 1 << 62
    assert size_of(call).endswith(" fp32")
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(b'{"name": "x", "group": "0", "inputs": [[' + b"9" * 300 + b"]]}", type=AwaitedCall)


def test_the_ranks_activities_name_the_rank_that_their_dumps_show() -> None:
    activities = [
        Activity(
            rank=dump.rank, failed=dump.rank != 2, doing=Doing.CODE, at="train.py:22 fetch", flight=tail_of([dump])
        )
        for dump in real("gloo_2.13_never")
    ]
    (suspect,) = compare_ranks(activities, hosts={rank: f"n{rank}" for rank in range(4)}).suspects
    assert (suspect.rank, suspect.host) == (2, "n2")
    assert suspect.why.startswith("it never entered all_reduce #6 of group default_pg (28 B fp32)")
    assert suspect.why.endswith("; it was in code outside of any collective (train.py:22 fetch)")


def test_what_a_rank_was_doing_says_more_than_that_it_left_no_dump() -> None:
    activities = [
        Activity(rank=dump.rank, failed=True, doing=Doing.COLLECTIVE, call="all_reduce", flight=tail_of([dump]))
        for dump in real("gloo_2.13_never")
        if dump.rank != 2
    ]
    stopped = Activity(rank=2, doing=Doing.STOPPED, at="train.py:22 fetch")
    (suspect,) = compare_ranks([*activities, stopped], hosts=dict.fromkeys(range(4), "n0")).suspects
    assert suspect.why == (
        "it was stopped by a signal (SIGSTOP, a debugger) (train.py:22 fetch) while the others waited in all_reduce"
    )
