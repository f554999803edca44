"""What a terminal is spared, and how often files are looked at."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_elastic.output.log_reader import LOOKS_PER_SECOND, Chunk, FollowedFiles, OutputReader, next_interval
from hpc_elastic.output.terminal import harmless
from tests.rigs.fake_clock import FakeClock

_COLOUR = re.compile(rb"\x1b\[[0-9;:]*m")


@pytest.mark.parametrize(
    ("printed", "shown"),
    [
        (b"plain\n", b"plain\n"),
        (b"\x1b[31mred\x1b[0m\n", b"\x1b[31mred\x1b[0m\n"),
        (b"\x1b[31mopen\n", b"\x1b[31mopen\x1b[0m\n"),
        (b"\x1b]0;title\x07x\x1b[2J\x1b[1;1Hy\n", b"xy\n"),
        (b"10%\r50%\r100%\r\n", b"100%\n"),
        (b"\xc2\x9b31mred\xc2\x9d0;title\xc2\x9c\n", b"\\u009b31mred\\u009d0;title\\u009c\n"),
        (b"\x9b2J\xff\n", b"\\x9b2J\\xff\n"),
        ("safe \u202elive\n".encode(), b"safe \\u202elive\n"),
        ("gr\u00fc\u00df \u2713\n".encode(), "gr\u00fc\u00df \u2713\n".encode()),
        (b"\x1b[31mrank 1\b\b\b\b\b\bfake\x1b[0m\n", b"\x1b[31mrank 1fake\x1b[0m\n"),
    ],
)
def test_on_a_terminal(printed: bytes, shown: bytes) -> None:
    assert harmless(printed) == shown


@given(st.lists(st.one_of(st.binary(max_size=8), st.sampled_from([b"\x1b", b"\x1b[", b"\x9b", b"\r", b"\b", b"\n"]))))
def test_nothing_but_colours_is_left_of_what_steers(parts: list[bytes]) -> None:
    shown = harmless(b"".join(parts) + b"\n")
    left = _COLOUR.sub(b"", shown)
    assert not re.search(rb"[\x00-\x08\x0b-\x1f\x7f]", left)
    assert not re.search("[\x80-\x9f\u202a-\u202e]", left.decode())


def test_a_file_that_grows_is_looked_at_more_often() -> None:
    interval, intervals = 0.0, []
    for _ in range(9):
        interval = next_interval(interval, has_grown=False, files=8)
        intervals.append(interval)
    assert intervals[0] == 0.25
    assert intervals == sorted(intervals)
    assert intervals[-1] == 2.0
    assert next_interval(2.0, has_grown=True, files=8) == 0.25


@given(st.integers(1, 100_000), st.floats(0, 1000), st.booleans())
def test_all_files_together_within_the_budget(files: int, interval: float, has_grown: bool) -> None:
    assert files / next_interval(interval, has_grown=has_grown, files=files) <= LOOKS_PER_SECOND * 1.0001


def test_only_what_is_due_is_looked_at(tmp_path: Path) -> None:
    clock, found = FakeClock(), []
    files: FollowedFiles[str, Chunk] = FollowedFiles(lambda: found.append(clock.now), clock=clock)
    for name in ("a", "b"):
        (tmp_path / name).write_bytes(b"1\n")
        files.add(name, OutputReader(tmp_path / name))
    began = clock.now
    assert [(key, chunk.data) for key, chunk in files.look()] == [("a", b"1\n"), ("b", b"1\n")]
    with open(tmp_path / "a", "ab") as file:
        file.write(b"2\n")
    clock.now = began + 0.1
    assert list(files.look()) == []
    assert files.seconds_until_due() == pytest.approx(0.15)
    clock.now = began + 0.26
    assert [(key, chunk.data) for key, chunk in files.look()] == [("a", b"2\n")]
    (tmp_path / "b").write_bytes(b"1\nand\n")
    assert found == [began], "files that are new are looked for once a second"
    assert [key for key, _ in files.look(everything=True)] == ["b"]
    assert found == [began, clock.now]


def test_a_line_without_an_end_is_shown_after_a_while(tmp_path: Path) -> None:
    path, clock = tmp_path / "a", FakeClock()
    path.write_bytes(b"continue? ")
    files: FollowedFiles[str, Chunk] = FollowedFiles(lambda: None, clock=clock)
    files.add("a", OutputReader(path))
    assert list(files.look()) == []
    clock.now += 1.0
    assert list(files.look()) == []
    clock.now += 4.0
    assert [chunk.data for _, chunk in files.look()] == [b"continue? \n"]
    with open(path, "ab") as file:
        file.write(b"yes\nno")
    clock.now += 4.0
    assert [chunk.data for _, chunk in files.look()] == [b"yes\n"]
    assert [chunk.data for _, chunk in files.rests()] == [b"no\n"]
