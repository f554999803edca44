from __future__ import annotations

import pytest

from hpc_elastic.failures.failure_text import Frame, fingerprint, normalise_message, user_frames

USER = Frame(file="/home/ann/train.py", line=61, function="train_step")
TORCH = Frame(file="/opt/venv/lib/python3.11/site-packages/torch/_tensor.py", line=625, function="backward")
STDLIB = Frame(file="/usr/lib/python3.11/runpy.py", line=198, function="_run")


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("bad batch 17", "bad batch 4711"),
        ("object at 0x7fce9537d620", "object at 0x55aa0000ffff"),
        ("[Rank 0] gone", "[Rank 127] gone"),
        ("Connection closed by peer [10.0.0.1]:24496", "Connection closed by peer [10.0.0.32]:513"),
        ("no file /tmp/tmpab12cd34/x.pt", "no file /scratch/job-77/run/x.pt"),
        ("loss is 1.5e-3", "loss is -2"),
        ("shape [2, 3, 4]", "shape [2, 3]"),
        ("id 3f2a90c1-d4e5-4f00-9000-00000000abcd", "id 00000000-1111-4222-8333-444455556666"),
        ("sha deadbeef12", "sha 0123456789abcdef"),
        ("/run/attempt-000/round-003/rank-00012/x gone", "/run/attempt-001/round-000/rank-00003/x gone"),
        ("a  b\nc", "a b c"),
    ],
)
def test_what_changes_between_occurrences_is_left_out(one: str, other: str) -> None:
    assert normalise_message(one) == normalise_message(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [("bad batch", "bad epoch"), ("no file /a/x.pt", "no file /a/y.pt"), ("KeyError 'lr'", "KeyError 'wd'")],
)
def test_what_tells_failures_apart_stays(one: str, other: str) -> None:
    assert normalise_message(one) != normalise_message(other)


def test_the_users_frames_count_without_their_line_numbers() -> None:
    base = fingerprint(exception_type="ValueError", message="bad 1", frames=[STDLIB, USER, TORCH])
    moved = Frame(file="/scratch/bob/train.py", line=99, function="train_step")
    other = Frame(file="/home/ann/train.py", line=61, function="evaluate")
    assert base == fingerprint(exception_type="builtins.ValueError", message="bad 2", frames=[moved])
    assert base != fingerprint(exception_type="ValueError", message="bad 1", frames=[STDLIB, other, TORCH])
    assert base != fingerprint(exception_type="KeyError", message="bad 1", frames=[STDLIB, USER, TORCH])
    assert base.startswith("ValueError:")


def test_user_frames() -> None:
    recorder = Frame(file="/src/hpc_elastic/failures/error_handler.py", line=1, function="wrapper")
    frozen = Frame(file="<frozen runpy>", line=198, function="_run")
    assert user_frames([STDLIB, frozen, recorder, USER, TORCH]) == (USER,)


def test_signals_and_exit_codes_are_readable() -> None:
    assert fingerprint(exitcode=-11, signal="SIGSEGV") == "signal:SIGSEGV"
    assert fingerprint(exitcode=3) == "exit:3"


def test_no_blanks_whatever_the_type_is_called() -> None:
    name = fingerprint(exception_type="an odd\ntype", message="x")
    assert name.split() == [name]


def test_each_ranks_own_file_is_no_other_failure() -> None:
    frames = (Frame(file="/home/ann/train.py", line=3, function="load"),)

    def name(message: str, kind: str = "FileNotFoundError") -> str:
        return fingerprint(exception_type=kind, message=message, frames=frames)

    missing = "[Errno 2] No such file or directory: '{}'"
    assert name(missing.format("shards/alpha.tar")) == name(missing.format("/data/shards/beta.tar"))
    assert name(missing.format("a")) != name("[Errno 13] Permission denied: 'a'")
    assert name("'lr'", "KeyError") != name("'width'", "KeyError")
