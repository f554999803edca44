"""Tracebacks in the form of a logger, a wrapper or a notebook: as if Python had printed them. Texts were captured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpc_elastic.failures.failure_text import read_json_line, undecorate
from hpc_elastic.failures.ranking import FailureClass
from tests.rigs.described import described, traceback_in

PLAIN = """\
Traceback (most recent call last):
  File "/home/ann/train.py", line 9, in <module>
    train()
  File "/home/ann/train.py", line 5, in train
    scale = table[name]
KeyError: 'no scale for layer 17'"""
LOGURU = """\
Traceback (most recent call last):

> File "/home/ann/train.py", line 9, in <module>
    train()
    └ <function train at 0x7f7c352d2de0>

  File "/home/ann/train.py", line 5, in train
    scale = table[name]
            │     └ 'b'
            └ {'a': 1}

KeyError: 'no scale for layer 17'"""
IPYTHON = """\
---------------------------------------------------------------------------
KeyError                                  Traceback (most recent call last)
File /home/ann/train.py:9
      7 
      8 
----> 9 train()

File /home/ann/train.py:5, in train(name)
      4 def train(name):
----> 5     scale = table[name]

KeyError: 'no scale for layer 17'"""  # noqa: W291


def prefixed(prefix: str, text: str = PLAIN) -> str:
    return "".join(f"{prefix}{line}".rstrip() + "\n" for line in text.split("\n"))


@pytest.mark.parametrize(
    "text",
    [
        LOGURU,
        IPYTHON,
        prefixed("[04:37:58 rank2] "),
        prefixed("2026-11-23 04:37:58,570 ERROR train: "),
        prefixed("1: "),
        json.dumps({"level": "error", "event": "training failed", "exception": PLAIN}),
        json.dumps({"record": {"message": "failed", "exc_info": PLAIN}}),
    ],
    ids=["loguru", "ipython", "time and rank", "logger", "srun", "structlog", "nested json"],
)
def test_its_exception_and_its_frames_are_known(tmp_path: Path, text: str) -> None:
    failure = described(tmp_path, f"step 1\nstep 2\n{text}\n")
    assert failure.headline == "KeyError: 'no scale for layer 17'"
    assert 'File "/home/ann/train.py", line 5, in train' in failure.traceback


def test_the_time_before_each_line_may_change() -> None:
    lines = [f"[04:37:5{at}.{at}00] {line}" for at, line in enumerate(PLAIN.split("\n"))]
    assert undecorate("\n".join(lines)) == PLAIN


def test_each_line_keeps_its_number() -> None:
    for text in (LOGURU, IPYTHON, prefixed("1: ")):
        assert undecorate(text).count("\n") == text.count("\n")


def test_lines_of_other_ranks_keep_their_label() -> None:
    text = undecorate(f"0: step 1\n{prefixed('1: ')}0: step 2\n")
    assert text.startswith("0: step 1\nTraceback ")
    assert text.endswith("17'\n0: step 2\n")


def test_a_chain_with_a_prefix_stays_a_chain() -> None:
    chain = f"{PLAIN}\n\nDuring handling of the above exception, another exception occurred:\n\n{PLAIN}"
    found = traceback_in(undecorate(prefixed("[rank 1] ", chain)))
    assert len(found.chain) == 2


@pytest.mark.parametrize(
    "text", [PLAIN, "no traceback at all", prefixed("[rank1]: "), "x Traceback (most recent call last):\ny"]
)
def test_what_needs_nothing_stays_as_it_is(text: str) -> None:
    assert undecorate(text) == text


def test_the_exceptions_of_a_group_have_no_prefix() -> None:
    text = prefixed("    | ")
    assert undecorate(f"  + Exception Group Traceback (most recent call last):\n  +-+---- 1 ----\n{text}").endswith(
        text
    )


def test_structlogs_dictionaries_are_a_traceback() -> None:
    stacks = [
        {
            "exc_type": "RuntimeError",
            "exc_value": "no batch",
            "frames": [{"filename": "b.py", "lineno": 3, "name": "g"}],
        },
        {"exc_type": "KeyError", "exc_value": "'zu'", "frames": [{"filename": "a.py", "lineno": 1, "name": "f"}]},
    ]
    found = traceback_in(read_json_line(json.dumps({"event": "failed", "exception": stacks}))[0])
    assert [raised.headline for raised in found.chain] == ["RuntimeError: no batch", "KeyError: 'zu'"]


def test_json_without_a_traceback_is_shown_by_its_message_and_its_reason(tmp_path: Path) -> None:
    line = json.dumps({"level": "error", "event": "training failed", "error": "vocabulary has a hole", "step": 7})
    assert described(tmp_path, f"{line}\n").headline == "training failed: vocabulary has a hole (exit code 1)"


def test_a_json_line_below_error_says_nothing(tmp_path: Path) -> None:
    error = json.dumps({"event": "cannot open shard 7", "level": "error"})
    info = json.dumps({"event": "closed the failed writers", "level": "info"})
    assert described(tmp_path, f"{error}\n{info}\n").headline == "cannot open shard 7 (exit code 1)"


@pytest.mark.parametrize("line", ["{", "{}", "[1]", "{not json}", '{"a": 1'])
def test_what_is_no_json_of_a_logger_says_nothing(line: str) -> None:
    assert read_json_line(line) == ("", "")


def test_a_symptom_with_a_prefix_is_a_symptom(tmp_path: Path) -> None:
    text = PLAIN.replace(
        "KeyError: 'no scale for layer 17'",
        "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:5] Connection closed by peer [10.0.0.7]",
    ).replace("scale = table[name]", "dist.all_reduce(loss)")
    assert described(tmp_path, prefixed("[04:37:58] ", text)).failure_class is FailureClass.SYMPTOM
