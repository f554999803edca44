"""What psutil says of this host and its processes, with what it raises taken for "unknown"."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import psutil
import pytest

from hpc_elastic.base.host_facts import available_memory, command_line


def test_the_arguments_of_a_process_are_as_it_was_given_them() -> None:
    words = command_line(os.getpid())
    assert words[1:] == sys.orig_argv[1:]


@pytest.mark.parametrize(
    "error", [psutil.NoSuchProcess(7), psutil.ZombieProcess(7), psutil.AccessDenied(7), PermissionError()]
)
def test_a_process_that_is_gone_or_hidden_has_no_arguments(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: object) -> list[str]:
        raise error

    monkeypatch.setattr(psutil.Process, "cmdline", refuse)
    assert command_line(os.getpid()) == []
    monkeypatch.setattr(psutil, "Process", refuse)
    assert command_line(7) == []


def test_memory_is_what_the_kernel_calls_available(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("Buffers", "Cached", "Shmem", "Active", "Inactive", "Slab", "SReclaimable")
    fields = {"MemTotal": 8 << 20, "MemFree": 100, "MemAvailable": 1 << 20, **dict.fromkeys(names, 0)}
    (tmp_path / "meminfo").write_text("".join(f"{name}: {value} kB\n" for name, value in fields.items()))
    monkeypatch.setattr(psutil, "PROCFS_PATH", str(tmp_path))
    assert available_memory() == 1 << 30
    for torn in ("", "MemTotal\n", "MemTotal: many kB\n"):
        (tmp_path / "meminfo").write_text(torn)
        assert available_memory() is None
