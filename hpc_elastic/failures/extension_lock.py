"""The lock file that a killed build of a torch C++ extension leaves: every later start waits for it, for ever.

torch 2.13's `FileBaton` is a file that exists while a process builds, and that it has open; the kernel does not take it
back. An agent that ends a build itself removes it (`find_held_locks` before, `remove_locks` after); what another kill
left is named where a worker waits for it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct

if TYPE_CHECKING:
    from hpc_elastic.failures.failure_text import Frame

_WAITS_IN = "torch/utils/file_baton.py"


def explain_lock(frames: Iterable[Frame], environ: Mapping[str, str], *, cwd: str = "") -> str:
    """What a worker waits for whose stack stands in `FileBaton.wait`; empty for another one. Lists a few folders.

    Args:
        frames: Of its main thread.
        environ: Of the worker: where extensions are built.
        cwd: Of the worker: where ``load(build_directory=…)`` may build.
    """
    if not any(frame.file.endswith(_WAITS_IN) for frame in frames):
        return ""
    locks = _find_locks(environ, cwd)
    named = " or ".join(map(str, locks)) or "lock in the build folder (TORCH_EXTENSIONS_DIR)"
    return (
        f"it waits for the lock file {named} of a C++ extension's build; where the process that built it was killed, "
        "remove the file: every later start waits for it, too"
    )


class HeldLock(Struct, frozen=True):
    """A file that may be a build's lock, of a process that has it open."""

    path: str
    inode: int


def find_held_locks(pids: Iterable[int]) -> tuple[HeldLock, ...]:
    """The files ``lock`` that processes have open. Reads /proc alone, which no filesystem that hangs can hold up."""
    found = []
    for pid in pids:
        try:
            for fd in os.listdir(f"/proc/{pid}/fd"):
                path = os.readlink(f"/proc/{pid}/fd/{fd}")
                if path.endswith("/lock"):
                    info = Path(f"/proc/{pid}/fdinfo/{fd}").read_text()
                    found += [HeldLock(path, int(line[4:])) for line in info.splitlines() if line.startswith("ino:")]
        except (OSError, ValueError):
            continue  # it has just ended; a kernel before 5.14 gives no inode
    return tuple(found)


def remove_locks(held: Iterable[HeldLock], environ: Mapping[str, str]) -> list[str]:
    """Remove what is left of builds whose processes are gone. May wait for a filesystem.

    Args:
        held: What they had open. Only an empty file in a folder where extensions are built is removed, and only the
            same one: another process may have begun to build since.
        environ: As for `explain_lock`.

    Returns:
        The paths that were removed.
    """
    removed = []
    for lock in held:
        folder = os.path.dirname(lock.path)
        try:
            info = os.lstat(lock.path)
            is_build = Path(folder).is_relative_to(_root(environ)) or os.path.exists(f"{folder}/build.ninja")
            if is_build and (info.st_ino, info.st_size) == (lock.inode, 0):
                os.unlink(lock.path)
                removed.append(lock.path)
        except OSError:
            continue
    return removed


def _root(environ: Mapping[str, str]) -> Path:
    cache = environ.get("XDG_CACHE_HOME") or os.path.join(environ.get("HOME", "/"), ".cache")
    return Path(environ.get("TORCH_EXTENSIONS_DIR") or os.path.join(cache, "torch_extensions"))


def _find_locks(environ: Mapping[str, str], cwd: str) -> list[Path]:
    root = _root(environ)
    try:
        # <root>/<name>/lock, or with a folder of the Python and the accelerator between.
        found = [*root.glob("*/lock"), *root.glob("*/*/lock")]
        if cwd:
            own = (path for depth in ("lock", "*/lock", "*/*/lock") for path in Path(cwd).glob(depth))
            found += [path for path in own if path not in found and (path.parent / "build.ninja").exists()]
        return sorted(found)[:3]
    except OSError:
        return []
