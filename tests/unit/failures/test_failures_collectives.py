"""What ranks were doing when a round broke, and which one differs."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from hpc_elastic.failures.collectives import activity_of_failure, activity_of_stack, compare_ranks
from hpc_elastic.failures.failure_text import Frame
from hpc_elastic.run.progress import Activity, AwaitedCall, Doing, FlightTail, TailTrack

LIB = "/opt/venv/lib/python3.11/site-packages/torch"
STDLIB = "/usr/lib/python3.11"
C10D = f"{LIB}/distributed/distributed_c10d.py"
HOSTS = {0: "n0", 1: "n0", 2: "n1", 3: "n1"}


def stack(*frames: str) -> tuple[Frame, ...]:
    """Frames of ``FILE:FUNCTION``, outermost first."""
    parts = [frame.rsplit(":", 1) for frame in frames]
    return tuple(Frame(file=file, line=10 + n, function=function) for n, (file, function) in enumerate(parts))


ALL_REDUCE = stack(
    "/home/me/train.py:<module>", "/home/me/train.py:step", f"{LIB}/c10d_logger.py:wrapper", f"{C10D}:all_reduce"
)


def in_collective(rank: int, *, call: str = "all_reduce", at: str = "train.py:11 step", **changes: object) -> Activity:
    return Activity(rank=rank, doing=Doing.COLLECTIVE, call=call, at=at, failed=True, **changes)  # type: ignore[arg-type]


SCRIPT = "/me/t.py:f"
LOADER = f"{LIB}/utils/data/dataloader.py:__next__"
PEERS = f"{STDLIB}/multiprocessing/connection.py:wait"
SVD = "/opt/venv/lib/python3.11/site-packages/numpy/linalg.py:svd"


@pytest.mark.parametrize(
    ("frames", "syscall", "doing", "call"),
    [
        (ALL_REDUCE, "futex", Doing.COLLECTIVE, "all_reduce"),
        (
            stack(SCRIPT, f"{C10D}:all_gather_object", f"{LIB}/x.py:w", f"{C10D}:all_gather"),
            "",
            Doing.COLLECTIVE,
            "all_gather_object",
        ),
        (stack(SCRIPT, f"{C10D}:new_group", f"{C10D}:_store_based_barrier"), "", Doing.STORE, "new_group"),
        (stack(SCRIPT, f"{C10D}:destroy_process_group"), "", Doing.LEAVING, "destroy_process_group"),
        (
            stack(
                SCRIPT, f"{LIB}/nn/parallel/distributed.py:__init__", f"{LIB}/distributed/utils.py:_verify_param_shape"
            ),
            "",
            Doing.COLLECTIVE,
            "verify_param_shape",
        ),
        (stack(SCRIPT, f"{LIB}/autograd/graph.py:_engine_run_backward"), "futex", Doing.BACKWARD, "backward"),
        (stack(SCRIPT, LOADER, PEERS, f"{STDLIB}/selectors.py:select"), "poll", Doing.LOADER, "DataLoader"),
        (stack(SCRIPT, f"{STDLIB}/subprocess.py:wait"), "wait4", Doing.CHILD, "subprocess"),
        (stack(SCRIPT, f"{STDLIB}/queue.py:get", f"{STDLIB}/threading.py:wait"), "futex", Doing.LOCK, "queue"),
        (stack(f"{STDLIB}/threading.py:_shutdown"), "futex", Doing.LEAVING, "the end of its threads"),
        (stack(SCRIPT), "clock_nanosleep", Doing.SLEEP, "clock_nanosleep"),
        (stack(SCRIPT), "futex", Doing.LOCK, "futex"),
        (stack(SCRIPT), "read", Doing.IO, "read"),
        (stack(SCRIPT), "", Doing.CODE, ""),
        (stack(SCRIPT, SVD), "futex", Doing.CODE, ""),
        ((), "wait4", Doing.CHILD, "wait4"),
        ((), "", Doing.UNKNOWN, ""),
    ],
)
def test_a_stack_shows_what_a_rank_was_doing(frames: tuple[Frame, ...], syscall: str, doing: Doing, call: str) -> None:
    found = activity_of_stack(3, frames, syscall=syscall)
    assert (found.rank, found.doing, found.call, found.failed) == (3, doing, call, False)


def test_the_line_of_the_source_is_kept_where_no_collective_says_more() -> None:
    asleep = activity_of_stack(1, stack("/me/t.py:load"), syscall="clock_nanosleep", line="  time.sleep(1000)\n")
    assert asleep.where == "asleep (t.py:10 load): `time.sleep(1000)`"
    assert activity_of_stack(1, ALL_REDUCE, line="dist.all_reduce(x)").where == "in all_reduce (train.py:11 step)"


WAITING = [in_collective(0), in_collective(1), in_collective(3)]
ASLEEP = [activity_of_stack(rank, stack("/me/t.py:train"), syscall="clock_nanosleep") for rank in range(4)]


@pytest.mark.parametrize(
    ("activities", "rank", "why"),
    [
        ([*WAITING, ASLEEP[2]], 2, "it was asleep (t.py:10 train) while the others waited in all_reduce"),
        (
            [*WAITING, activity_of_stack(2, (), is_ending=True)],
            2,
            "it was leaving its process group or about to end while the others waited in all_reduce",
        ),
        (
            [in_collective(2), *ASLEEP[:2], ASLEEP[3]],
            2,
            "it was in all_reduce (train.py:11 step), and the others were asleep (t.py:10 train)",
        ),
        (
            [*WAITING, in_collective(2, call="barrier", at="train.py:30")],
            2,
            "it was in barrier (train.py:30) while the others were in all_reduce (train.py:11 step)",
        ),
        ([*WAITING, in_collective(2, at="train.py:40 evaluate")], 2, None),
        *[
            ([*WAITING, in_collective(2, call=call)], 2, f"it was in {call} (")
            for call in ("recv", "broadcast", "scatter")
        ],
        (
            [
                *(activity_of_stack(rank, stack("/me/t.py:wait"), syscall="clock_nanosleep") for rank in (0, 1, 3)),
                activity_of_stack(2, stack("/me/t.py:f", "/me/t.py:g"), syscall="read"),
            ],
            2,
            None,
        ),
        ([*WAITING, Activity(rank=2)], None, None),
        ([], None, None),
        (WAITING, None, None),
    ],
    ids=[
        "asleep",
        "ending",
        "alone",
        "another",
        "place",
        "recv",
        "broadcast",
        "scatter",
        "no torch",
        "no stack",
        "none",
        "all",
    ],
)
def test_which_rank_is_the_odd_one_out(activities: list[Activity], rank: int | None, why: str | None) -> None:
    found = compare_ranks(activities, hosts=HOSTS)
    assert [(one.rank, one.host) for one in found.suspects] == ([] if rank is None else [(rank, HOSTS[rank])])
    assert why is None or found.suspects[0].why.startswith(why)
    assert found.suspects or found == compare_ranks([])
    assert found.is_open is (activities[:1] == [in_collective(2)])


def test_a_rank_that_failed_is_not_outside_of_the_collectives() -> None:
    """Its exception was a symptom: it was in a call of torch, whatever its frames show."""
    failed = activity_of_failure(0, stack("/me/t.py:step"), "RuntimeError: Connection closed by peer [10.0.0.1]:4711")
    assert failed.doing is Doing.COLLECTIVE
    assert compare_ranks([failed, in_collective(1), in_collective(2)]).suspects == ()


def test_a_receive_names_the_rank_that_it_waits_for() -> None:
    recv = stack("/me/t.py:f", f"{C10D}:recv")
    first = activity_of_stack(0, recv, line="dist.recv(x, src=3, group=steps)")
    second = activity_of_failure(2, recv, "RuntimeError: Timed out", line="dist.recv(x, src=0)")
    asleep = activity_of_stack(3, stack("/me/t.py:train"), syscall="clock_nanosleep")
    (suspect,) = compare_ranks([first, second, in_collective(1), asleep], hosts=HOSTS).suspects
    assert (suspect.rank, suspect.host) == (3, "n1")
    assert suspect.why == "rank 0 waited for it, in recv (t.py:10 f); it was asleep (t.py:10 train)"


@pytest.mark.parametrize(("one", "most"), [("send", "recv"), ("gather", "barrier")])
def test_calls_that_differ_by_their_nature_accuse_nobody(one: str, most: str) -> None:
    found = compare_ranks([in_collective(0, call=one), in_collective(1, call=most), in_collective(2, call=most)])
    assert found.suspects == ()
    assert found.says.startswith(f"rank 0 was in {one}")
    halves = [
        in_collective(rank, call="all_reduce" if rank < 2 else "barrier", at=f"t.py:{rank // 2}") for rank in range(4)
    ]
    found = compare_ranks(halves)
    assert (found.suspects, found.says) == (
        (), "ranks 0-1 were in all_reduce (t.py:0); ranks 2-3 were in barrier (t.py:1)"
    )  # fmt: skip


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("RuntimeError: Rank 3 failed to pass monitoredBarrier in 2000 ms", (3,)),
        ("[Rank 0]: Ranks 1, 2 failed to pass monitoredBarrier in 3000 ms\n Original exception:", (1, 2)),
        (
            "Rank 2 successfully reached monitoredBarrier, but received errors while waiting for send/recv from rank 0",
            (),
        ),
    ],
)
def test_monitored_barrier_names_those_that_did_not_come(text: str, names: tuple[int, ...]) -> None:
    zero = activity_of_failure(0, stack("/me/t.py:f", f"{C10D}:monitored_barrier"), text)
    assert zero.names == names
    others = [in_collective(rank, call="monitored_barrier", at=zero.at) for rank in (1, 2)]
    odd = compare_ranks([zero, *others]).suspects
    assert tuple(suspect.rank for suspect in odd) == names
    assert all("rank 0 waited for it in monitored_barrier in vain" in suspect.why for suspect in odd)


CHECKPOINT = """\
Traceback (most recent call last):
  File "/home/me/train.py", line 13, in <module>
    dcp.save(state, checkpoint_id=path)
torch.distributed.checkpoint.api.CheckpointException: CheckpointException ranks:dict_keys([2])
Traceback (most recent call last): (RANK 2)
  File "/venv/lib/python3.11/site-packages/torch/distributed/checkpoint/utils.py", line 241, in all_reduce
    local_data = map_fun()
OSError: [Errno 122] Disk quota exceeded
"""


def test_a_checkpoints_exception_names_the_rank_that_raised_and_what() -> None:
    zero = activity_of_failure(0, stack("/me/t.py:f"), CHECKPOINT)
    assert zero.names == (2,)
    (suspect,) = compare_ranks([zero, in_collective(1), in_collective(3)]).suspects
    assert (suspect.rank, suspect.why) == (2, "rank 0 reports of it: OSError: [Errno 122] Disk quota exceeded")


MISMATCH = (
    "RuntimeError: Detected mismatch between collectives on ranks. Rank {rank} is running collective: "
    "CollectiveFingerPrint(SequenceNumber=5, OpType=ALLREDUCE, TensorShape=[{own}], TensorDtypes=Float, "
    "TensorDeviceTypes=TensorOptions(dtype=float (default), device=cpu, layout=Strided (default))), "
    "but Rank {other} is running collective: "
    "CollectiveFingerPrint(SequenceNumber=5, OpType=ALLREDUCE, TensorShape=[{theirs}], "
    "TensorDtypes=Float).Collectives differ"
)


@pytest.mark.parametrize("ranks", [4, 3], ids=["all", "all but the one that differs"])
def test_torchs_own_comparison_names_the_rank_whose_collective_differs(ranks: int) -> None:
    """One message shows the collectives of two ranks."""
    texts = [MISMATCH.format(rank=rank, own=10, other=3, theirs=12) for rank in range(3)]
    texts.append(MISMATCH.format(rank=3, own=12, other=0, theirs=10))
    activities = [activity_of_failure(rank, ALL_REDUCE, text) for rank, text in enumerate(texts[:ranks])]
    (suspect,) = compare_ranks(activities, hosts=HOSTS).suspects
    assert (suspect.rank, suspect.host) == (3, "n1")
    assert suspect.why == "its collective was ALLREDUCE of [12] Float, the others' ALLREDUCE of [10] Float"
    barrier = MISMATCH.format(rank=1, own=1, other=0, theirs=10).replace(
        "SequenceNumber=5, OpType=ALLREDUCE, TensorShape=[1], ", "SequenceNumber=3OpType=BARRIER), ", 1
    )
    activity = activity_of_failure(1, ALL_REDUCE, barrier)
    assert (activity.operation, activity.peer_operation) == ("BARRIER", (0, "ALLREDUCE of [10] Float"))


def test_the_rank_that_had_come_to_the_fewest_collectives() -> None:
    text = (
        "[PG ID 0 PG GUID 0(default_pg) Rank {}] Timeout at NCCL work: 7, last enqueued NCCL work: {}, "
        "last completed NCCL work: 6."
    )
    activities = [activity_of_failure(rank, (), text.format(rank, 6 if rank == 2 else 7)) for rank in range(4)]
    (suspect,) = compare_ranks(activities).suspects
    assert (suspect.rank, suspect.why) == (
        2,
        "it never entered #7 of group default_pg, which the 3 others wait in; its last there was #6",
    )


WATCHDOG = (
    "[rank{rank}]:[E1003 18:37:01.832146912 ProcessGroupNCCL.cpp:607] [Rank {rank}] Watchdog caught collective "
    "operation timeout: WorkNCCL(SeqNum=78, OpType={kind}, NumelIn={size}, NumelOut={size}, Timeout(ms)=600000) ran "
    "for 600003 milliseconds before timing out.\n"
)
OLD_STATUS = (
    "[rank{rank}]:[E1003 18:37:01.833575187 ProcessGroupNCCL.cpp:1664] [PG {group} Rank {rank}] Exception (either an "
    "error or timeout) detected by watchdog at work: 78, last enqueued NCCL work: {enqueued}, last completed NCCL "
    "work: 77.\n[rank{rank}]:[E1003 18:37:01.833621509 ProcessGroupNCCL.cpp:1709] [PG {group} Rank {rank}] Timeout at "
    "NCCL work: 78, last enqueued NCCL work: {enqueued}, last completed NCCL work: 77.\n"
)
NEW_STATUS = (
    "[rank{rank}]:[E810 03:04:11.063313477 ProcessGroupNCCL.cpp:2241] [PG {group} Rank {rank}]  failure detected by "
    "watchdog at work sequence id: 78 PG status: last enqueued work: {enqueued}, last completed work: 77\n"
    "[rank{rank}]:[E810 03:04:11.063313500 ProcessGroupNCCL.cpp:2147] [PG {group} Rank {rank}] First PG on this rank "
    "to signal dumping.\n"
)
SIGNALLED = (
    "[rank{rank}]:[E703 19:54:01.074837389 ProcessGroupNCCL.cpp:1987] [PG ID 0 PG GUID 0(default_pg) Rank {rank}] "
    "Received a dump signal due to a collective timeout from  rank 1 and we will try our best to dump the debug info. "
    "Last enqueued NCCL work: {enqueued}, last completed NCCL work: 77.This is most likely caused by incorrect usages"
)
# (Name of the group in the prefix, the status' form): torch 2.3, 2.4, 2.5, 2.6 to 2.13.
FORMS = {
    "2.3": ("0", OLD_STATUS),
    "2.4": ("0 (default_pg)", OLD_STATUS),
    "2.5": ("ID 0 PG GUID 0(default_pg)", OLD_STATUS),
    "2.6": ("ID 0 PG GUID 0(default_pg)", NEW_STATUS),
}


def watchdogs(version: str, *, without: int | None = None, **odd: Any) -> list[Activity]:
    """Of 4 ranks, all but `without` wait in #78; `odd`: what the watchdog of rank 1 has otherwise."""
    group, status = FORMS[version]
    found = []
    for rank in range(4):
        facts = {"rank": rank, "group": group, "kind": "ALLREDUCE", "size": 80, "enqueued": 79}
        facts |= odd if rank == 1 else {}
        text = (WATCHDOG + status).format(**facts)
        if rank == without:
            text = SIGNALLED.format(**{**facts, "enqueued": 77})
        found.append(activity_of_failure(rank, (), text))
    return found


@pytest.mark.parametrize("version", FORMS)
def test_the_watchdogs_words_are_compared_as_dumps_are(version: str) -> None:
    label = "0" if version == "2.3" else "default_pg"
    (suspect,) = compare_ranks(watchdogs(version, without=2), hosts=HOSTS).suspects
    assert (suspect.rank, suspect.why) == (
        2,
        "it never entered all_reduce #78 of group default_pg (80 elements), which the 3 others wait in; "
        "its last there was #77",
    )
    (suspect,) = compare_ranks(watchdogs(version, kind="BROADCAST"), hosts=HOSTS).suspects
    assert (suspect.rank, suspect.why) == (
        1,
        f"it called broadcast #78 of group {label} (80 elements) where the others called all_reduce (80 elements)",
    )
    assert watchdogs(version, kind="BROADCAST")[1].call == "broadcast"
    (suspect,) = compare_ranks(watchdogs(version, size=81), hosts=HOSTS).suspects
    assert suspect.why == f"it called all_reduce #78 of group {label} with [81] where the others gave [80]"
    compared = compare_ranks(watchdogs(version), hosts=HOSTS)
    entered = f"ranks 0-3 entered all_reduce #78 of group {label}, and none has completed it: "
    assert (compared.suspects, compared.says) == ((), f"{entered}look at the network and the devices")


def test_words_of_a_group_whose_ranks_are_not_known_accuse_none_that_said_nothing_of_it() -> None:
    group = "ID 2 PG GUID 9"
    text = (WATCHDOG + NEW_STATUS).format(rank=0, group=group, kind="ALLREDUCE", size=4, enqueued=78)
    activities = [activity_of_failure(rank, (), text) for rank in (0, 1)]
    assert compare_ranks([*activities, activity_of_failure(2, (), "RuntimeError: x")], hosts=HOSTS).suspects == ()


def test_words_beside_dumps_count_by_their_numbers_alone() -> None:
    call = AwaitedCall(
        name="all_reduce", group="0", description="default_pg", backend="nccl", inputs=((80,),), types=("Float",)
    )
    track = TailTrack(group="0", backend="nccl", sequences=(77, 78), calls=(0, 0), done=(1, 0))
    dump = FlightTail(calls=(call,), tracks=(track,))
    words = watchdogs("2.6", without=2)
    activities = [*(replace(one, flight=dump) for one in words[:2]), words[2], words[3]]
    (suspect,) = compare_ranks(activities, hosts=HOSTS).suspects
    assert (suspect.rank, suspect.why) == (
        2,
        "it never entered all_reduce #78 of group default_pg (320 B fp32), which the 3 others wait in; "
        "its last there was #77",
    )


def test_a_key_that_no_rank_wrote() -> None:
    text = "torch.distributed.DistStoreError: wait timeout after 4000ms, keys: /default_pg/0//config/lr"
    waiting = [activity_of_failure(rank, stack("/me/t.py:f"), text) for rank in (0, 1, 3)]
    asleep = activity_of_stack(2, stack("/me/t.py:load"), syscall="clock_nanosleep")
    found = compare_ranks([*waiting, asleep], hosts=HOSTS)
    assert (
        "ranks 0-1,3 wait for the key 'default_pg/0//config/lr' of the store, which no rank has written" in found.says
    )
    assert [suspect.rank for suspect in found.suspects] == [2]
    assert compare_ranks(waiting).suspects == ()


@pytest.mark.parametrize(
    ("missing", "present", "says"),
    [
        pytest.param(4, 2, "the world size that the script gives is too large", id="a rank that is none"),
        pytest.param(2, 2, "", id="a rank that did not come"),
        pytest.param(2, 4, "the ranks that the script gives are not this job's", id="LOCAL_RANK was given as the rank"),
    ],
)
def test_a_rank_that_never_joined_the_process_group(missing: int, present: int, says: str) -> None:
    text = f"torch.distributed.DistStoreError: wait timeout after 5000ms, keys: /default_pg/0//cpu//0/{missing}"
    found = compare_ranks([activity_of_failure(rank, ALL_REDUCE, text) for rank in range(present)], hosts=HOSTS)
    assert says in found.says
    assert [suspect.rank for suspect in found.suspects] == ([] if says else [2])


def test_clients_that_never_connected() -> None:
    text = "torch.distributed.DistStoreError: Timed out after 6 seconds waiting for clients. 4/5 clients joined."
    found = compare_ranks([activity_of_failure(0, ALL_REDUCE, text)], hosts=HOSTS)
    assert found.says == (
        "4 of 5 ranks had connected to the store, and 4 workers run: the world size that the script gives is too large"
    )
    assert found.is_of_all
    fewer = compare_ranks([activity_of_failure(0, ALL_REDUCE, text.replace("4/5", "3/4"))], hosts=HOSTS)
    assert (fewer.says, fewer.is_of_all) == ("3 of 4 ranks had connected to the store", False)


def test_gloos_sizes_show_that_tensors_differ_and_not_whose() -> None:
    text = "gloo::EnforceNotMet: [pair.cc:456] op.preamble.length <= op.nbytes. 16 vs 8. Received"
    found = compare_ranks([activity_of_failure(0, ALL_REDUCE, text), in_collective(1), in_collective(2)])
    assert found.suspects == ()
    assert found.says == (
        "the ranks' tensors differ in shape or type: in all_reduce 16 bytes came to rank 0 from a peer "
        "where it expected at most 8"
    )


def test_two_ranks_that_receive_do_not_accuse_two_that_take_no_part() -> None:
    receive = [in_collective(rank, call="recv", at="t.py:9") for rank in (0, 1)]
    asleep = [activity_of_stack(rank, stack(SCRIPT), syscall="clock_nanosleep") for rank in (2, 3)]
    found = compare_ranks([*receive, *asleep])
    assert (found.suspects, found.is_of_all) == ((), True)
    assert found.says == "ranks 0-1 were in recv (t.py:9); ranks 2-3 were asleep (t.py:10 f)"
    assert [
        suspect.rank for suspect in compare_ranks([*receive, in_collective(2, call="recv"), asleep[1]]).suspects
    ] == [3]
