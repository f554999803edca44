"""The handler's surface, with several handlers in threads over one folder."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpc_elastic.rendezvous.handler_config import RunFolder, safe_name
from hpc_elastic.rendezvous.state import RendezvousClosedError, RendezvousError, RendezvousTimeoutError
from hpc_elastic.store.file_store import StoreFullError
from tests.rigs.rendezvous_handlers import HandlerRig, at_most
from tests.rigs.waiting import until


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[HandlerRig]:
    rig = HandlerRig(tmp_path)
    yield rig
    rig.end()


def test_three_nodes_meet_and_share_a_store(rig: HandlerRig) -> None:
    handlers = [rig.make(3) for _ in range(3)]
    assert {handler.get_backend() for handler in handlers} == {"hpcfs"}
    assert handlers[0].get_run_id() == "run"
    rounds = rig.meet(*handlers)
    assert sorted(found.rank for found in rounds) == [0, 1, 2]
    assert {found.world_size for found in rounds} == {3}
    assert {(found.version, found.master) for found in rounds} == {(0, next(f.master for f in rounds))}
    first = next(index for index, found in enumerate(rounds) if found.rank == 0)
    assert rounds[0].master == f"host{first}:1"
    rounds[0].store.set("key", b"value")
    assert rounds[1].store.get("key") == b"value"
    assert [handler.num_nodes_waiting() for handler in handlers] == [0, 0, 0]
    assert not any(handler.round_is_over() for handler in handlers)


def test_nodes_hear_each_other_where_each_sees_the_folder_by_a_path_of_its_own(rig: HandlerRig) -> None:
    link = rig.folder.with_name(rig.folder.name + "-link")
    link.symlink_to(rig.folder)
    elsewhere = HandlerRig(link)
    try:
        one, other = rig.make(2, node=0), elsewhere.make(2, node=1)
        begun = [rig.start(one), elsewhere.start(other)]
        assert sorted(future.result(30).rank for future in begun) == [0, 1]
        until(lambda: bool(one.reached_addresses() and other.reached_addresses()))
    finally:
        elsewhere.end()
        link.unlink()


def test_ranks_follow_the_scheduler_s_order_where_there_is_one(rig: HandlerRig) -> None:
    rounds = rig.meet(*[rig.make(3, node=node) for node in (2, 0, 1)])
    assert [found.rank for found in rounds] == [2, 0, 1]


def test_a_second_agent_of_a_place_has_one_of_its_own(rig: HandlerRig) -> None:
    rounds = rig.meet(rig.make(2, node=0), rig.make(2, node=0))
    assert sorted(found.rank for found in rounds) == [0, 1]


def test_a_member_that_asks_again_ends_the_round_for_all(rig: HandlerRig) -> None:
    one, other = rig.make(2), rig.make(2)
    first, _ = rig.meet(one, other)
    first.store.set("key", b"old")
    again = rig.start(one)
    until(other.round_is_over)
    second = rig.meet(other)[0]
    assert (again.result(30).version, second.version) == (1, 1)
    assert second.store.get("key") is None


def test_a_newcomer_is_taken_in_where_there_is_room(rig: HandlerRig) -> None:
    one = rig.make(1, 2)
    assert rig.meet(one)[0].world_size == 1
    newcomer = rig.start(rig.make(1, 2))
    until(one.round_is_over)
    assert rig.meet(one)[0].world_size == 2
    assert newcomer.result(30).rank == 1


def test_while_the_round_is_full_a_node_waits_is_counted_and_is_told_that_there_is_no_place(rig: HandlerRig) -> None:
    one, spare, other = rig.make(1, 1), rig.make(1, 1, timeout=0.5), rig.make(1, 1)
    rig.meet(one)
    with pytest.raises(RendezvousTimeoutError, match=r"all 1 places were taken for 0\.5 s, and this node, a spare"):
        spare.next_rendezvous()  # and not that somebody is missing
    waiting = rig.start(other)
    until(lambda: one.num_nodes_waiting() == 1)
    assert not one.round_is_over()
    spare.set_closed()
    with pytest.raises(RendezvousClosedError):
        waiting.result(30)


def test_closing_ends_joiners_waiters_and_running_rounds(rig: HandlerRig) -> None:
    one, other, late = rig.make(1, 1), rig.make(1, 1), rig.make(1, 1)
    assert not one.is_closed()
    rig.meet(one)
    waiting = rig.start(other)
    until(lambda: one.num_nodes_waiting() == 1)
    late.set_closed()
    late.set_closed()
    with pytest.raises(RendezvousClosedError, match="closed by a node"):
        waiting.result(30)
    with pytest.raises(RendezvousClosedError):
        late.next_rendezvous()
    until(one.round_is_over)
    with pytest.raises(RendezvousClosedError):
        one.next_rendezvous()
    assert all(handler.is_closed() for handler in rig.made)


def test_who_gives_up_says_why_to_all(rig: HandlerRig) -> None:
    one, other = rig.make(2), rig.make(2)
    rig.meet(one, other)
    one.give_up("rank 0: ValueError: " + "x" * 1000)
    until(other.round_is_over)
    with pytest.raises(RendezvousClosedError, match=r"is closed: failed \(rank 0: ValueError: x{200,300}\)"):
        other.next_rendezvous()
    assert not other.has_succeeded()


def test_what_never_existed_can_be_closed(rig: HandlerRig) -> None:
    one, other = rig.make(), rig.make()
    one.set_closed()
    assert other.is_closed()
    with pytest.raises(RendezvousClosedError):
        other.next_rendezvous()


def test_the_timeout_is_kept_and_names_who_is_there(rig: HandlerRig) -> None:
    one = rig.make(2, timeout=0.5)
    for _ in range(2):
        with at_most(2.5), pytest.raises(RendezvousTimeoutError, match=r"1 of 2 nodes .* after 0.5 s \(here: host0"):
            one.next_rendezvous()
    assert not one.is_closed()


def test_the_last_one_out_closes_and_the_id_stays_closed_unless_it_is_reopened(rig: HandlerRig) -> None:
    one, other = rig.make(2), rig.make(2)
    first, _ = rig.meet(one, other)
    one.store_extra_data(first.version, "key", 1)
    assert one.shutdown(workers_done=True)
    assert not other.is_closed()
    assert other.shutdown(workers_done=True)
    assert other.is_closed()
    assert one.shutdown(), "twice is fine"
    late = rig.make(2)
    assert late.is_closed()
    with at_most(2.0), pytest.raises(RendezvousClosedError, match=r"succeeded .*give a new run id, or reopen=on"):
        late.next_rendezvous()
    again = rig.make(2, reopen=True)
    assert not again.is_closed()
    assert {found.version for found in rig.meet(again, rig.make(2, reopen=True))} == {0}
    with pytest.raises(RendezvousTimeoutError):
        again.load_extra_data(0, "key", timeout=0.0)


def test_a_latecomer_of_the_same_job_finds_it_closed(rig: HandlerRig) -> None:
    one = rig.make(job="7.0")
    rig.meet(one)
    one.shutdown(workers_done=True)
    with pytest.raises(RendezvousClosedError, match="succeeded"):
        rig.make(job="7.0").next_rendezvous()
    assert rig.meet(rig.make(job="7.1"))[0].world_size == 1


def test_extra_data_is_kept_per_version_and_waited_for(rig: HandlerRig) -> None:
    one, other = rig.make(), rig.make()
    later = rig.pool.submit(one.load_extra_data, 3, "ünïcode/key", 20.0)
    other.store_extra_data(3, "other", [1])
    other.store_extra_data(3, "ünïcode/key", {"a": None})
    assert later.result(30) == {"a": None}
    one.store_extra_data(3, "ünïcode/key", "new")
    assert other.load_extra_data(3, "ünïcode/key") == "new"
    assert other.load_extra_data(3, "other", timeout=0.0) == [1]
    with at_most(2.0), pytest.raises(RendezvousTimeoutError, match=r"'other' of version 4 after 0.1 s"):
        one.load_extra_data(4, "other", timeout=0.1)


def test_a_store_that_is_not_ours_is_refused_as_a_rendezvous_error(rig: HandlerRig) -> None:
    handler = rig.make()
    (rig.folder / safe_name("run")).symlink_to(rig.folder)
    with pytest.raises(RendezvousError, match="symbolic link"):
        handler.next_rendezvous()


def test_a_folder_that_is_gone_is_one_error_that_names_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "shared").mkdir(mode=0o700)
    rig = HandlerRig(tmp_path / "shared")
    member, newcomer = rig.make(1, 1), rig.make(1, 1)
    rig.meet(member)
    rig.folder.rename(tmp_path / "elsewhere")
    with pytest.raises(RendezvousError, match=rf"{rig.folder}\S* was removed"):
        until(member.round_is_over)
    for handler in (member, newcomer):
        with at_most(3.0), pytest.raises(RendezvousError, match=str(rig.folder)) as caught:
            handler.next_rendezvous()
        assert not isinstance(caught.value, RendezvousTimeoutError)
    rig.end()
    assert len(caplog.records) <= 1, caplog.text


FULL = StoreFullError(root="/s", why="refused for a test")


@pytest.mark.parametrize(("step", "error"), [("enter", OSError(5, "refused for a test")), ("latest", FULL)])
def test_a_refusing_filesystem_is_tried_until_the_deadline(
    rig: HandlerRig, monkeypatch: pytest.MonkeyPatch, step: str, error: Exception
) -> None:
    """A disk is full for a moment when a node that was killed joins again."""
    handler = rig.make(timeout=0.3)

    def refuse(*_: object) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, step, refuse)
        with at_most(2.3), pytest.raises(RendezvousTimeoutError, match="refused for a test"):
            handler.next_rendezvous()
    assert rig.meet(handler)[0].rank == 0


def test_a_hung_filesystem_holds_nobody_beyond_the_deadline(rig: HandlerRig, monkeypatch: pytest.MonkeyPatch) -> None:
    handler = rig.make(timeout=0.3)
    hung = threading.Event()
    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "enter", lambda *_: hung.wait())
        with at_most(2.3), pytest.raises(RendezvousTimeoutError, match="no answer"):
            handler.next_rendezvous()
        hung.set()


@pytest.mark.parametrize("run_id", [".", "..", "a/b/../c", "x" * 300, "läuft", "e\u0301", "-", "a\nb", "\udc80"])
def test_any_run_id_works(rig: HandlerRig, run_id: str) -> None:
    assert rig.meet(rig.make(run_id=run_id))[0].rank == 0
    assert len(list(rig.folder.iterdir())) == 1


def test_names_of_different_ids_differ_and_are_safe() -> None:
    ids = ["a/b", "a_b", "a.b", "A_B", "a b", "", ".", "x" * 300, "x" * 301, "ä", "a\u0308", "a_B"]
    names = [safe_name(run_id) for run_id in ids]
    assert len({name.lower() for name in names}) == len(ids)
    for name in names:
        assert len(name) < 100
        assert name.isascii()
        assert not set(name) & set("/\0 \n")


def test_many_runs_share_a_folder(rig: HandlerRig) -> None:
    rounds = rig.meet(rig.make(run_id="a"), rig.make(run_id="b"))
    assert [(found.rank, found.world_size) for found in rounds] == [(0, 1), (0, 1)]
