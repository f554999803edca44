"""torch's Store interface in a folder: real processes, torch's PrefixStore over it, and a process group."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpc_elastic.base.clock import SystemClock
from hpc_elastic.store.file_store import FileStore
from hpc_elastic.store.key_value import KeyValueStore
from tests.rigs.nfs_emulator import NfsEmulator

pytestmark = pytest.mark.torch

# Its own process: the one that runs the tests stays free of torch.
_RANK = """
import gc, sys
from datetime import timedelta
import torch, torch.distributed as dist
from hpc_elastic.pytorch.file_system_store import FileSystemStore
root, rank, size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
store = FileSystemStore(root, timeout=timedelta(seconds=60))
store.wait(["go"])
seen = [store.add("count", 1) for _ in range(20)]
assert seen == sorted(set(seen))
store.append("log", f"{rank},")
del store
# Nobody keeps the store but torch, which keeps half of it.
options = {"timeout": timedelta(seconds=60), "prefix": "pg/"}
dist.init_process_group("gloo", store=FileSystemStore(root, **options), rank=rank, world_size=size)
gc.collect()
for group in (None, dist.new_group()):
    total = torch.tensor([rank + 1.0])
    dist.all_reduce(total, group=group)
    assert total.item() == size * (size + 1) / 2, total
    dist.barrier(group=group)
dist.destroy_process_group()
print("held")
"""


@pytest.fixture(params=["one folder", "two mounts"])
def roots(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[list[Path]]:
    """The same folder, as one process after another sees it."""
    (tmp_path / "store").mkdir(mode=0o700)
    if request.param == "one folder":
        yield [tmp_path / "store"]
        return
    with NfsEmulator(tmp_path, mounts=2) as emulator:
        yield [path / "store" for path in emulator.paths]


def test_many_processes_lose_no_increment_and_form_a_process_group(roots: list[Path]) -> None:
    size = 3
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", _RANK, str(roots[rank % len(roots)]), str(rank), str(size)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(size)
    ]
    try:
        values = KeyValueStore(FileStore(roots[0], clock=SystemClock()), "kv", clock=SystemClock())
        values.set("go", b"")
        for rank in ranks:
            output, _ = rank.communicate(timeout=300)
            assert rank.returncode == 0, output
            assert "held" in output
        assert values.get_waiting("count", 20) == b"%d" % (20 * size)
        log = values.get_waiting("log", 20)
        assert sorted(log.decode().split(",")) == ["", *(str(rank) for rank in range(size))]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
            if rank.stdout is not None:
                rank.stdout.close()
