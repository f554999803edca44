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
SYNTAX = """\
  File "/home/ann/bad.py", line 1
    def f(:
          ^
SyntaxError: invalid syntax
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


def test_a_message_of_several_lines_ends_where_something_else_begins() -> None:
    text = PLAIN + "note one\nnote two\n[W1121 05:45:12.1 socket.cpp:1] [c10d] something else\n"
    found = traceback_in(text)
    assert (found.message, found.lines_after) == ("bad batch 17\nnote one\nnote two", 1)


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
    for text in (
        *("", "\n\n", "Traceback (most recent call last):", PLAIN[:60], "SyntaxError: invalid syntax\n"),
        "it says Traceback (most recent call last):\nand no more: x\n",
        '"Traceback (most recent call last):\n',
        "Original " + PLAIN.split("\n", 1)[1],
    ):
        assert find_python_traceback(text) is None, text
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
    again = SEGFAULT.replace("<module>\n", "<module>\n" + '  File "/u/train.py", line 5 in deep\n' * 100 + "  ...\n")
    overflow = find_fatal_error(again)
    assert overflow is not None
    assert "a stack overflow?" in overflow.message
    whole = find_fatal_error(again.replace("  ...\n", ""))
    assert whole is not None
    assert whole.message == found.message


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


def test_texts_are_cleaned_and_cut_in_the_middle() -> None:
    assert clean_text("a\x1b[31mred\x1b[0m\x00\x07b\r\nc\rd\ud800e\t\u00e9") == "aredb\nc\nd?e\t\u00e9"
    assert cut_middle("a" * 100 + "z" * 100, 80) == "a" * 10 + "\n... 120 characters cut ...\n" + "z" * 70
    assert cut_middle("short", 80) == "short"


# -- as rich 15.0.0 draws them

BOX = """\
some line before
╭───────────────────── Traceback (most recent call last) ──────────────────────╮
│ /home/ann/r1.py:13 in <module>                                               │
│                                                                              │
│   10 │   raise ValueError("bad batch")                                       │
│   11 def main():                                                             │
│   12 │   step(17)                                                            │
│ ❱ 13 main()                                                                  │
│   14                                                                         │
│                                                                              │
│ /home/someuser/projects/llm-pretraining/experiments/2026-11-21-ablation-     │
│ src/training/r1.py:12 in main                                                │
│                                                                              │
│   11 def main():                                                             │
│ ❱ 12 │   step(17)                                                            │
│                                                                              │
│ ╭─── locals ────╮                                                            │
│ │ data = [1, 2] │                                                            │
│ │    n = 17     │                                                            │
│ ╰───────────────╯                                                            │
╰──────────────────────────────────────────────────────────────────────────────╯
ValueError: bad batch
"""
UNBOXED = """\
Traceback (most recent call last):
  File "/home/ann/r1.py", line 13, in <module>
    main()
  File "/home/someuser/projects/llm-pretraining/experiments/2026-11-21-ablation-src/training/r1.py", line 12, in main
    step(17)
ValueError: bad batch"""


def ascii_box(text: str) -> str:
    """As rich draws it where the output's encoding has no boxes."""
    lines = []
    for line in text.split("\n"):
        is_edge = line.startswith(("╭", "╰"))
        line = line.translate(str.maketrans("╭╮╰╯─│", "++++-|")) if is_edge else line.replace("│", "|")
        lines.append(line.replace("❱", "\\u2771"))
    return "\n".join(lines)


@pytest.mark.parametrize("text", [BOX, ascii_box(BOX)], ids=["unicode", "ascii"])
def test_a_box_reads_like_a_traceback(text: str) -> None:
    found = traceback_in(text)
    assert (found.text, found.headline) == (UNBOXED, "ValueError: bad batch")
    assert found.frames[0] == Frame(file="/home/ann/r1.py", line=13, function="<module>")
    assert [frame.function for frame in found.frames] == ["<module>", "main"]
    assert found.span == (1, 22), "by the lines of what was printed"


def test_boxes_of_a_chain_and_one_that_was_cut() -> None:
    last = BOX.replace("some line before\n", "").replace("ValueError", "RuntimeError")
    found = traceback_in(f"{BOX}\nThe above exception was the direct cause of the following exception:\n\n{last}")
    assert (found.headline, found.causes) == ("RuntimeError: bad batch", ("ValueError: bad batch",))
    cut = BOX[: BOX.index("╰──────────────────────────────────────────────")]
    assert find_python_traceback(cut) is None
    assert traceback_in(f"{UNBOXED}\n{cut}").text.startswith(UNBOXED)
