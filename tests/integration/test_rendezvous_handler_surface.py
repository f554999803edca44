"""What contract and docs say of the handler, statement by statement, where the tests beside the code don't."""

from __future__ import annotations

import errno
import itertools
import logging
import os
import pickle
import random
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec import to_builtins
from msgspec.structs import replace

from hpc_elastic.base import files
from hpc_elastic.errors import UsageError
from hpc_elastic.rendezvous import handler, handler_config
from hpc_elastic.rendezvous.handler import FileRendezvousHandler, Membership
from hpc_elastic.rendezvous.handler_config import HandlerConfig, config_from_keys, config_from_url
from hpc_elastic.rendezvous.membership import RecordLog
from hpc_elastic.rendezvous.state import (
    RendezvousClosedError,
    RendezvousError,
    RendezvousTimeoutError,
    RoundRecord,
    Status,
)
from hpc_elastic.rendezvous.succession import close_run
from hpc_elastic.run.paths import Outcome
from hpc_elastic.run.spec import RendezvousSettings
from hpc_elastic.store import file_store
from tests.rigs.memory_store import MemoryStore
from tests.rigs.rendezvous_handlers import HandlerRig
from tests.rigs.waiting import until

DOCS = Path(__file__).resolve().parents[2] / "docs" / "reference" / "rendezvous.md"


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[HandlerRig]:
    rig = HandlerRig(tmp_path)
    yield rig
    rig.end()


def overshoot(timeout: float, call: Callable[[], object]) -> float:
    """By how many seconds a call that times out was late. The least of three tries: the machine may be busy."""
    late = []
    for _ in range(3):
        begun = time.monotonic()
        with pytest.raises(RendezvousTimeoutError):
            call()
        late.append(time.monotonic() - begun - timeout)
        if late[-1] <= 1:
            break
    return min(late)


# -- next_rendezvous


def test_the_deadline_holds_alone_and_with_one_that_does_not_confirm(
    rig: HandlerRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = rig.make(2, run_id="alone", timeout=0.4)
    assert -0.1 <= overshoot(0.4, alone.next_rendezvous) <= 1

    one, silent = rig.make(2, timeout=1.0, heartbeat_ttl=60.0), rig.make(2, timeout=30.0, heartbeat_ttl=60.0)
    advance, frozen = Membership.advance, threading.Event()

    def never_confirm(seat: Membership, record: RoundRecord, open_master: Callable[[], str]) -> bool:
        if seat is silent._membership and record.status is Status.FROZEN:
            frozen.set()
            return False
        return advance(seat, record, open_master)

    monkeypatch.setattr(Membership, "advance", never_confirm)
    waits = rig.start(silent)
    assert -0.1 <= overshoot(1.0, one.next_rendezvous) <= 1
    assert frozen.is_set(), "it was in the frozen state that it waited"
    silent.set_closed()
    with pytest.raises(RendezvousClosedError):  # else it would wait for its timeout while the rig withdraws it
        waits.result(20)


@pytest.mark.parametrize("failure", [OSError(errno.EADDRINUSE, "in use"), RuntimeError("torch's own")], ids=repr)
def test_a_store_for_the_workers_that_does_not_open_is_a_rendezvous_error(rig: HandlerRig, failure: Exception) -> None:
    node = rig.make(1)

    def refuse() -> str:
        raise failure

    node._open_master = refuse
    with pytest.raises(RendezvousError, match=r"run 'run': the store for the workers could not be opened: .*(use|own)"):
        node.next_rendezvous()
    assert node._membership is None, "and it has left the round"


# -- num_nodes_waiting, is_closed, set_closed, shutdown


class Looks:
    """A seat that shows one record."""

    def __init__(self, record: RoundRecord | None) -> None:
        self.record = record
        self.round = 0

    def look(self) -> RoundRecord | None:
        return self.record

    def leave(self, *, within: float, workers_done: bool) -> bool:
        return True


@pytest.mark.parametrize("status", [None, *Status])
def test_nodes_that_wait_are_counted_in_the_final_state_alone(rig: HandlerRig, status: Status | None) -> None:
    node: Any = rig.make()
    assert node.num_nodes_waiting() == 0, "before it takes part"
    record = RoundRecord(
        number=1, epoch="e", term=1, leader="", round=0, status=Status.JOINABLE, waiting=2, outcome=Outcome.CANCELLED
    )
    node._membership = Looks(replace(record, status=status) if status else None)
    assert node.num_nodes_waiting() == (2 if status is Status.FINAL else 0)
    node.shutdown()
    assert node.num_nodes_waiting() == 0, "after it has left"


def test_a_race_for_the_closing_record_that_is_lost_is_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore()
    append, turns = RecordLog.append, itertools.count()

    def be_second(log: RecordLog, number: int, value: Any) -> bool:
        if next(turns) == 0:
            record = RoundRecord(number=1, epoch="e", term=1, leader="", round=0, status=Status.JOINABLE)
            assert append(RecordLog(store), 1, record.to_json())
        return append(log, number, value)

    monkeypatch.setattr(RecordLog, "append", be_second)
    close_run(store, "run", Outcome.CANCELLED, "a test")
    newest = RecordLog(store).latest()
    assert newest is not None
    assert (newest.number, newest.value["status"]) == (2, "closed")


@pytest.mark.parametrize("how", ["refused", "no answer", "could not close"])
def test_a_shutdown_that_fails_says_false_and_warns(
    rig: HandlerRig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    node = rig.make()
    rig.meet(node)

    def fail(*_: object, **__: object) -> bool:
        if how == "no answer":
            return False
        raise OSError(5, how)

    leave = Membership.leave
    monkeypatch.setattr(handler, "_SHUTDOWN_SECONDS", 0.3)
    if how == "could not close":
        monkeypatch.setattr(handler, "close_if_last", fail)
    else:
        seat = node._membership
        assert seat is not None
        monkeypatch.setattr(seat, "leave", fail)
    with caplog.at_level(logging.WARNING):
        assert node.shutdown() is False
    assert "run 'run'" in caplog.text
    if how != "could not close":
        leave(seat, within=10, workers_done=True)


# -- errors


class Chaos:
    """Stands where `os` does: some calls fail before, some after they have worked."""

    ERRORS = (errno.EIO, errno.ESTALE, errno.EACCES, errno.ETIMEDOUT, errno.ENOENT, errno.EAGAIN, errno.ENOSPC)

    def __init__(self, seed: int, probability: float) -> None:
        self.rng = random.Random(seed)
        self.probability = probability
        self.faults = 0

    def __getattr__(self, name: str) -> Any:
        real = getattr(os, name)
        if name not in (
            "symlink",
            "readlink",
            "listdir",
            "open",
            "mkdir",
            "unlink",
            "pwrite",
            "link",
            "lstat",
            "write",
        ):
            return real

        def called(*arguments: Any, **more: Any) -> Any:
            draw = self.rng.random()
            if draw < self.probability / 2:
                self.faults += 1
                raise self.error()
            result = real(*arguments, **more)
            if draw < self.probability and name in ("symlink", "mkdir", "unlink", "link"):
                self.faults += 1
                raise self.error()
            return result

        return called

    def error(self) -> OSError:
        number = self.rng.choice(self.ERRORS)
        return OSError(number, os.strerror(number))


@pytest.mark.parametrize("seed", range(4))
def test_only_rendezvous_errors_come_out_of_a_filesystem_that_fails_now_and_then(
    rig: HandlerRig, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    chaos = Chaos(seed, 0.12)
    for module in (file_store, handler_config, files):
        monkeypatch.setattr(module, "os", chaos)
    nodes = [rig.make(2, timeout=8.0) for _ in range(3)]
    worked = 0

    def try_all(node: FileRendezvousHandler) -> None:
        nonlocal worked
        for call in (
            node.next_rendezvous,
            node.num_nodes_waiting,
            node.round_is_over,
            node.is_closed,
            lambda: node.store_extra_data(0, "key", "value"),
            lambda: node.load_extra_data(0, "key", timeout=5),
            node.set_closed,
            node.is_closed,
        ):
            try:
                call()
                worked += 1
            except RendezvousError:
                pass
        assert node.shutdown() in (True, False)

    for future in [rig.pool.submit(try_all, node) for node in nodes]:
        future.result(60)
    assert chaos.faults > 5, "how many there are depends on how often nodes looked"
    assert worked > 6, "much of it works all the same"


def test_a_filesystem_that_always_fails_ends_each_call_in_time(
    rig: HandlerRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = rig.make(timeout=0.3)
    monkeypatch.setattr(handler, "_SHUTDOWN_SECONDS", 0.3)
    chaos = Chaos(1, 2.0)
    for module in (file_store, handler_config, files):
        monkeypatch.setattr(module, "os", chaos)
    for call in (
        node.next_rendezvous,
        node.is_closed,
        node.set_closed,
        lambda: node.store_extra_data(0, "key", "value"),
        lambda: node.load_extra_data(0, "key"),
    ):
        begun = time.monotonic()
        with pytest.raises(RendezvousError):
            call()
        assert time.monotonic() - begun < 15
    assert node.num_nodes_waiting() == 0
    assert node.shutdown() is True, "it takes part in nothing"


def test_a_real_timeout_pickles_and_names_who_did_not_come_again(rig: HandlerRig) -> None:
    nodes = [rig.make(3) for _ in range(3)]
    rig.meet(*nodes)
    nodes[0]._config = replace(nodes[0]._config, settings=replace(nodes[0]._config.settings, timeout=4.0))
    for node in nodes[1:]:
        node.withdraw()
    until(nodes[0].round_is_over)
    with pytest.raises(RendezvousTimeoutError) as caught:
        nodes[0].next_rendezvous()
    assert not isinstance(caught.value, RendezvousClosedError)
    text = str(pickle.loads(pickle.dumps(caught.value)))
    assert "2 of 3 nodes" in text
    assert "here: host0" in text
    assert re.search(r"missing: (host1, host2|host2, host1)\)", text), "in the order of their arrival"


# -- ids and extra data


# -- docs


def items(title: str) -> list[tuple[str, str]]:
    """Of a list of the page: what stands before an item's colon, and behind it."""
    section = DOCS.read_text().split(f"\n## {title}\n")[1].split("\n## ")[0]
    return re.findall(r"^- (.*?): (.*)", section, re.MULTILINE)


def _refusal(url: str) -> str:
    try:
        config_from_url(url)
    except UsageError as error:
        return str(error)
    return ""


def test_every_key_in_the_docs_is_taken_and_every_one_that_is_taken_is_there(tmp_path: Path) -> None:
    named = {key for head, _ in items("Options") for key in re.findall(r"`(\w+)`", head)}
    of_the_url = {"min_workers", "max_workers"}
    switches = {"doorbell": "off", "member_filter": "off", "reopen": "on"}
    values = {"prefix": "p/q", "min_workers": "2", "max_workers": "3", **switches}
    for key in sorted(named):
        given = {"max_workers": "3", key: values.get(key, "25")}
        # Beside the others' defaults a value may be wrong; it is known.
        wrong = _refusal(f"fs://{tmp_path}/run?" + "&".join(f"{name}={value}" for name, value in given.items()))
        assert wrong == "" or "must be at least twice" in wrong
        if key not in {*of_the_url, "prefix", *switches}:
            assert f"{key}=soon: not a number" in _refusal(f"fs://{tmp_path}/run?{key}=soon")
    with pytest.raises(UsageError, match="unknown key 'nothing'; it knows") as caught:
        config_from_keys(str(tmp_path), "run", min_nodes=1, max_nodes=1, conf={"nothing": "1"})
    known = set(str(caught.value).rpartition("it knows ")[2].split(", "))
    assert known | {"prefix", "reopen"} == named - of_the_url


def test_the_docs_tell_the_defaults() -> None:
    settings = to_builtins(RendezvousSettings())
    for head, _ in items("Options"):
        keys, _, defaults = head.partition(" (")
        for key, said in zip(re.findall(r"`(\w+)`", keys), re.findall(r"[\w.]+", defaults), strict=False):
            if key in settings:
                default = settings[key]
                assert said == (f"{default:g}" if default is not True else "on"), key


OF_ETCD = (
    *("`setup`", "`joinable`", "`frozen`", "`final`", "`closed`", "versions", "participants", "keep-alives", "renewal"),
    *("waiting", "/torchelastic/p2p", "2379", "`protocol`", "`cacert`", "`cert`", "`key`", "5 s", "10 s", "7200 s"),
)


def test_whoever_comes_from_etcd_finds_each_word() -> None:
    known = [head for head, text in items("If you know etcd's") if text]
    assert [word for word in OF_ETCD if not any(word in head for head in known)] == []


def test_a_node_that_only_waits_takes_over(rig: HandlerRig) -> None:
    one = rig.make(1, 1)
    rig.meet(one)
    waiting = rig.start(rig.make(1, 1))
    until(lambda: one.num_nodes_waiting() == 1)
    assert one.shutdown()
    assert waiting.result(30).world_size == 1


def test_nodes_that_gave_up_are_not_waited_for(rig: HandlerRig) -> None:
    with pytest.raises(RendezvousTimeoutError):
        rig.make(2, timeout=0.5).next_rendezvous()
    rounds = rig.meet(rig.make(2), rig.make(2))
    assert {found.world_size for found in rounds} == {2}


def test_nodes_that_leave_one_by_one_close_it_too(rig: HandlerRig) -> None:
    one, other = rig.make(1, 2, last_call_timeout=5.0), rig.make(1, 2, last_call_timeout=5.0)
    rig.meet(one, other)
    assert one.shutdown()
    until(other.round_is_over)
    assert not other.is_closed()
    assert rig.meet(other)[0].world_size == 1
    assert other.shutdown()
    assert other.is_closed()


def test_the_same_id_under_another_prefix_is_another_run(rig: HandlerRig) -> None:
    config = HandlerConfig(directory=str(rig.folder), run_id="run", min_nodes=1, max_nodes=1)
    one, other = (FileRendezvousHandler(replace(config, prefix=prefix)) for prefix in ("", "/torchelastic/p2p"))
    one.set_closed()
    assert one.is_closed()
    assert not other.is_closed()
