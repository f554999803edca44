from __future__ import annotations

import pytest

from hpc_elastic.base.text import clean_text, cut_middle
from hpc_elastic.failures.explanation import find_cpp_terminate, find_fatal_error
from hpc_elastic.failures.failure_text import MESSAGE_LIMIT, TEXT_LIMIT, Frame
from hpc_elastic.failures.traceback_text import find_python_traceback
from tests.rigs.described import traceback_in

PLAIN = """\
some line before
Traceback (most recent call last):
  File "/home/ann/train.py", line 9, in <module>
    main()
  File "/home/ann/train.py", line 5, in main
    raise ValueError("bad batch 17")
ValueError: bad batch 17
"""
CHAINED = """\
Traceback (most recent call last):
  File "/home/ann/py.py", line 6, in g
    try: f()
         ^^^
KeyError: 'inner'

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "/home/ann/py.py", line 8, in <module>
    if m=="nested": g()
                    ^^^
pkg.errors.LoadError: outer
second line

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "/home/ann/py.py", line 11, in <module>
    f()
RuntimeError: while handling
"""
GROUP = """\
  + Exception Group Traceback (most recent call last):
  |   File "/home/ann/py.py", line 13, in <module>
  |     raise ExceptionGroup("many", [...])
  | ExceptionGroup: many (2 sub-exceptions)
  +-+---------------- 1 ----------------
    | ValueError: a
    +---------------- 2 ----------------
    | ExceptionGroup: in (1 sub-exception)
    +-+---------------- 1 ----------------
      | KeyError: 'k'
      +------------------------------------
"""
SEGFAULT = """\
loss 0.25
Fatal Python error: Segmentation fault

Current thread 0x00007f1542893b80 (most recent call first):
  File "/usr/lib/python3.11/ctypes/__init__.py", line 519 in string_at
  File "/home/ann/py.py", line 15 in <module>

Thread 0x00007f1542893b90 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 1 in run

Extension modules: numpy.core._multiarray_umath (total: 1)
"""
SYNTAX = """\
  File "/home/ann/bad.py", line 1
    def f(:
          ^
SyntaxError: invalid syntax
"""


def test_plain() -> None:
    found = traceback_in(PLAIN)
    assert (found.exception_type, found.message, found.causes) == ("ValueError", "bad batch 17", ())
    assert found.headline == "ValueError: bad batch 17"
    assert found.text == PLAIN.split("\n", 1)[1].rstrip("\n")
    assert found.frames == (
        Frame(file="/home/ann/train.py", line=9, function="<module>"),
        Frame(file="/home/ann/train.py", line=5, function="main"),
    )
    assert found.lines_after == 0


def test_chained_names_its_causes_nearest_first() -> None:
    found = traceback_in(CHAINED)
    assert found.headline == "RuntimeError: while handling"
    assert found.causes == ("pkg.errors.LoadError: outer", "KeyError: 'inner'")
    assert found.text == CHAINED.rstrip("\n")
    assert found.frames == (Frame(file="/home/ann/py.py", line=11, function="<module>"),)


def test_a_message_of_several_lines_ends_where_something_else_begins() -> None:
    text = PLAIN + "note one\nnote two\n[W1121 05:45:12.1 socket.cpp:1] [c10d] something else\n"
    found = traceback_in(text)
    assert found.message == "bad batch 17\nnote one\nnote two"
    assert found.lines_after == 1


def test_torchs_rank_prefix_is_taken_off() -> None:
    text = "".join(f"[rank3]: {line}\n" for line in PLAIN.splitlines()) + "[rank3]:[E1 a.cpp:1] log\nmore\n"
    found = traceback_in(text)
    assert found.headline == "ValueError: bad batch 17"
    assert found.message == "bad batch 17"
    assert "[rank3]" not in found.text


@pytest.mark.parametrize(
    ("last", "exception_type", "message"),
    [
        ("\x1b[1;35mValueError\x1b[0m: bad", "ValueError", "bad"),
        ("MyError", "MyError", ""),
        ("MyError: ", "MyError", ""),
        ("__main__.f.<locals>.Odd: bad", "__main__.f.<locals>.Odd", "bad"),
    ],
)
def test_type_and_message(last: str, exception_type: str, message: str) -> None:
    found = traceback_in(PLAIN.replace("ValueError: bad batch 17", last))
    assert (found.exception_type, found.message) == (exception_type, message)
    assert found.headline == (f"{exception_type}: {message}" if message else exception_type)


def test_a_group_tells_what_is_in_it() -> None:
    found = traceback_in(GROUP)
    assert found.exception_type == "ExceptionGroup"
    assert found.message.startswith("many (2 sub-exceptions); in it: ValueError: a; ")
    assert found.frames == (Frame(file="/home/ann/py.py", line=13, function="<module>"),)


def test_another_threads_exception_is_taken_where_there_is_no_better_one() -> None:
    thread = "Exception in thread Thread-1 (t):\n" + PLAIN.split("\n", 1)[1].replace("bad batch 17", "in a thread")
    assert traceback_in(thread).message == "in a thread"
    assert traceback_in(PLAIN + thread).message == "bad batch 17"


def test_a_syntax_error_has_no_header() -> None:
    found = traceback_in("warming up\n" + SYNTAX)
    assert (found.exception_type, found.message) == ("SyntaxError", "invalid syntax")
    assert found.text == SYNTAX.rstrip("\n")


def test_text_without_a_traceback() -> None:
    for text in ("", "\n\n", "Traceback (most recent call last):", PLAIN[:60], "SyntaxError: invalid syntax\n"):
        assert find_python_traceback(text) is None


def test_a_cut_traceback_is_none_and_an_earlier_whole_one_is_found() -> None:
    assert traceback_in(PLAIN + "Traceback (most recent call last):\n  File ").message == "bad batch 17"


def test_texts_are_bounded() -> None:
    frames = '  File "/home/ann/train.py", line 5, in main\n    x()\n' * 10_000
    found = traceback_in(f"Traceback (most recent call last):\n{frames}ValueError: {'x' * 1_000_000}\n")
    assert len(found.text) < TEXT_LIMIT + 200
    assert len(found.message) < MESSAGE_LIMIT + 100
    assert found.text.startswith("Traceback (most recent call last):\n  File")
    assert "characters cut" in found.text


def test_a_fatal_error_gives_the_current_threads_stack() -> None:
    found = find_fatal_error(SEGFAULT)
    assert found is not None
    assert found.message == "Fatal Python error: Segmentation fault"
    assert [frame.function for frame in found.frames] == ["<module>", "string_at"]
    assert found.text.startswith("Fatal Python error: Segmentation fault\n\nCurrent thread")
    assert find_fatal_error(PLAIN) is None


def test_a_cpp_termination() -> None:
    found = find_cpp_terminate(
        "terminate called after throwing an instance of 'c10::DistBackendError'\n  what():  [Rank 6] gone\nframe #0\n"
    )
    assert found is not None
    assert (found.exception_type, found.message) == ("c10::DistBackendError", "[Rank 6] gone")
    bare = find_cpp_terminate("terminate called without an active exception\n")
    assert bare is not None
    assert (bare.exception_type, bare.message) == ("", "terminate called without an active exception")
    assert find_cpp_terminate(PLAIN) is None


def test_clean_text_leaves_what_can_be_printed_and_stored() -> None:
    assert clean_text("a\x1b[31mred\x1b[0m\x00\x07b\r\nc\rd\ud800e\t\u00e9") == "aredb\nc\nd?e\t\u00e9"


def test_cut_middle_keeps_both_ends() -> None:
    text = cut_middle("a" * 100 + "z" * 100, 80)
    assert text.startswith("a" * 10 + "\n... 120 characters cut ...\n")
    assert text.endswith("z" * 70)
    assert cut_middle("short", 80) == "short"


def test_a_fatal_error_with_the_same_calls_over_and_over_is_called_an_overflow() -> None:
    frames = '  File "/u/train.py", line 5 in deep\n' * 100
    dump = f"Fatal Python error: Segmentation fault\n\nCurrent thread 0x1 (most recent call first):\n{frames}"
    found = find_fatal_error(dump + "  ...\n")
    assert found is not None
    assert "a stack overflow?" in found.message
    whole = find_fatal_error(dump)
    assert whole is not None
    assert whole.message == "Fatal Python error: Segmentation fault"
