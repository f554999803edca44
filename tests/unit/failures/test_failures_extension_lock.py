"""A hang whose stack waits for the lock file of a C++ extension's build."""

from __future__ import annotations

from pathlib import Path

from hpc_elastic.failures.extension_lock import explain_lock
from hpc_elastic.failures.stacks import find_dump

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


def test_another_hang_waits_for_no_lock() -> None:
    dump = find_dump(DUMP.replace("file_baton", "other"))
    assert dump is not None
    assert explain_lock(dump.main, {"HOME": "/"}) == ""
