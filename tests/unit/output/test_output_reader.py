"""Lines of files that grow, are rotated or vanish; what a terminal is spared; when files are looked at."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpc_elastic.output import log_reader
from hpc_elastic.output.log_files import LogFile
from hpc_elastic.output.log_reader import (
    LONGEST_LINE,
    LOOKS_PER_SECOND,
    Chunk,
    FollowedFiles,
    OutputReader,
    Place,
    last_lines_place,
    next_interval,
)
from hpc_elastic.output.terminal import harmless
from hpc_elastic.run.log_pieces import PieceLimit
from tests.rigs.fake_clock import FakeClock


def rest_of(reader: OutputReader) -> bytes:
    """What is there now, the line that has begun left out."""
    found = b""
    while (chunk := reader.read()) is not None:
        assert chunk.data.endswith(b"\n")
        found += chunk.data
    return found


def writer(path: Path, *, size: int = 100, count: int = 1000) -> LogFile:
    return LogFile(path, on_end=list, on_loss=lambda *_: None, limit=PieceLimit(size=size, count=count))


@settings(deadline=None, max_examples=60)
@given(
    parts=st.lists(st.binary(max_size=40).map(lambda raw: raw.replace(b"\r", b"\n")), max_size=40),
    looks=st.sets(st.integers(0, 40)),
    chunk=st.sampled_from([4096, 5000]),
)
def test_a_rotated_file_that_is_followed_loses_nothing(
    tmp_path_factory: pytest.TempPathFactory, parts: list[bytes], looks: set[int], chunk: int
) -> None:
    path = tmp_path_factory.mktemp("rank") / "stdout.log"
    log = writer(path)
    reader = OutputReader(path, chunk=chunk)
    found = b""
    for number, part in enumerate(parts):
        log.write(part, now=0.0)
        if number in looks:
            found += rest_of(reader)
    log.finish()
    found += rest_of(reader)
    rest = reader.rest()
    found += rest.data if rest is not None else b""
    whole = b"".join(parts)
    assert found == whole + (b"" if whole.endswith(b"\n") or not whole else b"\n")


def test_places_lead_back_to_the_same_bytes(tmp_path: Path) -> None:
    path = tmp_path / "stdout.log"
    log = writer(path)
    log.write(b"".join(b"line %02d of twenty bytes\n" % number for number in range(20)), now=0.0)
    log.finish()
    reader = OutputReader(path)
    while (chunk := reader.read()) is not None:
        again = OutputReader(path, at=chunk.head).read()
        assert again.data.startswith(chunk.data[:24])


def test_a_gap_is_told_and_what_comes_after_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "stdout.log"
    log = writer(path, count=3)
    log.write(b"".join(b"line %02d of twenty bytes\n" % number for number in range(8)), now=0.0)
    reader = OutputReader(path)
    assert not reader.read().after_gap
    log.write(b"".join(b"line %02d of twenty bytes\n" % number for number in range(8, 40)), now=0.0)
    log.finish()
    chunks = []
    while (chunk := reader.read()) is not None:
        chunks.append(chunk)
    assert [chunk.after_gap for chunk in chunks].count(True) == 1
    lines = b"".join(chunk.data for chunk in chunks).splitlines()
    assert lines[-1] == b"line 39 of twenty bytes"
    assert all(len(line) == 23 for line in lines)


def test_a_file_that_was_emptied_or_replaced_is_read_anew(tmp_path: Path) -> None:
    path = tmp_path / "stdout.log"
    path.write_bytes(b"old line\nold line\n")
    reader = OutputReader(path)
    assert rest_of(reader) == b"old line\nold line\n"
    with open(path, "r+b") as file:
        file.truncate()
        file.write(b"new\n")
    assert rest_of(reader) == b"new\n"
    other = tmp_path / "other"
    other.write_bytes(b"another\n")
    os.replace(other, path)
    chunk = reader.read()
    assert (chunk.data, chunk.after_gap) == (b"another\n", True)


def test_a_gigabyte_without_a_line_end_comes_in_bits(tmp_path: Path) -> None:
    path = tmp_path / "stdout.log"
    path.write_bytes(b"x" * (10 * LONGEST_LINE + 5))
    reader = OutputReader(path)
    sizes = []
    while (chunk := reader.read()) is not None:
        sizes.append(len(chunk.data) - 1)
    assert max(sizes) <= 2 * LONGEST_LINE
    rest = reader.rest()
    assert sum(sizes) + (len(rest.data) - 1 if rest else 0) == 10 * LONGEST_LINE + 5


def test_no_descriptor_stays_open(tmp_path: Path) -> None:
    (tmp_path / "stdout.log").write_bytes(b"line\n" * 10)
    before = len(os.listdir("/proc/self/fd"))
    readers = [OutputReader(tmp_path / "stdout.log") for _ in range(50)]
    assert all(reader.read() for reader in readers)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_link_a_pipe_and_a_folder_are_not_read(tmp_path: Path) -> None:
    (tmp_path / "real").write_bytes(b"secret\n")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    for name in ("link", "pipe", "folder"):
        assert OutputReader(tmp_path / name).read() is None


@given(text=st.text(alphabet="ab\n", max_size=60).map(str.encode), count=st.integers(0, 12), chunk=st.integers(1, 7))
@settings(deadline=None)
def test_the_last_lines_are_found_from_the_end(
    tmp_path_factory: pytest.TempPathFactory, text: bytes, count: int, chunk: int
) -> None:
    path = tmp_path_factory.mktemp("rank") / "stdout.log"
    path.write_bytes(text)
    lines = text.splitlines(keepends=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(log_reader, "CHUNK", chunk)
        place = last_lines_place(path, count)
    assert text[place.offset :] == b"".join(lines[max(0, len(lines) - count) :])


def test_the_last_lines_of_a_rotated_file(tmp_path: Path) -> None:
    path = tmp_path / "stdout.log"
    log = writer(path)
    lines = [b"line %02d of twenty bytes\n" % number for number in range(21)]
    for line in lines:
        log.write(line, now=0.0)
    log.finish()
    for count in range(1, 22):
        reader = OutputReader(path, at=last_lines_place(path, count))
        assert rest_of(reader) == b"".join(lines[-count:])


def test_the_last_lines_of_a_large_file_are_read_from_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "stdout.log"
    with open(path, "wb") as file:
        file.seek(3 << 30)  # sparse
        file.write(b"\none\ntwo\n")
    asked = []
    really = os.pread
    monkeypatch.setattr(os, "pread", lambda fd, count, at: asked.append(count) or really(fd, count, at))  # type: ignore[func-returns-value]
    place = last_lines_place(path, 2)
    assert place == Place(0, (3 << 30) + 1)
    assert sum(asked) <= log_reader.CHUNK


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
    assert [(chunk.data, chunk.head) for _, chunk in files.rests()] == [(b"no\n", Place(0, 14))]
