"""Which line was printed when, and the outputs of many ranks as one."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpc_elastic.output import log_streams
from hpc_elastic.output.log_files import HEADER, STDERR, STDOUT, LogFile, TimesFile, times_path
from hpc_elastic.output.log_reader import Chunk, Place
from hpc_elastic.output.log_streams import (
    LogStream,
    RoundMarks,
    StreamMarks,
    last_of,
    merged,
    nearest_lines,
    read_round_marks,
    readers_around,
    readers_of,
    readers_of_last,
    timed_pieces,
)

SECOND = 1_000_000
STREAM = LogStream(0, 0, 0, 1, Path("stdout.log"))


def chunk(data: bytes, offset: int = 0) -> Chunk:
    return Chunk(data=data, head=Place(0, offset), tail=Place(0, offset))


def marks(*entries: tuple[int, int], piece_1: tuple[tuple[int, int], ...] = ()) -> StreamMarks:
    found = StreamMarks()
    for piece, of_piece in enumerate((entries, piece_1)):
        for offset, second in of_piece:
            found.add(piece, offset, second * SECOND)
    return found


def cut(one: Chunk, times: StreamMarks) -> list[tuple[int | None, bytes]]:
    return [
        (block.time_us // SECOND if block.time_us is not None else None, block.data)
        for block in timed_pieces(STREAM, one, times)
    ]


ONE_TO_THREE = marks((0, 1), (4, 2), (10, 3))
OVER_TWO_PIECES = Chunk(data=b"begun, ended\nlater\n", head=Place(0, 50), tail=Place(1, 0), joint=7)


@pytest.mark.parametrize(
    ("one", "times", "blocks"),
    [
        pytest.param(
            chunk(b"one\ntwo and\nthree\n"),
            ONE_TO_THREE,
            [(1, b"one\n"), (2, b"two and\n"), (3, b"three\n")],
            id="that of its first byte",
        ),
        pytest.param(chunk(b"a\nb\n", offset=100), ONE_TO_THREE, [(3, b"a\nb\n")], id="the last one"),
        pytest.param(chunk(b"no line end\n"), ONE_TO_THREE, [(1, b"no line end\n")], id="one line"),
        pytest.param(chunk(b"a\nb\n"), marks(), [(None, b"a\nb\n")], id="none without entries"),
        pytest.param(chunk(b"a\nb\n"), marks((2, 7)), [(7, b"a\n"), (7, b"b\n")], id="before the first its own"),
        pytest.param(
            OVER_TWO_PIECES,
            marks((0, 1), piece_1=((0, 2), (6, 3))),
            [(1, b"begun, ended\n"), (3, b"later\n")],
            id="over two pieces",
        ),
        pytest.param(
            chunk(b"a\nb\nc\n"),
            marks((0, 9), (2, 3), (4, 10)),
            [(9, b"a\n"), (9, b"b\n"), (10, b"c\n")],
            id="a clock that was set back keeps the stream in order",
        ),
    ],
)
def test_which_time_a_line_has(one: Chunk, times: StreamMarks, blocks: list[tuple[int | None, bytes]]) -> None:
    assert cut(one, times) == blocks


def test_where_a_moment_is() -> None:
    times = marks((0, 1), (40, 5), (90, 9))
    assert times.place_at(5 * SECOND) == Place(0, 40)
    assert times.place_at(4 * SECOND) == Place(0, 0)
    assert times.place_at(0) is None


class Round:
    """A round's folder, written as agents do."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "attempt-000" / "round-000"
        for path in (self.folder.parent, self.folder):
            path.mkdir(mode=0o700)
        self.times: dict[int, TimesFile] = {}
        self.logs: dict[LogStream, LogFile] = {}

    def stream(self, rank: int, stream: int = STDOUT) -> LogStream:
        name = "stdout.log" if stream == STDOUT else "stderr.log"
        return LogStream(0, 0, rank, stream, self.folder / f"rank-{rank:05d}" / name)

    def write(self, rank: int, data: bytes, second: float, stream: int = STDOUT) -> None:
        """`rank` is alone on the node of the same number."""
        one = self.stream(rank, stream)
        if one not in self.logs:
            times = self.times.setdefault(rank, TimesFile(times_path(self.folder, rank)))
            self.logs[one] = LogFile(one.path, on_end=list, on_loss=lambda *_: None, times=times.stream(rank, stream))
        self.logs[one].write(data, now=0.0, at_us=int(second * SECOND))

    def end(self) -> None:
        for log in self.logs.values():
            log.finish(now=1.0)

    def streams(self) -> list[LogStream]:
        return list(self.logs)


def text(pieces: object) -> list[str]:
    return [
        f"{piece.stream.rank}:{line}"
        for piece in pieces  # type: ignore[attr-defined]
        for line in piece.data.decode().splitlines()
    ]


def test_all_ranks_in_the_order_in_which_they_printed(tmp_path: Path) -> None:
    part = Round(tmp_path)
    part.write(1, b"first\n", 10)
    part.write(0, b"second\n", 11)
    part.write(1, b"third\nthird too\n", 12, STDERR)
    part.write(1, b"fourth\n", 13)
    part.write(0, b"fifth without an end", 14)
    part.end()
    found = read_round_marks(part.folder)
    assert text(merged(readers_of(part.streams()), found)) == [
        "1:first",
        "0:second",
        "1:third",
        "1:third too",
        "1:fourth",
        "0:fifth without an end",
    ]
    assert found.nodes == {0: 0, 1: 1}


def test_clocks_that_are_known_to_be_off_are_set_right(tmp_path: Path) -> None:
    part = Round(tmp_path)
    part.write(0, b"second\n", 11)
    part.write(1, b"first\n", 3610)  # an hour ahead
    part.end()
    found = read_round_marks(part.folder, offsets_ns={1: 3600 * 1000 * SECOND})
    assert text(merged(readers_of(part.streams()), found)) == ["1:first", "0:second"]


def test_without_times_one_rank_after_the_other_at_the_end(tmp_path: Path) -> None:
    part = Round(tmp_path)
    for rank in range(3):
        for number in range(2):
            part.write(rank, b"line %d\n" % number, 10 + number)
    part.end()
    times_path(part.folder, 1).unlink()
    found = read_round_marks(part.folder)
    assert text(merged(readers_of(part.streams()), found)) == [
        "0:line 0", "2:line 0", "0:line 1", "2:line 1", "1:line 0", "1:line 1",
    ]  # fmt: skip


def test_torn_times_and_vanished_files(tmp_path: Path) -> None:
    part = Round(tmp_path)
    part.write(0, b"zero\n", 11)
    part.write(1, b"one\n", 10)
    part.end()
    with open(times_path(part.folder, 0), "ab") as file:
        file.write(b"0 1 0 5 11\xff\n0 1")
    part.stream(1).path.unlink()
    found = read_round_marks(part.folder)
    assert text(merged(readers_of(part.streams()), found)) == ["0:zero"]
    assert read_round_marks(tmp_path / "nowhere").streams == {}


def test_a_window_and_the_lines_around_a_moment(tmp_path: Path) -> None:
    part = Round(tmp_path)
    for second in range(100):
        part.write(0, b"zero %d\n" % second, second)
        part.write(1, b"one %d\n" % second, second + 0.5)
    part.end()
    found = read_round_marks(part.folder)
    window = (50 * SECOND, 51 * SECOND)
    readers = readers_around(part.streams(), found, since_us=window[0], without_times=5)
    assert text(merged(readers, found, window=window)) == ["0:zero 50", "1:one 50", "0:zero 51"]
    none = RoundMarks(streams={}, nodes={})
    readers = readers_around(part.streams(), none, since_us=window[0], without_times=2)
    assert text(merged(readers, none, window=window)) == ["0:zero 98", "0:zero 99", "1:one 98", "1:one 99"]


def test_the_last_lines_of_all_together(tmp_path: Path) -> None:
    part = Round(tmp_path)
    part.write(0, b"old\n" * 50, 1)
    part.write(1, b"a\nb\nc\n", 2)
    part.write(0, b"d\n", 3)
    part.end()
    found = read_round_marks(part.folder)
    for count, lines in ((0, []), (1, ["0:d"]), (3, ["1:b", "1:c", "0:d"]), (5, ["0:old", "1:a", "1:b", "1:c", "0:d"])):
        readers = readers_of_last(part.streams(), count)
        pieces = last_of(merged(readers, found), count)
        assert text(pieces) == lines
    for count, last, first in ((2, ["0:old", "0:old", "1:b", "1:c"], ["0:d"]), (0, [], [])):
        pieces = merged(readers_of(part.streams()), found)
        before, after = nearest_lines(pieces, at_us=2 * SECOND, count=count)
        assert (text(before), text(after)) == (last, first)


def test_of_very_many_times_the_end_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = HEADER + b"".join(b"0 1 0 %d %d\n" % (number, number * SECOND) for number in range(1, 5000))
    times_path(tmp_path, 0).write_bytes(raw)
    monkeypatch.setattr(log_streams, "_ALL_IN_FULL", 1000)
    monkeypatch.setattr(log_streams, "_END", 2000)
    found = read_round_marks(tmp_path).of(0, 1)
    assert found.time_at(Place(0, 5000)) == 4999 * SECOND
    assert found.first_us > 4000 * SECOND
