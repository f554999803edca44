"""Reads the files of what workers are likely to import, so that they are in the node's page cache when workers start.

Run by the workers' interpreter, which may lack this package: this file needs the standard library alone. It imports
none of what it reads. Its argument is a plan in JSON; it prints one line of JSON at its end.

It runs at the lowest priority (SCHED_IDLE), for so long and so many bytes at most, in a few threads: a network
filesystem answers each of many small files as slowly as one.
"""

from __future__ import annotations

import ctypes
import importlib.machinery
import importlib.util
import json
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from typing import Any

_PR_SET_PDEATHSIG = 1
_THREADS = 8
_CHUNK = 1 << 20
_PASSED_OVER = frozenset({"bin", "include", "share", "test", "tests"})
"""Folders of packages whose files no import reads."""
_NATIVE = re.compile(r"\.so(\.\d+)*$")


def main(plan: dict[str, Any]) -> None:
    """Carry out `plan`.

    Args:
        plan: ``agent``, the pid that it ends with; ``roots``, names of top-level modules, the likeliest first;
            ``folder``, of the script; ``bytes`` and ``seconds``, at most.
    """
    _yield_to_others(plan["agent"])
    began = time.monotonic()
    sys.path.insert(0, plan["folder"])
    reader = _Reader(limit=plan["bytes"], deadline=began + plan["seconds"])
    reader.run(files_of(plan["roots"]))
    seconds = round(time.monotonic() - began, 3)
    print(json.dumps({"files": reader.count, "bytes": reader.bytes, "seconds": seconds, "why": reader.why}), flush=True)


def _yield_to_others(agent: int) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != agent:
        os._exit(0)
    try:
        os.nice(19)
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    except OSError:
        pass  # some container refuses it


class _Reader:
    """Reads files in several threads, and throws away what is in them."""

    def __init__(self, *, limit: int, deadline: float) -> None:
        self.count = self.bytes = 0
        self.why = ""
        """Why it ended before all was read."""
        self._limit, self._deadline = limit, deadline
        self._lock = threading.Lock()
        self._paths: Iterator[str] = iter(())

    def run(self, paths: Iterable[str]) -> None:
        self._paths = iter(paths)
        threads = [threading.Thread(target=self._read_all, daemon=True) for _ in range(_THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _read_all(self) -> None:
        buffer = bytearray(_CHUNK)
        while not self.why:
            with self._lock:
                path = next(self._paths, None)
            if path is None:
                return
            try:
                self._read(path, buffer)
            except OSError:
                continue  # removed, or not readable: the import finds out

    def _read(self, path: str, buffer: bytearray) -> None:
        with open(path, "rb", buffering=0) as file:
            while (got := file.readinto(buffer)) and not self.why:
                with self._lock:
                    self.bytes += got
                    if self.bytes >= self._limit:
                        self.why = f"{self._limit} bytes are read"
                    elif time.monotonic() >= self._deadline:
                        self.why = "the time is over"
        with self._lock:
            self.count += 1


def files_of(roots: Iterable[str]) -> Iterator[str]:
    """The files that an import of `roots` may read, then those of what they require; each once."""
    standard = os.path.dirname(os.__file__)
    seen_names: set[str] = set()
    seen_files: set[str] = set()
    level = list(roots)
    while level:
        later: list[str] = []
        for name in level:
            if name in seen_names or name in sys.builtin_module_names:
                continue
            seen_names.add(name)
            found, required = _files_of_one(name, standard)
            later += required
            for path in found:
                if path not in seen_files:
                    seen_files.add(path)
                    yield path
        level = later


def _files_of_one(name: str, standard: str) -> tuple[Iterable[str], list[str]]:
    """The files of a distribution or module, and the names of what it requires."""
    from importlib import metadata

    try:
        found = metadata.distribution(name)
        required = [_name_of(text) for text in found.requires or () if "extra ==" not in text]
        listed = [
            str(found.locate_file(file))
            for file in found.files or ()
            if ".." not in file.parts and _PASSED_OVER.isdisjoint(file.parts[:-1])
        ]
    except (metadata.PackageNotFoundError, OSError, ValueError):
        required, listed = [], []
    if files := [path for path in map(_as_read, listed) if path]:
        return sorted(files, key=lambda path: not _NATIVE.search(path)), required  # libraries are loaded first
    return _walk(name, standard), required


def _name_of(requirement: str) -> str:
    found = re.match(r"[A-Za-z0-9._-]+", requirement)
    return found[0] if found else ""


def _walk(name: str, standard: str) -> Iterator[str]:
    try:
        spec = importlib.util.find_spec(name.replace("-", "_"))
    except (ImportError, ValueError):
        return
    origin = (spec.origin or "") if spec is not None else ""
    if spec is None or (origin.startswith(standard) and "-packages" not in origin):
        return  # the standard library, which this process has read a good part of
    if not spec.submodule_search_locations:
        yield from filter(None, [_as_read(origin)])
        return
    for location in spec.submodule_search_locations:
        for folder, folders, files in os.walk(location):
            folders[:] = sorted({*folders} - _PASSED_OVER - {"__pycache__"})
            yield from filter(None, (_as_read(os.path.join(folder, each)) for each in files))


def _as_read(path: str) -> str:
    """The file that an import of `path` reads; "" where it is none that an import reads."""
    if path.endswith(".py"):
        try:
            os.stat(path)  # as an import does, to compare
            cached = importlib.util.cache_from_source(path)
            return cached if os.path.exists(cached) else path
        except (OSError, NotImplementedError):
            return ""
    return path if _NATIVE.search(path) else ""


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
