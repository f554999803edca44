"""Bytes to lines for the job log."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from hpc_elastic.output import terminal
from hpc_elastic.output.terminal import LONGEST_PARTIAL, LineSplitter, readable, unfinished, with_prefix


def _lines(*chunks: bytes) -> bytes:
    splitter = LineSplitter()
    return b"".join(splitter.feed(chunk) for chunk in chunks) + splitter.flush(final=True)


_TEXT = st.lists(st.sampled_from([b"a", b"\xff\xfe", b"\n", b"\r", b"\r\n", b" 10%", "é".encode(), b"long " * 9])).map(
    b"".join
)


@given(_TEXT, st.lists(st.integers(0, 60), max_size=5))
@example(b"a\r\nb\r\n", [2])
@example(b"a\r\r\n", [2])
@example(b"\ra\rb\n", [1, 3])
def test_every_byte_comes_out_once_however_it_is_cut(text: bytes, cuts: list[int]) -> None:
    """But for what carriage returns draw over."""
    edges = sorted({0, len(text), *(min(cut, len(text)) for cut in cuts)})
    whole = _lines(text)
    assert _lines(*[text[a:b] for a, b in pairwise(edges)]) == whole
    assert b"\r" not in whole
    assert whole.count(b"\n") - text.count(b"\n") in (0, 1)
    if b"\r" not in text:
        assert whole == (text if text.endswith(b"\n") or not text else text + b"\n")


def test_a_bar_that_was_shown_is_less_urgent_and_its_end_no_line_of_its_own() -> None:
    splitter = LineSplitter()
    splitter.feed(b"\r 10%")
    assert splitter.flush(again=False) == b" 10%\n"
    splitter.feed(b"\r 20%")
    assert splitter.flush(again=False) == b""
    assert splitter.has_partial
    assert splitter.flush(again=True) == b" 20%\n"
    assert splitter.feed(b"\nnext\n") == b"next\n"
    splitter.feed(b"\r 10%")
    assert splitter.flush(again=False) == b" 10%\n", "a new bar"
    splitter.feed(b"\r 99%")
    assert splitter.flush(final=True) == b" 99%\n"
    splitter.feed(b"\r     \r")
    assert splitter.flush() == b"", "wiped away"


def test_two_bars_that_move_the_cursor_up_are_shown_as_they_stand() -> None:
    """As tqdm draws with positions 0 and 1."""
    splitter = LineSplitter()
    told = b"".join(splitter.feed(b"\r outer %d\n\r inner %d\x1b[A" % (n // 10, n)) for n in range(100))
    assert told == b""
    assert splitter.flush() == b" outer 9\n inner 99\n"
    assert splitter.flush(again=False) == b""
    assert splitter.feed(b"\r outer 10\n\r inner 100\x1b[A") == b""
    assert splitter.flush(again=False) == b"", "nothing new, only later"
    assert splitter.flush() == b" outer 10\n inner 100\n"
    # tqdm.write: a line in between, and the bars below it
    assert splitter.feed(b"\r        \n\r          \x1b[A\rloss 0.5\n\r outer 11\n\r inner 110\x1b[A") == b""
    assert splitter.flush() == b"loss 0.5\n outer 11\n inner 110\n"
    splitter.flush()
    assert not splitter.has_partial, "who draws no more is a plain stream again"
    assert splitter.feed(b"\n\ndone\n").endswith(b"done\n")


def test_rich_s_live_display() -> None:
    splitter = LineSplitter()
    splitter.feed(b"epoch 1\nbatch 1")
    for n in range(2, 50):
        assert splitter.feed(b"\r\x1b[2K\x1b[1A\x1b[2Kepoch %d\nbatch %d" % (n, n)) == b""
    assert splitter.flush() == b"epoch 49\nbatch 49\n"
    assert splitter.feed(b"\r\x1b[2K\x1b[1A\x1b[2K") == b""
    assert splitter.flush(final=True) == b"", "it was taken away at the end"


def test_who_floods_is_not_drawing() -> None:
    splitter = LineSplitter()
    splitter.feed(b"bar\n\x1b[A")
    lines = b"".join(b"line %d\n" % n for n in range(20_000))
    assert splitter.feed(lines) == b"bar\n" + lines
    told = b""
    for _ in range(50):
        told += splitter.feed(b"\x1b[A" + b"x" * 3000 + b"\n")
    told += splitter.flush(final=True)
    assert told.count(b"x") <= 150_000
    many = LineSplitter()
    many.feed(b"\x1b[A")
    told = b"".join(many.feed(b"row %d\n" % n) for n in range(1000)) + many.flush(final=True)
    assert [line for line in told.split(b"\n") if line] == [b"row %d" % n for n in range(1000)], "in order, each once"


@given(st.lists(st.sampled_from([b"a", b"\n", b"\r", b"\x1b[A", b"\x1b[3A", b"\x1b[2K", b"\x1b[J", b"\x1b", b"\xc3"])))
def test_any_drawing_gives_whole_lines(pieces: list[bytes]) -> None:
    splitter = LineSplitter()
    told = b""
    for number, piece in enumerate(pieces):
        told += splitter.feed(piece)
        told += splitter.flush(again=number % 2 == 0) if number % 3 == 0 else b""
    told += splitter.flush(final=True)
    assert not told or told.endswith(b"\n")
    assert b"\r" not in told
    assert b"\x1b[A" not in readable(told)
    assert told.count(b"a") <= 2 * len(pieces)
    assert not splitter.has_partial


@pytest.mark.parametrize(
    ("printed", "shown"),
    [
        (b"\x1b[1A\x1b[2K\x1b[31mred\x1b[0m\n", b"\x1b[31mred\x1b[0m\n"),
        (b"\x1b]0;title\x07a\x1b]8;;http://x\x1b\\b\x1b(0c\x1b[?25ld\a\x0e\n", b"abcd\n"),
        (b"plain \xff\xc3\ttext\n\n", b"plain \xff\xc3\ttext\n\n"),
        ("| \b/ \b- é\b\b\b\n".encode(), b"|/\n"),
        # A colour ends with its line: the next one is another rank's.
        (b"\x1b[31mred\nnot\n", b"\x1b[31mred\x1b[0m\nnot\n"),
        (b"\x1b[1;32mgreen\x1b[m\n", b"\x1b[1;32mgreen\x1b[m\n"),
        (b"cut \x1b[3\n", b"cut \n"),
    ],
)
def test_cursor_movements_titles_and_bells_go_and_colours_stay(printed: bytes, shown: bytes) -> None:
    assert readable(printed) == shown


def test_neither_half_a_character_nor_half_a_sequence_is_shown_before_its_rest_came() -> None:
    splitter = LineSplitter()
    for text, rest in ((b"caf\xc3", b"\xa9"), (b"bar \x1b[3", b"1mred"), (b"x\x1b]0;ti", b"tle\x07")):
        assert splitter.feed(text) == b""
        shown = splitter.flush()
        assert text.startswith(shown[:-1])
        assert not unfinished(shown[:-1])
        assert splitter.has_partial
        splitter.feed(rest)
        assert (shown[:-1] + splitter.flush()[:-1]) == text + rest
    endless = b"y" * (LONGEST_PARTIAL - 1) + "é".encode() * 20
    assert all(not unfinished(line) for line in _lines(endless[:-1], endless[-1:]).split(b"\n"))
    splitter.feed(b"half \xc3")
    assert splitter.flush(final=True) == b"half \xc3\n", "at the end all is shown"
    assert unfinished(b"\xff") == unfinished(b"\x80\x80\x80") == unfinished(b"") == 0
    assert unfinished(b"\x1b" + b"[" + b"1" * 1000) == 0, "not for ever"


def test_endless_line_with_carriage_returns_is_not_quadratic() -> None:
    assert len(_lines(b"\r" + b"x" * 2_000_000)) == 2_000_001
    assert len(_lines(b"\r" * 2_000_000)) == 0


@given(st.lists(st.binary(max_size=5).filter(lambda b: b"\n" not in b), max_size=5))
def test_prefix_before_every_line(lines: list[bytes]) -> None:
    text = b"".join(line + b"\n" for line in lines)
    assert with_prefix(text, b"[h:0] ") == b"".join(b"[h:0] " + line + b"\n" for line in lines)


@given(
    st.lists(
        st.sampled_from(
            [b"\x1b", b"[", b"31", b"m", b"K", b"]0;t", b"\a", b"\\", b"\n", b"a", b"\b", "é".encode(), b"\x1b[0m"]
        )
    ),
    st.integers(1, 9),
)
def test_whatever_is_put_together_leaves_only_colours_that_end_with_their_line(parts: list[bytes], slice_: int) -> None:
    whole = b"".join(parts) + b"\n"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(terminal, "_SLICE", 300 * slice_)
        told = readable(whole)
    assert told.count(b"\n") == whole.count(b"\n")
    for line in told.split(b"\n"):
        colours = re.findall(rb"\x1b\[([0-9;:]*)m", line)
        assert line.count(b"\x1b") == len(colours)
        assert not colours or colours[-1] in (b"", b"0")
    assert readable(told) == told


def test_slices_of_a_long_line_cut_no_sequence() -> None:
    text = (b"\x1b[1;31mred\x1b[K" + "é".encode()) * 20_000 + b"\n"
    assert readable(text) == (b"\x1b[1;31mred" + "é".encode()) * 20_000 + b"\x1b[0m\n"
