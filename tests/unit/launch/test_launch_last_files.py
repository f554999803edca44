"""How long an attempt's end waits for the shared filesystem."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from hpc_elastic.file_thread import FilesystemHangsError
from hpc_elastic.launch.last_files import HUNG_SECONDS, REPORT_SECONDS, LastFiles


class Files:
    """A thread that has been stuck for `stuck` seconds, and remembers what it was asked."""

    def __init__(self, stuck: float = 0.0) -> None:
        self.stuck = stuck
        self.within: list[float] = []
        self.unless: Callable[[], bool] = lambda: False

    def stuck_for(self) -> float:
        return self.stuck

    def do(self, action: Callable[[], str], *, within: float, unless: Callable[[], bool]) -> str:
        self.within.append(within)
        self.unless = unless
        if self.stuck > within or unless():
            raise FilesystemHangsError
        return action()


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


def test_what_is_raised_is_no_hang() -> None:
    def full() -> str:
        raise OSError("no space left")

    with pytest.raises(OSError, match="no space"):
        LastFiles(Files(), is_hurried=lambda: False, is_late=True).do(full, "")  # type: ignore[arg-type]
