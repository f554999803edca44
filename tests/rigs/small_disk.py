"""A small filesystem of its own, in memory, and how it is filled."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.rigs.requirements import require


@contextmanager
def small_disk(path: Path, size: str) -> Iterator[Path]:
    """Mount a filesystem of `size`, such as 4m, at an empty folder. Where that can't be done the test is skipped."""
    why = "" if os.geteuid() == 0 else "only root can mount"
    options = f"size={size},mode=700"
    if not why:
        mount = ["/bin/mount", "-t", "tmpfs", "-o", options, "none", str(path)]
        why = subprocess.run(mount, stderr=subprocess.PIPE, text=True, check=False).stderr.strip()
    require("a filesystem of the test's own", why)
    try:
        yield path
    finally:
        subprocess.run(["/bin/umount", "-l", str(path)], check=True)


def fill_disk(path: Path) -> None:
    """Take all the space there is on `path`'s filesystem, to the last byte."""
    with open(path, "wb", buffering=0) as file:
        size = 1 << 20
        while size:
            try:
                while True:
                    file.write(b"\0" * size)
            except OSError:
                size //= 2
