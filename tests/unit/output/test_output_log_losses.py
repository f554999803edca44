"""What was lost is told once per episode: whose, how much, why."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpc_elastic.output.job_log import LONGEST_EPISODE_S, QUIET_S, JobLogSource, LossBook, StreamAccount
from tests.rigs.fake_clock import FakeClock


class _Book:
    def __init__(self) -> None:
        self.clock = FakeClock()
        self.said: list[str] = []
        self.book = LossBook(clock=self.clock, log=self.said.append)

    def account(self, rank: int, stream: str = "stdout", *, shown: bool = False) -> StreamAccount:
        source = JobLogSource(f"[n:{rank}] ") if shown else None
        return self.book.open(
            StreamAccount(rank=rank, stream=stream, path=Path(f"/r/{rank}/{stream}.log"), source=source)
        )


@pytest.fixture
def at() -> _Book:
    return _Book()


def test_an_episode_is_said_when_it_begins_and_when_it_is_over(at: _Book) -> None:
    first, second = at.account(0), at.account(3, "stderr")
    assert at.book.settle() is None
    for _ in range(1000):
        at.book.lose(first, 10, "No space left on device")
    at.book.lose(second, 7, "No space left on device")
    assert len(at.said) == 1, "once, not once per line, nor per rank"
    assert at.said[0].startswith("/r/0/stdout.log: No space left on device; the workers run on")
    assert at.book.settle() is None
    at.clock.now += QUIET_S - 1
    at.book.lose(first, 5, "Disk quota exceeded")
    assert at.book.settle() is None, "it goes on"
    at.clock.now += QUIET_S - 1
    assert at.book.settle() is None
    at.clock.now += 1
    episode = at.book.settle()
    assert episode.not_in_files == 10_012
    assert [(one.rank, one.stream, one.not_in_file) for one in episode.streams] == [
        (0, "stdout", 10_005),
        (3, "stderr", 7),
    ]
    assert at.said[1:] == [
        "10012 bytes of the workers' output are not in their files: rank 0 stdout 10005, rank 3 stderr 7"
        " (No space left on device)"
    ]
    at.clock.now += 1000
    assert at.book.settle() is None, "told once"
    at.book.lose(second, 1, "the disk hangs")
    assert len(at.said) == 3, "a new one"
    final = at.book.settle(final=True)
    assert (final.not_in_files, final.reason) == (1, "the disk hangs")
    assert at.book.settle(final=True) is None


def test_one_that_does_not_end_is_told_now_and_then(at: _Book) -> None:
    account = at.account(0)
    told = []
    for _ in range(int(2 * LONGEST_EPISODE_S)):
        at.book.lose(account, 1, "the disk hangs")
        at.clock.now += 1
        told.append(at.book.settle())
    assert 1 <= sum(episode is not None for episode in told) <= 2
    assert len(at.said) <= 5


def test_what_the_job_log_drops_is_counted_without_a_word_of_ours(at: _Book) -> None:
    account = at.account(2, shown=True)
    account.source.dropped += 500
    assert at.book.settle() is None
    at.clock.now += QUIET_S
    episode = at.book.settle()
    assert (episode.not_in_job_log, episode.not_in_files, episode.reason) == (500, 0, "the job log could not keep up")
    assert not at.said, "the job log says so in its place"
    account.source.dropped += 20
    at.book.settle()
    at.clock.now += QUIET_S
    again = at.book.settle()
    assert again.not_in_job_log == 20, "not what was told before"


def test_streams_that_ended_are_forgotten_when_they_were_told_of(at: _Book) -> None:
    for rank in range(1000):
        at.book.end(at.account(rank, shown=True))
    assert not at.book._accounts
    lossy = at.account(0, shown=True)
    lossy.source.dropped += 5
    at.book.end(lossy)
    at.book.lose(lossy, 6, "the disk hangs")
    at.book.settle()
    at.clock.now += QUIET_S
    episode = at.book.settle()
    assert (episode.not_in_files, episode.not_in_job_log) == (6, 5)
    assert not at.book._accounts
    late = at.account(1)
    at.book.end(late)
    at.book.lose(late, 3, "the disk hangs")  # by the writer, behind the stream's end
    assert at.book.settle(final=True) is not None
    at.clock.now += QUIET_S
    assert at.book.settle() is None


def test_a_thousand_streams_in_one_line(at: _Book) -> None:
    for rank in range(1000):
        at.book.lose(at.account(rank), rank + 1, "the disk hangs")
    assert at.book.settle(final=True) is not None
    assert at.said[-1].endswith(" and 992 more (the disk hangs)")
    assert "rank 999 stdout 1000, rank 998 stdout 999" in at.said[-1]
    assert len(at.said[-1]) < 400
