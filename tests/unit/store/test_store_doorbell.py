"""The bell: only a ring with the run's secret is heard, once; everything else is dropped and counted."""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import select
import socket
import time
from collections.abc import Callable, Iterator

import pytest

from hpc_elastic.store.doorbell import MAX_DATAGRAM, Doorbell

SECRET = b"s" * 32
HOME = "127.0.0.1"
MakeBell = Callable[..., Doorbell]


@pytest.fixture
def make_bell() -> Iterator[MakeBell]:
    made: list[Doorbell] = []

    def make(uid: str = "a", *, secret: bytes = SECRET, run_uid: str = "run") -> Doorbell:
        made.append(Doorbell(secret=secret, run_uid=run_uid, uid=uid, host=HOME))
        return made[-1]

    yield make
    for bell in made:
        bell.close()


@pytest.fixture
def stranger() -> Iterator[socket.socket]:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        yield sock


def heard(bell: Doorbell) -> bool:
    """Whether a valid ring has come; waits for the datagram that a test has just sent."""
    ready, _, _ = select.select([bell], [], [], 5)
    assert ready, "no datagram came"
    return bell.drain().rung


def at(bell: Doorbell) -> tuple[str, int]:
    return HOME, bell.port


def sealed(body: bytes, *, secret: bytes = SECRET, run_uid: str = "run") -> bytes:
    """A datagram as another implementation of the format would make it."""
    key = hashlib.sha256(secret + b"\0" + run_uid.encode()).digest()
    return hmac.new(key, body, hashlib.sha256).digest() + body


def body(uid: str = "b", count: object = 1, to: str = HOME) -> bytes:
    return json.dumps({"u": uid, "k": "ring", "c": count, "to": to}).encode()


def test_a_ring_is_heard_once_and_says_where_it_arrived(make_bell: MakeBell) -> None:
    a, b = make_bell("a"), make_bell("b")
    a.ring([at(b)])
    assert heard(b) is True
    assert b.drain().rung is False
    assert list(b.reached) == [HOME]
    assert b.rejected == 0
    assert a.drain().rung is False


def test_each_ring_of_many_is_valid(make_bell: MakeBell) -> None:
    a, b, c = make_bell("a"), make_bell("b"), make_bell("c")
    for _ in range(5):
        a.ring([at(b), at(c)])
        assert heard(b) is True
        assert heard(c) is True
    c.ring([at(b)])
    assert heard(b) is True, "each sender has a counter of its own"
    assert b.rejected == c.rejected == 0


def test_the_datagram_is_the_documented_one(make_bell: MakeBell, stranger: socket.socket) -> None:
    bell = make_bell()
    stranger.bind((HOME, 0))
    stranger.settimeout(5)
    stranger.sendto(sealed(body()), at(bell))
    assert heard(bell) is True
    bell.ring([stranger.getsockname()])
    data = stranger.recv(4096)
    assert data == sealed(data[32:])
    assert json.loads(data[32:]) == {"u": "a", "k": "ring", "c": 1, "to": HOME}


def test_addresses_are_kept_in_the_order_of_the_first_ring_that_reached_them(
    make_bell: MakeBell, stranger: socket.socket
) -> None:
    bell = make_bell()
    for count, to in enumerate(("10.0.0.7", "192.168.1.7", "10.0.0.7"), start=1):
        stranger.sendto(sealed(body(count=count, to=to)), at(bell))
        assert heard(bell) is True
    assert list(bell.reached) == ["10.0.0.7", "192.168.1.7"]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"x",
        b"\0" * 32,
        b"garbage" * 20,
        body(),
        b"\0" * 32 + body(),
        sealed(body(), secret=b"t" * 32),
        sealed(body(), run_uid="other"),
        sealed(body())[:-1],
        sealed(body()) + b" ",
        sealed(body())[:-2] + b"x}",
        sealed(b"not json"),
        sealed(b"[]"),
        sealed(b"7"),
        sealed(b'{"u": "b"}'),
        sealed(b'{"u": "b", "c": "many", "to": "10.0.0.7"}'),
        sealed(b'{"u": "b", "c": null, "to": "10.0.0.7"}'),
        sealed(b'{"u": "b", "c": Infinity, "to": "10.0.0.7"}'),
        sealed(b"[" * 400),
        sealed(body(count=0)),
        sealed(body(count=-5)),
        sealed(body(uid="u" * (MAX_DATAGRAM + 1))),
        b"\xff" * 60_000,
    ],
    ids=range(23),
)
def test_everything_else_is_dropped_and_counted(make_bell: MakeBell, stranger: socket.socket, data: bytes) -> None:
    bell = make_bell()
    stranger.sendto(data, at(bell))
    assert heard(bell) is False
    assert bell.rejected == 1
    assert not bell.reached
    stranger.sendto(sealed(body()), at(bell))
    assert heard(bell) is True, "and the bell still works"


def test_a_ring_of_another_runs_secret_is_not_heard(make_bell: MakeBell) -> None:
    mine, other, elsewhere = make_bell("a"), make_bell("b", secret=b"t" * 32), make_bell("c", run_uid="another")
    other.ring([at(mine)])
    assert heard(mine) is False
    elsewhere.ring([at(mine)])
    assert heard(mine) is False
    assert mine.rejected == 2


def test_a_replayed_or_older_ring_is_not_heard(make_bell: MakeBell, stranger: socket.socket) -> None:
    bell = make_bell()
    for count, valid in ((5, True), (5, False), (4, False), (6, True), (6, False)):
        stranger.sendto(sealed(body(count=count)), at(bell))
        assert heard(bell) is valid
    assert bell.rejected == 3
    stranger.sendto(sealed(body(uid="c", count=1)), at(bell))
    assert heard(bell) is True


def test_a_valid_ring_among_forged_ones_is_heard(make_bell: MakeBell, stranger: socket.socket) -> None:
    bell = make_bell()
    for _ in range(20):
        stranger.sendto(b"forged", at(bell))
    stranger.sendto(sealed(body()), at(bell))
    for _ in range(20):
        stranger.sendto(b"forged", at(bell))
    assert heard(bell) is True
    assert bell.rejected == 40


def test_a_flood_does_not_keep_the_owner_from_its_work(make_bell: MakeBell) -> None:
    bell = make_bell()

    class Flood:
        received = 0

        def recv(self, limit: int) -> bytes:
            self.received += 1
            return b"forged"

        def close(self) -> None:
            pass

    bell.close()
    flood = Flood()
    bell._socket = flood  # type: ignore[assignment]
    assert bell.drain().rung is False
    assert 100 <= flood.received <= 10_000


def test_an_error_that_an_earlier_ring_brought_back_does_not_end_the_draining(make_bell: MakeBell) -> None:
    a, gone = make_bell("a"), make_bell("b")
    address = at(gone)
    gone.close()
    a.ring([address])  # an ICMP "port unreachable" comes back
    a.ring([address, ("256.0.0.1", 1), ("10.255.255.1", 0)])  # nothing of this raises
    c = make_bell("c")
    c.ring([at(a)])
    assert heard(a) is True


def test_ringing_nobody_is_nothing(make_bell: MakeBell) -> None:
    make_bell().ring([])


def test_the_socket_is_not_inherited_and_never_blocks(make_bell: MakeBell) -> None:
    bell = make_bell()
    assert bell.drain().rung is False
    assert not os.get_inheritable(bell.fileno())


def test_a_beat_says_who_lives_and_rings_nobody(make_bell: MakeBell) -> None:
    a, b = make_bell("a"), make_bell("b")
    a.beat([at(b)])
    select.select([b], [], [], 5)
    said = b.drain()
    assert (said.rung, said.alive) == (False, {"a"})
    a.ring([at(b)])
    select.select([b], [], [], 5)
    assert b.drain().alive == {"a"}, "who rings lives too"


def test_a_ring_that_a_beat_overtook_still_rings(make_bell: MakeBell, stranger: socket.socket) -> None:
    bell = make_bell("a")
    late_ring = json.dumps({"u": "b", "k": "ring", "c": 5, "to": HOME}).encode()
    early_beat = json.dumps({"u": "b", "k": "beat", "c": 6, "to": HOME}).encode()
    stranger.sendto(sealed(early_beat), at(bell))
    stranger.sendto(sealed(late_ring), at(bell))
    deadline = time.monotonic() + 5
    rung = False
    while not rung and time.monotonic() < deadline:
        select.select([bell], [], [], 0.1)
        rung = bell.drain().rung
    assert rung
    assert bell.rejected == 0


def test_a_datagram_of_an_unknown_kind_is_rejected(make_bell: MakeBell, stranger: socket.socket) -> None:
    bell = make_bell("a")
    stranger.sendto(sealed(json.dumps({"u": "b", "k": "kill", "c": 1, "to": HOME}).encode()), at(bell))
    select.select([bell], [], [], 5)
    said = bell.drain()
    assert (said.rung, said.alive, bell.rejected) == (False, frozenset(), 1)
