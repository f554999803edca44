"""Where threads stood: faulthandler's dump in a worker's stderr, and what /proc tells."""

from __future__ import annotations

from typing import Any

import pytest

from hpc_elastic.agent.restart_policy import log_stacks
from hpc_elastic.failures.stacks import (
    RankStacks,
    StackDump,
    describe_stack,
    find_dump,
    fold_ranks,
    short_stack,
    stacks_of,
)
from tests.rigs.event_pairs import log_into

# CPython 3.11, a worker with a helper thread, hung in a nested call.
DUMP = """\
a line before
Fatal Python error: Aborted

Thread 0x00007fe7d7fff6c0 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 327 in wait
  File "/usr/lib/python3.11/threading.py", line 1002 in _bootstrap

Thread 0x00007fe7d8ff96c0 (most recent call first):
  <no Python frame>

Current thread 0x00007fe7e8a3f740 (most recent call first):
  File "/home/ann/a file.py", line 7 in inner
  File "/home/ann/train.py", line 12 in <module>

Extension modules: numpy.core._multiarray_umath, torch._C (total: 2)
and after
"""
CHILD = """\
Fatal Python error: Aborted

Current thread 0x00007fe7e8a3f740 (most recent call first):
  File "/home/ann/data.py", line 4 in fetch
  File "/usr/lib/python3.11/multiprocessing/process.py", line 314 in _bootstrap
  File "/home/ann/train.py", line 12 in <module>
"""


def dump_in(text: str, *, may_be_child: bool = True) -> StackDump:
    found = find_dump(text, may_be_child=may_be_child)
    assert found is not None
    return found


def test_the_dump_of_a_child_is_no_worker_s_own() -> None:
    dump = dump_in(CHILD + DUMP, may_be_child=False)
    assert dump.main[-1].function == "inner"
    assert [child.main[-1].function for child in dump.children] == ["fetch"]
    assert find_dump(DUMP + CHILD, may_be_child=False) is None
    assert find_dump(CHILD) is not None


HEAD = "Fatal Python error: Aborted\n\n"
# CPython 3.14: threads have names, and the C stack follows.
DUMP_314 = """\
Fatal Python error: Aborted

Thread 0x00007fe7d7fff6c0 [loader] (most recent call first):
  File "/home/ann/data.py", line 3 in get

Current thread 0x00007fe7e8a3f740 [MainThread] (most recent call first):
  File "/home/ann/train.py", line 12 in <module>

Current thread's C stack trace (most recent call first):
  Binary file "python", at _Py_DumpStack+0x41 [0x5f3c9a]
"""


def test_all_threads_and_the_one_that_counts() -> None:
    dump = dump_in(DUMP)
    assert [len(thread.frames) for thread in dump.threads] == [2, 0, 2]
    assert [(frame.file, frame.line, frame.function) for frame in dump.main] == [
        ("/home/ann/train.py", 12, "<module>"),
        ("/home/ann/a file.py", 7, "inner"),
    ]
    assert dump.text.startswith("Fatal Python error: Aborted\n")
    assert dump.text.endswith("line 12 in <module>")
    assert "Extension modules" not in dump.text


def test_the_main_thread_is_the_last_whoever_got_the_signal() -> None:
    """In a process that was stopped any thread may get it; one without Python is not in the list at all."""
    for first, last in (("Current thread", "Thread"), ("Thread", "Thread")):
        dump = dump_in(
            f'{HEAD}{first} 0x00007fe7d7fff6c0 (most recent call first):\n  File "loader.py", line 3 in get\n\n'
            f'{last} 0x00007fe7e8a3f740 (most recent call first):\n  File "train.py", line 12 in <module>\n'
        )
        assert short_stack(dump.main) == ["train.py:12 <module>"]


def test_the_main_thread_is_not_among_a_hundred_newer_ones() -> None:
    dump = dump_in(
        f'{HEAD}Current thread 0x00007fe7e8a3f740 (most recent call first):\n  File "pool.py", line 12 in work\n\n'
        'Thread 0x00007fe7d7fff6c0 (most recent call first):\n  File "loader.py", line 3 in get\n\n...\n'
    )
    assert dump.main == ()
    assert len(stacks_of(dump, where="S (sleeping)").others) == 2
    assert stacks_of(dump, where="S (sleeping)").where == "S (sleeping)"


def test_newer_pythons_names_and_c_stack() -> None:
    dump = dump_in(DUMP_314)
    assert [thread.name for thread in dump.threads] == ["loader", "MainThread"]
    assert [frame.line for frame in dump.main] == [12]
    assert "Binary file" not in dump.text


def test_the_last_dump_of_several() -> None:
    dump = dump_in(DUMP + DUMP_314)
    assert dump.text.count("Fatal Python error") == 1
    assert dump.threads[0].name == "loader"


@pytest.mark.parametrize(
    "text",
    ["", "nothing", "Fatal Python error: Segmentation fault\n\nCurrent thread 0x1 (most recent call first):\n"],
)
def test_where_there_is_none(text: str) -> None:
    assert find_dump(text) is None


@pytest.mark.parametrize("cut", range(0, len(DUMP), 7))
def test_a_dump_that_was_cut_is_read_as_far_as_it_goes(cut: int) -> None:
    dump = find_dump(DUMP[:cut])
    assert dump is None or all(frame.line for thread in dump.threads for frame in thread.frames)


def test_a_stack_reads_like_a_traceback() -> None:
    dump = dump_in(DUMP)
    assert describe_stack(dump.main).splitlines() == [
        "Stack where it hung (most recent call last):",
        '  File "/home/ann/train.py", line 12, in <module>',
        '  File "/home/ann/a file.py", line 7, in inner',
    ]
    assert describe_stack([]) == ""
    assert short_stack(dump.main * 7)[:2] == ["/home/ann/train.py:12 <module>", "/home/ann/a file.py:7 inner"]
    assert len(short_stack(dump.main * 7)) == 12


def test_identical_stacks_fold_and_the_odd_one_comes_first() -> None:
    wait, stuck = ("train.py:9 wait",), ("train.py:6 load",)
    assert fold_ranks([(0, wait), (1, wait), (2, stuck), (3, wait)]) == [((2,), stuck), ((0, 1, 3), wait)]
    assert fold_ranks([]) == []


def test_all_threads_of_a_rank_and_the_kernel_s_words_where_there_is_no_stack() -> None:
    found = stacks_of(find_dump(DUMP_314), where="D (disk sleep)")
    assert found == RankStacks(
        main=("/home/ann/train.py:12 <module>",), others=(("loader", ("/home/ann/data.py:3 get",)),)
    )
    assert stacks_of(None, where="D (disk sleep)") == RankStacks(where="D (disk sleep)")


def test_other_threads_fold_by_name_and_stack() -> None:
    loader, other = ("loader", ("data.py:3 get",)), ("", ("a.py:1 f",))
    stacks = {rank: RankStacks(main=("m",), others=(loader, loader) if rank else (loader, other)) for rank in range(3)}
    events: list[tuple[str, dict[str, Any]]] = []
    log_stacks(log_into(events), 0, stacks=stacks, beats=(), now=0.0)  # type: ignore[arg-type]
    [(_, fields)] = events
    assert [(group["ranks"], group["name"]) for group in fields["threads"]] == [([0], ""), ([0, 1, 2], "loader")]
    assert (fields["groups"][0]["ranks"], fields["silent"]) == ([0, 1, 2], [])
