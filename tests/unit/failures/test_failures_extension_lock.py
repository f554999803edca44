"""A hang whose stack waits for the lock file of a C++ extension's build."""

from __future__ import annotations

import os
from pathlib import Path

from hpc_elastic.failures.stacks import HeldLock, explain_lock, find_dump, find_held_locks, remove_locks

DUMP = """\
Fatal Python error: Aborted

Current thread 0x00007f4b437cbb80 (most recent call first):
  File "/env/lib/python3.11/site-packages/torch/utils/file_baton.py", line 48 in wait
  File "/env/lib/python3.11/site-packages/torch/utils/cpp_extension.py", line 2380 in _jit_compile
  File "/env/lib/python3.11/site-packages/torch/utils/cpp_extension.py", line 1700 in load
  File "/home/ann/train.py", line 12 in <module>
"""


def test_the_file_and_the_way_out_are_named(tmp_path: Path) -> None:
    dump = find_dump(DUMP)
    assert dump is not None
    lock = tmp_path / ".cache/torch_extensions/py311_cu128/fused_adam/lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    said = explain_lock(dump.main, {"HOME": str(tmp_path)})
    assert str(lock) in said
    assert "remove the file" in said
    chosen = tmp_path / "elsewhere/fused_adam/lock"
    chosen.parent.mkdir(parents=True)
    chosen.touch()
    said = explain_lock(dump.main, {"HOME": str(tmp_path), "TORCH_EXTENSIONS_DIR": str(tmp_path / "elsewhere")})
    assert str(chosen) in said
    assert str(lock) not in said
    assert "TORCH_EXTENSIONS_DIR" in explain_lock(dump.main, {"HOME": "/nowhere"})
    own = tmp_path / "project/build/lock"  # load(build_directory="build")
    own.parent.mkdir(parents=True)
    own.touch()
    assert str(own) not in explain_lock(dump.main, {"HOME": "/nowhere"}, cwd=str(tmp_path / "project"))
    (own.parent / "build.ninja").touch()
    assert str(own) in explain_lock(dump.main, {"HOME": "/nowhere"}, cwd=str(tmp_path / "project"))


def test_another_hang_waits_for_no_lock() -> None:
    dump = find_dump(DUMP.replace("file_baton", "other"))
    assert dump is not None
    assert explain_lock(dump.main, {"HOME": "/"}) == ""


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
