"""mfusepy on libfuse 3, also where version 2 is installed beside it: it would take that, which behaves otherwise."""

from __future__ import annotations

import ctypes.util
import os

_FUSE_3 = ctypes.util.find_library("fuse3")
if _FUSE_3:
    os.environ.setdefault("FUSE_LIBRARY_PATH", _FUSE_3)

import mfusepy  # noqa: E402

__all__ = ["mfusepy"]
