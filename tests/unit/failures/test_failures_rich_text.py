"""Tracebacks as rich draws them (the texts are what rich 15.0.0 printed), read like Python's own."""

from __future__ import annotations

import pytest

from hpc_elastic.failures.failure_text import Frame
from hpc_elastic.failures.traceback_text import find_python_traceback
from tests.rigs.described import traceback_in

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
PLAIN = """\
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
    assert found.text == PLAIN
    assert found.headline == "ValueError: bad batch"
    assert found.frames[0] == Frame(file="/home/ann/r1.py", line=13, function="<module>")
    assert [frame.function for frame in found.frames] == ["<module>", "main"]
    assert found.span == (1, 22), "by the lines of what was printed"


def test_its_causes_are_named() -> None:
    last = BOX.replace("some line before\n", "").replace("ValueError", "RuntimeError")
    found = traceback_in(f"{BOX}\nThe above exception was the direct cause of the following exception:\n\n{last}")
    assert found.headline == "RuntimeError: bad batch"
    assert found.causes == ("ValueError: bad batch",)


def test_one_that_was_cut_is_none() -> None:
    assert find_python_traceback(BOX[: BOX.index("╰──────────────────────────────────────────────")]) is None
    found = traceback_in(PLAIN + "\n" + BOX[: BOX.index("╰────────────────────────────────────────────")])
    assert found.text.startswith(PLAIN)
