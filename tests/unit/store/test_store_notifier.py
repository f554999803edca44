"""The notifier: only a notification with the run's secret is heard, once; everything else is dropped, counted, and told
of once."""

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

from hpc_elastic.base.clock import PeerClock
from hpc_elastic.store.notifier import (
    MAX_DATAGRAM,
    MOST_FORWARDED,
    MOST_LOGGED,
    MOST_REJECTED,
    PERIOD,
    Notifier,
    ValidDatagrams,
    open_notifier,
)
from tests.rigs.fake_clock import FakeClock

SECRET = b"s" * 32
HOME = "127.0.0.1"
MakeNotifier = Callable[..., Notifier]


@pytest.fixture
def make_notifier() -> Iterator[MakeNotifier]:
    made: list[Notifier] = []

    def make(
        uid: str = "a", *, secret: bytes = SECRET, run_uid: str = "run", clock: FakeClock | None = None
    ) -> Notifier:
        made.append(Notifier(secret=secret, run_uid=run_uid, uid=uid, host=HOME, clock=clock))
        return made[-1]

    yield make
    for notifier in made:
        notifier.close()


@pytest.fixture
def stranger() -> Iterator[socket.socket]:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        yield sock


def received(notifier: Notifier) -> ValidDatagrams:
    ready, _, _ = select.select([notifier], [], [], 5)
    assert ready, "no datagram came"
    return notifier.drain()


def heard(notifier: Notifier) -> bool:
    """Whether a valid notification has come; waits for the datagram that a test has just sent."""
    return received(notifier).notified


def at(notifier: Notifier) -> tuple[str, int]:
    return HOME, notifier.port


def sealed(body: bytes, *, secret: bytes = SECRET, run_uid: str = "run") -> bytes:
    """A datagram as another implementation of the format would make it."""
    key = hashlib.sha256(secret + b"\0" + run_uid.encode()).digest()
    return hmac.new(key, body, hashlib.sha256).digest() + body


def body(port: int, *, uid: str = "b", count: object = 1, to: str = HOME, kind: str = "ring", **more: object) -> bytes:
    return json.dumps({"u": uid, "k": kind, "c": count, "to": to, "p": port, **more}).encode()


def test_a_notification_is_heard_once_and_says_where_it_arrived(make_notifier: MakeNotifier) -> None:
    a, b = make_notifier("a"), make_notifier("b")
    a.notify([at(b)])
    assert heard(b) is True
    assert b.drain().notified is False
    assert list(b.reached) == [HOME]
    assert b.rejections.total() == 0
    assert a.drain().notified is False


def test_a_notification_says_what_was_written(make_notifier: MakeNotifier) -> None:
    a, b = make_notifier("a"), make_notifier("b")
    for about in ("log/7", "", "x" * 300):
        a.notify([at(b)], about)
    said = set()
    notifications = 0
    deadline = time.monotonic() + 5
    while notifications < 3 and time.monotonic() < deadline:
        found = received(b)
        notifications, said = b._newest["a", "ring"], said | found.about
    assert said == {"log/7"}, "one that is too long for a datagram is left out; it still notifies"
    assert (notifications, b.rejections.total()) == (3, 0)


def test_the_longest_notification_fits_in_a_datagram(make_notifier: MakeNotifier, stranger: socket.socket) -> None:
    stranger.bind((HOME, 0))
    notifier = make_notifier("0" * 5 + "-" + "h" * 64 + "-" + "f" * 25)
    notifier._count = 10**12
    notifier.notify([stranger.getsockname()], "k" * 200)
    assert len(stranger.recv(4096)) <= MAX_DATAGRAM
    notifier._clocks["x"] = PeerClock()
    notifier._clocks["x"].received(sent_ns=10**18, received_ns=-(10**18), told_ns=None)
    notifier._senders[stranger.getsockname()] = "x"
    notifier.beat([stranger.getsockname()], "k" * 120, hears=True)
    data = stranger.recv(4096)
    assert json.loads(data[32:])["b"] < -(10**18)
    assert len(data) <= MAX_DATAGRAM
    notifier.notify([stranger.getsockname()], "k" * 40, forward=[("255.255.255.255", 65535)] * MOST_FORWARDED)
    assert len(stranger.recv(4096)) <= MAX_DATAGRAM


def test_the_datagram_is_the_documented_one(make_notifier: MakeNotifier, stranger: socket.socket) -> None:
    notifier = make_notifier(run_uid="another")
    stranger.bind((HOME, 0))
    stranger.settimeout(5)
    stranger.sendto(sealed(body(notifier.port), run_uid="another"), at(notifier))
    assert heard(notifier) is True
    notifier.notify([stranger.getsockname()], "log/3")
    data = stranger.recv(4096)
    assert data == sealed(data[32:], run_uid="another")
    port = stranger.getsockname()[1]
    said = json.loads(data[32:])
    assert abs(said.pop("t") - time.clock_gettime(time.CLOCK_BOOTTIME) * 1e9) < 60e9
    assert said == {"u": "a", "k": "ring", "c": 1, "to": HOME, "p": port, "a": "log/3"}


def test_addresses_are_kept_in_the_order_of_the_first_notification_that_reached_them(
    make_notifier: MakeNotifier, stranger: socket.socket
) -> None:
    notifier = make_notifier()
    for count, to in enumerate(("10.0.0.7", "192.168.1.7", "10.0.0.7"), start=1):
        stranger.sendto(sealed(body(notifier.port, count=count, to=to)), at(notifier))
        assert heard(notifier) is True
    assert list(notifier.reached) == ["10.0.0.7", "192.168.1.7"]


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
        (lambda port: sealed(body(port, t="7")), "garbled"),
        (lambda port: sealed(body(port, t=7, b=1e300)), "garbled"),
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
    make_notifier: MakeNotifier,
    stranger: socket.socket,
    caplog: pytest.LogCaptureFixture,
    make: Callable[[int], bytes],
    reason: str,
) -> None:
    caplog.set_level(logging.INFO)
    notifier = make_notifier()
    for count in (1, 2, 3):
        stranger.sendto(make(notifier.port), at(notifier))
        assert heard(notifier) is False
        assert notifier.rejections == Counter({reason: count})
    assert not notifier.reached
    assert [record.getMessage() for record in caplog.records] == [caplog.records[0].getMessage()]
    assert HOME in caplog.text
    stranger.sendto(sealed(body(notifier.port)), at(notifier))
    assert heard(notifier) is True, "and the notifier still works"
    notifier.log_rejections()
    assert f"3 {reason}" in caplog.records[-1].getMessage()


def test_a_replayed_or_older_notification_is_not_heard(make_notifier: MakeNotifier, stranger: socket.socket) -> None:
    notifier = make_notifier()
    for count, valid in ((5, True), (5, False), (4, False), (6, True), (6, False)):
        stranger.sendto(sealed(body(notifier.port, count=count)), at(notifier))
        assert heard(notifier) is valid
    assert notifier.rejections == Counter(repeated=3)
    stranger.sendto(sealed(body(notifier.port, uid="c", count=1)), at(notifier))
    assert heard(notifier) is True


def test_what_was_sent_to_one_is_not_taken_by_another(make_notifier: MakeNotifier, stranger: socket.socket) -> None:
    """A recorded beat of a node that is dead must not show it alive to one that has never heard it."""
    stranger.bind((HOME, 0))
    dead, new = make_notifier("a"), make_notifier("b")
    dead.beat([stranger.getsockname()])
    stranger.sendto(stranger.recv(4096), at(new))
    assert received(new).alive == frozenset()
    assert new.rejections == Counter(misdirected=1)


def test_forgers_of_many_hosts_fill_no_log(make_notifier: MakeNotifier, caplog: pytest.LogCaptureFixture) -> None:
    notifier = make_notifier()
    for host in range(200):
        notifier._reject("forged", (f"10.0.0.{host}", 1))
    assert len(caplog.records) == MOST_LOGGED
    assert notifier.rejections.total() == 200


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


def test_a_flood_mutes_the_notifier_for_the_rest_of_the_period(make_notifier: MakeNotifier) -> None:
    clock = FakeClock()
    notifier = make_notifier(clock=clock)
    notifier.close()
    flood = Flood()
    notifier._socket = flood  # type: ignore[assignment]
    assert notifier.muted_for() == 0.0
    assert notifier.drain().notified is False
    assert notifier.rejections.total() == flood.received == MOST_REJECTED
    assert notifier.muted_for() == pytest.approx(PERIOD)
    for _ in range(1000):
        notifier.drain()
    assert flood.received == MOST_REJECTED, "the owner may ask as often as it likes"
    clock.now += PERIOD
    assert notifier.muted_for() == 0.0
    flood.honest = [sealed(body(notifier.port))]
    said = notifier.drain()
    assert said.notified, "one that gets through is heard"
    assert said.muted == pytest.approx(PERIOD), "nobody was silent meanwhile"
    assert flood.received == 2 * MOST_REJECTED + 1
    clock.now += 10.0
    flood.honest = [sealed(body(notifier.port, count=2))]
    assert notifier.drain().muted == pytest.approx(10.0), "also while the owner was busy with something else"


def test_few_invalid_datagrams_mute_no_notifier(make_notifier: MakeNotifier, stranger: socket.socket) -> None:
    clock = FakeClock()
    notifier = make_notifier(clock=clock)
    for _ in range(MOST_REJECTED * 3 // 50):
        for _ in range(50):
            stranger.sendto(b"forged", at(notifier))
        assert received(notifier).muted == notifier.muted_for() == 0.0
        clock.now += PERIOD
    assert notifier.rejections.total() >= MOST_REJECTED


def test_an_error_that_an_earlier_notification_brought_back_does_not_end_the_draining(
    make_notifier: MakeNotifier,
) -> None:
    a, gone = make_notifier("a"), make_notifier("b")
    address = at(gone)
    gone.close()
    a.notify([address])  # an ICMP "port unreachable" comes back
    a.notify([address, ("256.0.0.1", 1), ("10.255.255.1", 0)])  # nothing of this raises
    c = make_notifier("c")
    c.notify([at(a)])
    assert heard(a) is True


@pytest.mark.parametrize(
    "address",
    [("localhost", 1), ("", 1), ("x" * 300, 1), ("a..b", 1), ("\0", 1), ("::1", 1), (HOME, 70_000), (HOME, -1)],
)
def test_an_address_that_is_none_notifies_nobody_and_looks_up_no_name(
    make_notifier: MakeNotifier, monkeypatch: pytest.MonkeyPatch, address: tuple[str, int]
) -> None:
    a, b = make_notifier("a"), make_notifier("b")
    a.notify([address, at(b)])
    assert heard(b) is True
    assert b.drain().notified is False


def test_notifying_nobody_is_nothing(make_notifier: MakeNotifier) -> None:
    make_notifier().notify([])


def test_the_socket_is_not_inherited_and_never_blocks(make_notifier: MakeNotifier) -> None:
    notifier = make_notifier()
    assert notifier.drain().notified is False
    assert not os.get_inheritable(notifier.fileno())


def test_a_notification_that_a_beat_overtook_still_notifies(
    make_notifier: MakeNotifier, stranger: socket.socket
) -> None:
    notifier = make_notifier("a")
    stranger.sendto(sealed(body(notifier.port, count=6, kind="beat")), at(notifier))
    stranger.sendto(sealed(body(notifier.port, count=5)), at(notifier))
    deadline = time.monotonic() + 5
    notified = False
    while not notified and time.monotonic() < deadline:
        select.select([notifier], [], [], 0.1)
        notified = notifier.drain().notified
    assert notified
    assert notifier.rejections.total() == 0


@pytest.mark.parametrize(
    ("host", "addresses", "why"),
    [
        ("192.0.2.1", ["192.0.2.1"], "192.0.2.1"),  # not this machine's
        ("0.0.0.0", [], "no IPv4 address"),
    ],
)
def test_where_there_can_be_no_notifier_one_line_says_so(
    host: str, addresses: list[str], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert open_notifier(secret=SECRET, run_uid="run", uid="a", host=host, addresses=addresses) is None
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert why in caplog.text
    assert "looking at the files alone" in caplog.text


def test_a_notifier_that_can_be_is_opened(caplog: pytest.LogCaptureFixture) -> None:
    notifier = open_notifier(secret=SECRET, run_uid="run", uid="a", host="0.0.0.0", addresses=["10.0.0.7"])
    assert notifier is not None
    assert notifier.port > 0
    notifier.close()
    assert not caplog.records


def test_a_notification_is_carried_on_to_those_that_it_names(make_notifier: MakeNotifier) -> None:
    a, b, c = make_notifier("a"), make_notifier("b"), make_notifier("c")
    a.notify([at(b)], "log/7", forward=[at(c)])
    assert received(b).about == {"log/7"}
    found = received(c)
    assert found.notified
    assert (found.about, found.alive) == ({"log/7"}, {"b"})


def test_addresses_to_carry_on_to_fit_into_the_longest_notification(make_notifier: MakeNotifier) -> None:
    a, b = make_notifier("a" * 92), make_notifier("b")
    addresses = [("255.255.255.255", 65535)] * MOST_FORWARDED
    sent: list[bytes] = []
    b.notify = lambda found, about="", forward=(): sent.append(str(found).encode())  # type: ignore[assignment,method-assign]
    for key in ("log/9999999999999999", f"round/000000/join+{'u' * 92}"):
        a.notify([at(b)], key, forward=addresses)
        assert heard(b)
    assert sent == [str(addresses).encode()] * 2


def test_a_beat_says_whether_its_sender_hears_and_which_record_is_the_newest(make_notifier: MakeNotifier) -> None:
    a, b = make_notifier("a"), make_notifier("b")
    for hears in (True, False):
        a.beat([at(b)], "log/9", hears=hears)
        found = received(b)
        assert not found.notified
        assert (found.alive, found.hears) == ({"a"}, {"a": hears})
        assert found.newest == {"log/9"}
        assert not found.about


def test_notifications_and_beats_compare_their_hosts_clocks(make_notifier: MakeNotifier) -> None:
    """Here the hosts' clocks stand still, so that the packets take no time, and a's is an hour ahead."""
    a, b = make_notifier("a", clock=FakeClock(4600.0)), make_notifier("b", clock=FakeClock(1000.0))
    assert a.offset_to("b") is None
    a.notify([at(b)])
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


def test_how_long_packets_take_of_late_is_known(make_notifier: MakeNotifier) -> None:
    clock = FakeClock(1000.0)
    a, b = make_notifier("a", clock=clock), make_notifier("b", clock=clock)
    for seconds in (0.0, *[0.03] * 40):
        for one, other in ((a, b), (b, a), (a, b)):
            one.beat([at(other)])
            clock.now += seconds
            heard(other)
    assert b.travel_from("c") is None
    assert b.travel_from("a") == pytest.approx((0.03e9, 0.03e9), rel=0.1)


@pytest.mark.parametrize("said", [{}, {"t": None, "b": 1}])
def test_what_tells_no_time_compares_nothing(
    make_notifier: MakeNotifier, stranger: socket.socket, said: dict[str, object]
) -> None:
    """Of an older agent, say."""
    notifier = make_notifier("a")
    stranger.sendto(sealed(body(notifier.port, **said)), at(notifier))  # type: ignore[arg-type]
    assert heard(notifier)
    assert notifier.offset_to("b") is None
    assert notifier.rejections.total() == 0
