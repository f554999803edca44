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
_SEMANTICS = """
import pickle, sys
from datetime import timedelta
import torch.distributed as dist
from hpc_elastic.pytorch.file_system_store import FileSystemStore

def raises(kind, call):
    try:
        call()
    except kind:
        return True
    return False

root = sys.argv[1]
ours = FileSystemStore(root, timeout=timedelta(seconds=30))
assert ours.timeout == timedelta(seconds=30) and ours.has_extended_api()
for store in (ours, dist.PrefixStore("torch's", ours), ours.prefixed("own"), ours.prefixed("own").clone()):
    store.set("text", "v\\u00fc"); store.set("bytes", b"\\xff\\x00")
    assert store.get("text") == "v\\u00fc".encode() and store.get("bytes") == b"\\xff\\x00"
    start = store.add("count", 2)
    assert store.add("count", 3) == start + 3 and store.get("count") == b"%d" % (start + 3)
    assert store.compare_set("cas", "none", "x") in (b"none", b"b")
    store.compare_set("cas", "", "a"); store.compare_set("cas", "a", "b")
    assert store.get("cas") == b"b"
    store.multi_set(["m1", "m2"], ["1", "2"])
    assert store.multi_get(["m1", "m2"]) == [b"1", b"2"]
    store.set("long", ""); store.append("long", "a"); store.append("long", "b")
    assert store.get("long") == b"ab"
    assert store.check(["text", "count"]) and not store.check(["text", "nothing"])
    store.wait(["text"]); store.wait(["text"], timedelta(seconds=1))
    assert raises(dist.DistStoreError, lambda: store.wait(["nothing"], timedelta(seconds=0.05)))
    store.set_timeout(timedelta(seconds=0.05))
    assert raises(dist.DistStoreError, lambda: store.get("nothing"))
    store.set_timeout(timedelta(seconds=30))
    if isinstance(store, dist.PrefixStore):
        assert store.underlying_store.get("torch's/text") == "v\\u00fc".encode()
        continue  # what it does not hand on: tests/contract/test_torch_store_alike.py
    before = store.num_keys()
    assert store.delete_key("text") and not store.delete_key("text") and store.num_keys() == before - 1
    assert "m1" in store.list_keys()
assert ours.prefixed("own").get("m1") == ours.get("own/m1") == b"1"
copy = pickle.loads(pickle.dumps(ours.prefixed("own")))
assert copy.get("m2") == b"2" and copy.timeout == timedelta(seconds=30)
print("held")
"""

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


def test_every_method_alone_and_behind_a_prefix(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _SEMANTICS, str(tmp_path / "store")], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["held"]


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
