"""How the text report writes what does not fit on a line."""

from __future__ import annotations

from pathlib import Path

from msgspec.structs import replace

from hpc_elastic.failures.excerpt import fold_repeats
from hpc_elastic.failures.ranking import FailureClass
from hpc_elastic.report.collect import collect_run
from hpc_elastic.report.document import Document
from hpc_elastic.report.render_text import fit_traceback, headline_lines, render_job_log
from tests.rigs.run_builder import RunBuilder, make_failure


def test_a_headline_breaks_between_words_and_says_that_it_was_cut() -> None:
    text = "RuntimeError: " + "word " * 100
    lines = headline_lines(text, 60)
    assert len(lines) == 5
    assert all(len(line) <= 60 and line == line.rstrip() for line in lines)
    assert all(line.endswith("word") for line in lines[:4])
    assert lines[4].endswith(" ...")
    assert headline_lines("x" * 70, 60) == ["  " + "x" * 58, "  " + "x" * 12]
    assert headline_lines("", 60) == ["  (no message)"]


def test_a_headline_is_without_the_place_in_a_librarys_source() -> None:
    text = "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:538] Connection closed by peer"
    assert headline_lines(text, 120) == ["  RuntimeError: Connection closed by peer"]


def test_a_long_path_in_a_traceback_loses_its_beginning_not_the_function() -> None:
    line = f'      File "/shared{"/folder" * 20}/lib/python3.11/site-packages/torch/optim.py", line 83, in wrapper'
    shown = fit_traceback(line, 80)
    assert len(shown) <= 80
    assert shown.startswith('      File "...')
    assert shown.endswith('/torch/optim.py", line 83, in wrapper')
    assert fit_traceback(line, 300) == line
    assert fit_traceback("    x = " + "1" * 100, 60).endswith("...")


def test_the_same_frame_again_and_again_is_folded() -> None:
    frame = '  File "/u/train.py", line 5 in deep'
    assert fold_repeats(["a", *[frame] * 100, "b"]) == [
        "a",
        *[frame] * 3,
        "  [Previous line repeated 97 more times]",
        "b",
    ]
    assert fold_repeats([frame] * 4 + ["x"] * 9) == [frame] * 4 + ["x"] * 9


def test_of_64_ranks_the_job_log_names_one_and_counts_the_others(tmp_path: Path) -> None:
    builder = RunBuilder(tmp_path / "run", nodes=8, per_node=8)
    builder.attempt(0)
    builder.round(0, 0, at=1)
    builder.fail(make_failure(0, at=9, per_node=8, exception="ValueError: bad"))
    for rank in range(1, 64):
        text = "RuntimeError: Connection closed by peer [10.0.0.2]:3216" if rank % 2 else "DistBackendError: NCCL error"
        builder.fail(replace(make_failure(rank, at=10, per_node=8, exception=text), failure_class=FailureClass.SYMPTOM))
    builder.end(0, at=12, outcome="failed", code=1)
    text = render_job_log(Document(collect_run(builder.root)))
    assert "  63 other ranks ended with it: RuntimeError x32, DistBackendError x31\n" in text
    assert text.count("\n") <= 25
