"""What /proc tells of a process that gives no stack."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hpc_elastic.failures import stacks
from hpc_elastic.failures.stacks import look_at_process, syscall_name


def put(proc: Path, pid: int, *, state: str, wchan: str = "", syscall: str = "", children: str = "") -> None:
    """One process of one thread, as the kernel shows it."""
    for folder in (proc / str(pid), proc / str(pid) / "task" / str(pid)):
        folder.mkdir(parents=True)
        (folder / "status").write_text(f"Name:\tpython\nState:\t{state}\n")
        (folder / "wchan").write_text(wchan)
        (folder / "syscall").write_text(syscall)
    (proc / str(pid) / "task" / str(pid) / "children").write_text(children)


def test_this_process_as_the_kernel_sees_it() -> None:
    state = look_at_process(os.getpid())
    assert state.state.startswith("R")
    assert state.thread_count >= 1
    assert state.threads[0].pid == os.getpid()
    assert not state.is_stopped


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


def test_a_child_is_not_blamed_for_what_its_parent_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stacks.platform, "machine", lambda: "x86_64")
    put(tmp_path, 42, state="D (disk sleep)", wchan="x", syscall="0 0x3", children="50")
    put(tmp_path, 50, state="D (disk sleep)")
    assert look_at_process(42, proc=str(tmp_path)).hung_child is None


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
