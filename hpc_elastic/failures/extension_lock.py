"""The lock file that a killed build of a torch C++ extension leaves: every later start waits for it, for ever.

torch 2.13's `FileBaton` is a file that exists while a process builds; the kernel does not take it back.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from hpc_elastic.failures.traceback_text import Frame

_WAITS_IN = "torch/utils/file_baton.py"


def explain_lock(frames: Iterable[Frame], environ: Mapping[str, str]) -> str:
    """What a worker waits for whose stack stands in `FileBaton.wait`; empty for another one. Lists a few folders.

    Args:
        frames: Of its main thread.
        environ: Of the worker, or its agent: where extensions are built.
    """
    if not any(frame.file.endswith(_WAITS_IN) for frame in frames):
        return ""
    locks = _find_locks(environ)
    named = " or ".join(map(str, locks)) or "lock in the build folder (TORCH_EXTENSIONS_DIR)"
    return (
        f"it waits for the lock file {named} of a C++ extension's build; where the process that built it was killed, "
        "remove the file: every later start waits for it, too"
    )


def _find_locks(environ: Mapping[str, str]) -> list[Path]:
    cache = environ.get("XDG_CACHE_HOME") or os.path.join(environ.get("HOME", "/"), ".cache")
    root = Path(environ.get("TORCH_EXTENSIONS_DIR") or os.path.join(cache, "torch_extensions"))
    try:
        # <root>/<name>/lock, or with a folder of the Python and the accelerator between.
        return sorted([*root.glob("*/lock"), *root.glob("*/*/lock")])[:3]
    except OSError:
        return []
