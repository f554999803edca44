"""Ranks that count together in a torch store, each in a process of its own.

Run as ``python -m tests.rigs.store_ranks KIND STORE``, it shows what a store makes of it on a filesystem of the rig.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Counted:
    total: int | None
    """What the store says at the end; None where a rank did not come to its end."""
    sums: list[int]
    """All that `add` returned, sorted."""
    seconds: float
    stuck: int = 0
    """Ranks that were still running at the deadline."""
    errors: tuple[str, ...] = ()


def count_together(paths: Sequence[Path], store: str, *, each: int, seconds: float) -> Counted:
    """Let one rank for each path `add` 1 `each` times to the same key, wait for all others, and read the sum.

    Args:
        paths: The store's, as each rank sees it.
        store: ``ours`` (FileSystemStore, a folder) or ``torch`` (torch's FileStore, a file).
        each: How often.
        seconds: After which a rank counts as stuck, and is killed.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["hpc_elastic.pytorch.file_system_store"])  # torch is imported once
    results = context.SimpleQueue()
    ranks = [
        context.Process(target=_rank, args=(str(path), store, len(paths), each, results), daemon=True) for path in paths
    ]
    began = time.monotonic()
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(max(0.0, began + seconds - time.monotonic()))
    took = time.monotonic() - began
    stuck = sum(rank.is_alive() for rank in ranks)
    for rank in ranks:
        rank.kill()
        rank.join()
    found = []
    while not results.empty():
        found.append(results.get())
    errors = tuple(result for result in found if isinstance(result, str))
    good = [result for result in found if not isinstance(result, str)]
    totals = {total for total, _ in good}
    total = totals.pop() if len(totals) == 1 and len(good) == len(ranks) else None
    sums = sorted(itertools.chain.from_iterable(sums for _, sums in good))
    return Counted(total=total, sums=sums, seconds=took, stuck=stuck, errors=errors)


def _rank(path: str, kind: str, world: int, each: int, results: Any) -> None:
    import torch.distributed as dist

    from hpc_elastic.pytorch.file_system_store import FileSystemStore

    try:
        patience = timedelta(seconds=240)
        if kind == "ours":
            store: Any = FileSystemStore(path, timeout=patience)
        else:
            store = dist.FileStore(path, world)
            store.set_timeout(patience)
        sums = [int(store.add("count", 1)) for _ in range(each)]
        if store.add("done", 1) == world:
            store.set("all done", "yes")
        store.wait(["all done"], patience)
        results.put((int(store.add("count", 0)), sums))
    except Exception as error:
        results.put(f"{type(error).__name__}: {error}")


def main(argv: list[str]) -> int:
    from tests.rigs.network_mounts import KINDS, NetworkMounts
    from tests.rigs.nfs_emulator import NfsEmulator

    parser = argparse.ArgumentParser(prog="python -m tests.rigs.store_ranks")
    parser.add_argument("kind", choices=[*KINDS, "emulated"])
    parser.add_argument("store", choices=["ours", "torch"])
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--each", type=int, default=25)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--times", type=int, default=3)
    options = parser.parse_args(argv)
    with ExitStack() as stack:
        if options.kind == "emulated":
            import tempfile

            backing = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            mounts = stack.enter_context(NfsEmulator(backing)).paths
        else:
            mounts = stack.enter_context(NetworkMounts(options.kind)).paths
        for number in range(options.times):
            paths = [mounts[rank % 2] / f"store-{number}" for rank in range(options.ranks)]
            counted = count_together(paths, options.store, each=options.each, seconds=options.seconds)
            wrong = options.ranks * options.each - len(set(counted.sums))
            print(
                f"{options.kind}, {options.store}: total {counted.total} of {options.ranks * options.each}, "
                f"{wrong} sums missing, {counted.stuck} stuck, {counted.seconds:.1f} s, {counted.errors[:1]}",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
