"""How long an attempt's end waits for the shared filesystem."""

from __future__ import annotations

import errno
from collections.abc import Callable

import pytest

from hpc_elastic.base.loop import FileExecutor, FilesystemHangsError
from hpc_elastic.launch.conclude import HUNG_SECONDS, REPORT_SECONDS, LastFiles
from tests.rigs.fake_clock import FakeClock


class Files:
    """A thread that has been stuck for `stuck` seconds, and remembers what it was asked."""

    def __init__(self, stuck: float = 0.0) -> None:
        self.stuck = stuck
        self.within: list[float] = []
        self.unless: Callable[[], bool] = lambda: False

    def stuck_for(self) -> float:
        return self.stuck

    def do(
        self,
        action: Callable[[], str],
        *,
        within: float,
        unless: Callable[[], bool],
        again: Callable[[BaseException], bool],
        refused_within: float,
    ) -> str:
        self.within.append(within)
        self.unless = unless
        if self.stuck > within or unless():
            raise FilesystemHangsError
        return action()


class Inline(FileExecutor):
    """Does at once what it is asked: a clock that jumps would not wait for a thread."""

    def post(self, action: Callable[[], object]) -> None:
        action()


@pytest.mark.parametrize(
    ("stuck", "is_late", "answers", "within"),
    [
        (0.0, False, False, REPORT_SECONDS),
        (0.0, True, False, HUNG_SECONDS),
        (0.0, True, True, REPORT_SECONDS),
        (HUNG_SECONDS + 1, False, True, HUNG_SECONDS),
    ],
)
def test_who_has_little_time_waits_shortly(stuck: float, is_late: bool, answers: bool, within: float) -> None:
    files = Files(stuck)
    last = LastFiles(files, is_hurried=lambda: False, is_late=is_late)  # type: ignore[arg-type]
    done = last.do(lambda: "done", "given up", answers=answers)
    assert files.within == [within]
    assert done == ("given up" if stuck else "done")


def test_a_hurry_counts_only_where_the_filesystem_hangs() -> None:
    files = Files()
    last = LastFiles(files, is_hurried=lambda: True, is_late=False)  # type: ignore[arg-type]
    assert last.do(lambda: "done", "given up") == "done"
    files.stuck = HUNG_SECONDS + 1
    assert files.unless()


@pytest.mark.parametrize(
    "error", [OSError("no space left"), FileNotFoundError(errno.ENOENT, "No such file or directory")]
)
def test_what_is_neither_a_hang_nor_a_refusal_is_raised_at_once(error: OSError) -> None:
    def fail() -> str:
        tries.append(1)
        raise error

    tries: list[int] = []
    with pytest.raises(type(error), match=r"no space|No such"):
        LastFiles(Inline(clock=FakeClock()), is_hurried=lambda: False, is_late=False).do(fail, "")
    assert tries == [1]


@pytest.mark.parametrize("number", [errno.EACCES, errno.ESTALE, errno.EDQUOT, errno.ENOSPC])
def test_one_that_refuses_is_waited_for_as_one_that_hangs(number: int) -> None:
    tries: list[int] = []

    def refused_thrice() -> str:
        tries.append(1)
        if len(tries) <= 3:
            raise OSError(number, "no")
        return "done"

    last = LastFiles(Inline(clock=FakeClock()), is_hurried=lambda: False, is_late=False)
    assert last.do(refused_thrice, "") == "done"
    assert len(tries) == 4


def test_one_that_goes_on_refusing_is_waited_for_once() -> None:
    def refused() -> str:
        tries.append(clock.monotonic())
        raise OSError(errno.EACCES, "Permission denied")

    tries: list[float] = []
    clock = FakeClock()
    last = LastFiles(Inline(clock=clock), is_hurried=lambda: False, is_late=False)
    with pytest.raises(PermissionError):
        last.do(refused, "")
    assert REPORT_SECONDS - 2 < tries[-1] - tries[0] <= REPORT_SECONDS
    before = len(tries)
    with pytest.raises(PermissionError):
        last.do(refused, "")
    assert len(tries) == before + 1
