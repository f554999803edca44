"""Where threads stood: faulthandler's dump in a worker's stderr, and what /proc tells."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from hpc_elastic.agent.restart_policy import log_stacks
from hpc_elastic.failures import stacks
from hpc_elastic.failures.stacks import (
    HeldLock,
    RankStacks,
    StackDump,
    describe_stack,
    explain_lock,
    find_dump,
    find_held_locks,
    fold_ranks,
    look_at_process,
    remove_locks,
    short_stack,
    stacks_of,
    syscall_name,
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


def test_all_threads_and_the_one_that_counts() -> None:
    dump = dump_in(DUMP)
    assert [len(thread.frames) for thread in dump.threads] == [2, 0, 2]
    assert dump.text == DUMP.removeprefix("a line before\n").partition("\n\nExtension")[0]
    assert describe_stack(dump.main).splitlines() == [
        "Stack where it hung (most recent call last):",
        '  File "/home/ann/train.py", line 12, in <module>',
        '  File "/home/ann/a file.py", line 7, in inner',
    ]
    assert describe_stack([]) == ""
    assert short_stack(dump.main * 7)[:2] == ["/home/ann/train.py:12 <module>", "/home/ann/a file.py:7 inner"]
    assert len(short_stack(dump.main * 7)) == 12


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


def test_newer_pythons_names_and_c_stack_in_the_last_dump_of_several() -> None:
    dump = dump_in(DUMP + DUMP_314)
    assert dump.text.count("Fatal Python error") == 1
    assert [thread.name for thread in dump.threads] == ["loader", "MainThread"]
    assert [frame.line for frame in dump.main] == [12]
    assert "Binary file" not in dump.text
    assert stacks_of(dump, where="D (disk sleep)") == RankStacks(
        main=("/home/ann/train.py:12 <module>",), others=(("loader", ("/home/ann/data.py:3 get",)),)
    )
    assert stacks_of(None, where="D (disk sleep)") == RankStacks(where="D (disk sleep)")


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


def test_where_there_is_none_or_one_that_was_cut() -> None:
    cut = "Fatal Python error: Segmentation fault\n\nCurrent thread 0x1 (most recent call first):\n"
    assert [find_dump(text) for text in ("", "nothing", cut)] == [None] * 3
    for end in range(0, len(DUMP), 7):
        dump = find_dump(DUMP[:end])
        assert dump is None or all(frame.line for thread in dump.threads for frame in thread.frames)


def test_identical_stacks_fold_and_the_odd_one_comes_first() -> None:
    wait, stuck = ("train.py:9 wait",), ("train.py:6 load",)
    assert fold_ranks([(0, wait), (1, wait), (2, stuck), (3, wait)]) == [((2,), stuck), ((0, 1, 3), wait)]
    assert fold_ranks([]) == []


def test_other_threads_fold_by_name_and_stack() -> None:
    loader, other = ("loader", ("data.py:3 get",)), ("", ("a.py:1 f",))
    found = {rank: RankStacks(main=("m",), others=(loader, loader) if rank else (loader, other)) for rank in range(3)}
    events: list[tuple[str, dict[str, Any]]] = []
    log_stacks(log_into(events), 0, stacks=found, beats=(), now=0.0)  # type: ignore[arg-type]
    [(_, fields)] = events
    assert [(group["ranks"], group["name"]) for group in fields["threads"]] == [([0], ""), ([0, 1, 2], "loader")]
    assert (fields["groups"][0]["ranks"], fields["silent"]) == ([0, 1, 2], [])


# -- what /proc tells of a process that gives no stack


def put(proc: Path, pid: int, *, state: str, wchan: str = "", syscall: str = "", children: str = "") -> None:
    """One process of one thread, as the kernel shows it."""
    for folder in (proc / str(pid), proc / str(pid) / "task" / str(pid)):
        folder.mkdir(parents=True)
        (folder / "status").write_text(f"Name:\tpython\nState:\t{state}\n")
        (folder / "wchan").write_text(wchan)
        (folder / "syscall").write_text(syscall)
    (proc / str(pid) / "task" / str(pid) / "children").write_text(children)


def test_states(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stacks.platform, "machine", lambda: "x86_64")
    put(tmp_path, 42, state="D (disk sleep)", wchan="rpc_wait_bit_killable", syscall="262 0xffffff9c 0x7f 0x0")
    state = look_at_process(42, proc=str(tmp_path))
    assert state.is_uninterruptible
    assert state.describe() == "state D (disk sleep), 1 threads"
    assert state.whereabouts() == "D (disk sleep) in rpc_wait_bit_killable, system call newfstatat"
    assert state.hung_child is None
    put(tmp_path, 44, state="T (stopped)")
    assert look_at_process(44, proc=str(tmp_path)).is_stopped
    gone = look_at_process(43, proc=str(tmp_path))
    assert (gone.describe(), gone.whereabouts()) == ("gone", "")
    own = look_at_process(os.getpid())
    assert (own.state[:1], own.threads[0].pid, own.is_stopped) == ("R", os.getpid(), False)


def test_a_child_that_does_not_come_to_its_program_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The parent of a vfork waits in D state too: the child is where it hangs."""
    monkeypatch.setattr(stacks.platform, "machine", lambda: "x86_64")
    put(tmp_path, 42, state="D (disk sleep)", wchan="kernel_clone", syscall="58 0x0", children="50 7")
    put(tmp_path, 7, state="S (sleeping)")
    put(tmp_path, 50, state="S (sleeping)", wchan="request_wait_answer", syscall="59 0x1")
    state = look_at_process(42, proc=str(tmp_path))
    assert state.hung_child is not None
    assert [child.pid for child in state.children] == [50, 7]
    assert state.whereabouts() == (
        "D (disk sleep) in kernel_clone, system call vfork; its child 50 (python): "
        "S (sleeping) in request_wait_answer, system call execve"
    )
    (tmp_path / "42" / "task" / "42" / "syscall").write_text("0 0x3")
    assert look_at_process(42, proc=str(tmp_path)).hung_child is None, "nor is it blamed for what its parent reads"


def test_who_is_kept_from_its_call_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stacks, "_SYSCALL_SECONDS", 0.05)
    put(tmp_path, 42, state="S (sleeping)", wchan="w")
    pipe = tmp_path / "42" / "task" / "42" / "syscall"
    pipe.unlink()
    os.mkfifo(pipe)  # who opens it to read waits for a writer
    assert look_at_process(42, proc=str(tmp_path)).whereabouts() == "S (sleeping) in w"
    os.close(os.open(pipe, os.O_RDWR | os.O_NONBLOCK))


@pytest.mark.parametrize(
    ("text", "machine", "name"),
    [
        ("202 0x1 0x2", "x86_64", "futex"),
        ("98 0x1", "aarch64", "futex"),
        ("77777 0x1", "x86_64", "77777"),
        ("0 0x3", "ppc64le", "0"),
        ("running", "x86_64", ""),
        ("-1 0x7ffc 0x7f", "x86_64", ""),
        ("", "x86_64", ""),
    ],
)
def test_system_calls_by_name(text: str, machine: str, name: str) -> None:
    assert syscall_name(text, machine) == name


# -- a hang whose stack waits for the lock file of a C++ extension's build

WAITS_FOR_LOCK = """\
Fatal Python error: Aborted

Current thread 0x00007f4b437cbb80 (most recent call first):
  File "/env/lib/python3.11/site-packages/torch/utils/file_baton.py", line 48 in wait
  File "/env/lib/python3.11/site-packages/torch/utils/cpp_extension.py", line 2380 in _jit_compile
  File "/env/lib/python3.11/site-packages/torch/utils/cpp_extension.py", line 1700 in load
  File "/home/ann/train.py", line 12 in <module>
"""


def test_the_file_and_the_way_out_are_named(tmp_path: Path) -> None:
    main = dump_in(WAITS_FOR_LOCK).main
    lock = tmp_path / ".cache/torch_extensions/py311_cu128/fused_adam/lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    said = explain_lock(main, {"HOME": str(tmp_path)})
    assert str(lock) in said
    assert "remove the file" in said
    chosen = tmp_path / "elsewhere/fused_adam/lock"
    chosen.parent.mkdir(parents=True)
    chosen.touch()
    said = explain_lock(main, {"HOME": str(tmp_path), "TORCH_EXTENSIONS_DIR": str(tmp_path / "elsewhere")})
    assert str(chosen) in said
    assert str(lock) not in said
    assert "TORCH_EXTENSIONS_DIR" in explain_lock(main, {"HOME": "/nowhere"})
    own = tmp_path / "project/build/lock"  # load(build_directory="build")
    own.parent.mkdir(parents=True)
    own.touch()
    assert str(own) not in explain_lock(main, {"HOME": "/nowhere"}, cwd=str(tmp_path / "project"))
    (own.parent / "build.ninja").touch()
    assert str(own) in explain_lock(main, {"HOME": "/nowhere"}, cwd=str(tmp_path / "project"))
    assert explain_lock(dump_in(WAITS_FOR_LOCK.replace("file_baton", "other")).main, {"HOME": str(tmp_path)}) == ""


def test_what_a_stopped_build_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    environ = {"TORCH_EXTENSIONS_DIR": str(tmp_path / "ext")}
    paths = [tmp_path / name for name in ("ext/fused/lock", "own/lock", "other/lock", "ext/full/lock", "ext/new/lock")]
    opened = []
    for path in paths:
        path.parent.mkdir(parents=True)
        opened.append(os.open(path, os.O_CREAT | os.O_EXCL))  # as FileBaton does
    (tmp_path / "own/build.ninja").touch()  # load(build_directory=…)
    held = find_held_locks([os.getpid()])
    assert {lock.path for lock in held} >= set(map(str, paths))
    for fd in opened:
        os.close(fd)
    paths[3].write_text("not a baton")
    os.rename(paths[4], tmp_path / "kept")  # its inode stays in use
    paths[4].touch()  # another process builds now
    assert sorted(remove_locks(held, environ)) == sorted(map(str, paths[:2]))
    assert [path.exists() for path in paths] == [False, False, True, True, True]
    assert remove_locks([HeldLock(str(paths[0]), 1)], environ) == [], "it is gone"
    assert find_held_locks([1 << 22]) == ()
