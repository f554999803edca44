"""Bytes to lines for the job log."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import example, given
from hypothesis import strategies as st

from hpc_elastic.processes.log_lines import LONGEST_PARTIAL, LineSplitter, with_prefix


def _lines(*chunks: bytes) -> bytes:
    splitter = LineSplitter()
    return b"".join(splitter.feed(chunk) for chunk in chunks) + splitter.flush()


_TEXT = st.lists(st.sampled_from([b"a", b"\xff\xfe", b"\n", b"\r", b"\r\n", b" 10%", "é".encode(), b"long " * 9])).map(
    b"".join
)


@given(_TEXT.filter(lambda text: b"\r" not in text), st.lists(st.integers(0, 60), max_size=5))
def test_every_byte_comes_out_once_however_it_is_cut(text: bytes, cuts: list[int]) -> None:
    edges = sorted({0, len(text), *(min(cut, len(text)) for cut in cuts)})
    chunks = [text[a:b] for a, b in pairwise(edges)]
    wanted = text if text.endswith(b"\n") or not text else text + b"\n"
    assert _lines(*chunks) == wanted


@given(_TEXT, st.lists(st.integers(0, 60), max_size=5))
@example(b"a\r\nb\r\n", [2])
@example(b"a\r\r\n", [2])
@example(b"\ra\rb\n", [1, 3])
def test_cuts_don_t_matter_with_carriage_returns_either(text: bytes, cuts: list[int]) -> None:
    edges = sorted({0, len(text), *(min(cut, len(text)) for cut in cuts)})
    chunks = [text[a:b] for a, b in pairwise(edges)]
    whole = _lines(text)
    assert _lines(*chunks) == whole
    assert b"\r" not in whole
    assert whole.count(b"\n") - text.count(b"\n") in (0, 1)


def test_a_progress_bar_shows_its_last_state() -> None:
    assert _lines(b"\r 10%", b"\r 20%", b"\r100%\n") == b"100%\n"
    assert _lines(b"plain\r\nwindows\r\n") == b"plain\nwindows\n"
    splitter = LineSplitter()
    assert splitter.feed(b"\r 10%\r 20%") == b""
    assert splitter.flush() == b" 20%\n"
    assert splitter.feed(b"\r 30%\ndone\n") == b" 30%\ndone\n"
    assert not splitter.has_partial


def test_cursor_movements_go_and_colours_stay() -> None:
    assert _lines(b"\x1b[1A\x1b[2K\x1b[31mred\x1b[0m\n") == b"\x1b[31mred\x1b[0m\n"


def test_endless_line_comes_in_pieces_of_bounded_size() -> None:
    splitter = LineSplitter()
    total = 0
    for _ in range(100):
        piece = splitter.feed(b"x" * 5000)
        total += piece.count(b"x")
        assert len(piece) <= LONGEST_PARTIAL + 5001
    assert total + splitter.flush().count(b"x") == 500_000


def test_endless_line_with_carriage_returns_is_not_quadratic() -> None:
    assert len(_lines(b"\r" + b"x" * 2_000_000)) == 2_000_001
    assert len(_lines(b"\r" * 2_000_000)) == 0


@given(st.lists(st.binary(max_size=5).filter(lambda b: b"\n" not in b), max_size=5))
def test_prefix_before_every_line(lines: list[bytes]) -> None:
    text = b"".join(line + b"\n" for line in lines)
    assert with_prefix(text, b"[h:0] ") == b"".join(b"[h:0] " + line + b"\n" for line in lines)
