"""A filesystem that refuses: since when, with what, and whether it refuses the others too."""

from __future__ import annotations

import errno
import resource

import pytest

from hpc_elastic.base.codec import to_json
from hpc_elastic.base.loop import is_refusal
from hpc_elastic.rendezvous.coordination import ALONE_SECONDS, RefusalWatch
from hpc_elastic.store.file_store import StoreFullError

EACCES = OSError(errno.EACCES, "Permission denied", b"/runs/store/hb/1")
PEER = {"b"}
REFUSED, FINE = frozenset({"b"}), frozenset[str]()


@pytest.mark.parametrize("number", [errno.EACCES, errno.EPERM, errno.ESTALE, errno.EIO, errno.EKEYEXPIRED])
def test_refusals(number: int) -> None:
    assert is_refusal(OSError(number, "no"))


@pytest.mark.parametrize("number", [errno.ENOENT, errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.EEXIST])
def test_what_is_none(number: int) -> None:
    assert not is_refusal(OSError(number, "no"))


def test_a_time_of_refusal_begins_once_and_ends() -> None:
    watch = RefusalWatch()
    assert watch.refused(EACCES, 10.0, 1_000)
    assert not watch.refused(OSError(errno.EIO, "Input/output error"), 12.0, 3_000)
    assert watch.now is not None
    assert str(watch.now) == "Permission denied (/runs/store/hb/1)"
    ended = watch.answered()
    assert ended is not None
    assert to_json(ended.to_event(35.0, over=True)) == {
        "event": "filesystem_refused",
        "error": "Permission denied",
        "path": "/runs/store/hb/1",
        "since_ns": 1_000,
        "seconds": 25.0,
        "over": True,
    }
    assert watch.answered() is None


def test_a_quota_is_named_as_such() -> None:
    watch = RefusalWatch()
    error = StoreFullError(root="/runs/store", why="can't create x")
    error.__cause__ = OSError(errno.EDQUOT, "Disk quota exceeded")
    watch.refused(error, 0.0, 0)
    assert str(watch.now) == "Disk quota exceeded (/runs/store)"


def test_the_limit_of_open_files_is_no_refusal_of_the_filesystem() -> None:
    watch = RefusalWatch()
    watch.refused(OSError(errno.EMFILE, "Too many open files", "/runs/store/hb/1"), 0.0, 0)
    assert watch.now is not None
    found = to_json(watch.now.to_event(12.0, over=True))
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    assert found == {
        "event": "health_warning",
        "check": "descriptors",
        "reason": f"no file could be opened for 12 s: open files: an agent may have {limit} (ulimit -Hn)",
    }


def test_a_link_is_named_by_its_path_and_not_by_its_text() -> None:
    watch = RefusalWatch()
    watch.refused(OSError(errno.EACCES, "Permission denied", b"12 the text", None, b"/runs/store/log/1"), 0.0, 0)
    assert str(watch.now) == "Permission denied (/runs/store/log/1)"


def alone(*beats: tuple[float, frozenset[str]], at: float) -> bool:
    """Refused since 0; the beats of a peer, and whether this process is alone with it then."""
    watch = RefusalWatch()
    watch.refused(EACCES, 0.0, 0)
    for when, refused in beats:
        watch.heard(PEER, refused, when)
    return watch.is_alone(at)


def test_it_is_alone_where_a_peer_is_not_refused_for_a_while() -> None:
    beats = [(float(second), FINE) for second in range(12)]
    assert alone(*beats, at=11.0)
    assert not alone(*beats[:9], at=8.0), "a peer may be late to notice"
    assert not alone(at=60.0), "nobody says how it fares"
    assert not alone(*beats[:5], at=60.0), "the peer has not been heard for long"


def test_it_is_not_alone_with_a_peer_that_was_refused_a_moment_ago() -> None:
    beats = [*((float(s), REFUSED) for s in range(30)), *((float(s), FINE) for s in range(30, 45))]
    assert not alone(*beats[:34], at=33.0)
    assert alone(*beats, at=29.0 + ALONE_SECONDS + 2.0)


def test_a_peer_that_is_refused_now_is_news_once() -> None:
    watch = RefusalWatch()
    assert not watch.heard(PEER, FINE, 0.0)
    assert watch.heard(PEER, REFUSED, 1.0)
    assert not watch.heard(PEER, REFUSED, 2.0)
    assert not watch.heard({"c"}, FINE, 2.5)
    assert not watch.heard(PEER, REFUSED, 3.0)
    assert not watch.heard(PEER, FINE, 4.0)
    assert watch.heard(PEER, REFUSED, 5.0)
