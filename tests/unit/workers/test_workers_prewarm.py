"""Which files are read before workers start, and that nothing of it can be in the way."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hpc_elastic.workers import prewarm


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """``lib``, with a distribution that lists its files and requires ``need``, which has none; ``mine`` is a module."""
    site = tmp_path / "site-packages"
    files = {
        "lib/__init__.py": "raise SystemExit('imported')",
        "lib/deep/inner.py": "x = 1",
        "lib/_c.cpython-311-x86_64-linux-gnu.so": "native",
        "lib/lib/libmath.so.1.2": "native",
        "lib/tests/test_x.py": "x",
        "lib/include/x.h": "x",
        "lib/data.bin": "x",
        "need/__init__.py": "x = 1",
        "need/tests/a.py": "x = 1",
        "optional/__init__.py": "",
        "mine.py": "x = 1",
    }
    for name, text in files.items():
        path = site / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    info = site / "lib-1.0.dist-info"
    info.mkdir()
    listed = [name for name in files if name.startswith("lib/")]
    (info / "RECORD").write_text("".join(f"{name},,\n" for name in [*listed, "../../bin/tool.py", "lib/gone.py"]))
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: lib\nVersion: 1.0\nRequires-Dist: need>=2; python_version > '3'\n"
        "Requires-Dist: optional; extra == 'all'\nRequires-Dist: lib\n"
    )
    monkeypatch.syspath_prepend(str(site))
    return site


def _names(found: list[str], site: Path) -> list[str]:
    return [os.path.relpath(path, site) for path in found]


def test_libraries_come_first_then_modules_then_what_is_required(library: Path) -> None:
    cached = Path(importlib.util.cache_from_source(str(library / "lib/deep/inner.py")))
    cached.parent.mkdir()
    cached.write_text("code")
    assert _names(list(prewarm.files_of(["lib", "mine", "no_such", "sys", "json", "lib"])), library) == [
        "lib/_c.cpython-311-x86_64-linux-gnu.so",
        "lib/lib/libmath.so.1.2",
        "lib/__init__.py",
        str(cached.relative_to(library)),
        "mine.py",
        "need/__init__.py",
    ]


def _run(library: Path, **changes: Any) -> dict[str, Any]:
    plan = {
        "agent": os.getpid(),
        "roots": ["lib", "mine"],
        "folder": str(library),
        "bytes": 1 << 20,
        "seconds": 60,
        **changes,
    }
    command = [sys.executable, "-c", Path(prewarm.__file__).read_text(), json.dumps(plan)]
    out = subprocess.run(command, stdout=subprocess.PIPE, check=True, cwd="/").stdout
    found: dict[str, Any] = json.loads(out) if out else {}
    return found


def test_it_reads_all_and_imports_nothing_of_it(library: Path) -> None:
    found = _run(library)
    assert (found["files"], found["why"]) == (6, "")
    assert found["bytes"] == sum(len((library / name).read_bytes()) for name in _names_read(library))


def _names_read(library: Path) -> list[str]:
    return _names(list(prewarm.files_of(["lib", "mine"])), library)


def test_it_ends_at_its_limits_and_with_its_agent(library: Path) -> None:
    (library / "lib/_c.cpython-311-x86_64-linux-gnu.so").write_bytes(bytes(3 << 20))
    found = _run(library)
    assert found["why"] == "1048576 bytes are read"
    assert found["bytes"] <= (1 << 20) + 8 * 1024
    assert _run(library, seconds=0, bytes=1 << 30)["why"] == "the time is over"
    assert _run(library, agent=1) == {}
