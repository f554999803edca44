"""Evidence in a stderr.log that is rotated: the traceback may lie in the piece before, or across several."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from hpc_elastic.failures.evidence import describe_failure
from hpc_elastic.failures.worker_failure import EvidenceSource, WorkerFailure
from hpc_elastic.run.log_pieces import piece_path
from tests.rigs.described import described

_TRACEBACK = """\
Traceback (most recent call last):
  File "/home/ann/train.py", line 88, in <module>
    main()
ValueError: {}
"""


def _describe(folder: Path, pieces: list[str]) -> WorkerFailure:
    path = folder / "stderr.log"
    for number, text in enumerate(pieces[:-1]):
        piece_path(path, number).write_text(text)
    path.write_text(pieces[-1])
    facts = WorkerFailure(exitcode=1, ended_ns=1)
    return describe_failure(facts=facts, error_file=folder / "error.json", stderr_log=path)


def _cut(text: str, *places: int) -> list[str]:
    edges = [0, *places, len(text)]
    return [text[a:b] for a, b in pairwise(edges)]


@pytest.mark.parametrize("place", [0, 10, 60, 100, len(_TRACEBACK) - 1, len(_TRACEBACK)])
def test_a_traceback_across_two_pieces(tmp_path: Path, place: int) -> None:
    text = "warning\n" * 1000 + _TRACEBACK.format("boom")
    failure = _describe(tmp_path, _cut(text, 8000 + place))
    assert failure.source is EvidenceSource.STDERR
    assert failure.exception_type == "ValueError"
    assert failure.traceback.startswith("Traceback")
    assert "boom" in failure.message
    assert "warning" in failure.stderr_tail


def test_a_message_of_megabytes_over_many_pieces(tmp_path: Path) -> None:
    text = "warning\n" * 1000 + _TRACEBACK.format("x" * 3_000_000)
    size = 64 << 10
    failure = _describe(tmp_path, _cut(text, *range(size, len(text), size)))
    assert failure.source is EvidenceSource.STDERR
    assert failure.exception_type == "ValueError"


def test_a_traceback_before_a_gap_is_an_old_one(tmp_path: Path) -> None:
    path = tmp_path / "stderr.log"
    piece_path(path, 0).write_text(_TRACEBACK.format("long ago"))
    piece_path(path, 9).write_text("warning\n" * 10)
    failure = _describe(tmp_path, ["warning\n"])
    assert failure.exception_type == ""
    assert "long ago" not in failure.message
    assert "long ago" not in failure.stderr_tail


_DUMP = 'Current thread 0x00007f1542893b80 (most recent call first):\n  File "/u/t.py", line 3 in wait\n' * 30
_ENDINGS = {
    "traceback": (1, _TRACEBACK.format("boom")),
    "terminate": (-6, "terminate called after throwing an instance of 'E'\n  what():  boom\n"),
    "fatal": (-6, f"Fatal Python error: Aborted\n\n{_DUMP}"),
    "terminate, fatal": (
        -6,
        f"terminate called after throwing an instance of 'E'\nFatal Python error: Aborted\n\n{_DUMP}",
    ),
    "syntax": (1, '  File "/u/t.py", line 1\n    def f(:\n          ^\nSyntaxError: invalid syntax\n'),
}


@pytest.mark.parametrize("name", list(_ENDINGS))
def test_the_end_of_stderr_is_what_stands_beside_the_words_of_the_failure(tmp_path: Path, name: str) -> None:
    exitcode, words = _ENDINGS[name]
    text = "loss 0.2\n" * 100 + "the last words\n" + words
    failure = described(tmp_path, text, exitcode=exitcode, ended_ns=1)
    assert failure.traceback
    assert failure.stderr_tail.split("\n") == ["loss 0.2"] * 19 + ["the last words"]
