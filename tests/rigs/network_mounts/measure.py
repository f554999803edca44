"""How long a change by one client takes until the store of another shows it (docs/reference/filesystems.md)."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from hpc_elastic.base.clock import SystemClock
from hpc_elastic.store.file_store import FileStore

_TIMES = 8
_PATIENCE = 60.0


def measure(mounts: list[Path]) -> dict[str, tuple[float, float]]:
    """Median and longest delay, in seconds, of each kind of change; ``put`` is the put's own time."""
    clock = SystemClock()
    writer, reader = (FileStore(path / "measured", clock=clock) for path in mounts[:2])
    writer.make_folder("log")
    delays: dict[str, list[float]] = {
        "put": [],
        "listing": [],
        "listing after an invalidation": [],
        "by name": [],
        "cell": [],
    }
    for number in range(_TIMES):
        listed, named = f"log/{number}", f"kv/{number}"
        reader.list("log")
        began = time.monotonic()
        writer.put_if_absent(listed, "v")
        delays["put"].append(time.monotonic() - began)
        delays["listing"].append(_until(lambda name=str(number): name in reader.list("log")))  # type: ignore[misc]

        writer.put_if_absent(f"stir/{number}-before", "v")
        reader.list("stir")
        writer.put_if_absent(f"stir/{number}", "v")

        def shows_invalidated(name: str = str(number)) -> bool:
            reader.invalidate("stir")
            return name in reader.list("stir")

        delays["listing after an invalidation"].append(_until(shows_invalidated))
        reader.get(named)
        writer.put_if_absent(named, "v")
        delays["by name"].append(_until(lambda named=named: reader.get(named) is not None))  # type: ignore[misc]
        writer.overwrite("hb/a", f"{number} before")
        before = reader.version("hb/a")
        time.sleep(0.3)
        before = reader.version("hb/a")
        writer.overwrite("hb/a", f"{number} after")
        delays["cell"].append(_until(lambda before=before: reader.version("hb/a") != before))  # type: ignore[misc]
    return {what: (sorted(found)[len(found) // 2], max(found)) for what, found in delays.items()}


def _until(shows: Callable[[], bool]) -> float:
    began = time.monotonic()
    while not shows():
        if time.monotonic() - began > _PATIENCE:
            return float("inf")
        time.sleep(0.005)
    return time.monotonic() - began
