"""The bell: only a ring with the run's secret is heard, once; everything else is dropped, counted, and told of once."""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import os
import select
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator

import pytest

from hpc_elastic.base.clock_offset import PeerClock
from hpc_elastic.store.notifier import (
    MAX_DATAGRAM,
    MOST_FORWARDED,
    MOST_REJECTED,
    MOST_TOLD,
    PERIOD,
    Notifier,
    open_notifier,
)
from tests.rigs.fake_clock import FakeClock

SECRET = b"s" * 32
HOME = "127.0.0.1"
MakeBell = Callable[..., Notifier]


@pytest.fixture
def make_bell() -> Iterator[MakeBell]:
    made: list[Notifier] = []

    def make(
        uid: str = "a", *, secret: bytes = SECRET, run_uid: str = "run", clock: FakeClock | None = None
    ) -> Notifier:
        made.append(Notifier(secret=secret, run_uid=run_uid, uid=uid, host=HOME, clock=clock))
        return made[-1]

    yield make
    for bell in made:
        bell.close()


@pytest.fixture
def stranger() -> Iterator[socket.socket]:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        yield sock


def heard(bell: Notifier) -> bool:
    """Whether a valid ring has come; waits for the datagram that a test has just sent."""
    ready, _, _ = select.select([bell], [], [], 5)
    assert ready, "no datagram came"
    return bell.drain().rung


def at(bell: Notifier) -> tuple[str, int]:
    return HOME, bell.port


def sealed(body: bytes, *, secret: bytes = SECRET, run_uid: str = "run") -> bytes:
    """A datagram as another implementation of the format would make it."""
    key = hashlib.sha256(secret + b"\0" + run_uid.encode()).digest()
    return hmac.new(key, body, hashlib.sha256).digest() + body


def body(port: int, *, uid: str = "b", count: object = 1, to: str = HOME, kind: str = "ring", **more: object) -> bytes:
    return json.dumps({"u": uid, "k": kind, "c": count, "to": to, "p": port, **more}).encode()


def test_a_ring_is_heard_once_and_says_where_it_arrived(make_bell: MakeBell) -> None:
    a, b = make_bell("a"), make_bell("b")
    a.ring([at(b)])
    assert heard(b) is True
    assert b.drain().rung is False
    assert list(b.reached) == [HOME]
    assert b.rejected == 0
    assert a.drain().rung is False


def test_a_ring_says_what_was_written(make_bell: MakeBell) -> None:
    a, b = make_bell("a"), make_bell("b")
    for about in ("log/7", "", "x" * 300):
        a.ring([at(b)], about)
    said = set()
    rings = 0
    deadline = time.monotonic() + 5
    while rings < 3 and time.monotonic() < deadline:
        select.select([b], [], [], 5)
        found = b.drain()
        rings, said = b._newest["a", "ring"], said | found.about
    assert said == {"log/7"}, "one that is too long for a datagram is left out; it still rings"
    assert (rings, b.rejected) == (3, 0)


def test_the_longest_ring_fits_in_a_datagram(make_bell: MakeBell, stranger: socket.socket) -> None:
    stranger.bind((HOME, 0))
    bell = make_bell("0" * 5 + "-" + "h" * 64 + "-" + "f" * 25)
    bell._count = 10**12
    bell.ring([stranger.getsockname()], "k" * 200)
    assert len(stranger.recv(4096)) <= MAX_DATAGRAM
    bell._clocks["x"] = PeerClock()
    bell._clocks["x"].received(sent_ns=10**18, received_ns=-(10**18), told_ns=None)
    bell._senders[stranger.getsockname()] = "x"
    bell.beat([stranger.getsockname()], "k" * 120, hears=True)
    data = stranger.recv(4096)
    assert json.loads(data[32:])["b"] < -(10**18)
    assert len(data) <= MAX_DATAGRAM
    bell.ring([stranger.getsockname()], "k" * 40, forward=[("255.255.255.255", 65535)] * MOST_FORWARDED)
    assert len(stranger.recv(4096)) <= MAX_DATAGRAM


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
    stranger.sendto(sealed(body(bell.port)), at(bell))
    assert heard(bell) is True
    bell.ring([stranger.getsockname()], "log/3")
    data = stranger.recv(4096)
    assert data == sealed(data[32:])
    port = stranger.getsockname()[1]
    said = json.loads(data[32:])
    assert abs(said.pop("t") - time.clock_gettime(time.CLOCK_BOOTTIME) * 1e9) < 60e9
    assert said == {"u": "a", "k": "ring", "c": 1, "to": HOME, "p": port, "a": "log/3"}


def test_addresses_are_kept_in_the_order_of_the_first_ring_that_reached_them(
    make_bell: MakeBell, stranger: socket.socket
) -> None:
    bell = make_bell()
    for count, to in enumerate(("10.0.0.7", "192.168.1.7", "10.0.0.7"), start=1):
        stranger.sendto(sealed(body(bell.port, count=count, to=to)), at(bell))
        assert heard(bell) is True
    assert list(bell.reached) == ["10.0.0.7", "192.168.1.7"]


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda port: b"", "forged"),
        (lambda port: b"x", "forged"),
        (lambda port: b"\0" * 32, "forged"),
        (lambda port: b"garbage" * 20, "forged"),
        (body, "forged"),
        (lambda port: b"\0" * 32 + body(port), "forged"),
        (lambda port: sealed(body(port), secret=b"t" * 32), "forged"),
        (lambda port: sealed(body(port), run_uid="other"), "forged"),
        (lambda port: sealed(body(port))[:-1], "forged"),
        (lambda port: sealed(body(port))[:33], "forged"),
        (lambda port: sealed(body(port)) + b" ", "forged"),
        (lambda port: sealed(body(port))[:-2] + b"x}", "forged"),
        (lambda port: sealed(b"not json"), "garbled"),
        (lambda port: sealed(b"\xff\xfe"), "garbled"),
        (lambda port: sealed(b"[]"), "garbled"),
        (lambda port: sealed(b"7"), "garbled"),
        (lambda port: sealed(b'{"u": "b"}'), "garbled"),
        (lambda port: sealed(body(port, count="many")), "garbled"),
        (lambda port: sealed(body(port, count=None)), "garbled"),
        (lambda port: sealed(body(port, count=float("inf"))), "garbled"),
        (lambda port: sealed(b"[" * 400), "garbled"),
        (lambda port: sealed(body(port, kind="kill")), "garbled"),
        (lambda port: sealed(body(port + 1)), "misdirected"),
        (lambda port: sealed(body(port, count=0)), "repeated"),
        (lambda port: sealed(body(port, count=-5)), "repeated"),
        (lambda port: sealed(body(port, uid="u" * (MAX_DATAGRAM + 1))), "oversized"),
        (lambda port: b"\xff" * (64 * 1024 - 29), "oversized"),
    ],
)
def test_everything_else_is_dropped_counted_and_told_of_once(
    make_bell: MakeBell,
    stranger: socket.socket,
    caplog: pytest.LogCaptureFixture,
    make: Callable[[int], bytes],
    reason: str,
) -> None:
    caplog.set_level(logging.INFO)
    bell = make_bell()
    for count in (1, 2, 3):
        stranger.sendto(make(bell.port), at(bell))
        assert heard(bell) is False
        assert bell.rejections == Counter({reason: count})
    assert not bell.reached
    assert [record.getMessage() for record in caplog.records] == [caplog.records[0].getMessage()]
    assert HOME in caplog.text
    stranger.sendto(sealed(body(bell.port)), at(bell))
    assert heard(bell) is True, "and the bell still works"
    bell.log_rejections()
    assert f"3 {reason}" in caplog.records[-1].getMessage()


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
        stranger.sendto(sealed(body(bell.port, count=count)), at(bell))
        assert heard(bell) is valid
    assert bell.rejections == Counter(repeated=3)
    stranger.sendto(sealed(body(bell.port, uid="c", count=1)), at(bell))
    assert heard(bell) is True


def test_what_was_sent_to_one_is_not_taken_by_another(make_bell: MakeBell, stranger: socket.socket) -> None:
    """A recorded beat of a node that is dead must not show it alive to one that has never heard it."""
    stranger.bind((HOME, 0))
    dead, new = make_bell("a"), make_bell("b")
    dead.beat([stranger.getsockname()])
    stranger.sendto(stranger.recv(4096), at(new))
    select.select([new], [], [], 5)
    assert new.drain().alive == frozenset()
    assert new.rejections == Counter(misdirected=1)


def test_a_valid_ring_among_forged_ones_is_heard(make_bell: MakeBell, stranger: socket.socket) -> None:
    bell = make_bell()
    for _ in range(20):
        stranger.sendto(b"forged", at(bell))
    stranger.sendto(sealed(body(bell.port)), at(bell))
    for _ in range(20):
        stranger.sendto(b"forged", at(bell))
    assert heard(bell) is True
    assert bell.rejected == 40


def test_forgers_of_many_hosts_fill_no_log(make_bell: MakeBell, caplog: pytest.LogCaptureFixture) -> None:
    bell = make_bell()
    for host in range(200):
        bell._reject("forged", (f"10.0.0.{host}", 1))
    assert len(caplog.records) == MOST_TOLD
    assert bell.rejected == 200


class Flood:
    """A socket on which invalid datagrams never end."""

    def __init__(self) -> None:
        self.received = 0
        self.honest: list[bytes] = []

    def recvfrom(self, limit: int) -> tuple[bytes, tuple[str, int]]:
        self.received += 1
        return (self.honest.pop() if self.honest else b"forged"), ("10.0.0.66", 66)

    def fileno(self) -> int:
        return -1

    def close(self) -> None:
        pass


def test_a_flood_makes_the_bell_deaf_for_the_rest_of_the_period(make_bell: MakeBell) -> None:
    clock = FakeClock()
    bell = make_bell(clock=clock)
    bell.close()
    flood = Flood()
    bell._socket = flood  # type: ignore[assignment]
    assert bell.deaf_for() == 0.0
    assert bell.drain().rung is False
    assert bell.rejected == flood.received == MOST_REJECTED
    assert bell.deaf_for() == pytest.approx(PERIOD)
    for _ in range(1000):
        bell.drain()
    assert flood.received == MOST_REJECTED, "the owner may ask as often as it likes"
    clock.now += PERIOD
    assert bell.deaf_for() == 0.0
    flood.honest = [sealed(body(bell.port))]
    said = bell.drain()
    assert said.rung, "one that gets through is heard"
    assert said.deaf == pytest.approx(PERIOD), "nobody was silent meanwhile"
    assert flood.received == 2 * MOST_REJECTED + 1
    clock.now += 10.0
    flood.honest = [sealed(body(bell.port, count=2))]
    assert bell.drain().deaf == pytest.approx(10.0), "also while the owner was busy with something else"


def test_few_invalid_datagrams_make_no_bell_deaf(make_bell: MakeBell, stranger: socket.socket) -> None:
    clock = FakeClock()
    bell = make_bell(clock=clock)
    for _ in range(MOST_REJECTED * 3 // 50):
        for _ in range(50):
            stranger.sendto(b"forged", at(bell))
        select.select([bell], [], [], 5)
        assert bell.drain().deaf == bell.deaf_for() == 0.0
        clock.now += PERIOD
    assert bell.rejected >= MOST_REJECTED


def test_an_error_that_an_earlier_ring_brought_back_does_not_end_the_draining(make_bell: MakeBell) -> None:
    a, gone = make_bell("a"), make_bell("b")
    address = at(gone)
    gone.close()
    a.ring([address])  # an ICMP "port unreachable" comes back
    a.ring([address, ("256.0.0.1", 1), ("10.255.255.1", 0)])  # nothing of this raises
    c = make_bell("c")
    c.ring([at(a)])
    assert heard(a) is True


@pytest.mark.parametrize(
    "address",
    [("localhost", 1), ("", 1), ("x" * 300, 1), ("a..b", 1), ("\0", 1), ("::1", 1), (HOME, 70_000), (HOME, -1)],
)
def test_an_address_that_is_none_rings_nobody_and_looks_up_no_name(
    make_bell: MakeBell, monkeypatch: pytest.MonkeyPatch, address: tuple[str, int]
) -> None:
    a, b = make_bell("a"), make_bell("b")
    a.ring([address, at(b)])
    assert heard(b) is True
    assert b.drain().rung is False


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
    stranger.sendto(sealed(body(bell.port, count=6, kind="beat")), at(bell))
    stranger.sendto(sealed(body(bell.port, count=5)), at(bell))
    deadline = time.monotonic() + 5
    rung = False
    while not rung and time.monotonic() < deadline:
        select.select([bell], [], [], 0.1)
        rung = bell.drain().rung
    assert rung
    assert bell.rejected == 0


@pytest.mark.parametrize(
    ("host", "addresses", "why"),
    [
        ("192.0.2.1", ["192.0.2.1"], "192.0.2.1"),  # not this machine's
        ("0.0.0.0", [], "no IPv4 address"),
    ],
)
def test_where_there_can_be_no_bell_one_line_says_so(
    host: str, addresses: list[str], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert open_notifier(secret=SECRET, run_uid="run", uid="a", host=host, addresses=addresses) is None
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert why in caplog.text
    assert "looking at the files alone" in caplog.text


def test_a_bell_that_can_be_is_opened(caplog: pytest.LogCaptureFixture) -> None:
    bell = open_notifier(secret=SECRET, run_uid="run", uid="a", host="0.0.0.0", addresses=["10.0.0.7"])
    assert bell is not None
    assert bell.port > 0
    bell.close()
    assert not caplog.records


def test_a_ring_is_carried_on_to_those_that_it_names(make_bell: MakeBell) -> None:
    a, b, c = make_bell("a"), make_bell("b"), make_bell("c")
    a.ring([at(b)], "log/7", forward=[at(c)])
    select.select([b], [], [], 5)
    assert b.drain().about == {"log/7"}
    select.select([c], [], [], 5)
    found = c.drain()
    assert found.rung
    assert (found.about, found.alive) == ({"log/7"}, {"b"})


def test_the_longest_ring_fits_into_a_datagram(make_bell: MakeBell) -> None:
    a, b = make_bell("a" * 92), make_bell("b")
    addresses = [("255.255.255.255", 65535)] * MOST_FORWARDED
    sent: list[bytes] = []
    b.ring = lambda found, about="", forward=(): sent.append(str(found).encode())  # type: ignore[assignment,method-assign]
    for key in ("log/9999999999999999", f"round/000000/join+{'u' * 92}"):
        a.ring([at(b)], key, forward=addresses)
        select.select([b], [], [], 5)
        assert b.drain().rung
    assert sent == [str(addresses).encode()] * 2


def test_a_beat_says_whether_its_sender_hears_and_which_record_is_the_newest(make_bell: MakeBell) -> None:
    a, b = make_bell("a"), make_bell("b")
    for hears in (True, False):
        a.beat([at(b)], "log/9", hears=hears)
        select.select([b], [], [], 5)
        found = b.drain()
        assert not found.rung
        assert found.hears == {"a": hears}
        assert found.told == {"log/9"}
        assert not found.about


def test_rings_and_beats_compare_their_hosts_clocks(make_bell: MakeBell) -> None:
    """Here the hosts' clocks stand still, so that the packets take no time, and a's is an hour ahead."""
    a, b = make_bell("a", clock=FakeClock(4600.0)), make_bell("b", clock=FakeClock(1000.0))
    assert a.offset_to("b") is None
    a.ring([at(b)])
    assert heard(b)
    assert b.offset_to("a") is None, "one packet bounds it on one side"
    b.beat([at(a)])
    heard(a)
    offset = a.offset_to("b")
    assert offset is not None
    assert abs(offset.offset_ns - 3600 * 10**9) <= offset.bound_ns < 1000
    assert b.offset_to("a") is None
    a.beat([at(b)])
    heard(b)
    offset = b.offset_to("a")
    assert offset is not None
    assert abs(offset.offset_ns + 3600 * 10**9) <= offset.bound_ns < 1000


@pytest.mark.parametrize("said", [{}, {"t": "7"}, {"t": True}, {"t": None, "b": 1}, {"t": 1e300}, {"t": 7, "b": "7"}])
def test_what_tells_no_time_compares_nothing(
    make_bell: MakeBell, stranger: socket.socket, said: dict[str, object]
) -> None:
    """Of an older agent, say."""
    bell = make_bell("a")
    stranger.sendto(sealed(body(bell.port, **said)), at(bell))  # type: ignore[arg-type]
    assert heard(bell)
    assert bell.offset_to("b") is None
    assert bell.rejected == 0
