"""The pieces of a rotated output file: sizes as users write them, names, and reading back over pieces."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from hpc_elastic.errors import UsageError
from hpc_elastic.run.log_pieces import EndReader, find_pieces, holds_at_end, parse_size, piece_path, to_remove


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("64K", 64 << 10),
        ("65536", 64 << 10),
        ("500M", 500 << 20),
        ("1G", 1 << 30),
        ("1g", 1 << 30),
        ("1GB", 1 << 30),
        ("1GiB", 1 << 30),
        (" 2T ", 2 << 40),
        ("100000B", 100_000),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text, option="--log-max-size") == size


NO_SIZE = ("", "G", "-1G", "1.5G", "1P", "1 G", "0x10M", "1Gb/s", "1e9", "²K", "9" * 40)
NO_SENSE = ("0", "1", "1K", "63K", "65535", "999999T")


@pytest.mark.parametrize("text", [*NO_SIZE, *NO_SENSE])
def test_what_is_no_size_or_makes_no_sense_is_refused_by_name(text: str) -> None:
    says = f"{text}: give from 64K" if text in NO_SENSE else rf"{re.escape(repr(text))}.*such as 500M or 1G"
    with pytest.raises(UsageError, match=f"--log-max-size.*{says}"):
        parse_size(text, option="--log-max-size")


def test_the_first_and_the_latest_are_kept() -> None:
    assert to_remove([], 3) == to_remove([0], 3) == to_remove([0, 1], 3) == []
    assert to_remove([0, 1, 2], 3) == [1]
    assert to_remove([0, 5, 6, 7], 3) == [5, 6]
    assert to_remove([0, 1], 2) == [1]
    assert to_remove([0], 2) == []


def test_pieces_are_found_by_number(tmp_path: Path) -> None:
    path = tmp_path / "stdout.log"
    for name in ("stdout.log", *(f"stdout.log.{end}" for end in ("000", "1000", "007", "bak")), "stderr.log.003"):
        (tmp_path / name).touch()
    assert find_pieces(path) == [0, 7, 1000]
    assert piece_path(path, 7).name == "stdout.log.007"


def _write(path: Path, pieces: dict[int, bytes], last: bytes | None) -> None:
    for number, data in pieces.items():
        piece_path(path, number).write_bytes(data)
    if last is not None:
        path.write_bytes(last)


def test_the_end_is_read_over_pieces(tmp_path: Path) -> None:
    path = tmp_path / "stderr.log"
    with pytest.raises(FileNotFoundError):
        EndReader(path)
    _write(path, {0: b"abc", 1: b"", 2: b"defg"}, b"hi")
    with EndReader(path) as file:
        assert (file.read(1), file.read(4), file.read(100)) == (b"i", b"fghi", b"abcdefghi")
        assert (file.read(3, before=1), file.read(2, before=7), file.read(5, before=7)) == (b"fgh", b"ab", b"ab")
        assert (file.read(5, before=20), file.has(8), file.has(9)) == (b"", True, False)
    path.unlink()  # it is just being rotated
    with EndReader(path) as file:
        assert file.read(4) == b"defg"
    _write(path, {5: b"de", 6: b"fg"}, b"hi")
    with EndReader(path) as file:
        assert file.read(100) == b"defghi", "what is not next to the end is not taken for it"


def test_no_folder_is_listed_where_nothing_was_rotated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "stderr.log"
    path.write_bytes(b"short")
    monkeypatch.setattr(os, "listdir", lambda *_: pytest.fail("a question too many for the file server"))
    with EndReader(path) as file:
        assert file.read(1000) == b"short"


def test_words_at_the_end_of_an_output_file(tmp_path: Path) -> None:
    log = tmp_path / "stderr.log"
    assert not holds_at_end(log, b"Traceback", within=100)
    log.write_bytes(b"Traceback" + b"x" * 100)
    assert not holds_at_end(log, b"Traceback", within=100)
    assert holds_at_end(log, b"Traceback", within=109)
    assert not holds_at_end(tmp_path, b"Traceback", within=100)
